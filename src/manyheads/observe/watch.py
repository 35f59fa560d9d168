"""One observation: hooks on a model's modules, and what to keep of the attention calls they meet."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.maps import AttentionMap
from manyheads.observe import here
from manyheads.observe.reduced import Reduced
from manyheads.observe.seen import Seen, near, within
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
        self.paths = [path for path, _ in self.modules]
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
                raise ValueError(f"{path} has {h} heads, 0 to {h - 1}, and without= names head {head}.")
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
                        raise ValueError(f"{path} has {problem.shape.h} heads, and heads= names head {head}.")
                amap = amap.only(heads=self.heads)
            if self.keep is not None:
                self.seen.add(path, Reduced.of(amap, self.keep), amap.problem.k)
                return
            k = amap.problem.k
            for place in self.store:
                amap = amap.to(place)
            self._afford(path, amap)
            # In inference mode nobody counts changes in place: there a map needs numbers of its own.
            amap = amap.compact(always=k.is_inference())
            self.seen.add(path, amap, k)

    def _afford(self, path: str, amap: AttentionMap) -> None:
        total = self.seen.nbytes + amap.nbytes
        if self.max_bytes is not None and total > self.max_bytes:
            raise MemoryError(
                f"the maps seen so far hold {amount(self.seen.nbytes)}, that of {path} would make it "
                f"{amount(total)}, and max_bytes is {amount(self.max_bytes)}: name fewer layers= or "
                'heads=, store less (dtype=torch.float16), or keep="statistics".'
            )

    # -- hooks -------------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Hooks on every module, while the block runs; and what the model's library needs beside them."""
        with ExitStack() as stack:
            if "transformers" in sys.modules:
                from manyheads import huggingface

                if huggingface.present(self.model):
                    stack.enter_context(huggingface.attached(self.model))
            stack.enter_context(here.overheard(self))
            stack.callback(self._close)
            for path, module in self.modules:
                for handle in self._hooks(path, module):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, path: str, module: nn.Module) -> Iterable[Any]:
        def begin(running: nn.Module, args: Any) -> None:
            # A copy of the model takes its hooks along, and is another model; a replica for one pass isn't.
            if running is module or getattr(running, "_is_replica", False):
                self.ran = True
                here.enter(self, path)

        def end(running: nn.Module, args: Any, out: Any) -> None:
            here.leave(self, path)
            self._drop_ends()

        yield module.register_forward_pre_hook(begin, prepend=True)
        if _fusable(module):
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
        """A hook that gives a module the output which PyTorch's fused inference gives it without hooks.

        In evaluation without gradients PyTorch's own layers take a path on which nobody can stand; an
        encoder even leaves padding out there, and gives zeros, or what its norm makes of them. So the
        output is computed once more, by the same modules without our hooks.
        """

        def again(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            inner = any(here.runs(self, one) for one, other in self.modules if one != path and _fuses(other))
            if inner or not _fuses(module):
                return None
            below = list(module.modules())
            leaves_out = isinstance(module, nn.TransformerEncoder) and getattr(
                module, "use_nested_tensor", False
            )
            padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
            padded = leaves_out and padding is not None
            removing = any(self.removes(one) for one, other in self.modules if any(other is x for x in below))
            foreign = any(_foreign(one) for one in below)
            if padded and (removing or foreign):
                what = "a head removed" if removing else "other hooks"
                raise ValueError(
                    f"{path or type(module).__name__} leaves padding out, and can't be observed with {what}: "
                    "build it with enable_nested_tensor=False, or observe it in training."
                )
            if removing or foreign:
                return None
            with here.unseen():
                return _bare(module)(*args, **kwargs)

        return again

    # -- the end -----------------------------------------------------------------------------------

    def account(self) -> None:
        """Raise where nothing was seen, or not what was asked for."""
        from manyheads.observe.routes import LOOKED_FOR

        if not self.ran:
            raise ValueError("no forward of the model ran inside observe(...): call it there, model(inputs).")
        if self.strays:
            warnings.warn(
                f"{self.strays} attention calls ran on threads where no module of the model did, so whose "
                "they are can't be told, and they weren't recorded: call modules there, not functions.",
                stacklevel=4,
            )
        if not self.met:
            alike = [
                f"{path} ({type(m).__name__})"
                for path, m in self.modules
                if "atten" in type(m).__name__.lower()
            ]
            hint = (
                f" Modules that sound like it compute it by themselves: {', '.join(alike[:4])}."
                if alike
                else ""
            )
            raise ValueError(
                f"{type(self.model).__name__} ran, and no attention was seen: {LOOKED_FOR} were looked "
                f"for.{hint}"
            )
        named = [("layers", layer) for layer in self.layers or ()] + [
            ("without", one) for one, _ in self.without
        ]
        for option, layer in named:
            if not any(self._is(layer, path) for path in self.met):
                raise ValueError(
                    f"{option} names {layer!r}, where no attention was seen{near(str(layer), self.met)}."
                )


def _plain(path: str) -> str:
    """A module's path as it would be if nothing were compiled."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


FUSABLE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _fusable(module: nn.Module) -> bool:
    """Is it one of PyTorch's layers, with PyTorch's forward, that have a fused path?"""
    return any(isinstance(module, one) and type(module).forward is one.forward for one in FUSABLE)


def _fuses(module: nn.Module) -> bool:
    """Might PyTorch take that path with it now?"""
    if not _fusable(module):
        return False
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in module.parameters())
    one = next(iter(module.layers), module) if isinstance(module, nn.TransformerEncoder) else module
    return not one.training and not graph and torch.backends.mha.get_fastpath_enabled()


def _ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == __name__


def _foreign(module: nn.Module) -> bool:
    """Has somebody else put a hook on it?"""
    return not all(map(_ours, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def _bare(module: nn.Module) -> nn.Module:
    """The same modules, sharing all that they hold, without hooks."""
    bare = copy(module)
    children = {name: None if child is None else _bare(child) for name, child in module._modules.items()}
    bare.__dict__ |= {
        "_modules": children,
        "_forward_hooks": OrderedDict(),
        "_forward_pre_hooks": OrderedDict(),
    }
    return bare


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
    return list(values)
