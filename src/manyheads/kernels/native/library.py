"""Load the compiled library and select the best build that this processor supports.

The library is compiled when the package is installed (`setup.py`). It doesn't link against PyTorch, and it is
called through ctypes, which releases the GIL. Three environment variables change this; an empty one counts
as unset. `MANYHEADS_WIDTH` selects a build by name, `MANYHEADS_THREADS=own` starts threads instead of using
PyTorch's pool, and `MANYHEADS_LIBRARY` is the path of another library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import struct
from pathlib import Path

from manyheads.startup import PROCESS

FOLDER = Path(__file__).parent
OVERRIDE = os.environ.get("MANYHEADS_LIBRARY")  # for example a library with sanitizers
FILE = Path(OVERRIDE or FOLDER / "native.so")
LOG = FILE.with_suffix(".log")  # why the library, or one of its builds, is missing
INTERFACE = 11  # as in problem.h. The formats are those of its structs; each field has eight bytes
PROBLEM = struct.Struct("=8q 3Q 16q 2Q 2d Q qQ 2q 2Q 2Q2q Q4q Q4q Qq 2q".replace(" ", ""))
GRADIENT = struct.Struct("=Q4q Q 3Q Q Q4q Q 2q".replace(" ", ""))
STATISTICS = struct.Struct("=2q 4Q Q q 2Q q Q q".replace(" ", ""))
POOLED_MAP = struct.Struct("=2q2Q")
# Builds by vector width; each requires more instructions than the one before.
WIDTHS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
PAIRS = "avx512bf16"  # the build that multiplies pairs of bfloat16

attend: ctypes._NamedFuncPointer | None = None  # (problem, statistics or None, build) → 0, or 1 (no memory)
differentiate: ctypes._NamedFuncPointer | None = None  # (problem, gradient, build) → 0, 1, or 2 (not finite)
scores: ctypes._NamedFuncPointer | None = None  # (problem, address of the result, build) → 0, or 1
width: int | None = None  # the index in WIDTHS of the selected build
supported: list[str] = []  # the builds that the library has and this processor supports
unavailable: dict[
    str, str
] = {}  # by build, why it is missing: compiler errors, or no permission to use tiles
shares_threads = False  # True if the kernel runs on PyTorch's thread pool
has_tiles = False  # True if this processor has tiles for bfloat16 (AMX)
has_slow_pairs = False  # True if it multiplies pairs of bfloat16 at half the rate of float32
load_error: str | None = None  # why no library is loaded


def _load() -> None:
    global attend, differentiate, scores, width, load_error, shares_threads, has_tiles, has_slow_pairs
    log = LOG.read_text(encoding="utf-8", errors="replace").strip() if LOG.exists() else ""
    if not FILE.exists():
        load_error = (
            f"its library is missing: {log.rstrip('.')}"
            if log and not OVERRIDE
            else _explain_unusable("is missing")
        )
        return
    try:
        library = ctypes.CDLL(str(FILE))
    except OSError as error:
        load_error = _explain_unusable(f"can't be loaded ({error})")
        return
    if not hasattr(library, "manyheads_interface"):
        load_error = _explain_unusable("lacks the expected functions")
        return
    library.manyheads_interface.restype = ctypes.c_int64
    sizes = (STATISTICS.size * 1000 + GRADIENT.size) * 1000 + PROBLEM.size
    if library.manyheads_interface() != INTERFACE * 10**9 + sizes:
        load_error = _explain_unusable("was built from another version of manyheads")
        return
    threads = os.environ.get("MANYHEADS_THREADS")
    if threads and threads != "own":
        load_error = f"expected MANYHEADS_THREADS to be 'own' or unset, got {threads!r}"
        return
    requested = os.environ.get("MANYHEADS_WIDTH")
    if requested and requested not in WIDTHS:
        load_error = f"expected MANYHEADS_WIDTH to be one of {', '.join(WIDTHS)}, got {requested!r}"
        return
    reasons = (line.partition(": ") for line in log.splitlines())
    unavailable.update((build, why) for build, _, why in reasons if build in WIDTHS)
    if requested in unavailable:
        load_error = (
            f"MANYHEADS_WIDTH={requested} is set, but that build is missing: {unavailable[requested]}"
        )
        return
    supported.extend(name for n, name in enumerate(WIDTHS) if library.manyheads_runs(n))
    tiles = library.manyheads_tiles()
    if tiles == 1 and "amx" not in unavailable:
        unavailable["amx"] = "the system doesn't permit AMX tiles (Linux supports them since version 5.16)"
    if requested and requested not in supported:
        why = unavailable.get(requested, "this processor doesn't support that build, or the library lacks it")
        load_error = f"MANYHEADS_WIDTH={requested} is set, but {why}"
        return
    shares_threads = bool(library.manyheads_begin(_needs_own_threads()))
    has_tiles, has_slow_pairs = tiles > 0, bool(library.manyheads_slow_pairs())
    fastest = [build for build in supported if not (build == PAIRS and has_slow_pairs)][-1]
    width = WIDTHS.index(requested or fastest)
    attend = library.manyheads_attend
    attend.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    attend.restype = ctypes.c_int
    differentiate = library.manyheads_differentiate
    differentiate.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    differentiate.restype = ctypes.c_int
    scores = library.manyheads_scores
    scores.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    scores.restype = ctypes.c_int


def _explain_unusable(problem: str) -> str:
    """Return why a library can't be used, and how to fix it."""
    if OVERRIDE:
        return (
            f"expected MANYHEADS_LIBRARY to name a library that manyheads built, but {OVERRIDE!r} {problem}: "
            "unset it or name another"
        )
    return f"its library {problem}: reinstall manyheads"


def _needs_own_threads() -> bool:
    """Return True if the kernel must start its own threads, e.g. in a forked child, which has no pool."""
    child = multiprocessing.parent_process() is not None and multiprocessing.get_start_method() == "fork"
    return child or os.getpid() != PROCESS or os.environ.get("MANYHEADS_THREADS") == "own"


_load()
