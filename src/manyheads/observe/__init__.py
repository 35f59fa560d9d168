"""`observe`: the attention maps of a model that runs, ours or anyone's.

    with manyheads.observe(model) as seen:
        model(**inputs)
    seen["layers.3.attn"].entropy()

Every module of the model says when it runs (`watch`); attention calls are met on their way (`routes`,
`huggingface`, and our own), and what was computed is kept beside the module's path (`seen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from manyheads import functional, reductions
from manyheads.observe.here import attend, without
from manyheads.observe.recorder import Watch, listed, removable
from manyheads.observe.recording import NoSuchLayer, Seen, Table, open_run
from manyheads.observe.summaries import BY_MASK, USUAL, Reduced
from manyheads.shapes import DTYPES, kind, most_bytes, whole

__all__ = ["NoSuchLayer", "Reduced", "Seen", "Table", "attend", "observe", "open_run"]

functional.onlooker, functional.remover = attend, without


@contextmanager
def observe(
    model: nn.Module,
    *,
    keep: str | Sequence[str] | Mapping[str, Any] = "maps",
    layers: str | int | Sequence[str | int] | None = None,
    heads: int | Sequence[int] | None = None,
    max_bytes: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    without: Sequence[tuple[str | int, int]] = (),
) -> Iterator[Seen]:
    """Record the attention maps of a model while the block runs; its outputs stay what they are.

    Seen are calls of `scaled_dot_product_attention`, `nn.MultiheadAttention` and what is built on it,
    Hugging Face models, and our own layers, on any thread. The model's own kernel computes its output;
    a log-sum-exp is computed when it is first needed. Compiled models run as they were written.

    Args:
        keep: "maps" keeps q and k of every call; "statistics" reduces each call at once and keeps
            nothing else: entropy, distance, row_max, received and the measures that need no tokens. Names of
            statistics, or a mapping from names to arguments as `AttentionMap.statistics` takes them,
            say which: `keep={"entropy": (), "top": 8}`.
        layers: which modules, by path, by a part of it, or by number in order of first call.
        heads: which query heads.
        max_bytes: the bytes that maps may hold together, at most.
        device, dtype: where and in which precision q and k are kept, e.g. "cpu", torch.float16.
        without: (layer, head) pairs whose contribution is removed, to see what they were for.

    Yields:
        `Seen`, an ordered mapping from paths of attention modules to maps.

    Raises:
        TypeError, ValueError: for what can't be observed, for names that aren't there, and at the end
            of the block if no forward ran or no attention was seen.
        MemoryError: from the model's call that would exceed max_bytes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"observe takes a torch.nn.Module, and {kind(model)} came.")
    scripted = next(
        (path for path, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)), None
    )
    if scripted is not None:
        raise TypeError(
            f"{scripted or type(model).__name__} is a TorchScript module, whose calls can't be met: observe "
            "the model that it was made from."
        )
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, and {dtype!r} came.")
    kept = _kept(keep)
    if kept is not None and (device is not None or dtype is not None):
        raise ValueError('device= and dtype= say how maps are kept, and keep="statistics" keeps none.')
    chosen = listed(heads, "heads", "head numbers")
    for head in chosen or ():
        whole(head, "a head in heads", least=-(1 << 30))
    seen = Seen({"model": _name(model)})
    watch = Watch(
        model,
        seen,
        keep=kept,
        layers=listed(layers, "layers", "paths or numbers of layers"),
        heads=chosen,
        max_bytes=None if max_bytes is None else most_bytes(max_bytes),
        store=[place for place in (device, dtype) if place is not None],
        without=removable(without),
    )
    with watch.standing():
        yield seen
    watch.account()


def _kept(keep: Any) -> dict[str, Any] | None:
    """The statistics to keep, with their arguments; None for maps."""
    if keep == "maps":
        return None
    if isinstance(keep, str):
        if keep != "statistics":
            raise ValueError(f'keep must be "maps", "statistics" or names of statistics, and {keep!r} came.')
        keep = USUAL
    if not isinstance(keep, Sequence | Mapping):
        raise TypeError(f'keep must be "maps", "statistics" or names of statistics, and {kind(keep)} came.')
    asked = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(keep, ())
    if not asked:
        raise ValueError('keep must be "maps", "statistics" or names of statistics, and no name came.')
    for name, given in asked.items():
        if name not in reductions.BY_NAME and name not in BY_MASK:
            raise ValueError(
                f"there is no statistic {name!r} to keep, but {', '.join((*reductions.BY_NAME, *BY_MASK))}."
            )
        if name in BY_MASK and given != ():
            raise TypeError(f"{name} takes no arguments, and {given!r} came.")
        if name in reductions.BY_NAME:
            for one in given if isinstance(given, list) else [given]:
                reductions.make(name, one)
    return asked


def _name(model: nn.Module) -> str:
    """What a model is called: where it was loaded from, if it says so, else its class."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_name_or_path", "") or type(model).__name__)
