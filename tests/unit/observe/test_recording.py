"""The recordings of `observe`: maps, statistics, steps of a generation; tables, files, ablated heads."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from torch import Tensor, nn

import manyheads as mh
from manyheads import measures, observe, open_run
from manyheads.classic.torch_multihead import MultiheadAttention
from manyheads.observe import Recording, Reduced
from tests.observed import (
    GPT,
    KEYS,
    OURS,
    PADDING,
    Call,
    CausalAttention,
    D,
    E,
    Function,
    H,
    K,
    Q,
    assert_agree,
    assert_gpt_weights,
    assert_identical,
    assert_weights,
    encoder,
    gradients,
    hooks,
    inputs_of,
    nested,
    nothing_left,  # noqa: F401
    raises,
    randn,
    record,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# -- maps and statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"layers": "layers.1"}, {"layers": ["layers.1.attn"]}, {"layers": [1]}, {"layers": 1}]
)
def test_some_layers(options: dict[str, Any]):
    model, x = GPT(layers=3), randn(2, 5, E)
    recording = record(model, x, observing=options)
    assert list(recording) == ["layers.1.attn"]
    assert_gpt_weights(recording, model, x)


def test_several_layers_and_layers_by_a_part_of_their_names():
    model, x = GPT(layers=3), randn(1, 3, E)
    with observe(model, layers=["layers.2", 0]) as recording:
        model(x)
        model(x)
    assert [(name, len(recording.calls(name))) for name in recording] == [
        (f"layers.{n}.attn", 2) for n in (0, 2)
    ]
    assert list(record(model, x, observing={"layers": "attn"})) == [f"layers.{n}.attn" for n in range(3)]


@pytest.mark.parametrize("heads", [2, [2], [3, 0], [-1], (1, -4)])
def test_some_heads(heads: Any):
    model, x = GPT(), randn(2, 5, E)
    full = record(model, x)
    recording = record(model, x, observing={"heads": heads})
    numbers = [n % H for n in ([heads] if isinstance(heads, int) else heads)]
    for name in KEYS:
        assert list(recording[name].heads) == numbers
        torch.testing.assert_close(recording[name].dense(), full[name].dense()[:, numbers], rtol=0, atol=1e-6)
    assert [row.head for row in recording.table()] == numbers * 2
    assert recording.nbytes < full.nbytes
    reduced = record(model, x, observing={"heads": heads, "keep": ["entropy"]})
    torch.testing.assert_close(reduced[0].entropy(), full[0].entropy()[:, numbers])
    assert list(reduced[0].heads) == numbers


def test_heads_of_grouped_keys():
    layer, x = mh.MultiHeadAttention(E, H, kv_heads=2), randn(2, 5, E)
    full, some = record(layer, x)[0].dense(), record(layer, x, observing={"heads": [3, 1]})[0].dense()
    torch.testing.assert_close(some, full[:, [3, 1]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_maps_kept_in_another_precision(dtype: torch.dtype):
    model, x = GPT(), randn(2, 5, E)
    recording = record(model, x, observing={"dtype": dtype, "device": "cpu"})
    for name, given_ in inputs_of(model, KEYS, x).items():
        q, k, _ = model.get_submodule(name).heads(given_)
        assert_weights(recording[name], q.to(dtype), k.to(dtype), causal=True)
        torch.testing.assert_close(recording[name].dense().sum(-1).float(), torch.ones(2, H, 5))
    assert recording[0].problem.q.dtype == dtype


def test_values_are_freed_and_only_q_and_k_are_kept():
    kept: list[weakref.ref[Tensor]] = []

    class Model(CausalAttention):
        def heads(self, x: Tensor) -> list[Tensor]:
            packed = self.c_attn(x)
            kept.append(weakref.ref(packed))
            return [y.unflatten(-1, (H, D)).transpose(1, 2) for y in packed.split(E, -1)]

    x = randn(2, 5, E)
    with torch.no_grad(), observe(model := Model()) as recording:
        model(x)
    gc.collect()
    assert kept[0]() is None
    problem = recording[0].problem
    storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in (problem.q, problem.k)}
    norms = 4 * 2 * H * 5  # of the values, float32 [b, g, s]
    assert sum(storages.values()) == problem.q.nbytes + problem.k.nbytes == recording.nbytes - norms
    recording[0].entropy()
    assert recording.nbytes == problem.q.nbytes + problem.k.nbytes + norms + recording[0].lse.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maps_have_the_norms_of_the_values(dtype: torch.dtype, tmp_path: Path):
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 3) * 300  # squares overflow in float16
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    recording = record(Call(), q, k, v, enable_gqa=True)
    norms = v.detach().double().norm(dim=-1)
    amap = recording[0]
    assert amap.value_norm.dtype == torch.float32
    assert not amap.value_norm.requires_grad
    torch.testing.assert_close(amap.value_norm.double(), norms, rtol=1e-6, atol=0)
    recording.save(tmp_path / "run")
    assert torch.equal(open_run(tmp_path / "run")[0].value_norm, amap.value_norm)
    v.detach().zero_()  # the norms don't depend on the values any longer
    torch.testing.assert_close(amap.value_norm.double(), norms, rtol=1e-6, atol=0)


def test_statistics_and_maps_of_attention_have_no_norms_of_values():
    q = randn(1, H, 5, 8)
    assert mh.attention_with_map(q, q, q)[1].value_norm is None
    assert record(Call(), q, q, randn(1, H, 5, 0))[0].value_norm is None
    reduced = record(Call(), q, q, q, observing={"keep": ["entropy"]})[0]
    assert all(x.dim() == 3 and x.shape[2] == 5 for x in reduced.tensors())
    assert not hasattr(reduced, "value_norm")


TOKENS = ("previous_token", "current_token", "first_token")
QUERIES = ("entropy", "distance", "row_max", "logits_max", "sink_weight", "divergence")
EVERY: dict[str, Any] = {
    **dict.fromkeys(QUERIES + TOKENS, ()),
    "received": [(), {"last": 2}, {"normalize": "age"}],
    "top": 2,
    "pooled": [(2, 3), (2, 3, "max")],
    "mass": mh.Window(left=1),
}


@pytest.mark.parametrize("mask", [None, "causal", "masks all of a row"])
def test_statistics_are_those_of_the_maps(mask: str | None):
    q, k = randn(Q), randn(K)
    kept = {"causal": torch.ones(5, 7).tril() > 0, "masks all of a row": torch.arange(5)[:, None] != 2}.get(
        mask or ""
    )
    amap = record(Call(), q, k, k, kept)[0]
    numbers = record(Call(), q, k, k, kept, observing={"keep": EVERY})[0]
    assert isinstance(numbers, Reduced)
    assert numbers.shape == amap.shape
    assert numbers.heads == amap.heads
    assert_agree(
        numbers.values["received"], [amap.received(), amap.received(last=2), amap.received(normalize="age")]
    )
    assert_agree(numbers.values["pooled"], [amap.pooled(2, 3), amap.pooled(2, 3, "max")])
    for name in QUERIES:
        assert_agree(getattr(numbers, name)(), getattr(amap, name)())
    assert_agree(numbers.mass(EVERY["mass"]), amap.mass(EVERY["mass"]))
    for name in TOKENS:
        assert_agree(getattr(numbers, name)(), getattr(measures, name)(amap))
    assert_agree(numbers.top(2).weights, amap.top(2).weights)
    assert torch.equal(numbers.top(2).keys, amap.top(2).keys)
    assert torch.equal(numbers.top(k=2).keys, amap.top(2).keys)


def test_the_usual_statistics_and_names_of_statistics():
    model, x = GPT(), randn(2, 5, E)
    maps, usual = record(model, x), record(model, x, observing={"keep": "statistics"})
    assert list(usual[0].values) == ["entropy", "distance", "row_max", "received", *TOKENS]
    for name in ("entropy", "distance", "row_max", "received"):
        assert_agree(getattr(usual["layers.1"], name)(), getattr(maps["layers.1"], name)())
    named = record(model, x, observing={"keep": ["row_max", "first_token"]})
    assert list(named[0].values) == ["row_max", "first_token"]
    table = usual.table()
    assert table.columns == (*maps.table().columns, "row_max")
    assert_agree([list(row[2:-1]) for row in table], [list(row[2:]) for row in maps.table()])
    with raises(ValueError, "entropy of layers.0.attn wasn't kept (kept are row_max, first_token). … keep="):
        named[0].entropy()
    with raises(ValueError, "top of layers.0.attn was kept with the arguments 3, got … 4"):
        record(model, x, observing={"keep": {"top": 3}})[0].top(4)
    with raises(AttributeError, "Reduced has no attribute 'problem'"):
        named[0].problem  # noqa: B018
    with raises(ValueError, 'observed with keep="statistics", which keeps no weights to draw'):
        named.plot()
    with raises(ValueError, 'layers.0.attn was observed with keep="statistics", … Observe with keep="maps"'):
        named[0][0, 1]
    with raises(ValueError, 'recording.table(ids), observed with keep="maps"'):
        named.table(torch.arange(5)).sorted("duplicate_token")
    with raises(ValueError, "got 'induction'. induction needs the token ids … recording.table(ids)"):
        maps.table().sorted("induction")
    with raises(TypeError, "got a list. Wrap it as torch.tensor(ids)."):
        maps.table([0, 1, 2, 3, 4])


@pytest.mark.parametrize("mask", [None, "masks all of a row"])
def test_every_kept_statistic_of_heads_or_queries_is_a_column(mask: str | None):
    q, k = randn(Q), randn(K)
    visible = torch.arange(5)[:, None].expand(5, 7) != 2
    recording = record(Call(), q, k, k, visible if mask else None, observing={"keep": EVERY})
    table, amap = recording.table(), record(Call(), q, k, k, visible if mask else None)[0]
    assert table.columns == (
        "layer", "head", "previous_token", "current_token", "first_token", "entropy", "distance", "row_max",
        "logits_max", "sink_weight",
    )  # fmt: skip
    queries = torch.tensor([0, 1, 3, 4] if mask else range(5))
    for name in ("entropy", "distance", "row_max", "sink_weight"):
        expected = getattr(amap, name)()[:, :, queries].mean((0, 2))
        assert_agree(torch.tensor([getattr(row, name) for row in table]), expected)
    assert_agree(torch.tensor([row.logits_max for row in table]), amap.logits_max().mean(0))
    assert "logits_max: the largest score" in " ".join(repr(table).split())


def test_kept_statistics_keep_no_other_tensors():
    kept: list[weakref.ref[Tensor]] = []

    def attend(x: Tensor) -> Tensor:
        q, k, v = x * 1, x * 2, x * 3
        kept.extend(weakref.ref(y) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    x = randn(1, H, 300, 8)
    with torch.no_grad(), observe(model := Function(attend), keep=["entropy"]) as recording:
        model(x)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert recording[0].entropy().nbytes == 4 * H * 300
    assert recording.nbytes == 4 * H * 300 + H * 300  # and which queries see a key at all


def test_max_bytes_bounds_the_size_of_the_recording():
    model, x = GPT(), randn(2, 5, E)
    enough = record(model, x).nbytes
    assert record(model, x, observing={"max_bytes": enough}).nbytes == enough
    with raises(MemoryError, "layers.1.attn … 2.88 kB, and max_bytes is 2.88 kB. Record fewer"):
        record(model, x, observing={"max_bytes": enough - 1})
    assert not any(hooks(model))
    record(model, x, observing={"max_bytes": enough // 2, "layers": [1]})
    norms = 4 * 2 * H * 5 * 2  # of the values of both layers, always float32
    half = (enough - norms) // 2 + norms
    assert record(model, x, observing={"max_bytes": half, "dtype": torch.float16}).nbytes == half
    with raises(MemoryError, "layers.0.attn … , and max_bytes is 0 bytes"):
        record(model, x, observing={"max_bytes": 0})


@pytest.mark.parametrize("mask", [torch.rand(H, 64, 64) < 0.5, randn(H, 64, 64)], ids=["Keep", "Dense"])
def test_max_bytes_counts_masks_and_biases(mask: Tensor):
    q = randn(1, H, 64, 8)
    held = record(Call(), q, q, q, mask).nbytes
    assert held >= q.nbytes + mask.nbytes
    with pytest.raises(MemoryError):
        record(Call(), q, q, q, mask, observing={"max_bytes": 2 * q.nbytes})


def test_max_bytes_bounds_statistics_too():
    q = randn(1, H, 64, 8)
    with raises(MemoryError, "max_bytes is 1 kB"):
        record(Call(), q, q, q, observing={"max_bytes": 1000, "keep": {"pooled": (64, 64)}})
    record(Call(), q, q, q, observing={"max_bytes": 1000, "keep": ["logits_max"]})


def test_later_changes_in_place_leave_the_recording_alone():
    x, model = randn(2, 5, 8), Function(lambda x: x.add_(F.scaled_dot_product_attention(x, x, x)))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), observe(model) as recording:
            model(x.clone())
        assert_weights(recording[0], x, x)


def test_a_workspace_that_is_written_again_and_again():
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*workspace.copy_(torch.stack([x, x * 2, x * 3])))

    inputs, model = [randn(1, 2, 5, 8) for _ in range(3)], Function(attend)
    with torch.inference_mode(), observe(model) as recording:
        workspace = torch.empty(3, 1, 2, 5, 8)
        for x in inputs:
            model(x)
    for call, x in zip(recording.calls(0), inputs, strict=True):
        assert_weights(call, x, x * 2)


# -- ablated heads ---------------------------------------------------------------------------------


def without_slice(projection: nn.Module, heads: Sequence[int], size: int = D) -> Any:
    """Ablate heads by hand, by zeros in the projection's input."""

    def zero(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        kept = torch.ones(args[0].shape[-1])
        for head in heads:
            kept[head * size : (head + 1) * size] = 0.0
        return args[0] * kept

    return projection.register_forward_pre_hook(zero)


def test_ablated_heads_and_their_gradients():
    model, x = GPT(layers=3), randn(2, 5, E)
    pairs = [("layers.1.attn", 2), ("layers.1.attn", 0), (2, 3)]
    handles = [without_slice(model.layers[n].attn.c_proj, heads) for n, heads in ((1, [2, 0]), (2, [3]))]
    expected, slopes = model(x), gradients(model, x, False)
    for handle in handles:
        handle.remove()
    assert (model(x) - expected).abs().max() > 1e-3
    with observe(model, ablate=pairs) as recording:
        assert_identical(model(x), expected)
    assert_identical(gradients(model, x, True, ablate=pairs), slopes)
    assert list(recording) == [f"layers.{n}.attn" for n in range(3)]
    assert recording["layers.1"].shape[1] == H  # its weights are recorded all the same
    assert_gpt_weights(record(model, x), model, x)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_ablated_heads_stay_ablated_in_a_recomputation(how: str):
    model, x = GPT(dropout=0.3), randn(2, 5, E)
    pairs = [("layers.0", 1), ("layers.1", 3)]
    slopes = gradients(model, x, True, ablate=pairs)
    model.how = how
    assert_identical(gradients(model, x, True, ablate=pairs), slopes)


def test_all_heads_ablated_leave_the_projection_s_bias():
    attn, x = CausalAttention(), randn(2, 5, E)
    with observe(attn, ablate=[("", n) for n in range(H)]):
        assert_identical(attn(x), attn.c_proj.bias.expand(2, 5, E).contiguous())


def test_ablated_heads_of_our_layers():
    layer, x = mh.MultiHeadAttention(E, H, kv_heads=2, position=mh.Rotary(D)), randn(2, 5, E)
    handle = without_slice(layer.o, [1, 2])
    expected = layer(x, mask=mh.Causal())
    handle.remove()
    with observe(layer, ablate=[(0, 1), (0, 2)]):
        assert_identical(layer(x, mask=mh.Causal()), expected)
    single, context = mh.CrossAttention(E), randn(2, 7, E)
    with observe(single, ablate=[("", 0)]):
        assert not single(x, context).any()


def test_ablated_heads_of_calls_without_an_axis_of_heads():
    q = randn(3, 5, 8)
    with observe(model := Call(), ablate=[("", 0)]):
        assert not model(q, q, q).any()


@pytest.mark.parametrize("wants", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("ours", [False, True], ids=["torch's", "ours"])
@pytest.mark.parametrize("batched", [True, False])
def test_ablated_heads_of_multihead_attention(wants: dict[str, Any], ours: bool, batched: bool):
    layer = (MultiheadAttention if ours else nn.MultiheadAttention)(E, H, batch_first=True)
    x = randn(2, 5, E) if batched else randn(5, E)
    masked = torch.rand(5, 5) < 0.3
    by_hand = copy.deepcopy(layer)
    with torch.no_grad():
        by_hand.out_proj.weight.view(E, H, D)[:, [1, 3]] = 0.0
    out, found = by_hand(x, x, x, attn_mask=masked, **wants)
    with observe(layer, ablate=[("", 1), ("", 3)]) as recording:
        mine, weighed = layer(x, x, x, attn_mask=masked, **wants)
    assert_agree(mine, out)
    assert (weighed is None) == (found is None)
    if found is not None:
        assert_agree(weighed, found)  # ablated heads keep their weights
    mine.square().sum().backward()
    out.square().sum().backward()
    assert_agree(layer.in_proj_weight.grad, by_hand.in_proj_weight.grad)
    assert_weights(
        recording[0],
        *(
            y.view(-1, 5, H, D).transpose(1, 2)
            for y in F.linear(x, layer.in_proj_weight[: 2 * E]).chunk(2, -1)
        ),
        ~masked,
    )


@pytest.mark.parametrize("wants", [{"need_weights": False}, {}], ids=str)
def test_ablated_heads_of_multihead_attention_with_dropout(wants: dict[str, Any]):
    layer, x = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True), randn(2, 5, E)
    by_hand = copy.deepcopy(layer)
    with torch.no_grad():
        by_hand.out_proj.weight.view(E, H, D)[:, [1, 3]] = 0.0
    torch.manual_seed(1)
    expected = by_hand(x, x, x, **wants)
    torch.manual_seed(1)
    with observe(layer, ablate=[("", 1), ("", 3)]):
        assert_identical(layer(x, x, x, **wants), expected)


@nested
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("nesting", [False, True])
def test_ablated_heads_of_a_transformer_encoder(nesting: bool, train: bool):
    model = encoder(enable_nested_tensor=nesting, dropout=0.0).train(train)
    x, masked = randn(3, 6, E), PADDING["right"]
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.layers[1].self_attn.out_proj.weight.view(E, H, D)[:, 2] = 0.0
        for padding in (None, masked):
            expected = by_hand(x, src_key_padding_mask=padding)
            skips_padding = padding is not None and nesting and not train
            error = raises(ValueError, "skips padding, and can't be observed with … an ablated head")
            with error if skips_padding else nullcontext(), observe(model, ablate=[("layers.1", 2)]):
                assert_agree(model(x, src_key_padding_mask=padding), expected)


def test_nested_observations_ablate_their_own_heads():
    model, x = GPT(), randn(2, 5, E)
    handles = [without_slice(model.layers[0].attn.c_proj, [1, 2])]
    expected = model(x)
    handles[0].remove()
    with observe(model, ablate=[("layers.0", 1)]) as outer, observe(model.layers[0], ablate=[("attn", 2)]):
        assert_identical(model(x), expected)
    with observe(model) as plain, observe(model.layers[0], ablate=[("attn", 2)]):
        model(x)
    assert_identical(plain[0].dense(), outer[0].dense())


# -- generation: steps that are one map ------------------------------------------------------------


class Cached(nn.Module):
    """Attention over a cache that the caller keeps: earlier keys and values, followed by those of x."""

    def __init__(self, projected: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(E, 3 * E) if projected else None
        self.log: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def heads(self, x: Tensor) -> list[Tensor]:
        packed = torch.cat([x] * 3, -1) if self.c_attn is None else self.c_attn(x)
        return [y.unflatten(-1, (H, D)).transpose(1, 2) for y in packed.split(E, -1)]

    def forward(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        visible = torch.ones(q.shape[2], k.shape[2]).tril() > 0 if causal else mask
        self.log.append((q.clone(), k.clone(), visible))
        return k, v


def triangle(t: int, s: int) -> Tensor:
    return torch.ones(t, s, dtype=torch.bool).tril(s - t)


def continued(
    model: Cached, x: Tensor, chunks: Sequence[int], explicit: bool, padding: Tensor | None = None
) -> None:
    past, end = None, 0
    for n in chunks:
        end += n
        mask = None if n == 1 and not explicit and padding is None else triangle(n, end)
        if padding is not None:
            mask = mask & padding[:, None, None, :end]
        causal = past is None and not explicit and padding is None
        past = model(x[:, end - n : end], past, None if causal else mask, causal)


@pytest.mark.parametrize("options", [{}, {"heads": [1, 2]}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("t", [3, 40])
def test_statistics_with_the_output_are_those_of_the_maps(t: int, options: dict[str, Any]):
    wanted = {"entropy": (), "received": (), "top": 2}
    q, k, v = (randn(2, n, t, D) for n in (4, 2, 2))
    model = Function(lambda: mh.attention(q, k, v, mask=mh.Causal()))
    with torch.no_grad():
        recording = record(model, observing={"statistics": wanted, **options})  # the output doesn't change
        plain = record(model, observing=options)
    found, expected = recording[0].statistics(**wanted), plain[0].statistics(**wanted)
    assert_agree(found["entropy"], expected["entropy"])
    assert_agree(found["received"], expected["received"])
    assert torch.equal(found["top"].keys, expected["top"].keys)
    assert_agree(found["top"].weights, expected["top"].weights)
    assert_agree(recording[0].row_max(), plain[0].row_max())  # not one of them
    assert (recording.nbytes > plain.nbytes) == (t == 40 and not options)


def test_statistics_that_cannot_be_computed_with_the_output():
    for wanted, error, message in (
        ({"mass": mh.Causal()}, ValueError, "mass takes a mask or tensor"),
        ({"nothing": ()}, ValueError, "Expected statistics among … got 'nothing'"),
        (["entropy"], TypeError, "Expected statistics to be a dict"),
    ):
        with raises(error, message), observe(CausalAttention(), statistics=wanted):
            pass
    with (
        raises(ValueError, "statistics= are kept with maps, got keep='statistics'"),
        observe(CausalAttention(), keep="statistics", statistics={"entropy": ()}),
    ):
        pass


@pytest.mark.parametrize("chunks", [(5, 1, 1, 1, 1), (5, 3, 1), (1,) * 9, (4, 5), (1, 8)], ids=str)
@pytest.mark.parametrize("explicit", [False, True], ids=["is_causal", "masks"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_of_a_generation_are_one_map(chunks: Sequence[int], explicit: bool, mode: Callable[[], Any]):
    model, x = Cached(), randn(2, 9, E)
    whole_ = record(model, x, causal=True)[0]
    with mode():
        with observe(model) as recording:
            continued(model, x, chunks, explicit)
        with observe(model, keep="statistics") as reduced:
            continued(model, x, chunks, explicit)
        with observe(model, dtype=torch.float64, heads=[1, 3]) as stored:
            continued(model, x, chunks, explicit)
    assert [len(found.calls(0)) for found in (recording, reduced, stored)] == [1, 1, 1]
    q, k, v = model.heads(x)
    norms = v.norm(dim=-1)
    assert recording.nbytes == q.nbytes + k.nbytes + norms.nbytes
    assert_weights(recording[0], q, k, causal=True)
    assert_agree(recording[0].value_norm, norms)
    assert stored[0].value_norm.dtype == torch.float32
    assert_agree(stored[0].value_norm, norms[:, [1, 3]])
    assert_agree(stored[0].dense().float(), recording[0].dense()[:, [1, 3]])
    for name in ("entropy", "distance", "row_max", "received"):
        assert_agree(getattr(recording[0], name)(), getattr(whole_, name)())
        assert_agree(getattr(reduced[0], name)(), getattr(whole_, name)())
    for name in TOKENS:
        assert_agree(getattr(reduced[0], name)(), getattr(measures, name)(whole_))
    with mode(), observe(model, max_bytes=recording.nbytes):
        continued(model, x, chunks, explicit)


@pytest.mark.parametrize("chunks", [(5, 1, 1, 1, 1), (5, 3, 1)], ids=str)
def test_steps_of_a_batch_padded_on_the_left(chunks: Sequence[int]):
    model, x = Cached(), randn(2, 9, E)
    padding = torch.arange(9) >= torch.tensor([[0], [2]])
    with torch.no_grad(), observe(model) as recording:
        continued(model, x, chunks, True, padding)
    q, k, _ = model.heads(x)
    assert len(recording.calls(0)) == 1
    assert_weights(recording[0], q, k, triangle(9, 9) & padding[:, None, None])


@pytest.mark.parametrize("sort", ["plain", "grouped", "rotary", "ALiBi", "normed"])
@pytest.mark.parametrize("mask", [None, mh.Window(left=2)], ids=["causal", "window"])
@pytest.mark.parametrize("length", [None, 12], ids=["growing", "preallocated"])
def test_steps_of_our_layers(sort: str, mask: mh.Mask | None, length: int | None):
    layer, x = OURS[sort](), randn(2, 9, E)
    with torch.no_grad():
        with observe(layer) as recording:
            cache = mh.Cache(length)
            for first, last in ((0, 4), (4, 5), (5, 8), (8, 9)):
                layer(x[:, first:last], mask=mask, cache=cache)
        alone = layer.attend(x, mask=mh.Causal() if mask is None else mh.Causal() & mask)[1]
    assert [call.shape for call in recording.calls(0)] == [(2, H, 9, 9)]
    assert_agree(recording[0].dense(), alone.dense())


def assert_every_row(recording: Recording, model: Cached) -> None:
    """Each row of all the calls is one that was computed, in order; later keys have no weight."""
    true = [w[:, :, r] for w in (weights(*call)[0] for call in model.log) for r in range(w.shape[2])]
    visible = [w[:, :, r] for w in (call.dense() for call in recording.calls(0)) for r in range(w.shape[2])]
    for mine, row in zip(visible, true, strict=True):  # [b, h, s]
        later = mine.shape[2] - row.shape[2]
        torch.testing.assert_close(mine.double(), F.pad(row, (0, later)), rtol=0, atol=1e-6)


WORDS = {
    "dense": torch.linspace(-1, 1, 3 * E).view(3, E).sin(),
    "one-hot": torch.eye(E)[[1, 2, 3]],
    "two-hot": torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]]).repeat(1, H),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("words", WORDS)
@example([("step", 0, [0, 2]), ("swap", 0, [0])])
@example([("step", 0, [0, 1]), ("swap", 0, [2])])
@example([("step", 0, [0, 0, 2]), ("step", 1, [0, 1, 2]), ("step", 0, [1]), ("step", 1, [1])])
@example([("step", 0, [0, 1]), ("fork", 2, [1]), ("step", 0, [1]), ("step", 2, [0])])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "step", "new", "fork", "crop", "swap", "drop"]),
            st.integers(0, 2),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_row_of_joined_steps_is_the_one_that_was_computed(
    words: str, acts: list[tuple[str, int, list[int]]]
):
    """Generations that alternate, fork, go back, swap beams or drop keys. Few tokens, so that keys repeat."""
    torch.manual_seed(0)
    model = Cached(projected=words == "dense")
    caches: list[Any] = [None, None, None]
    with (
        torch.no_grad(),
        observe(model) as recording,
        observe(model, keep=["row_max", "received"]) as reduced,
    ):
        for act, which, tokens in acts:
            past = caches[which]
            if act == "new":
                past = None
            elif act == "fork":
                past = caches[(which + 1) % 3]
            elif past is not None and act == "crop":
                past = tuple(y[:, :, :-1] for y in past) if past[0].shape[2] > 1 else None
            elif past is not None and act == "swap":
                past = tuple(y.flip(0) for y in past)
            elif past is not None and act == "drop":
                past = tuple(y[:, :, 1:] for y in past) if past[0].shape[2] > 1 else None
            ids = torch.tensor([tokens, tokens[::-1]])
            held = 0 if past is None else past[0].shape[2]
            caches[which] = model(WORDS[words][ids], past, triangle(len(tokens), held + len(tokens)))
    assert_every_row(recording, model)
    flat = torch.cat([call.row_max() for call in reduced.calls(0)], 2)
    true = torch.cat([weights(q, k, mask)[0].amax(-1) for q, k, mask in model.log], 2)
    assert_agree(flat.double(), true)


def test_a_cache_that_drops_old_keys_is_not_joined():
    model, x, past = Cached(), randn(1, 9, E), None
    with torch.no_grad(), observe(model) as recording:
        for n in range(9):
            k, v = model(x[:, n : n + 1], past)
            past = k[:, :, -3:], v[:, :, -3:]
    assert_every_row(recording, model)
    assert len(recording.calls(0)) > 1
    assert max(call.shape[3] for call in recording.calls(0)) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_static_cache(mode: Callable[[], Any]):
    """A cache of fixed size, written in place, with a mask of the keys that are filled."""

    class Static(Cached):
        held: tuple[Tensor, Tensor] | None = None

        def forward(self, x: Tensor, at: int) -> Tensor:  # type: ignore[override]
            q, k, v = self.heads(x)
            if self.held is None:
                self.held = torch.zeros(1, H, 12, D), torch.zeros(1, H, 12, D)
            for held, new in zip(self.held, (k, v), strict=True):
                held[:, :, at : at + x.shape[1]] = new
            mask = torch.arange(12) <= torch.arange(at, at + x.shape[1])[:, None]
            self.log.append((q.clone(), self.held[0].clone(), mask))
            return F.scaled_dot_product_attention(q, *self.held, mask)

    model, x = Static(), randn(1, 9, E)
    with mode(), observe(model) as recording:
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 9)):
            model(x[:, first:last], first)
    q, k, _ = model.heads(x)
    assert [call.shape for call in recording.calls(0)] == [(1, H, 9, 12)]
    assert_weights(recording[0], q, F.pad(k, (0, 0, 0, 3)), triangle(9, 9).new_ones(9, 12).tril())
    assert_agree(recording[0].distance(), distances(q, k))


def distances(q: Tensor, k: Tensor) -> Tensor:
    t = q.shape[2]
    apart = (torch.arange(t)[:, None] - torch.arange(t)).abs()
    return (weights(q, k, causal=True)[0] * apart).sum(-1).float()


def test_positions_of_a_step_alone():
    """The query is at the last key: PyTorch's call doesn't say so, but a cache implies it."""
    model, x = Cached(), randn(2, 6, E)
    q, k, _ = model.heads(x)
    for mask in (None, triangle(1, 6)):
        with torch.no_grad(), observe(model) as recording:
            model(x[:, 5:], (k[:, :, :5], k[:, :, :5]), mask)
        assert_agree(recording[0].distance(), distances(q, k)[:, :, 5:])
        assert_agree(measures.current_token(recording[0]), weights(q, k, causal=True)[0][:, :, 5, 5].float())


# -- tables, files, labels -------------------------------------------------------------------------


def test_the_table():
    model, x = GPT(), randn(2, 6, E)
    ids = torch.tensor([[1, 2, 1, 2, 1, 2], [3, 3, 4, 3, 3, 4]])
    recording = record(model, x)
    table = recording.table(ids=ids)
    assert len(table) == 2 * H
    assert [row[:2] for row in table] == [(name, n) for name in KEYS for n in range(H)]
    assert table[0]._fields == (
        "layer", "head", "previous_token", "current_token", "first_token", "duplicate_token", "induction",
        "entropy", "distance",
    )  # fmt: skip
    for row in table:
        amap = recording[row.layer]
        scores = {name: getattr(measures, name)(amap) for name in TOKENS}
        scores |= {name: getattr(measures, name)(amap, ids) for name in ("duplicate_token", "induction")}
        scores |= {name: getattr(amap, name)().mean(2) for name in ("entropy", "distance")}
        for name, score in scores.items():  # [b, h]
            assert getattr(row, name) == pytest.approx(float(score.mean(0)[row.head]))
    assert [row[2:5] for row in recording.table()] == [row[2:5] for row in table]
    assert recording.table(ids=ids[0])[0].induction != table[0].induction


def test_a_table_is_a_sequence_that_sorts_converts_and_prints():
    table = record(GPT(), randn(2, 6, E)).table()
    ordered = table.sorted("entropy")
    assert [row.entropy for row in ordered] == sorted((row.entropy for row in table), reverse=True)
    assert len(table[2:5]) == 3
    assert table[2:5][0] == table[2]
    assert table[-1] in table
    assert [row.layer for row in table.sorted("head")[:2]] == KEYS
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert list(frame.columns) == list(table.columns)
    assert frame.shape == (2 * H, 7)
    assert frame["entropy"].tolist() == [row.entropy for row in table]
    text = repr(table)
    assert text.count("layers.1.attn") == H
    assert f"{table[0].entropy:.2f}" in text
    assert "previous token" in text
    with raises(ValueError, "Expected one of the columns layer, head, … got 'entropie'"):
        table.sorted("entropie")


def test_a_table_of_layers_that_kept_different_things():
    model, x = GPT(), randn(2, 6, E)
    maps, reduced = record(model, x), record(model, x, observing={"keep": ["first_token"]})
    maps._calls["layers.1.attn"] = reduced._calls["layers.1.attn"]
    table = maps.table()
    assert table[0].entropy is not None
    assert table[-1].entropy is None
    assert table[-1].first_token is not None
    assert table.sorted("entropy")[-1].layer == "layers.1.attn"
    assert " - " in repr(table)
    with raises(ValueError, 'layers.1.attn was observed with keep="statistics"'):
        maps.plot()


def equal_runs(one: Recording, other: Recording) -> None:
    assert list(one) == list(other)
    assert one.provenance == other.provenance
    for name in one:
        assert len(one.calls(name)) == len(other.calls(name))
        for x, y in zip(one.calls(name), other.calls(name), strict=True):
            assert type(x) is type(y)
            assert x.shape == y.shape
            assert x.heads == y.heads
            assert x.tokens == y.tokens
            assert dict(x.provenance) == dict(y.provenance)
            assert_identical(x.entropy(), y.entropy())
            if isinstance(x, mh.AttentionMap):
                assert_identical(x.dense(), y.dense())
            else:
                assert x.values.keys() == y.values.keys()
                assert x.arguments == y.arguments
                for key in x.values:
                    assert_identical(x.values[key], y.values[key])
    assert list(one.table()) == list(other.table())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": [3, 1], "dtype": torch.bfloat16, "layers": 1},
        {"keep": "statistics"},
        {"keep": {name: options for name, options in EVERY.items() if name != "mass"}, "heads": [2]},
    ],
    ids=str,
)
def test_runs_are_saved_and_opened(options: dict[str, Any], tmp_path: Path):
    model = GPT()
    with observe(model, **options) as recording:
        model(randn(2, 5, E))
        model(randn(2, 6, E))
    recording.label([f"token {n}" for n in range(6)])
    recording.save(tmp_path / "run.safetensors")
    opened = open_run(tmp_path / "run.safetensors")
    assert len(opened.calls(0)) == 2
    assert opened[0].tokens[5] == "token 5"
    assert opened.calls(0)[0].tokens is None
    equal_runs(recording, opened)
    opened.save(tmp_path / "again.safetensors")
    equal_runs(recording, open_run(str(tmp_path / "again.safetensors")))


def test_a_run_of_maps_and_statistics_of_every_kind(tmp_path: Path):
    def attend(x: Tensor) -> Tensor:
        x = model.encoder(model.gpt(x), src_key_padding_mask=PADDING["right"])
        return model.ours(x, mask=mh.Causal() & mh.Lengths(torch.tensor([6, 4, 1])))

    model, x = Function(attend), randn(3, 6, E)
    model.gpt, model.encoder, model.ours = GPT(), encoder(), mh.MultiHeadAttention(E, H, bias=mh.ALiBi(H))
    recording, reduced = record(model, x), record(model, x, observing={"keep": "statistics"})
    recording._calls["gpt.layers.0.attn"] += reduced._calls["gpt.layers.0.attn"]
    recording.save(tmp_path / "run.safetensors")
    equal_runs(recording, open_run(tmp_path / "run.safetensors"))


def test_recordings_that_no_file_can_hold_raise(tmp_path: Path):
    q, path = randn(Q), tmp_path / "run.safetensors"
    rule = mh.Rule(lambda b, h, i, j: i >= j)
    with raises(ValueError, "Rule"):
        record(Function(mh.attention), q, q, q, mask=rule).save(path)
    with raises(ValueError, "mass was kept with a Window, which can't be saved"):
        record(Call(), q, q, q, observing={"keep": {"mass": mh.Window(left=1)}}).save(path)
    assert list(tmp_path.iterdir()) == []


def test_labels():
    model = GPT()
    with observe(model) as recording:
        model(randn(2, 3, E))
        model(randn(2, 4, E))
    recording.label(list("abcd"))
    assert [call.tokens for call in recording.calls(0)] == [None, tuple("abcd")]
    recording.label([list("abc"), list("xyz")])
    assert [call.tokens for call in recording.calls(1)] == [(tuple("abc"), tuple("xyz")), tuple("abcd")]
    assert_identical(recording[0].dense(), recording.calls(0)[1].dense())
    for wrong, error, message in (
        (list("abcde"), ValueError, "as many tokens as a layer has keys, which is 3 or 4, got 5"),
        ([], ValueError, "as many tokens as a layer has keys, which is 3 or 4, got 0"),
        ("abcd", TypeError, "a list of strings, got a str"),
        (7, TypeError, "a list of strings, got an int"),
        ([1, 2, 3, 4], TypeError, "tokens to be a list of … strings"),
        ([list("abc")] * 3, ValueError, "b = 2 such lists, got 3"),
        ([list("abc"), list("abcd")], ValueError, "got 2 with [3, 4] strings"),
    ):
        with raises(error, message):
            recording.label(wrong)


def test_plotting_a_recording():
    figure = record(GPT(), randn(2, 5, E)).plot()
    assert len(figure.axes) >= 2 * H


# -- other tools -----------------------------------------------------------------------------------


def recorded(shapes: dict[str, tuple[int, int]], tokens: list[str] | None = None) -> Recording:
    """Return a recording of layers with these numbers of queries and keys."""
    recording, generator = Recording(), torch.Generator().manual_seed(0)
    for name, (t, s) in shapes.items():
        q, k = (torch.randn(2, 3, n, 4, generator=generator) for n in (t, s))
        amap = mh.attention_with_map(q, k, k)[1]
        recording.add(name, amap.labelled(tokens if tokens is not None and len(tokens) == s else None), k)
    return recording


def test_bertviz_gets_a_tensor_per_layer_and_the_tokens() -> None:
    recording = recorded({"encoder.0": (5, 5), "encoder.1": (5, 5), "cross": (3, 5)}, list("abcde"))
    given = recording.to_bertviz("encoder", batch=1)
    assert [tuple(x.shape) for x in given["attention"]] == [(1, 3, 5, 5)] * 2
    for x, name in zip(given["attention"], ("encoder.0", "encoder.1"), strict=True):
        assert torch.equal(x, recording[name][1:])
    assert given["tokens"] == list("abcde")
    assert recording.to_bertviz([0])["attention"][0].shape == (1, 3, 5, 5)
    assert recording.to_bertviz("cross")["attention"][0].shape == (1, 3, 3, 5)
    assert recorded({"a": (4, 4)}).to_bertviz()["tokens"] == ["0", "1", "2", "3"]
    library = pytest.importorskip("bertviz")
    for view in (library.head_view, library.model_view):
        page = view(**given, html_action="return").data
        assert f"{float(given['attention'][0][0, 0, 0, 0])!r}"[:6] in page


def test_what_bertviz_cannot_show_raises() -> None:
    recording = recorded({"a": (5, 5), "b": (3, 5)})
    different = recorded({"a": (2, 2)}, ["x", "y"])
    different.add("b", recorded({"b": (2, 2)})[0], torch.zeros(1, 1, 2, 4))
    model = encoder()
    with torch.no_grad(), observe(model, keep="statistics") as reduced:
        model(torch.randn(1, 3, E))
    long = recorded({f"layer{n}": (6000, 6000) for n in range(2)})
    for ask, kind, words in [
        (lambda: recording.to_bertviz(), ValueError, r"one shape.*\[3, 5, 5\] \(a\) and \[3, 3, 5\] \(b\)"),
        (lambda: recording.to_bertviz("c"), KeyError, "No layer 'c'"),
        (lambda: recording.to_bertviz([]), ValueError, "names or numbers, got none"),
        (lambda: recording.to_bertviz([1.5]), TypeError, "got a float"),
        (lambda: recording.to_bertviz(2.0), TypeError, "layers to be names or numbers, got a float"),
        (lambda: recording.to_bertviz("a", batch=7), IndexError, r"batch entry \[7\]"),
        (lambda: recording.to_bertviz("a", max_bytes=2999), ValueError, "3 kB for 75 weights"),
        (lambda: long.to_bertviz(), ValueError, "8.64 GB for 216,000,000 weights, and max_bytes is 537 MB"),
        (lambda: different.to_bertviz(), ValueError, "same tokens"),
        (lambda: Recording().to_bertviz(), ValueError, "Nothing was recorded"),
        (lambda: reduced.to_bertviz(), ValueError, 'keep="statistics"'),
    ]:
        with pytest.raises(kind, match=words):
            ask()
