"""What is left of a call under keep="statistics": numbers, and a sentence for what wasn't kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyheads import files, reductions
from manyheads.maps import AttentionMap, Tokens, labels_of
from manyheads.masks import Diagonal, Mask
from manyheads.reductions import TopKeys
from manyheads.shapes import kind, whole

# Measures that need no more than the map: each is the mean mass of a mask.
BY_MASK: dict[str, Callable[[AttentionMap], Mask]] = {
    "previous_token": lambda amap: Diagonal(-1),
    "current_token": lambda amap: Diagonal(0),
    "first_token": AttentionMap.first_key,
}
USUAL = ("entropy", "distance", "row_max", "received", *BY_MASK)
BY_ROW = ("entropy", "distance", "row_max", "sink_weight", "top")  # what steps of a generation append


@dataclass(frozen=True, eq=False, repr=False)
class Reduced:
    """Statistics of one attention call, all that was kept of it.

    It answers what was asked for when it was observed, in the words of `AttentionMap`: `entropy()`,
    `received()`, `top(8)`, …, each shaped as there (`[b, h, t]`, …); anything else raises a sentence. `shape`
    is `(b, h, t, s)`, `heads` are the numbers of its heads, `offset` is the position of row 0 (int or `[b]`).
    `asked` are the statistics by name, with their arguments, and `values` what they are; `sees` `[b, h, t]`
    says whether a query sees a key at all, `could` `[b, h, t]` by measure whether it shares one with its
    mask. `tokens` and `provenance` are the map's.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    offset: int | Tensor
    asked: Mapping[str, Any]
    values: Mapping[str, Any]
    sees: Tensor  # [b, h, t]
    could: Mapping[str, Tensor]  # [b, h, t] each
    tokens: Tokens | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, amap: AttentionMap, asked: Mapping[str, Any]) -> Reduced:
        """Reduce a map, amap, to what is asked for; ValueError or TypeError, as `AttentionMap.statistics`."""
        streamed = {name: given for name, given in asked.items() if name not in BY_MASK}
        values: dict[str, Any] = amap.statistics(**streamed)
        could: dict[str, Tensor] = {}
        for name in asked:
            if name in BY_MASK:
                values[name], could[name] = amap.masses(BY_MASK[name](amap))
        offset = amap.problem.offset
        sees = reductions.first_keys(amap.problem) < amap.shape[3]
        where = amap.tokens, amap.provenance
        return cls(amap.shape, amap.heads, offset, dict(asked), values, sees, could, *where)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (*reductions.BY_NAME, *BY_MASK):
            raise AttributeError(f"Reduced has no {name!r}.")
        if name not in self.values:
            raise ValueError(
                f"{name} wasn't kept of {self._where()}, but {', '.join(self.values)}: ask for it, "
                f'observe(..., keep=[..., "{name}"]), or keep="maps".'
            )
        return lambda *args, **kwargs: self._answer(name, args or kwargs or ())

    def _answer(self, name: str, given: Any) -> Any:
        if name in BY_MASK:
            return self.columns()[name]
        kept = self.asked[name]
        if not isinstance(kept, list) and reductions.arguments(name, given) == reductions.arguments(
            name, kept
        ):
            return self.values[name]
        if given not in (kept, (kept,), ()):
            raise ValueError(
                f"{name} of {self._where()} was kept with the arguments {kept!r}, and {given!r} came."
            )
        return self.values[name]

    def columns(self) -> dict[str, Tensor]:
        """What goes into a table, each `[b, h]`, means over queries: weights, entropy in nats, positions."""
        found = {name: mean(self.values[name], self.could[name]) for name in BY_MASK if name in self.values}
        rows = ("entropy", "distance")
        return found | {name: mean(self.values[name], self.sees) for name in rows if name in self.values}

    @property
    def nbytes(self) -> int:
        """The bytes that the numbers take."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor that it holds, each in the shape of its statistic: `[b, h, t]`, `[b, h, s]`, …"""
        return list(self._tensors().values())

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> Reduced:
        """The same with tokens, labels of its keys; TypeError or ValueError, as `AttentionMap.labelled`."""
        return replace(
            self, tokens=None if tokens is None else labels_of(tokens, self.shape[0], self.shape[3])
        )

    def followed_by(self, later: Reduced) -> Reduced | None:
        """The statistics of this step and a later one as one call; None where one can't be put together."""
        if later.asked != self.asked or later.heads != self.heads:
            return None
        values: dict[str, Any] = {}
        for name, old in self.values.items():
            new = later.values[name]
            if name == "top" and isinstance(old, TopKeys):
                values[name] = TopKeys(*(torch.cat(pair, 2) for pair in zip(old, new, strict=True)))
            elif name in BY_ROW or name in BY_MASK:
                values[name] = torch.cat((old, new), 2)
            elif name == "received" and self.asked[name] == ():
                values[name] = new + torch.nn.functional.pad(old, (0, new.shape[2] - old.shape[2]))
            elif name == "logits_max":
                values[name] = torch.maximum(old, new)
            else:
                return None
        could = {name: torch.cat((old, later.could[name]), 2) for name, old in self.could.items()}
        b, h, t, _ = self.shape
        shape = (b, h, t + later.shape[2], later.shape[3])
        sees = torch.cat((self.sees, later.sees), 2)
        return replace(self, shape=shape, values=values, sees=sees, could=could, tokens=None)

    # -- files -------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor under a name that says where it belongs."""
        found: dict[str, Tensor] = {}
        for name, value in self.values.items():
            for n, one in enumerate(value if isinstance(value, list) else [value]):
                place = f"{name}.{n}" if isinstance(value, list) else name
                top = isinstance(one, TopKeys)
                found |= {f"{place}.weights": one[0], f"{place}.keys": one[1]} if top else {place: one}
        return found | {f"{name}.could": x for name, x in self.could.items()} | {"sees": self.sees}

    def stored(self) -> files.Kept:
        """What a file holds of it; ValueError where an argument, such as a mask, can't be written."""
        if not isinstance(self.offset, int):
            raise ValueError("statistics of a call with one offset per sequence can't be saved: keep maps.")
        plain = {
            "shape": list(self.shape),
            "heads": list(self.heads),
            "offset": self.offset,
            "asked": {name: _plain(name, given) for name, given in self.asked.items()},
            "provenance": dict(self.provenance),
        }
        return files.Kept(self._tensors(), plain, self.tokens)

    @classmethod
    def restored(cls, kept: files.Kept) -> Reduced:
        """From what a file holds; ValueError where it doesn't fit together."""
        tensors = dict(kept.tensors)
        try:
            plain = kept.plain
            b, h, t, s = (whole(n, "a size") for n in plain["shape"])
            asked = {name: _given(given) for name, given in plain["asked"].items()}
            sees = tensors.pop("sees")
            could = {name: tensors.pop(f"{name}.could") for name in asked if name in BY_MASK}
            values = {name: _value(name, given, tensors) for name, given in asked.items()}
            fits = all(x.shape[:2] == (b, h) for x in (sees, *could.values(), *_flat(values)))
            heads = tuple(whole(n, "a head") for n in plain["heads"])
            labels = None if kept.tokens is None else labels_of(kept.tokens, b, s)
            offset = whole(plain["offset"], "an offset", least=-(1 << 60))
            if tensors or not fits or len(heads) != h:
                raise ValueError("its tensors don't fit its sizes")
            return cls(
                (b, h, t, s), heads, offset, asked, values, sees, could, labels, dict(plain["provenance"])
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"statistics in the file can't be read: {error}.") from None

    def _where(self) -> str:
        return str(self.provenance.get("layer") or "this call")

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        return f"Reduced([b={b}, h={h}, t={t}, s={s}], {', '.join(self.values)})"


def mean(x: Tensor, could: Tensor) -> Tensor:
    """The mean over those queries that could: `[b, h, t]` → `[b, h]`; 0 where none could."""
    return torch.where(could, x, 0.0).sum(-1) / could.sum(-1).clamp(min=1)


def _plain(name: str, given: Any) -> Any:
    """Arguments of a statistic as JSON keeps them apart: a dict, a list of several, or a tuple."""
    if isinstance(given, list):
        return {"several": [_plain(name, one) for one in given]}
    if isinstance(given, dict):
        return {"named": dict(given)}
    plain = list(given) if isinstance(given, tuple) else [given]
    for one in plain:
        if not isinstance(one, str | int | float | bool | None):
            raise ValueError(
                f"{name} was kept with {kind(one)}, which can't be written to a file: keep maps."
            )
    return {"plain": plain, "tuple": isinstance(given, tuple)}


def _given(plain: Mapping[str, Any]) -> Any:
    """The way back."""
    if "several" in plain:
        return [_given(one) for one in plain["several"]]
    if "named" in plain:
        return dict(plain["named"])
    return tuple(plain["plain"]) if plain["tuple"] else plain["plain"][0]


def _value(name: str, given: Any, tensors: dict[str, Tensor]) -> Any:
    """A statistic out of the tensors of a file, which it takes away from them."""
    if isinstance(given, list):
        return [_value(f"{name}.{n}", one, tensors) for n, one in enumerate(given)]
    if name.partition(".")[0] == "top":
        return TopKeys(tensors.pop(f"{name}.weights"), tensors.pop(f"{name}.keys"))
    return tensors.pop(name)


def _flat(values: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values.values():
        for one in value if isinstance(value, list) else [value]:
            found += one if isinstance(one, TopKeys) else [one]
    return found
