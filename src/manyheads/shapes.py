"""The letters of shapes, and checks of arguments.

The letters, for the whole library:

    b  batch            t  queries              d  head size
    h  query heads      s  keys and values      w  value width (d unless said otherwise)
    g  key/value heads  e  model size

Queries are `[b, h, t, d]`, keys `[b, g, s, d]`, values `[b, g, s, w]`; g divides h, and query head i
uses key head i // (h / g). The error of a check says what was expected, what was given, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

REALS = (float, int, torch.SymFloat)
PLAIN = (Tensor, torch.nn.Parameter)  # types of tensors whose operators are PyTorch's own
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Shape(NamedTuple):
    """The sizes of one attention problem, by their letters."""

    b: int
    h: int
    g: int
    t: int
    s: int
    d: int
    w: int

    def zeros(self) -> str:
        """Return the letters of the sizes that are 0, as errors print them: `t, s`."""
        return ", ".join(letter for letter, size in self._asdict().items() if size == 0)


def sizes(tensor: Tensor) -> str:
    """Return a tensor's shape as errors print it: `[2, 8, 5, 64]`."""
    return "[" + ", ".join(str(int(n)) for n in tensor.shape) + "]"


def kind(value: object) -> str:
    """Return the type of a value as errors print it: `a Tensor of torch.int64`, `a list`, `an int`."""
    if isinstance(value, Tensor):
        return f"a Tensor of {value.dtype}"
    name = type(value).__name__
    return f"{'an' if name.lstrip('_')[:1] in {*'AEIOaeio'} else 'a'} {name}"  # not U: a UserDict


def can_read(*tensors: Tensor | None) -> bool:
    """Return True if Python can read the tensors' numbers.

    It can't while torch.compile traces, under vmap, or if they are meta or fake tensors.
    """
    if torch.compiler.is_compiling() or "vmap" in transforms():
        return False
    for x in tensors:
        if x is None:
            continue
        if x.is_meta or torch._C._functorch.is_legacy_batchedtensor(x):
            return False
        if type(x) not in PLAIN and is_fake(x):
            return False
    return True


def transforms() -> list[str]:
    """Return the names of torch.func's active transforms, outermost first ("vmap", "grad", "jvp", …)."""
    stack = torch._C._functorch.get_interpreter_stack()
    return [] if stack is None else [interpreter.key().name.lower() for interpreter in stack]


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check q, k and v, and return their sizes.

    Args:
        q: The queries `[b, h, t, d]`.
        k: The keys `[b, g, s, d]`.
        v: The values `[b, g, s, w]`.

    Returns:
        The sizes.

    Raises:
        TypeError: If an argument isn't a dense tensor of floats.
        ValueError: If shapes, dtypes or devices don't fit each other.
    """
    for name, x, letters in (
        ("q", q, "[b, h, t, d]"),
        ("k", k, "[b, g, s, d]"),
        ("v", v, "[b, g, s, w]"),
    ):
        if not isinstance(x, Tensor):
            raise TypeError(f"Expected {name} to be a tensor {letters}, got {kind(x)}.")
        if x.is_nested or x.layout != torch.strided:
            check_dense(x, name, letters)
        if x.dim() != 4:
            raise ValueError(f"Expected {name} to be {letters}, four dimensions, got {sizes(x)}.")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"Expected {name} to be float16, bfloat16, float32 or float64, got {x.dtype}: convert it."
            )
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise ValueError(f"q is {dtype} and {name} is {x.dtype}: convert them to one dtype.")
        if x.device != device:
            raise ValueError(f"q is on {device} and {name} is on {x.device}: move them together.")
    (b, h, t, d), (k_b, g, s, k_d), (v_b, v_g, v_s, w) = q.shape, k.shape, v.shape
    for letter, size, k_size in (("batch b", b, k_b), ("head size d", d, k_d)):
        if k_size != size:
            raise ValueError(
                f"Expected q {sizes(q)} and k {sizes(k)} to share the {letter}, got {size} and {k_size}."
            )
    if v_b != b or v_g != g or v_s != s:
        raise ValueError(
            f"Expected k {sizes(k)} and v {sizes(v)} to share b, g and s. "
            "Pass a value for each key of each head."
        )
    if (g == 0 and h > 0) or (g > 0 and h % g):
        raise ValueError(
            f"Expected the key heads g to divide the query heads h, got g = {g} (k {sizes(k)}) and "
            f"h = {h} (q {sizes(q)})."
        )
    return Shape(b, h, g, t, s, d, w)


def check_dense(x: Tensor, name: str, letters: str) -> None:
    """Raise TypeError for a nested or sparse tensor."""
    if x.is_nested:
        raise TypeError(
            f"Expected {name} to be a padded tensor {letters}, got a nested tensor. Pad it with "
            "torch.nested.to_padded_tensor and mask the padding with Lengths(n)."
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"Expected {name} to be a dense tensor {letters}, got one of {x.layout}. "
            "Convert it with to_dense()."
        )


def amount(size: float) -> str:
    """Return bytes in a readable unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def divide(whole: int, parts: int, what: str, into: str) -> int:
    """Return whole / parts; raise ValueError if parts doesn't divide whole. Errors contain both names."""
    if parts < 1 or whole % parts:
        raise ValueError(f"Expected {into} to divide {what}, got {into} = {parts}, {what} = {whole}.")
    return whole // parts


def real(value: object, name: str, fits: Callable[[float], bool], allowed: str) -> float:
    """Check a number, and return it as a float.

    Args:
        value: The number.
        name: The name of the argument in errors.
        fits: A function that returns True for allowed numbers.
        allowed: The allowed numbers in words, for errors.

    Returns:
        The number.

    Raises:
        TypeError: If it isn't a number, for example a bool or a tensor.
        ValueError: If it isn't allowed.
    """
    if isinstance(value, bool) or not isinstance(value, REALS):
        raise TypeError(f"Expected {name} to be {allowed}, got {value!r}.")
    if not torch.compiler.is_compiling() and not fits(float(value)):
        raise ValueError(f"Expected {name} to be {allowed}, got {value!r}.")
    return float(value)


def whole(value: object, name: str, least: int = 0, most: int | None = None) -> int:
    """Check an int, and return it.

    Args:
        value: The int.
        name: The name of the argument in errors.
        least: The smallest allowed number.
        most: The largest allowed number, if there is one.

    Returns:
        The int.

    Raises:
        TypeError: If it isn't an int, for example True or 3.0.
        ValueError: If it isn't allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected {name} to be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"Expected {name} to be at least {least}, got {value}.")
    if most is not None and value > most:
        raise ValueError(f"Expected {name} to be at most {most}, got {value}.")
    return value


def check_seed(seed: object) -> int:
    """Check that a random seed fits the 64 bits of PyTorch's generators, and return it."""
    number = whole(seed, "seed")
    if number >= 1 << 64:
        raise ValueError(f"Expected seed to be below 2^64, got {number}.")
    return number


def most_bytes(value: object) -> int:
    """Check the argument `max_bytes`, and return it as an int. Floats such as 2e9 are allowed."""
    return whole(int(value) if isinstance(value, float) and value.is_integer() else value, "max_bytes")
