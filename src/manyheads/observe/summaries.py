"""`Reduced`: the statistics of a call, which keep="statistics" records in place of its map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyheads import statistics, storage
from manyheads.maps import AttentionMap, Tokens, labels_of
from manyheads.measures import MAP_MASKS
from manyheads.shapes import kind, whole
from manyheads.statistics import TopKeys

STANDARD = ("entropy", "distance", "row_max", "received", *MAP_MASKS)


@dataclass(frozen=True, eq=False, repr=False)
class Reduced:
    """Statistics of one attention call, without its weights.

    It has the methods of `AttentionMap` whose statistics were kept: `entropy()`, `received()`, `top(8)`, …,
    with results of the same shapes (`[b, h, t]`, …). The error of any other statistic lists those.

    Attributes:
        shape: `(b, h, t, s)` of the call.
        heads: The numbers of its heads in the model.
        offset: The position of row 0, an int or one per sequence `[b]`.
        arguments: The statistics by name, with their arguments.
        values: Their results, by name.
        has_keys: Whether a query may attend to any key, `[b, h, t]`.
        shares_keys: For each head score, whether a query may attend to a key of its mask, `[b, h, t]`.
        tokens, provenance: Those of the map.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    offset: int | Tensor
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]
    has_keys: Tensor
    shares_keys: Mapping[str, Tensor]
    tokens: Tokens | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, amap: AttentionMap, arguments: Mapping[str, Any]) -> Reduced:
        """Return statistics of a map, by name and with arguments as in `AttentionMap.statistics`.

        Raises its ValueError or TypeError.
        """
        streamed = {name: given for name, given in arguments.items() if name not in MAP_MASKS}
        values: dict[str, Any] = amap.statistics(**streamed)
        shares_keys: dict[str, Tensor] = {}
        for name in arguments:
            if name in MAP_MASKS:
                values[name], shares_keys[name] = amap.masses(MAP_MASKS[name](amap))
        return cls(
            amap.shape,
            amap.heads,
            amap.problem.offset,
            dict(arguments),
            values,
            statistics.first_keys(amap.problem) < amap.shape[3],
            shares_keys,
            amap.tokens,
            amap.provenance,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (*statistics.BY_NAME, *MAP_MASKS):
            raise AttributeError(f"Reduced has no attribute {name!r}.")
        if name not in self.values:
            raise ValueError(
                f"{name} of {self._layer()} wasn't kept, but {', '.join(self.values)}. Use "
                f'observe(..., keep=[..., "{name}"]) or keep="maps".'
            )
        return lambda *args, **kwargs: self._value(name, args or kwargs or ())

    def _value(self, name: str, given: Any) -> Any:
        """Return a statistic, checked to have been kept with these arguments."""
        if name in MAP_MASKS:
            return self.columns()[name]
        kept = self.arguments[name]
        same = given in (kept, (kept,), ())
        if not isinstance(kept, list):  # a list of results is returned as a whole
            same = same or statistics.arguments(name, given) == statistics.arguments(name, kept)
        if not same:
            raise ValueError(
                f"{name} of {self._layer()} was kept with the arguments {kept!r}, got {given!r}."
            )
        return self.values[name]

    def columns(self) -> dict[str, Tensor]:
        """Return the scores of a table, each `[b, h]`: means over queries (entropy in nats)."""
        names = [name for name in (*MAP_MASKS, "entropy", "distance") if name in self.values]
        return {
            name: mean_where(self.values[name], self.shares_keys.get(name, self.has_keys)) for name in names
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, each in the shape of its statistic (`[b, h, t]`, …)."""
        return list(self._tensors().values())

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> Reduced:
        """Return the statistics with labels of the keys; raises as `AttentionMap.labelled` does."""
        b, _, _, s = self.shape
        return replace(self, tokens=None if tokens is None else labels_of(tokens, b, s))

    def followed_by(self, later: Reduced) -> Reduced | None:
        """Return this step and a later one as one call, or None if a statistic can't be joined."""
        if later.arguments != self.arguments or later.heads != self.heads:
            return None
        values: dict[str, Any] = {}
        for name, old in self.values.items():
            new = later.values[name]
            if isinstance(old, TopKeys):
                values[name] = TopKeys(*(torch.cat(pair, 2) for pair in zip(old, new, strict=True)))
            elif name in MAP_MASKS or statistics.BY_NAME[name].per_query:
                values[name] = torch.cat((old, new), 2)
            elif name == "received" and self.arguments[name] == ():
                values[name] = new + torch.nn.functional.pad(old, (0, new.shape[2] - old.shape[2]))
            elif name == "logits_max":
                values[name] = torch.maximum(old, new)
            else:
                return None
        b, h, t, _ = self.shape
        return replace(
            self,
            shape=(b, h, t + later.shape[2], later.shape[3]),
            values=values,
            has_keys=torch.cat((self.has_keys, later.has_keys), 2),
            shares_keys={
                name: torch.cat((x, later.shares_keys[name]), 2) for name, x in self.shares_keys.items()
            },
            tokens=None,
        )

    # -- files (docs/format.md) --------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Return every tensor by a name that says where it belongs."""
        found: dict[str, Tensor] = {}
        for name, value in self.values.items():
            several = isinstance(value, list)
            for n, part in enumerate(value if several else [value]):
                place = f"{name}.{n}" if several else name
                if isinstance(part, TopKeys):
                    found |= {f"{place}.weights": part.weights, f"{place}.keys": part.keys}
                else:
                    found[place] = part
        found |= {f"{name}.could": x for name, x in self.shares_keys.items()}
        return found | {"sees": self.has_keys}

    def stored(self) -> storage.Kept:
        """Return what a file has of it; ValueError where an argument, such as a mask, can't be written."""
        if not isinstance(self.offset, int):
            raise ValueError(
                'Statistics of a call with one offset per sequence can\'t be saved: use keep="maps".'
            )
        plain = {
            "shape": list(self.shape),
            "heads": list(self.heads),
            "offset": self.offset,
            "asked": {name: _encode(name, given) for name, given in self.arguments.items()},
            "provenance": dict(self.provenance),
        }
        return storage.Kept(self._tensors(), plain, self.tokens)

    @classmethod
    def restored(cls, kept: storage.Kept) -> Reduced:
        """Return the summary in a file; ValueError if its parts don't fit together."""
        tensors = dict(kept.tensors)
        try:
            plain = kept.plain
            b, h, t, s = (whole(n, "a size") for n in plain["shape"])
            fits = all(x.shape[:2] == (b, h) for x in tensors.values())
            has_keys = tensors.pop("sees")
            arguments = {name: _decode(given) for name, given in plain["asked"].items()}
            shares_keys = {name: tensors.pop(f"{name}.could") for name in arguments if name in MAP_MASKS}
            values = {name: _take(name, given, tensors) for name, given in arguments.items()}
            heads = tuple(whole(n, "a head") for n in plain["heads"])
            tokens = None if kept.tokens is None else labels_of(kept.tokens, b, s)
            offset = whole(plain["offset"], "an offset", least=-(1 << 60))
            if tensors or not fits or len(heads) != h:
                raise ValueError("its tensors don't fit its sizes")
            provenance = dict(plain["provenance"])
            return cls(
                (b, h, t, s), heads, offset, arguments, values, has_keys, shares_keys, tokens, provenance
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"The statistics in the file can't be read: {error}.") from None

    def _layer(self) -> str:
        return str(self.provenance.get("layer") or "this call")

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        return f"Reduced([b={b}, h={h}, t={t}, s={s}], {', '.join(self.values)})"


Call = AttentionMap | Reduced


def mean_where(x: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over the queries that count, `[b, h, t]` → `[b, h]`; 0 if none does."""
    return torch.where(counts, x, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)


def _encode(name: str, given: Any) -> Any:
    """Return arguments of a statistic as JSON, which tells a dict, a list of several and a tuple apart."""
    if isinstance(given, list):
        return {"several": [_encode(name, each) for each in given]}
    if isinstance(given, dict):
        return {"named": dict(given)}
    plain = list(given) if isinstance(given, tuple) else [given]
    for value in plain:
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(
                f'{name} was kept with {kind(value)}, which a file can\'t hold: use keep="maps".'
            )
    return {"plain": plain, "tuple": isinstance(given, tuple)}


def _decode(encoded: Mapping[str, Any]) -> Any:
    if "several" in encoded:
        return [_decode(each) for each in encoded["several"]]
    if "named" in encoded:
        return dict(encoded["named"])
    return tuple(encoded["plain"]) if encoded["tuple"] else encoded["plain"][0]


def _take(name: str, given: Any, tensors: dict[str, Tensor]) -> Any:
    """Take a statistic out of the tensors of a file."""
    if isinstance(given, list):
        return [_take(f"{name}.{n}", each, tensors) for n, each in enumerate(given)]
    if name.partition(".")[0] == "top":
        return TopKeys(tensors.pop(f"{name}.weights"), tensors.pop(f"{name}.keys"))
    return tensors.pop(name)
