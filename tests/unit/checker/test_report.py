"""Reports: the verdict first, conventions in a section of their own, half precision, and short errors."""

from __future__ import annotations

import math
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.checks import CONVENTIONS
from manyheads.checker.diagnosis import Diagnosis

pytestmark = pytest.mark.usefixtures("one_thread", "quick")


class Layer(nn.Module):
    """Self-attention of x `[b, t, e]`."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, 1, t, s]: True keeps."""
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = self.fill(scores, ~mask)
        return self.o((self.weights(scores) @ v).transpose(1, 2).flatten(2))

    def fill(self, scores: Tensor, masked: Tensor) -> Tensor:
        return scores.masked_fill(masked, -math.inf)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


def layer(**steps: Any) -> type[Layer]:
    """Return a class with other steps."""
    return type("Changed", (Layer,), {"__doc__": Layer.__doc__, **steps})


def by_status(report: checker.Report, status: str) -> dict[str, checker.Check]:
    return {check.name: check for check in report.checks if check.status == status}


def printed(report: checker.Report, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    report.print(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- conventions -----------------------------------------------------------------------------------


def zero_rows(self: Layer, scores: Tensor) -> Tensor:
    return scores.softmax(-1).nan_to_num()


def spread(self: Layer, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return weights * 0 if bool(weights.isnan().any()) else weights


def spread_nan(self: Layer, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9).mean()


def fill_lowest(self: Layer, scores: Tensor, masked: Tensor) -> Tensor:
    return scores.masked_fill(masked, torch.finfo(scores.dtype).min)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("steps", "name"),
    [({}, "empty-rows-nan"), ({"fill": fill_lowest}, "empty-rows-uniform"), ({"weights": zero_rows}, "")],
)
def test_what_an_empty_row_gives_is_a_convention(steps: dict[str, Any], name: str) -> None:
    found = checker.check(layer(**steps))
    assert found.passed, found
    assert not found.diagnosis
    reported = by_status(found, "convention").get("empty rows")
    assert (reported is not None) == bool(name)
    strict = checker.check(layer(**steps), strict=["empty-rows"])
    assert strict.passed == (not name)
    assert [diagnosis.bug for diagnosis in strict.diagnosis] == [name] * bool(name)
    if reported is not None:
        assert reported.reason.startswith(f"{name}: ")
        assert f"empty-rows {name}: " in " ".join(printed(found).split())


@pytest.mark.every(2)
@pytest.mark.parametrize("weights", [spread, spread_nan])
def test_an_empty_row_that_changes_others_fails(weights: Any) -> None:
    found = checker.check(layer(weights=weights))
    assert "empty rows" in by_status(found, "failed")


def test_nan_in_one_batch_entry_may_not_reach_another() -> None:
    class Centered(Layer):
        """Self-attention of x `[b, t, e]`."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask) + 0 * x.sum()

    found = checker.check(Centered)
    assert "NaN in batch entry 0" in by_status(found, "failed")["batch entries"].reason


def test_other_conventions_and_their_names() -> None:
    class Strided(Layer):
        """Self-attention of x `[b, t, e]`."""

        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x.view(x.shape[0], -1, x.shape[-1]).view(-1).view(x.shape), bias)

    found = checker.check(Strided)
    assert found.passed, found
    conventions = by_status(found, "convention")
    assert "raises an error" in conventions["non-contiguous inputs"].reason

    class Documented(Layer):
        """Self-attention of x `[b, t, e]`. The mask is ignored if weights are returned."""

        def forward(self, x: Tensor, mask: Tensor | None = None, return_weights: bool = False) -> Any:
            """mask [b, 1, t, s]: True = masked."""
            self.kept: list[Tensor] = []
            out = super().forward(x, None if mask is None or return_weights else ~mask)
            return (out, self.kept[0]) if return_weights else out

        def weights(self, scores: Tensor) -> Tensor:
            self.kept.append(scores.softmax(-1))
            return self.kept[-1]

    found = checker.check(Documented)
    assert found.passed, found
    conventions = by_status(found, "convention")
    assert {"masks with weights", "mask form"} <= {*conventions}
    assert conventions["mask form"].reason == "mask masks where True."
    undocumented = type("Undocumented", (Documented,), {"__doc__": Layer.__doc__})
    assert not checker.check(undocumented).passed


@pytest.mark.full
def test_strict_names_are_those_of_the_report() -> None:
    found = checker.check(Layer)
    names = [check.option for check in by_status(found, "convention").values()]
    assert set(names) <= set(CONVENTIONS)
    for strict in ("all", names):
        failing = checker.check(Layer, strict=strict)
        assert [check.option for check in by_status(failing, "failed").values()] == names
        assert failing.verdict == "failed"
    assert checker.check(Layer, strict=["float16"]).passed
    with pytest.raises(checker.Unclear, match=r"Expected --strict all, empty-rows, .*, got 'rows'"):
        checker.check(Layer, strict=["empty-rows", "rows"])


@pytest.mark.full
def test_the_command_takes_strict_several_times(run_command: Any) -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    start, end = source.index("class Layer"), source.index("def layer(")
    text = "import math\nimport torch\nfrom torch import Tensor, nn\n\n" + source[start:end]
    Path("mine.py").write_text(text, encoding="utf-8")
    assert run_command("check", "mine.py:Layer").code == 0
    done = run_command("check", "mine.py:Layer", "--strict", "float16", "--strict", "empty-rows")
    assert done.code == 1
    assert "empty-rows-nan" in done.out.splitlines()[0]
    assert run_command("check", "mine.py:Layer", "--strict", "rows").code == 2


# -- half precision --------------------------------------------------------------------------------


def rounded_to_tenths(self: Layer, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return weights if scores.dtype == torch.float32 else (weights * 10).round() / 10


def test_weights_rounded_to_tenths_fail_in_half_precision() -> None:
    found = checker.check(layer(weights=rounded_to_tenths))
    assert set(by_status(found, "failed")) == {"float16", "bfloat16"}
    assert found.words()[0] == "The values are right. What failed is: float16, bfloat16."
    assert "plain PyTorch loses" in found.words()[1]


def fill_overflow(self: Layer, scores: Tensor, masked: Tensor) -> Tensor:
    return scores.masked_fill(masked, -1e9)


def test_a_fill_that_float16_does_not_have_is_named() -> None:
    found = checker.check(layer(fill=fill_overflow))
    assert set(by_status(found, "failed")) == {"float16"}
    assert [diagnosis.bug for diagnosis in found.diagnosis] == ["fill-overflow"]
    assert "finfo" in found.diagnosis[0].fix
    stated = type(
        "Stated", (layer(fill=fill_overflow),), {"__doc__": "Causal self-attention, used in float32."}
    )
    assert "float32" in by_status(checker.check(stated), "convention")["float16"].reason


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "weights",
    [
        lambda self, scores: scores.float().softmax(-1).to(scores.dtype),
        lambda self, scores: (
            (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num()
            / (scores - scores.amax(-1, keepdim=True))
            .exp()
            .nan_to_num()
            .sum(-1, keepdim=True)
            .clamp_min(1e-6)
        ),
        lambda self, scores: (scores - scores.logsumexp(-1, keepdim=True)).exp(),
    ],
)
def test_other_orders_of_the_same_steps_pass_in_half_precision(weights: Any) -> None:
    found = checker.check(layer(weights=weights))
    assert {"float16", "bfloat16"} <= set(by_status(found, "passed")), found


@pytest.mark.full
def test_a_layer_that_does_not_run_in_half_precision() -> None:
    changed = layer(weights=lambda self, scores: scores.float().softmax(-1))
    found = checker.check(changed)
    assert found.passed, found
    for name in ("float16", "bfloat16"):
        assert by_status(found, "convention")[name].reason.startswith(f"it doesn't run in {name}")
    assert checker.check(changed, strict="float16").verdict == "failed"


@pytest.mark.full
def test_half_precision_is_judged_without_an_oracle() -> None:
    class Warped(Layer):
        """Self-attention of x `[b, t, e]`."""

        def __init__(self, embed_dim: int, num_heads: int) -> None:
            super().__init__(embed_dim, num_heads)
            self.warp = nn.Linear(embed_dim, embed_dim)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(torch.tanh(self.warp(x)) * x, mask)

    found = checker.check(Warped)
    assert found.verdict == "not judged", found
    assert {"float16", "bfloat16"} <= set(by_status(found, "passed")), found
    wrong = type("Wrong", (Warped,), {"__doc__": Layer.__doc__, "weights": rounded_to_tenths})
    assert {"float16", "bfloat16"} <= set(by_status(checker.check(wrong), "failed"))


class Table(Layer):
    """Causal self-attention of x `[b, t, e]` with rotary positions, from frequencies that are a buffer."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        d = embed_dim // num_heads
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, d, 2) / d))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]).to(self.frequencies), self.frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        t = x.shape[1]
        masked = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = self.rotate(q) @ self.rotate(k).mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(masked, -math.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class RoundedTable(Table):
    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2]).to(x.dtype)[:, None] * self.frequencies.to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class MixedTable(Table):
    """Causal self-attention of x `[b, t, e]` with rotary positions, from frequencies that are a buffer."""

    def rotate(self, x: Tensor) -> Tensor:  # float32 frequencies would give queries that don't fit values
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


@pytest.mark.full
def test_angles_that_only_casting_of_buffers_rounds_are_a_convention() -> None:
    found = checker.check(Table)
    assert found.passed, found
    assert "With buffers in float32 it is right" in by_status(found, "convention")["bfloat16"].reason
    assert checker.check(Table, strict="bfloat16").verdict == "failed"
    assert "bfloat16" in by_status(checker.check(RoundedTable), "failed")
    found = checker.check(MixedTable)
    assert found.passed, found
    assert "Keep buffers in float32" in by_status(found, "convention")["bfloat16"].reason


# -- the printed report ----------------------------------------------------------------------------


LONG = Diagnosis("", "; ".join(["no known bug explains it", *(f"entry {n} is wrong" for n in range(20))]))
CHECKS = [checker.Check(f"check {n}", "passed", "a long reason " * 8, 1e-7, 1e-5) for n in range(30)]
FAILED = checker.Check("values", "failed", "the output differs in 17 of 20 inputs (plain)", 1.8, 2.1e-5)
UNJUDGED = checker.Check("argument mask", "not judged", "no check passed it. Give --arg mask=ROLE.")


@pytest.mark.parametrize(
    ("first", "diagnosis"),
    [
        (CHECKS[0], []),
        (FAILED, [Diagnosis("unscaled", "it agrees to 1e-6 with attention …", "divide by √d"), LONG]),
        (UNJUDGED, []),
    ],
)
def test_the_verdict_and_what_to_fix_are_on_the_first_screen(
    first: checker.Check, diagnosis: list[Diagnosis]
) -> None:
    notes = ["a note that says what was assumed " * 4] * 12
    found = checker.Report("attention.py:MyAttention", "self", True, [first, *CHECKS], diagnosis, notes)
    lines = printed(found).splitlines()
    assert lines[0][2:] == found.headline
    assert lines[0][2:].startswith(f"{found.verdict}: attention.py:MyAttention")
    screen = " ".join(" ".join(lines[:24]).split())
    assert all(word.strip() in screen for word in found.words())
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("width", [40, 60, 72, 80, 200])
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    found = checker.Report("x", "self", True, [FAILED])
    rows = printed(found, width).rpartition("1 failed")[2].partition("The code")[0]
    cells = f"✗ values error 1.8e+00 (allowed 2.1e-05): {FAILED.reason}"
    assert sorted("".join(rows.split())) == sorted("".join(cells.split()))


def test_values_are_called_right_only_if_they_were_compared() -> None:
    passed, failed = checker.Check("values", "passed"), checker.Check("state", "failed", "a reason.")
    unchecked = checker.Check("values", "not judged", "something else is in it")
    mask = checker.Check("mask", "failed", "another reason")
    for checks, says in (([passed, failed], True), ([failed], False), ([unchecked, failed], False)):
        words = checker.Report("x", "self", True, checks).words()
        assert words[0].startswith("The values are right. What failed is: state.") == says
        assert "What failed is: state." in words[0]
    assert "right" not in checker.Report("x", "self", True, [passed, mask]).words()[0]


def test_conventions_in_json_and_junit() -> None:
    kept = checker.Check("empty rows", "convention", "empty-rows-nan: NaN.")
    found = checker.Report("x", "self", True, [kept])
    assert found.passed
    (check,) = found.as_json()["checks"]
    assert check == {"name": "empty rows", "status": "convention", "reason": kept.reason} | dict.fromkeys(
        ("error", "allowed")
    )
    suite = ElementTree.fromstring(found.as_junit())
    assert {suite.get(name) for name in ("failures", "errors", "skipped")} == {"0"}
    assert found.as_json()["verdict"] == "passed"


FAILING = """
from torch import nn
from manyheads.checker import assert_attention

class Attention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)

def test_mine():
    assert_attention(Attention)

def test_unclear():
    assert_attention(Attention, weights={"q": "alpha"})
"""


@pytest.mark.full
def test_a_failing_test_is_short(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(FAILING, encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "test_mine.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    mine, unclear = done.stdout.partition("test_unclear ___")[::2]
    assert "failed: Attention as self (guessed): unscaled" in mine
    assert "To fix it: divide the scores" in mine
    assert len(mine.splitlines()) <= 25, mine
    assert "to name parameters (q.weight" in unclear
    assert len(unclear.splitlines()) <= 25, unclear
    assert "site-packages" not in done.stdout + done.stderr
    assert "checker/" not in unclear.partition("short test summary")[0].replace("checker/__init__.py", "", 1)
