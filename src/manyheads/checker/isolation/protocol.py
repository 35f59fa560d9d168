"""Messages between the checker and a candidate's process: data, never pickles.

A message is the length of the header (8 bytes, big-endian), the header (JSON: a tree, and the dtype, shape
and strides of its tensors), and the bytes of each tensor. `manyheads.trees` says what a tree
is; its records are the dataclasses in `RECORDS`.

The candidate may send anything. So `read` checks the sizes in the header against a limit before it allocates
memory, allocates only as bytes arrive, and checks the fields of each record against its class. An invalid
message raises ProcessEnded of kind "protocol".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from manyheads.checker.isolation.candidate import Answer, Call, Change
from manyheads.checker.isolation.describe import Argument, Description
from manyheads.checker.isolation.errors import ProcessEnded
from manyheads.checker.isolation.trees import Foreign, to_bytes, with_strides
from manyheads.trees import DTYPES, NAMES, expect, pack, unpack

HEADER = 16 * 2**20  # largest header, in bytes
RECORDS = {record.__name__: record for record in (Call, Answer, Change, Description, Argument, Foreign)}


def reject(problem: str) -> NoReturn:
    """Raise the error for an invalid message; `problem` completes "got …"."""
    raise ProcessEnded("protocol", f"Expected a message that can be read from the process, got {problem}.")


# -- writing ---------------------------------------------------------------------------------------


def write(put: Callable[[memoryview], None], value: Any) -> None:
    """Send a tree by calling `put` with parts of the message; raise TypeError for unsupported objects."""
    tensors: dict[int, Tensor] = {}  # by id: a tensor that occurs twice in the tree is sent once

    def add(tensor: Tensor) -> int:
        """Return the index of a tensor in the message."""
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise TypeError(f"Expected a strided tensor for a message, got {tensor.dtype}, {tensor.layout}.")
        tensors[id(tensor)] = tensor
        return list(tensors).index(id(tensor))

    tree = pack(value, add, RECORDS)
    described = [
        {"dtype": NAMES[x.dtype], "shape": list(x.shape), "stride": None if x.is_contiguous() else x.stride()}
        for x in tensors.values()
    ]
    header = json.dumps({"tree": tree, "tensors": described}, allow_nan=False).encode()
    put(memoryview(len(header).to_bytes(8, "big") + header))
    for tensor in tensors.values():
        put(to_bytes(tensor).numpy().data)


# -- reading ---------------------------------------------------------------------------------------


def read(take: Callable[[int], bytearray], limit: int) -> Any:
    """Return the next message. `take(n)` reads n bytes; `limit` is the most bytes that tensors may need."""
    try:
        return _read(take, limit)
    except ValueError as error:
        reject(str(error))


def _read(take: Callable[[int], bytearray], limit: int) -> Any:
    length = int.from_bytes(take(8), "big")
    if length > HEADER:
        raise ValueError(f"a header of {length} bytes (the limit is {HEADER})")
    try:
        header = json.loads(take(length).decode(), parse_constant=reject)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a header that isn't JSON ({type(error).__name__})") from None
    if not isinstance(header, dict) or set(header) != {"tree", "tensors"}:
        raise ValueError("a header without a tree and tensors")
    plans = [Plan.of(described) for described in expect(list, header["tensors"])]
    needed = sum(plan.size + plan.span for plan in plans)
    if needed > limit:
        raise ValueError(f"a message of {needed} bytes (the limit is {limit})")
    tensors = [plan.read(take(plan.size)) for plan in plans]
    return unpack(header["tree"], tensors, RECORDS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tensor to be read: `size` bytes of values in the message, `span` bytes in its strided layout."""

    dtype: torch.dtype
    shape: list[int]
    stride: list[int] | None
    size: int
    span: int

    @classmethod
    def of(cls, described: Any) -> Plan:
        """Check the entry of a tensor in the header, and return its plan."""
        if (
            set(expect(dict, described)) != {"dtype", "shape", "stride"}
            or described["dtype"] not in NAMES.values()
        ):
            raise ValueError(f"a tensor described as {str(described)[:80]}")
        dtype, shape, stride = (
            DTYPES[described["dtype"]],
            expect(list, described["shape"]),
            described["stride"],
        )
        for numbers in (shape, shape if stride is None else expect(list, stride)):
            if (
                len(numbers) != len(shape)
                or len(shape) > 64
                or any(not 0 <= expect(int, n) < 2**40 for n in numbers)
            ):
                raise ValueError(f"a tensor of shape {str(shape)[:80]} and strides {str(stride)[:80]}")
        if math.prod(max(n, 1) for n in shape) >= 2**60:  # too large for torch, even if a size is 0
            raise ValueError(f"a tensor of shape {str(shape)[:80]}")
        size = math.prod(shape) * dtype.itemsize
        span = 0
        if stride is not None and size:
            span = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
        return cls(dtype, shape, stride, size, span)

    def read(self, data: bytearray) -> Tensor:
        """Return the tensor whose values these bytes are."""
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        is_bool = self.dtype == torch.bool  # read as bytes, of which only 0 and 1 are valid bools
        values = torch.frombuffer(data, dtype=torch.uint8 if is_bool else self.dtype)
        values = (values != 0 if is_bool else values).reshape(self.shape)
        return values if self.stride is None else with_strides(values, tuple(self.stride))
