"""A problem as the library reads it: its sizes, strides and numbers, and the addresses of its tensors.

Masks reach the library in their normal form: a band, lengths, one set of documents. The rest of a mask, and
biases other than ALiBi, are made into tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Dense
from manyheads.kernels.native import library
from manyheads.masks import FAR, Band, Documents, Drop, Keep, Lengths, Mask, Normal
from manyheads.problem import ALL, Problem

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # numbered as in problem.h


def pack(p: Problem, out: Tensor, lse: Tensor | None) -> tuple[bytes, list[Tensor]]:
    """Return a problem's bytes, and the tensors made for it, which its addresses point into.

    out `[b, h, t, w]` and lse `[b, h, t]` are where results are written; without lse, none is.
    """
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
            first, last = _real_keys(p, normal.lengths)
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


def tensor_bytes(p: Problem) -> int:
    """Return how many bytes the tensors made from a problem's mask and bias take, at most."""
    size, pairs = 0, p.shape.t * p.shape.s
    rest = None if p.mask is None or isinstance(p.mask, Band) else _rest(p.mask.normal())
    if rest is not None and not isinstance(rest, Keep):  # or a Drop, which is one
        b, h = p.broadcast_sizes(rest)
        size += b * h * pairs
    if p.bias is not None and not isinstance(p.bias, ALiBi | Dense):
        b, h = p.broadcast_sizes(p.bias)
        size += b * h * pairs * p.dtype.itemsize
    return size


def _rest(normal: Normal) -> Mask | None:
    """Return what a normal form leaves beyond a band, lengths and one set of documents."""
    rest: Mask | None = None
    for part in (*normal.segments[1:], *normal.rest):
        rest = part if rest is None else rest & part
    return rest


def _keep(p: Problem, mask: Mask) -> Tensor:
    """Return a mask as a boolean tensor, `[b, h, t, s]` by strides."""
    n = p.shape
    if isinstance(mask, Drop):
        tensor = ~mask.tensor
    elif isinstance(mask, Keep):
        tensor = mask.tensor
    else:
        tensor = p.keep(mask, ALL, ALL)
    return tensor.expand(n.b, n.h, n.t, n.s)


def _bias(p: Problem) -> Tensor:
    """Return a bias as a tensor, `[b, h, t, s]` by strides."""
    n = p.shape
    if isinstance(p.bias, Dense):
        return p.bias.values.detach().to(p.dtype).expand(n.b, n.h, n.t, n.s)
    assert p.bias is not None
    return p.bias.add(*p.at(ALL, ALL), p.dtype).detach().expand(n.b, n.h, n.t, n.s)


def _real_keys(p: Problem, lengths: tuple[Lengths, ...]) -> tuple[Tensor, Tensor]:
    """Return the first key that isn't padding and the one after the last, `[b]` each."""
    b, s = p.shape.b, p.shape.s
    first, last = torch.zeros(b, dtype=torch.int64), torch.full((b,), s, dtype=torch.int64)
    for part in lengths:
        n = torch.as_tensor(part.n, dtype=torch.int64).expand(b)
        if part.left:
            first = torch.maximum(first, s - n)
        else:
            last = torch.minimum(last, n)
    return first, last


def _ids(p: Problem, documents: Documents) -> tuple[Tensor, Tensor]:
    """Return the ids of queries, `[b or 1, t]`, and of keys, `[b or 1, s]`."""
    first = p.offset if isinstance(p.offset, int) else p.offset[:, None]
    rows, keys = torch.arange(p.shape.t)[None], torch.arange(p.shape.s)[None]
    queries, keys = documents.at(rows + first, keys)
    return queries.contiguous(), keys.contiguous()
