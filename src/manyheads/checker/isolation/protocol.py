"""Messages between the checker and a candidate's process: data, never pickles.

A message is the length of the header (8 bytes, big-endian), the header (JSON: a tree, and the dtype, shape
and strides of its tensors), and the bytes of each tensor. `manyheads.trees` defines trees; their records are
the dataclasses in `RECORDS`.

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

from manyheads.checker.isolation.candidate import Answer, Call, Change, Kept
from manyheads.checker.isolation.describe import Argument, Configuration, Description
from manyheads.checker.isolation.errors import ProcessEnded
from manyheads.checker.isolation.trees import Foreign, to_bytes, with_strides
from manyheads.trees import DTYPES, NAMES, expect, pack, unpack

HEADER = 16 * 2**20  # largest header, in bytes
CHUNK = 2**20  # most bytes to write or read at once
RECORDS = {
    record.__name__: record
    for record in (Call, Kept, Answer, Change, Description, Argument, Configuration, Foreign)
}


def reject(problem: str) -> NoReturn:
    """Raise the error for an invalid message; `problem` completes "got …"."""
    raise ProcessEnded("protocol", f"Expected a message that can be read from the process, got {problem}.")


# -- writing ---------------------------------------------------------------------------------------


def write(send: Callable[[memoryview], int], value: Any) -> None:
    """Send a tree.

    Args:
        send: Sends some of the bytes that it is called with, and returns how many.
        value: The tree.

    Raises:
        TypeError: If the tree contains an object that can't be sent.
    """
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
    start = memoryview(len(header).to_bytes(8, "big") + header)
    for data in (start, *(to_bytes(tensor).numpy().data for tensor in tensors.values())):
        sent = 0
        while sent < len(data):
            sent += send(data[sent : sent + CHUNK])


# -- reading ---------------------------------------------------------------------------------------


def read(receive: Callable[[int], bytes], limit: int) -> Any:
    """Return the next message.

    Args:
        receive: Returns at least one byte, and at most as many as it is called with.
        limit: The most bytes that tensors may need.

    Returns:
        The tree.

    Raises:
        ProcessEnded: Of kind "protocol", if the message is invalid.
    """

    def take(count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            data += receive(min(count - len(data), CHUNK))
        return data

    try:
        length = int.from_bytes(take(8), "big")
        if length > HEADER:
            reject(f"a header of {length} bytes (the limit is {HEADER})")
        try:
            header = json.loads(take(length).decode(), parse_constant=reject)
        except (ValueError, RecursionError) as error:
            reject(f"a header that isn't JSON ({type(error).__name__})")
        if not isinstance(header, dict) or set(header) != {"tree", "tensors"}:
            reject("a header without a tree and tensors")
        plans = [Plan.of(described) for described in expect(list, header["tensors"])]
        needed = sum(plan.size + plan.span for plan in plans)
        if needed > limit:
            reject(f"a message of {needed} bytes (the limit is {limit})")
        return unpack(header["tree"], [plan.read(take(plan.size)) for plan in plans], RECORDS)
    except ValueError as error:
        reject(str(error))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tensor to read: its values need `size` bytes in the message, its strided layout `span` bytes."""

    dtype: torch.dtype
    shape: list[int]
    stride: list[int] | None
    size: int
    span: int

    @classmethod
    def of(cls, described: Any) -> Plan:
        """Return the plan for a tensor that the header describes, after a check of the description."""
        is_valid = set(expect(dict, described)) == {"dtype", "shape", "stride"}
        if not is_valid or described["dtype"] not in [*DTYPES]:
            raise ValueError(f"a tensor described as {str(described)[:80]}")
        dtype, stride = DTYPES[described["dtype"]], described["stride"]
        shape = expect(list, described["shape"])
        numbers = [*shape, *(shape if stride is None else expect(list, stride))]
        is_valid = len(numbers) == 2 * len(shape) <= 128 and all(0 <= expect(int, n) < 2**40 for n in numbers)
        # Beyond 2^60 a size is too large for torch, even if another size is 0.
        if not is_valid or math.prod(max(n, 1) for n in shape) >= 2**60:
            raise ValueError(f"a tensor of shape {str(shape)[:80]} and strides {str(stride)[:80]}")
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
