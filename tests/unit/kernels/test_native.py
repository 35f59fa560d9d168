"""The native kernel beyond the table of cases: its builds, threads and layouts, and installing without it.

Tests that need another environment or a fresh process start one; what they run is in this file too.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manyheads as mh
from manyheads import kernels, scores
from manyheads.kernels import chunked, native, operator
from manyheads.kernels.fused import Spec
from manyheads.kernels.native import library, passes, rules
from manyheads.problem import Problem
from tests.cases import CASES, Case, gradients, make, oracle, over
from tests.paths import python_path
from tests.waiting import HANG

ROOT = Path(__file__).parents[3]
HERE = [case for case in CASES if 0 not in case.sizes]


def heads(b: int = 2, h: int = 4, g: int = 2, t: int = 70, s: int = 110, d: int = 16, w: int = 8) -> Any:
    return torch.randn(b, h, t, d), torch.randn(b, g, s, d), torch.randn(b, g, s, w)


def right(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return mh.attention(q.double(), k.double(), v.double(), **rest, kernel="reference").to(q.dtype)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- builds ------------------------------------------------------------------------------------------


def within_budget(cases: list[Case]) -> None:
    """Outputs and gradients of the table, each within the error budget; and gradients of what is larger."""
    for case in cases:
        inputs = make(case)
        answer = oracle(inputs)
        out = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel="native")
        for name, x in ({"out": out} | gradients(out, inputs.leaves(), inputs.upstream)).items():
            wrong = over(x, answer.values[name], answer.errors[name])
            assert not wrong, (case, name, wrong)
    for large in LARGE:
        for dtype in (torch.float32, torch.bfloat16):
            larger_within_budget(*large, dtype)
    for large in OF_STATISTICS:
        for dtype in DIGITS:
            statistics_within_budget(*large, dtype)


# Sizes b, h, g, t, s, d, w of several blocks of keys and steps of queries, and what else there is.
LARGE: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 2, 300, 310, 64, 64), {}),
    ((1, 2, 1, 257, 301, 33, 70), {"mask": mh.Causal() & mh.Window(left=50), "softcap": 3.0}),
    ((1, 2, 2, 97, 193, 130, 8), {"mask": mh.Causal(), "offset": 40, "scale": -0.3, "bias": mh.ALiBi(2)}),
    ((2, 1, 1, 140, 200, 16, 16), {"mask": mh.Lengths(torch.tensor([97, 200]), left=True)}),
    ((1, 2, 2, 300, 300, 5, 3), {"mask": mh.Documents(torch.arange(300)[None] // 71), "sink": torch.ones(2)}),
    (
        (2, 2, 2, 130, 200, 16, 16),
        {"mask": mh.Window(right=3), "bias": mh.Dense(torch.ones(130, 200).tril())},
    ),
    # A few queries, whose gradients are computed another way, in several splits of the keys.
    ((1, 1, 1, 1, 3000, 64, 64), {}),
    ((2, 6, 1, 2, 2500, 33, 20), {"mask": mh.Causal() & mh.Window(left=1500), "sink": torch.zeros(6)}),
    ((2, 4, 2, 6, 1100, 16, 130), {"mask": mh.Lengths(torch.tensor([1090, 3]))}),
    ((1, 8, 2, 3, 1300, 64, 64), {"mask": mh.Documents(torch.arange(1300) // 600), "softcap": 2.0}),
    ((1, 24, 2, 2, 70, 24, 40), {"mask": mh.Causal(), "offset": torch.tensor([30]), "scale": -0.4}),
    ((2, 2, 1, 8, 1500, 33, 20), {"mask": mh.Causal() & mh.Lengths(torch.tensor([1500, 700]))}),
    (
        (1, 2, 2, 12, 600, 5, 3),
        {"mask": mh.Keep((torch.arange(600) % 3 > 0).expand(12, 600)), "bias": mh.ALiBi(2)},
    ),
]


def larger_within_budget(sizes: tuple[int, ...], rest: dict[str, Any], dtype: torch.dtype) -> None:
    """Gradients of a larger problem, with chunked's own error for that of plain products."""
    b, h, g, t, s, d, w = sizes
    random = torch.Generator().manual_seed(5)
    parts = [(b, h, t, d), (b, g, s, d), (b, g, s, w), (b, h, t, w)]
    *given, upstream = (torch.randn(n, generator=random).to(dtype) for n in parts)

    def gradients(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        if isinstance(bias := rest.get("bias"), mh.Dense):
            leaves.append(bias.values.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
            bias = mh.Dense(leaves[-1])
        out = mh.attention(*leaves[:3], **rest | {"bias": bias}, kernel=kernel)
        return list(torch.autograd.grad(out, leaves, upstream.to(dtype)))

    # The same formula on absolute values.
    wide = Problem.of(*(x.double() for x in given), **rest)
    q, k, v, up = (x.double().abs().repeat_interleave(h // x.shape[1], 1) for x in (*given, upstream))
    weight = mh.AttentionMap.of(wide).dense()  # [b, h, t, s]
    d_weight = up @ v.mT
    d_score = weight * (d_weight + (weight * d_weight).sum(-1, keepdim=True))
    spread = [abs(wide.scale) * d_score @ k, abs(wide.scale) * d_score.mT @ q, weight.mT @ up, d_score]
    score = scores.tile(wide).detach()
    highest = float(score[score > -math.inf].abs().max())

    true = gradients("reference", torch.float64)
    all_three = zip(gradients("native", dtype), gradients("chunked", dtype), true, spread, strict=False)
    for ours, theirs, x, largest in all_three:
        off, usual = (float((y.double() - x).abs().max()) for y in (ours, theirs))
        largest = largest.unflatten(1, (-1, h // x.shape[1])).sum(2) if x.dim() == 4 else largest.sum((0, 1))
        assert off <= 2 * usual + torch.finfo(dtype).eps * (1 + highest) * float(largest.max()), sizes


DIGITS = {torch.float32: 2**-24, torch.bfloat16: 2**-24, torch.float16: 2**-24, torch.float64: 2**-53}
OF_STATISTICS = [
    *LARGE,
    ((1, 1, 1, 700, 1030, 8, 8), {"mask": mh.Causal()}),
    ((2, 4, 2, 6, 1100, 16, 130), {"mask": mh.Lengths(torch.tensor([1090, 3])), "bias": mh.ALiBi(4)}),
]


def spec_of(t: int, s: int) -> dict[str, Any]:
    return {
        "received": [(), (t // 2 + 1,)],
        "top": [8, 3],
        "pooled": [(min(t, 64), min(s, 64), how) for how in ("mean", "max")] + [(min(t, 3), min(s, 7))],
        **dict.fromkeys(("entropy", "distance", "row_max", "logits_max", "sink_weight"), ()),
    }


def statistics_within_budget(sizes: tuple[int, ...], rest: dict[str, Any], dtype: torch.dtype) -> None:
    """The output, the log-sum-exp and statistics, beside the output and after, of exact numbers."""
    b, h, g, t, s, d, w = sizes
    random = torch.Generator().manual_seed(6)
    given = [torch.randn(n, generator=random).to(dtype) for n in ((b, h, t, d), (b, g, s, d), (b, g, s, w))]
    wide = Problem.of(*(x.double() for x in given), **rest)
    score = scores.tile(wide.detach())
    highest = float(score[score > -math.inf].abs().max())
    exact = chunked.run(wide)
    maps = [mh.AttentionMap.of(wide, exact[1])]
    for spec in ({}, spec_of(t, s)):
        out, amap = mh.attention_with_map(*given, **rest, kernel="native", statistics=spec)
        near = torch.finfo(dtype).eps * (1 + highest) * float(given[2].double().abs().max())
        assert (out.double() - exact[0]).abs().max() <= near, (sizes, dtype)
        maps.append(amap)
    if dtype == torch.float64:  # `auto` takes tiles there
        _, fused = native.statistics(wide, Spec(rows=True, received=True, top=3), exact[1])
        assert fused is not None
        torch.testing.assert_close(fused["entropy"], maps[0].entropy(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fused["received"], maps[0].received(), rtol=1e-12, atol=1e-12)
    true, *found = (amap.statistics(**spec_of(t, s)) for amap in maps)
    for ours in (*found, maps[1].under(wide.mask).statistics(**spec_of(t, s))):  # without its log-sum-exp
        for name, x in true.items():
            for one, other in zip(flat(ours[name]), flat(x), strict=True):
                if one.is_floating_point():
                    near = 8 * DIGITS[dtype] * (1 + highest) * max(float(other.abs().max()), 1.0)
                    assert (one.double() - other).abs().max() <= near, (sizes, dtype, name)


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [one for part in x for one in flat(part)]


def built_on_the_table(step: int, **environment: str) -> str:
    """Check each `step`-th case of the table in another process, and return which builds it has."""
    code = (
        "import tests.unit.kernels.test_native as t; t.within_budget(t.HERE[::{}]); print(t.native.built())"
    )
    return python(code.format(step), **environment)


@pytest.mark.parametrize("width", library.supported)
@pytest.mark.parametrize(
    "step", [pytest.param(9, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_every_width_on_the_table(step: int, width: str) -> None:
    built = built_on_the_table(step, MANYHEADS_WIDTH=width, OMP_NUM_THREADS="2")
    assert built.startswith(f"{width} (available builds: ")


@pytest.fixture(scope="module")
def emulated(build_once: Callable[..., Path]) -> dict[str, str]:
    """The environment of a library whose tiles are plain loops: the build for AMX on any processor."""
    if "avx2" not in library.supported:
        pytest.skip("the build for AMX needs vectors of AVX2")

    def build(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MANYHEADS_TILES", "emulated")
            patch.chdir(ROOT)
            assert runpy.run_path("setup.py")["compile_to"](folder / "native.so", folder / "objects") == {}

    built = build_once("emulated", build) / "native.so"
    return {"MANYHEADS_LIBRARY": str(built), "MANYHEADS_WIDTH": "amx", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_emulated_tiles_on_the_table(step: int, emulated: dict[str, str]) -> None:
    assert built_on_the_table(step, **emulated).startswith("amx (available builds: portable, amx)")


@pytest.mark.full
def test_emulated_tiles_give_every_pass_the_same_scores(emulated: dict[str, str]) -> None:
    """The weights of huge scores are 0 or 1 only if output, gradient, statistics and map share their bits."""
    code = """
import torch, tests.unit.kernels.test_native as t
for dtype, size in t.HUGE:
    for n in (1, 5, 13, 64, 150):
        t.test_huge_scores_cancel_their_log_sum_exp(dtype, size, n)
"""
    python(code, **emulated)


# A library that only says what the processor has: tiles, which Linux doesn't permit this process to use, and
# pairs of bfloat16 that are slow or fast.
PROCESSOR = """
extern "C" {
long manyheads_interface() { return %dL; }
int manyheads_runs(int level) { return level < 4; }
int manyheads_tiles() { return 1; }
int manyheads_slow_pairs() { return %d; }
int manyheads_begin(int) { return 0; }
void manyheads_attend() {} void manyheads_differentiate() {} void manyheads_scores() {}
}
"""


@pytest.mark.parametrize(("has_slow_pairs", "fastest"), [(False, "avx512bf16"), (True, "avx512")])
def test_tiles_that_linux_does_not_allow(
    has_slow_pairs: bool, fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (library.STATISTICS.size * 1000 + library.GRADIENT.size) * 1000 + library.PROBLEM.size
    (tmp_path / "none.cpp").write_text(PROCESSOR % (library.INTERFACE * 10**9 + sizes, has_slow_pairs))
    file = str(tmp_path / "none.so")
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "none.cpp"), "-o", file], check=True)
    usual = loaded(monkeypatch, LIBRARY=file, WIDTH="")
    assert usual["load_error"] is None
    assert usual["WIDTHS"][usual["width"]] == fastest
    assert usual["has_tiles"]
    why = usual["unavailable"]["amx"]
    assert why == "the system doesn't permit AMX tiles (Linux supports them since version 5.16)"
    error = loaded(monkeypatch, LIBRARY=file, WIDTH="amx")["load_error"]
    assert error == f"MANYHEADS_WIDTH=amx is set, but {why}"


def test_the_default_build_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported", ["portable", "avx2", "avx512", "avx512bf16"])
    monkeypatch.setattr(library, "width", library.WIDTHS.index("avx512"))
    why = "; avx512bf16 isn't the default: this processor multiplies pairs of bfloat16 at half the rate"
    for has_slow_pairs in (True, False):
        monkeypatch.setattr(library, "has_slow_pairs", has_slow_pairs)
        assert (why in native.built()) == has_slow_pairs


@pytest.mark.skipif("amx" in library.supported, reason="this processor has tiles")
def test_a_width_that_this_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = loaded(monkeypatch, WIDTH="amx")["load_error"]
    assert missing.startswith("MANYHEADS_WIDTH=amx is set, but ")


@pytest.mark.full
def test_an_unknown_width_is_a_reason_of_explain() -> None:
    code = "import torch, manyheads; q = torch.randn(1, 1, 2, 4); manyheads.explain(q, q, q)"
    printed = python(code, MANYHEADS_WIDTH="avx1024")
    assert (
        "expected MANYHEADS_WIDTH to be one of portable, avx2, avx512, avx512bf16, amx, got 'avx1024'"
        in printed
    )
    assert "sdpa       yes" in printed


def loaded(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    """What `library` would be if it were imported with other environment variables."""
    for name, value in environment.items():
        monkeypatch.setenv(f"MANYHEADS_{name}", value)
    return runpy.run_path(library.__file__)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("/none.so", "is missing"),
        (__file__, f"can't be loaded ({__file__}: "),
        (torch._C.__file__, "lacks the expected functions"),
    ],
)
def test_an_invalid_library_is_named(file: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = loaded(monkeypatch, LIBRARY=file)["load_error"]
    assert missing.startswith(
        f"expected MANYHEADS_LIBRARY to name a library that manyheads built, but {file!r} {what}"
    )
    assert missing.endswith(": unset it or name another")


def test_an_invalid_choice_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "expected MANYHEADS_THREADS to be 'own' or unset, got 'banana'"
    assert loaded(monkeypatch, THREADS="banana")["load_error"] == expected


def test_an_empty_environment_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WIDTH", "THREADS", "LIBRARY"):
        monkeypatch.delenv(f"MANYHEADS_{name}", raising=False)
    unset = loaded(monkeypatch)
    empty = loaded(monkeypatch, WIDTH="", THREADS="", LIBRARY="")
    assert empty["load_error"] is None
    assert empty["width"] == unset["width"]
    assert empty["FILE"] == library.FOLDER / "native.so"


# A C++ compiler that is quick, since each build of the kernel is empty, and that can't make the widest one.
QUICK = """#!/bin/sh
for x; do case $x in
    -mavx512bf16)
        echo "In file included from somewhere" >&2
        echo "quick: error: unrecognized option '$x'" >&2
        exit 1 ;;
    -DLEVEL=*) build=${x#-DLEVEL=} ;;
    */attend.cpp) what="void attend_$build(const Problem *, const Statistics *) {}
        void scores_$build(const Problem *, void *) {}" ;;
    */differentiate.cpp) what="int differentiate_$build(const Problem *, const Gradient *) { return 0; }" ;;
    *.o) to=$x ;;
esac; done
[ "$what" ] || exec c++ "$@"
(echo '#include "problem.h"'; echo "$what") | c++ -fPIC -Isrc/manyheads/kernels/native -xc++ -c - -o "$to"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two installations of one copy of the sources: without the widest build, then without a compiler."""
    to = tmp_path_factory.mktemp("installed")
    source, quick = to / "source", to / "quick"
    ignore = shutil.ignore_patterns("native.so", "native.log", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs" / "lessons", source / "docs" / "lessons")
    quick.write_text(QUICK)
    quick.chmod(0o755)
    for compiler in (str(quick), "false"):
        folder = to / f"by {Path(compiler).name}"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(source)],
            env={**os.environ, "CXX": compiler},
            check=True,
            capture_output=True,
            timeout=HANG,
        )
    return to / "by quick", to / "by false"


@pytest.mark.full
@pytest.mark.skipif("avx2" not in library.supported, reason="it has one width")
def test_a_width_that_does_not_compile_is_left_out(
    installed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = installed[0].parent / "quick"
    why = f"the C++ compiler {quick} failed with exit code 1 (quick: error: unrecognized option"
    printed = python(
        "from manyheads.kernels import native; print(native.__file__, native.built())",
        PYTHONPATH=python_path(installed[0]),
    )
    # amx needs the flag of avx512bf16 too.
    runs = [name for name in library.supported if name not in ("avx512bf16", "amx")]
    assert str(installed[0]) in printed
    assert f"{runs[-1]} (available builds: {', '.join(runs)}; avx512bf16 isn't available: {why}" in printed
    (file,) = installed[0].rglob("native.so")
    missing = loaded(monkeypatch, LIBRARY=str(file), WIDTH="avx512bf16")["load_error"]
    assert missing.startswith(f"MANYHEADS_WIDTH=avx512bf16 is set, but that build is missing: {why}")


@pytest.mark.full
def test_a_build_that_fails_leaves_no_library_of_before(installed: tuple[Path, Path]) -> None:
    assert [path.name for path in installed[1].rglob("native.*")] == ["native.log"]


@pytest.fixture
def setup() -> dict[str, Any]:
    """What setup.py defines."""
    pytest.importorskip(
        "setuptools.command.bdist_wheel", reason="an old setuptools; pip builds with a new one"
    )
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.full
@pytest.mark.usefixtures("setup")
def test_an_old_library_goes_from_the_sources_too(installed: tuple[Path, Path]) -> None:
    """Where they are installed editable; and an odd CXX doesn't end the installation."""
    source = installed[0].parent / "source"
    library = source / "src" / "manyheads" / "kernels" / "native" / "native.so"
    library.touch()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=source,
        env={**os.environ, "CXX": 'g++ "x'},
        check=True,
        capture_output=True,
    )
    assert not library.exists()
    assert (
        library.with_suffix(".log")
        .read_text()
        .startswith("expected the environment variable CXX to be quoted as in")
    )


@pytest.mark.parametrize(
    ("compiler", "flags", "reason"),
    [
        (
            "nowhere",
            "",
            "the C++ compiler nowhere can't be started (No such file or directory). Install one",
        ),
        ('g++ "x', "", "variable CXX to be quoted as in a shell, got 'g++ \"x' (no closing quotation)"),
        ("true", '-g "', "variable MANYHEADS_CXXFLAGS to be quoted as in a shell, got '-g \"'"),
        ("sh -c", "", "the C++ compiler sh -c failed with exit code 2 ("),
    ],
)
def test_why_nothing_was_built(
    setup: Any, compiler: str, flags: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("MANYHEADS_CXXFLAGS", flags)
    with pytest.raises(RuntimeError) as raised:
        setup["compile_to"](tmp_path / "native.so", tmp_path)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("ld: warning: old\nIn file included from x\nx:1: Error: what\ny: error: more", "x:1: Error: what"),
        (
            "ld: warning: old\nld: cannot find -lm\ncollect2: error: ld returned 1 exit status",
            "ld: cannot find -lm",
        ),
        ("starting\nout of memory\n", "out of memory"),
        ("", "no message"),
    ],
)
def test_the_line_that_says_why_a_compiler_failed(setup: Any, output: str, line: str) -> None:
    assert setup["find_error"](output) == line


@pytest.mark.full
def test_without_a_compiler_it_installs_and_says_why(installed: tuple[Path, Path], tmp_path: Path) -> None:
    """Everything works on the other kernels."""
    to = installed[1]
    code = (
        f"import sys; sys.path.insert(0, {str(to)!r})\n"
        "import torch, manyheads\n"
        "from manyheads import kernels\n"
        "q = torch.randn(1, 2, 70, 4)\n"
        "print(manyheads.__file__, manyheads.attention(q, q, q, mask=manyheads.Causal()).shape)\n"
        "print(kernels.machine())\n"
        "manyheads.attention(q, q, q, kernel='native')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert str(to) in done.stdout
    assert "torch.Size([1, 2, 70, 4])" in done.stdout
    reason = "its library is missing: the C++ compiler false failed with exit code 1"
    assert f"not available: {reason}" in done.stdout
    assert f'kernel="native" doesn\'t support this: {reason}' in done.stderr


def test_kernels_says_what_runs() -> None:
    assert native.built() in kernels.machine()
    assert library.WIDTHS[library.width or 0] in native.built()


# -- processors with AMX ---------------------------------------------------------------------------


def chosen(q: Tensor, k: Tensor, **more: Any) -> str:
    """Return the name of the kernel that `auto` takes."""
    name: str = kernels.choose(Problem.of(q, k, k, **more)).NAME
    return name


@pytest.mark.full
def test_bfloat16_goes_to_pytorch_where_the_build_leaves_tiles_unused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's attention multiplies bfloat16 in AMX tiles, several times as fast as vectors do."""
    monkeypatch.setattr(library, "has_tiles", True)
    monkeypatch.setattr(library, "WIDTHS", ("portable", "amx"))
    monkeypatch.setattr(library, "width", 0)
    monkeypatch.setattr(library, "supported", ["portable"])
    q, k = torch.randn(1, 4, 64, 32).bfloat16(), torch.randn(1, 2, 64, 32).bfloat16()
    for more in ({}, {"mask": mh.Causal()}, {"mask": mh.Window(left=5)}):
        assert chosen(q, k, **more) == "sdpa"
    assert chosen(q[:, :, :7], k) == "sdpa"  # 14 queries for each head of keys
    assert chosen(q[:, :, :6], k) == "native"
    assert chosen(q, k, softcap=2.0) == "native"  # which sdpa doesn't support
    assert chosen(q, k, sink=torch.zeros(4)) == "native"
    for dtype in (torch.float32, torch.float16):
        assert chosen(q.to(dtype), k.to(dtype)) == "native"
    assert chosen(q.requires_grad_(), k) == "sdpa"
    compiled = torch.compile(lambda q, k: mh.attention(q, k, k), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k), mh.attention(q, k, k))

    def reason() -> str:
        mh.explain(q, k, k)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  native"))
        return line

    words = (
        "  native     yes: a map is free; not auto: PyTorch multiplies bfloat16 in this processor's AMX tiles"
    )
    lacks = "this processor lacks other instructions that it needs"
    assert reason() == f"{words}, and this kernel doesn't: its amx build isn't available ({lacks})"
    monkeypatch.setattr(library, "unavailable", {"amx": "too old"})
    assert reason() == f"{words}, and this kernel doesn't: its amx build isn't available (too old)"
    monkeypatch.setattr(library, "supported", ["portable", "amx"])
    assert reason() == f"{words}, and this kernel doesn't: MANYHEADS_WIDTH chooses portable"
    monkeypatch.setattr(library, "width", 1)
    assert reason().endswith("← auto")
    monkeypatch.setattr(library, "width", 0)
    assert mh.attention(q, k, k, kernel="native").isfinite().all()  # by name
    monkeypatch.setattr(library, "has_tiles", False)
    assert chosen(q, k) == "native"


def test_every_build_has_its_rules() -> None:
    assert {*library.WIDTHS, rules.TILES, rules.UNUSED} == set(rules.FAMILIES)


# -- huge scores -------------------------------------------------------------------------------------


@pytest.fixture(params=library.supported or ["no build"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build that this processor runs."""
    if library.load_error is not None:
        pytest.skip(library.load_error)
    monkeypatch.setattr(library, "width", library.WIDTHS.index(request.param))


each_width = pytest.mark.usefixtures("width")


@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 33, 128])
def test_a_single_key_weighs_exactly_one(d: int, dtype: torch.dtype) -> None:
    """Forward, in the gradient and in the map, whatever the score."""
    for seed in range(40):
        random = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, 1, n, generator=random) for n in (d, d, 7))
        q, k, v = (4 * q).to(dtype), k.to(dtype), v.to(dtype).requires_grad_()
        out, amap = mh.attention_with_map(q, k, v, kernel="native")
        out.sum().backward()
        assert torch.equal(out, v)
        assert v.grad is not None
        assert (v.grad == 1).all()
        assert amap[0, 0, 0, 0] == 1


# Queries and what they are multiplied by, beside keys or values that a bound on scores must not hide.
EXTREME = {
    "zero": (0.0, 1.0, None),
    "zero, softcap": (0.0, 1.0, 30.0),
    "scale 0": (1.0, 0.0, None),
    "tiny": (1e-25, 1.0, None),
    "denormal": (1e-42, 1.0, 30.0),
}


@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query", EXTREME)
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e35, 1e-35])
def test_extreme_keys_and_values_beside_queries_of_zero(
    value: float, what: str, query: str, dtype: torch.dtype
) -> None:
    """Rows of 0 are what padding is; whatever a visible key or value holds must still be seen."""
    factor, scale, softcap = EXTREME[query]
    q, k, v = heads(1, 2, 1, 40, 70, 16, 16)
    q[:, :, 1::2] *= factor
    changed = k if what == "k" else v
    changed[:, :, 5] = value
    alone = what == "v" and math.isfinite(value)  # then the output is of its size
    if alone:
        changed[:] = value
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    arguments: dict[str, Any] = {"scale": scale, "softcap": softcap, "mask": mh.Causal(), "offset": 0}
    wanted = right(q, k, v, **arguments)
    out, amap = mh.attention_with_map(q, k, v, kernel="native", statistics={"entropy": ()}, **arguments)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    near["atol"] *= not alone
    for found in (mh.attention(q, k, v, kernel="native", **arguments), out):
        torch.testing.assert_close(found, wanted, equal_nan=True, **near)
    seen = ~wanted.isnan().any(-1)
    assert amap.entropy()[seen].isfinite().all()


@each_width
@pytest.mark.parametrize(("small", "large"), [(1e-23, 1e25), (1e-30, 1e31), (1e25, 1e-23), (1e-24, 1e18)])
def test_squares_that_overflow_or_vanish_bound_nothing(small: float, large: float) -> None:
    """Their scores are of ordinary size."""
    q, k, v = heads(1, 2, 1, 40, 70, 16, 16)
    q, k = q * small, k * large
    found = mh.attention(q, k, v, scale=1.0, kernel="native")
    torch.testing.assert_close(found, right(q, k, v, scale=1.0), rtol=1e-3, atol=1e-3)


HUGE = [(torch.float32, 2e3), (torch.float32, 2e4), (torch.float32, 1e5), (torch.bfloat16, 2e3)]
HUGE += [(torch.bfloat16, 3e4), (torch.bfloat16, 1e5), (torch.float16, 1e3)]


@each_width
@pytest.mark.parametrize("t", [1, 5, 12, 13, 64, 150])
@pytest.mark.parametrize(("dtype", "size"), HUGE, ids=str)
def test_huge_scores_cancel_their_log_sum_exp(dtype: torch.dtype, size: float, t: int) -> None:
    """Of scores that lie millions apart one key has all the weight: exactly 1, however it is computed."""
    random = torch.Generator().manual_seed(t)
    q, k, v = (torch.randn(1, 2, t, 64, generator=random) for _ in range(3))
    q, k, v = (size * q).to(dtype), (size * k).to(dtype), v.to(dtype).requires_grad_()
    out, amap = mh.attention_with_map(q, k, v, kernel="native")
    out.float().sum().backward()
    assert out.isfinite().all()
    assert v.grad is not None
    assert (v.grad.double().sum(2) == t).all()
    with torch.no_grad():
        few = mh.attention_with_map(q, k, v, kernel="native")[1]
        spec = {"received": (), "top": 1, "entropy": ()}
        counted = mh.attention_with_map(q, k, v, kernel="native", statistics=spec)[1]
    for one in (amap, few, counted, amap.only(heads=[1]), amap.under(mh.Causal())):
        weights = one.dense()
        assert ((weights == 0) | (weights == 1)).all()
        assert (weights.sum(-1) == 1).all()
        assert torch.equal(one[:, :, t // 2, :], weights[:, :, t // 2])
        assert torch.equal(one[0, 0, [0, t - 1], -1:], weights[0, 0, [0, t - 1], -1:])
        assert (one.row_max() == 1).all()
        assert torch.equal(one.received(), weights.sum(2))
        assert (one.top(1).weights == 1).all()
        assert not one.entropy().any()
        assert (one.mass(mh.Full()) == 1).all()


@each_width
def test_huge_scores_where_chunked_computes_the_gradient() -> None:
    """Of a relative bias, whose gradient ours doesn't have; chunked sums scores in another order."""
    random = torch.Generator().manual_seed(3)
    q, k, v = (1e4 * torch.randn(1, 1, 40, 64, generator=random) for _ in range(3))
    table = torch.randn(1, 7, generator=random).requires_grad_()
    v = v.requires_grad_()
    mh.attention(q, k, v, bias=mh.Relative(table), kernel="native").sum().backward()
    assert v.grad is not None
    assert (v.grad.sum(2) == 40).all()


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e8])
@pytest.mark.parametrize(("t", "s", "d"), [(4, 16, 80), (17, 300, 32), (9, 9, 7)])
@pytest.mark.parametrize("without", [True, False])
def test_auto_has_gradients_of_huge_scores(
    t: int, s: int, d: int, size: float, without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's backward sums scores in another order than its forward; it is faster for short texts."""
    if without:
        monkeypatch.setattr(library, "load_error", "it isn't there")
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, d, generator=random) for n in (t, s, s))
    q, v = (size * q).requires_grad_(), v.requires_grad_()
    mh.attention(q, k, v).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum(2), torch.full((1, 1, d), float(t)), rtol=1e-4, atol=0)
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("kernel", ["native", "chunked", "sdpa", "reference", "auto"])
def test_keys_that_are_equal_share_the_weight_of_huge_scores(kernel: str) -> None:
    """An output is never beyond the values."""
    random = torch.Generator().manual_seed(1)
    for size in (1.0, 1e6, 1e9):
        q, k = size * torch.randn(1, 1, 5, 64, generator=random), torch.randn(1, 1, 1, 64, generator=random)
        v = torch.randn(1, 1, 200, 3 if kernel != "sdpa" else 64, generator=random)
        out = mh.attention(q, k.repeat(1, 1, 200, 1), v, kernel=kernel)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-5)


def test_maps_of_other_kernels_compute_their_own_log_sum_exp() -> None:
    """Its log-sum-exp isn't ours: a map on the CPU finds its own."""
    random = torch.Generator().manual_seed(4)
    q, k, v = (3e3 * torch.randn(1, 2, 70, 64, generator=random) for _ in range(3))
    for kernel in ("chunked", "reference", "auto"):
        amap = mh.attention_with_map(q, k, v, kernel=kernel)[1]
        assert (amap.dense().sum(-1) == 1).all()
        assert (amap.received().sum(-1) == 70).all()


# -- threads -----------------------------------------------------------------------------------------


def attend(seed: int = 1) -> Tensor:
    """A call large enough to be parallel."""
    q, k, v = (
        torch.randn(2, 4, 400, 16, generator=torch.Generator().manual_seed(seed + n)) for n in range(3)
    )
    with torch.no_grad():
        return mh.attention(q, k, v, mask=mh.Causal(), kernel="native")


def _child(queue: Any) -> None:
    queue.put(attend().tolist())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_computes_after_its_parent_did(how: str) -> None:
    """Threads of the parent's pool don't exist in a forked child; it doesn't wait for them."""
    expected = attend()
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert torch.equal(torch.tensor(queue.get(timeout=HANG)), expected)
    child.join(HANG)
    assert child.exitcode == 0


@pytest.mark.full
def test_a_fork_that_is_the_first_to_compute() -> None:
    """The library is loaded in the child, and PyTorch's pool was already at work in the parent."""
    code = (
        "import os, sys, torch, manyheads\n"
        "q = torch.ones(1, 4, 900, 64)\n"
        "torch.randn(10**7).exp()\n"
        "if child := os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "out = manyheads.attention(q, q, q, kernel='native')\n"
        "rows = out[0, :, ::100, :2].flatten().tolist()\n"  # PyTorch's own pool is gone: nothing large here
        "os._exit(int(torch.get_num_threads() < 2 or any(abs(x - 1) > 1e-5 for x in rows)))"
    )
    python(code, OMP_NUM_THREADS="2")


THREADS = (1, 2, 5, 2)


@pytest.mark.parametrize("sizes", [(1, 1, 400, 400), (2, 4, 130, 300), (1, 2, 2, 9000)])
def test_statistics_have_the_same_bits_on_any_number_of_threads(sizes: tuple[int, int, int, int]) -> None:
    b, h, t, s = sizes
    q, k, v = (torch.randn(b, h, n, 16) for n in (t, s, s))
    results, spec = [], spec_of(t, s)
    for threads in THREADS:
        torch.set_num_threads(threads)
        out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), kernel="native", statistics=spec)
        beside, after = amap.statistics(**spec), amap.under(mh.Causal()).statistics(**spec)
        results.append([out, amap.lse, *flat(beside.values()), *flat(after.values())])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("sizes", [(1, 1, 400), (2, 4, 130), (4, 8, 100)])
@pytest.mark.parametrize("bias", [None, "of all heads"])
def test_outputs_and_gradients_have_the_same_bits_on_any_number_of_threads(
    sizes: tuple[int, int, int], bias: str | None
) -> None:
    b, h, t = sizes
    leaves = [x.requires_grad_() for x in torch.randn(3, b, h, t, 32)]
    table = torch.randn(t, t, requires_grad=True)
    mask = mh.Causal() & mh.Window(left=t - 50)
    results = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        out = mh.attention(*leaves, mask=mask, bias=bias and mh.Dense(table), kernel="native")
        wanted = [*leaves, table] if bias else leaves
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_a_gradient_that_comes_in_any_layout() -> None:
    q, k, v = (x.requires_grad_() for x in heads())
    out, lse = native.run(Problem.of(q, k, v, mask=mh.Causal()))[:2]
    for upstream in (torch.ones(()).expand(out.shape), torch.randn(2, 70, 4, 8).transpose(1, 2)):
        ours = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
        theirs = torch.autograd.grad(right(q, k, v, mask=mh.Causal()), (q, k, v), upstream)
        torch.testing.assert_close(ours, theirs)
    both = torch.autograd.grad(out.sum() + 3 * lse.sum(), (q, k), retain_graph=True)
    wide = chunked.run(Problem.of(q.double(), k.double(), v.double(), mask=mh.Causal()))
    expected = torch.autograd.grad(wide[0].sum() + 3 * wide[1].sum(), (q, k), retain_graph=True)
    torch.testing.assert_close(both, expected)
    torch.testing.assert_close(
        torch.autograd.grad(lse.sum(), (q, k)), torch.autograd.grad(wide[1].sum(), (q, k))
    )


@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (6, 8), (6, 64), (6, 65), (7, 64)])
def test_gradients_that_need_no_output(t: int, s: int, mask: str, dtype: torch.dtype) -> None:
    """At most 12 queries that share at most 64 keys; two heads share keys here."""
    case = Case((2, 4, 2, t, s, 17, 9), dtype, mask)
    inputs, answer = make(case), oracle(make(case))
    problem = Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert passes.needs_output(problem) == (t > 6 or s > 64)
    for _ in range(3):  # the last with a plan
        out = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel="native")
        for name, x in ({"out": out} | gradients(out, inputs.leaves(), inputs.upstream)).items():
            assert not over(x, answer.values[name], answer.errors[name])


B, H, T, S = 2, 4, 7, 9
PARTS: dict[str, Callable[[], tuple[Tensor, dict[str, Any]]]] = {  # a tensor that a problem holds, and where
    "keep": lambda: holding(torch.rand(B, 1, T, S) < 0.8, lambda x: {"mask": mh.Causal() & mh.Keep(x)}),
    "lengths": lambda: holding(torch.tensor([5, 9]), lambda x: {"mask": mh.Lengths(x)}),
    "ids": lambda: holding(torch.arange(S) // 3, lambda x: {"mask": mh.Documents(x)}),
    "queries": lambda: holding(
        torch.arange(T) // 3, lambda x: {"mask": mh.SameToken(torch.arange(S) // 3, queries=x)}
    ),
    "dense": lambda: holding(torch.randn(H, T, S), lambda x: {"bias": mh.Dense(x)}),
    "slopes": lambda: holding(torch.rand(H), lambda x: {"bias": mh.ALiBi(x)}),
    "relative": lambda: holding(torch.randn(H, 5), lambda x: {"bias": mh.Relative(x)}),
    "sink": lambda: holding(torch.randn(H), lambda x: {"sink": x}),
    "offset": lambda: holding(torch.tensor([0, 2]), lambda x: {"offset": x, "mask": mh.Causal()}),
}


def holding(x: Tensor, rest: Callable[[Tensor], dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
    return x, rest(x)


def few() -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in heads(B, H, 2, T, S))


@pytest.mark.parametrize("name", [*PARTS, "q", "k", "v"])
def test_every_tensor_that_changed_before_the_gradient_is_noticed(name: str) -> None:
    q, k, v = few()
    part, rest = PARTS[name]() if name in PARTS else ({"q": q, "k": k, "v": v}[name], {})
    out = mh.attention(q, k, v, **rest, kernel="native")
    out.sum().backward(retain_graph=True)
    with torch.no_grad():
        part.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", PARTS)
def test_a_graph_holds_saved_tensors_only(name: str) -> None:
    """Else activation checkpointing would free nothing, and hooks on saved tensors would move nothing."""
    leaves = few()
    part, rest = PARTS[name]()
    expected = torch.autograd.grad(mh.attention(*leaves, **rest, kernel="native").square().sum(), leaves)
    q, k, v = (x * 1 for x in leaves)  # the graph holds leaves themselves
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        out = mh.attention(q, k, v, **rest, kernel="native")
    held = [weakref.ref(x) for x in (q, k, v, part)]
    del q, k, v, part, rest
    assert [x() for x in held] == [None] * 4
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("case", HERE, ids=str)
def test_a_direct_call_gives_the_bits_of_the_operator(case: Case) -> None:
    """The same kernel reached in two ways: the operator takes masks and biases as text."""
    inputs = make(case)
    problem = Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    if native.why_unsupported(problem):
        return
    leaves = list(inputs.leaves().values())
    answers = []
    for out, lse in (native.run(problem)[:2], torch.ops.manyheads.native(*operator.arguments(problem))):
        grads = torch.autograd.grad(
            (out.float() * inputs.upstream).sum() + lse.nan_to_num(neginf=0).sum(), leaves, allow_unused=True
        )
        answers.append([out, lse, *grads])
    for x, y in zip(*answers, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
def test_threads_of_its_own() -> None:
    code = "import tests.unit.kernels.test_native as t; t.attend(); print(t.native.built())"
    assert "using its own threads" in python(code, MANYHEADS_THREADS="own")


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    expected = [attend(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for out, want in zip(pool.map(attend, range(4)), expected, strict=True):
                assert torch.equal(out, want)


def test_the_gil_is_released() -> None:
    q = torch.randn(1, 4, 3000, 64)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        work = pool.submit(mh.attention, q, q, q, kernel="native")
        steps = 0
        while not work.done():
            steps += 1
    assert steps > 1000


# -- layouts and numbers -----------------------------------------------------------------------------

MASKS = st.sampled_from(
    [
        None,
        mh.Causal(),
        mh.Window(left=5),
        mh.Window(left=9, right=3),
        mh.Lengths(torch.tensor([3, 60])),
        mh.Causal() & mh.Lengths(torch.tensor([20, 41]), left=True),
        mh.Documents(torch.arange(200) // 17),
        mh.Causal() & mh.Documents(torch.arange(200) % 3),
        mh.Prefix(4) | mh.Causal(),
        ~mh.Diagonal(0),
    ]
)


@given(
    st.integers(1, 130),
    st.integers(1, 150),
    st.integers(1, 70),
    st.integers(1, 70),
    MASKS,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["plain", "batch first", "columns", "gap"]),
    st.integers(0, 1 << 20),
)
def test_any_sizes_and_layout(
    t: int, s: int, d: int, w: int, mask: Any, dtype: torch.dtype, layout: str, seed: int
) -> None:
    torch.manual_seed(seed)

    def laid(x: Tensor) -> Tensor:
        x = x.to(dtype)
        if layout == "batch first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "columns":
            return x.mT.contiguous().mT
        return torch.stack((x, x + 9), -1)[..., 0] if layout == "gap" else x

    q, k, v = (laid(x) for x in heads(t=t, s=s, d=d, w=w))
    with torch.no_grad():
        problem = Problem.of(q, k, v, mask=mask)
        out, lse = native.run(problem)[0], native.statistics(problem, None, None)[0]
        exact, amap = mh.attention_with_map(q.double(), k.double(), v.double(), mask=mask, kernel="reference")
    close = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=close, atol=2 * close)
    torch.testing.assert_close(lse.double(), amap.lse, rtol=2e-6, atol=5e-6)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_for_packing_is_freed() -> None:
    """What a long call needed isn't held until the next."""
    code = (
        "import torch, manyheads\n"
        "def resident():\n"
        "    line = next(x for x in open('/proc/self/status') if x.startswith('VmRSS'))\n"
        "    return int(line.split()[1]) * 1024\n"
        "q, k = torch.randn(1, 8, 8, 64), torch.randn(1, 8, 20_000, 64)\n"
        "manyheads.attention(q, k[:, :, :500], k[:, :, :500], kernel='native')\n"
        "before = resident()\n"
        "manyheads.attention(q, k, k, kernel='native')\n"  # packs 82 MB
        "print(resident() - before)"
    )
    assert int(python(code)) < 20e6
