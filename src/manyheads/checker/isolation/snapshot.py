"""A snapshot of an object and of the process's global state, to restore both after a check.

Modules can't always be copied (a lock, a cache with a graph, a hook that refers to the module itself), so the
checker works on the object itself and restores it. The snapshot walks everything reachable from the object:
attributes, containers, closures, bound arguments and attributes of its classes. It copies the content of each
mutable part and writes it back into the same part, which preserves identities, shared storages and tied
weights.
"""

from __future__ import annotations

import contextlib
import operator
import random
import signal
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

# Imported by name before the candidate is: one that patches torch doesn't patch these.
from torch import Tensor, equal, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def _autocast() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_autocast_cache_enabled(),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    )


def _set_autocast(state: tuple[Any, ...]) -> None:
    cached, *devices = state
    torch.set_autocast_cache_enabled(cached)
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


# Global state that a call may change: its name, how it is read, how it is restored.
GLOBALS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the default device", torch.get_default_device, torch.set_default_device),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    (
        "deterministic algorithms",  # 0 off, 1 warns, 2 raises
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    (
        "the precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    ("autocast", _autocast, _set_autocast),
)


def read_globals() -> list[Any]:
    """Return the values of the global state."""
    return [read() for _, read, _ in GLOBALS]


def restore_globals(values: list[Any]) -> None:
    """Set the global state that differs from these values."""
    for (_, read, write), value in zip(GLOBALS, values, strict=True):
        if read() != value:
            write(value)


# What these packages define belongs to the program (loggers, queues, compilers), not to the object; other
# threads may use it meanwhile.
_SHARED = sys.stdlib_module_names - {"collections", "types", "functools"} | {"torch", "numpy"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), types.ModuleType, torch.dtype, torch.device)
_MISSING = object()


class Snapshot:
    """The content of everything that is reachable from some objects, and the global state."""

    def __init__(self, *roots: Any) -> None:
        self._seen: dict[int, Any] = {}  # id → part; a reference, so that no id is reused
        self._filled: set[int] = set()  # storages; tied weights and views share one
        self._globals = _global_state()
        # Tensors are pointed at their storages first, then storages are filled, then the rest is restored.
        self._pointers: list[Callable[[], None]] = []
        self._storages: list[Callable[[], None]] = []
        self._rest: list[Callable[[], None]] = []
        self.add(*roots)

    def add(self, *roots: Any) -> None:
        """Include what is reachable from more objects, as it is now."""
        waiting = list(roots)
        with _plain_tensors():
            while waiting:
                part = waiting.pop()
                if not isinstance(part, _ATOMS) and id(part) not in self._seen:
                    self._seen[id(part)] = part
                    waiting += self._keep(part)

    def restore(self) -> None:
        """Write everything back, once. An interrupt is raised when that is done."""
        with _interrupts_deferred(), contextlib.ExitStack() as stack:
            # A stack calls the last one first, and goes on if one raises.
            stack.callback(self._globals)
            stack.enter_context(_plain_tensors())
            for write in (*self._rest, *self._storages, *self._pointers):
                stack.callback(write)
            self._globals = lambda: None
            for kept in (self._rest, self._storages, self._pointers, self._seen):
                kept.clear()

    def _keep(self, part: Any) -> Iterator[Any]:
        """Keep the content of one part, and yield the parts inside it."""
        if isinstance(part, Tensor):
            yield from self._keep_tensor(part)
        if isinstance(part, type):
            if not _is_shared(part):
                yield from self._keep_class(part)
            return
        if isinstance(part, types.FunctionType):
            if _is_shared(part):
                return
            for cell in part.__closure__ or ():
                of = (cell, "cell_contents")
                yield self._keep_value(partial(getattr, *of), partial(setattr, *of), partial(delattr, *of))
            yield from (part.__defaults__, part.__kwdefaults__)
        elif isinstance(part, types.MethodType):
            yield from (part.__self__, part.__func__)
        elif isinstance(part, partial):
            yield from (part.func, part.args, part.keywords)
        elif isinstance(part, staticmethod | classmethod):
            yield part.__func__
        elif isinstance(part, tuple | frozenset):
            yield from part
        elif isinstance(part, dict | list | set | deque):
            yield from self._keep_container(part)
        elif (state := _state_of(part)) is not None:
            read, write = state
            self._rest.append(partial(write, read()))
        kinds = (Tensor, nn.Module, types.FunctionType)
        if isinstance(part, kinds) or not _is_shared(type(part)):
            yield from self._keep_attributes(part)

    def _keep_value(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        delete: Callable[[], None] = lambda: None,
    ) -> Any:
        """Keep a value that is compared by identity, and return it; one that was missing is deleted again."""

        def current() -> Any:
            try:
                return read()
            except (AttributeError, ValueError):  # an unset slot, an empty cell
                return _MISSING

        before = current()

        def restore() -> None:
            if current() is not before:
                delete() if before is _MISSING else write(before)

        self._rest.append(restore)
        return before

    def _keep_tensor(self, tensor: Tensor) -> Iterator[Any]:
        is_leaf, requires_grad = tensor.grad_fn is None, tensor.requires_grad
        has_grad = is_leaf or tensor.retains_grad
        grad = tensor.grad if has_grad else None
        yield grad
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield self._keep_value(partial(getattr, tensor, name), partial(setattr, tensor, name))
        if not is_traceable_wrapper_subclass(tensor):  # the tensors inside of it are its attributes
            self._keep_values(tensor)

        def write_flags() -> None:
            if is_leaf and tensor.grad_fn is not None:
                try:
                    tensor.detach_()
                except RuntimeError:  # a view can't be detached in place
                    detached = tensor.detach()
                    torch.utils.swap_tensors(tensor, detached)
                    vars(tensor).update(vars(detached))
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            if has_grad and tensor.grad is not grad:
                tensor.grad = grad

        self._rest.append(write_flags)
        self._pointers.append(_class_writer(tensor))  # a lazy parameter changes its class with its shape

    def _keep_values(self, tensor: Tensor) -> None:
        """Keep a tensor's view of its storage, and the bytes there."""
        if tensor.layout != torch.strided or tensor.is_meta:
            values = tensor.detach().clone()
            self._pointers.append(lambda: setattr(tensor, "data", values))
            return
        alias, place = tensor.detach(), _place(tensor)  # of the same storage, whatever the tensor becomes
        storage = tensor.untyped_storage()

        def point() -> None:
            if tensor.layout != torch.strided or _place(tensor) != place:
                tensor.data = alias

        self._pointers.append(point)
        if storage._cdata in self._filled:
            return
        self._filled.add(storage._cdata)
        before = _bytes(storage).clone()

        def fill() -> None:
            if storage.nbytes() != before.numel():
                storage.resize_(before.numel())
            now = _bytes(storage)
            if not equal(now, before):  # memory that is only readable is never written
                now.copy_(before)

        self._storages.append(fill)

    def _keep_container(self, part: Any) -> Iterator[Any]:
        kinds: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
        kind = next(kind for kind in kinds if isinstance(part, kind))

        def read() -> list[Any]:  # of a dict, keys and values by turns
            if issubclass(kind, dict):
                return [x for item in kind.items(part) for x in item]
            return list(kind.__iter__(part))

        before = read()

        def write() -> None:
            now = read()
            if len(now) == len(before) and all(map(operator.is_, now, before)):
                return
            kind.clear(part)
            if issubclass(kind, dict):
                for key, value in zip(before[::2], before[1::2], strict=True):
                    kind.__setitem__(part, key, value)
            else:
                (kind.update if kind is set else kind.extend)(part, before)

        self._rest.append(write)
        yield from before

    def _keep_attributes(self, part: Any) -> Iterator[Any]:
        """Keep the attributes of an instance, its class, and those of the class."""
        cls = type(part)
        with contextlib.suppress(AttributeError):
            yield object.__getattribute__(part, "__dict__")
        slotted = (c for c in cls.__mro__ if "__slots__" in vars(c) and not _is_shared(c))
        for slot in (x for c in slotted for x in vars(c).values()):
            if isinstance(slot, types.MemberDescriptorType):
                read, write, delete = (
                    partial(f, part) for f in (slot.__get__, slot.__set__, slot.__delete__)
                )
                yield self._keep_value(read, write, delete)
        if isinstance(part, nn.Module):
            self._rest.append(_class_writer(part))  # a lazy module changes its class with its shapes
        if isinstance(part, torch.jit.ScriptModule):  # whose tensors aren't among its attributes
            yield from (*part.parameters(), *part.buffers())
        yield cls

    def _keep_class(self, cls: type) -> Iterator[Any]:
        def read() -> dict[str, Any]:
            return {name: value for name, value in vars(cls).items() if not name.startswith("__")}

        before = read()

        def write() -> None:
            now = read()
            for name in now.keys() - before.keys():
                type.__delattr__(cls, name)
            for name, value in before.items():
                if now.get(name, _MISSING) is not value:
                    type.__setattr__(cls, name, value)

        self._rest.append(write)
        yield from before.values()
        yield from (vars(cls).get(name) for name in ("__init__", "__call__"))  # whose defaults may hold state
        yield from cls.__bases__


def _global_state() -> Callable[[], None]:
    """Read the global state, and return a function that restores it."""
    flags = read_globals()
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (what others still draw from)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def write() -> None:
        restore_globals(flags)
        torch.set_rng_state(numbers[0])
        random.setstate(numbers[1])
        np.random.set_state(numbers[2])  # noqa: NPY002
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return write


def _class_writer(part: Any) -> Callable[[], None]:
    """Return a function that restores the class of an object."""
    cls = type(part)

    def write() -> None:
        if type(part) is not cls:
            part.__class__ = cls

    return write


def _state_of(part: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return how to read and write the content of an object whose content isn't in attributes, or None."""
    if isinstance(part, torch.Generator):
        return part.get_state, part.set_state
    if isinstance(part, random.Random) and not isinstance(part, random.SystemRandom):
        return part.getstate, part.setstate
    if isinstance(part, np.random.RandomState):
        return part.get_state, part.set_state
    if isinstance(part, np.random.Generator):
        bits = part.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(part, np.ndarray) and part.flags.writeable:
        return part.copy, lambda values: part.__setitem__(..., values)
    if isinstance(part, bytearray):
        return lambda: bytes(part), lambda data: part.__setitem__(slice(None), data)
    return None


def _is_shared(thing: Any) -> bool:
    """Return True for a class or function of the standard library, torch or NumPy, or without a module."""
    module = getattr(thing, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _SHARED


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return a strided tensor's storage and its view of it."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Disable gradients, tensor subclasses' own functions and default devices."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Deliver an interrupt at the end; only the main thread receives any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if received:
        signal.raise_signal(signal.SIGINT)
