"""`Reduced`: the statistics of a call, which keep="statistics" records in place of its map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from manyheads import statistics, storage, trees
from manyheads.maps import AttentionMap, Tokens, labels_of
from manyheads.measures import SCORES
from manyheads.shapes import kind, whole
from manyheads.statistics import TopKeys

HEAD_SCORES = ("previous_token", "current_token", "first_token")  # of `measures.SCORES`
STANDARD = ("entropy", "distance", "row_max", "received", *HEAD_SCORES)  # of keep="statistics"


@dataclass(frozen=True, eq=False, repr=False)
class Reduced:
    """Statistics of one attention call, without its weights.

    It has the methods of `AttentionMap` whose statistics were kept: `entropy()`, `received()`, `top(8)`, …,
    with results of the same shapes (`[b, h, t]`, …). Calling any other raises an error that lists those kept.

    Attributes:
        shape: `(b, h, t, s)` of the call.
        heads: The numbers of its heads in the model.
        offset: The position of row 0, an int or one per sequence `[b]`.
        arguments: The statistics by name, with their arguments.
        values: Their results, by name.
        has_keys: Whether a query may attend to any key, `[b, h, t]`.
        has_score_keys: For each head score, whether a query has a visible key in its mask, `[b, h, t]`.
        tokens, provenance: Those of the map.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    offset: int | Tensor
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]
    has_keys: Tensor
    has_score_keys: Mapping[str, Tensor]
    tokens: Tokens | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, amap: AttentionMap, arguments: Mapping[str, Any]) -> Reduced:
        """Compute statistics and head scores of a map.

        Args:
            amap: The map.
            arguments: Their arguments by name, as in `AttentionMap.statistics`; () for a head score.

        Returns:
            The results.
        """
        streamed = {name: value for name, value in arguments.items() if name not in HEAD_SCORES}
        values: dict[str, Any] = amap.statistics(**streamed)
        has_score_keys: dict[str, Tensor] = {}
        for name in arguments:
            if name in HEAD_SCORES:
                values[name], has_score_keys[name] = amap.masses(SCORES[name].mask(amap, None))
        return cls(
            amap.shape,
            amap.heads,
            amap.problem.offset,
            dict(arguments),
            values,
            statistics.first_keys(amap.problem) < amap.shape[3],
            has_score_keys,
            amap.tokens,
            amap.provenance,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (*statistics.BY_NAME, *HEAD_SCORES):
            raise AttributeError(f"Reduced has no attribute {name!r}.")
        if name not in self.values:
            raise ValueError(
                f"{name} of {self._layer()} wasn't kept (kept are {', '.join(self.values)}). Use "
                f'observe(..., keep=[..., "{name}"]) or keep="maps".'
            )
        return lambda *args, **kwargs: self._value(name, args or kwargs or ())

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise ValueError: the weights, which a map has, weren't kept."""
        raise ValueError(
            f'{self._layer()} was observed with keep="statistics", which keeps no weights to read. Observe '
            'with keep="maps".'
        )

    def _value(self, name: str, requested: Any) -> Any:
        """Return a statistic; raise ValueError if it was kept with different arguments."""
        if name in HEAD_SCORES:
            return self.columns()[name]
        kept = self.arguments[name]
        is_same = requested in ((), (kept,)) or (
            not isinstance(kept, list)  # a list of results is returned as a whole
            and statistics.arguments(name, requested) == statistics.arguments(name, kept)
        )
        if not is_same:
            raise ValueError(
                f"{name} of {self._layer()} was kept with the arguments {kept!r}, got {requested!r}. "
                "Leave them out, or observe with these."
            )
        return self.values[name]

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of a table, each `[b, h]`: head scores, then statistics of heads and queries.

        Statistics of queries are averaged over the queries that have a visible key.
        """
        columns: dict[str, Tensor] = {}
        for name in sorted(self.values, key=lambda name: name not in HEAD_SCORES):
            value = self.values[name]
            if not isinstance(value, Tensor):
                continue
            if name in HEAD_SCORES or statistics.BY_NAME[name].per_query:  # [b, h, t]
                counts = self.has_score_keys.get(name, self.has_keys)
                columns[name] = torch.where(counts, value, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
            elif value.dim() == 2:  # [b, h]
                columns[name] = value
        return columns

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, each of the shape of its statistic (`[b, h, t]`, …)."""
        return list(self._tensors().values())

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> Reduced:
        """Return the statistics with labels of the keys, as `AttentionMap.labelled` does."""
        b, _, _, s = self.shape
        return replace(self, tokens=None if tokens is None else labels_of(tokens, b, s))

    def followed_by(self, later: Reduced) -> Reduced | None:
        """Join this step and the next into one call; return None if a statistic can't be joined."""
        if later.arguments != self.arguments or later.heads != self.heads:
            return None
        values: dict[str, Any] = {}
        for name, old in self.values.items():
            new = later.values[name]
            if isinstance(old, TopKeys):
                values[name] = TopKeys(*(torch.cat(pair, 2) for pair in zip(old, new, strict=True)))
            elif name in HEAD_SCORES or statistics.BY_NAME[name].per_query:
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
            has_score_keys={
                name: torch.cat((x, later.has_score_keys[name]), 2) for name, x in self.has_score_keys.items()
            },
            tokens=None,
        )

    # -- files (docs/format.md) --------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a file."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.values.items():
            results = (
                {f"{name}.{n}": x for n, x in enumerate(value)} if type(value) is list else {name: value}
            )
            for key, result in results.items():
                if isinstance(result, TopKeys):
                    tensors |= {f"{key}.weights": result.weights, f"{key}.keys": result.keys}
                else:
                    tensors[key] = result
        tensors |= {f"{name}.could": x for name, x in self.has_score_keys.items()}
        return tensors | {"sees": self.has_keys}

    def stored(self) -> storage.StoredStatistics:
        """Return the content for a file; raise ValueError if an argument, such as a mask, can't be saved."""
        if not isinstance(self.offset, int):
            raise ValueError(
                'Statistics of a call with one offset per sequence can\'t be saved. Use keep="maps".'
            )
        plain = {
            "shape": list(self.shape),
            "heads": list(self.heads),
            "offset": self.offset,
            "arguments": {name: _pack(name, arguments) for name, arguments in self.arguments.items()},
            "provenance": dict(self.provenance),
        }
        return storage.StoredStatistics(self._tensors(), plain, self.tokens)

    @classmethod
    def restored(cls, kept: storage.StoredStatistics) -> Reduced:
        """Return the statistics in a file; raise ValueError if they are invalid."""
        tensors = dict(kept.tensors)
        try:
            plain = kept.plain
            b, h, t, s = (whole(n, "a size") for n in plain["shape"])
            fits = all(x.shape[:2] == (b, h) for x in tensors.values())
            has_keys = tensors.pop("sees")
            if "asked" in plain:  # an early file, written before `trees` had a codec
                arguments = {name: _decode(packed) for name, packed in plain["asked"].items()}
            else:
                arguments = {
                    name: trees.unpack(packed, (), {}) for name, packed in plain["arguments"].items()
                }
            has_score_keys = {name: tensors.pop(f"{name}.could") for name in arguments if name in HEAD_SCORES}
            values = {name: _take(name, value, tensors) for name, value in arguments.items()}
            heads = tuple(whole(n, "a head") for n in plain["heads"])
            tokens = None if kept.tokens is None else labels_of(kept.tokens, b, s)
            offset = whole(plain["offset"], "an offset", least=-(1 << 60))
            if tensors or not fits or len(heads) != h:
                raise ValueError("its tensors don't fit its sizes")
            provenance = dict(plain["provenance"])
            return cls(
                (b, h, t, s), heads, offset, arguments, values, has_keys, has_score_keys, tokens, provenance
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"The statistics in the file can't be read: {error}. Save it again.") from None

    def _layer(self) -> str:
        return str(self.provenance.get("layer") or "this call")

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        return f"Reduced([b={b}, h={h}, t={t}, s={s}], {', '.join(self.values)})"


Call = AttentionMap | Reduced


def _pack(name: str, arguments: Any) -> Any:
    """Return the arguments of a statistic as JSON data; raise ValueError for tensors and masks."""

    def reject(tensor: Tensor) -> int:
        raise TypeError

    try:
        return trees.pack(arguments, reject, {})
    except TypeError:
        raise ValueError(
            f'{name} was kept with {kind(arguments)}, which can\'t be saved. Use keep="maps".'
        ) from None


def _decode(packed: Mapping[str, Any]) -> Any:
    """Return the arguments of a statistic from an early file of version 1."""
    if "several" in packed:
        return [_decode(each) for each in packed["several"]]
    if "named" in packed:
        return dict(packed["named"])
    return tuple(packed["plain"]) if packed["tuple"] else packed["plain"][0]


def _take(name: str, arguments: Any, tensors: dict[str, Tensor]) -> Any:
    """Remove the result of a statistic from the tensors of a file and return it."""
    if isinstance(arguments, list):
        return [_take(f"{name}.{n}", each, tensors) for n, each in enumerate(arguments)]
    if name.partition(".")[0] == "top":
        return TopKeys(tensors.pop(f"{name}.weights"), tensors.pop(f"{name}.keys"))
    return tensors.pop(name)
