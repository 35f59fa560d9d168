"""Messages between the checker and a candidate's process: data, never pickles.

A message is the length of the header (8 bytes, big-endian), the header (JSON: a tree, and the dtype, shape
and strides of its tensors), and the bytes of each tensor. The reader trusts nothing: it checks the header
against the limit before it allocates memory, allocates as bytes arrive, and checks the fields of each record
against its class. A message that can't be read raises ProcessEnded of kind "protocol".
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from manyheads.checker.isolation.candidate import Answer, Call, Change
from manyheads.checker.isolation.describe import Argument, Description
from manyheads.checker.isolation.errors import ProcessEnded
from manyheads.checker.isolation.trees import DEPTH, DTYPES, Foreign, to_bytes, with_strides

HEADER = 16 * 2**20  # bytes of JSON
NESTING = 2 * DEPTH  # of a message: a tree inside a record inside a tuple
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RECORDS = {record.__name__: record for record in (Call, Answer, Change, Description, Argument, Foreign)}


def reject(problem: str) -> NoReturn:
    """Raise the error of a message that can't be read."""
    raise ProcessEnded("protocol", f"Expected a message that can be read from the process, got {problem}.")


# -- writing ---------------------------------------------------------------------------------------


def write(put: Callable[[memoryview], None], value: Any) -> None:
    """Send a tree or a record through `put`; TypeError for anything else."""
    tensors: dict[int, Tensor] = {}
    tree = pack(value, tensors)
    described = [
        {"dtype": NAMES[x.dtype], "shape": list(x.shape), "stride": None if x.is_contiguous() else x.stride()}
        for x in tensors.values()
    ]
    header = json.dumps({"tree": tree, "tensors": described}, allow_nan=False).encode()
    put(memoryview(len(header).to_bytes(8, "big") + header))
    for tensor in tensors.values():
        put(to_bytes(tensor).numpy().data)


def pack(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Return a value as JSON, each tensor by its number; a tensor that occurs twice is sent once."""
    if isinstance(value, Tensor) and value.dtype in NAMES and value.layout == torch.strided:
        tensors[id(value)] = value
        return {"tensor": list(tensors).index(id(value))}
    if isinstance(value, torch.dtype) and value in NAMES:
        return {"dtype": NAMES[value]}
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        children = [pack(child, tensors) for child in value]
        return children if kind is list else {"tuple": children}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: pack(child, tensors) for key, child in value.items()}}
    if kind in RECORDS.values():
        return {
            "record": [kind.__name__, {name: pack(child, tensors) for name, child in vars(value).items()}]
        }
    raise TypeError(f"Expected a tensor or a plain value for a message, got a {kind.__name__}. Convert it.")


# -- reading ---------------------------------------------------------------------------------------


def read(take: Callable[[int], bytearray], limit: int) -> Any:
    """Return the next message; `take(n)` returns n bytes, `limit` is the most that its tensors may need."""
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
    return unpack(header["tree"], [plan.read(take(plan.size)) for plan in plans], NESTING)


def expect(kind: type, value: Any) -> Any:
    """Return a value of this type, reject any other."""
    if type(value) is not kind:
        reject(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tensor to be read; `size` is the bytes of its values, `span` those of its strided layout."""

    dtype: torch.dtype
    shape: list[int]
    stride: list[int] | None
    size: int
    span: int

    @classmethod
    def of(cls, described: Any) -> Plan:
        """Check a description of the header."""
        if (
            set(expect(dict, described)) != {"dtype", "shape", "stride"}
            or described["dtype"] not in NAMES.values()
        ):
            reject(f"a tensor described as {str(described)[:80]}")
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
                reject(f"a tensor of shape {str(shape)[:80]} and strides {str(stride)[:80]}")
        if math.prod(max(n, 1) for n in shape) >= 2**60:  # more than torch counts, even if it is empty
            reject(f"a tensor of shape {str(shape)[:80]}")
        size = math.prod(shape) * dtype.itemsize
        span = 0
        if stride is not None and size:
            span = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
        return cls(dtype, shape, stride, size, span)

    def read(self, data: bytearray) -> Tensor:
        """Return the tensor of these bytes."""
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        is_bool = self.dtype == torch.bool  # whose bytes may only be 0 and 1
        values = torch.frombuffer(data, dtype=torch.uint8 if is_bool else self.dtype)
        values = (values != 0 if is_bool else values).reshape(self.shape)
        return values if self.stride is None else with_strides(values, tuple(self.stride))


def unpack(node: Any, tensors: list[Tensor], depth: int) -> Any:
    """Return the value of a node of the header's tree."""
    if depth == 0:
        reject("a tree that is nested too deeply")

    def children(nodes: Any, kind: type) -> Any:
        pairs = expect(kind, nodes).items() if kind is dict else enumerate(expect(kind, nodes))
        return {key: unpack(child, tensors, depth - 1) for key, child in pairs}

    if type(node) is list:
        return list(children(node, list).values())
    if type(node) is not dict:
        return node
    match [*node.items()]:
        case [("tuple", nodes)]:
            return tuple(children(nodes, list).values())
        case [("dict", nodes)]:
            return children(nodes, dict)
        case [("tensor", number)] if 0 <= expect(int, number) < len(tensors):
            return tensors[number]
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("dtype", str(name))] if name in DTYPES:
            return DTYPES[name]
        case [("record", [str(name), fields])] if name in RECORDS:
            return make_record(RECORDS[name], children(fields, dict))
    reject(f"a node {str(node)[:80]}")


def make_record(record: type, fields: dict[str, Any]) -> Any:
    """Return a record whose fields have the types that its class declares."""
    hints = typing.get_type_hints(record)
    if set(fields) != set(hints):
        reject(f"a record {record.__name__} of {sorted(fields)}")
    for name, hint in hints.items():
        if not fits(fields[name], hint):
            reject(f"a record {record.__name__} whose {name} is a {type(fields[name]).__name__}, not {hint}")
    try:
        return record(**fields)
    except ValueError as error:
        reject(f"a record {record.__name__} ({error})")


def fits(value: Any, hint: Any) -> bool:
    """Return True if a value has the type that an annotation declares."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is tuple:
        return type(value) is tuple and all(fits(child, inner[0]) for child in value)
    if origin is dict:
        return type(value) is dict and all(fits(child, inner[1]) for child in value.values())
    return isinstance(value, Tensor) if hint is Tensor else type(value) is (hint or type(None))
