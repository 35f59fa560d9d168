"""Messages between the checker and a subject in a process of its own: data, never pickled.

One message is the header's length (8 bytes, big-endian), the header (JSON: a tree, and the dtype and
shape of each tensor in it), and then each tensor's bytes in order. The reader believes nothing: what
the header says is checked against the limit before memory is taken, memory is taken as bytes come,
and a record's fields must be what its class says. A message that lies, ends early, nests too deep or
holds what no message may is Trouble("protocol").
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .candidate import DEPTH, DTYPES, Answer, Argument, Call, Description, Foreign, Trouble, laid_out, raw

HEADER = 16 * 2**20  # bytes of JSON
LEAVES = 2 * DEPTH  # nesting of a message: a tree inside a record inside a tuple
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RECORDS = {record.__name__: record for record in (Call, Answer, Description, Argument, Foreign)}


def refuse(what: str) -> NoReturn:
    raise Trouble("protocol", f"the process must answer with a message that can be read, and {what} came.")


# ----------------------------------------------------------------------------------------- writing


def write(put: Callable[[memoryview], None], value: Any) -> None:
    """Send a value: a tree of tensors and plain values, or one of the records, through `put`.

    Raises TypeError for what no message may hold.
    """
    tensors: dict[int, Tensor] = {}
    tree = _packed(value, tensors)
    described = [
        {"dtype": NAMES[x.dtype], "shape": list(x.shape), "stride": None if x.is_contiguous() else x.stride()}
        for x in tensors.values()
    ]
    header = json.dumps({"tree": tree, "tensors": described}, allow_nan=False).encode()
    put(memoryview(len(header).to_bytes(8, "big") + header))
    for tensor in tensors.values():
        put(raw(tensor).numpy().data)


def _packed(value: Any, tensors: dict[int, Tensor]) -> Any:
    pack = functools.partial(_packed, tensors=tensors)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"float": str(value)}
    if isinstance(value, Tensor) and value.dtype in NAMES and value.layout == torch.strided:
        tensors[id(value)] = value
        return {"tensor": list(tensors).index(id(value))}
    if isinstance(value, torch.dtype) and value in NAMES:
        return {"dtype": NAMES[value]}
    if type(value) is list:
        return [pack(child) for child in value]
    if type(value) is tuple:
        return {"tuple": [pack(child) for child in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: pack(child) for key, child in value.items()}}
    if type(value).__name__ in RECORDS and type(value) in RECORDS.values():
        fields = {field.name: pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"record": [type(value).__name__, fields]}
    raise TypeError(
        f"a message holds tensors and plain values, and a {type(value).__name__} came: convert it."
    )


# ----------------------------------------------------------------------------------------- reading


def read(take: Callable[[int], bytearray], limit: int) -> Any:
    """The next message's value; `take(n)` returns the next n bytes.

    `limit` is the most bytes that its tensors may need. Raises Trouble("protocol").
    """
    length = int.from_bytes(take(8), "big")
    if length > HEADER:
        refuse(f"a header of {length} bytes (the limit is {HEADER})")
    try:
        header = json.loads(take(length).decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        refuse(f"a header that is no JSON ({type(error).__name__})")
    if not isinstance(header, dict) or set(header) != {"tree", "tensors"}:
        refuse("a header without a tree and tensors")
    plans = [_plan(said) for said in _is(list, header["tensors"])]
    needed = sum(size + span for _, _, _, size, span in plans)
    if needed > limit:
        refuse(f"a message of {needed} bytes (the limit is {limit})")
    tensors = [_tensor(take(size), dtype, shape, stride) for dtype, shape, stride, size, _ in plans]
    return _unpacked(header["tree"], tensors, LEAVES)


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        refuse(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _plan(said: Any) -> tuple[torch.dtype, list[int], list[int] | None, int, int]:
    """A tensor's dtype, shape and strides, the bytes of its values, and those of its strided layout."""
    if set(_is(dict, said)) != {"dtype", "shape", "stride"} or _is(str, said["dtype"]) not in DTYPES:
        refuse(f"a tensor described as {str(said)[:80]}")
    dtype, shape, stride = DTYPES[said["dtype"]], _is(list, said["shape"]), said["stride"]
    for sizes in (shape, shape if stride is None else _is(list, stride)):
        if len(sizes) != len(shape) or len(sizes) > 64 or any(not 0 <= _is(int, n) < 2**40 for n in sizes):
            refuse(f"a tensor of shape {str(shape)[:80]} and strides {str(stride)[:80]}")
    if math.prod(max(n, 1) for n in shape) >= 2**60:  # empty, and yet more than torch counts
        refuse(f"a tensor of shape {str(shape)[:80]}")
    size = math.prod(shape) * dtype.itemsize
    span = 0
    if stride is not None and size:
        span = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    return dtype, shape, stride, size, span


def _tensor(data: bytearray, dtype: torch.dtype, shape: list[int], stride: list[int] | None) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 is no bool
        values = torch.frombuffer(data, dtype=torch.uint8) != 0
    else:
        values = torch.frombuffer(data, dtype=dtype)
    values = values.reshape(shape)
    return values if stride is None else laid_out(values, tuple(stride))


def _unpacked(node: Any, tensors: list[Tensor], depth: int) -> Any:
    if depth == 0:
        refuse("a tree that nests too deep")
    unpack = functools.partial(_unpacked, tensors=tensors, depth=depth - 1)
    if type(node) is list:
        return [unpack(child) for child in node]
    if type(node) is not dict:
        return node
    if len(node) != 1:
        refuse(f"a node {str(node)[:80]}")
    [(tag, value)] = node.items()
    if tag == "tuple":
        return tuple(unpack(child) for child in _is(list, value))
    if tag == "dict":
        return {key: unpack(child) for key, child in _is(dict, value).items()}
    if tag == "tensor" and 0 <= _is(int, value) < len(tensors):
        return tensors[value]
    if tag == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if tag == "dtype" and _is(str, value) in DTYPES:
        return DTYPES[value]
    if tag == "record" and len(_is(list, value)) == 2 and _is(str, value[0]) in RECORDS:
        return _record(RECORDS[value[0]], {key: unpack(child) for key, child in _is(dict, value[1]).items()})
    refuse(f"a node {str(node)[:80]}")


def _record(record: type, fields: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(record)
    if set(fields) != set(hints):
        refuse(f"a record {record.__name__} of {sorted(fields)}")
    for name, hint in hints.items():
        if not fits(fields[name], hint):
            came = type(fields[name]).__name__
            refuse(f"a record {record.__name__} whose {name} is a {came} and not {hint}")
    try:
        return record(**fields)
    except ValueError as error:
        refuse(f"a record {record.__name__} ({error})")


def fits(value: Any, hint: Any) -> bool:
    """Is the value what a record's annotation says?"""
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
