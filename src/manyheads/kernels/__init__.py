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

and, if a call can be shorter than `run` (see `plans`),

    plan(p)     a function of q, k and v that computes every problem of p's layout, or None

`native` and `chunked` also have

    lse(p)      the log-sum-exp alone, and
    tile(p, …)  the scores of a tile, summed as `lse` sums them: `reader` says which of the two a map reads

`kernel="auto"` takes the first in order that neither refuses nor defers; a kernel asked for by name raises
all its reasons. Nothing falls back in silence.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.problem import Problem
from manyheads.scores import exactly, finite
from manyheads.shapes import can_read

ORDER = ("native", "sdpa", "flex", "chunked", "reference")


def check(name: str) -> str:
    """Return a kernel's name or "auto"; raise ValueError for other values."""
    if name != "auto" and name not in ORDER:
        raise ValueError(f'Expected kernel to be "auto" or one of {", ".join(ORDER)}, got {name!r}.')
    return name


def load(name: str) -> Any:
    """Return the kernel of this name."""
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
    check(name)
    from manyheads.kernels import reference

    return reference


def verdicts(problem: Problem) -> dict[str, list[str]]:
    """Return each kernel, in order, and its reasons to refuse (none: it can)."""
    return {name: load(name).refuse(problem) for name in ORDER}


def choose(problem: Problem, kernel: str = "auto") -> Any:
    """Return the kernel for a problem; ValueError with all reasons if the named one doesn't support it."""
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
    """Return why `auto` passes over a kernel that could compute a problem."""
    return kernel.defers(problem) if hasattr(kernel, "defers") else []


def reader(problem: Problem) -> Any:
    """Return the kernel whose `lse` and `tile` a map of this problem reads.

    A weight is exp(score − lse), in which an error that both share cancels. Scores of 10^6 have errors of
    0.1, so scores are summed in the order in which the log-sum-exp was: both by `native` where it supports
    the problem, else both by `chunked`.
    """
    native = load("native")
    return native if native.reads(problem) else load("chunked")


class Result(NamedTuple):
    """The name of a kernel, and what it computed."""

    kernel: str
    out: Tensor  # [b, h, t, w]
    lse: Tensor | None  # [b, h, t]

    def lse_of_map(self, problem: Problem) -> Tensor | None:
        """Return the log-sum-exp if it belongs to the scores that a map reads (see `reader`)."""
        native = load("native")
        return self.lse if native.reads(problem) == (self.kernel == native.NAME) else None


def run(problem: Problem, kernel: str = "auto", look: Any = None) -> Result:
    """Compute the output `[b, h, t, w]` and, where the kernel gives it, the log-sum-exp `[b, h, t]`.

    A kernel that LOOKS finds what a look asks of the weights on the way, unless that is sooner done after.

    A kernel that doesn't shield is watched, in eager mode on the CPU: where q, k, v or its output
    isn't finite, "auto" takes `chunked`, and under a mask a kernel asked for by name raises. For a gradient
    of scores that may be larger than `LARGE`, "auto" takes a kernel that sums them again in the same order.

    The output alone doesn't tell: PyTorch's CPU kernel may skip a masked NaN on its way forward and
    meet it on its way back, and answers with zeros to NaN among a few keys. Nor do the inputs:
    masked numbers may be so large that their products overflow.
    """
    return compute(problem, choose(problem, kernel), kernel, look)


def compute(problem: Problem, chosen: Any, kernel: str, look: Any = None) -> Result:
    """`run` by the kernel that was chosen for a problem; kernel is the name by which it was."""
    watched = not chosen.SHIELDS and problem.q.device.type == "cpu" and can_read(problem.q)
    with exactly(problem.q.device):
        if look is not None and hasattr(chosen, "LOOKS"):
            return Result(chosen.NAME, *chosen.run(problem, look))
        if not watched:
            return Result(chosen.NAME, *chosen.run(problem))
        if kernel == "auto" and _may_be_large(problem):
            native = load("native")
            chosen = load("chunked") if native.refuse(problem) else native
            return Result(chosen.NAME, *chosen.run(problem))
        if all(finite(x) for x in (problem.q, problem.k, problem.v)):
            result = Result(chosen.NAME, *chosen.run(problem))
            if finite(result.out):
                return result
        if kernel == "auto":
            return Result("chunked", *load("chunked").run(problem))
        if problem.mask is None and problem.bias is None:
            return Result(chosen.NAME, *chosen.run(problem))
        raise ValueError(
            f"kernel=\"{kernel}\" found NaN or Inf and doesn't promise that masked ones can't leak: "
            'use kernel="auto" or "chunked", or fix the input.'
        )


# Scores above which the rounding of PyTorch's gradient is larger than that of the numbers it is stored in.
LARGE = {torch.float32: 2.0**10, torch.bfloat16: 2.0**14, torch.float16: 2.0**14, torch.float64: 2.0**38}


def _may_be_large(problem: Problem) -> bool:
    """Return True if a gradient is wanted of scores that may exceed `LARGE`, bounded by |scale|·Σ|q||k|."""
    if not problem.wants_gradient():
        return False
    q, k = (_largest(x.detach()) for x in (problem.q, problem.k))
    return not abs(problem.scale) * problem.shape.d * q * k <= LARGE[problem.q.dtype]


def _largest(x: Tensor) -> float:
    """Return the largest magnitude, NaN if there is a NaN."""
    low, high = x.aminmax()  # a norm of order inf takes 4 to 30 times as long
    return max(-float(low), float(high))


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """Return what this machine has, as text: its devices, and each kernel with what it is."""
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
    """Return the verdicts as text: each kernel with yes or all its reasons, and what a map costs there."""
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
        free = _gives_lse_of_map(kernel, problem)
        cost = "a map is free" if free else "a map costs one more pass over the keys"
        shield = "" if kernel.SHIELDS else f"; {_leaks(problem)}"
        slower = deferred(kernel, problem)
        mark = "  ← auto" if name == chosen else f"; not auto: {'; '.join(slower)}" if slower else ""
        lines.append(f"  {name:<10} yes: {cost}{shield}{mark}")
    return "\n".join(lines)


def _gives_lse_of_map(kernel: Any, problem: Problem) -> bool:
    """Return True if a kernel gives the log-sum-exp by which a map reads weights."""
    gives = kernel.gives_lse(problem) if hasattr(kernel, "gives_lse") else kernel.GIVES_LSE
    return gives and load("native").reads(problem) == (kernel.NAME == "native")


def _leaks(problem: Problem) -> str:
    if problem.q.device.type == "cpu":
        return "NaN, Inf and huge scores are looked for (not while compiling)"
    return "NaN and Inf in a masked key are kept out only where no query may see it"
