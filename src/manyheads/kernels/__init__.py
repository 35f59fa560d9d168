"""The kernels: an ordered tuple, the rules that choose from it, and the table that explains them.

A kernel is a module with

    NAME        its name in `kernel=`
    GIVES_LSE   does it give the log-sum-exp beside the output?
    SHIELDS     does it promise that NaN and Inf behind a mask can't leak?
    refuse(p)   all reasons why it can't compute this problem; none if it can
    run(p)      output `[b, h, t, w]`, and log-sum-exp `[b, h, t]` or None

and, if it isn't the fastest wherever it can,

    defers(p)   why another one is faster here

and, if it was compiled,

    built()     what of it runs here, or why nothing does

and, if it reads statistics off the weights that it computes,

    LOOKS       and `run` takes a look, what is asked of them

`kernel="auto"` takes the first in order that neither refuses nor defers; a kernel asked for by name raises
all its reasons. Nothing falls back in silence.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch import Tensor

from manyheads.scores import Problem, exactly, finite

PROCESS = os.getpid()  # that loaded this module; a fork of it has another number
ORDER = ("native", "sdpa", "flex", "chunked", "reference")


def load(name: str) -> Any:
    """The kernel of this name."""
    if name not in ORDER:
        raise ValueError(f'kernel must be "auto" or one of {", ".join(ORDER)}, and {name!r} came.')
    # Imported one by one, when asked for, in words that torch.compile can follow.
    if name == "native":
        from manyheads.kernels import native

        return native
    if name == "sdpa":
        from manyheads.kernels import sdpa

        return sdpa
    if name == "flex":
        from manyheads.kernels import flex

        return flex
    if name == "chunked":
        from manyheads.kernels import chunked

        return chunked
    from manyheads.kernels import reference

    return reference


def verdicts(problem: Problem) -> dict[str, list[str]]:
    """Each kernel, in order, and its reasons to refuse (none: it can)."""
    return {name: load(name).refuse(problem) for name in ORDER}


def choose(problem: Problem, kernel: str = "auto") -> Any:
    """The kernel for a problem; ValueError with all the reasons if the one asked for can't."""
    if kernel != "auto":
        chosen = load(kernel)
        reasons = chosen.refuse(problem)
        if reasons:
            raise ValueError(
                f'kernel="{kernel}" can\'t compute this: {"; ".join(reasons)}. '
                'Use kernel="auto" or another one; explain(...) prints which can.'
            )
        return chosen
    for name in ORDER:
        chosen = load(name)
        if not chosen.refuse(problem) and not deferred(chosen, problem):
            return chosen
    raise AssertionError("the reference kernel refuses nothing")


def deferred(kernel: Any, problem: Problem) -> list[str]:
    """Why `auto` passes over a kernel that could compute a problem."""
    return kernel.defers(problem) if hasattr(kernel, "defers") else []


def run(problem: Problem, kernel: str = "auto", look: Any = None) -> tuple[Tensor, Tensor | None]:
    """The output `[b, h, t, w]` and, where the kernel gives it, the log-sum-exp `[b, h, t]`.

    A kernel that LOOKS finds what a look asks of the weights on the way, unless that is sooner done after.

    A kernel that doesn't shield is watched, in eager mode on the CPU: where q, k, v or its output
    isn't finite, "auto" takes `chunked`, and under a mask a kernel asked for by name raises.

    The output alone doesn't tell: PyTorch's CPU kernel may skip a masked NaN on its way forward and
    meet it on its way back, and answers with zeros to NaN among a few keys. Nor do the inputs:
    masked numbers may be so large that their products overflow.
    """
    chosen = choose(problem, kernel)
    watched = not chosen.SHIELDS and problem.q.device.type == "cpu" and not torch.compiler.is_compiling()
    with exactly(problem.q.device):
        if look is not None and hasattr(chosen, "LOOKS"):
            return chosen.run(problem, look)
        if not watched:
            return chosen.run(problem)
        if all(finite(x) for x in (problem.q, problem.k, problem.v)):
            out, lse = chosen.run(problem)
            if finite(out):
                return out, lse
        if kernel == "auto":
            return load("chunked").run(problem)
        if problem.mask is None and problem.bias is None:
            return chosen.run(problem)
        raise ValueError(
            f"kernel=\"{kernel}\" met NaN or Inf and can't promise that what is masked doesn't leak: "
            'use kernel="auto" or "chunked", or mend the input.'
        )


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """What this machine has, as text: its devices, and each kernel with what it is."""
    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"]
    devices += [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    lines = [f"torch {torch.__version__} on {', '.join(devices)}", 'kernel="auto" takes the first that can:']
    for name in ORDER:
        kernel = load(name)
        what = (kernel.__doc__ or "").partition("\n")[0]
        lines.append(f"  {name:<10} {what}")
        if hasattr(kernel, "built"):
            lines.append(f"  {'':<10} {kernel.built()}")
    return "\n".join(lines)


def table(problem: Problem) -> str:
    """The verdicts as text: each kernel with yes or all its reasons, and what a map costs there."""
    chosen = choose(problem).NAME
    n = problem.shape
    lines = [
        f"q [{n.b}, {n.h}, {n.t}, {n.d}]  k [{n.b}, {n.g}, {n.s}, {n.d}]  v width {n.w}  {problem.q.dtype}"
    ]
    for name, reasons in verdicts(problem).items():
        kernel = load(name)
        if reasons:
            lines.append(f"  {name:<10} no: " + f"\n{'':<16}".join(reasons))
            continue
        cost = "a map is free" if kernel.GIVES_LSE else "a map costs one more pass over the keys"
        shield = "" if kernel.SHIELDS else f"; {_leaks(problem)}"
        slower = deferred(kernel, problem)
        mark = "  ← auto" if name == chosen else f"; not auto: {'; '.join(slower)}" if slower else ""
        lines.append(f"  {name:<10} yes: {cost}{shield}{mark}")
    return "\n".join(lines)


def _leaks(problem: Problem) -> str:
    if problem.q.device.type == "cpu":
        return "NaN and Inf are looked for (not while compiling)"
    return "NaN and Inf in a masked key are kept out only where no query may see it"
