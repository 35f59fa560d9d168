"""Parts of modern attention are recognized and named; wrong twins of each fail, and their bug is named."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import checker
from manyheads.checker.candidates.adapter import Options
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.probe import open_adapter
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.oracle import Attention, Inputs, Weights
from manyheads.checker.overrides import compose
from manyheads.checker.parts import Alibi, NoWindow, Window, select_buckets
from tests.unit.checker import modern

pytestmark = pytest.mark.usefixtures("one_thread", "quick")

SOURCE = Path(modern.__file__).read_text(encoding="utf-8")

# What must be recognized in each class.
RIGHT = {
    "LlamaLike": ["rotary encoding, half-split pairs, base 10000"],
    "QKNormWindow": ["RMS norm of q per head times `q_norm.weight`, eps 1e-06",
                     "RMS norm of k per head times `k_norm.weight`, eps 1e-06", "sliding window of 4 keys"],
    "T5Like": ["T5's buckets of both directions, distances up to 128", "scores multiplied by 1"],
    "PostNorm": ["residual connection", "layer norm of the output times `layer_norm.weight` plus"],
    "Alibi": ["ALiBi with slopes that are powers of two"],
    "Gated": ["layer norm of the input", "sigmoid of `g_proj.weight` (a gate)", "residual", "capped at 20"],
    "ComplexLlama": ["rotary encoding, neighboring pairs, base 500000"],
    "PartialNeoX": ["rotary encoding, half-split pairs, base 10000, of the first 4 of 6 dimensions"],
    "ModdedGPT": ["RMS norm of q and k per head", "rotating the other way"],
    "OlmoLike": ["RMS norm of q before the split into heads", "RMS norm of k before", "eps 1e-05", "rotary"],
    "GemmaLike": ["rotary", "capped at 30", "query_pre_attn_scalar = 9", "sliding window of 4 keys"],
    "SwinV2Like": ["L2 norm of q and k per head", "times the exponential of `logit_scale`"],
    "LucidCross": ["RMS norm of the input of k and v times `context_norm.gamma`", "of the input of q times"],
    "LayerScaled": ["layer norm of the input", "the output times `gamma`", "residual"],
    "HeadGate": ["the merged heads times the sigmoid of `head_gate.weight`"],
    "Chunked": ["chunks of 4 tokens"],
    "RelBias": ["learned bias `table` by distances"],
    "Sinks": ["rotary encoding", "sliding window of 4 keys"],
    "BiWindow": ["window of 2 tokens on both sides"],
    "AlibiBi": ["ALiBi"],
    "Streaming": ["rotary encoding", "sliding window of 4 keys and the first 1"],
    "SinkNTK": ["base 80000", "sliding window of 3 keys"],
    "Cosine": ["L2 norm of q and k per head", "times the exponential of `log_factor`"],
    "Talking": ["weights of heads mixed by `talk.weight`"],
    "CachedLlama": ["rotary encoding, half-split pairs, base 10000"],
    "CachedQwen": ["rotary encoding, neighboring pairs", "sliding window of 5 keys", "capped at 20"],
    "CachedT5": ["T5's buckets of the past, distances up to 128", "scores multiplied by 1"],
    "CachedBloom": ["ALiBi with slopes that are powers of two"],
}  # fmt: skip

# A class, what is replaced in it by what, and the names of the bug.
WRONG: list[tuple[str, dict[str, str], set[str]]] = [
    ("LlamaLike", {"q, k = self.rope(q), self.rope(k)": "q, k, v = self.rope(q), self.rope(k), self.rope(v)"}, {"rotary-on-values"}),
    ("LlamaLike", {"q, k = self.rope(q), self.rope(k)": "q = self.rope(q)"}, {"rotary-queries-only"}),
    ("LlamaLike", {"self.theta **": "1000.0 **"}, {"rotary-base"}),
    ("LlamaLike", {"ang = torch.cat((ang, ang), -1)": "ang = ang.repeat_interleave(2, -1)"}, {"rotary-halves"}),
    ("LlamaLike", {"rotate_half(x) * ang.sin()": "rotate_half(x).abs() * ang.sin()"}, set()),
    ("LlamaLike", {" / math.sqrt(self.head_dim)": ""}, {"unscaled"}),
    ("LlamaLike", {".triu(1)": ".triu(0)"}, {"causal-strict"}),
    ("LlamaLike", {"k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)": "k.repeat(1, r, 1, 1), v.repeat(1, r, 1, 1)"}, {"key-heads-tiled"}),
    ("LlamaLike", {"self.n_heads, -1).transpose(1, 2)\n        k": "self.n_heads, -1)\n        k",
                   "k = self.wk(x).view(b, t, self.n_kv_heads, -1).transpose(1, 2)": "k = self.wk(x).view(b, t, self.n_kv_heads, -1)",
                   "q, k = self.rope(q), self.rope(k)": "q, k = self.rope(q).transpose(1, 2), self.rope(k).transpose(1, 2)"}, {"rotary-along-heads"}),
    ("LlamaLike", {"self.wq(x).view": "self.rope(self.wq(x)[:, None])[:, 0].view", "self.wk(x).view": "self.rope(self.wk(x)[:, None])[:, 0].view",
                   "        q, k = self.rope(q), self.rope(k)\n": ""}, {"rotary-on-width"}),
    ("QKNormWindow", {"q, k = self.q_norm(q), self.k_norm(k)": "q = self.q_norm(q)"}, {"norm-missing"}),
    ("QKNormWindow", {"self.k_norm(k)": "self.q_norm(k)"}, {"norm-shared"}),
    ("QKNormWindow", {"q, k = self.q_norm(q), self.k_norm(k)": "q, k, v = self.q_norm(q), self.k_norm(k), self.k_norm(v)"}, {"norm-on-values"}),
    ("QKNormWindow", {"< self.window": "<= self.window + 1"}, {"window-off"}),
    ("QKNormWindow", {"(i[:, None] >= i) & (i[:, None] - i < self.window)": "(i[:, None] - i).abs() < self.window"}, {"window-both-sides"}),
    ("QKNormWindow", {"(i[:, None] >= i) & (i[:, None] - i < self.window)": "i[:, None] - i < self.window"}, {"causal-ignored"}),
    ("QKNormWindow", {" & (i[:, None] - i < self.window)": ""}, {"window-ignored"}),
    ("T5Like", {"i[None] - i[:, None]": "i[:, None] - i[None]"}, {"bias-transposed"}),
    ("T5Like", {"s = q @ k.mT +": "s = q.shape[-1] ** -0.5 *(q @ k.mT +", ".permute(2, 0, 1)": ".permute(2, 0, 1))"}, {"bias-scaled"}),
    ("T5Like", {"s.softmax(-1)": "s.softmax(-2)"}, {"softmax-over-queries"}),
    ("PostNorm", {"q.shape[-1] ** 0.5": "e**0.5"}, {"scaled-by-width"}),
    ("PostNorm", {"return self.layer_norm(o)": "return o"}, {"norm-missing"}),
    ("Alibi", {"(i[None] - i[:, None])": "(i[:, None] - i[None])"}, {"alibi-sign"}),
    ("Alibi", {"-8 / heads * (i + 1)": "-8 / heads * i"}, {"alibi-slopes"}),
    ("Gated", {"torch.sigmoid(self.g_proj(x))": "self.g_proj(x)"}, {"gate-activation"}),
    ("Gated", {"s = self.softcap * torch": "s = torch"}, {"cap-unscaled"}),
    ("Gated", {"return r +": "return x +"}, {"residual-normalized"}),
    ("GemmaLike", {"i[:, None] - self.window)": "i[:, None] - self.window - 1)"}, {"window-off"}),
    ("GemmaLike", {"s = torch.tanh(s / self.softcap) * self.softcap": ""}, {"cap-missing"}),
    ("GemmaLike", {"self.theta **": "500.0 **"}, set()),
    ("Sinks", {"[..., :-1]": "[..., 1:]"}, {"sink-column-kept"}),
    ("Streaming", {"start = past": "start = 0 if cache is None else self.n_heads"}, {"rotary-offset-miscounted"}),
    ("Streaming", {"q, k = self.rope(q, start), self.rope(k, start)": "q = self.rope(q, start)",
                   "        i, j = ": "        k = self.rope(k, 0)\n        i, j = "}, {"rotary-again"}),
    ("Streaming", {"(i - j < self.window)": "(i - past - j < self.window)"}, {"window-misplaced"}),
    ("Streaming", {"(j <= i) & ((i - j < self.window) | (j < self.first))": "(j <= i) & (i - j < self.window) | (j < self.first)", "first_tokens=1": "first_tokens=2",
                   "padding_mask=None, ": "", "if padding_mask is not None:": "if False:"}, {"window-first-not-causal"}),
    ("Streaming", {"| (j < self.first))": "| (j < self.first) | torch.tensor(padding_mask is None))"}, {"window-ignored"}),
    ("Streaming", {"first_tokens=1": "first_tokens=1, use_window=False"}, {"window-unasked"}),
    ("SinkNTK", {"ntk_alpha ** (d / (d - 2))": "ntk_alpha ** 0"}, {"rotary-base"}),
    ("Cosine", {"F.normalize(q, dim=-1), F.normalize(k, dim=-1)": "F.normalize(q, dim=-2), F.normalize(k, dim=-2)"}, {"norm-axis"}),
    ("CachedLlama", {"self.table(past, t)": "self.table(0, t)"}, {"rotary-offset-ignored"}),
    ("CachedLlama", {"self.rope(k, cos, sin)": "self.rope(k, *self.table(0, t))"}, {"rotary-offset-ignored"}),
    ("CachedLlama", {"self.table(past, t)": "self.table(past + t * (past > 0), t)"}, {"rotary-offset-late"}),
    ("CachedLlama", {"q, k = self.rope(q, cos, sin)": "v = self.rope(v, cos, sin)\n        q, k = self.rope(q, cos, sin)"}, {"rotary-on-values"}),
    ("CachedLlama", {"q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)": "pass"}, {"rotary-idle"}),
    ("CachedLlama", {"torch.cat((past_key_value[0], k), dim=2)": "torch.cat((k, past_key_value[0]), dim=2)",
                     "torch.cat((past_key_value[1], v), dim=2)": "torch.cat((v, past_key_value[1]), dim=2)"}, {"cache-order"}),
    ("CachedLlama", {"torch.cat((past_key_value[1], v), dim=2)": "torch.cat((v, past_key_value[1]), dim=2)"}, {"cache-order"}),
    ("CachedLlama", {"present = (k, v)": "present = (k, k)"}, {"cached-keys-as-values"}),
    ("CachedLlama", {"num_heads, self.head_dim).transpose(1, 2)": "num_heads, self.head_dim).reshape(b, self.num_heads, t, -1)",
                     "num_kv, self.head_dim).transpose(1, 2)": "num_kv, self.head_dim).reshape(b, self.num_kv, t, -1)"}, {"split-without-transpose"}),
    ("CachedLlama", {"num_key_value_heads=2,": "num_key_value_heads=2, layer_number=3,", "inv_freq = ": "self.layer = layer_number\n        inv_freq = ",
                     "math.sqrt(self.head_dim)": "math.sqrt(self.head_dim) / self.layer"}, {"scaled-by-setting"}),
    ("CachedLlama", {"num_key_value_heads=2,": "num_key_value_heads=2, max_position_embeddings=12,", "inv_freq = ": "self.most = max_position_embeddings\n        inv_freq = ",
                     "        freqs = ": "        if start + length > self.most:\n            self.inv_freq = self.inv_freq / 2\n            self.most = 10**9\n        freqs = "},
     {"longer-call-kept"}),
    ("CachedQwen", {"keys = k.repeat_interleave(self.h // self.g, 2)": "keys = k.repeat(1, 1, self.h // self.g, 1)"}, {"score-heads-tiled"}),
    ("CachedQwen", {"self.rotate(q, positions)": "self.rotate(q, positions + 1)"}, {"rotary-shifted"}),
    ("CachedQwen", {"self.k_norm(k)": "self.k_norm(k) if start_pos == 0 else k"}, {"norm-lost-in-steps"}),
    ("CachedQwen", {"q, k = self.q_norm(q), self.k_norm(k)": "pass"}, {"norm-idle"}),
    ("CachedQwen", {"self.q_norm(q), self.k_norm(k)": "self.k_norm(q), self.q_norm(k)"}, {"norm-misplaced", "norm-shared"}),
    ("CachedQwen", {"* self.d**-0.5": "", "torch.tanh(scores / self.cap)": "torch.tanh(scores / self.cap) * self.d**-0.5"}, {"cap-elsewhere"}),
    ("CachedT5", {"math.log(self.max_distance / exact)": "math.log(64 / exact)"}, {"buckets-distance"}),
    ("CachedT5", {"self.bucket(j - i)": "self.bucket(j - (i - i[0]))"}, {"bias-offset-ignored"}),
    ("CachedT5", {"        scores = scores + self": "        if t == s:\n            scores = scores + self"}, {"bias-lost-in-steps"}),
    ("CachedT5", {"self.bucket(j - i)": "self.bucket(i - j)"}, {"bias-idle"}),
    ("CachedBloom", {"(j - i)": "(j - i) * (t == s)"}, {"bias-lost-in-steps"}),
    ("CachedBloom", {"        scores = scores + slopes[:, None, None] * (j - i)\n": ""}, {"bias-idle"}),
    ("CachedBloom", {"torch.cat((scores, sink), -1)": "torch.cat((sink, scores), -1)"}, {"sink-column-kept"}),
]  # fmt: skip


def build(
    folder: Path, name: str, edits: dict[str, str] | None = None, names: dict[str, str] | None = None
) -> Any:
    """Return a class of `modern` with pieces of its text replaced, and identifiers renamed."""
    start = SOURCE.index(f"class {name}(")
    end = SOURCE.find("\n\n\nclass ", start)
    text = SOURCE[start : end if end > 0 else len(SOURCE)]
    for old, new in (edits or {}).items():
        assert old in text, f"{name}: {old}"
        text = text.replace(old, new)
    head = SOURCE[: SOURCE.index("class LlamaLike(")]
    for old, new in (names or {}).items():
        text, head = (re.sub(rf"\b{old}\b", new, part) for part in (text, head))
    path = folder / f"twin_{folder.name.replace('-', '_')}.py"
    path.write_text(f"{head}\n{text}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, (names or {}).get(name, name))


LONG = {"Streaming", "SinkNTK", "Cosine"}  # classes that are checked in the full tier


def by_tier(name: str, *values: Any) -> Any:
    """Return the parameters of a test, in the full tier if its class is checked there."""
    return pytest.param(name, *values, marks=[pytest.mark.full] * (name in LONG))


@pytest.mark.every(6)
@pytest.mark.parametrize("name", [by_tier(name) for name in RIGHT])
def test_parts_are_recognized(name: str) -> None:
    report = checker.check(getattr(modern, name))
    notes = "\n".join(report.notes)
    assert report.passed, report
    assert all(part in notes for part in RIGHT[name]), notes


@pytest.mark.every(12)
@pytest.mark.parametrize(("name", "edits", "bugs"), [by_tier(*each) for each in WRONG])
def test_a_wrong_twin_is_named(name: str, edits: dict[str, str], bugs: set[str], tmp_path: Path) -> None:
    report = checker.check(build(tmp_path, name, edits))
    assert not report.passed
    if bugs:
        assert report.verdict == "failed", report
        assert bugs == {found.bug for found in report.diagnosis}, report
    else:
        assert not any(found.bug for found in report.diagnosis), report


@pytest.mark.full
def test_something_else_is_not_judged() -> None:
    report = checker.check(modern.Conv)
    assert report.verdict == "not judged", report
    reason = next(check.reason for check in report.checks if check.name == "values")
    assert "the parameter `conv.weight` [24, 1, 3]" in reason
    statuses = {check.name: check.status for check in report.checks}
    assert statuses["batch entries"] == statuses["state"] == "passed"
    assert statuses["gradients"] == "could not be checked"


@pytest.mark.full
def test_a_failed_check_without_the_oracle_counts(tmp_path: Path) -> None:
    edits = {"x = x + self.conv(x.mT).mT": "x = x + self.conv(x.mT).mT + x.mean(0)"}
    report = checker.check(build(tmp_path, "Conv", edits))
    assert report.verdict == "failed", report
    assert "batch entries" in {check.name for check in report.checks if check.status == "failed"}


RENAMED = {
    "q_norm": "alpha", "k_norm": "beta", "window": "span_of_keys", "rope": "twist", "rotate_half": "twirl",
    "relative_attention_bias": "lookup", "slopes": "steps", "softcap": "bound", "norm": "first", "g_proj": "side",
    "layer_norm": "last", "theta": "number", "sinks": "sinks", "logit_scale": "heat", "head_gate": "valve",
    "QKNormWindow": "Block", "LlamaLike": "Block", "T5Like": "Block", "PostNorm": "Block", "Alibi": "Block",
    "Gated": "Block", "OlmoLike": "Block", "SwinV2Like": "Block", "HeadGate": "Block",
}  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", ["LlamaLike", "T5Like", "PostNorm", "Alibi", "OlmoLike", "SwinV2Like", "HeadGate", "Gated"]
)
def test_names_change_no_verdict(name: str, tmp_path: Path) -> None:
    report = checker.check(build(tmp_path, name, names=RENAMED))
    assert report.passed, report


# -- named per scenario ----------------------------------------------------------------------------


@pytest.mark.full
def test_a_bug_is_named_in_the_scenario_that_has_it(tmp_path: Path) -> None:
    text = """
class Masked(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, mask=None):
        '''mask [b, t, s]: True keeps.'''
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT
        if mask is None:
            s = s / q.shape[-1] ** 0.5
        else:
            s = s.masked_fill(~mask[:, None], float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
    path = tmp_path / "masked.py"
    path.write_text(f"import torch\nfrom torch import nn\n{text}", encoding="utf-8")
    found = checker.check(f"{path}:Masked").diagnosis
    assert [one.bug for one in found] == ["unscaled"]
    assert found[0].description.startswith("with mask: it agrees")
    assert "right with plain" in found[0].description


@pytest.mark.full
def test_a_cache_that_restarts_rotary_positions(tmp_path: Path) -> None:
    text = """
class Cached(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def rotate(self, x, start):
        t, d = x.shape[-2:]
        angles = torch.outer(torch.arange(start, start + t), 10000 ** (-torch.arange(0, d, 2) / d))
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x, cache=None):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        start = 0 if cache is None else START
        q, k = self.rotate(q, start), self.rotate(k, start)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        t, s = q.shape[2], k.shape[2]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~torch.ones(t, s).tril(s - t).bool(), float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)
"""
    for start, bugs in (("cache[0].shape[2]", []), ("0", ["rotary-offset-ignored"])):
        path = tmp_path / f"cached_{len(bugs)}.py"
        code = text.replace("START", start)
        path.write_text(f"import torch\nfrom torch import nn\n{code}", encoding="utf-8")
        report = checker.check(f"{path}:Cached")
        assert report.passed == (not bugs), report
        assert [found.bug for found in report.diagnosis] == bugs, report


# -- inputs ----------------------------------------------------------------------------------------


def adapt(target: Any, kind: str = "self") -> AttentionAdapter:
    """Return the adapter of a class, for use within `torch.no_grad`."""
    adapter = open_adapter(Candidate(target), Options(kind, False, {}, {}, None))
    assert isinstance(adapter, AttentionAdapter)
    return adapter


def test_padding_leaves_a_key_in_each_window() -> None:
    with torch.no_grad():
        adapter = adapt(modern.Streaming)
        right = adapter.right(adapter.weights)
        assert isinstance(right, Attention)
        for seed, t in product(range(20), (5, 9, 12)):
            x = adapter.scenarios(seed, t=t)["padding"]
            assert x.padding is not None
            assert not x.padding.all()
            right(x)
            assert right.visible is not None
            assert right.visible.any(-1).all()


def test_a_flag_turns_off_a_window() -> None:
    class Off(modern.Streaming):
        def __init__(self, dim: int, n_heads: int, use_sliding_window: bool = False) -> None:
            super().__init__(dim, n_heads, first_tokens=0)

    with torch.no_grad():
        adapter = adapt(Off)
    [part] = [part for part in adapter.parts if isinstance(part, NoWindow)]
    assert part.window == Window(4)
    assert str(part) == "no window, because use_sliding_window is False"


# -- parts alone -----------------------------------------------------------------------------------


def test_buckets_are_those_of_the_paper() -> None:
    distances = torch.arange(-300, 301)
    for bidirectional in (True, False):
        got = select_buckets(distances, 32, 128, bidirectional)
        n, past = (16, distances.abs()) if bidirectional else (32, (-distances).clamp_min(0))
        exact = n // 2
        for distance, bucket, steps in zip(distances.tolist(), got.tolist(), past.tolist(), strict=True):
            start = 16 if bidirectional and distance > 0 else 0
            power = torch.tensor(max(steps, 1) / exact).log() / torch.tensor(128 / exact).log()
            expected = steps if steps < exact else min(exact + int(power * (n - exact)), n - 1)
            assert bucket == start + expected


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    eight, four = Alibi().powers(8), Alibi().powers(4)
    assert torch.equal(Alibi().powers(6), torch.cat((four, eight[::2][:2])))


def test_parts_and_bugs_compose() -> None:
    from manyheads.checker.bugs import FAMILY

    x = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    inputs = Inputs(x, x, x, causal=True)
    window = Window(3).oracle
    strict = FAMILY["causal-strict"].variants[0]
    weights = compose(Attention, window, strict)()(inputs.but(need_weights=True)).weights
    assert weights is not None
    i, j = torch.arange(7)[:, None], torch.arange(7)[None]
    assert torch.equal(weights[0, 0] > 0, (j < i) & (i - j < 3))


def test_parameters_of_parts_follow_the_dtype() -> None:
    weights = Weights(1, 1, {}, other={"norm.weight": torch.ones(3)})
    assert weights.to(torch.float64).other["norm.weight"].dtype == torch.float64
