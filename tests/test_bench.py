"""What the benchmark measures and writes; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyheads import bench

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # x-transformers' own
]


def test_the_machines_limits_are_of_this_world() -> None:
    found = bench.machine()
    assert 1e9 < found["peak"]["float32"] < 1e14
    assert 1e8 < found["read"] < 1e13
    if "bfloat16" in found["peak"]:
        assert found["peak"]["bfloat16"] > found["peak"]["float32"]
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("kind", bench.KINDS)
@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_contestants_compute_the_same(kind: str, dtype: str) -> None:
    """All but FlexAttention, which has a compiler to wait for, on the same numbers."""
    torch.manual_seed(0)
    found = bench.contestants(bench.Problem(kind, dtype, 64, 64))
    assert "compiled" in found.get("FlexAttention", "compiled")  # why it is left out
    outs = {}
    with torch.no_grad():
        for name, run in found.items():
            if not isinstance(run, str):
                out = run()
                out = out if isinstance(out, torch.Tensor) else out[0]
                outs[name] = out.mT if name == "x" else out
    assert len(outs) >= 4
    if kind == "layer":  # two layers, each with weights of its own
        return
    want = outs.pop("PyTorch").float()
    for name, out in outs.items():
        got = out.float().transpose(1, 2) if name == "Hugging Face eager" else out.float()
        assert (got - want).abs().max() < (1e-5 if dtype == "float32" else 2e-2), name


def test_a_report_is_written(tmp_path: Path) -> None:
    report = bench.Report(bench.machine())
    for problem in bench.problems(("forward", "layer"), ("float32",), (64,), (64, 128)):
        if problem.tokens == 64 or problem.kind == "layer":
            report.results.append(bench.measure(problem, 2))
    files = report.save(tmp_path / "new")
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


def test_operations_are_counted() -> None:
    assert bench.Problem("forward", "float32", 100, 64).operations == 4 * 8 * 100 * 100 * 64
    assert bench.Problem("causal", "float32", 100, 64).operations == 2 * 8 * 100 * 100 * 64
    layer = bench.Problem("layer", "float32", 100, 64).operations
    assert layer == 4 * 8 * 100 * 100 * 64 + 4 * 2 * 100 * 512 * 512


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kind", "backward"), "kind must be one of forward, causal, layer, and 'backward' came"),
        (("--dtype", "int8"), "dtype must be one of float32, bfloat16, and 'int8' came"),
        (("--length", "0"), "length must be at least 1, and 0 came"),
        (("--size", "-3"), "size must be at least 1, and -3 came"),
    ],
)
def test_the_command_says_what_it_takes(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyheads.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_command_measures(tmp_path: Path) -> None:
    words = "bench --length 64 --size 64 --rounds 1 --kind forward --dtype float32 --out here"
    command = [sys.executable, "-m", "manyheads.cli", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "| 64 |" in done.stdout
    assert (tmp_path / "here" / "bench.png").exists()
