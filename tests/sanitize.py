"""The native kernel under a sanitizer, over the table of cases: `python tests/sanitize.py address`.

Or undefined, or thread. It builds the library with the sanitizer into a temporary folder, and runs every
width that this processor can, each in a process of its own, on threads of its own (the thread sanitizer
doesn't know those of OpenMP); then a library whose tiles are plain loops, for the build for AMX.
Exit code 0: clean.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from manyheads.kernels.native import library

ROOT = Path(__file__).parents[1]
LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python's own memory is never all freed
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}
RUN = (
    "import torch; torch.set_num_threads(3); import tests.unit.kernels.test_native as t;"
    "t.within_budget(t.HERE); t.attend()"
)


def main(sanitizer: str) -> int:
    os.chdir(ROOT)
    os.environ["MANYHEADS_CXXFLAGS"] = (
        f"-fsanitize={sanitizer} -fno-sanitize-recover=all -g -O1 -fno-omit-frame-pointer"
    )
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, f"-print-file-name={LIBRARIES[sanitizer]}"], capture_output=True, text=True
    )
    emulated = ["amx"] if "avx2" in library.supported else []
    for tiles, widths in (("", library.supported), ("emulated", emulated)):
        os.environ["MANYHEADS_TILES"] = tiles
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "native.so"
            runpy.run_path("setup.py")["compile_to"](built, Path(folder) / "objects")
            for width in widths:
                print(f"{sanitizer}, {tiles} {width}", flush=True)
                given = {
                    "LD_PRELOAD": found.stdout.strip(),
                    "MANYHEADS_LIBRARY": str(built),
                    "MANYHEADS_WIDTH": width,
                    "MANYHEADS_THREADS": "own",
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                }
                done = subprocess.run(
                    [sys.executable, "-c", RUN], env={**os.environ, **OPTIONS, **given}, check=False
                )
                if done.returncode:
                    return done.returncode
    print("clean")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in LIBRARIES]:
        sys.exit(f"python tests/sanitize.py {'|'.join(LIBRARIES)}")
    sys.exit(main(sys.argv[1]))
