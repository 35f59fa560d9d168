"""What the benchmark measures and writes; no time is asserted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import bench
from manyheads.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.full
def test_the_limits_of_the_machine_are_plausible() -> None:
    found = bench.machine()
    # Which dtype is faster depends on the processor: some run AVX-512's bfloat16 products at half the rate.
    assert "float32" in found["peak"]
    assert all(1e9 < peak < 1e14 for peak in found["peak"].values())
    assert 1e8 < found["read"] < 1e13
    assert torch.__version__.startswith(found["versions"]["torch"])  # "2.15.0" of "2.15.0+cu132"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", bench.KINDS)
@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_contestants_compute_the_same(kind: str, dtype: str) -> None:
    """All but FlexAttention, which takes long to compile, on the same numbers."""
    torch.manual_seed(0)
    found = bench.contestants(bench.Problem(kind, dtype, 64, 64))
    assert "compiled" in found.get("FlexAttention", "compiled")  # why it is left out
    with torch.set_grad_enabled(kind == "training"):
        outs: dict[str, Any] = {name: run() for name, run in found.items() if not isinstance(run, str)}
    assert len(outs) >= 4
    if kind == "layer":  # two layers, each with weights of its own
        return
    if kind == "statistics":  # an output, with more beside it
        outs = {name: out[0] if isinstance(out, tuple) else out for name, out in outs.items()}
        statistics = outs.pop("statistics afterwards")
        assert list(statistics) == ["entropy", "distance", "row_max", "received", "pooled"]
    if kind == "training":  # gradients of q, k and v
        outs = {name: torch.stack(grads) for name, grads in outs.items()}
    elif "Hugging Face eager" in outs:
        outs["Hugging Face eager"] = outs["Hugging Face eager"].transpose(1, 2)
    want = outs.pop("PyTorch").float()
    near = {"float32": 1e-5, "bfloat16": 2e-2}[dtype] * max(1.0, float(want.abs().max()))
    for name, out in outs.items():
        assert (out.float() - want).abs().max() < near, name


@pytest.mark.full
def test_a_report_is_written(tmp_path: Path) -> None:
    report = bench.Report(bench.machine())
    (tmp_path / "bench.png").write_bytes(b"an earlier plot")
    for problem in bench.problems(("forward", "layer"), ("float32",), (64,), (64, 128)):
        if problem.tokens == 64 or problem.kind == "layer":
            report.measure(problem, 2)
    report.keep(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"bench.json", "bench.md"}
    files = report.save(tmp_path)
    assert [file.name for file in files] == ["bench.json", "bench.md", "bench.png"]
    written = json.loads(files[0].read_text())
    assert [one["problem"]["kind"] for one in written["results"]] == ["forward", "layer", "layer"]
    assert all(0 < t["low"] <= t["median"] <= t["high"] for one in written["results"] for t in one["timings"])
    table = files[1].read_text()
    for words in (
        "GFLOP/s in float32",
        "| 64 |",
        "(1.00×",
        "nn.MultiheadAttention",
        "FlexAttention is left out",
    ):
        assert words in table
    assert files[2].read_bytes().startswith(b"\x89PNG")


MACHINE = {"processor": "one", "threads": 1, "date": "today", "versions": {"torch": "2"}, "read": 1e10}


def made_up(
    kinds: tuple[str, ...], dtypes: tuple[str, ...], sizes: tuple[int, ...], share: float
) -> bench.Report:
    """A report without measuring: the first contestant at half the peak, the last at `share` of it."""
    report = bench.Report(MACHINE | {"peak": {"float32": 1e11, "bfloat16": 2e11}})
    for problem in bench.problems(kinds, dtypes, sizes, bench.LENGTHS):
        names = ["PyTorch", "native", "chunked", "FlexAttention", "x-transformers", "Hugging Face eager"]
        if problem.kind == "layer":
            names = ["nn.MultiheadAttention", "MultiHeadAttention"]
            names += ["nn.MultiheadAttention with weights", "MultiHeadAttention with its map"]
        result = bench.Result(problem)
        for n, name in enumerate(names):
            rate = report.machine["peak"][problem.dtype] * (share if n == len(names) - 1 else 0.5)
            took = problem.work / rate
            result.timings.append(bench.Timing(name, took, took, took, 1))
        report.results.append(result)
    return report


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kinds", "dtypes", "sizes"),
    [
        (("forward",), ("float32",), (64,)),
        (("layer",), ("bfloat16",), (64,)),
        (("forward", "layer"), ("float32", "bfloat16"), (64,)),
        (bench.KINDS, tuple(bench.DTYPES), (64, 128)),
    ],
)
def test_the_plot_shows_everything_within_the_figure(
    kinds: tuple[str, ...], dtypes: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = made_up(kinds, dtypes, sizes, 1.04).plot()
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6 * ("forward" in kinds) + 4 * ("layer" in kinds)
    panels = figure.axes
    assert len(panels) == len(kinds) * len(dtypes) * len(sizes)
    for artist in (legend, *panels, *(axes.title for axes in panels)):
        box = artist.get_tightbbox()
        assert box.x0 >= 0, artist
        assert box.y0 >= 0, artist
        assert box.x1 <= figure.bbox.width, artist
        assert box.y1 <= figure.bbox.height, artist
    for axes in panels:
        decode = axes.get_title().startswith("decode")
        assert [text.get_text() for text in axes.texts] == ["memory" if decode else "peak"]
        highest = max(max(line.get_ydata()) for line in axes.get_lines())
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > highest
    assert not any(one.get_tightbbox().overlaps(legend.get_tightbbox()) for one in panels)


def test_shares_of_a_peak_that_was_surpassed_are_left_out() -> None:
    words = "a contestant is faster than 100 GFLOP/s"
    possible = made_up(("forward", "decode"), ("float32", "bfloat16"), (64,), 1.04)
    assert words not in possible.markdown()
    assert "2.08×, 104%" in possible.markdown()
    found = made_up(("forward", "decode"), ("float32",), (64,), 1.06)
    found.results += possible.results
    text = found.markdown()
    assert text.count(f"The peak in float32 isn't known: {words}") == 1
    headings = {
        line.split("**")[1].split(" heads")[0]: line for line in text.splitlines() if "heads of" in line
    }
    assert "the peak" not in headings["forward, float32, 8"]
    assert "% of the peak" in headings["forward, bfloat16, 8"]
    assert "% of memory's rate" in headings["decode, float32, 8"]
    assert "106%" not in text
    assert "2.12×" in text
    peaks = {axes.get_title(): [line.get_text() for line in axes.texts] for axes in found.plot().axes}
    assert peaks["forward, float32, 8 heads of 64"] == []
    assert peaks["forward, bfloat16, 8 heads of 64"] == ["peak"]
    found.machine["peak"] = {}
    assert words not in found.markdown()


def test_no_peak_of_bfloat16_is_reported_where_tiles_are_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vector registers can do isn't what the machine can, and shares of it would be above 100 %."""
    why = "this processor has AMX tiles, and the compiler or the system doesn't support them"
    monkeypatch.setattr(bench, "multiplications", lambda: {"float32": lambda rounds: 1e9, "bfloat16": why})
    found = bench.machine()
    assert list(found["peak"]) == ["float32"]
    report = made_up(("forward",), ("float32", "bfloat16"), (64,), 0.6)
    report.machine = MACHINE | {"peak": found["peak"], "unknown": found["unknown"]}
    text = report.markdown()
    assert "not measured in bfloat16" in text
    assert f"The peak in bfloat16 isn't known: {why}." in text
    assert "%" not in text.partition("**forward, bfloat16")[2]


def test_a_dtype_without_instructions_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "multiplications", lambda: {"float32": float, "bfloat16": lambda rounds: 0.0})
    found = bench.machine()
    assert list(found["peak"]) == ["float32"]
    assert found["unknown"] == {}


def test_the_peak_in_bfloat16_is_at_least_that_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies pairs of bfloat16 slowly converts them."""
    rates = {"float32": lambda rounds: 1e12, "bfloat16": lambda rounds: 1e6}
    monkeypatch.setattr(bench, "multiplications", lambda: rates)
    peak, _ = bench.limits()
    assert peak["bfloat16"] == peak["float32"]


@pytest.mark.parametrize("compiler", ["false", "nowhere/c++", 'c++ "'])
def test_without_a_compiler_no_peak_is_reported(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(bench, "multiplications", bench.multiplications.__wrapped__)
    why = f"the C++ compiler {compiler} can't compile limits.cpp, which measures it"
    assert bench.unknown() == {"float32": why, "bfloat16": why}
    peak, read = bench.limits()
    assert peak == {}
    assert read > 1e8


def test_the_larger_of_two_measurements_of_the_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench.Report({"peak": {"float32": 2.0, "bfloat16": 3.0}, "read": 5.0})
    monkeypatch.setattr(bench, "limits", lambda: ({"float32": 1.0, "bfloat16": 4.0}, 6.0))
    assert report.finish(1, iter)
    assert report.machine == {"peak": {"float32": 2.0, "bfloat16": 4.0}, "read": 6.0}


def test_an_unsupported_contestant_is_left_out() -> None:
    result = bench.measure(bench.Problem("forward", "float32", 64, 300), 1)
    assert result.left_out["native"] == "it supports d and w up to 256, and these are 300 and 300"
    names = [timing.name for timing in result.timings]
    assert names[:2] == ["PyTorch", "chunked"]  # the others where they are installed
    assert "native" not in names


def test_a_failing_contestant_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("there is no compiler.\n" + "A long story. " * 100)

    report = bench.Report(MACHINE | {"peak": {"float32": 1e11}})
    runs = [{"one": lambda: None, "other": lambda: None}, {"one": fail, "other": lambda: None}, {"one": fail}]
    for tokens, found in zip((64, 128, 256), runs, strict=True):
        monkeypatch.setattr(bench, "contestants", lambda problem, found=found: found)
        report.results.append(bench.measure(bench.Problem("forward", "float32", tokens, 64), 1))
    assert report.results[1].left_out["one"].startswith("there is no compiler. A long story.")
    assert len(report.results[1].left_out["one"]) <= 200
    rows = [line.split("|") for line in report.markdown().splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows] == ["tokens", "64", "128"]
    assert [row[2].count("1.00×") for row in rows] == [0, 1, 0]
    assert [row[3].count("×") for row in rows] == [0, 1, 0]
    assert "one is left out: there is no compiler" in report.markdown()
    report.results = report.results[2:]
    report.machine["peak"] = {}
    assert "8 heads of 64**: no contestant supports it" in report.markdown()
    report.save(tmp_path)


@pytest.mark.parametrize("done", [0, 1])
def test_results_are_kept_when_interrupted(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = made_up(("forward",), ("float32",), (64,), 0.6)
    given = iter(ready.results[:done])

    def measure(problem: bench.Problem, rounds: int) -> bench.Result:
        for result in given:
            return result
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "machine", lambda: ready.machine)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        app(["bench", "--kind", "causal", "--dtype", "float32", "--out", "here"])
    assert stopped.value.code == 130
    where = "written to here: bench.json, bench.md, bench.png" if done else "nothing was measured"
    assert capsys.readouterr().err == f"manyheads: interrupted after {done} of 14 cases, {where}\n"
    names = {file.name for file in (tmp_path / "here").iterdir()}
    assert names == ({"bench.json", "bench.md", "bench.png"} if done else set())


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("afile", "Expected --out to be a folder, got the file afile."),
        ("afile/deeper", "--out afile/deeper can't be written: Not a directory. Choose a different one."),
        (
            "/proc/none/such",
            "--out /proc/none/such can't be written: No such file or directory. Choose a different one.",
        ),
    ],
)
def test_the_folder_is_checked_before_anything_is_measured(
    out: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "machine", lambda: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    with pytest.raises(OSError, match="^" + re.escape(words) + "$"):
        app(["bench", "--out", out])


def test_operations_are_counted() -> None:
    assert bench.Problem("forward", "float32", 100, 64).work == 4 * 8 * 100 * 100 * 64
    assert bench.Problem("causal", "float32", 100, 64).work == 2 * 8 * 100 * 100 * 64
    training = bench.Problem("training", "float32", 100, 64).work
    assert training == 7 * 8 * 100 * 100 * 64
    layer = bench.Problem("layer", "float32", 100, 64).work
    assert layer == 4 * 8 * 100 * 100 * 64 + 4 * 2 * 100 * 512 * 512


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "--kind backward",
            "Expected kind to be one of forward, causal, training, statistics, decode, layer, choice, "
            "got 'backward'.",
        ),
        ("--dtype int8", "Expected dtype to be one of float32, bfloat16, got 'int8'."),
        ("--length 0", "Expected length to be at least 1, got 0"),
        ("--size -3", "Expected size to be at least 1, got -3"),
        ("--kind choice --kind layer", "Expected --kind choice alone"),
        ("--kind layer --seed 1", "Expected --seed with --kind choice only"),
        ("--kind choice --dtype int8", "Expected dtype to be one of float32, bfloat16, float16, got 'int8'."),
        ("--kind choice --length 0", "Expected length to be at least 1, got 0"),
        ("--kind choice --size -3", "Expected size to be at least 1, got -3"),
    ],
)
def test_invalid_options_raise(words: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        app(["bench", *words.split()])


@pytest.mark.full
def test_the_command_measures(tmp_path: Path) -> None:
    words = "bench --length 64 --size 64 --rounds 1 --kind forward --dtype float32 --out here"
    command = [sys.executable, "-m", "manyheads", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "| 64 |" in done.stdout
    assert (tmp_path / "here" / "bench.png").exists()
