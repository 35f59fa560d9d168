"""Load the compiled library and select the build that this processor runs.

The library is compiled when the package is installed (`setup.py`), links to nothing of PyTorch, and is called
through ctypes, which releases the GIL. Three environment variables change it, unless they are empty:
`MANYHEADS_WIDTH` selects a build by name, `MANYHEADS_THREADS=own` starts threads instead of using PyTorch's
pool, and `MANYHEADS_LIBRARY` is the path of another library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import struct
from pathlib import Path

from manyheads.startup import PROCESS

HERE = Path(__file__).parent
ANOTHER = os.environ.get("MANYHEADS_LIBRARY")  # such as one with sanitizers
FILE = Path(ANOTHER or HERE / "native.so")
LOG = FILE.with_suffix(".log")  # why the library, or one of its builds, is missing
INTERFACE = 9  # as in problem.h, whose structs follow, field by field; all fields have eight bytes
PROBLEM = struct.Struct("=8q 3Q 16q 2Q 2d Q qQ 2q 2Q 2Q2q Q4q Q4q Qq 2q".replace(" ", ""))
GRADIENT = struct.Struct("=Q4q Q 3Q Q Q4q Q 2q".replace(" ", ""))
STATISTICS = struct.Struct("=2q 4Q Q q 2Q q Q q".replace(" ", ""))
POOLED_MAP = struct.Struct("=2q2Q")
WIDTHS = (
    "portable",
    "avx2",
    "avx512",
    "avx512bf16",
    "amx",
)  # ordered by what they require

attend: ctypes._NamedFuncPointer | None = None  # (a problem, statistics or None, number of the build) → 0
differentiate: ctypes._NamedFuncPointer | None = None  # (a problem, a gradient, number of the build) → 0
scores: ctypes._NamedFuncPointer | None = None  # (a problem, where to write, number of the build) → 0
width: int | None = None  # the build's number in WIDTHS
runs: list[str] = []  # all builds that this processor runs
left_out: dict[str, str] = {}  # why builds couldn't be compiled, or aren't allowed by the system
shares_threads = False
has_tiles = False  # True if this processor multiplies bfloat16 in tiles (AMX)
missing: str | None = None  # why no library is loaded


def _load() -> None:
    global attend, differentiate, scores, width, missing, shares_threads, has_tiles
    said = LOG.read_text(encoding="utf-8", errors="replace").strip() if LOG.exists() else ""
    if not FILE.exists():
        missing = f"its library isn't there: {said}" if said and not ANOTHER else _unusable("isn't there")
        return
    try:
        library = ctypes.CDLL(str(FILE))
    except OSError as error:
        missing = _unusable(f"doesn't load ({error})")
        return
    if not hasattr(library, "manyheads_interface"):
        missing = _unusable("has none of its functions")
        return
    library.manyheads_interface.restype = ctypes.c_int64
    sizes = (STATISTICS.size * 1000 + GRADIENT.size) * 1000 + PROBLEM.size
    if library.manyheads_interface() != INTERFACE * 10**9 + sizes:
        missing = _unusable("was built from another version of the sources")
        return
    threads = os.environ.get("MANYHEADS_THREADS")
    if threads and threads != "own":
        missing = f"MANYHEADS_THREADS must be own or unset, and {threads!r} is set"
        return
    wanted = os.environ.get("MANYHEADS_WIDTH")
    if wanted and wanted not in WIDTHS:
        missing = f"MANYHEADS_WIDTH must be one of {', '.join(WIDTHS)}, and {wanted!r} is set"
        return
    reasons = (line.partition(": ") for line in said.splitlines())
    left_out.update((build, why) for build, _, why in reasons if build in WIDTHS)
    if wanted in left_out:
        missing = f"MANYHEADS_WIDTH={wanted} is set, and that build isn't there: {left_out[wanted]}"
        return
    runs.extend(name for n, name in enumerate(WIDTHS) if library.manyheads_runs(n))
    tiles = library.manyheads_tiles()
    if tiles == 1 and "amx" not in left_out:
        left_out["amx"] = "Linux doesn't let this process use AMX tiles (it does since version 5.16)"
    if wanted and wanted not in runs:
        why = left_out.get(wanted, "the library has no such build that this processor can run")
        missing = f"MANYHEADS_WIDTH={wanted} is set, and {why}"
        return
    shares_threads = bool(library.manyheads_begin(_own_threads()))
    has_tiles = tiles > 0
    width = WIDTHS.index(wanted or runs[-1])
    attend = library.manyheads_attend
    attend.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    attend.restype = ctypes.c_int
    differentiate = library.manyheads_differentiate
    differentiate.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    differentiate.restype = ctypes.c_int
    scores = library.manyheads_scores
    scores.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    scores.restype = ctypes.c_int


def _unusable(what: str) -> str:
    """Return why a library can't be used, and how to fix it."""
    if ANOTHER:
        return (
            f"MANYHEADS_LIBRARY must name a library that manyheads built, and {ANOTHER!r} {what}: "
            "unset it or name another"
        )
    return f"its library {what}: install manyheads again"


def _own_threads() -> bool:
    """Return True if the kernel must start its own threads, as in a forked child, which has no pool."""
    child = multiprocessing.parent_process() is not None and multiprocessing.get_start_method() == "fork"
    return child or os.getpid() != PROCESS or os.environ.get("MANYHEADS_THREADS") == "own"


_load()
