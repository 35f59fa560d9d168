"""The layers: against their formula, against torch.nn, and as modules that are copied, saved and trained."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads import kernels
from tests.errors import raises

E = 12


def layer(**parts: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    return mh.MultiHeadAttention(E, parts.pop("heads", 3), **parts).double()


def tokens(b: int = 2, t: int = 5, e: int = E) -> Tensor:
    return torch.randn(b, t, e, dtype=torch.float64)


def by_hand(m: mh.MultiHeadAttention, x: Tensor, context: Tensor, keep: Tensor | None = None) -> Tensor:
    """Every head in a loop, concatenated, projected: section 3.2.2 of the paper."""
    q, k, v = m.q(x), m.k(context), m.v(context)
    d, times = m.head_dim, m.heads // m.kv_heads
    heads = []
    for n in range(m.heads):
        own, shared = slice(n * d, (n + 1) * d), slice(n // times * d, (n // times + 1) * d)
        score = q[..., own] @ k[..., shared].mT / math.sqrt(d)
        if keep is not None:
            score = score.masked_fill(~keep, -math.inf)
        heads.append(score.softmax(-1) @ v[..., shared])
    return m.o(torch.cat(heads, -1))


@pytest.mark.parametrize(
    "parts", [{}, {"heads": 1}, {"heads": 6, "kv_heads": 2}, {"head_dim": 5}, {"heads": 4, "kv_heads": 1}]
)
def test_many_heads_are_heads_side_by_side(parts: dict[str, Any]) -> None:
    m, x = layer(**parts), tokens()
    torch.testing.assert_close(m(x), by_hand(m, x, x))
    keep = torch.ones(5, 5).tril() > 0
    torch.testing.assert_close(m(x, mask=mh.Causal()), by_hand(m, x, x, keep))


@pytest.mark.parametrize("width", [E, 7])
@pytest.mark.parametrize("s", [3, 9])
def test_attention_to_a_context(width: int, s: int) -> None:
    m = layer(context_dim=width) if width != E else layer()
    x, context = tokens(), tokens(t=s, e=width)
    torch.testing.assert_close(m(x, context), by_hand(m, x, context))
    mask = mh.Lengths(torch.tensor([2, 3]))
    keep = (torch.arange(s) < torch.tensor([2, 3])[:, None])[:, None]
    torch.testing.assert_close(m(x, context, mask=mask), by_hand(m, x, context, keep))


def test_attend_gives_the_same_output_and_its_map() -> None:
    m, x = layer(heads=6, kv_heads=3), tokens()
    out, amap = m.attend(x, mask=mh.Causal())
    assert torch.equal(out, m(x, mask=mh.Causal()))
    assert amap.shape == (2, 6, 5, 5)
    q = m.q(x).unflatten(-1, (6, 2)).transpose(1, 2)
    k = m.k(x).unflatten(-1, (3, 2)).transpose(1, 2)
    _, expected = mh.attention_with_map(q, k, k, mask=mh.Causal())
    torch.testing.assert_close(amap.dense(), expected.dense())
    out.sum().backward()  # the map holds no graph, the output does
    assert m.q.weight.grad is not None
    assert not amap.dense().requires_grad


def test_rotary_under_a_context_counts_from_the_end() -> None:
    """The last query has the position of the last key."""
    m, x, context = layer(position=mh.Rotary(4)), tokens(t=2), tokens(t=6)
    whole = m(torch.cat((context[:, :4], x), 1), context)
    torch.testing.assert_close(m(x, context), whole[:, 4:])


@pytest.mark.parametrize(
    "norm", [None, nn.RMSNorm, nn.LayerNorm(4).double()], ids=["none", "class", "module"]
)
def test_norms_and_positions_are_applied_to_q_and_k(norm: Any) -> None:
    rotary = mh.Rotary(4)
    m, x = layer(position=rotary, qk_norm=norm), tokens()
    q, k, v = (part(x).unflatten(-1, (3, 4)).transpose(1, 2) for part in (m.q, m.k, m.v))
    if norm is not None:
        with torch.no_grad():
            m.q_norm.weight.normal_()
            m.k_norm.weight.normal_()
        q, k = m.q_norm(q), m.k_norm(k)
        assert m.q_norm.weight is not m.k_norm.weight
    q, k = (rotary(part, torch.arange(5)) for part in (q, k))
    expected = m.o(mh.attention(q, k, v, kernel="reference").transpose(1, 2).flatten(2))
    torch.testing.assert_close(m(x), expected)
    assert not torch.allclose(m(x), by_hand(m, x, x))


@pytest.mark.parametrize(
    "make", [lambda: mh.ALiBi(3), lambda: mh.Relative.learned(3, 2)], ids=["alibi", "relative"]
)
def test_a_bias_belongs_to_the_layer(make: Any) -> None:
    m, x = layer(bias=make()), tokens()
    with torch.no_grad():
        next(iter(m.bias.state_dict().values())).normal_()
    q, k, v = (part(x).unflatten(-1, (3, 4)).transpose(1, 2) for part in (m.q, m.k, m.v))
    expected = m.o(mh.attention(q, k, v, bias=m.bias.value(), kernel="reference").transpose(1, 2).flatten(2))
    torch.testing.assert_close(m(x), expected)
    assert not torch.allclose(m(x), by_hand(m, x, x))
    m(x).square().sum().backward()
    learned = [n for n, _ in m.named_parameters() if n.startswith("bias")]
    assert learned == (["bias.table"] if isinstance(make(), mh.Relative) else [])
    assert all(p.grad is not None for p in m.parameters())


def test_dropout_in_training_only() -> None:
    m, x = layer(dropout=0.5), tokens()
    assert not torch.equal(m(x), m(x))
    m.eval()
    assert torch.equal(m(x), m(x))
    torch.testing.assert_close(m(x), by_hand(m, x, x))
    _, amap = m.train().attend(x)
    torch.testing.assert_close(amap.dense(), m.eval().attend(x)[1].dense())


def test_layers_of_one_head() -> None:
    torch.manual_seed(0)
    alone, x = mh.SelfAttention(E, 5).double(), tokens()
    score = alone.q(x) @ alone.k(x).mT / math.sqrt(5)
    torch.testing.assert_close(alone(x), score.softmax(-1) @ alone.v(x))
    out, amap = alone.attend(x, mask=mh.Causal())
    assert torch.equal(out, alone(x, mask=mh.Causal()))
    assert (out.shape, amap.shape) == ((2, 5, 5), (2, 1, 5, 5))
    assert mh.SelfAttention(E)(x.float()).shape == (2, 5, E)
    cross, context = mh.CrossAttention(E, 7, 5).double(), tokens(t=9, e=7)
    score = cross.q(x) @ cross.k(context).mT / math.sqrt(5)
    torch.testing.assert_close(cross(x, context), score.softmax(-1) @ cross.v(context))
    out, amap = cross.attend(x, context)
    assert (out.shape, amap.shape) == ((2, 5, 5), (2, 1, 5, 9))


@pytest.mark.parametrize(("b", "t"), [(0, 5), (2, 0), (0, 0), (1, 1)])
def test_empty_batches_and_sequences(b: int, t: int) -> None:
    m = layer(position=mh.Rotary(4), bias=mh.ALiBi(3), heads=3)
    out, amap = m.attend(tokens(b, t), mask=mh.Causal())
    assert out.shape == (b, t, E)
    assert amap.dense().shape == (b, 3, t, t)
    out.sum().backward()
    assert m(tokens(2, 3), tokens(2, 0)).shape == (2, 3, E)


LAYOUTS = ("separate", "packed", "torch", "heads")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_exported_is_loaded_back(layout: str) -> None:
    m, x = layer(), tokens()
    tensors = m.export(layout)
    other = mh.MultiHeadAttention(E, 3).double()
    assert other.load(tensors, layout) is other
    assert torch.equal(other(x), m(x))
    assert all(not value.requires_grad for value in tensors.values())
    for value in tensors.values():  # copies: changing them changes no layer
        value.zero_()
    assert torch.equal(other(x), m(x))


@pytest.mark.parametrize("parts", [{"heads": 6, "kv_heads": 2}, {"head_dim": 7}, {"context_dim": 5}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_round_trip_or_raise(layout: str, parts: dict[str, Any]) -> None:
    m, other = layer(**parts), layer(**parts)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    cannot = {
        "packed": "context_dim" in parts,
        "torch": "context_dim" not in parts,
        "heads": "kv_heads" in parts,
        "separate": False,
    }
    if cannot[layout]:
        with raises(ValueError, layout):
            m.export(layout)
        return
    other.load(m.export(layout), layout)
    x = tokens()
    context = tokens(e=m.context_dim)
    assert torch.equal(m(x, context), other(x, context))


def test_the_names_and_shapes_of_each_layout() -> None:
    m = layer()
    shapes = {layout: {n: tuple(x.shape) for n, x in m.export(layout).items()} for layout in LAYOUTS}
    assert shapes["separate"] == {
        f"{p}.{w}": (E, E) if w == "weight" else (E,) for p in "qkvo" for w in ("weight", "bias")
    }
    assert shapes["packed"] == {
        "qkv.weight": (3 * E, E),
        "qkv.bias": (3 * E,),
        "o.weight": (E, E),
        "o.bias": (E,),
    }
    assert shapes["torch"] == {n: tuple(x.shape) for n, x in nn.MultiheadAttention(E, 3).state_dict().items()}
    heads = {
        f"heads.{n}.{p}.{w}": (4, E) if w == "weight" else (4,)
        for n in range(3)
        for p in "qkv"
        for w in ("weight", "bias")
    }
    assert shapes["heads"] == heads | {"o.weight": (E, E), "o.bias": (E,)}


def test_the_heads_layout_is_a_list_of_single_heads() -> None:
    m, x = layer(), tokens()
    tensors = m.export("heads")
    outs = []
    for n in range(3):
        single = mh.SelfAttention(E, 4).double()
        single.load_state_dict(
            {k.removeprefix(f"heads.{n}."): v for k, v in tensors.items() if k.startswith(f"heads.{n}.")}
        )
        outs.append(single(x))
    torch.testing.assert_close(torch.cat(outs, -1) @ tensors["o.weight"].mT + tensors["o.bias"], m(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("context_dim", [None, 7])
def test_torchs_own_layer_gives_the_same(bias: bool, context_dim: int | None) -> None:
    """Outputs, weights per head and gradients of the input, with masks, from its state dict."""
    torch.manual_seed(1)
    sizes = {"kdim": context_dim, "vdim": context_dim, "dtype": torch.float64}
    theirs, back = (nn.MultiheadAttention(E, 3, bias=bias, batch_first=True, **sizes) for _ in range(2))
    if bias:
        with torch.no_grad():
            theirs.in_proj_bias.normal_()
            theirs.out_proj.bias.normal_()
    ours = layer(context_dim=context_dim).load(theirs.state_dict(), "torch")
    x = tokens().requires_grad_()
    context = tokens(t=7, e=context_dim or E)
    keep = torch.rand(5, 7) < 0.7
    keep[:, 0] = True
    out, amap = ours.attend(x, context, mask=mh.Keep(keep))
    expected, weights = theirs(x, context, context, attn_mask=~keep, average_attn_weights=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(amap.dense(), weights.detach())
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (out, expected)))
    ours = layer(context_dim=context_dim, projection_bias=bias).load(theirs.state_dict(), "torch")
    back.load_state_dict(ours.export("torch"))
    torch.testing.assert_close(back(x, context, context)[0], ours(x, context))


def test_an_absent_bias_is_zero() -> None:
    m = layer()
    weights = {n: x for n, x in m.export().items() if n.endswith("weight")}
    m.load(weights)
    assert not any(getattr(m, p).bias.any() for p in "qkvo")


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("separate", lambda x: x.pop("k.weight"), ["k.weight", "missing"]),
        ("separate", lambda x: x.update(extra=torch.zeros(1)), ["extra"]),
        (
            "separate",
            lambda x: x.update({"q.weight": torch.zeros(E, 5)}),
            ["q.weight", "[12, 12]", "[12, 5]"],
        ),
        ("packed", lambda x: x.update({"qkv.weight": torch.zeros(5, E)}), ["qkv.weight", "36", "[5, 12]"]),
        ("packed", lambda x: x.pop("qkv.weight"), ["missing"]),
        ("torch", lambda x: x.update(bias_k=torch.zeros(1)), ["bias_k"]),
        ("torch", lambda x: x.pop("out_proj.weight"), ["missing"]),
        ("heads", lambda x: x.pop("heads.1.v.weight"), ["heads.1.v.weight", "missing"]),
        ("heads", lambda x: x.update({"heads.3.q.weight": torch.zeros(4, E)}), ["heads.3.q.weight"]),
        ("other", lambda x: None, ["layout", "separate", "packed", "torch", "heads", "other"]),
    ],
)
def test_loading_weights_that_do_not_fit_changes_nothing(layout: str, change: Any, words: list[str]) -> None:
    m, x = layer(), tokens()
    before = m(x)
    tensors = {
        n: torch.randn_like(v) for n, v in m.export("separate" if layout == "other" else layout).items()
    }
    change(tensors)
    with raises(ValueError, *words):
        m.load(tensors, layout)
    assert torch.equal(m(x), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_without_projection_biases_round_trips(layout: str) -> None:
    m, x = layer(projection_bias=False), tokens()
    tensors = m.export(layout)
    assert not [name for name in tensors if name.endswith("bias")]
    assert torch.equal(layer(projection_bias=False).load(tensors, layout)(x), m(x))
    with_biases = layer().load(tensors, layout)  # which become zero
    torch.testing.assert_close(with_biases(x), m(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_for_a_layer_without_biases_raise(layout: str) -> None:
    """The error names each of them, and nothing of the layer changes."""
    m, tensors = layer(projection_bias=False), layer().export(layout)
    before = {name: x.clone() for name, x in m.state_dict().items()}
    names = [name for name in tensors if name.endswith("bias")]
    with raises(ValueError, *names, match=r"projection_bias=False, got .*Make the layer with"):
        m.load({name: x + 1 for name, x in tensors.items()}, layout)
    assert all(torch.equal(x, before[name]) for name, x in m.state_dict().items())


def test_a_layer_without_projection_biases_is_its_formula() -> None:
    parts = {"heads": 6, "kv_heads": 2, "position": mh.Rotary(2), "bias": mh.Relative.learned(6, 2)}
    m, x = layer(**parts, projection_bias=False), tokens()
    copied = copy.deepcopy(m)
    assert torch.equal(copied(x), m(x))
    assert list(copied.state_dict()) == list(m.state_dict())
    assert "bias.table" in m.state_dict()  # the bias of scores is another one
    m(x).square().sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    bare = layer(projection_bias=False)
    assert [name for name, _ in bare.named_parameters()] == ["q.weight", "k.weight", "v.weight", "o.weight"]
    torch.testing.assert_close(bare(x), by_hand(bare, x, x))
    for single in (
        mh.SelfAttention(E, 4, projection_bias=False),
        mh.CrossAttention(E, 4, 5, projection_bias=False),
    ):
        assert list(single.state_dict()) == ["q.weight", "k.weight", "v.weight"]


@pytest.mark.parametrize("kernel", ["auto", "native", "chunked", "sdpa", "reference"])
def test_a_layer_uses_its_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward, attend, with a cache, in copies and loaded pickles."""
    torch.manual_seed(0)
    made = [
        mh.MultiHeadAttention(E, 3, kernel=kernel),
        mh.SelfAttention(E, kernel=kernel),
        mh.CrossAttention(E, kernel=kernel),
    ]
    chosen: list[str] = []
    choose = kernels.choose

    def noting(problem: Any, kernel: str = "auto") -> Any:
        chosen.append(kernel)
        return choose(problem, kernel)

    monkeypatch.setattr(kernels, "choose", noting)
    for m in (*made, *map(copy.deepcopy, made), *(pickle.loads(pickle.dumps(m)) for m in made)):
        x = torch.randn(2, 5, E)
        inputs = (x, x) if isinstance(m, mh.CrossAttention) and not isinstance(m, mh.SelfAttention) else (x,)
        m(*inputs, mask=mh.Causal())
        m.attend(*inputs, mask=mh.Causal())
        if isinstance(m, mh.MultiHeadAttention):
            with torch.no_grad():
                m(x, cache=mh.Cache(votes=2))
        assert chosen
        assert set(chosen) == {kernel}
        assert ("kernel" in repr(m)) == (kernel != "auto")
        chosen.clear()


def test_a_layer_raises_if_its_kernel_does_not_support_it() -> None:
    m = mh.MultiHeadAttention(E, 3, bias=mh.Relative.learned(3, 2), kernel="sdpa")
    with pytest.raises(ValueError, match=r'^kernel="sdpa" doesn\'t support this'):
        m(torch.randn(1, 4, E))


FULL = {"heads": 6, "kv_heads": 3, "position": mh.Rotary(2), "qk_norm": nn.RMSNorm}
BIASES = [
    lambda: None,
    lambda: mh.ALiBi(6),
    lambda: mh.Relative.learned(6, 2),
    lambda: mh.Dense(torch.randn(6, 1, 1)),
]


@pytest.mark.parametrize("bias", BIASES, ids=["none", "alibi", "relative", "dense"])
def test_state_dicts_deep_copies_and_dtypes(bias: Any) -> None:
    m, x = layer(**FULL, bias=bias()), tokens()
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()
    expected = m(x)
    other = mh.MultiHeadAttention(E, **FULL, bias=bias()).double()
    buffer = io.BytesIO()
    torch.save(m.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), expected)
    clone = copy.deepcopy(m)
    assert torch.equal(clone(x), expected)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    assert torch.equal(m(x), expected)  # nothing is shared
    clone(x).sum().backward()
    assert all(p.grad is None for p in m.parameters())
    single = copy.deepcopy(m).float()
    assert single(x.float()).dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in single.state_dict().values())
    torch.testing.assert_close(single(x.float()).double(), expected, rtol=1e-3, atol=1e-3)
    half = copy.deepcopy(m).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert all(t.device.type == "meta" for t in copy.deepcopy(m).to("meta").state_dict().values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm's own, once
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_layers_under_autocast(low: torch.dtype) -> None:
    m, x = layer(**FULL, bias=mh.Relative.learned(6, 2)).float(), tokens().float()
    exact = m(x, mask=mh.Causal())
    with torch.autocast("cpu", dtype=low):
        out, amap = m.attend(x, mask=mh.Causal())
    assert out.dtype == low
    torch.testing.assert_close(out.float(), exact, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(amap.dense().sum(-1), torch.ones(2, 6, 5), rtol=0, atol=1e-5)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_decoding_under_autocast() -> None:
    m, x = layer(position=mh.Rotary(4)).float(), tokens().float()
    cache = mh.Cache(5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = m(x, mask=mh.Causal())
        steps = torch.cat([m(x[:, n : n + 1], cache=cache) for n in range(5)], 1)
    torch.testing.assert_close(steps, whole, rtol=3e-2, atol=3e-2)


def test_repr_of_a_layer() -> None:
    text = repr(layer(heads=6, kv_heads=3, position=mh.Rotary(2)))
    for word in ("embed=12", "heads=6", "kv_heads=3", "head_dim=2", "Rotary"):
        assert word in text
    assert "projection_bias" not in text
    assert "kernel" not in text
    text = repr(layer(projection_bias=False, kernel="reference"))
    assert "head_dim=4, projection_bias=False, kernel='reference'" in text
    assert repr(mh.SelfAttention(E, kernel="native")).startswith("SelfAttention(\n  kernel='native'")
