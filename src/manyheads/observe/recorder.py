"""One observation: hooks on a model's modules, and what to keep of the attention calls they meet."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.maps import AttentionMap
from manyheads.observe import fastpath as fused
from manyheads.observe import here
from manyheads.observe.recording import Call, Seen, near, within
from manyheads.observe.summaries import Reduced
from manyheads.scores import Problem
from manyheads.shapes import amount, kind, whole

COMPILED = "_orig_mod"  # what torch.compile puts into the paths of a model's modules


class Watch:
    """What one `observe` wants of a model, and the hooks that serve it."""

    def __init__(
        self,
        model: nn.Module,
        seen: Seen,
        *,
        keep: Mapping[str, Any] | None,
        layers: Sequence[str | int] | None,
        heads: Sequence[int] | None,
        max_bytes: int | None,
        store: Sequence[torch.device | str | torch.dtype],
        without: Sequence[tuple[str | int, int]],
    ) -> None:
        self.model, self.seen, self.keep = model, seen, keep
        self.layers, self.heads, self.max_bytes, self.store = layers, heads, max_bytes, store
        self.modules = [(_plain(path), module) for path, module in model.named_modules()]
        self.paths, self.at = [path for path, _ in self.modules], dict(self.modules)
        self.without = [(self._path(layer), whole(head, "a head in without")) for layer, head in without]
        for layer in layers or ():
            self._path(layer)
        self.met: dict[str, int] = {}  # paths of attention modules, in order of first call: their heads
        self.ran = self.closed = False
        self.active = 0  # modules that run now, on all threads
        self.strays = 0  # attention calls on threads where none does
        self.ends: list[Any] = []  # the hooks that say when a module ends
        self.lock = threading.RLock()

    # -- what is wanted ----------------------------------------------------------------------------

    def _path(self, layer: str | int) -> str | int:
        """A layer as it was named, if the model has a module that it could be."""
        if isinstance(layer, int) and not isinstance(layer, bool):
            return whole(layer, "a layer's number, counted in order of first call,")
        if not isinstance(layer, str):
            raise TypeError(f"a layer is named by a module's path or by a number, and {layer!r} came.")
        if not within(layer, self.paths):
            raise ValueError(f"the model has no module {layer!r}{near(layer, self.paths)}.")
        return layer

    def _is(self, layer: str | int, path: str) -> bool:
        if isinstance(layer, int):
            met = list(self.met)
            return layer == (met.index(path) if path in self.met else len(met))
        return path in within(layer, self.paths)

    def _wanted(self, path: str) -> bool:
        return self.layers is None or any(self._is(layer, path) for layer in self.layers)

    def removes(self, path: str) -> bool:
        """Is a head of this module to be removed?"""
        return any(self._is(layer, path) for layer, _ in self.without)

    def removed(self, path: str, h: int) -> list[int]:
        """The heads of this module that are to be removed; ValueError for one that it doesn't have."""
        gone = [head for layer, head in self.without if self._is(layer, path)]
        for head in gone:
            if head >= h:
                raise ValueError(
                    f"{self._name(path)} has {h} heads, 0 to {h - 1}, and without= names head {head}."
                )
        return gone

    # -- what is met -------------------------------------------------------------------------------

    def record(self, path: str, problem: Problem, lse: Tensor | None) -> None:
        """Keep what is wanted of an attention call."""
        with self.lock, torch.no_grad():
            self.met.setdefault(path, problem.shape.h)
            if not self._wanted(path):
                return
            where = {"model": type(self.model).__name__, "layer": path}
            amap = AttentionMap.of(problem, lse, provenance=where)
            if self.heads is not None:
                for head in self.heads:
                    if not -problem.shape.h <= head < problem.shape.h:
                        raise ValueError(
                            f"{self._name(path)} has {problem.shape.h} heads, and heads= names head {head}."
                        )
                amap = amap.only(heads=self.heads)
            k = amap.problem.k
            if self.keep is None:
                for place in self.store:
                    amap = amap.to(place)
                # Numbers of its own: the model may write into these again, a cache of a fixed size does,
                # and in inference mode nobody counts it.
                call: Call = amap.compact(always=True)
            else:
                call = Reduced.of(amap, self.keep)
            self.seen.add(path, call, k)
            if self.max_bytes is not None and self.seen.nbytes > self.max_bytes:
                raise MemoryError(
                    f"what was seen up to {self._name(path)} holds {amount(self.seen.nbytes)}, and max_bytes "
                    f"is {amount(self.max_bytes)}: name fewer layers= or heads=, store less "
                    '(dtype=torch.float16), or keep="statistics".'
                )

    def note(self, path: str, scores: Tensor) -> None:
        """A module took a softmax by itself: of `[b, h, t, s]`, or of `[b, t, s]` where its name says so."""
        if scores.dim() > 3 or (scores.dim() == 3 and _sounds(self.at[path])):
            with self.lock:
                self.seen.missed.setdefault(path, tuple(scores.shape))

    def _name(self, path: str) -> str:
        """A module's path in a sentence; the model itself has none."""
        return path or type(self.model).__name__

    # -- hooks -------------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Hooks on every module, while the block runs; and what the model's library needs beside them."""
        with ExitStack() as stack:
            if "transformers" in sys.modules:
                from manyheads.observe import transformers as huggingface

                if huggingface.present(self.model):
                    stack.enter_context(huggingface.attached(self.model))
            stack.enter_context(here.overheard(self))
            stack.callback(self._close)
            for path, module in self.modules:
                for handle in self._hooks(path, module):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, path: str, module: nn.Module) -> Iterable[Any]:
        def begin(running: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # A copy of the model takes its hooks along, and is another model; a replica for one pass isn't.
            if running is module or getattr(running, "_is_replica", False):
                if fused.able(running):  # it would say that its fast path, which takes them, isn't taken
                    for x in (*args, *kwargs.values()):
                        if isinstance(x, Tensor) and x.is_nested:
                            here.check(x, f"the input of {self._name(path)}")
                self.ran = True
                here.enter(self, path)

        def end(running: nn.Module, args: Any, out: Any) -> None:
            here.leave(self, path)
            self._drop_ends()

        yield module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        if fused.able(module):
            yield module.register_forward_hook(self._as_fused(path), with_kwargs=True)
        self.ends.append(module.register_forward_hook(end, always_call=True))

    def _close(self) -> None:
        """The block is over: nothing more is recorded, though another thread's forward may still run."""
        self.closed = True
        here.forget(self)
        self._drop_ends()

    def _drop_ends(self) -> None:
        if self.closed and self.active <= 0:
            for handle in self.ends:
                handle.remove()

    def _as_fused(self, path: str) -> Callable[..., Any]:
        """A hook that gives one of PyTorch's layers the output that its fused path gives: see `fused`."""

        def again(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            above = [other for one, other in self.modules if one != path and here.runs(self, one)]
            if not fused.takes(module) or any(fused.takes(one) and not self._touched(one) for one in above):
                return None  # or what is above it does this for it
            if self._touched(module):
                if fused.leaves_padding_out(module, args, kwargs):
                    raise ValueError(
                        f"{self._name(path)} leaves padding out, and can't be observed with other hooks or a "
                        "head removed: build it with enable_nested_tensor=False, or observe it in training."
                    )
                return None
            with here.unseen():
                return fused.bare(module)(*args, **kwargs)

        return again

    def _touched(self, module: nn.Module) -> bool:
        """Does somebody change what it computes: by a hook, or by removing a head?"""
        below = {id(one) for one in module.modules()}
        inside = [path for path, one in self.modules if id(one) in below and path in self.met]
        return fused.hooked(module) or any(map(self.removes, inside))

    # -- the end -----------------------------------------------------------------------------------

    def account(self) -> None:
        """Raise where nothing was seen, or not what was asked for."""
        from manyheads.observe.intercept import LOOKED_FOR

        if not self.ran:
            raise ValueError("no forward of the model ran inside observe(...): call it there, model(inputs).")
        if self.strays:
            warnings.warn(
                f"{self.strays} attention calls ran on threads where no module of the model did, so whose "
                "they are can't be told, and they weren't recorded: call modules there, not functions.",
                stacklevel=4,
            )
        if not self.met:
            alike = [f"{self._name(path)} ({type(m).__name__})" for path, m in self.modules if _sounds(m)]
            hint = (
                f" Modules that sound like it compute it by themselves: {', '.join(alike[:4])}."
                if alike
                else ""
            )
            raise ValueError(
                f"{type(self.model).__name__} ran, and no attention was seen: {LOOKED_FOR} were looked "
                f"for.{hint}"
            )
        if self.seen.missed:
            missed = [f"{self._name(path)} {list(shape)}" for path, shape in self.seen.missed.items()]
            some = ", ".join(missed[:4]) + (", …" if len(missed) > 4 else "")
            warnings.warn(
                f"modules took a softmax that is no attention call, which may be attention written out by "
                f"hand, and isn't seen: {some}.",
                stacklevel=4,
            )
        named = [("layers", layer) for layer in self.layers or ()] + [
            ("without", one) for one, _ in self.without
        ]
        for option, layer in named:
            if not any(self._is(layer, path) for path in self.met):
                raise ValueError(
                    f"{option} names {layer!r}, where no attention was seen{near(str(layer), self.met)}."
                )


def _sounds(module: nn.Module) -> bool:
    """Does it sound like attention?"""
    name = type(module).__name__.lower()
    return "atten" in name or "head" in name


def _plain(path: str) -> str:
    """A module's path as it would be if nothing were compiled."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def removable(without: Any) -> list[tuple[str | int, int]]:
    """The pairs (layer, head) of `without=`, checked."""
    pairs = list(without) if isinstance(without, Iterable) and not isinstance(without, str) else [without]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f'without= takes pairs (layer, head) such as ("layers.3.attn", 5), and {pair!r} came.'
            )
    return pairs


def listed(value: Any, option: str, what: str) -> list[Any] | None:
    """A list of layers or heads; one alone will do; None is all."""
    if value is None:
        return None
    values = [value] if isinstance(value, str | int) else value
    if not isinstance(values, Iterable) or isinstance(values, Tensor):
        raise TypeError(f"{option}= takes {what}, and {kind(value)} came.")
    chosen = list(values)
    if not chosen:
        raise ValueError(f"{option}= takes {what}, None for all, and an empty list came.")
    return chosen
