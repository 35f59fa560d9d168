"""Our own kernel for the CPU, in C++: output, log-sum-exp and gradients.

Blocks of queries and keys in registers and near caches, with an online softmax (Dao et al. 2022,
arXiv:2205.14135), built for several vector widths of which the processor's best is taken (`library`).
Masks reach it in their normal form; of the rest it takes a boolean tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Bias, Dense
from manyheads.kernels import chunked, sdpa
from manyheads.kernels.native import library
from manyheads.kernels.native.look import Look
from manyheads.masks import FAR, Documents, Drop, Keep, Lengths, Mask, Normal
from manyheads.scores import ALL, Problem
from manyheads.shapes import amount

NAME = "native"
GIVES_LSE = True
SHIELDS = True
LOOKS = True

WIDEST = 256
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
LIMIT = sdpa.LIMIT
CHUNKS = 16  # of a gradient's keys, over all heads: as many threads have something to do
WHOLE = 1 << 15  # keys, beyond which a look doesn't keep whole rows of weights: they would fill the caches
FEW = 1 << 16  # scores, below which a gradient's call costs more than what it computes
PLAIN = (Tensor, torch.nn.Parameter)  # types of tensors whose operators are PyTorch's own


def refuse(problem: Problem, values: bool = True) -> list[str]:
    """Why the kernel can't compute this; empty if it can. Without values it only looks."""
    p, n = problem, problem.shape
    if not p.q.is_cpu:
        return [f"it is for the CPU, and this is on {p.q.device}"]
    reasons = []
    if library.missing is not None:
        reasons.append(library.missing)
    reasons += chunked.refuse(p)
    if p.q.dtype not in DTYPES:
        reasons.append(f"it computes {', '.join(map(str, DTYPES))}, and this is {p.q.dtype}")
    if p.dropout_p:
        reasons.append("it has no dropout")
    if 0 in (n if values else n[:-1]):
        reasons.append("a size is 0")
    if n.d > WIDEST or n.w > WIDEST:
        reasons.append(f"heads are at most {WIDEST} wide there, and these are {n.d} and {n.w}")
    size = made(p)
    if size > LIMIT:
        reasons.append(
            f"what it doesn't know of the mask and bias would have to become tensors of "
            f"{size / 2**20:,.0f} MB (at most {LIMIT // 2**20})"
        )
    return reasons


def defers(problem: Problem) -> list[str]:
    """Why `auto` goes on, though this kernel could; empty if it doesn't."""
    if problem.q.dtype == torch.float64:
        return ["in float64 it is there to be compared with, and slower than PyTorch's products"]
    n = problem.shape
    few = problem.q.dtype == torch.float32 and n.b * n.h * n.t * n.s < FEW
    if few and _wants_gradient(problem) and not sdpa.refuse(problem):
        return ["of so few scores a gradient is sooner computed by PyTorch than asked for here"]
    return []


def built() -> str:
    """The build that this processor runs, and whose threads; or why there is none."""
    if library.width is None:
        return f"not here: {library.missing}"
    left_out = "; ".join(f"{build} wasn't built: {why}" for build, why in library.left_out.items())
    return (
        f"{library.WIDTHS[library.width]} of {', '.join(library.runs)}{left_out and f' ({left_out})'}, on "
        f"{'the threads of PyTorch' if library.shares_threads else 'threads of its own'}"
    )


def run(problem: Problem, asked: Look | None = None) -> tuple[Tensor, Tensor]:
    """The output `[b, h, t, w]`, the log-sum-exp `[b, h, t]`, and what is asked of the weights, unless that
    costs less after."""
    if not _direct(problem):
        out, lse = torch.ops.manyheads.native(*chunked.arguments(problem))
    elif _wants_gradient(problem):
        table = None if problem.bias is None else problem.bias.tensor()
        out, lse = _Differentiable.apply(table, *chunked.arguments(problem))
    else:
        out, lse = _forward(problem, asked if problem.shape.s <= WHOLE else None)
    return out, lse


def looks(problem: Problem) -> bool:
    """Can it look at the weights of a problem, and is it the fastest to?"""
    return _direct(problem) and problem.q.dtype != torch.float64 and not refuse(problem, values=False)


def look(problem: Problem, lse: Tensor, asked: Look) -> None:
    """Find what is asked of the weights exp(score − lse), lse `[b, h, t]`, all of it finite or −inf."""
    p = problem.detach().without_values()
    _attend_and_look(p, p.q.new_empty(*lse.shape, 0), lse.contiguous(), asked, known=True)


def lse(problem: Problem, asked: Look | None = None) -> Tensor:
    """The log-sum-exp alone, `[b, h, t]`, and in the same pass what is asked of the weights."""
    p = problem.detach().without_values()
    if asked is None or p.shape.s <= WHOLE:
        return _forward(p, asked)[1]
    found = _forward(p)[1]
    look(p, found, asked)
    return found


def _wants_gradient(p: Problem) -> bool:
    if not torch.is_grad_enabled():
        return False
    if p.q.requires_grad or p.k.requires_grad or p.v.requires_grad:
        return True
    return (p.sink is not None and p.sink.requires_grad) or (
        p.bias is not None and p.bias.tensor().requires_grad
    )


def _direct(p: Problem) -> bool:
    """Is there nobody who would have to see an operator? Calling one takes longer than a small problem."""
    return not (
        torch.compiler.is_compiling()
        or not (type(p.q) in PLAIN and type(p.k) in PLAIN and type(p.v) in PLAIN)
        or torch._C._len_torch_dispatch_stack()
    )


# -- a problem in the kernel's terms ---------------------------------------------------------------


def _rest(normal: Normal) -> Mask | None:
    """What a normal form leaves beyond a band, lengths and one set of documents."""
    rest: Mask | None = None
    for part in (*normal.segments[1:], *normal.rest):
        rest = part if rest is None else rest & part
    return rest


def made(p: Problem) -> int:
    """Bytes of the tensors that would have to be made of a problem's rules, at most."""
    size, pairs = 0, p.shape.t * p.shape.s
    rest = None if p.mask is None else _rest(p.mask.normal())
    if rest is not None and not isinstance(rest, Keep):  # or a Drop, which is one
        b, h = p.apart(rest)
        size += b * h * pairs
    if p.bias is not None and not isinstance(p.bias, ALiBi | Dense):
        b, h = p.apart(p.bias)
        size += b * h * pairs * p.dtype.itemsize
    return size


def _keep(p: Problem, mask: Mask) -> Tensor:
    """A mask as a boolean tensor, `[b, h, t, s]` by strides."""
    n = p.shape
    if isinstance(mask, Drop):
        tensor = ~mask.tensor
    elif isinstance(mask, Keep):
        tensor = mask.tensor
    else:
        tensor = p.keep(mask, ALL, ALL)
    return tensor.expand(n.b, n.h, n.t, n.s)


def _bias(p: Problem) -> Tensor:
    """A bias as a tensor, `[b, h, t, s]` by strides."""
    n = p.shape
    if isinstance(p.bias, Dense):
        return p.bias.values.detach().to(p.dtype).expand(n.b, n.h, n.t, n.s)
    assert p.bias is not None
    return p.bias.add(*p.at(ALL, ALL), p.dtype).detach().expand(n.b, n.h, n.t, n.s)


def _real(p: Problem, lengths: tuple[Lengths, ...]) -> tuple[Tensor, Tensor]:
    """The first key that is real and the one after the last, `[b]` each."""
    b, s = p.shape.b, p.shape.s
    first, last = torch.zeros(b, dtype=torch.int64), torch.full((b,), s, dtype=torch.int64)
    for one in lengths:
        n = torch.as_tensor(one.n, dtype=torch.int64).expand(b)
        if one.left:
            first = torch.maximum(first, s - n)
        else:
            last = torch.minimum(last, n)
    return first, last


def _ids(p: Problem, documents: Documents) -> tuple[Tensor, Tensor]:
    """The ids of queries and keys, `[b or 1, t]` and `[b or 1, s]`; where there is none, one of no other."""
    b = torch.arange(p.shape.b)[:, None]
    rows = torch.arange(p.shape.t)[None]
    first = p.offset if isinstance(p.offset, int) else p.offset[:, None]
    (queries, here), (keys, there) = (
        documents.query(b, rows + first),
        documents.key(b, torch.arange(p.shape.s)[None]),
    )
    nobody = torch.iinfo(torch.int64).min
    queries, keys = queries.to(torch.int64), keys.to(torch.int64)
    return torch.where(here, queries, nobody).contiguous(), torch.where(there, keys, nobody + 1).contiguous()


def _forward(p: Problem, look: Look | None = None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, and what a look finds beside them."""
    n = p.shape
    out = p.q.new_empty(n.b, n.h, n.t, n.w)
    lse = p.q.new_empty(n.b, n.h, n.t, dtype=p.dtype)
    _attend_and_look(p, out, lse, look, known=False)
    return out, lse


def _attend_and_look(p: Problem, out: Tensor, lse: Tensor, look: Look | None, known: bool) -> None:
    n = p.shape
    data, _held = _packed(p, out, lse)
    asked, _also_held = (None, None) if look is None else look.packed(p, lse, known)
    assert library.attend is not None
    if library.attend(data, asked, library.width):
        size = amount(n.b * n.g * n.s * (n.d + n.w) * p.q.element_size())
        raise MemoryError(
            f"the kernel packs keys and values, {size} or a little more, and there is no room for them."
        )


def _backward(
    p: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of q, k, v, sink and the bias's tensor; those not needed are empty tensors."""
    n = p.shape
    bias = p.bias if needs[4] else None
    known = (
        bias is None
        or isinstance(bias, ALiBi)
        or (isinstance(bias, Dense) and bias.values.shape[-1:] == (n.s,))
    )
    found = _own_backward(p, out, lse, d_out, d_lse, bias) if known else None
    if found is None:
        nothing = torch.zeros_like(lse) if d_lse is None else d_lse
        found = chunked._backward(p, out, lse, d_out, nothing, None, list(needs))
    return found


def _own_backward(
    p: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, bias: Bias | None
) -> list[Tensor] | None:
    """The same by the library, with the gradient of a bias, if any; None where some number isn't finite."""
    n = p.shape
    dq = p.q.new_empty(n.b, n.h, n.t, n.d)
    dk = p.q.new_empty(n.b, n.g, n.s, n.d)
    dv = p.q.new_empty(n.b, n.g, n.s, n.w)
    delta = torch.empty_like(lse)
    d_bias: tuple[int, ...] = (0,) * 5
    table, slopes, shared = None, None, False
    chunks = max(CHUNKS // (n.b * n.g), 1)
    if isinstance(bias, Dense):
        table = bias.values.new_zeros(bias.values.shape, dtype=p.dtype)
        view = table.expand(n.b, n.h, n.t, n.s)
        shared = (view.stride(0) == 0 and n.b > 1) or (view.stride(1) == 0 and n.h > 1)
        d_bias = (table.data_ptr(), *view.stride())
        chunks = CHUNKS if shared else chunks
    elif isinstance(bias, ALiBi):
        slopes = p.q.new_zeros(n.b, n.h, chunks, dtype=p.dtype)
    if d_lse is not None:
        d_lse = d_lse.to(p.dtype).contiguous()
    d_out = d_out.resolve_neg()
    data, _held = _packed(p, out, lse)
    assert library.differentiate is not None
    failed = library.differentiate(
        data,
        library.GRADIENT.pack(
            d_out.data_ptr(), *d_out.stride(), 0 if d_lse is None else d_lse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), delta.data_ptr(),
            *d_bias, 0 if slopes is None else slopes.data_ptr(), shared, chunks,
        ),
        library.width,
    )  # fmt: skip
    if failed == 2:
        return None
    if failed:
        raise MemoryError(
            "the kernel's gradient packs queries and sums, several times their size, and there is no room."
        )
    d_sink = chunked.sink_gradient(p, lse, delta)
    own = p.q.new_empty(0)
    if table is not None and bias is not None:
        own = table.to(bias.tensor().dtype).reshape(bias.tensor().shape)
    elif slopes is not None and bias is not None:
        own = slopes.sum((0, 2)).sum_to_size(bias.tensor().shape)
    return [dq, dk, dv, d_sink, own]


def _packed(p: Problem, out: Tensor, lse: Tensor) -> tuple[bytes, list[Tensor]]:
    """A problem as the library reads it, and the tensors that its addresses point into."""
    n = p.shape
    q, k, v = p.q, p.k, p.v
    held: list[Tensor] = []

    def at(tensor: Tensor) -> int:
        held.append(tensor)
        return tensor.data_ptr()

    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        held += [q, k, v]
    low, high, real, ids, slopes = -FAR, FAR, (0, 0), (0, 0, 0, 0), (0, 0)
    keep: tuple[int, ...] = (0,) * 5
    bias: tuple[int, ...] = (0,) * 5
    if p.mask is not None:
        normal = p.mask.normal()
        low, high = (
            far if side is None else min(max(side, -FAR), FAR)
            for side, far in zip(normal.band, (low, high), strict=True)
        )
        if normal.lengths:
            first, last = _real(p, normal.lengths)
            real = (at(first.contiguous()), at(last.contiguous()))
        if normal.segments:
            queries, keys = _ids(p, normal.segments[0])
            ids = (at(queries), at(keys), n.t if queries.shape[0] > 1 else 0, n.s if keys.shape[0] > 1 else 0)
        rest = _rest(normal)
        if rest is not None:
            tensor = _keep(p, rest)
            keep = (at(tensor), *tensor.stride())
    if isinstance(p.bias, ALiBi):
        slope = p.bias.slopes.detach().to(p.dtype).contiguous()
        slopes = (at(slope), int(slope.shape[0] > 1))
    elif p.bias is not None:
        tensor = _bias(p)
        bias = (at(tensor), *tensor.stride())
    if isinstance(p.offset, int):
        offset = (min(max(p.offset, -FAR // 4), FAR // 4), 0)  # no sum with a band's end is beyond FAR
    else:
        offset = (0, at(p.offset.to(torch.int64).clamp(-FAR // 4, FAR // 4).contiguous()))
    sink = 0 if p.sink is None else at(p.sink.detach().to(p.dtype).contiguous())
    data = library.PROBLEM.pack(
        *n, DTYPES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(),
        *q.stride(), *k.stride(), *v.stride(), *out.stride(), out.data_ptr(), lse.data_ptr(),
        p.scale, p.softcap or 0.0, sink, *offset, low, high, *real, *ids, *keep, *bias, *slopes,
        torch.get_num_threads(),
    )  # fmt: skip
    return data, held


# -- the operator ----------------------------------------------------------------------------------

_library = torch.library.Library("manyheads", "FRAGMENT")
_library.define(f"native({chunked.ARGUMENTS}) -> (Tensor out, Tensor lse)")
_library.define(f"native_backward({chunked.GIVEN}) -> Tensor[]")


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _forward(chunked.problem_of(*arguments))


def _attend_backward(
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: list[bool], *arguments: Any
) -> list[Tensor]:
    return _backward(chunked.problem_of(*arguments), out, lse, d_out, d_lse, needs)


_library.impl("native", _attend, "CPU")
_library.impl("native_backward", _attend_backward, "CPU")
torch.library.register_fake("manyheads::native", chunked.shaped, lib=_library)
torch.library.register_fake("manyheads::native_backward", chunked.gradients_shaped, lib=_library)
torch.library.register_autograd(
    "manyheads::native",
    chunked.differentiated_by(lambda *given: torch.ops.manyheads.native_backward(*given)),
    setup_context=chunked.remember,
    lib=_library,
)
torch.library.register_autograd("manyheads::native_backward", chunked.refuse_twice, lib=_library)


class _Differentiable(torch.autograd.Function):
    """The same where nobody has to see an operator: calling one takes longer than a small problem.

    Its arguments are an operator's, with the bias's tensor before the lists, in which a gradient isn't seen.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _attend(*arguments)
        ctx.set_materialize_grads(False)
        chunked.remember(ctx, arguments, (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *arguments = chunked.remembered(ctx)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        needs = [*ctx.needs_input_grad[1:5], ctx.needs_input_grad[0]]
        given = (out, lse, d_out, d_lse, needs, *arguments)
        grads = (_Once.apply if torch.is_grad_enabled() else _attend_backward)(*given)
        dq, dk, dv, d_sink, table = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return (table, dq, dk, dv, d_sink, *[None] * (4 + len(ctx.numbers)))


class _Once(torch.autograd.Function):
    """The gradient, where a graph of it is asked for: it has none."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        return tuple(_attend_backward(*given))

    backward = staticmethod(chunked.refuse_twice)
