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

from manyheads import scores
from manyheads.biases import ALiBi, Bias, Dense
from manyheads.kernels import batched, chunked, sdpa
from manyheads.kernels.native import library, rules
from manyheads.kernels.native.look import Look
from manyheads.masks import FAR, Band, Documents, Drop, Keep, Lengths, Mask, Normal
from manyheads.scores import ALL, Problem, Rows
from manyheads.shapes import PLAIN, amount

NAME = "native"
GIVES_LSE = True
SHIELDS = True
LOOKS = True

WIDEST = 256
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
LIMIT = sdpa.LIMIT
CHUNKS = 16  # of a gradient's keys, over all heads: as many threads have something to do
WHOLE = 1 << 15  # keys, beyond which a look doesn't keep whole rows of weights: they would fill the caches


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
    if p.dropout_p and values:
        reasons.append("it has no dropout")
    if 0 in (n if values else n[:-1]):
        reasons.append("a size is 0")
    if n.d > WIDEST or (n.w > WIDEST and values):
        reasons.append(f"heads are at most {WIDEST} wide there, and these are {n.d} and {n.w}")
    size = made(p)
    if size > LIMIT:
        reasons.append(
            f"what it doesn't know of the mask and bias would have to become tensors of "
            f"{size / 2**20:,.0f} MB (at most {LIMIT // 2**20})"
        )
    return reasons


def defers(problem: Problem) -> list[str]:
    """Return why `auto` passes over this kernel; empty if it doesn't."""
    return rules.defers(problem)


def built() -> str:
    """The build that this processor runs, and whose threads; or why there is none."""
    if library.width is None:
        return f"not here: {library.missing}"
    left_out = "; ".join(f"{build} wasn't built: {why}" for build, why in library.left_out.items())
    return (
        f"{library.WIDTHS[library.width]} of {', '.join(library.runs)}{left_out and f' ({left_out})'}, on "
        f"{'the threads of PyTorch' if library.shares_threads else 'threads of its own'}"
    )


def run(problem: Problem, asked: Look | None = None) -> tuple[Tensor, Tensor | None]:
    """The output `[b, h, t, w]`, the log-sum-exp `[b, h, t]`, and what is asked of the weights, unless that
    costs less after.

    A few queries read keys as they lie, where neither a gradient nor a look would compute their scores again:
    it takes half as long, but sums them in another order than `tile`. There is no log-sum-exp then, and a
    map that is read finds its own.
    """
    if not _direct(problem):
        return torch.ops.manyheads.native(*chunked.arguments(problem))
    if problem.wants_gradient():
        p, table = problem, None if problem.bias is None else problem.bias.tensor()
        return _Differentiable.apply(problem, p.q, p.k, p.v, p.sink, table)
    again = asked is not None or _many(problem)
    if again:
        return _forward(problem, asked if problem.shape.s <= WHOLE else None)
    out = problem.q.new_empty(*problem.shape[:2], problem.shape.t, problem.shape.w)
    _attend_and_look(problem, out, None, None, known=False)
    return out, None


def gives_lse(problem: Problem) -> bool:
    """Return True if `run` gives the log-sum-exp without being asked for statistics."""
    return _many(problem) or problem.wants_gradient() or not _direct(problem)


_many = rules.many_queries


def reads(problem: Problem) -> bool:
    """Return True if maps of a problem read its scores by this kernel."""
    return problem.q.dtype != torch.float64 and not refuse(problem, values=False)


def looks(problem: Problem) -> bool:
    """Can it look at the weights of a problem, and is it the fastest to?"""
    return _direct(problem) and reads(problem)


def look(problem: Problem, lse: Tensor, asked: Look) -> None:
    """Find what is asked of the weights exp(score − lse), lse `[b, h, t]`, all of it finite or −inf."""
    p = problem.detach().without_values()
    _attend_and_look(p, p.q.new_empty(*lse.shape, 0), lse.contiguous(), asked, known=True)


def lse(problem: Problem, asked: Look | None = None) -> Tensor:
    """The log-sum-exp alone, `[b, h, t]`, and in the same pass what is asked of the weights."""
    p = problem.detach().without_values()
    if not _direct(p):
        return torch.ops.manyheads.native(*chunked.arguments(p))[1]
    found = _forward(p, asked if p.shape.s <= WHOLE else None)[1]
    if asked is not None and p.shape.s > WHOLE:
        look(p, found, asked)
    return found


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as the kernel sums them; −inf where masked."""
    compute = _logits if _direct(problem) else scores.logits  # fake tensors have no numbers to read
    return scores.tile(problem, rows, cols, batch, heads, compute)


def _logits(problem: Problem, *part: Rows) -> Tensor:
    """`scores.logits` by the library: scale · q·k with softcap, `[b, h, r, c]`."""
    q, k = (x.detach().resolve_neg() for x in scores.operands(problem, *part))
    found = q.new_empty(*q.shape[:3], k.shape[2], dtype=problem.dtype)
    if found.numel() == 0:
        return found
    tile = Problem.of(q, k, k[..., :0], scale=problem.scale, softcap=problem.softcap, offset=0)
    data, _held = _packed(tile, q[..., :0], None)
    assert library.scores is not None
    if library.scores(data, found.data_ptr(), library.width):
        raise MemoryError("Expected memory for a panel of keys, got none: free some memory.")
    return found


def _direct(p: Problem) -> bool:
    """Return True if the custom operator can be skipped: calling it takes longer than a small problem."""
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
    rest = None if p.mask is None or isinstance(p.mask, Band) else _rest(p.mask.normal())
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
    none = torch.iinfo(torch.int64).min
    queries, keys = queries.to(torch.int64), keys.to(torch.int64)
    if min(queries.min(), keys.min()) <= none + 1:  # ids that mean "none" below: count the ids instead
        ids = torch.cat((queries.flatten(), keys.flatten())).unique(return_inverse=True)[1]
        queries, keys = ids[: queries.numel()].view_as(queries), ids[queries.numel() :].view_as(keys)
    return torch.where(here, queries, none).contiguous(), torch.where(there, keys, none + 1).contiguous()


def _forward(p: Problem, look: Look | None = None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, and what a look finds beside them."""
    b, h, _, t, _, _, w = p.shape
    out = p.q.new_empty(b, h, t, w)
    lse = p.q.new_empty(b, h, t, dtype=p.dtype)
    _attend_and_look(p, out, lse, look, known=False)
    return out, lse


def _attend_and_look(p: Problem, out: Tensor, lse: Tensor | None, look: Look | None, known: bool) -> None:
    """Fill out and lse, or read a given lse; without one (None), nothing computes the scores again."""
    data, _held = _packed(p, out, lse)
    asked, _also_held = (None, None) if look is None or lse is None else look.packed(p, lse, known)
    assert library.attend is not None
    if library.attend(data, asked, library.width):
        n = p.shape
        size = amount(n.b * n.g * n.s * (n.d + n.w) * p.q.element_size())
        raise MemoryError(
            f"the kernel packs keys and values, {size} or a little more, and there is no room for them."
        )


def _backward(
    p: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Gradients of q, k, v, sink and the bias's tensor; of those not needed, None or an empty tensor."""
    n = p.shape
    bias = p.bias if needs[4] else None
    known = (
        bias is None
        or isinstance(bias, ALiBi)
        or (isinstance(bias, Dense) and bias.values.shape[-1:] == (n.s,))
    )
    found = _own_backward(p, out, lse, d_out, d_lse, bias) if known else None
    if found is not None:
        return found
    nothing = torch.zeros_like(lse) if d_lse is None else d_lse
    # Its scores are summed in another order, to which this log-sum-exp doesn't belong.
    with torch.no_grad(), scores.exactly(p.q.device):
        out, lse = chunked._forward(p, None)
        return chunked._backward(p, out, lse, d_out, nothing, None, list(needs))


def _own_backward(
    p: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, bias: Bias | None
) -> list[Tensor | None] | None:
    """The same by the library, with the gradient of a bias, if any; None where some number isn't finite."""
    n = p.shape
    dq = p.q.new_empty(n.b, n.h, n.t, n.d)  # which is faster than of a shape
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
    if d_out.is_neg():
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
    d_sink = None if p.sink is None else chunked.sink_gradient(p, lse, delta)
    own = None
    if table is not None and bias is not None:
        own = table.to(bias.tensor().dtype).reshape(bias.tensor().shape)
    elif slopes is not None and bias is not None:
        own = slopes.sum((0, 2)).sum_to_size(bias.tensor().shape)
    return [dq, dk, dv, d_sink, own]


def _packed(p: Problem, out: Tensor, lse: Tensor | None) -> tuple[bytes, list[Tensor]]:
    """A problem as the library reads it, and the tensors that its addresses point into."""
    n, q, k, v = p.shape, p.q, p.k, p.v
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
        if normal.band[0] is not None:
            low = min(normal.band[0], FAR)
        if normal.band[1] is not None:
            high = max(normal.band[1], -FAR)
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
        offset = (p.offset, 0)
    else:
        offset = (0, at(p.offset.to(torch.int64).clamp(-FAR // 4, FAR // 4).contiguous()))
    sink = 0 if p.sink is None else at(p.sink.detach().to(p.dtype).contiguous())
    data = library.PROBLEM.pack(
        *n, DTYPES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(),
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        p.scale, p.softcap or 0.0, sink, *offset, low, high, *real, *ids, *keep, *bias, *slopes,
        lse is not None, torch.get_num_threads(),
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
    grads = _backward(chunked.problem_of(*arguments), out, lse, d_out, d_lse, needs)
    return [out.new_empty(0) if grad is None else grad for grad in grads]


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
torch.library.register_autograd("manyheads::native_backward", batched.refuse_twice, lib=_library)


class _Differentiable(torch.autograd.Function):
    """The same without an operator, whose call takes longer than a small problem.

    The problem is kept for the gradient, and its tensors are saved tensors: PyTorch then raises where one was
    changed in place, and hooks on saved tensors (activation checkpointing) apply to all of them.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _forward(problem)
        saved = [out, lse]

        def save(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return _SAVED

        ctx.set_materialize_grads(False)
        ctx.problem = problem.map(save)
        ctx.save_for_backward(*saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        problem = ctx.problem.map(lambda _: next(tensors))
        d_out = torch.zeros_like(out) if d_out is None else d_out
        _, *needs = ctx.needs_input_grad

        def gradients(d_out: Tensor, d_lse: Tensor | None, *_: Tensor) -> list[Any]:
            grads = _backward(problem, out, lse, d_out, d_lse, needs)
            return [grad for grad, need in zip(grads, needs, strict=True) if need]

        def gradients_in_graph(d_out: Tensor, d_lse: Tensor | None) -> Sequence[Tensor]:
            return batched.Once.apply(gradients, d_out, d_lse, out, lse, *saved)

        # With create_graph=True a gradient of this gradient may be asked for, which `Once` refuses.
        backward = gradients_in_graph if torch.is_grad_enabled() else gradients
        grads = iter(batched.one_by_one(backward, d_out, d_lse))
        return (None, *(next(grads) if need else None for need in needs))


_SAVED = torch.empty(0)  # stands for each tensor of a problem whose tensors are saved beside it
