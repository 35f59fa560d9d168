"""The kernels: their order, the choice of a kernel for a problem, and the table that explains the choice.

All other modules call kernels through this one: `run`, `statistics`, `tile`. A kernel is a module with

    NAME             the value of `kernel=` that selects it
    GIVES_LSE        True if it returns the log-sum-exp of the scores that a map computes (see `reader`)
    SHIELDS          True if NaN and Inf in masked keys and values can't change any output or gradient
    why_unsupported  function of a problem: the reasons why it isn't supported; empty if it is
    run              function of a problem: the output `[b, h, t, w]`, and the log-sum-exp `[b, h, t]` or None

and optionally

    why_slower       function of a problem: the reasons why another kernel is faster, if one is
    built            function: which compiled build runs on this machine, or why none does
    FUSES            True if `run(problem, spec)` also returns fused statistics
    plan             function of a problem: a function of q, k, v and mask for every problem of its
                     layout, or None (see `plans`)

`native` and `chunked`, which compute the scores of attention maps (see `reader`), also have

    statistics       function of a problem, a spec and the log-sum-exp, which it returns with fused statistics
    tile             function of a problem and a tile: its scores, summed in the order of the log-sum-exp

`kernel="auto"` uses the first kernel in order that supports the problem and has no reason to be slower. If a
kernel is given by name and doesn't support the problem, an error lists all reasons; no other kernel is used.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.problem import ALL, Problem, Rows
from manyheads.scores import disable_autocast, finite
from manyheads.shapes import can_read

ORDER = ("native", "sdpa", "flex", "chunked", "reference")


def check(name: str) -> str:
    """Return a kernel's name or "auto"; raise ValueError for other values."""
    if name != "auto" and name not in ORDER:
        raise ValueError(f'Expected kernel to be "auto" or one of {", ".join(ORDER)}, got {name!r}.')
    return name


def load(name: str) -> Any:
    """Return the kernel of this name."""
    # A kernel is imported when it is first used, by statements that torch.compile can trace.
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
    """Return the reasons why each kernel doesn't support a problem, by the kernels' names, in order."""
    return {name: load(name).why_unsupported(problem) for name in ORDER}


def choose(problem: Problem, kernel: str = "auto") -> Any:
    """Return the kernel for a problem; raise ValueError if a kernel given by name doesn't support it."""
    if kernel != "auto":
        chosen = load(kernel)
        reasons = chosen.why_unsupported(problem)
        if reasons:
            raise ValueError(
                f'kernel="{kernel}" doesn\'t support this: {"; ".join(reasons)}. '
                'Use kernel="auto", or a kernel that explain(...) lists as supported.'
            )
        return chosen
    for name in ORDER:
        chosen = load(name)
        if not chosen.why_unsupported(problem) and not why_slower(chosen, problem):
            return chosen
    raise AssertionError("the reference kernel supports every problem")


def why_slower(kernel: Any, problem: Problem) -> list[str]:
    """Return why `auto` doesn't use a kernel that supports the problem."""
    return kernel.why_slower(problem) if hasattr(kernel, "why_slower") else []


def reader(problem: Problem) -> Any:
    """Return the kernel that computes the scores of a map of this problem.

    A weight is exp(score − lse). Scores of 10^6 have rounding errors of 0.1, which cancel only if the score
    and the log-sum-exp have the same ones. So both are summed in the same order: by `native` if it supports
    the problem, else by `chunked`.
    """
    exported = _exported(problem)
    if exported is not None:
        return exported
    native = load("native")
    return native if native.reads(problem) else load("chunked")


def _exported(problem: Problem) -> Any:
    """Return the module that computes a problem while a model is exported to ONNX, else None."""
    if not torch.compiler.is_compiling():
        if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
            raise ValueError(
                "Expected torch.onnx.export(dynamo=True), got dynamo=False, which traces by torch.jit. Use "
                "dynamo=True, or manyheads.onnx.export."
            )
        return None
    if not torch.compiler.is_exporting():
        return None
    from manyheads.kernels import exported

    return exported if exported.is_active(problem) else None


class Result(NamedTuple):
    """The name of a kernel, and what it computed."""

    kernel: str
    out: Tensor  # [b, h, t, w]
    lse: Tensor | None  # [b, h, t]
    fused: FusedStatistics | None = None

    def lse_of_map(self, problem: Problem) -> Tensor | None:
        """Return the log-sum-exp if the kernel that a map uses computed it (see `reader`), else None."""
        return self.lse if self.kernel == reader(problem).NAME else None


class Statistics(NamedTuple):
    """The log-sum-exp and the fused statistics of a problem."""

    lse: Tensor  # [b, h, t]
    fused: FusedStatistics  # empty if none were computed


def statistics(problem: Problem, spec: Spec | None = None, lse: Tensor | None = None) -> Statistics:
    """Return the log-sum-exp `[b, h, t]` that maps need, and fused statistics of the weights.

    Args:
        problem: The problem; v isn't used.
        spec: Which fused statistics to compute in the same pass; only if `fuses` returns True.
        lse: The log-sum-exp if it is known already; each entry is finite or −inf.

    Returns:
        The log-sum-exp, and the fused statistics by name (see `FusedStatistics`), empty without a spec.
    """
    return Statistics(*reader(problem).statistics(problem, spec, lse))


def fuses(problem: Problem, in_place: bool = False) -> bool:
    """Return True if a kernel computes fused statistics of a problem, which is faster than tiles.

    If in_place is True, return True only if it needs no dense tensor of the mask and the bias.
    """
    return bool(load("native").fuses(problem, in_place))


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as the log-sum-exp sums them; −inf where masked."""
    return reader(problem).tile(problem, rows, cols, batch, heads)


def blocks(problem: Problem, first: int = 0) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows with their blocks of visible columns, starting with the one that has row `first`.

    `chunked` sums the log-sum-exp in the same blocks, so that scores have the same bits.
    """
    return load("chunked").blocks(problem, first)


def run(problem: Problem, kernel: str = "auto", spec: Spec | None = None) -> Result:
    """Compute the output `[b, h, t, w]` and, if the kernel gives it, the log-sum-exp `[b, h, t]`.

    While a model is exported to ONNX, no kernel is used (see `exported`).

    A kernel with FUSES also computes the fused statistics of `spec`, unless computing them later is faster.

    In eager mode on the CPU, kernels without SHIELDS are checked. If q, k, v or the output isn't finite,
    "auto" uses `chunked`, and a kernel given by name raises ValueError if there is a mask or a bias. If a
    gradient is wanted and scores may be larger than `LARGE`, "auto" uses a kernel whose backward pass sums
    scores in the same order as its forward pass.

    Checking the output alone isn't enough: PyTorch's CPU kernel may skip a masked NaN in the forward pass but
    use it in the backward pass, and returns zeros for NaN among a few keys. Checking the inputs alone isn't
    enough either: masked numbers may be so large that their products overflow.
    """
    exported = _exported(problem)
    if exported is not None:
        check(kernel)
        return Result(exported.NAME, *exported.run(problem))
    return compute(problem, choose(problem, kernel), kernel, spec)


def compute(problem: Problem, chosen: Any, kernel: str, spec: Spec | None = None) -> Result:
    """Compute a problem as `run` does. `chosen` is the kernel, `kernel` the name that it was chosen by."""
    is_checked = not chosen.SHIELDS and problem.q.device.type == "cpu" and can_read(problem.q)
    with disable_autocast(problem.q.device):
        if spec is not None and hasattr(chosen, "FUSES"):
            return Result(chosen.NAME, *chosen.run(problem, spec))
        if not is_checked:
            return Result(chosen.NAME, *chosen.run(problem))
        if kernel == "auto" and _may_be_large(problem):
            native = load("native")
            chosen = load("chunked") if native.why_unsupported(problem) else native
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
            f'Expected finite numbers for kernel="{kernel}", in which masked NaN can affect the output, got '
            'NaN or Inf. Use kernel="auto" or "chunked", or fix the input.'
        )


# For larger scores, the rounding errors of PyTorch's gradient exceed the precision of the dtype.
LARGE = {torch.float32: 2.0**10, torch.bfloat16: 2.0**14, torch.float16: 2.0**14, torch.float64: 2.0**38}


def _may_be_large(problem: Problem) -> bool:
    """Return True if a gradient is wanted and |scale|·d·max|q|·max|k|, a bound of scores, exceeds `LARGE`."""
    if not problem.wants_gradient():
        return False
    q, k = (_largest(x.detach()) for x in (problem.q, problem.k))
    return not abs(problem.scale) * problem.shape.d * q * k <= LARGE[problem.q.dtype]


def _largest(x: Tensor) -> float:
    """Return the largest magnitude, or NaN if an entry is NaN."""
    low, high = x.aminmax()  # 4 to 30 times as fast as a norm of order inf
    return max(-float(low), float(high))


def processor() -> str:
    """Return the processor's name, or its architecture if the system doesn't report the name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """Return a text that lists the devices of this machine, and each kernel with its description."""
    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"]
    devices += [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    lines = [f"torch {torch.__version__} on {', '.join(devices)}"]
    lines.append('kernel="auto" uses the first that supports a problem:')
    for name in ORDER:
        kernel = load(name)
        what = (kernel.__doc__ or "").partition("\n")[0]
        lines.append(f"  {name:<10} {what}")
        if hasattr(kernel, "built"):
            lines.append(f"  {'':<10} {kernel.built()}")
    return "\n".join(lines)


def table(problem: Problem) -> str:
    """Return the choice as text: for each kernel "no" and the reasons, or "yes" and the cost of a map."""
    chosen = choose(problem).NAME
    b, h, g, t, s, d, w = problem.shape
    lines = [f"q [{b}, {h}, {t}, {d}]  k [{b}, {g}, {s}, {d}]  v width {w}  {problem.q.dtype}"]
    for name, reasons in verdicts(problem).items():
        kernel = load(name)
        if reasons:
            lines.append(f"  {name:<10} no: " + f"\n{'':<16}".join(reasons))
            continue
        free = _gives_lse_of_map(kernel, problem)
        cost = "a map is free" if free else "a map costs one more pass over the keys"
        shield = "" if kernel.SHIELDS else f"; {_describe_shield(problem)}"
        slower = why_slower(kernel, problem)
        mark = "  ← auto" if name == chosen else f"; not auto: {'; '.join(slower)}" if slower else ""
        lines.append(f"  {name:<10} yes: {cost}{shield}{mark}")
    return "\n".join(lines)


def _gives_lse_of_map(kernel: Any, problem: Problem) -> bool:
    """Return True if a kernel returns the log-sum-exp that a map needs."""
    gives = kernel.gives_lse(problem) if hasattr(kernel, "gives_lse") else kernel.GIVES_LSE
    return gives and kernel.NAME == reader(problem).NAME


def _describe_shield(problem: Problem) -> str:
    """Describe the protection against masked NaN and Inf for a kernel without SHIELDS."""
    if problem.q.device.type == "cpu":
        return "NaN, Inf and huge scores are detected (not while compiling)"
    return "NaN and Inf in a key can affect the output, unless the key is masked for all queries"
