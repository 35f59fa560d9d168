"""Models of transformers that run on manyheads: the logits of `sdpa` or `eager`, every layer on our kernel.

The models are those of `test_huggingface`: 17 families, tiny, in float32, with random weights. Their logits
differ from those of transformers' own kernels by rounding: 10^-5 of the largest is about 80 roundings.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyheads
from manyheads import hf
from manyheads.masks import Causal
from manyheads.observe import observe
from manyheads.observe.transformers.masks import LazyMask

tf = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    create_causal_mask,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from tests.integration.test_alignment import HEADS, whisper  # noqa: E402
from tests.integration.test_huggingface import (  # noqa: E402
    DECODERS,
    MODELS,
    answer,
    build,
    eager_weights,
    fully_masked_rows,
    inputs,
    kind_of,
    same_weights,
    steps,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Any:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    hf.register()
    yield
    AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping = before


def own(name: str) -> str:
    """The kernel of transformers that a family uses by default."""
    return "eager" if name in ("gemma2", "gpt_oss") else "sdpa"


def difference(expected: Tensor, out: Tensor, real: Tensor | None = None) -> float:
    """The largest difference, relative to the largest number, except at padding."""
    expected, out = expected.detach(), out.detach()
    apart = (expected - out).abs()
    if real is not None and apart.dim() == 3 and apart.shape[1] == real.shape[1]:
        apart = apart * real[..., None]
    return float(apart.max() / expected.abs().max())


def real_tokens(given: dict[str, Tensor]) -> Tensor | None:
    return given.get("decoder_attention_mask", given.get("attention_mask"))


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [None, "right", "left", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_weights_and_the_count_of_calls(name: str, padding: str | None) -> None:
    if name == "vit" and padding is not None:
        pytest.skip("pictures have no padding")
    given = inputs(name, padding)
    model = build(name, own(name))
    with torch.no_grad():
        expected = model(**given)
        weights = eager_weights(build(name, "eager")(**given, output_attentions=True))
        model.set_attn_implementation("manyheads")
        with hf.count(model) as calls:
            out = model(**given)
        with observe(model) as recording:
            observed = model(**given)
        returned = eager_weights(model(**given, output_attentions=True))
    layers = sum(map(len, weights.values()))
    assert len(calls.layers) == calls.total == layers  # every layer, once
    assert set(calls.layers) == set(recording)
    for one, other in zip(answer(expected), answer(out), strict=True):
        assert difference(one, other, real_tokens(given)) < CLOSE
    assert all(map(torch.equal, answer(out), answer(observed)))
    blind: dict[str, Tensor] = {}
    for path in recording:
        (amap,) = recording.calls(path)
        kind = kind_of(path, weights)
        same_weights(amap, weights[kind].pop(0), blind.get(kind))
        torch.testing.assert_close(returned[kind].pop(0), amap.dense(), rtol=0, atol=1e-5)
        blind[kind] = blind.get(kind, torch.tensor(False)) | fully_masked_rows(amap)[:, :1]


@pytest.mark.full
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_caches(name: str, kind: str, padding: str | None) -> None:
    given = inputs(name, padding)
    ids, mask = given["input_ids"], given.get("attention_mask")

    def outputs(implementation: str) -> list[Tensor]:
        model = build(name, implementation)
        cache = (
            tf.DynamicCache(config=model.config) if kind == "dynamic" else tf.StaticCache(model.config, 16)
        )
        with torch.no_grad():
            return [out.logits for out in steps(model, cache, ids, mask)]

    expected = outputs(own(name))
    with hf.count() as calls:
        found = outputs("manyheads")
    assert calls.total == 2 * len(expected)
    at = 0
    for one, other in zip(expected, found, strict=True):
        real = None if mask is None else mask[:, at : at + one.shape[1]]
        assert difference(one, other, real) < CLOSE
        at += one.shape[1]


@pytest.mark.sampled
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "bart"])
def test_generation_token_for_token(name: str, cache: str | None) -> None:
    given = {key: x for key, x in inputs(name, "left").items() if not key.startswith("decoder")}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    model = build(name, own(name))
    expected = model.generate(**given, **options)
    model.set_attn_implementation("manyheads")
    with hf.count(model) as calls:
        assert torch.equal(model.generate(**given, **options), expected)
    assert len(calls.layers) == (6 if name in ("t5", "bart") else 2)
    assert set(calls.layers.values()) <= {1, 5}  # an encoder's once


@pytest.mark.full
@pytest.mark.parametrize("beams", [1, 2])
def test_whisper_generates(beams: int) -> None:
    model, sound = whisper(8), torch.randn(2, 16, 300)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = model.generate(sound, **options)
    model.set_attn_implementation("manyheads")
    with hf.count(model) as calls, observe(model) as recording:
        assert torch.equal(model.generate(sound, **options), expected)
    assert len(calls.layers) == len(recording) == 7  # one of the encoder, and six of the decoder
    if beams == 1:
        ours = recording.align(HEADS, batch=1, queries=slice(3, None), seconds=0.02)
        model.set_attn_implementation("sdpa")
        with observe(model) as recording:
            model.generate(sound, **options)
        theirs = recording.align(HEADS, batch=1, queries=slice(3, None), seconds=0.02)
        assert torch.equal(ours.times, theirs.times)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """Of every parameter, biases of positions and sinks too."""
    given = inputs(name, None if name == "vit" else "right")
    grads = []
    for implementation in (own(name), "manyheads"):
        model, real = build(name, implementation), real_tokens(given)
        loss = torch.tensor(0.0)
        for out in answer(model(**given)):
            visible = out.dim() == 3 and real is not None and out.shape[1] == real.shape[1]
            loss = (
                loss
                + (out * torch.linspace(-1, 1, out.shape[-1]) * (real[..., None] if visible else 1)).sum()
            )
        loss.backward()
        grads.append({path: weight.grad for path, weight in model.named_parameters()})
    largest = max(float(grad.norm()) for grad in grads[0].values() if grad is not None)
    for path, grad in grads[0].items():
        other = grads[1][path]
        assert (grad is None) == (other is None), path
        if grad is not None:  # the gradient of a key's bias is 0, but for rounding
            assert float((grad - other).norm()) < 1e-5 * float(grad.norm()) + 1e-6 * largest, path


def test_training_with_dropout() -> None:
    """Dropout is random: its mean over many passes is the output without it."""
    model = build("llama", "manyheads", attention_dropout=0.3).train()
    attention = model.model.layers[0].self_attn
    x, positions = torch.randn(1, 6, 32), model.model.rotary_emb(torch.randn(1, 6, 32), torch.arange(6)[None])
    outs = torch.stack([attention(x, positions, None)[0] for _ in range(150)])  # [n, b, t, e]
    assert outs.std(0)[:, 1:].min() > 0
    expected = attention.eval()(x, positions, None)[0]
    error = (outs.mean(0) - expected).abs() / (outs.std(0) / 150**0.5 + 1e-6)
    assert error.max() < 5  # standard errors
    model.train()
    ids = inputs("llama")["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    given = inputs("llama", "left")
    expected = build("llama", "sdpa")(**given).logits.detach()
    half = build("llama", "manyheads").to(dtype)(**given).logits
    with torch.autocast("cpu", dtype):
        cast = build("llama", "manyheads")(**given).logits
    for out in (half, cast):
        assert difference(expected, out.detach().float(), given["attention_mask"]) < 0.1


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, while it compiles
@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5", "modernbert"])
def test_compiled_models_have_our_operator(name: str) -> None:
    operators: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if "manyheads" in str(node.target))
        return graph

    given, model = inputs(name, "left"), build(name, "manyheads")
    with torch.no_grad():
        expected = model(**given)
        out = torch.compile(model, backend=backend, fullgraph=True)(**given)
    for one, other in zip(answer(expected), answer(out), strict=True):
        assert difference(one, other, real_tokens(given)) < CLOSE
    assert operators == ["manyheads.native"] * (6 if name == "t5" else 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
def test_compiled_generation() -> None:
    given, model = inputs("llama", "left"), build("llama", "manyheads")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**given, **options)
    compiled = tf.CompileConfig(backend="eager")
    compiled._compile_all_devices = True
    assert torch.equal(model.generate(**given, **options, compile_config=compiled), expected)


def test_other_mask_functions() -> None:
    """Packed sequences, blocks of images, and functions of a caller."""
    given = inputs("llama")
    packed = given | {
        "use_cache": False,
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]),
    }
    plain, ours = build("llama", "sdpa"), build("llama", "manyheads")
    with torch.no_grad():
        with observe(ours) as recording:
            out = ours(**packed).logits
        assert difference(plain(**packed).logits, out) < CLOSE
        assert str(recording[0].problem.mask) == "Causal() & Documents([2, 12])"
        for options in (
            {"or_mask_function": lambda b, h, i, j: i // 4 == j // 4},
            {"and_mask_function": lambda b, h, i, j: (i - j) % 3 == 0},
            {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1], [-2] * 12])},
        ):
            embedded = plain.model.embed_tokens(given["input_ids"])
            masks = [
                create_causal_mask(each.config, embedded, None, None, **options) for each in (plain, ours)
            ]
            assert torch.equal(*masks)
            logits = [
                each(**given, attention_mask=mask).logits
                for each, mask in zip((plain, ours), masks, strict=True)
            ]
            assert difference(*logits) < CLOSE


def test_masks_of_the_caller() -> None:
    given = inputs("llama")
    keep = (torch.rand(2, 1, 12, 12) > 0.4) | torch.eye(12, dtype=torch.bool)
    added = torch.randn(2, 1, 12, 12)
    plain, ours = build("llama", "sdpa"), build("llama", "manyheads")
    for mask in (keep, added, added.masked_fill(~keep, -torch.inf), torch.where(keep, 0, torch.finfo().min)):
        with torch.no_grad():
            expected, out = (each(**given, attention_mask=mask).logits for each in (plain, ours))
        assert difference(expected, out) < CLOSE
    grads = []
    for model in (plain, ours):  # a mask that is learned
        bias = added.clone().requires_grad_()
        model(**given, attention_mask=bias).logits.square().sum().backward()
        grads.append(bias.grad)
    assert difference(*grads) < CLOSE


# -- masks -----------------------------------------------------------------------------------------


def lazy(**options: Any) -> Any:
    real = torch.arange(9).lt(torch.tensor([9, 5])[:, None])
    given = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": real}
    return hf.make_mask(**{**given, **options}), sdpa_mask(**{**given, **options}, allow_is_causal_skip=False)


def test_a_lazy_mask_has_the_entries_of_the_mask_of_sdpa() -> None:
    mask, dense = lazy()
    assert isinstance(mask, LazyMask)
    assert not mask.is_dense
    assert repr(mask) == "LazyMask(Causal() & Lengths([9, 5]), offset=5, shape=[2, 1, 4, 9])"
    assert (mask.shape, mask.dtype, mask.device) == (dense.shape, dense.dtype, dense.device)
    for same in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.clone()):
        assert type(same) is Tensor
        assert torch.equal(same, dense)
    assert torch.equal(mask[:, :, 1:], dense[:, :, 1:])
    assert mask.is_dense
    mask[:, :, 0, 1] = False  # from here on, the entries count
    dense[:, :, 0, 1] = False
    assert torch.equal(mask, dense)
    assert not isinstance(lazy(q_length=1, q_offset=8)[0], LazyMask)
    assert hf.make_mask(2, 3, 3, mask_function=lambda b, h, i, j: j >= 0).all()  # an unknown function
    assert hf.make_mask(2, 3, 3, allow_is_causal_skip=True) is not None


def test_a_mask_that_is_edited_in_place() -> None:
    given, plain, ours = inputs("llama", "left"), build("llama", "sdpa"), build("llama", "manyheads")
    with torch.no_grad():
        masks = [
            create_causal_mask(
                each.config, each.model.embed_tokens(given["input_ids"]), given["attention_mask"], None
            )
            for each in (plain, ours)
        ]
        for mask in masks:
            mask[:, :, 5, 9] = True
        logits = [
            each(given["input_ids"], attention_mask=mask).logits
            for each, mask in zip((plain, ours), masks, strict=True)
        ]
    assert difference(*logits, given["attention_mask"]) < CLOSE


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "cu_seq_lens_q isn't supported. Pass position_ids"),
        ({"head_mask": torch.ones(4)}, r"head_mask isn't supported. Ablate heads with manyheads.observe\("),
        ({"cache": object()}, 'cache isn\'t supported. Use attn_implementation="paged|eager"'),
        ({"scaling": torch.ones((), requires_grad=True)}, "its scaling is a learned tensor"),
        ({"scaling": torch.ones(4)}, r"expected its scaling to be a number, got \[4\]"),
        ({"sliding_window": 3}, "its window is 3, and it got 6 keys without a mask. Make a mask with"),
        ({"s_aux": torch.zeros(3)}, r"expected one sink for each of 4 heads, got \[3\]"),
        ({"attention_mask": "causal"}, "expected its mask to be .*, got a str"),
        ({"attention_mask": torch.ones(1, 1, 6, 6).long()}, "expected its mask to be .* torch.int64"),
    ],
)
def test_what_is_not_supported_raises(options: dict[str, Any], message: str) -> None:
    function, q = AttentionInterface._global_mapping["manyheads"], torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="The attention of Identity can't run on manyheads: " + message):
        function(nn.Identity(), q, q, q, options.pop("attention_mask", None), **options)


def test_options_of_the_models_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its eager kernel reads and ours doesn't know is never dropped."""
    model, given = build("llama", "manyheads"), inputs("llama")

    def eager_attention_forward(module, query, key, value, attention_mask, tilt=None, **kwargs): ...  # type: ignore

    hf._options_of_eager.cache_clear()
    monkeypatch.setattr(
        sys.modules[type(model).__module__], "eager_attention_forward", eager_attention_forward
    )
    model(**given, leaning=3)
    with pytest.raises(ValueError, match=r"its model's own kernel reads tilt, which isn't supported\."):
        model(**given, tilt=3)
    monkeypatch.undo()
    hf._options_of_eager.cache_clear()
    model = build("gpt_oss", "manyheads")
    attention = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="it has sinks, and didn't pass them as s_aux"):
        AttentionInterface._global_mapping["manyheads"](attention, q, q, q, None)


def test_a_call_without_a_mask() -> None:
    """As sdpa computes it where the model supports that, else as eager does."""
    function, x = AttentionInterface._global_mapping["manyheads"], torch.randn(1, 4, 6, 8)
    causal, full = (
        manyheads.attention(x, x, x, mask=mask, offset=0).transpose(1, 2) for mask in (Causal(), None)
    )
    llama = build("llama", "manyheads").model.layers[0].self_attn
    gemma = build("gemma2", "manyheads").model.layers[0].self_attn
    assert torch.equal(function(llama, x, x, x, None)[0], causal)
    assert torch.equal(function(llama, x, x, x, None, is_causal=False)[0], full)
    assert torch.equal(function(gemma, x, x, x, None)[0], full)
    assert torch.equal(function(gemma, x, x, x, None, is_causal=True)[0], causal)


def test_names_and_kernels() -> None:
    hf.register("manyheads_reference", kernel="reference")
    model, given = build("llama", "manyheads_reference"), inputs("llama", "left")
    with hf.count() as calls:
        logits = model(**given).logits
    assert (calls.layers, calls.kernels) == ({"LlamaAttention": 2}, {"reference": 2})
    expected = build("llama", "sdpa")(**given).logits
    assert difference(expected, logits, given["attention_mask"]) < CLOSE
    with pytest.raises(ValueError, match=r"Expected a name without .*flash.*, got 'my_flash'\. Use"):
        hf.register("my_flash")
    with pytest.raises(TypeError, match="Expected name to be a str, got 3"):
        hf.register(3)
    with pytest.raises(ValueError, match="Expected kernel to be"):
        hf.register(kernel="fast")
    with (
        pytest.raises(TypeError, match=r"Expected count to get a torch.nn.Module or nothing, got str"),
        hf.count("x"),
    ):
        pass


def test_from_pretrained(tmp_path: Any) -> None:
    model = build("llama", "sdpa")
    model.save_pretrained(tmp_path)
    ours = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="manyheads")
    given = inputs("llama", "left")
    with hf.count(ours) as calls, torch.no_grad():
        assert difference(model(**given).logits, ours(**given).logits, given["attention_mask"]) < CLOSE
    expected = [f"model.layers.{n}.self_attn" for n in range(2)]
    assert list(calls.layers) == expected
    assert str(calls) == "2 calls in 2 layers (native 2)\n" + "\n".join(
        f"       1  {path}" for path in expected
    )


def test_threads_and_nested_counts() -> None:
    model, given = build("llama", "manyheads"), inputs("llama", "left")
    expected = model(**given).logits
    results: list[Tensor] = []
    with hf.count() as outer, hf.count(model) as inner:
        threads = [threading.Thread(target=lambda: results.append(model(**given).logits)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    model(**given)
    assert outer.total == inner.total == 6
    assert all(torch.equal(result, expected) for result in results)


def test_transformers_that_is_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "OLDEST", (99, 0))
    with pytest.raises(
        ImportError, match=rf"manyheads.hf needs transformers 99.0 or later, and {tf.__version__} is"
    ):
        hf.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"manyheads.hf needs transformers, which isn't installed. Run pip install"
    ):
        hf.register()
