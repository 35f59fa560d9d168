"""What `bench --kind choice` measures and prints; no time is asserted."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from manyheads import bench
from manyheads.bench import choice
from manyheads.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = list(choice.grid(tuple(choice.DTYPES), choice.SIZES, choice.LENGTHS))
SMALL = [case for case in choice.grid(tuple(choice.DTYPES), (16,), (1, 9)) if case.dtype != "bfloat16"]
SMALL += list(islice(choice.draw(random.Random(0), ("float32", "bfloat16"), (24,), (30,)), 20))
# A window of a few queries, sequences of several lengths, and grouped heads.
SMALL += [choice.Case("float32", "window", True, 1, 4, 2, 5, 12, 8, 6)]
SMALL += [choice.Case("float32", "padding", True, 3, 4, 2, 5, 12, 8, 6)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_contestants_compute_the_same(case: choice.Case) -> None:
    """The mask means the same to PyTorch's function as to ours."""
    with torch.set_grad_enabled(case.training):
        found = choice.contestants(case)
        outs = {name: run() for name, run in found.items() if not isinstance(run, str)}
    assert {"auto", "PyTorch", "native", "chunked", "reference"} <= set(outs)
    if case.training:  # gradients of q, k and v
        flat = {name: torch.cat([x.flatten() for x in grads]) for name, grads in outs.items()}
    else:
        flat = {name: out.flatten() for name, out in outs.items()}
    want = flat.pop("reference").float()
    near = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[case.dtype] * max(
        1.0, float(want.abs().max())
    )
    for name, out in flat.items():
        assert (out.float() - want).abs().max() < near, name


def test_the_grid_has_every_requested_value() -> None:
    assert len(set(choice.cases((), (), (), 0)[: -choice.RANDOM])) == len(set(GRID))
    for dtype in ("float32", "bfloat16", "float16"):
        for training in (False, True):
            cases = [case for case in GRID if case.dtype == dtype and case.training == training]
            assert {case.mask for case in cases} == {"full", "causal", "window", "padding"}
            assert {case.heads for case in cases} == {1, 8}
            assert {case.size for case in cases} == {32, 64, 80, 128}
            assert {min(choice.LENGTHS), max(choice.LENGTHS)} == {1, 8192} <= {case.keys for case in cases}
            assert any(case.groups < case.heads for case in cases)
        cached = {case.queries for case in GRID if case.dtype == dtype and case.queries < case.keys}
        assert cached == {1, 4, 16}


def test_random_cases_follow_from_the_seed() -> None:
    one, other, again = (choice.cases((), (), (), seed)[-choice.RANDOM :] for seed in (1, 2, 1))
    assert one == again != other
    assert len(one) == 200
    assert not set(one) & set(GRID)
    for case in one:
        assert case.scores <= choice.LARGEST
        assert case.heads % case.groups == 0
        assert 1 <= case.queries <= case.keys
        assert 1 <= case.visible <= case.keys
    narrow = choice.cases(("float16",), (48,), (100,), 1)
    assert {(case.dtype, case.size, case.keys) for case in narrow} == {("float16", 48, 100)}


def outcome(auto: float, **others: float) -> choice.Outcome:
    return choice.Outcome(GRID[0], "native", {"auto": auto} | others)


@pytest.mark.parametrize(
    ("auto", "fastest", "slower"),
    [
        (100e-6, 90e-6, False),  # 11 % and 10 µs
        (100e-6, 86e-6, False),  # 16 % and 14 µs
        (100e-6, 84e-6, True),
        (10e-3, 9.6e-3, False),  # 4 % and 400 µs
        (10e-3, 9.4e-3, True),
        (1e-3, 2e-3, False),
    ],
)
def test_the_threshold_of_slower(auto: float, fastest: float, slower: bool) -> None:
    found = outcome(auto, PyTorch=fastest, chunked=1.0)
    assert found.is_slower == slower
    report = choice.Report(MACHINE, 7, [found])
    line = "float32, full, 1 head of 64, 1 token: auto (native) "
    assert report.text().startswith(line if slower else "In none of 1 cases (random ones of seed 7)")


def test_auto_is_not_compared_with_the_kernel_that_it_chose() -> None:
    found = outcome(10e-3, native=5e-3, PyTorch=20e-3)
    assert (found.fastest, found.is_slower) == ("auto", False)


MACHINE = {"processor": "one", "threads": 1, "date": "today", "versions": {"torch": "2"}, "width": None}


def test_a_line_names_the_slower_case_and_the_ratio() -> None:
    case = choice.Case("float16", "padding", True, 2, 8, 2, 4, 1024, 80, 768)
    found = choice.Outcome(case, "native", {"auto": 3e-3, "native": 2.5e-3, "PyTorch": 2e-3})
    assert str(found) == (
        "float16, padding to 768, training, batch 2, 8 heads of 80 (2 of keys), 4 of 1,024 tokens: "
        "auto (native) 3 ms, PyTorch 2 ms (1.50×)"
    )
    assert choice.Report(MACHINE, 7, [found, outcome(1.0)]).text().endswith(
        '\n\nIn 1 of 2 cases (random ones of seed 7), kernel="auto" is more than 5% and 15 µs slower than '
        "the fastest.\n"
    )  # fmt: skip


def test_of_several_measurements_the_smaller_stays() -> None:
    found = outcome(5.0, PyTorch=2.0)
    found.left_out["chunked"] = "its first run took 9 s"
    found.improve(outcome(3.0, PyTorch=4.0, chunked=7.0))
    assert found.times == {"auto": 3.0, "PyTorch": 2.0, "chunked": 7.0}
    assert found.left_out == {}


def test_contestants_that_fail_or_are_far_slower_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"auto": 1.0, "PyTorch": 0.5, "native": 1.5, "chunked": 1.6}
    runs = dict.fromkeys(seconds, 0)

    def runner(name: str) -> bench.Contestant:
        def run() -> None:
            runs[name] += 1
            if name == "native":
                raise RuntimeError("no memory\nat all")

        return run

    named = {runner(name): name for name in seconds}
    monkeypatch.setattr(
        choice, "contestants", lambda case: {n: r for r, n in named.items()} | {"flex": "no GPU"}
    )
    for module in (bench, choice):
        monkeypatch.setattr(module, "measure_seconds", lambda run, times=1: run() or seconds[named[run]])
    found = choice.measure(GRID[0], 4)
    assert found.times == {"auto": 1.0, "PyTorch": 0.5}
    assert found.left_out == {"flex": "no GPU", "native": "no memory", "chunked": "its first run took 1.6 s"}
    assert runs == {"auto": 4, "PyTorch": 4, "native": 1, "chunked": 1}  # of 1.5 s, three rounds fit


def test_contestants_with_too_many_weights_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MAX_WEIGHT_BYTES", 1000)
    case = choice.Case("float32", "full", False, 1, 1, 1, 8, 8, 8, 8)
    assert choice.contestants(case)["reference"] == "its weights would take 1.28 kB"


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        app(["bench", "--kind", "choice", "--seed", "3", "--out", "here", *words])
    code = stopped.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[choice.Case]:
    """Made-up times: at 9 tokens PyTorch is faster than `auto`, at 8 only when first measured."""
    measured: list[choice.Case] = []

    def measure(case: choice.Case, rounds: int) -> choice.Outcome:
        slow = case.keys == 9 or (case.keys == 8 and case not in measured)
        measured.append(case)
        return choice.Outcome(case, "native", {"auto": 2e-3 if slow else 1e-3, "PyTorch": 1e-3})

    monkeypatch.setattr(choice, "measure", measure)
    monkeypatch.setattr(choice, "RANDOM", 2)
    monkeypatch.chdir(tmp_path)
    return measured


NARROW = ("--dtype", "float32", "--size", "16")


def test_the_command_prints_the_slower_choices(
    timings: list[choice.Case], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*NARROW, "--length", "8", "--length", "9") == 1
    out = capsys.readouterr().out.splitlines()
    slower = [line for line in out if "auto (native) 2 ms, PyTorch 1 ms (2.00×)" in line]
    assert slower
    assert all(" 9 tokens: auto" in line for line in slower)
    nines = {case for case in timings if case.keys == 9}
    assert [timings.count(case) for case in nines] == [1 + choice.REPEATS] * len(nines)
    assert {timings.count(case) for case in timings if case.keys == 8} == {2}
    assert out[-1] == "written to here: choice.json, choice.md"
    assert f"In {len(slower)} of " in out[-3]
    assert "(random ones of seed 3)" in out[-3]
    written = json.loads(Path("here/choice.json").read_text())
    assert written["seed"] == 3
    assert len(written["outcomes"]) == len(set(timings))
    assert written["outcomes"][0]["case"]["dtype"] == "float32"
    assert slower[0] in Path("here/choice.md").read_text()


def test_the_exit_code_is_0_if_none_is_slower(
    timings: list[choice.Case], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*NARROW, "--length", "8") == 0
    assert capsys.readouterr().out.lstrip().startswith(f"In none of {len(set(timings))} cases")


@pytest.mark.parametrize("done", [0, 2])
def test_results_are_kept_when_interrupted(
    done: int, timings: list[choice.Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = choice.measure

    def interrupted(case: choice.Case, rounds: int) -> choice.Outcome:
        if len(timings) == done:
            raise KeyboardInterrupt
        return measure(case, rounds)

    monkeypatch.setattr(choice, "measure", interrupted)
    assert command(*NARROW, "--length", "8") == 130
    where = "written to here: choice.json, choice.md" if done else "nothing was measured"
    todo = len(choice.cases(("float32",), (16,), (8,), 3))
    assert capsys.readouterr().err == f"manyheads: interrupted after {done} of {todo} cases, {where}\n"
    files = sorted(file.name for file in Path("here").iterdir())
    assert files == (["choice.json", "choice.md"] if done else [])


def test_the_command_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With real measurements."""
    monkeypatch.setattr(choice, "RANDOM", 1)
    monkeypatch.setattr(choice, "REPEATS", 1)
    monkeypatch.chdir(tmp_path)
    assert command(*NARROW, "--length", "1", "--rounds", "1") in (0, 1)
    written = json.loads(Path("here/choice.json").read_text())
    assert {"auto", "PyTorch"} <= set(written["outcomes"][0]["times"])
