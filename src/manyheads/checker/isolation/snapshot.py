"""A snapshot of an object and of the process's global state, to restore both after a check.

Modules can't always be copied (a lock, a cache with a graph, a hook that refers to the module itself), so the
checker works on the object itself and restores it. The snapshot visits all objects that are reachable from
it: through attributes, containers, closures, bound arguments and attributes of its classes. It copies the
content of each mutable object and later writes it back into the same object, which preserves identities,
shared storages and tied weights.
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
from torch import Tensor, default_generator, equal, get_rng_state, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from manyheads.checker.isolation.describe import module_tensors
from manyheads.checker.isolation.trees import is_same

# Global state that a call may change: its name, how it is read, how it is restored.
GLOBALS: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    (name, getattr(torch, f"get_{function}"), getattr(torch, f"set_{function}"))
    for name, function in (
        ("the default dtype", "default_dtype"),
        ("the default device", "default_device"),
        ("the number of threads", "num_threads"),
        ("deterministic algorithms", "deterministic_debug_mode"),  # 0 off, 1 warns, 2 raises
        ("the precision of float32 products", "float32_matmul_precision"),
    )
]
GLOBALS += [
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
]
for device in ("cpu", "cuda"):
    GLOBALS += [
        ("autocast", partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        ("autocast", partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    ]


def read_globals() -> list[Any]:
    """Return the values of the global state."""
    return [read() for _, read, _ in GLOBALS]


def restore_globals(values: list[Any]) -> None:
    """Set the global state that differs from these values."""
    for (_, read, write), value in zip(GLOBALS, values, strict=True):
        if read() != value:
            write(value)


# Classes and functions of these packages (loggers, queues, compilers) belong to the program and not to the
# object; other threads may use them meanwhile.
_SHARED = sys.stdlib_module_names - {"collections", "types", "functools"} | {"torch", "numpy"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), types.ModuleType, torch.dtype, torch.device)
_MISSING = object()


class Snapshot:
    """The content of all objects that are reachable from some objects, and the global state."""

    def __init__(self, *roots: Any) -> None:
        self._visited: dict[int, Any] = {}  # by id; the reference prevents that an id is reused
        self._filled: set[int] = set()  # storages; tied weights and views share one
        self._globals: list[Callable[[], None]] = [
            read_generators(),
            partial(restore_globals, read_globals()),
        ]
        # The functions that restore each tensor's view of its storage, then storages, then other content.
        self._views: list[Callable[[], None]] = []
        self._storages: list[Callable[[], None]] = []
        self._others: list[Callable[[], None]] = []
        self.add(*roots)

    def add(self, *roots: Any) -> None:
        """Include the present content of all objects that are reachable from more objects."""
        waiting = list(roots)
        with _plain_tensors():
            while waiting:
                value = waiting.pop()
                if not isinstance(value, _ATOMS) and id(value) not in self._visited:
                    self._visited[id(value)] = value
                    waiting += self._keep(value)

    def restore(self) -> None:
        """Restore all content, once. An interrupt is raised at the end."""
        with _interrupts_deferred(), contextlib.ExitStack() as stack:
            # The stack calls the last function first, and calls the others if one raises.
            for write in self._globals:
                stack.callback(write)
            stack.enter_context(_plain_tensors())
            for write in (*self._others, *self._storages, *self._views):
                stack.callback(write)
            for kept in (self._globals, self._others, self._storages, self._views, self._visited):
                kept.clear()

    def _keep(self, value: Any) -> Iterator[Any]:
        """Keep the content of an object, and yield the objects inside it."""
        if isinstance(value, Tensor):
            yield from self._keep_tensor(value)
        if isinstance(value, type):
            if not _is_shared(value):
                yield from self._keep_class(value)
            return
        if isinstance(value, types.FunctionType):
            if _is_shared(value):
                return
            for cell in value.__closure__ or ():
                yield self._keep_attribute(cell, "cell_contents")
            yield from (value.__defaults__, value.__kwdefaults__)
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, tuple | frozenset):
            yield from value
        elif isinstance(value, dict | list | set | deque):
            yield from self._keep_container(value)
        elif (state := _state_of(value)) is not None:
            read, write = state
            self._others.append(partial(write, read()))
        kinds = (Tensor, nn.Module, types.FunctionType)
        if isinstance(value, kinds) or not _is_shared(type(value)):
            yield from self._keep_attributes(value)

    def _keep_attribute(self, owner: Any, name: str) -> Any:
        """Keep an attribute, or that it is missing, and return its value."""
        return self._keep_value(*(partial(f, owner, name) for f in (getattr, setattr, delattr)))

    def _keep_value(
        self, read: Callable[[], Any], write: Callable[[Any], None], delete: Callable[[], None]
    ) -> Any:
        """Keep a value that is compared by identity, or that it is missing, and return it."""

        def current() -> Any:
            try:
                return read()
            except (AttributeError, ValueError):  # an unset slot, an empty cell
                return _MISSING

        before = current()

        def restore() -> None:
            if current() is not before:
                delete() if before is _MISSING else write(before)

        self._others.append(restore)
        return before

    def _keep_tensor(self, tensor: Tensor) -> Iterator[Any]:
        is_leaf, requires_grad = tensor.grad_fn is None, tensor.requires_grad
        has_grad = is_leaf or tensor.retains_grad
        grad = tensor.grad if has_grad else None
        yield grad
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield self._keep_attribute(tensor, name)
        if not is_traceable_wrapper_subclass(tensor):  # otherwise its attributes contain the values
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

        self._others.append(write_flags)
        self._keep_attribute(tensor, "__class__")  # a lazy parameter changes its class with its shape

    def _keep_values(self, tensor: Tensor) -> None:
        """Keep a tensor's view of its storage, and the bytes there."""
        if tensor.layout != torch.strided or tensor.is_meta:
            values = tensor.detach().clone()
            self._views.append(lambda: setattr(tensor, "data", values))
            return
        alias, view = tensor.detach(), _view_of(tensor)  # the alias always refers to this storage
        storage = tensor.untyped_storage()

        def restore_view() -> None:
            if tensor.layout != torch.strided or _view_of(tensor) != view:
                tensor.data = alias

        self._views.append(restore_view)
        if storage._cdata in self._filled:
            return
        self._filled.add(storage._cdata)
        before = _bytes(storage).clone()

        def fill() -> None:
            if storage.nbytes() != before.numel():
                storage.resize_(before.numel())
            now = _bytes(storage)
            if not equal(now, before):  # so that read-only memory is never written
                now.copy_(before)

        self._storages.append(fill)

    def _keep_container(self, container: Any) -> Iterator[Any]:
        # Methods of the built-in class, in case a subclass overrides them.
        kinds: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
        kind = next(kind for kind in kinds if isinstance(container, kind))

        def read() -> list[Any]:  # the keys and values of a dict alternate
            if issubclass(kind, dict):
                return [x for item in kind.items(container) for x in item]
            return list(kind.__iter__(container))

        before = read()

        def write() -> None:
            now = read()
            if len(now) == len(before) and all(map(operator.is_, now, before)):
                return
            kind.clear(container)
            if issubclass(kind, dict):
                for key, value in zip(before[::2], before[1::2], strict=True):
                    kind.__setitem__(container, key, value)
            else:
                (kind.update if kind is set else kind.extend)(container, before)

        self._others.append(write)
        yield from before

    def _keep_attributes(self, value: Any) -> Iterator[Any]:
        """Keep the attributes of an instance, its class, and the attributes of the class."""
        cls = type(value)
        with contextlib.suppress(AttributeError):
            yield object.__getattribute__(value, "__dict__")
        slotted = (c for c in cls.__mro__ if "__slots__" in vars(c) and not _is_shared(c))
        for slot in (x for c in slotted for x in vars(c).values()):
            if isinstance(slot, types.MemberDescriptorType):
                methods = (slot.__get__, slot.__set__, slot.__delete__)
                yield self._keep_value(*(partial(method, value) for method in methods))
        if isinstance(value, nn.Module):
            self._keep_attribute(value, "__class__")  # a lazy module changes its class with its shapes
        if isinstance(value, torch.jit.ScriptModule):  # its tensors aren't among its attributes
            yield from (*value.parameters(), *value.buffers())
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

        self._others.append(write)
        yield from before.values()
        yield from (vars(cls).get(name) for name in ("__init__", "__call__"))  # their defaults may be changed
        yield from cls.__bases__


# -- one call ---------------------------------------------------------------------------------------


class State:
    """The global state and a module's modes, parameters and buffers before a call."""

    def __init__(self, candidate: Any) -> None:
        self.module = candidate if isinstance(candidate, nn.Module) else None
        modules = list(self.module.modules()) if self.module is not None else []
        self.globals = read_globals()
        self.modes = self.call_modes = [(module, module.training) for module in modules]
        self.tensors = {name: (kind, x.detach().clone()) for kind, name, x in module_tensors(self.module)}

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the parameters and buffers, and of the dicts that contain them."""
        entries = [x for module, _ in self.modes for x in (module._parameters, module._buffers)]
        return Snapshot(*entries, *(x for _, _, x in module_tensors(self.module)))

    def set_mode(self, training: bool, is_first: bool) -> None:
        """Set training or evaluation mode, which the call may not change.

        A module may override train(), for example to empty a cache. As in people's programs, it is only
        called before the first call of a sequence and where the mode changes.
        """
        if self.module is not None and (is_first or self.module.training != training):
            self.module.train(training)
        self.call_modes = [(module, module.training) for module, _ in self.modes]

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of what has changed since then."""
        for (name, read, _), before in zip(GLOBALS, self.globals, strict=True):
            if read() != before:
                yield "state", name
        if any(module.training != mode for module, mode in self.call_modes):
            yield "state", "the training flag"
        now = {name: (kind, x) for kind, name, x in module_tensors(self.module)}
        for name, (kind, x) in {**now, **self.tensors}.items():
            if name not in now or name not in self.tensors or not is_same(now[name][1], x):
                yield kind, name

    def is_resized(self) -> bool:
        """Return True if a parameter or buffer has another shape than then."""
        before = self.tensors
        return any(
            name in before and x.shape != before[name][1].shape for _, name, x in module_tensors(self.module)
        )

    def restore(self, keeps_modes: bool) -> None:
        """Restore global state and modes."""
        restore_globals(self.globals)
        for module, mode in () if keeps_modes else self.modes:
            module.training = mode


# -- random generators ------------------------------------------------------------------------------


def read_generators() -> Callable[[], None]:
    """Read the states of the global random generators, and return a function that restores them."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 (candidates may use this generator)
    ]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def write() -> None:
        for set_state, state in states:
            set_state(state)

    return write


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set the seed of each random generator, and restore the caller's random state afterwards."""
    restore = read_generators()
    default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each device without one
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (candidates may use this generator)
    try:
        yield
    finally:
        restore()


def hash_generators() -> dict[str, int]:
    """Return a hash of the state of each random generator, by the function that sets its seed."""
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return {
        "torch.manual_seed": hash(get_rng_state().numpy().tobytes()),
        "random.seed": hash(random.getstate()),
        "numpy.random.seed": hash((numpy_state["key"].tobytes(), numpy_state["pos"])),
    }


# -- helpers ---------------------------------------------------------------------------------------


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return functions that read and write the content of a generator or an array, or None."""
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return value.copy, lambda content: value.__setitem__(..., content)
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda content: value.__setitem__(slice(None), content)
    return None


def _is_shared(definition: Any) -> bool:
    """Return True for a class or function of the standard library, torch or NumPy, or without a module."""
    module = getattr(definition, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _SHARED


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the storage of a strided tensor, and its view of the storage."""
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
