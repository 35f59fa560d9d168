"""Pack a problem for the library: its sizes, strides and numbers, and the addresses of its tensors.

A mask is passed in its normal form: a band, lengths, and one set of documents. The rest of a mask, and
biases other than ALiBi, are converted to tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Dense
from manyheads.kernels.native import library
from manyheads.masks import FAR, AtPositions, Band, Documents, Drop, Keep, Lengths, Mask, Normal
from manyheads.problem import ALL, Problem

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # numbered as in problem.h


def pack(problem: Problem, out: Tensor, lse: Tensor | None) -> tuple[bytes, list[Tensor]]:
    """Return a problem's bytes, and the tensors that were made for it, to which some of its addresses point.

    out: The output to write, `[b, h, t, w]`.
    lse: The log-sum-exp to write, `[b, h, t]`, or None.
    """
    n, q, k, v = problem.shape, problem.q, problem.k, problem.v
    held: list[Tensor] = []

    def hold(tensor: Tensor) -> int:
        held.append(tensor)
        return tensor.data_ptr()

    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        held += [q, k, v]
    low, high, real, ids, slopes = -FAR, FAR, (0, 0), (0, 0, 0, 0), (0, 0)
    keep: tuple[int, ...] = (0,) * 5
    bias: tuple[int, ...] = (0,) * 5
    if problem.mask is not None and not _is_full(problem):
        normal = problem.mask.normal()
        if normal.band[0] is not None:
            low = min(normal.band[0], FAR)
        if normal.band[1] is not None:
            high = max(normal.band[1], -FAR)
        if normal.lengths:
            first, last = _real_keys(problem, normal.lengths)
            real = (hold(first.contiguous()), hold(last.contiguous()))
        if normal.segments:
            queries, keys = _ids(problem, normal.segments[0])
            strides = [x.shape[1] if x.shape[0] > 1 else 0 for x in (queries, keys)]
            ids = (hold(queries), hold(keys), strides[0], strides[1])
        rest = _rest(normal)
        if rest is not None:
            tensor = _keep(problem, rest)
            keep = (hold(tensor), *tensor.stride())
    if isinstance(problem.bias, ALiBi):
        slope = problem.bias.slopes.detach().to(problem.dtype).contiguous()
        slopes = (hold(slope), int(slope.shape[0] > 1))
    elif problem.bias is not None:
        tensor = _bias(problem)
        bias = (hold(tensor), *tensor.stride())
    if isinstance(problem.offset, int):
        offset = (problem.offset, 0)
    else:
        offset = (0, hold(problem.offset.to(torch.int64).clamp(-FAR // 4, FAR // 4).contiguous()))
    sink = 0 if problem.sink is None else hold(problem.sink.detach().to(problem.dtype).contiguous())
    data = library.PROBLEM.pack(
        *n, DTYPES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(),
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        problem.scale, problem.softcap or 0.0, sink, *offset, low, high, *real, *ids, *keep, *bias, *slopes,
        lse is not None, torch.get_num_threads(),
    )  # fmt: skip
    return data, held


def tensor_bytes(problem: Problem) -> int:
    """Return an upper bound on the bytes of the tensors that are made from a problem's mask and bias."""
    size, pairs = 0, problem.shape.t * problem.shape.s
    mask = problem.mask
    rest = None if mask is None or isinstance(mask, Band) or _is_full(problem) else _rest(mask.normal())
    if rest is not None and not isinstance(rest, Keep):  # Drop is a subclass
        b, h = problem.broadcast_sizes(rest)
        size += b * h * pairs
    if problem.bias is not None and not isinstance(problem.bias, ALiBi | Dense):
        b, h = problem.broadcast_sizes(problem.bias)
        size += b * h * pairs * problem.dtype.itemsize
    return size


def _is_full(problem: Problem) -> bool:
    """Return True if the mask is that of a cache that dropped keys, all others of which every query sees.

    This is the usual case in generation, which needs no tensor for the mask.
    """
    mask, offset = problem.mask, problem.offset
    if not isinstance(mask, AtPositions) or not isinstance(offset, int):
        return False
    return mask.is_full(range(offset, offset + problem.shape.t))


def _rest(normal: Normal) -> Mask | None:
    """Return a mask without its band, lengths and first set of documents; None if nothing remains."""
    rest: Mask | None = None
    for part in (*normal.segments[1:], *normal.rest):
        rest = part if rest is None else rest & part
    return rest


def _keep(problem: Problem, mask: Mask) -> Tensor:
    """Return a mask as a boolean tensor, expanded to `[b, h, t, s]`."""
    shape = problem.shape
    if isinstance(mask, Drop):
        tensor = ~mask.tensor
    elif isinstance(mask, Keep):
        tensor = mask.tensor
    else:
        tensor = problem.keep(mask, ALL, ALL)
    return tensor.expand(shape.b, shape.h, shape.t, shape.s)


def _bias(problem: Problem) -> Tensor:
    """Return a bias as a tensor, expanded to `[b, h, t, s]`."""
    b, h, _, t, s, _, _ = problem.shape
    if isinstance(problem.bias, Dense):
        return problem.bias.values.detach().to(problem.dtype).expand(b, h, t, s)
    assert problem.bias is not None
    return problem.bias.add(*problem.at(ALL, ALL), problem.dtype).detach().expand(b, h, t, s)


def _real_keys(problem: Problem, lengths: tuple[Lengths, ...]) -> tuple[Tensor, Tensor]:
    """Return each sequence's first key that isn't padding, and the key after the last, `[b]` each."""
    b, s = problem.shape.b, problem.shape.s
    first, last = torch.zeros(b, dtype=torch.int64), torch.full((b,), s, dtype=torch.int64)
    for part in lengths:
        n = torch.as_tensor(part.n, dtype=torch.int64).expand(b)
        if part.left:
            first = torch.maximum(first, s - n)
        else:
            last = torch.minimum(last, n)
    return first, last


def _ids(problem: Problem, documents: Documents) -> tuple[Tensor, Tensor]:
    """Return the ids of queries, `[b or 1, t]`, and of keys, `[b or 1, s]`."""
    first = problem.offset if isinstance(problem.offset, int) else problem.offset[:, None]
    rows, keys = torch.arange(problem.shape.t)[None], torch.arange(problem.shape.s)[None]
    queries, keys = documents.at(rows + first, keys)
    return queries.contiguous(), keys.contiguous()
