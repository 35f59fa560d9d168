"""Observed models of Hugging Face transformers: unchanged outputs, and the weights of eager attention.

The models are tiny, in float32, with random weights. Maps are compared with the weights that transformers
returns for `attn_implementation="eager"` and `output_attentions=True`.
"""

from __future__ import annotations

import math
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

import manyheads
from manyheads.observe import Recording, observe, transformers
from manyheads.observe.transformers import calls

tf = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**IDS, **WIDTHS, "max_position_embeddings": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2}
SIZED = {**DECODER, "head_dim": 8}
SLIDING = {**SIZED, "sliding_window": 5}
PICTURE = {**WIDTHS, "image_size": 16, "patch_size": 4}
SEQ2SEQ: dict[str, Any] = {**IDS, "d_model": 32, "decoder_start_token_id": 1}
for part in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", SLIDING),
    "qwen3": ("Qwen3ForCausalLM", SIZED),
    "gemma2": ("Gemma2ForCausalLM", {**SLIDING, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOssForCausalLM", {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "phi": ("PhiForCausalLM", DECODER),
    "bert": ("BertModel", ENCODER),
    "t5": (
        "T5ForConditionalGeneration",
        {**IDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    "vit": ("ViTModel", PICTURE),
    "clip": (
        "CLIPModel",
        {"text_config": {**ENCODER, "projection_dim": 16}, "vision_config": PICTURE, "projection_dim": 16},
    ),
    # Other masks, biases and widths.
    "llama4": (
        "Llama4ForCausalLM",
        {**SIZED, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 5}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**ENCODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 2},
    ),
    "modernbert": (
        "ModernBertModel",
        {**ENCODER, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1}
        | {"sep_token_id": 2},
    ),
}
BOTH = [
    (name, implementation)
    for implementation in ("eager", "sdpa")
    for name in MODELS
    if implementation == "eager" or name not in ("gemma2", "gpt_oss")  # which have no sdpa
]
DECODERS = [name for name, (model, _) in MODELS.items() if model.endswith(("ForCausalLM", "LMHeadModel"))]
SEQ2SEQS = ["t5", "bart", "whisper"]


def build(name: str, implementation: str, **changes: Any) -> nn.Module:
    """A tiny model, with the same random weights for every implementation."""
    model, options = MODELS[name]
    torch.manual_seed(1)
    kind = getattr(tf, model)
    made = kind._from_config(kind.config_class(**options, **changes), attn_implementation=implementation)
    with torch.no_grad():
        for path, weight in made.named_parameters():
            if "norm" not in path and "ln_" not in path and "layrnorm" not in path:
                weight.normal_(0, 0.3)
    return made.eval()


def inputs(name: str, padding: str | None = None) -> dict[str, Tensor]:
    """A batch of two, the second one padded."""
    mask = torch.ones(2, 12, dtype=torch.long)
    if padding == "right":
        mask[1, 8:] = 0
    elif padding == "left":
        mask[1, :4] = 0
    elif padding == "holes":
        mask[1, [2, 3, 9]] = 0
    given: dict[str, Tensor] = {} if padding is None else {"attention_mask": mask}
    if name in ("vit", "clip"):
        given["pixel_values"] = torch.randn(2, 3, 16, 16)
    if name == "vit":
        return given
    if name == "whisper":
        given = {"input_features": torch.randn(2, 8, 32)}
    else:
        given["input_ids"] = torch.randint(3, 60, (2, 12))
    if name in SEQ2SEQS:
        given["decoder_input_ids"] = torch.randint(3, 60, (2, 7))
        if padding is not None:
            given["decoder_attention_mask"] = torch.ones(2, 7, dtype=torch.long)
            given["decoder_attention_mask"][1, 4:] = 0
    return given


def answer(out: Any) -> list[Tensor]:
    """Return the outputs of a model, without its attentions."""
    names = ("logits", "last_hidden_state", "logits_per_image", "text_embeds", "encoder_last_hidden_state")
    return [out[name] for name in names if out.get(name) is not None]


def record(model: nn.Module, given: dict[str, Tensor], **options: Any) -> Recording:
    """Record one call, and assert that the model computes the same as without `observe`."""
    with torch.no_grad():
        plain = model(**given)
        with observe(model, **options) as recording:
            observed = model(**given)
    assert all(map(torch.equal, answer(plain), answer(observed)))
    return recording


def eager_weights(out: Any) -> dict[str, list[Tensor]]:
    """The attentions of an output, layer by layer: of encoders, of decoders, across."""
    if "text_model_output" in out:
        return {
            "text": list(out.text_model_output.attentions),
            "vision": list(out.vision_model_output.attentions),
        }
    names = {
        "encoder": "encoder_attentions",
        "decoder": "decoder_attentions",
        "cross": "cross_attentions",
        "only": "attentions",
    }
    return {kind: list(out[name]) for kind, name in names.items() if out.get(name) is not None}


def kind_of(path: str, kinds: Any) -> str:
    """Return the kinds of attention that the module at this path computes."""
    if "only" in kinds:
        return "only"
    if "text" in kinds:
        return "text" if path.startswith("text") else "vision"
    if "encoder_attn" in path or "EncDecAttention" in path:
        return "cross"
    return "encoder" if path.startswith(("encoder", "model.encoder")) else "decoder"


def fully_masked_rows(amap: manyheads.AttentionMap) -> Tensor:
    """Return the fully masked rows, `[b, h, t]`."""
    return ~manyheads.scores.visible(amap.problem).expand(amap.shape).any(-1)


def same_weights(amap: manyheads.AttentionMap, weights: Tensor, but: Tensor | None = None) -> None:
    """Assert equal weights, except in fully masked rows, where eager's are all the same and ours are zero.

    but: rows `[b, 1, t]` that were fully masked in an earlier layer, and differ by implementation since.
    """
    ours, blind = amap.dense(), fully_masked_rows(amap)
    assert torch.equal(ours[blind], torch.zeros_like(ours[blind]))
    if amap.problem.sink is None:
        assert torch.allclose(weights[blind], torch.tensor(1 / weights.shape[-1]))
    expected = ~blind if but is None else ~(blind | but)
    assert (ours - weights)[expected].abs().max() < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [None, "right", "left", "holes"])
@pytest.mark.parametrize(("name", "implementation"), BOTH)
def test_outputs_and_weights(name: str, implementation: str, padding: str | None) -> None:
    if name == "vit" and padding is not None:
        pytest.skip("pictures have no padding")
    given = inputs(name, padding)
    recording = record(build(name, implementation), given)
    with torch.no_grad():
        expected = eager_weights(build(name, "eager")(**given, output_attentions=True))
    assert len(recording) == sum(map(len, expected.values()))
    blind: dict[str, Tensor] = {}
    for path in recording:
        (amap,) = recording.calls(path)
        kind = kind_of(path, expected)
        same_weights(amap, expected[kind].pop(0), blind.get(kind))
        blind[kind] = blind.get(kind, torch.tensor(False)) | fully_masked_rows(amap)[:, :1]
    assert not any(expected.values())


def steps(model: nn.Module, cache: Any, ids: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """Yield the outputs for a prefill of six tokens, then three, then one by one."""
    at = 0
    for n in (6, 3, 1, 1, 1):
        visible = None if mask is None else mask[:, : at + n]
        yield model(
            ids[:, at : at + n], attention_mask=visible, past_key_values=cache, use_cache=True, **options
        )
        at += n


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "implementation"), [pair for pair in BOTH if pair[0] in DECODERS])
def test_caches(name: str, implementation: str, kind: str, padding: str | None) -> None:
    """Compare the queries of each step with the weights over all keys of the cache."""
    given = inputs(name, padding)
    ids, mask = given["input_ids"], given.get("attention_mask")
    model, eager = build(name, implementation), build(name, "eager")

    def cache() -> Any:
        return tf.DynamicCache(config=model.config) if kind == "dynamic" else tf.StaticCache(model.config, 16)

    with torch.no_grad():
        plain = [out.logits for out in steps(model, cache(), ids, mask)]
        expected = [out.attentions for out in steps(eager, cache(), ids, mask, output_attentions=True)]
        running = steps(model, cache(), ids, mask)
        for logits, layers in zip(plain, expected, strict=True):
            with observe(model) as recording:
                out = next(running)
            assert torch.equal(out.logits, logits)
            for amap, weights in zip(recording.values(), layers, strict=True):
                same_weights(amap, weights)
                last = amap.shape[3] - 1 if kind == "dynamic" else None
                assert last is None or amap.problem.offset + amap.shape[2] - 1 == last
                expected = str(amap.problem.mask).replace("Keep([2, 1, 1, 16])", "")  # padded on both sides
                assert "Keep" not in expected


def masks_of(model: nn.Module, **given: Any) -> list[str]:
    """The masks under observation, as they print; the weights are compared on the way."""
    with torch.no_grad(), observe(model) as recording:
        model(**given)
    mask = given.get("attention_mask")
    if mask is not None and mask.dtype == torch.bool:  # eager adds what it gets
        given["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(**given, output_attentions=True).attentions
    for amap, one in zip(recording.values(), weights, strict=True):
        same_weights(amap, one)
    return [str(amap.problem.mask) for amap in recording.values()]


def test_masks_are_values_where_the_pattern_is_known() -> None:
    """A tensor [t, s] would be correct too; a value is small and names its pattern."""
    plain, right, left, holes = (inputs("llama", padding) for padding in (None, "right", "left", "holes"))
    short, long = "Causal()", "Window(left=4, right=0)"
    for name, causal in (("llama", short), ("mistral", long)):
        for implementation in ("sdpa", "eager"):
            for given, more in (
                (plain, ""),
                (right, " & Lengths([12, 8])"),
                (left, " & Lengths([12, 8], left=True)"),
                (holes, " & Keep([2, 1, 1, 12])"),
            ):
                assert masks_of(build(name, implementation), **given) == [causal + more] * 2
    assert masks_of(build("gemma3", "sdpa"), **plain) == [long, short]
    assert masks_of(build("bert", "sdpa"), **right) == ["Lengths([12, 8])"] * 2
    assert masks_of(build("bert", "eager"), **plain) == ["None"] * 2
    both = "Causal() & Documents([2, 12])"
    assert masks_of(build("llama4", "sdpa"), **plain) == [both, short]
    assert masks_of(build("llama4", "sdpa"), **left)[0] == both + " & Lengths([12, 8], left=True)"
    assert masks_of(build("modernbert", "sdpa"), **plain) == ["None", "Window(left=3, right=3)"]


def test_a_window_that_is_longer_than_the_text() -> None:
    model = build("mistral", "sdpa")
    model.config.sliding_window = 12
    assert masks_of(model, **inputs("llama")) == ["Window(left=11, right=0)"] * 2
    model = build("mistral", "sdpa")
    model.config.sliding_window = 13
    assert masks_of(model, **inputs("llama")) == ["Causal()"] * 2  # no mask at all, but sdpa's is_causal


def test_packed_sequences() -> None:
    given = inputs("llama") | {"use_cache": False}
    given["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    for name, band in (("llama", "Causal()"), ("mistral", "Window(left=4, right=0)")):
        for implementation in ("sdpa", "eager"):
            assert masks_of(build(name, implementation), **given) == [f"{band} & Documents([2, 12])"] * 2
    chunked, whole = masks_of(build("llama4", "sdpa"), **given)
    # transformers 5.23 gives chunks that are counted within each sequence as a tensor.
    assert chunked in ("Keep([2, 1, 12, 12])", "Causal() & Documents([2, 12]) & Documents([2, 12])")
    assert whole == "Causal() & Documents([2, 12])"


def made(model: nn.Module, given: dict[str, Tensor], **options: Any) -> Tensor:
    """A causal mask, as the model would make it."""
    embedded = model.model.embed_tokens(given["input_ids"]).detach()
    return create_causal_mask(model.config, embedded, given.get("attention_mask"), None, **options)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_blocks_that_attend_to_each_other(implementation: str) -> None:
    """The blocks of images in PaliGemma and Gemma 3, combined with a causal mask."""
    model, given = build("llama", implementation), inputs("llama", "left")
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1], [-2] * 12])
    with transformers.attached(model):
        given["attention_mask"] = made(model, given, block_sequence_ids=blocks)
    either = "(Causal() | Documents([2, 12], queries=[2, 12]))"
    assert masks_of(model, **given) == [f"Lengths([12, 8], left=True) & {either}"] * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_unknown_mask_functions(implementation: str) -> None:
    """A function that a caller adds to a mask isn't translated: the tensor is the mask."""
    model, given = build("llama", implementation), inputs("llama")
    with transformers.attached(model):
        mask = made(model, given, and_mask_function=lambda b, h, i, j: (i - j) % 3 == 0)
    b = 1 if implementation == "sdpa" else 2  # one mask, expanded over the batch, is held once
    assert masks_of(model, **given, attention_mask=mask) == [f"Keep([{b}, 1, 12, 12])"] * 2
    model, given = build("mistral", implementation), inputs("mistral", "left")
    given["attention_mask"] = made(model, given, or_mask_function=lambda b, h, i, j: i // 4 == j // 4)
    assert masks_of(model, **given) == ["Keep([2, 1, 12, 12])"] * 2


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_that_is_edited_in_place(implementation: str, inference: bool) -> None:
    """The origin of a mask is used only if it agrees with the tensor."""
    model, given = build("llama", implementation), inputs("llama", "left")
    with transformers.attached(model), torch.inference_mode(inference):
        mask = made(model, given)
        if not inference:  # where changes are counted, also after the mask was read once
            with observe(model) as recording:
                model(given["input_ids"], attention_mask=mask)
            assert str(recording[0].problem.mask) == "Causal() & Lengths([12, 8], left=True)"
        mask[:, :, 5, 9] = mask[:, :, 5, 5]
        with observe(model) as recording:
            model(given["input_ids"], attention_mask=mask)
        if inference:  # where changes aren't counted, the map has a copy
            mask[:, :, 5, 9] = mask[:, :, 0, 9]
    for amap in recording.values():
        assert str(amap.problem.mask) == "Keep([2, 1, 12, 12])"
        assert amap[0, 0, 5, 9] > 0


def test_masks_of_four_dimensions() -> None:
    """Masks of the caller: booleans for sdpa, floats that are added for both."""
    given = inputs("llama")
    keep = torch.rand(2, 1, 12, 12) > 0.4
    keep |= torch.eye(12, dtype=torch.bool)
    added = torch.randn(2, 1, 12, 12)
    lowest = added.masked_fill(~keep, torch.finfo(torch.float32).min)
    infinite = added.masked_fill(~keep, -math.inf)
    for implementation, mask in (
        *(("sdpa", mask) for mask in (keep, lowest, infinite)),
        *(("eager", mask) for mask in (lowest, infinite)),
    ):
        model, eager = build("llama", implementation), build("llama", "eager")
        with torch.no_grad():
            with observe(model) as recording:
                model(**given, attention_mask=mask)
            if mask.dtype == torch.bool:
                mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            expected = eager(**given, attention_mask=mask, output_attentions=True).attentions
        for amap, weights in zip(recording.values(), expected, strict=True):
            same_weights(amap, weights)
            assert str(amap.problem.mask) == "Keep([2, 1, 12, 12])"
            assert (amap.problem.bias is None) == (mask is not lowest and mask is not infinite)


# -- the outputs of the model -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_manyheads_computes_weights_that_are_too_large_for_eager(
    name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build(name, "eager"), inputs(name, padding)
    with torch.no_grad():
        plain = model(**given)
        expected = model(**given, output_attentions=True)
        monkeypatch.setattr(calls, "MAX_EAGER_BYTES", 0)
        home = sys.modules[type(model).__module__]
        eager, queries_given = home.eager_attention_forward, []

        def counting(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            queries_given.append(query.shape[2])
            return eager(module, query, *args, **kwargs)

        monkeypatch.setattr(home, "eager_attention_forward", wraps(eager)(counting))
        with observe(model) as recording:
            observed = model(**given)
        assert queries_given == [5, 5]  # a few rows, to compare with
        assert torch.allclose(observed.logits, plain.logits, atol=2e-5, rtol=1e-5)  # where all is masked too
        for amap, weights in zip(recording.values(), expected.attentions, strict=True):
            same_weights(amap, weights)
        with observe(model):  # where weights are returned, the model computes
            again = model(**given, output_attentions=True)
        assert queries_given == [5, 5, 12, 12]
        assert all(torch.equal(*pair) for pair in zip(again.attentions, expected.attentions, strict=True))
        assert torch.equal(again.logits, plain.logits)
        monkeypatch.setattr(
            home, "eager_attention_forward", lambda *args, **kwargs: (1.01 * eager(*args, **kwargs)[0], None)
        )
        with pytest.raises(ValueError, match="can't be observed: in rows"), observe(model):
            model(**given)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_the_models_own_weights_stay(name: str) -> None:
    model, given = build(name, "eager"), inputs(name, "left")
    with torch.no_grad():
        plain = eager_weights(model(**given, output_attentions=True))
        with observe(model):
            observed = eager_weights(model(**given, output_attentions=True))
    for kind, layers in plain.items():
        assert all(map(torch.equal, layers, observed.pop(kind)))
    assert not observed


@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gpt_oss", "eager")]
)
def test_training_under_observation(name: str, implementation: str) -> None:
    """Dropout, loss and gradients are the same; maps are from before the dropout."""
    given = inputs(name)
    grads = []
    for observed in (False, True):
        model = build(name, implementation, attention_dropout=0.3).train()
        torch.manual_seed(7)
        with observe(model) if observed else nullcontext() as recording:
            loss = model(**given, labels=given["input_ids"]).loss
        loss.backward()
        grads.append({path: weight.grad for path, weight in model.named_parameters()})
    for path, grad in grads[0].items():
        assert grad is None or torch.equal(grad, grads[1][path]), path
    for amap in recording.values():
        total = amap.dense().sum(-1) + amap.sink_weight()
        assert torch.allclose(total, torch.ones_like(total), atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_ablated_head(implementation: str) -> None:
    """The projection after the ablated head gets zeros."""
    model, given = build("llama", implementation), inputs("llama", "left")
    with torch.no_grad(), observe(model, ablate=[("layers.1.self_attn", 2)]):
        observed = model(**given).logits
    only = torch.ones(32).index_fill(0, torch.arange(16, 24), 0.0)  # head 2 of 4, of size 8
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * only,))
    with torch.no_grad():
        assert torch.equal(model(**given).logits, observed)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("t5", "sdpa"), ("bert", "eager")]
)
def test_other_dtypes(name: str, implementation: str, dtype: torch.dtype) -> None:
    for amap in record(build(name, implementation).to(dtype), inputs(name, "right")).values():
        assert str(amap.problem.mask) != "None"
        assert "Keep" not in str(amap.problem.mask)


@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "sdpa"), ("bert", "eager"), ("gemma2", "eager")]
)
def test_autocast(name: str, implementation: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(build(name, implementation), inputs(name, "right"))
    assert {amap.problem.q.dtype for amap in recording.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "t5"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name: str, cache: str | None) -> None:
    """The tokens are the same as without `observe`."""
    model = build(name, "eager")
    given = inputs(name, "left")
    given = {key: value for key, value in given.items() if not key.startswith("decoder")}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    plain = model.generate(**given, **options)
    with observe(model, keep="statistics") as recording:
        assert torch.equal(model.generate(**given, **options), plain)
    assert len(recording) == (6 if name == "t5" else 2)


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [None, [1, 0]])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_steps_of_a_generation_are_one_map(
    name: str, cache: str | None, padding: str | None, heads: list[int] | None
) -> None:
    """The map equals that of one pass over the tokens, whether the cache grows or is written in place."""
    model, given = build(name, "sdpa"), inputs(name, padding)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    with observe(model, heads=heads) as recording:
        ids = model.generate(**given, **options)[:, :-1]
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    mask = torch.cat((mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])), 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate counts them
    values: dict[str, Tensor] = {}
    for layer in recording if name == "llama" else ():

        def keep_values(module: Any, args: Any, out: Tensor, layer: str = layer) -> None:
            values[layer] = out.unflatten(-1, (2, -1)).transpose(1, 2)  # [b, g, s, w]

        model.get_submodule(f"{layer}.v_proj").register_forward_hook(keep_values)
    with torch.no_grad(), observe(model, heads=heads) as once:
        model(ids, attention_mask=mask, position_ids=positions)
    for layer, v in values.items():
        norms = v.norm(dim=-1) if heads is None else v.norm(dim=-1)[:, [n // 2 for n in heads]]
        torch.testing.assert_close(once[layer].value_norm, norms, rtol=1e-6, atol=0)
        found = recording[layer].value_norm[:, :, : norms.shape[2]]  # a static cache is longer
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
    for layer, one in once.items():
        assert len(recording.calls(layer)) == 1
        torch.testing.assert_close(recording[layer].dense(), one.dense(), rtol=0, atol=1e-5)
        for name_of in ("distance", "entropy"):
            found, expected = (getattr(amap, name_of)() for amap in (recording[layer], one))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, while it compiles, and where it doesn't
@pytest.mark.full
def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of FlexAttention have a function in place of entries."""
    # PyTorch's unfused steps as they are: traced, each call would take seconds.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = build("llama", "flex_attention")
    for padding, expected in (
        ("left", "Causal() & Lengths([12, 8], left=True)"),
        ("holes", "Causal() & Keep([2, 1, 1, 12])"),
    ):
        given = inputs("llama", padding)
        with torch.no_grad():
            plain = model(**given)
            with observe(model) as recording:
                observed = model(**given)
            assert torch.allclose(observed.logits, plain.logits, atol=1e-5)  # on the CPU it isn't compiled
            weights = build("llama", "eager")(**given, output_attentions=True).attentions
        for amap, one in zip(recording.values(), weights, strict=True):
            same_weights(amap, one)
            assert str(amap.problem.mask) == expected


# -- what isn't supported --------------------------------------------------------------------------


def registered(monkeypatch: pytest.MonkeyPatch, kernel: Any, mask: Any = None) -> nn.Module:
    """Return a model whose attention is a kernel of the user."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", kernel)
    if mask is not None:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", mask)
    return build("llama", "mine")


def own_kernel(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def test_an_unknown_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = registered(monkeypatch, own_kernel, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    with observe(model) as recording:
        model(**inputs("llama", "left"))
    assert str(recording[0].problem.mask) == "Causal() & Lengths([12, 8], left=True)"
    with (
        pytest.raises(ValueError, match="kernel own_kernel isn't one of transformers' own and got no mask"),
        observe(model),
    ):
        model(**inputs("llama"))


def changed(change: Any) -> Any:
    """An eager kernel with a wrong output."""

    def kernel(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        out, weights = own_kernel(module, query, key, value, attention_mask, **kwargs)
        return change(out, value), weights

    return kernel


@pytest.mark.parametrize(
    "change",
    [
        lambda out, value: 1.01 * out,
        lambda out, value: out.roll(1, 1),
        lambda out, value: out.roll(1, 2),
        lambda out, value: value.transpose(1, 2).repeat_interleave(2, 2),
    ],
)
def test_a_kernel_whose_output_differs_raises(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of the kernel is compared, so that a call that is misread raises."""
    model = registered(monkeypatch, changed(change), ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model(**inputs("llama"))
    with (
        pytest.raises(ValueError, match=r"LlamaAttention can't be observed: in rows \[0, 3, 6, 8, 11\] its "),
        observe(model),
    ):
        model(**inputs("llama"))


def test_unknown_options_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown option raises if the kernel names it; options that it ignores don't matter."""

    def kernel(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, tilt: Any = None, **kwargs: Any
    ) -> Any:
        return own_kernel(module, query, key, value, attention_mask, **kwargs)

    model, given = registered(monkeypatch, kernel, ALL_MASK_ATTENTION_FUNCTIONS["eager"]), inputs("llama")
    with observe(model) as recording:
        model(**given, leaning=3)
    assert len(recording) == 2
    with (
        pytest.raises(ValueError, match="its kernel is called with tilt, which manyheads doesn't support"),
        observe(model),
    ):
        model(**given, tilt=3)


def call(name: str = "eager", **options: Any) -> calls.Call:
    """Return a call without a model."""
    mask = options.pop("mask", None)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    kernel = calls.Kernel(own_kernel, name, tuple(options), {})
    return calls.Call(kernel, nn.Identity(), q, k, k, mask, options)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call(s_aux=torch.zeros(3)), r"expected one sink for each of 4 heads, got \[3\]"),
        (call(scaling=torch.ones(4)), r"expected its scaling to be a number, got \[4\]"),
        (
            call(mask=torch.ones(2, 1, 6, 9, dtype=torch.int64)),
            "expected its mask to be a tensor of bool or floats, got a Tensor of torch.int64",
        ),
        (call(mask="causal"), "expected its mask to be .*, got a str"),
        (
            call("flash", mask=torch.ones(2, 1, 6, 9)),
            r"expected its flash kernel's mask to be padding \[b, s\], got a Tensor of torch.float32",
        ),
        (call("flash", cu_seq_lens_q=torch.tensor([0, 6])), "its kernel is called with cu_seq_lens_q"),
    ],
)
def test_unsupported_calls(made: calls.Call, expected: str) -> None:
    with pytest.raises(ValueError, match="The attention of Identity can't be observed: " + expected):
        made.problem()


def test_mismatched_shapes() -> None:
    for shape in ((6, 8), (4, 6, 8), (2, 3, 6, 8), (2, 4, 6, 7)):
        with pytest.raises(ValueError, match=r"^Expected (q|the key heads) .*got"):
            replace(call(), query=torch.zeros(shape)).problem()


def test_tensors_without_numbers() -> None:
    model, ids = build("llama", "sdpa").to("meta"), torch.zeros(1, 4, dtype=torch.long, device="meta")
    expected = "LlamaAttention's query can't be observed, because it has a shape but no numbers"
    with pytest.raises(ValueError, match=expected), observe(model):
        model(ids)


def test_options_of_a_call() -> None:
    """Each kernel reads some options and ignores others."""
    assert call(s_aux=torch.ones(1, 4, 1, 1)).problem().sink.shape == (4,)
    assert call("sdpa", s_aux=torch.ones(4)).problem().sink is not None
    ignored = replace(call("sdpa"), options={"s_aux": torch.ones(4)})  # which its kernel doesn't name
    assert ignored.problem().sink is None
    assert call(scaling=torch.tensor(0.5)).problem().scale == 0.5
    assert call(dropout=0.5).problem().dropout_p == 0.5  # of a module that trains
    idle = call(dropout=0.5)
    idle.module.eval()
    assert idle.problem().dropout_p == 0.0
    assert (
        replace(idle, kernel=replace(idle.kernel, name="sdpa")).problem().dropout_p == 0.5
    )  # sdpa drops with the probability it is given, in evaluation mode too
    shared = call()
    assert replace(shared, query=shared.query[:1]).problem().shape.b == 2
    bias = torch.randn(1, 4, 6, 9)
    hidden = torch.zeros(2, 1, 6, 9).index_fill(3, torch.tensor([8]), torch.finfo(torch.float32).min)
    both = call(mask=hidden, position_bias=bias).problem()
    assert str(both.mask) == "Keep([2, 1, 6, 9])"
    assert torch.equal(both.bias.tensor(), bias)
    assert torch.equal(call(mask=bias, position_bias=bias).problem().bias.tensor(), 2 * bias)
    # Padding that was expanded to four dimensions is padding.
    wide = torch.arange(9).lt(torch.tensor([9, 5])[:, None])[:, None, None].expand(2, 4, 6, 9)
    assert str(call(mask=wide).problem().mask) == "Lengths([9, 5])"
    triangle = call(mask=torch.ones(1, 1, 6, 9, dtype=torch.bool).tril()).problem()
    assert (str(triangle.mask), triangle.offset) == ("Causal()", 0)  # of a cache
    triangle = call(mask=torch.ones(1, 1, 6, 9, dtype=torch.bool).tril(3)).problem()
    assert (str(triangle.mask), triangle.offset) == ("Causal()", 3)
    assert call().problem().offset == 3
    assert call(is_causal=False).problem().offset == 0
    assert str(call("sdpa").problem().mask) == "Causal()"
    assert call("sdpa").problem().offset == 0
    assert call("sdpa", is_causal=False).problem().mask is None
    assert call("eager").problem().mask is None


def test_a_mask_of_one_row_for_all() -> None:
    """The mask was made for the last query and is used for six, so it is no longer causal."""
    real = torch.arange(9).lt(torch.tensor([9, 5])[:, None])
    with transformers.attached(nn.Identity()):
        mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size=2, q_length=1, kv_length=9, q_offset=8, attention_mask=real, allow_is_causal_skip=False
        )
    assert str(call("sdpa", mask=mask).problem().mask) == "Lengths([9, 5])"


# -- flash -----------------------------------------------------------------------------------------


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Compute transformers' flash attention by its documentation: `[b, t, h, d]`, in float64."""
    (b, t, h, _), s = query.shape, key.shape[1] if mask is None else mask.shape[1]
    q, k, v = (x.transpose(1, 2).double() for x in (query, key[:, :s], value[:, :s]))
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    i, j = torch.arange(t)[:, None] + s - t, torch.arange(s)
    keep = (j <= i) if kwargs["is_causal"] else torch.ones(t, s, dtype=torch.bool)
    if kwargs["sliding_window"] is not None:
        keep = keep & ((i - j).abs() < kwargs["sliding_window"])
    keep = keep.expand(b, 1, t, s)
    if mask is not None:
        keep = keep & mask.bool()[:, None, None]
    score = q @ k.mT * kwargs["softmax_scale"]
    if kwargs["softcap"] is not None:
        score = kwargs["softcap"] * torch.tanh(score / kwargs["softcap"])
    score = score.masked_fill(~keep, -math.inf)
    if kwargs["s_aux"] is not None:
        sink = kwargs["s_aux"].double()[None, :, None, None].expand(b, h, t, 1)
        score = torch.cat((score, sink), -1)
    out = (score.softmax(-1).nan_to_num()[..., :s] @ v).transpose(1, 2).to(query.dtype)
    if mask is not None and t > 1:
        out = out * mask[:, -t:, None, None]
    return out


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert"])
def test_flash_attention(name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no flash attention on the CPU, so the function above replaces it."""
    from transformers.integrations import flash_attention

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)
    model, given = build(name, "eager"), inputs(name, padding)
    expected = {None: "", "left": "Lengths([12, 8], left=True)", "right": "Lengths([12, 8])"}[padding]
    with torch.no_grad():
        weights = model(**given, output_attentions=True).attentions
    model.config._attn_implementation = "flash_attention_2"
    recording = record(model, given)
    for amap, one in zip(recording.values(), weights, strict=True):
        ours, real = amap.dense(), given.get("attention_mask", torch.ones(2, 12)).bool()
        one = one * real[:, None, :, None]  # rows of padding are empty
        assert (ours - one).abs().max() < 1e-5
        assert expected in str(amap.problem.mask)


# -- attaching and detaching -----------------------------------------------------------------------


def interfaces() -> tuple[Any, ...]:
    """Return everything that attaching changes."""
    return (
        vars(AttentionInterface).get("__getitem__"),
        vars(AttentionInterface)["get_interface"],
        vars(AttentionMaskInterface).get("__getitem__"),
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )


def test_detaching_restores_transformers() -> None:
    before, one, other = interfaces(), build("llama", "sdpa"), build("bert", "eager")
    config = one.config.to_dict() | {"implementation": one.config._attn_implementation}
    with transformers.attached(one):
        assert interfaces()[:3] != before[:3]
        assert one.config.to_dict() | {"implementation": one.config._attn_implementation} == config
        with transformers.attached(one), transformers.attached(other):
            pass
        assert interfaces()[:3] != before[:3]
    assert interfaces() == before
    with pytest.raises(ZeroDivisionError), transformers.attached(one), transformers.attached(other):
        1 / 0  # noqa: B018
    assert interfaces() == before
    first, second = transformers.attached(one), transformers.attached(other)  # left in the other order
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with observe(other) as recording:
        other(**inputs("bert"))
    assert len(recording) == 2
    second.__exit__(None, None, None)
    assert interfaces() == before
    assert not transformers._attached
    assert not transformers._undo


def test_models_that_are_not_observed_run_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a model that can't be observed."""
    other = registered(monkeypatch, changed(lambda out, value: 2 * out), ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    given = inputs("llama")
    with torch.no_grad():
        plain = other(**given).logits
        model = build("llama", "sdpa")
        with observe(model) as recording:
            model(**given)
            assert torch.equal(other(**given).logits, plain)
    assert len(recording) == 2


def test_threads() -> None:
    """Each thread observes its own model while observations of others begin and end."""
    models = {name: build(name, "sdpa") for name in ("llama", "bert", "gpt2", "t5")}
    given = {name: inputs(name, "right") for name in models}
    with torch.no_grad():
        plain = {name: answer(model(**given[name])) for name, model in models.items()}
    wrong: list[str] = []

    def work(name: str) -> None:
        with torch.no_grad():
            for _ in range(5):
                with observe(models[name]) as recording:
                    out = answer(models[name](**given[name]))
                if len(recording) != (6 if name == "t5" else 2) or not all(
                    map(torch.equal, out, plain[name])
                ):
                    wrong.append(name)

    before = interfaces()
    workers = [threading.Thread(target=work, args=(name,)) for name in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert interfaces() == before


def test_is_present() -> None:
    assert transformers.is_from_transformers(build("llama", "sdpa"))
    assert transformers.is_from_transformers(nn.Sequential(build("llama", "sdpa").model.layers[0].self_attn))
    assert not transformers.is_from_transformers(nn.TransformerEncoderLayer(8, 2))


def test_a_part_of_a_model() -> None:
    """A model inside a module that isn't of transformers, and one layer of a model."""
    model, given = build("bert", "sdpa"), inputs("bert", "right")
    whole = nn.ModuleDict({"inner": model})
    with torch.no_grad():
        with observe(whole, layers="inner") as recording:
            whole.forward = lambda **given: whole["inner"](**given)
            whole(**given)
        assert [path.split(".")[0] for path in recording] == ["inner", "inner"]
        with observe(model.encoder.layer[1]) as recording:
            model(**given)
    assert list(recording) == ["attention.self"]


def test_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "OLDEST", (99, 0))
    model, before = build("llama", "sdpa"), interfaces()
    expected = f"needs version 99.0 or later, and {tf.__version__} is installed. Upgrade it."
    with pytest.raises(ImportError, match=expected), transformers.attached(model):
        pass
    assert interfaces() == before
    assert not transformers._attached
