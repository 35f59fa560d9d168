"""Modules by an author who hadn't seen the family of bugs, written after it was frozen: `held_out/`.

None of the wrong ones is named falsely, and none of the right ones fails. Names that
were added afterwards, because these showed that they were missing, are marked as such.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from manyheads import checker

FOLDER = Path(__file__).parent / "held_out"

pytestmark = pytest.mark.usefixtures("quick")

# What the checker says of each: names of the family (any of them is true); none where it names none.
NAMED: dict[str, set[str]] = {
    "mistake_01": {"scaled-by-length"},
    "mistake_02": {"softmax-over-heads"},  # once the table knew the names of its layers
    "mistake_03": {"keys-reshaped"},  # added afterwards
    "mistake_04": {"weights-transposed"},
    "mistake_05": {"masked-after-softmax"},
    "mistake_06": {"masked-ones-added"},
    "mistake_07": {"mask-transposed"},
    "mistake_08": set(),
    "mistake_09": {"batch-as-tokens"},  # added afterwards
    "mistake_10": {"key-heads-tiled"},
    "mistake_11": {"keys-as-values", "value-from-key-weights"},
    "mistake_12": set(),
    "mistake_13": set(),
    "mistake_14": set(),
    "mistake_15": {"no-max-subtracted"},
    "mistake_16": set(),
    "mistake_17": {"angles-inverted"},
    "mistake_18": {"rotary-reflected"},
    "mistake_19": {"mask-dropped-with-weights"},
    "mistake_20": set(),
}

# What the report says where it names nothing.
SAID = {
    "mistake_08": "several together are wrong, so batch entries are mixed up",
    "mistake_12": "the output is wrong throughout",
    "mistake_13": "The values are right. What failed is: gradients",
    "mistake_14": "The values are right. What failed is: gradients, state",
    "mistake_16": "What failed is: shapes",
    "mistake_20": "The values are right. What failed is: cache",
}


def report(stem: str, monkeypatch: pytest.MonkeyPatch) -> checker.Report:
    spec = importlib.util.spec_from_file_location(f"held_out_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    return checker.check(getattr(module, module.TARGET))


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stem", NAMED)
def test_a_wrong_one_fails_and_is_named_truly_or_not_at_all(
    stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(stem, monkeypatch)
    assert not found.passed
    assert {diagnosis.bug for diagnosis in found.diagnosis if diagnosis.bug} == NAMED[stem]
    assert SAID.get(stem, "") in re.sub(r"\s+", " ", " ".join(found.words()))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stem", [f"correct_{n}" for n in range(1, 6)])
def test_a_right_one_passes(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(stem, monkeypatch)
    assert found.passed, [one for one in found.checks if one.status == "failed"]
    assert not found.diagnosis
