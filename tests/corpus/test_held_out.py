"""Modules by an author who hadn't seen the family of bugs, written after it was frozen: `held_out/`.

None of the wrong ones is named falsely, and none of the correct ones fails.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from manyheads import checker

FOLDER = Path(__file__).parent / "held_out"

pytestmark = pytest.mark.usefixtures("quick", "one_thread")

# What is wrong in each mistake_NN.py (the files don't say it), and what the checker reports: names of
# bugs, any of which is true, or words where it names none.
MISTAKES: dict[str, set[str] | str] = {
    # Scores are divided by the square root of the number of keys instead of the head's width.
    "01": {"scaled-by-length"},
    # F.softmax has no dim: it takes dim 1 of four, so it normalises over the heads.
    "02": {"softmax-over-heads"},  # once the table knew the names of its layers
    # The keys are transposed by a reshape to [b, h, d, t] instead of a transpose.
    "03": {"keys-reshaped"},  # a name that was added because of this module
    # The values are mixed with the weights transposed: output j sums weights (i, j) over i.
    "04": {"weights-transposed"},
    # The mask is applied after softmax and the rows are not normalised again.
    "05": {"masked-after-softmax"},
    # The boolean mask is added to the scores as 0 and 1, so it masks nothing.
    "06": {"masked-ones-added"},
    # The padding mask is laid along queries: padded queries give zeros, padded keys are visible.
    "07": {"mask-transposed"},
    # The padding mask is tiled over [b·h], which is batch-major: entries get others' masks.
    "08": {"mask-tiled"},  # a name that was added because of public reports
    # nn.MultiheadAttention lacks batch_first, so a batch-first input attends over the batch.
    "09": {"batch-as-tokens"},  # a name that was added because of this module
    # Key and value heads are tiled (0 1 0 1) instead of repeated each (0 0 1 1).
    "10": {"key-heads-tiled"},
    # The values are projected by the key's layer; the value's layer is never used.
    "11": {"keys-as-values", "value-from-key-weights"},
    # A ReLU is applied to the projected queries, keys and values.
    "12": {"projections-activated"},  # a name that was added because of public reports
    # The weights are detached before mixing: queries and keys get no gradient.
    "13": "The values are right. What failed is: gradients",
    # The query is scaled in place: the caller's tensor is changed (and a leaf raises).
    "14": {"input-changed"},  # a name that was added because of public reports
    # Softmax without subtracting the row's maximum: large scores overflow to inf / inf = NaN.
    "15": {"no-max-subtracted"},
    # The output is squeezed: a batch of one or a target of one loses its dimension.
    "16": "What failed is: shapes",
    # The exponent has lost its minus: frequencies grow with the dimension, 10000^(+2i/d).
    "17": {"angles-inverted"},
    # rotate_half has lost the minus sign of its first half: not a rotation.
    "18": {"rotary-reflected"},
    # The padding mask is ignored when the weights are returned.
    "19": {"mask-dropped-with-weights"},
    # Only the newest keys and values go to the cache: the third step has lost the first.
    "20": {"cache-overwritten"},
}


def report(stem: str, monkeypatch: pytest.MonkeyPatch) -> checker.Report:
    spec = importlib.util.spec_from_file_location(f"held_out_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return checker.check(getattr(module, module.TARGET))


@pytest.mark.full
@pytest.mark.parametrize("number", MISTAKES)
def test_a_wrong_module_fails_and_is_named_truly_or_not_at_all(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = report(f"mistake_{number}", monkeypatch), MISTAKES[number]
    assert not found.passed
    names = {diagnosis.bug for diagnosis in found.diagnosis if diagnosis.bug}
    if isinstance(expected, str):
        assert not names
        assert expected in re.sub(r"\s+", " ", " ".join(found.words()))
    else:
        assert names == expected


@pytest.mark.every(3)
@pytest.mark.parametrize("stem", [f"correct_{n}" for n in range(1, 6)])
def test_a_correct_module_passes(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(stem, monkeypatch)
    assert found.passed, [check for check in found.checks if check.status == "failed"]
    assert not found.diagnosis
