"""Builds the native kernel, once for each vector width and once for float64, into one library that links
to nothing of PyTorch, and puts the lessons into the package.

All else is in pyproject.toml. A build for a vector width that the compiler doesn't support is left out. If
there is no C++ compiler, or the portable build fails, manyheads is installed without the kernel. The reasons
are written to native.log beside the library; `manyheads kernels` prints them.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path("src/manyheads/kernels/native")
LESSONS = Path("docs/lessons")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BUILDS = {
    "float64": ["-DREAL=double"],
    "portable": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
EMULATE = "-DEMULATE_TILES"  # tiles are plain loops
EMULATED = {"float64": BUILDS["float64"], "portable": [], "amx": [*AVX2, EMULATE, "-Wno-psabi"]}

NEEDED = ("float64", "portable")
SUMMARIES = (
    "ld returned",
    "linker command failed",
)  # the last lines of a linker, which don't say why it failed


def split_variable(variable: str, usual: str = "") -> list[str]:
    """Return the parts of a command in an environment variable."""
    given = os.environ.get(variable, "").strip() or usual
    try:
        return shlex.split(given)
    except ValueError as error:
        raise RuntimeError(
            f"expected the environment variable {variable} to be quoted as in a shell, got {given!r} "
            f"({str(error).lower()}). Correct it and install manyheads again."
        ) from None


def find_error(output: str) -> str:
    """Return the line of a compiler's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if not any(end in line for end in SUMMARIES)]
    for word in ("error", "cannot"):
        for line in lines:
            if word in line.lower():
                return line
    return lines[-1] if lines else "no message"


def compile_to(library: Path, work: Path) -> dict[str, str]:
    """Build the library; return why builds were left out of it. A RuntimeError says why there is none."""
    if sys.platform == "win32":
        raise RuntimeError("it isn't built on Windows yet")
    compiler = split_variable("CXX", "c++")
    extra = split_variable("MANYHEADS_CXXFLAGS")  # sanitizers, say
    emulated = os.environ.get("MANYHEADS_TILES") == "emulated"  # to test that build on other processors
    work.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine().lower() in ("x86_64", "amd64")

    def run(*arguments: str) -> None:
        command, name = [*compiler, *FLAGS, *arguments, *extra], shlex.join(compiler)
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "LC_ALL": "C"},  # so that it speaks English
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise RuntimeError(
                f"the C++ compiler {name} can't be started ({error.strerror}). "
                "Install one, or name it in the environment variable CXX, and install manyheads again."
            ) from None
        if done.returncode:
            reason = find_error(done.stderr or done.stdout)
            raise RuntimeError(
                f"the C++ compiler {name} failed with exit code {done.returncode} ({reason}). "
                "Name another in the environment variable CXX, and install manyheads again."
            )

    def compiled(build: str, flags: list[str]) -> list[str]:
        made = {source: str(work / f"{source}-{build}.o") for source in ("attend", "differentiate")}
        for source, to in made.items():
            run(*flags, f"-DLEVEL={build}", "-c", str(SOURCE / f"{source}.cpp"), "-o", to)
        return list(made.values())

    builds = {
        build: flags for build, flags in (EMULATED if emulated else BUILDS).items() if x86 or build in NEEDED
    }
    objects: list[str] = []
    left_out: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each waits for a compiler
        pending = {build: threads.submit(compiled, build, flags) for build, flags in builds.items()}
    for build, made in pending.items():
        try:
            objects += made.result()
        except RuntimeError as error:
            if build in NEEDED:
                raise
            left_out[build] = str(error)
    here = [
        f"-DIF_{build}(x)={'x' if build in builds and build not in left_out else '0'}"
        for build in BUILDS
        if build not in NEEDED
    ]
    objects.append(str(work / "threads.o"))
    run(*here, *([EMULATE] if emulated else []), "-c", str(SOURCE / "threads.cpp"), "-o", objects[-1])
    run("-shared", *objects, "-o", str(library), "-pthread", *(["-ldl"] if sys.platform == "linux" else []))
    return left_out


class BuildWithLessons(build_py):
    """Puts the notebooks of docs/lessons into the package; an editable installation reads them there."""

    def lessons(self) -> dict[str, str]:
        """Return the source of each file by where it is built."""
        to = Path(self.build_lib, "manyheads", "notebooks")
        files = [path for kind in ("*.ipynb", "*/*.py") for path in sorted(LESSONS.glob(kind))]
        return {str(to / path.relative_to(LESSONS)): str(path) for path in files}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for to, path in self.lessons().items():
                self.mkpath(os.path.dirname(to))
                self.copy_file(path, to)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else list(self.lessons()))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.lessons().values()]  # for the sdist


class BuildNative(build_ext):
    """Compiles with the flags that each width needs, and lets an installation go on without."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # for any Python

    def run(self) -> None:
        # setuptools' own would first look for a compiler, and end the installation over an odd CXX or CFLAGS.
        for ext in self.extensions:
            self.build_extension(ext)

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))  # in the sources, where they are installed editable
        log = library.with_suffix(".log")
        log.unlink(missing_ok=True)
        try:
            left_out = compile_to(library, Path(self.build_temp) / "native")
            reasons = "".join(f"{build}: {reason}\n" for build, reason in left_out.items())
        except RuntimeError as error:
            library.unlink(missing_ok=True)  # that of an earlier build
            reasons = f"{error}\n"
        if reasons:
            self.warn(f"manyheads is installed without its native kernel, or a part of it: {reasons}")
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(reasons, encoding="utf-8")


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
        cmdclass={"build_py": BuildWithLessons, "build_ext": BuildNative, "bdist_wheel": AnyPython},
    )
