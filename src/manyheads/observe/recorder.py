"""`Recorder`: attaches hooks to the modules of a model, and records their attention calls."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import patches
from manyheads.maps import AttentionMap
from manyheads.observe import fastpath, intercept, transformers
from manyheads.observe.recording import Recording, close_matches, paths_within
from manyheads.observe.summaries import Reduced
from manyheads.patches import finding
from manyheads.problem import Problem
from manyheads.shapes import amount, whole

COMPILED = "_orig_mod"  # the name that torch.compile adds to the paths of a model's modules


@dataclass(eq=False)
class Recorder:
    """Records the attention calls of a model, with the options of `observe`."""

    model: nn.Module
    recording: Recording
    keep: Mapping[str, Any] | None  # statistics; None for maps
    layers: Sequence[str | int] | None
    heads: Sequence[int] | None
    max_bytes: int | None
    store: Sequence[torch.device | str | torch.dtype]
    ablate: Sequence[tuple[str | int, int]]
    statistics: Mapping[str, Any] | None = None  # to compute together with the output
    attended: dict[str, int] = field(default_factory=dict)  # head counts by path, in order of first call
    ran: bool = False
    closed: bool = False
    active: int = 0  # number of observed modules that are running, on all threads
    strays: int = 0  # number of attention calls on threads without a running module
    end_hooks: list[Any] = field(default_factory=list)
    located: dict[str, patches.Located | str] = field(
        default_factory=dict
    )  # or why there are none, by module
    # The number of the next picture, by layers that call attention for each.
    turns: dict[str, int] = field(default_factory=dict)
    pixels: tuple[int, ...] | None = None  # the shape of the last pixels that a module read
    lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.modules = {_uncompiled(path): module for path, module in self.model.named_modules()}
        for layer, head in self.ablate:
            self._check_layer(layer)
            whole(head, "a head in ablate")
        for layer in self.layers or ():
            self._check_layer(layer)

    # -- which layers and heads --------------------------------------------------------------------

    def _check_layer(self, layer: str | int) -> None:
        """Check that a layer is a number, or names a module of the model."""
        if isinstance(layer, bool) or not isinstance(layer, int | str):
            raise TypeError(f"Expected a layer to be a module's path or a number, got {layer!r}.")
        if isinstance(layer, int):
            whole(layer, "a layer's number, counted in order of first call,")
        elif not paths_within(layer, self.modules):
            raise ValueError(f"The model has no module {layer!r}{close_matches(layer, self.modules)}.")

    def _matches(self, layer: str | int, path: str) -> bool:
        if isinstance(layer, str):
            return path in paths_within(layer, self.modules)
        attended = list(self.attended)
        return layer == (attended.index(path) if path in self.attended else len(attended))

    def ablated(self, path: str, h: int) -> list[int]:
        """Return which of a module's h heads to ablate."""
        heads = []
        for layer, head in self.ablate:
            if self._matches(layer, path):
                if head >= h:
                    raise ValueError(
                        f"{self._name(path)} has {h} heads, and ablate= names head {head}. Use 0 to {h - 1}."
                    )
                heads.append(head)
        return heads

    # -- recording ---------------------------------------------------------------------------------

    def record(
        self, path: str, problem: Problem, lse: Tensor | None, computed: Mapping[Any, Any] | None = None
    ) -> None:
        """Record an attention call of a module if its layer is to be recorded.

        computed: Statistics that were computed together with the output, by the keys of their reductions.
        """
        with self.lock, torch.no_grad():
            self.attended.setdefault(path, problem.shape.h)
            if self.layers is not None and not any(self._matches(layer, path) for layer in self.layers):
                return
            words = self.recording.words
            h = problem.shape.h
            for head in self.heads or ():
                if not -h <= head < h:
                    raise ValueError(
                        f"{self._name(path)} has {h} heads, and heads= names head {head}. Use 0 to {h - 1}."
                    )
            if self.keep is None and words is None:
                # Copy q and k, because a model may overwrite them, as a static KV cache does. Tensors in
                # inference mode have no version counter by which this could be detected.
                problem = replace(problem, q=problem.q.clone(), k=problem.k.clone())
            provenance = {"model": type(self.model).__name__, "layer": path, **self._patches(path, problem)}
            value_norm = _value_norm(problem.v) if self.keep is None and words is None else None
            amap = AttentionMap.of(problem, lse, provenance=provenance, value_norm=value_norm)
            amap = amap if self.heads is None else amap.only(heads=self.heads)
            k = amap.problem.k
            if words is not None:
                with intercept.paused():
                    words.add(path, self.modules[path], amap)
                self._check_size(path)
                return
            if self.keep is None:
                amap = amap.compact()
                for target in self.store:
                    amap = amap.to(target)
                if computed and self.heads is None and not self.store:
                    amap = amap.keeping(computed)
            self.recording.add(path, amap if self.keep is None else Reduced.of(amap, self.keep), k)
            self._check_size(path)

    def _check_size(self, path: str) -> None:
        if self.max_bytes is not None and self.recording.nbytes > self.max_bytes:
            raise MemoryError(
                f"The recording up to {self._name(path)} takes {amount(self.recording.nbytes)}, and "
                f"max_bytes is {amount(self.max_bytes)}. Record fewer layers= or heads=, or use "
                'dtype=torch.float16 or keep="statistics".'
            )

    def _patches(self, path: str, problem: Problem) -> dict[str, Any]:
        """Return the provenance of patches: those that the innermost module around a layer has located."""
        owner = max((name for name in self.located if is_within(path, name)), key=len, default=None)
        if owner is None:
            return {}
        located = self.located[owner]
        number = {}
        if not isinstance(located, str) and finding.calls_for_each(self.modules[owner]):
            n = self.turns.get(path, 0)
            self.turns[path] = n + 1
            located, number = [located[0][n : n + 1]], {"picture_number": n}
        if not isinstance(located, str):
            stop = max((each.stop for pictures in located for each in pictures), default=0)
            fits = len(located) in (1, problem.shape.b) and 0 < stop <= problem.shape.s
            if not fits:  # another sequence than that of the patches
                return {}
        return {"patches": patches.pack(located), **number}

    def _locate_patches(self, path: str, module: nn.Module, named: dict[str, Any]) -> None:
        """Find the patches of the picture that a module reads, if it is a known model of pictures."""
        try:
            inputs = finding.Inputs.of(named)
        except (AttributeError, TypeError, ValueError) as error:  # they aren't those of transformers' models
            self.located[path] = f"The inputs of {self._name(path)} can't be read: {error}."
            return
        if inputs.pixels is not None:
            self.pixels = inputs.pixels
        elif inputs.grids is None:
            if inputs.ids is None or inputs.earlier:
                return  # a part of a model, or a later step of a generation
            inputs = inputs._replace(pixels=self.pixels)  # `generate` has encoded the pictures before
        self.turns = {layer: n for layer, n in self.turns.items() if not is_within(layer, path)}
        try:
            located = finding.locate(module, inputs, towers=False)
        except ValueError as error:
            self.located[path] = str(error)
        else:
            unknown = f"{self._name(path)} isn't a known model of pictures. {patches.places.GIVE}"
            self.located[path] = unknown if located is None else located
            for reader in finding.find_readers(path, module, self.modules):  # no query of it is a patch
                self.located[reader] = [[replace(each, special=()) for each in one] for one in located or []]

    def note_softmax(self, path: str, scores: Tensor) -> None:
        """Note a softmax outside of attention calls if its input may be scores `[b, h, t, s]`."""
        if scores.dim() > 3 or (scores.dim() == 3 and _is_named_like_attention(self.modules[path])):
            with self.lock:
                self.recording.missed.setdefault(path, tuple(scores.shape))

    def _name(self, path: str) -> str:
        return path or type(self.model).__name__

    # -- hooks -------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach hooks to every module, and intercept the attention functions of transformers' models."""
        with ExitStack() as stack:
            if "transformers" in sys.modules and transformers.is_from_transformers(self.model):
                stack.enter_context(transformers.attached(self.model))
            stack.enter_context(intercept.intercepting(self))
            stack.callback(self._close)
            for path, module in self.modules.items():
                for handle in self._hooks(path, module):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, path: str, module: nn.Module) -> Iterable[Any]:
        has_fastpath = fastpath.has_fastpath(module)
        inputs = finding.read_parameters(module)  # None if it doesn't read pictures

        def begin(running: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # A deep copy of the model has the same hooks but isn't observed. A replica of DataParallel is.
            if running is module or getattr(running, "_is_replica", False):
                if has_fastpath:  # its own error for nested tensors would be misleading
                    for x in (*args, *kwargs.values()):
                        if isinstance(x, Tensor) and x.is_nested:
                            intercept.check_readable(self._name(path), input=x)
                self.ran = True
                intercept.enter(self, path)
                if self.recording.words is not None:
                    self.recording.words.enter(path, module, args, kwargs)
                if inputs is not None:
                    named = {**dict(zip(inputs, args, strict=False)), **kwargs}
                    with self.lock:
                        self._locate_patches(path, module, named)

        def end(running: nn.Module, args: Any, out: Any) -> None:
            intercept.leave(self, path)
            if self.recording.words is not None:
                self.recording.words.leave(path)
            if self.closed:
                self._remove_end_hooks()

        yield module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        if has_fastpath:
            yield module.register_forward_hook(self._fastpath_hook(path), with_kwargs=True)
        self.end_hooks.append(module.register_forward_hook(end, always_call=True))

    def _close(self) -> None:
        """Stop recording. A forward that still runs on another thread removes the end hooks when it ends."""
        self.closed = True
        intercept.forget(self)
        self._remove_end_hooks()

    def _remove_end_hooks(self) -> None:
        if self.active <= 0:
            for handle in self.end_hooks:
                handle.remove()

    def _fastpath_hook(self, path: str) -> Callable[..., Any]:
        """Return a hook that replaces a layer's output by that of its fast path (see `fastpath`)."""

        def recompute(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            is_within_another = any(  # the hook of the outer module recomputes this one too
                fastpath.is_taken(other) and not self._is_changed(other)
                for name, other in self.modules.items()
                if name != path and intercept.is_running(self, name)
            )
            if is_within_another or not fastpath.is_taken(module):
                return None
            if not self._is_changed(module):
                with intercept.paused():
                    return fastpath.without_hooks(module)(*args, **kwargs)
            if fastpath.skips_padding(module, args, kwargs):
                raise ValueError(
                    f"{self._name(path)} skips padding, and can't be observed with other hooks or an "
                    "ablated head. Build it with enable_nested_tensor=False, or observe it in training mode."
                )
            return None

        return recompute

    def _is_changed(self, module: nn.Module) -> bool:
        """Return True if a user's hook or an ablated head changes what the module computes."""
        inside = set(module.modules())
        paths = [path for path, part in self.modules.items() if part in inside and path in self.attended]
        is_ablated = any(self._matches(layer, path) for layer, _ in self.ablate for path in paths)
        return fastpath.has_other_hooks(module) or is_ablated

    # -- checks after the run ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the model or a named layer made no attention call; warn of calls that weren't recorded."""
        if not self.ran:
            raise ValueError(
                "The model wasn't called inside observe(...). Call model(inputs) there, not model.forward."
            )
        if self.strays:
            warnings.warn(
                f"{self.strays} attention calls ran on threads where no module of the model was running, so "
                "they belong to no layer and weren't recorded. Call modules on these threads, not functions.",
                stacklevel=4,
            )
        if not self.attended:
            similar = [
                f"{self._name(path)} ({type(module).__name__})"
                for path, module in self.modules.items()
                if _is_named_like_attention(module)
            ]
            names = ", ".join(similar[:4])
            hint = f" These modules may implement attention themselves: {names}." if similar else ""
            raise ValueError(
                f"{type(self.model).__name__} made no attention call that can be recorded. Supported calls: "
                f"{intercept.INTERCEPTED}.{hint}"
            )
        if self.recording.missed:
            missed = [f"{self._name(path)} {list(shape)}" for path, shape in self.recording.missed.items()]
            examples = ", ".join(missed[:4]) + (", …" if len(missed) > 4 else "")
            warnings.warn(
                "Modules computed a softmax outside of any attention call. It may be hand-written attention, "
                f"which isn't recorded: {examples}.",
                stacklevel=4,
            )
        for option, layers in (("layers", self.layers or ()), ("ablate", [pair[0] for pair in self.ablate])):
            for layer in layers:
                if not any(self._matches(layer, path) for path in self.attended):
                    raise ValueError(
                        f"{option} names {layer!r}, which made no attention call"
                        f"{close_matches(str(layer), self.attended)}."
                    )


def _value_norm(v: Tensor) -> Tensor | None:
    """Return the norms `[b, g, s]` of values `[b, g, s, w]` as float32; None for values of width 0."""
    if not v.shape[-1]:
        return None
    dtype = v.dtype if v.dtype == torch.float64 else torch.float32  # the sum would overflow in float16
    return torch.linalg.vector_norm(v, dim=-1, dtype=dtype).float()


def is_within(path: str, owner: str) -> bool:
    """Return True if a module is another one or a part of it."""
    return not owner or path == owner or path.startswith(f"{owner}.")


def _is_named_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "atten" in name or "head" in name


def _uncompiled(path: str) -> str:
    """Return a module's path without the parts that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != COMPILED)
