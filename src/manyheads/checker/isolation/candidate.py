"""A candidate in this process: build it, call it, and undo the changes of each call."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import inspect
import operator
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from manyheads.checker.isolation.configuration import build_arguments, describe_configurations, to_object
from manyheads.checker.isolation.describe import (
    Argument,
    Description,
    describe,
    find_shared,
    module_tensors,
    read_signature,
    unwrap_partial,
)
from manyheads.checker.isolation.errors import CandidateError, CodeError, candidate_exception
from manyheads.checker.isolation.snapshot import Snapshot, State, hash_generators, seeded
from manyheads.checker.isolation.target import find
from manyheads.checker.isolation.trees import (
    is_same,
    iterate_tensors,
    map_tensors,
    to_tree,
    top_tensors,
    with_strides,
)

REORDER = re.compile(  # a method that reorders the batch entries of a cache
    r"_?(?:reorder|(?:index_|batch_)?select)(?:_\w*(?:cache|state|past|kv|batch|beam|entries|buffer)\w*)?"
)


@dataclass(frozen=True)
class Kept:
    """An argument that stays in the candidate's process: a part of an earlier output in a sequence of calls.

    Attributes:
        call: The number of that call in the sequence; -1 is the call before.
        path: The part, such as "1" or "1.key"; "" is the whole output.
    """

    call: int
    path: str = ""


@dataclass(frozen=True)
class Call:
    """One call of a candidate.

    Attributes:
        args: The positional arguments, trees.
        kwargs: The keyword arguments, trees.
        grads: The paths of tensors whose gradients are returned: "0" is the first positional argument,
            "key" a keyword, "0.1" nested. If one tensor is passed twice, it has one gradient.
        cotangent: The gradient of the output's first tensor, of its shape. Without it, gradients are off.
        training: The mode of the module.
        dtype: A dtype to which a copy of the module and every floating argument are cast.
        rounding: A dtype to which a copy of the module is cast and back, so that its parameters are rounded.
        buffers: The dtype of floating buffers, except for zeros (empty caches). If None, buffers are cast and
            rounded as parameters are.
        compiled: Whether to call it through torch.compile.
        seed: The random seed.
        memory: Whether to measure the peak of memory.
        function: What to call instead of the candidate: ".name" is a method of it, "name" a class in its
            file, "name.method" a method of that, "module:name" any other object.
        before: Calls that precede it: they make objects that it takes as `Kept`, or reset the candidate.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    grads: tuple[str, ...] = ()
    cotangent: Tensor | None = None
    training: bool = False
    dtype: torch.dtype | None = None
    rounding: torch.dtype | None = None
    buffers: torch.dtype | None = None
    compiled: bool = False
    seed: int = 0
    memory: bool = False
    function: str = ""
    before: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Change:
    """An argument, a parameter, a buffer or a global setting that a call changed."""

    kind: str  # "argument", "parameter", "buffer" or "state"
    name: str


@dataclass(frozen=True)
class Answer:
    """The result of a call; tensors are detached copies on the CPU.

    Attributes:
        output: A tree.
        grads: The gradients of `Call.grads` by path; None for a tensor that gets no gradient.
        weight_grads: The gradients of all parameters that require one, likewise.
        changed: The changes that the call made.
        generators: A hash of the state of each global random generator after the call.
        peak: The increase of resident memory during the call at its peak, in bytes, or None if it wasn't
            measured or can't be.
    """

    output: Any
    grads: dict[str, Tensor | None]
    weight_grads: dict[str, Tensor | None]
    changed: tuple[Change, ...]
    generators: dict[str, int]
    peak: int | None


class Candidate(contextlib.AbstractContextManager["Candidate"]):
    """A class, a module, a function, or a factory that returns one of these and takes no arguments.

    Args:
        target: The object.

    Raises:
        CandidateError: Of kind "import", if the target can't be called.
    """

    def __init__(self, target: Any) -> None:
        self.target = call_factory(target)
        self.is_class = isinstance(unwrap_partial(self.target), type)
        self.instance = None if self.is_class else self.target
        self._loaded: Snapshot | None = None  # of the instance before its first call
        self._is_resized = False  # whether the last call replaced buffers by some of another size

    def describe(self) -> Description:
        """Describe the class, or the instance if it has been built."""
        description = describe(self.target, self.instance)
        configurations = describe_configurations(unwrap_partial(self.target)) if self.is_class else {}
        return replace(description, configurations=configurations)

    def build(self, init: dict[str, Any]) -> Description:
        """Build an instance with seed 0.

        Args:
            init: The constructor arguments, trees.

        Returns:
            The description of the instance.

        Raises:
            CandidateError: Of kind "init", if the constructor raises, or if the target isn't a class.
        """
        if self._loaded is not None:  # classes and default arguments may keep what earlier calls stored
            self._loaded.restore()
        self._loaded = None
        name = self.describe().name
        if self.is_class:
            try:
                with seeded(0):
                    self.instance = self.target(**build_arguments(self.target, init))
            except (Exception, SystemExit) as error:
                raise candidate_exception("init", f"building {name}", error) from None
        elif init:
            given = ", ".join(init)
            raise CodeError("init", f"Expected no arguments for {name}, which isn't a class, got {given}.")
        return self.describe()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers by name."""
        return {name: x.detach().cpu().clone() for name, x in self._tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy values into the parameters and buffers with these names."""
        if self._loaded is not None:  # what earlier calls kept would count as a new instance's
            self._loaded.restore()
        targets = self._tensors()
        for name, values in tensors.items():
            targets[name].data.copy_(values)
        self._loaded = None

    def _tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by all of their names."""
        module = self._built()
        tensors = {name: x for _, name, x in module_tensors(module)}
        shared = find_shared(module) if isinstance(module, nn.Module) else {}
        return tensors | {name: tensors[first] for name, first in shared.items() if first in tensors}

    def call(self, call: Call) -> Answer:
        """Call the candidate, and undo its changes of parameters, buffers and global settings.

        Args:
            call: The arguments and options.

        Returns:
            The output, gradients and changes.

        Raises:
            CandidateError: Of kind "call" or "memory", if it raises.
        """
        if self._loaded is None:
            self._loaded = Snapshot(self._built())
        try:
            return self._call(call, [], keeps_changes=False)
        finally:
            if self._is_resized:  # attributes may say how long a table is that was lengthened
                self._is_resized = False
                self._restore_loaded()

    def call_sequence(self, calls: tuple[Call, ...]) -> tuple[Answer, ...]:
        """Make several calls from the state before the first call; each sees the changes of those before it.

        Args:
            calls: The calls, whose arguments may be `Kept`. Their changes are undone at the end.

        Returns:
            The answer of each call.

        Raises:
            CandidateError: Of kind "call" or "memory", if a call raises.
        """
        outputs: list[Any] = []
        self._restore_loaded()
        try:
            return tuple(self._call(call, outputs, keeps_changes=True) for call in calls)
        finally:
            self._restore_loaded()

    def _restore_loaded(self) -> None:
        """Restore the state before the first call."""
        if self._loaded is not None:
            self._loaded.restore()
        self._loaded = Snapshot(self._built())

    def _undo(self, state: State, before: Snapshot) -> None:
        """Restore parameters and buffers after a call, and note whether the instance's own were resized."""
        self._is_resized = state.module is self.instance and state.is_resized()
        before.restore()

    def functions(self) -> dict[str, tuple[Argument, ...]]:
        """Return the arguments of what `Call.function` can name: its methods, and the classes in its file."""
        found: dict[str, tuple[Argument, ...]] = {}
        instance = self._built()
        for path, module in instance.named_modules() if isinstance(instance, nn.Module) else [("", instance)]:
            classes = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")]
            for name, method in (item for cls in classes for item in vars(cls).items()):
                key = f".{path}.{name}" if path else f".{name}"
                if isinstance(method, staticmethod) and REORDER.fullmatch(name):
                    found[key] = read_signature(method.__func__, bound=True)
                elif inspect.isfunction(method) and (name[0] != "_" or REORDER.fullmatch(name)):
                    found |= {} if name == "forward" else {key: read_signature(method, bound=False)}
        file = sys.modules.get(self._definition().__module__, types)
        for name, value in vars(file).items():
            if isinstance(value, type) and (value.__module__ == file.__name__ or "cache" in name.lower()):
                found[name] = read_signature(value, bound=True)
                for key, method in vars(value).items():
                    if inspect.isfunction(method) and REORDER.fullmatch(key):
                        found[f"{name}.{key}"] = read_signature(method, bound=False)
        return found

    def _definition(self) -> Any:
        """Return the class of the candidate, or the function."""
        candidate = self._built()
        return candidate if inspect.isroutine(candidate) else type(candidate)

    def _find_function(self, name: str) -> Any:
        if name[0] == ".":
            return operator.attrgetter(name[1:])(self._built())
        file = sys.modules[self._definition().__module__]
        return find(name) if ":" in name else operator.attrgetter(name)(file)

    def _call(self, call: Call, outputs: list[Any], keeps_changes: bool) -> Answer:
        """Make a call; `outputs` are those of the calls before it, to which its own is added."""
        for each in call.before:
            self._call(each, outputs, keeps_changes=True)
        candidate = self._built()
        name = self._definition().__name__

        def copy_argument(tensor: Tensor) -> Tensor:
            copied = with_strides(tensor, tensor.stride())
            is_cast = call.dtype is not None and tensor.is_floating_point()
            return copied.to(call.dtype, memory_format=torch.preserve_format) if is_cast else copied

        args, kwargs = map_tensors([call.args, call.kwargs], copy_argument)
        args, kwargs = [to_object(x) for x in args], {name: to_object(x) for name, x in kwargs.items()}
        passed = dict(iterate_tensors({**dict(enumerate(args)), **kwargs}))
        originals = {path: tensor.clone() for path, tensor in passed.items()}
        for path in call.grads:
            passed[path].requires_grad_(True)

        def resolve(value: Any) -> Any:
            return find_part(outputs, value) if isinstance(value, Kept) else value

        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(call.seed))
            stack.enter_context(torch.set_grad_enabled(call.cotangent is not None))
            try:
                candidate = cast_module(candidate, call)
                state = State(candidate)
                if not keeps_changes:
                    stack.callback(self._undo, state, state.snapshot())
                stack.callback(state.restore, keeps_modes=keeps_changes)
                state.set_mode(call.training, is_first=not outputs)
                function = self._find_function(call.function) if call.function else candidate
                if call.compiled:
                    torch._dynamo.reset()  # graphs of earlier calls count against the limit of recompilations
                    stack.callback(torch._dynamo.reset)
                    # Inductor would take longer than all checks, and its bugs aren't the candidate's.
                    function = in_own_thread(torch.compile(candidate, backend="aot_eager"), name)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                devnull = stack.enter_context(open(os.devnull, "w", encoding="utf-8", errors="replace"))
                stack.enter_context(contextlib.redirect_stdout(devnull))
                resident = reset_peak() if call.memory else None
                output = function(*map(resolve, args), **{n: resolve(x) for n, x in kwargs.items()})
                outputs.append(output)
                grads, weight_grads = run_backward(output, call, passed, candidate)
                peak = None if resident is None else max(0, read_peak() - resident)
                changed = [Change(kind, name) for kind, name in state.changes()]
                output, generators = to_tree(output), hash_generators()
            except CandidateError:
                raise
            except (Exception, SystemExit) as error:
                raise candidate_exception("call", f"calling {name}", error) from None
        changed += [Change("argument", path) for path, x in passed.items() if not is_same(x, originals[path])]
        return Answer(output, grads, weight_grads, tuple(changed), generators, peak)

    def close(self) -> None:
        """Do nothing; subclasses restore the object."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def _built(self) -> Any:
        if self.instance is None:
            raise CodeError("call", f"{self.describe().name} is a class. Call build() first.")
        return self.instance


class BorrowedCandidate(Candidate):
    """An object of the caller, which `close` restores, and global state with it."""

    def __init__(self, target: Any) -> None:
        self._snapshot = Snapshot(target)
        try:
            super().__init__(target)
            self._snapshot.add(self.target)  # a factory may return an object that the caller uses
            if any(x.is_inference() for _, _, x in module_tensors(self.instance)):
                name = self.describe().name
                reason = "was built in torch.inference_mode, so that its parameters can't get gradients."
                raise CodeError("import", f"{name} {reason} Build it outside of that mode.")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the object."""
        self._snapshot.restore()


def call_factory(target: Any) -> Any:
    """Return the target, or if it is a factory, the object that it returns."""
    function = unwrap_partial(target)
    if not inspect.isfunction(function):
        if callable(target):
            return target
        kind = type(target).__name__
        raise CodeError("import", f"Expected a class, a function or a callable object, got a {kind}.")
    arguments = read_signature(target, bound=True)
    if any(argument.required or not argument.is_named for argument in arguments):
        return target
    name = f"{function.__name__}()"
    try:
        with seeded(0):
            made = target()
    except (Exception, SystemExit) as error:
        if arguments:  # an attention function may have a default for every argument
            return target
        raise candidate_exception("import", f"calling the factory {name}", error) from None
    if callable(made) and not isinstance(made, Tensor):
        return made
    if arguments:
        return target
    expected = f"Expected {name} to return a class, module or function, because it takes no arguments"
    raise CodeError("import", f"{expected}, got a {type(made).__name__}.")


# -- arguments and state ---------------------------------------------------------------------------


def find_part(outputs: list[Any], kept: Kept) -> Any:
    """Return the part of an earlier output that an argument refers to."""
    value = outputs[kept.call]
    for key in filter(None, kept.path.split(".")):
        if isinstance(value, Mapping):
            value = value[key]
        else:
            value = value[int(key)] if isinstance(value, list | tuple) else getattr(value, key)
    return value


def in_own_thread(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that makes each call in a new thread, in which its exceptions end too.

    After an error, PyTorch's compiler leaves context managers open, and a thread that closes them later
    can't use PyTorch any more.
    """

    def run(enables_grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raised = None
        try:
            with torch.set_grad_enabled(enables_grad):
                return function(*args, **kwargs)
        except Exception as error:
            raised = candidate_exception("call", f"calling {name}", error)
        gc.collect()
        raise raised

    def call(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run, torch.is_grad_enabled(), args, kwargs).result()

    return call


def cast_module(candidate: Any, call: Call) -> Any:
    """Return a copy of a module, rounded and cast; complex and integer buffers keep their dtype."""
    dtype, rounding = call.dtype, call.rounding
    if (dtype is None and rounding is None) or not isinstance(candidate, nn.Module):
        return candidate

    def cast(x: Tensor) -> Tensor:
        return x.to(rounding or x.dtype).to(dtype or x.dtype) if x.is_floating_point() else x

    module = copy.deepcopy(candidate)
    buffers = [{**each._buffers} for each in module.modules()] if call.buffers else []
    module._apply(cast)
    for each, before in zip(module.modules(), buffers, strict=False):
        for name, x in before.items():
            if x is not None and x.is_floating_point() and bool(x.any()):
                each._buffers[name] = x.to(call.buffers)
    return module


# -- backward, compiler, memory --------------------------------------------------------------------


def run_backward(
    output: Any, call: Call, passed: dict[str, Tensor], candidate: Any
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the gradients of arguments (`call.grads`) and of parameters, whose .grad is restored."""
    if call.cotangent is None:
        return {}, {}
    parameters = dict(candidate.named_parameters()) if isinstance(candidate, nn.Module) else {}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        first = next((tensor for _, tensor in iterate_tensors(top_tensors(output) or output)), None)
        if first is not None and first.requires_grad:
            torch.autograd.backward(first, call.cotangent.to(first))
        return (
            {path: to_tree(passed[path].grad) for path in call.grads},
            {name: to_tree(each.grad) for name, each in parameters.items() if each.requires_grad},
        )
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def reset_peak() -> int | None:
    """Reset the peak of resident memory, and return its current size in bytes; None except on Linux."""
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc returns freed memory to the system
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the only way to reset it
        read_peak()
        return int(psutil.Process().memory_info().rss)
    except (OSError, IndexError):
        return None


def read_peak() -> int:
    """Return the peak of resident memory in bytes (VmHWM), which psutil doesn't give on Linux."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
