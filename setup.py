"""Builds the native kernel, once for each vector width and once for float64, into one library that links
to nothing of PyTorch.

All else is in pyproject.toml. Where there is no C++ compiler, or it fails, the installation goes on without
the kernel and leaves the reason beside the place of the library; `manyheads kernels` prints it.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("src/manyheads/kernels/native")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BUILDS = {
    "float64": ["-DREAL=double"],
    "portable": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
}


def compile_to(library: Path, work: Path) -> None:
    """The library from its sources; RuntimeError with what the compiler said."""
    if sys.platform == "win32":
        raise RuntimeError("it isn't built on Windows yet")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    extra = shlex.split(os.environ.get("MANYHEADS_CXXFLAGS", ""))  # sanitizers, say
    work.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine().lower() in ("x86_64", "amd64")

    def run(*arguments: str) -> None:
        command = [*compiler, *FLAGS, *arguments, *extra]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(
                f"the C++ compiler {shlex.join(compiler)} doesn't start ({error.strerror})"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[:1] or ["no message"]
            raise RuntimeError(
                f"the C++ compiler {shlex.join(compiler)} ended with {done.returncode} ({said[0]})"
            )

    objects = []
    for build, flags in BUILDS.items():
        if x86 or "avx" not in build:
            for source in ("attend", "differentiate"):
                objects.append(str(work / f"{source}-{build}.o"))
                run(*flags, f"-DLEVEL={build}", "-c", str(SOURCE / f"{source}.cpp"), "-o", objects[-1])
    objects.append(str(work / "threads.o"))
    run("-c", str(SOURCE / "threads.cpp"), "-o", objects[-1])
    run("-shared", *objects, "-o", str(library), "-pthread", *(["-ldl"] if sys.platform == "linux" else []))


class BuildNative(build_ext):
    """Compiles with the flags that each width needs, and lets an installation go on without."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # for any Python

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        log = library.with_suffix(".log")
        log.unlink(missing_ok=True)
        try:
            compile_to(library, Path(self.build_temp) / "native")
        except RuntimeError as error:
            self.warn(f"manyheads is installed without its native kernel: {error}")
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{error}\n", encoding="utf-8")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:  # an editable installation reads the source folder
            built = Path(self.get_ext_fullpath(ext.name))
            here = SOURCE / built.name
            for suffix, other in ((".log", ".so"), (".so", ".log")):
                if built.with_suffix(suffix).exists():
                    self.copy_file(str(built.with_suffix(suffix)), str(here.with_suffix(suffix)))
                    here.with_suffix(other).unlink(missing_ok=True)


class AnyPython(bdist_wheel):
    """One wheel for a platform: the library knows neither Python's nor PyTorch's interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # so it is for a build; the sanitizers only compile
    setup(
        ext_modules=[
            Extension(
                "manyheads.kernels.native.native",
                [str(path) for path in sorted(SOURCE.glob("*.cpp"))],
                depends=[str(path) for path in sorted(SOURCE.glob("*.h"))],
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
    )
