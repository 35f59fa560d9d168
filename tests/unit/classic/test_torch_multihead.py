"""Presentation 2, and MultiheadAttention in place of PyTorch's."""

import copy
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyheads.classic.torch_multihead as ours
from manyheads.classic.torch_multihead import MultiheadAttention, Refused, replace
from tests.errors import raises
from tests.unit.classic.test_components import printed

INF = float("inf")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def close(mine, theirs, atol):
    torch.testing.assert_close(mine, theirs, atol=atol, rtol=atol)


def pair(*args, **kwargs):
    """PyTorch's module and ours with the same weights, biases drawn so that none is zero."""
    theirs = nn.MultiheadAttention(*args, **kwargs)
    mine = MultiheadAttention(*args, **kwargs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 3)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


# -- the presentation's numbers ----------------------------------------------------------------------


@pytest.fixture
def sentence():
    """Queries, keys, values [7, 1, 4] of the sentence, and our module, all seeded as printed."""
    words = ["the", "train", "left", "the", "station", "on", "time"]
    vocabulary = sorted(set(words))
    ids = torch.tensor([vocabulary.index(word) for word in words])[:, None]  # [7, 1]
    assert ids.flatten().tolist() == [3, 5, 0, 3, 2, 1, 4]
    torch.manual_seed(123)
    x = nn.Embedding(6, 2)(ids)  # [7, 1, 2]
    torch.manual_seed(1)
    q, k, v = (layer(x) for layer in [nn.Linear(2, 4, bias=False) for _ in range(3)])
    torch.manual_seed(1)
    return x, q, k, v, MultiheadAttention(4, 2, dropout=0.0)


def test_the_textbook_example(sentence):
    x, q, k, v, module = sentence
    rows = {
        "the": "-0.9724 -0.7550",
        "train": "0.2103 -0.3908",
        "left": "-0.1115 0.1204",
        "station": "-1.1969 0.2093",
        "on": "-0.3696 -0.2404",
        "time": "0.3239 -0.1085",
    }
    for n, word in enumerate(["the", "train", "left", "the", "station", "on", "time"]):
        printed(x[n], rows[word])
    printed(q[0], "-0.1186 -0.1173 0.3271 -0.1302")
    printed(k[0], "-0.0302 -0.2170 -0.0431 0.0982")
    printed(v[0], "-0.0975 -0.7672 0.5785 0.3455")
    out, weights = module(q, k, v)
    assert out.shape == (7, 1, 4)
    assert weights.shape == (1, 7, 7)
    printed(out[0], "0.0168 -0.0299 0.0095 -0.0084")
    printed(weights[0, 0], "0.1429 0.1446 0.1425 0.1429 0.1400 0.1429 0.1441")


@pytest.mark.parametrize("allowed", [1.0, 0.0, "boolean"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_textbook_example_with_a_causal_mask(sentence, allowed, is_causal):
    """Additive with 1 (or 0) where allowed, or boolean: the same numbers."""
    _, q, k, v, module = sentence
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    if allowed != "boolean":
        mask = torch.full((7, 7), allowed).masked_fill(mask, -INF)
    out, weights = module(q, k, v, attn_mask=mask, is_causal=is_causal)
    printed(out[0], "0.0422 -0.0849 0.0276 -0.0172")
    printed(out[1], "0.0262 -0.0692 0.0236 -0.0038")
    printed(weights[0, 1], "0.5043 0.4957 0 0 0 0 0")
    printed(weights[0, 2], "0.3327 0.3349 0.3324 0 0 0 0")
    assert (weights[0].triu(1) == 0).all()
    close(module(q, k, v, attn_mask=mask, is_causal=is_causal, need_weights=False)[0], out, 1e-6)


# -- construction and state --------------------------------------------------------------------------

CONSTRUCTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 3},
    {"vdim": 5, "add_bias_kv": True},
    {"kdim": 8, "vdim": 8, "batch_first": True},
    {"dtype": torch.float64},
]


@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
def test_a_seed_draws_the_same_parameters_and_state_dicts_go_both_ways(options):
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(8, 2, **options)
    after = torch.rand(())
    torch.manual_seed(7)
    mine = MultiheadAttention(8, 2, **options)
    assert torch.rand(()) == after  # and leaves the generator where theirs does
    fresh, other = nn.MultiheadAttention(8, 2, **options), MultiheadAttention(8, 2, **options)
    fresh.load_state_dict(mine.state_dict())
    other.load_state_dict(theirs.state_dict())
    for module in (mine, fresh, other):
        assert list(module.state_dict()) == list(theirs.state_dict())
        for name, tensor in theirs.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], tensor, rtol=0, atol=0)


def test_it_is_a_torch_module_with_its_attributes():
    module = MultiheadAttention(6, 3, 0.1, kdim=4, batch_first=True)
    assert isinstance(module, nn.MultiheadAttention)
    assert (module.embed_dim, module.num_heads, module.head_dim) == (6, 3, 2)
    assert (module.kdim, module.vdim, module.dropout, module.batch_first) == (4, 6, 0.1, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((8, 3), "Expected num_heads to divide embed_dim, got num_heads = 3 and embed_dim = 8."),
        ((8, 0), "Expected num_heads to be at least 1, got 0."),
        ((0, 1), "Expected embed_dim to be at least 1, got 0."),
        ((8, 2, 1.5), "Expected dropout to be between 0 and 1, got 1.5."),
        ((8, 2, 0.0, True, False, False, 0), "Expected kdim to be at least 1, got 0."),
    ],
)
def test_invalid_construction_raises(arguments, says):
    with raises(ValueError, match=f"^{re.escape(says)}$"):
        MultiheadAttention(*arguments)


# -- the table of cases: outputs, weights and gradients ----------------------------------------------


@st.composite
def cases(draw):
    """All options of constructor and forward. The first key is always visible, so that no output is NaN."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    flag = lambda: draw(st.booleans())  # noqa: E731
    itself = flag()
    case = {
        "dtype": pick(torch.float64, torch.float32),
        "heads": pick(1, 2, 3),
        "size": pick(1, 4),
        "make": {
            "bias": flag(),
            "add_bias_kv": flag(),
            "add_zero_attn": flag(),
            "batch_first": flag(),
            "kdim": None if itself else pick(None, 5),
            "vdim": None if itself else pick(None, 7),
        },
        "itself": itself,
        "batch": pick(None, 0, 1, 3),
        "t": draw(st.integers(1, 5)),
        "s": draw(st.integers(1, 6)),
        "padding": pick(None, "boolean", "float"),
        "mask": pick(None, "boolean", "float", "causal", "causal float"),
        "per head": flag(),
        "need_weights": flag(),
        "average_attn_weights": flag(),
        "training": flag(),
        "seed": draw(st.integers(0, 999)),
    }
    if itself:
        case["s"] = case["t"]
    if case["batch"] == 0:  # PyTorch's can't with masks; test_empty_inputs says that ours can
        case["padding"] = case["mask"] = None
    # There the hint drops the mask, and with it the appended keys, unless weights are needed.
    appended = case["make"]["add_bias_kv"] or case["make"]["add_zero_attn"]
    sayable = case["mask"] in ("causal", "causal float") and not (appended and not case["need_weights"])
    case["is_causal"] = sayable and not case["per head"] and flag()
    return case


def masks_of(case):
    b, h, t, s, dtype = case["batch"] or 0, case["heads"], case["t"], case["s"], case["dtype"]
    b = 1 if case["batch"] is None else b
    padding = mask = None
    if case["padding"]:
        padding = torch.rand(b, s) < 0.4
        padding[:, 0] = False
        if case["padding"] == "float":
            padding = torch.randn(b, s, dtype=dtype).masked_fill(padding, -INF)
        padding = padding[0] if case["batch"] is None else padding
    if case["mask"]:
        shape = (b * h, t, s) if case["per head"] else (t, s)
        causal = "causal" in case["mask"]
        mask = torch.ones(shape, dtype=torch.bool).triu(1) if causal else torch.rand(shape) < 0.4
        mask[..., 0] = False
        if "float" in case["mask"]:
            added = torch.ones(shape, dtype=dtype) if causal else torch.randn(shape, dtype=dtype)
            mask = added.masked_fill(mask, -INF)
    return padding, mask


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_same_outputs_weights_and_gradients(case):
    torch.manual_seed(case["seed"])
    e = case["heads"] * case["size"]
    theirs, mine = pair(e, case["heads"], dtype=case["dtype"], **case["make"])
    for module in (theirs, mine):
        module.train(case["training"])

    def draw(length, width):
        shape = [length] if case["batch"] is None else [length, case["batch"]]
        shape = shape[::-1] if case["make"]["batch_first"] else shape
        return torch.randn(*shape, width, dtype=case["dtype"])

    query = draw(case["t"], e)
    inputs = [query]
    if not case["itself"]:
        inputs += [draw(case["s"], theirs.kdim), draw(case["s"], theirs.vdim)]
    padding, mask = masks_of(case)
    options = {
        "key_padding_mask": padding,
        "attn_mask": mask,
        "need_weights": case["need_weights"],
        "average_attn_weights": case["average_attn_weights"],
        "is_causal": case["is_causal"],
    }
    atol = TOLERANCE[case["dtype"]]
    results = []
    for module in (theirs, mine):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's about masks of two kinds
            with torch.no_grad():
                plain = module(*(inputs * 3 if case["itself"] else inputs), **options)
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, weights = module(*(leaves * 3 if case["itself"] else leaves), **options)
        torch.manual_seed(1)  # the loss weighs every entry differently
        loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
        if weights is not None:
            loss = loss + (weights * torch.randn(weights.shape, dtype=out.dtype)).sum()
        wanted = [*leaves, *module.parameters()]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        results.append((plain, out, weights, grads))
    (plain, out, weights, grads), (my_plain, my_out, my_weights, my_grads) = results
    assert (weights is None) == (my_weights is None) == (not case["need_weights"])
    close(my_out, out, atol)
    close(my_plain[0], plain[0], atol)
    if weights is not None:
        close(my_weights, weights, atol)
        close(my_plain[1], plain[1], atol)
    scale = max([1.0, *(float(g.abs().max()) for g in grads if g.numel())])
    for mine_, theirs_ in zip(my_grads, grads, strict=True):
        torch.testing.assert_close(mine_, theirs_, atol=10 * atol * scale, rtol=0)


def test_the_fast_path_runs_without_weights_and_not_with_them(monkeypatch):
    kernels = []

    def spy(*args, kernel="auto", **rest):
        kernels.append(kernel)
        return real(*args, kernel=kernel, **rest)

    real = ours.attention
    monkeypatch.setattr(ours, "attention", spy)
    x = torch.randn(5, 2, 8)
    module = MultiheadAttention(8, 2)
    module(x, x, x, need_weights=False)
    assert kernels == ["auto"]
    module(x, x, x)
    assert kernels == ["auto"]


def test_dropout_draws_as_in_torch_and_weights_are_after_it():
    theirs, mine = pair(8, 2, dropout=0.4)
    x = torch.randn(5, 3, 8)
    results = []
    for module in (theirs, mine):
        torch.manual_seed(5)
        results.append(module(x, x, x, average_attn_weights=False))
    close(results[1][0], results[0][0], 1e-5)
    close(results[1][1], results[0][1], 1e-6)
    assert (results[1][1] == 0).any()
    assert (results[1][1].sum(-1) - 1).abs().max() > 0.1  # not the softmax's own weights
    quiet = mine.eval()(x, x, x, need_weights=False)[0]
    close(quiet, theirs.eval()(x, x, x)[0], 1e-5)
    mine.train().dropout = 1.0  # everything dropped: the projection's bias alone
    for need_weights in (True, False):
        out, _ = mine(x, x, x, need_weights=need_weights)
        close(out, mine.out_proj.bias.expand_as(out), 0)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_a_query_without_visible_keys_gets_zeros(need_weights, kind):
    torch.manual_seed(0)
    theirs, mine = pair(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8, requires_grad=True)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True  # query 1 may see nothing
    if kind == "float":
        mask = torch.zeros(4, 4).masked_fill(mask, -INF)
    out, weights = mine(x, x, x, attn_mask=mask, need_weights=need_weights)
    close(out[:, 1], mine.out_proj.bias.expand(2, 8), 0)
    if need_weights:
        assert (weights[:, 1] == 0).all()
    there, _ = theirs(x, x, x, attn_mask=mask)
    rest = [0, 2, 3]
    close(out[:, rest], there[:, rest], 1e-5)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mine.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_masked_nan_does_not_leak(need_weights):
    _, mine = pair(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    want, _ = mine(x, x, x, key_padding_mask=padding)
    y = x.clone()
    y[0, 3] = float("nan")
    out, _ = mine(x, y, y, key_padding_mask=padding, need_weights=need_weights)
    close(out, want, 1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_mask_is_used_whatever_the_hint(need_weights):
    """A wrong hint, and masks that are nearly causal: the same output, with weights and without."""
    _, mine = pair(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    triangle = torch.ones(5, 5, dtype=torch.bool).triu(1)
    slope = torch.arange(5.0)[None].masked_fill(triangle, -INF)
    low = torch.zeros(5, 5).masked_fill(triangle, -1.0)
    for mask in (torch.rand(5, 5) < 0.3, triangle.triu(2), slope, low, torch.full((5, 5), -INF)):
        want, _ = mine(x, x, x, attn_mask=mask)
        out, _ = mine(x, x, x, attn_mask=mask, need_weights=need_weights, is_causal=True)
        close(out, want, 1e-5)


def test_a_float_mask_gets_its_gradient_hint_or_not():
    _, mine = pair(8, 2)
    x = torch.randn(4, 1, 8)
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    grads = []
    for options in ({}, {"need_weights": False}, {"need_weights": False, "is_causal": True}):
        table = torch.zeros(4, 4, requires_grad=True)
        out, _ = mine(x, x, x, attn_mask=table.masked_fill(hidden, -INF), **options)
        grads.append(torch.autograd.grad(out.square().sum(), table)[0])
    assert grads[0].abs().max() > 1e-4
    close(grads[1], grads[0], 1e-5)
    close(grads[2], grads[0], 1e-5)


def test_the_map_keeps_the_contract():
    torch.manual_seed(0)
    _, mine = pair(8, 2, dropout=0.5, add_zero_attn=True)
    x = torch.randn(5, 3, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    out, amap = mine.eval().attend(x, x, x, attn_mask=mask)
    want, weights = mine(x, x, x, attn_mask=mask, average_attn_weights=False)
    close(out, want, 1e-5)
    assert amap.shape == (3, 2, 5, 6)
    close(amap.dense(), weights, 1e-6)
    _, amap = mine.train().attend(x, x, x, attn_mask=mask)  # per head, before dropout
    close(amap.dense(), weights, 1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_empty_inputs(shape, batch_first, need_weights):
    """No batch, or no tokens."""
    b, t = shape
    mine = MultiheadAttention(8, 2, batch_first=batch_first)
    x = torch.randn((b, t, 8) if batch_first else (t, b, 8), requires_grad=True)
    masks = torch.zeros(b, t), torch.zeros(2 * b, t, t, dtype=torch.bool)
    for padding, mask in [(None, None), masks]:
        out, weights = mine(x, x, x, padding, need_weights, mask)
        assert out.shape == x.shape
        assert weights is None or weights.shape == (b, t, t)
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast(dtype):
    torch.manual_seed(0)
    theirs, mine = pair(8, 2, add_bias_kv=True)
    x = torch.randn(5, 3, 8)
    want, weights = theirs(x, x, x)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    low = copy.deepcopy(mine).to(dtype)
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=dtype):
            out, w = mine(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert out.dtype == dtype
        close(out.float(), want, 0.1)
        y = x.to(dtype)
        out, w = low(y, y, y, attn_mask=mask.to(dtype), need_weights=need_weights)
        assert out.dtype == dtype
        close(out.float(), want, 0.1)
    with pytest.raises(
        Refused, match=r"Expected query to be torch.float32 like the module's parameters, got torch.float64"
    ):
        mine(*[x.double()] * 3)
    assert w is None
    assert low(y, y, y)[1].dtype == dtype
    assert weights.dtype == torch.float32


# -- bad input ---------------------------------------------------------------------------------------

X = torch.zeros(5, 3, 8)
MASK = torch.zeros(5, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ((X,) * 3, {"is_causal": True}, "Expected an attn_mask with is_causal=True.*subsequent_mask.5."),
        ((X[..., :7], X, X), {}, r"query to be \[t, b, 8\], or \[t, 8\] unbatched, got \[5, 3, 7\]"),
        ((X, X[..., :7], X), {}, r"Expected key to be \[s, b, 8\].*, got \[5, 3, 7\]"),
        ((X, X, X[..., :7]), {}, r"Expected value to be \[s, b, 8\].*, got \[5, 3, 7\]"),
        ((X[None],) * 3, {}, r"Expected query to be .*, got \[1, 5, 3, 8\]"),
        ((X, X[:, :2], X[:, :2]), {}, r"the same batch .*query \[5, 3, 8\], key \[5, 2, 8\]"),
        ((X, X, X[:4]), {}, r"the same length in key and value.*value \[4, 3, 8\]"),
        ((X[:, 0], X, X), {}, r"the same batch .*query \[5, 8\], key \[5, 3, 8\]"),
        ((X,) * 3, {"attn_mask": MASK[:4]}, r"\[t, s\] = \[5, 5\] or .*= \[6, 5, 5\], got \[4, 5\]"),
        ((X,) * 3, {"attn_mask": MASK.expand(3, 5, 5)}, r"= \[6, 5, 5\], got \[3, 5, 5\]"),
        ((X,) * 3, {"key_padding_mask": MASK}, r"to be \[b, s\] = \[3, 5\], got \[5, 5\]"),
        ((X[:, 0],) * 3, {"key_padding_mask": MASK[:3]}, r"to be \[s\] = \[5\], got \[3, 5\]"),
        ((X,) * 3, {"attn_mask": MASK.long()}, "got torch.int64. Write attn_mask != 0 if 1 means masked"),
        ((X,) * 3, {"attn_mask": MASK.float() * float("nan")}, "in attn_mask, got NaN or .inf"),
        ((X,) * 3, {"attn_mask": MASK.float() + INF}, "numbers or -inf .masked. in attn_mask"),
    ],
)
@pytest.mark.parametrize("caught", [ValueError, AssertionError, RuntimeError])
def test_invalid_inputs_raise(inputs, options, says, caught):
    """As any of the errors that PyTorch's class raises."""
    with raises(caught, match=says):
        MultiheadAttention(8, 2)(*inputs, **options)


def test_inputs_that_are_not_tensors_raise():
    module = MultiheadAttention(8, 2)
    with raises(TypeError, match=r"Expected key to be a tensor \[s, b, 8\], got a list"):
        module(X, [1.0], X)
    with pytest.raises(TypeError, match=r"Expected attn_mask to be a tensor of booleans .*, got a list"):
        module(X, X, X, attn_mask=[[True]])


# -- inside PyTorch's transformers -------------------------------------------------------------------

MODES = {
    "training": (True, nullcontext),
    "evaluation": (False, nullcontext),
    "no_grad": (False, torch.no_grad),
    "inference": (False, torch.inference_mode),
}
PADDING = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]  # [3, 5]
TRIANGLE = nn.Transformer.generate_square_subsequent_mask(5)


@pytest.fixture
def calls(monkeypatch):
    """How often our forward ran."""
    counted = []
    real = MultiheadAttention.forward

    def forward(self, *args, **kwargs):
        counted.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MultiheadAttention, "forward", forward)
    return counted


def both(theirs, mine, mode, calls, monkeypatch, expected, *inputs, **masks):
    """Run theirs, then ours, where the fused path may not be taken and our forward must run."""
    training, context = MODES[mode]
    theirs.train(training), mine.train(training)
    with context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        want = theirs(*inputs, **masks)

        def fused(*args):
            raise AssertionError("PyTorch's fused layer ran instead of our forward")

        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)
        out = mine(*inputs, **masks)
        monkeypatch.undo()
    assert len(calls) == expected
    close(out, want, 2e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "masks",
    [{}, {"src_key_padding_mask": PADDING}, {"mask": TRIANGLE, "is_causal": True}],
    ids=["no mask", "padding", "causal"],
)
def test_inside_an_encoder(mode, norm_first, batch_first, masks, calls, monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    theirs = nn.TransformerEncoder(layer, 2)
    mine = replace(copy.deepcopy(theirs))
    x = torch.randn((3, 5, 8) if batch_first else (5, 3, 8))
    both(theirs, mine, mode, calls, monkeypatch, 2, x, **masks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("both_masks", [False, True])
def test_inside_an_encoder_layer_that_it_is_assigned_to(mode, both_masks, calls, monkeypatch):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mine = copy.deepcopy(theirs)
    mine.self_attn = MultiheadAttention(8, 2, batch_first=True)
    mine.load_state_dict(theirs.state_dict())
    masks = {"src_mask": TRIANGLE, "src_key_padding_mask": PADDING * -1e9} if both_masks else {}
    both(theirs, mine, mode, calls, monkeypatch, 1, torch.randn(3, 5, 8), **masks)


def test_an_encoder_made_of_our_layer_warns_of_nothing(calls):
    """Its clones are ours as well, and so are they when padding has been cut off."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = MultiheadAttention(8, 2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        out = encoder(torch.randn(3, 5, 8), src_key_padding_mask=PADDING)
    assert len({id(module) for module in calls}) == 3
    assert (out[PADDING] == 0).all()  # as theirs fills what it cut off


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_a_decoder(mode, batch_first, norm_first, calls, monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    theirs = nn.TransformerDecoder(layer, 2)
    mine = replace(copy.deepcopy(theirs))
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    masks = {
        "tgt_mask": TRIANGLE,
        "tgt_key_padding_mask": torch.zeros(3, 5).masked_fill(PADDING, -INF),
        "memory_mask": torch.ones(5, 4, dtype=torch.bool).triu(1),
        "memory_is_causal": True,
    }
    both(theirs, mine, mode, calls, monkeypatch, 4, x, memory, **masks)


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_transformer(mode, calls, monkeypatch):
    torch.manual_seed(0)
    theirs = nn.Transformer(8, 2, 2, 1, 16, dropout=0.0, batch_first=True)
    mine = replace(copy.deepcopy(theirs))
    x, y = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "tgt_mask": TRIANGLE}
    both(theirs, mine, mode, calls, monkeypatch, 4, x, y, **masks)


def test_it_trains_inside_a_layer_as_in_torch():
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, dtype=torch.float64)
    mine = replace(copy.deepcopy(theirs))
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    for model in (theirs, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for mine_, theirs_ in zip(mine.parameters(), theirs.parameters(), strict=True):
        close(mine_, theirs_, 1e-12)


def test_replace_keeps_modules_parameters_and_hooks():
    class Own(nn.MultiheadAttention):
        pass

    ran = []
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "own": Own(8, 2)})
    attention = model["a"]
    attention.register_forward_hook(lambda *_: ran.append(1))
    before = [id(p) for p in model.parameters()]
    assert replace(model) is model
    assert model["a"] is attention
    assert type(attention) is MultiheadAttention
    assert type(model["own"]) is Own
    assert [id(p) for p in model.parameters()] == before
    attention(X, X, X)
    assert ran == [1]
    alone = nn.MultiheadAttention(8, 2)
    assert type(replace(alone)) is MultiheadAttention
    assert len(replace(alone)._forward_pre_hooks) == 1  # a second time changes nothing


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors():
    torch.manual_seed(0)
    theirs, mine = pair(8, 2, batch_first=True)
    lengths = [5, 0, 3]
    rows = [torch.randn(n, 8) for n in lengths]
    nested = torch.nested.nested_tensor(rows)
    out, weights = mine(nested, nested, nested)
    assert out.is_nested
    assert weights.shape == (3, 5, 5)
    for row, got in zip(rows, out.unbind(), strict=True):
        assert got.shape == row.shape
        close(got, theirs(row, row, row)[0] if len(row) else row, 1e-5)
    keys = [torch.randn(n, 8) for n in (2, 4, 1)]
    other = torch.nested.nested_tensor(keys)
    out, _ = mine(nested, other, other, need_weights=False)
    close(out.unbind()[2], theirs(rows[2], keys[2], keys[2])[0], 1e-5)
    with pytest.raises(Refused, match="and no masks"):
        mine(nested, nested, nested, key_padding_mask=MASK[:3])
    with pytest.raises(Refused, match=r"nested = \[True, False, False\]"):
        mine(nested, X.transpose(0, 1), X.transpose(0, 1))
    with pytest.raises(Refused, match="got a nested one"):
        mine.attend(nested, nested, nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("sequences", [0, 1, 3])
def test_empty_nested_tensors(sequences: int, need_weights: bool):
    """No sequences, and sequences that are all empty; in the module's own dtype."""
    mine = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    empty = torch.nested.nested_tensor([torch.zeros(0, 8)] * sequences, dtype=torch.float64)
    out, weights = mine(empty, empty, empty, need_weights=need_weights)
    assert out.is_nested
    assert out.dtype == torch.float64
    assert [x.shape for x in out.unbind()] == [(0, 8)] * sequences
    assert weights.shape == (sequences, 0, 0) if need_weights else weights is None
    if sequences:
        jagged = torch.nested.nested_tensor(
            [torch.zeros(0, 8)] * sequences, dtype=torch.float64, layout=torch.jagged
        )
        assert [x.shape for x in mine(jagged, jagged, jagged)[0].unbind()] == [(0, 8)] * sequences
        keys = torch.nested.nested_tensor([torch.randn(2, 8)] * sequences, dtype=torch.float64)
        assert [x.shape for x in mine(empty, keys, keys)[0].unbind()] == [(0, 8)] * sequences
        assert [x.abs().sum() for x in mine(keys, empty, empty)[0].unbind()] == [0] * sequences


@pytest.mark.full
def test_it_compiles_into_one_graph():
    torch.manual_seed(0)
    mine = MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for options in ({}, {"need_weights": False}):
        options = {"attn_mask": mask, "key_padding_mask": PADDING[:2], **options}
        compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
        want, out = mine(x, x, x, **options)[0], compiled(x, x, x, **options)[0]
        close(out, want, 1e-6)
        close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want)), 1e-5)
