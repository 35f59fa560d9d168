"""Every planted bug is named, none is named falsely, and the styles without a bug pass.

The everyday tier takes each hundredth cell and each tenth style; the full one each twentieth cell, every bug
and every style; the exhaustive one the other cells.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from manyheads import checker
from manyheads.checker.bugs import FAMILY, calls
from manyheads.checker.isolation.target import find
from tests.corpus.planted import matrix, table

pytestmark = pytest.mark.usefixtures("one_thread")

# Bugs that are the same where queries, keys and values come from one sequence, or where padding and mask
# are one argument: they are named together.
ALIKE = {
    "q-k-swapped": {"scores-transposed", "q-k-arguments-swapped"},
    "k-v-swapped": {"k-v-arguments-swapped"},
    "q-v-swapped": {"q-v-arguments-swapped"},
    "padding-ignored": {"mask-ignored", "causal-in-place-of-mask"},
    "mask-ignored": {"padding-ignored", "causal-in-place-of-mask"},
    "scaled-by-d": {"scaled-twice"},
    "softmax-missing": {"scores-as-weights"},
    "unscaled": {"scaled-by-heads"},  # of one head
    "input-bias-missing": {"biases-missing"},
    "output-bias-missing": {"biases-missing"},  # where the output has the only one
    "queries-as-keys": {"key-from-query-weights", "keys-from-x"},
    "queries-as-values": {"value-from-query-weights", "values-from-x"},
    "keys-as-values": {"value-from-key-weights", "key-as-value-input"},
    "key-from-query-weights": {"queries-as-keys"},
    "polarity-swapped": {"causal-flipped-strict"},
    "scaled-by-heads": {"scaled-by-fourth-root"},  # of 4 heads of 16 entries
    "empty-rows-uniform": {"fill-overflow"},  # where masked scores are set to −1e9
    "softmax-joint": {"softmax-over-everything"},  # of one head
    # Where every output under a mask is NaN, or 0.
    "mask-of-everything": {"masked-plus-infinity"},
    "masked-plus-infinity": {"masked-infinity-after-softmax", "masked-nan", "mask-of-everything"},
    "masked-infinity-after-softmax": {"masked-plus-infinity", "masked-nan", "mask-of-everything"},
    "masked-nan": {"masked-plus-infinity", "masked-infinity-after-softmax", "mask-of-everything"},
}

# Bugs that could also be meant: the checker asks for the role of an argument.
ASKED = {("annotated", "polarity-swapped"), ("cross", "context-ignored")}

CELLS = [(style, bug) for style, entry in matrix.TABLES.items() for bug in entry["bugs"]]
FIRST = {bug: n for n, (_, bug) in reversed([*enumerate(CELLS)])}  # by bug, its first cell


def tier(n: int) -> list[pytest.MarkDecorator]:
    """Return the mark of a cell's tier."""
    if n % 100 == 0:
        return []
    return [pytest.mark.full if n % 20 == 0 or n in FIRST.values() else pytest.mark.exhaustive]


def report(folder: Path, style: str, bug: str | None) -> checker.Report:
    # What a fully masked row gives is a convention, unless it spreads.
    strict = ["empty-rows"] if bug in ("empty-rows-nan", "empty-rows-uniform") else []
    target = find(matrix.write(folder, style, bug))
    return checker.check(target, like=matrix.TABLES[style].get("like"), strict=strict)


def test_no_style_or_bug_is_left_out() -> None:
    assert len(CELLS) > 820
    assert len({bug for _, bug in CELLS}) >= 70
    assert {path.stem for path in matrix.STYLES.glob("*.py")} == set(matrix.TABLES)


def test_a_bug_must_fit_into_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.TABLES["einsum"]["bugs"], "unscaled", {"no such text": ""})
    with pytest.raises(ValueError, match="einsum, unscaled: expected 'no such text' once, found it 0 times"):
        matrix.source("einsum", "unscaled")


def test_reports_are_of_known_bugs() -> None:
    assert set(table.REPORTS) <= {*FAMILY, *calls.BUGS}


def test_the_docs_have_the_tables_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checker.md").read_text(encoding="utf-8")
    # Whole tables, so that no row of a removed bug stays.
    for rows in (table.arguments(), table.roles(), table.lines()):
        assert "\n" + "\n".join(rows) + "\n\n" in page + "\n", (
            "Run python tests/corpus/planted/table.py, and replace the tables in docs/checker.md."
        )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("style", "bug"),
    [pytest.param(*cell, marks=tier(n)) for n, cell in enumerate(CELLS)],
)
def test_a_planted_bug_is_named(style: str, bug: str, tmp_path: Path) -> None:
    found = report(tmp_path, style, bug)
    names = [diagnosis.bug for diagnosis in found.diagnosis]
    assert not found.passed
    if (style, bug) in ASKED:
        assert found.verdict == "not judged"
        assert "--arg" in "\n".join(found.words())
        return
    assert bug in names, (names, [one.description for one in found.diagnosis])
    assert all(one.verified for one in found.diagnosis)
    # Beside it only what can't be distinguished from it.
    assert {*names} - {bug} <= ALIKE.get(bug, set()), names


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "style",
    [pytest.param(x, marks=() if n % 10 == 0 else pytest.mark.full) for n, x in enumerate(matrix.TABLES)],
)
def test_a_correct_style_passes(style: str, tmp_path: Path) -> None:
    found = report(tmp_path, style, None)
    assert found.passed, [one for one in found.checks if one.status == "failed"]
    assert not found.diagnosis
