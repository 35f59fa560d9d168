"""`Recording`: the result of `observe`, an ordered mapping from layers to their attention maps."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads import alignment, extras, storage
from manyheads.alignment import Alignment, AlignmentHead
from manyheads.maps import AttentionMap, check_page, text_labels
from manyheads.observe import pictures
from manyheads.observe.crossattention import cross_layers, is_self, last_sequence
from manyheads.observe.generation import checksums, join, reached_keys
from manyheads.observe.summaries import Call, Reduced
from manyheads.observe.table import Table
from manyheads.observe.words import WordImages, WordMaps
from manyheads.patches import Patches, select, unpack
from manyheads.shapes import amount, kind, real, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WORDS_ONLY = (
    'A recording of keep="words" has no maps. Use word_images(), or observe with keep="maps" to record them.'
)


class NoSuchLayer(KeyError):
    """A layer that wasn't recorded; the message names similar ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Recording(Mapping[Any, Any]):
    """The attention of a model, layer by layer, in order of first call.

    Keys are the paths of attention modules, as in `named_modules`. A layer can also be given by a unique part
    of its path, or by its number. `recording[name]` is the layer's last call, and `recording.calls(name)`
    lists all calls: an `AttentionMap` each, or its statistics (`Reduced`) with keep="statistics". Decoding
    steps are joined into one call if the keys of each step extend those of the step before.

    `missed` maps modules that computed a softmax outside of any attention call to the shape of its input. It
    may be hand-written attention, which isn't recorded. `provenance` describes the origin: the model, and
    entries that you add.
    """

    def __init__(self, provenance: Mapping[str, Any] | None = None) -> None:
        self.provenance = dict(provenance or {})
        self.missed: dict[str, tuple[int, ...]] = {}
        self.words: WordMaps | None = None  # of keep="words", which keeps no calls
        self._calls: dict[str, list[Call]] = {}
        self._checksums: dict[str, Tensor | None] = {}  # the keys of each layer's last call

    # -- the mapping -------------------------------------------------------------------------------

    def __getitem__(self, name: str | int) -> Any:
        """Return the last call of a layer.

        Args:
            name: The path of the layer, a unique part of it, or its number.

        Returns:
            The map, or its statistics.

        Raises:
            NoSuchLayer: If no layer, or more than one, has this name.
            TypeError: If the name is neither a str nor an int.
        """
        return self._calls[self._find(name)][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, name: object) -> bool:
        try:
            self._find(name)  # type: ignore[arg-type]
        except (NoSuchLayer, TypeError):
            return False
        return True

    def calls(self, name: str | int) -> list[Any]:
        """Return all calls of a layer, in order; the name as in `recording[name]`."""
        return list(self._calls[self._find(name)])

    @property
    def nbytes(self) -> int:
        """The bytes of all recorded tensors; shared memory counts once."""
        tensors = [x for calls in self._calls.values() for call in calls for x in call.tensors()]
        words = 0 if self.words is None else self.words.nbytes
        return words + sum({(x.data_ptr(), x.nbytes): x.nbytes for x in tensors}.values())

    def _find(self, name: str | int) -> str:
        if self.words is not None:
            raise NoSuchLayer(WORDS_ONLY)
        return _find(name, list(self._calls))

    def _check_maps(self) -> None:
        if self.words is not None:
            raise ValueError(WORDS_ONLY)

    def add(self, name: str, call: Call, k: Tensor) -> None:
        """Add a call with keys k `[b, g, s, d]`, or join it to the last call if k extends its keys."""
        calls = self._calls.setdefault(name, [])
        previous = self._checksums.get(name)
        if previous is None and name in self._checksums:
            previous = self._checksum(calls[-1], calls[-1].problem.k)
        joined = None
        if previous is not None and (n := previous.shape[2]) and torch.equal(checksums(k, n), previous):
            joined = join(calls[-1], call)
        if joined is None:
            calls.append(call)
        else:
            calls[-1] = joined
        last = calls[-1]
        # Of a map that has the keys, they are computed if the layer is called again.
        has_keys = isinstance(last, AttentionMap) and last.problem.k is k
        self._checksums[name] = None if has_keys else self._checksum(call, k)

    @staticmethod
    def _checksum(call: Call, k: Tensor) -> Tensor:
        return checksums(k, reached_keys(call, k.shape[2]))

    # -- labels and table --------------------------------------------------------------------------

    def label(self, tokens: Sequence[str] | Sequence[Sequence[str]]) -> None:
        """Label the keys of every layer that has as many keys as there are tokens.

        Args:
            tokens: s strings or a `TokenizedText`, or b of them.

        Raises:
            ValueError: If no layer has as many keys as there are tokens.
            TypeError: If tokens isn't a list of strings.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(f"Expected tokens to be a list of strings, got {kind(tokens)}.")
        self._check_maps()
        several = len(tokens) > 0 and not isinstance(tokens[0], str) and isinstance(tokens[0], Sequence)
        n = len(tokens[0] if several else tokens)
        lengths = sorted({call.shape[3] for calls in self._calls.values() for call in calls})
        if n not in lengths:
            raise ValueError(
                f"Expected as many tokens as a layer has keys, which is {' or '.join(map(str, lengths))}, "
                f"got {n}."
            )
        for calls in self._calls.values():
            calls[:] = [call.labelled(tokens) if call.shape[3] == n else call for call in calls]

    def table(self, ids: Tensor | None = None) -> Table:
        """Return a table of the scores of every head, averaged over the batch.

        For layers that were recorded with keep="statistics", columns are the statistics that have one number
        for each head or query. Weights lie between 0 and 1; entropy is in nats, distance in positions.

        Args:
            ids: The tokens, integers `[s]` or `[b, s]`; with them, duplicate-token and induction heads are
                scored.

        Returns:
            A table of named tuples (layer, head, scores), to print, sort or convert to pandas.

        Raises:
            TypeError, ValueError: If ids aren't integers, one for each key.
        """
        self._check_maps()
        return Table.of({name: calls[-1] for name, calls in self._calls.items()}, ids)

    # -- other tools -------------------------------------------------------------------------------

    def to_bertviz(
        self,
        layers: str | int | Sequence[str | int] | None = None,
        *,
        batch: int = 0,
        max_bytes: float = 2**29,
    ) -> dict[str, Any]:
        """Return the weights of a short text as BertViz takes them (Vig 2019, arXiv:1906.05714).

        They are keyword arguments of its `head_view` and `model_view`.

        For an encoder and a decoder, call it for the layers of each.

        Args:
            layers: The layers: names or numbers as in `recording[name]`, or a part of a path that several
                layers share, such as "encoder"; None for all.
            batch: The batch entry.
            max_bytes: The largest allowed size of the page, in which a weight takes about 40 bytes of text.

        Returns:
            A dict of `attention`, a tuple of tensors `[1, h, t, s]`, one per layer, and `tokens`, the labels
            of the s keys.

        Raises:
            NoSuchLayer: If there is no such layer.
            IndexError: If there is no such batch entry.
            TypeError: If a layer's name or max_bytes has the wrong type.
            ValueError: If nothing was recorded, or only statistics, the layers have different shapes or
                tokens, or the page would take more bytes.
        """
        maps: dict[str, AttentionMap] = {}
        if isinstance(layers, Sequence) and not isinstance(layers, str) and not layers:
            raise ValueError("Expected layers to be names or numbers, got none. Use None for all layers.")
        for name in self._select(layers):
            call = self._calls[name][-1]
            if isinstance(call, Reduced):
                raise ValueError(
                    f'{name} was observed with keep="statistics", which keeps no weights. Observe with '
                    'keep="maps".'
                )
            maps[name] = call
        if not maps:
            raise ValueError(
                "Nothing was recorded, so there is nothing to export. Run the model while it is observed."
            )
        shapes = {call.shape[1:]: name for name, call in maps.items()}
        if len(shapes) > 1:
            got = " and ".join(f"{list(shape)} ({name})" for shape, name in [*shapes.items()][:3])
            raise ValueError(
                f"Expected layers of one shape [h, t, s] for BertViz, got {got}. Choose some: "
                "to_bertviz(layers=[…])."
            )
        check_page("BertViz", sum(math.prod(call.shape[1:]) for call in maps.values()), max_bytes)
        chosen = [call.only(batch) for call in maps.values()]
        s = chosen[0].shape[3]
        tokens = [text_labels(call.tokens, s) for call in chosen]
        if any(labels != tokens[0] for labels in tokens):
            raise ValueError(
                "Expected layers with the same tokens for BertViz, got different ones. Choose some: "
                "to_bertviz(layers=[…])."
            )
        return {"attention": tuple(call[:].cpu() for call in chosen), "tokens": tokens[0]}

    def _select(self, layers: str | int | Sequence[str | int] | None) -> list[str]:
        """Return the paths of layers, given by names, numbers, or parts of paths; None is all."""
        if layers is None:
            return list(self._calls)
        if isinstance(layers, str):
            return paths_within(layers, self._calls) or [self._find(layers)]
        if isinstance(layers, int):
            return [self._find(layers)]
        if not isinstance(layers, Sequence):
            raise TypeError(f"Expected layers to be names or numbers, got {kind(layers)}.")
        return list(dict.fromkeys(self._find(name) for name in layers))

    # -- words of a picture ------------------------------------------------------------------------

    def word_images(
        self,
        tokens: Sequence[str] | None = None,
        *,
        batch: int | None = None,
        layers: str | int | Sequence[str | int] | None = None,
        grid: tuple[int, int] | None = None,
        interpolation: str = "bilinear",
    ) -> WordImages:
        """Return where in a generated picture each word of the prompt was used, observed with keep="words".

        For example::

            with manyheads.observe(pipe.unet, keep="words") as recording:
                picture = pipe(prompt).images[0]
            images, words = recording.word_images(TokenizedText.from_encoding(prompt, encoding), batch=-1)

        An image is the weight of the places of the picture on the tokens of a word, averaged over heads,
        steps and layers. Coarser layers are interpolated to the finest grid. As Tang et al. 2022
        (arXiv:2210.04885), but with weights, between 0 and 1, instead of sums.

        Args:
            tokens: The labels of the keys, or of the first of them if the prompt is padded: strings, or a
                `TokenizedText`, whose words have one image each. Default: an image of each key.
            batch: The batch entry. Required if there is more than one.
            layers: Which layers to average: paths, parts of paths, or numbers. Default: all.
            grid: The rows and columns of the images. Default: those of the finest layer.
            interpolation: "bilinear", "bicubic" or "nearest".

        Returns:
            The images `[n, rows, cols]` and the n words, as a named tuple `images, words`.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If it was observed otherwise, or an argument doesn't fit.
            NoSuchLayer: If a layer had no cross-attention.
        """
        if self.words is None:
            raise ValueError(
                "Expected a recording of the words of a prompt, got one without them. Observe with "
                'observe(model, keep="words").'
            )
        recorded = self.words.sums
        if not recorded:
            raise ValueError(
                "No cross-attention between a picture and a text was recorded. If the picture's size isn't "
                'known, as the model gets a sequence, pass it: observe(..., keep={"words": (rows, cols)}).'
            )
        names = list(recorded)
        if layers is not None:
            chosen: dict[str, None] = {}
            for layer in [layers] if isinstance(layers, str | int) else list(layers):
                found = paths_within(layer, names) if isinstance(layer, str) else []
                chosen |= dict.fromkeys(found or [_find(layer, names)])
            if not chosen:
                raise ValueError("Expected layers to be paths or numbers (None for all), got none.")
            names = list(chosen)
        return self.words.images(tokens, names, batch, grid, interpolation)

    # -- alignment ---------------------------------------------------------------------------------

    def align(
        self,
        heads: Sequence[Sequence[Any]] | Tensor | None = None,
        *,
        tokens: Sequence[str] | None = None,
        queries: slice | Sequence[int] | Tensor | None = None,
        keys: slice | Sequence[int] | Tensor | None = None,
        batch: int | None = None,
        seconds: float | None = None,
        median_filter: int = 7,
        normalize: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> Alignment:
        """Align the tokens of an encoder–decoder model with the keys of its cross-attention.

            recording.align(model.generation_config.alignment_heads, tokens=tokens, seconds=0.02).words

        The weights of the heads are standardized, filtered and averaged, and the path of the largest weights
        through them is found by dynamic time warping: tokens and keys in order, each at least once. The
        defaults, and the resulting times of tokens, are those of Whisper (Radford et al. 2022,
        arXiv:2212.04356) in transformers. The steps of a generation are joined. Long recordings are read in
        blocks of keys.

        Args:
            heads: Pairs (layer, head). A layer is a path or a unique part of it, or its number among the
                cross-attention layers, as in Whisper's `alignment_heads`. Default: `find_alignment_heads()`.
            tokens: The labels of all queries, strings or a `TokenizedText`, which knows the words. For word
                times, label each query with the token that it predicts: those of `ids[1:]`.
            queries: The queries to align, such as `slice(3, None)`: the last of a prompt of 4 tokens, which
                predicts the first word, and those after it. Default: all.
            keys: The keys to align, such as `slice(0, 500)` for the first 10 s of Whisper. Default: all that
                aren't masked.
            batch: The sequence. Required if there is more than one.
            seconds: The duration of a key in seconds, 0.02 for Whisper.
            median_filter: The width in keys, odd, of the median filter along the keys. Use 1, no filter, for
                text: 7 keys remove what is narrower than 4.
            normalize: Whether to standardize the weights of each key over the queries, so that keys that
                every token attends to don't count.
            dtype: The precision of accumulated costs. float32 is Whisper's, ties included; use float64 for
                more than some thousand keys.

        Returns:
            The alignment: its path, start and end of each token, and words.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If a layer isn't cross-attention, or an argument doesn't fit the recording.
            NoSuchLayer: If a layer wasn't recorded.
        """
        if heads is None:
            heads = self.find_alignment_heads(
                queries=queries, keys=keys, batch=batch, median_filter=median_filter, normalize=normalize
            )
            if not heads:
                raise ValueError(
                    "No head's weights follow the order of the tokens, so there is nothing to align by. Name "
                    "heads=, or lower least= of find_alignment_heads."
                )
        chosen = self._resolve_heads(heads)
        maps = []
        for name, numbers in chosen.items():
            amap = last_sequence(name, self._calls)
            for head in numbers:
                if head not in amap.heads:
                    raise ValueError(
                        f"{name} has the heads {_brief(amap.heads)}, and heads= names head {head}. Name some "
                        "of these."
                    )
            entry = self._batch_entry(batch, amap, name)
            maps.append(amap.only(entry, [amap.heads.index(head) for head in numbers]))
        shapes = {amap.shape[2:] for amap in maps}
        if len(shapes) > 1:
            raise ValueError(
                "Expected heads of layers with as many queries and keys, got [t, s] of "
                f"{' and '.join(str(list(shape)) for shape in sorted(shapes))}."
            )
        return alignment.align(
            maps,
            [(name, head) for name, numbers in chosen.items() for head in numbers],
            queries=queries,
            keys=keys,
            tokens=tokens,
            seconds=seconds,
            median_filter=median_filter,
            normalize=normalize,
            dtype=dtype,
        )

    def find_alignment_heads(
        self,
        most: int = 10,
        *,
        least: float = 0.2,
        queries: slice | Sequence[int] | Tensor | None = None,
        keys: slice | Sequence[int] | Tensor | None = None,
        batch: int | None = None,
        median_filter: int = 7,
        normalize: bool = True,
    ) -> list[AlignmentHead]:
        """Return the cross-attention heads whose weights follow the order of the tokens, best first.

        Each head is aligned alone. Its score is the mean weight of a token on its own keys of the path, minus
        the weight of the average token on these keys. It is near 1 if every token attends to its own stretch
        of keys, in order; 0 if all tokens attend to the same keys; and small for random weights.

        Args:
            most: The largest number of heads.
            least: The lowest score.
            queries: The queries to align, as in `align`.
            keys: The keys to align, as in `align`.
            batch: The sequence. Required if there is more than one.
            median_filter: The width of the median filter, as in `align`: 1 for text.
            normalize: Whether to standardize the weights, as in `align`.

        Returns:
            Named tuples (layer, head, score), which `align` takes. Heads have their numbers in the model.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If there is no cross-attention, or an argument doesn't fit the recording.
        """
        whole(most, "most", least=1)
        real(least, "least", lambda value: value <= 1, "a score of at most 1")
        found = []
        for name in self._cross_layers():
            amap = last_sequence(name, self._calls)
            scores = alignment.score_heads(
                amap.only(self._batch_entry(batch, amap, name)),
                queries=queries,
                keys=keys,
                median_filter=median_filter,
                normalize=normalize,
            )
            found += [AlignmentHead(name, *pair) for pair in zip(amap.heads, scores, strict=True)]
        found = [head for head in found if head.score >= least]
        return sorted(found, key=lambda head: -head.score)[:most]

    def _cross_layers(self) -> list[str]:
        names = cross_layers(self._calls)
        if not names:
            layers = ", ".join(list(self._calls)[:4]) or "none"
            raise ValueError(
                f"Expected a recording with cross-attention layers, got only other layers ({layers}). If one "
                "is cross-attention, name it: recording.align([(layer, head)])."
            )
        return names

    def _resolve_heads(self, heads: Any) -> dict[str, list[int]]:
        """Return the chosen heads by the path of their layer, checked."""
        pairs = heads.tolist() if hasattr(heads, "tolist") else heads  # a tensor or an array
        if isinstance(pairs, str) or not isinstance(pairs, Sequence):
            raise TypeError(f"Expected heads to be pairs (layer, head), got {kind(heads)}.")
        if not pairs:
            raise ValueError("Expected heads to be pairs (layer, head), got none.")
        chosen: dict[str, list[int]] = {}
        for pair in pairs:
            is_pair = isinstance(pair, Sequence) and not isinstance(pair, str)
            if not is_pair or len(pair) != (3 if isinstance(pair, AlignmentHead) else 2):
                raise TypeError(
                    f'Expected heads to be pairs (layer, head) such as ("layers.3.encoder_attn", 5), got '
                    f"{pair!r}."
                )
            layer, head = pair[:2]
            whole(head, "a head in heads")
            if isinstance(layer, int) and not isinstance(layer, bool):
                names = self._cross_layers()
                if not 0 <= layer < len(names):
                    raise NoSuchLayer(
                        f"There is no cross-attention layer {layer}: {len(names)} were recorded. Use 0 to "
                        f"{len(names) - 1}."
                    )
                name = names[layer]
            else:
                name = self._find(layer)
            if is_self(name, self._calls):
                raise ValueError(
                    f"Expected cross-attention layers to align, got {name}, which is self-attention. "
                    f"Cross-attention was recorded of {_brief(cross_layers(self._calls))}."
                )
            if head in chosen.setdefault(name, []):
                raise ValueError(f"Expected different heads, got head {head} of {name} twice.")
            chosen[name].append(head)
        return chosen

    def _batch_entry(self, batch: int | None, amap: AttentionMap, name: str) -> int:
        b = amap.shape[0]
        if batch is None:
            if b != 1:
                raise ValueError(
                    f"Expected batch= to name one of the {b} sequences of {name}, such as batch=0: one "
                    "sequence is aligned at a time."
                )
            return 0
        return whole(batch, "batch", most=b - 1)

    # -- pictures ----------------------------------------------------------------------------------

    def patches(self, layer: str | int | None = None, *, batch: int = 0, picture: int = 0) -> Patches:
        """Return where the patches of a picture are among the keys of a layer.

        They are found while a model runs, as by `find_patches`: each layer of a vision-language model has
        those of its part, the vision transformer or the language model.

        Args:
            layer: The layer, as in `recording[layer]`. Default: the last one with patches.
            batch: The batch entry.
            picture: The number of the picture in the sequence, or in the last run of a vision transformer
                that calls attention for each picture.

        Returns:
            The patches.

        Raises:
            NoSuchLayer: If there is no such layer.
            ValueError: If the patches aren't known; the message says why, and what to give instead.
            IndexError: If there is no such batch entry or picture.
        """
        name = self._picture_layer() if layer is None else self._find(layer)
        call, picture = self._picture_call(name, picture)
        located = unpack(call.provenance.get("patches"))
        if not -call.shape[0] <= whole(batch, "batch", least=-(1 << 60)) < call.shape[0]:
            raise IndexError(
                f"There is no batch entry {batch}: the layer has {call.shape[0]} sequences. Use 0 to "
                f"{call.shape[0] - 1}."
            )
        return select(located, batch, picture)

    def _picture_call(self, name: str, picture: int) -> tuple[Call, int]:
        """Return the call of a layer that read a picture, and the number of the picture in that call."""
        calls = self._calls[name]
        last = calls[-1].provenance.get("picture_number", 0)
        if not isinstance(last, int) or not 0 < last < len(calls):
            return calls[-1], picture
        count = last + 1
        if not -count <= whole(picture, "picture", least=-(1 << 60)) < count:
            raise IndexError(
                f"There is no picture {picture}: {name} has read {count} pictures. Use 0 to {count - 1}."
            )
        return calls[picture % count - count], 0

    def _picture_layer(self) -> str:
        """Return the last layer whose patches are known, or the last layer if there is no such layer."""
        if not self._calls:
            raise ValueError(
                "Nothing was recorded, so there are no patches. Run the model while it is observed."
            )
        known = [name for name in self if isinstance(self[name].provenance.get("patches"), list)]
        return (known or list(self))[-1]

    def rollout_image(
        self,
        queries: int | Sequence[int] | slice | Tensor | None = None,
        *,
        layers: str | None = None,
        number: int = 0,
        patches: Patches | None = None,
    ) -> Tensor:
        """Return how much each patch contributes to some tokens of the last layer, over all layers.

        This is attention rollout (Abnar & Zuidema 2020, arXiv:2005.00928; see `measures.rollout`): the
        product of the layers' weights, averaged over heads, with half of each layer passed on by the
        residual connection. Layers with as many queries as keys take part, the last call of each; an
        attention pooling head, as in SigLIP, doesn't. It takes O(L) memory.

        Args:
            queries: The tokens, of which the mean is returned. Default: the class token, or all tokens if the
                model has none.
            layers: A part of the paths of the layers, for a model with several parts: "vision_tower" or
                "language_model". Default: all layers with patches.
            number: The number of the picture, as in `overlay`.
            patches: The patches, if they aren't found.

        Returns:
            The shares `[b, rows, cols]`, between 0 and 1. They sum to less than 1 if the queries also depend
            on tokens that aren't patches.

        Raises:
            ValueError: If the patches aren't known or differ between layers or sequences, or only statistics
                were recorded.
            IndexError: If a query or picture doesn't exist.
        """
        if layers is not None and not isinstance(layers, str):
            raise TypeError(f"Expected layers to be a part of the layers' paths, got {layers!r}.")
        names = list(self) if layers is None else paths_within(layers, self)
        if not names and layers is not None:
            raise NoSuchLayer(f"No layer {layers!r} was recorded{close_matches(layers, self)}.")
        calls = {name: self._picture_call(name, number) for name in names}
        number = calls[names[-1]][1] if names else 0  # the layers of a rollout read the same sequence
        return pictures.rollout_image(
            {name: call for name, (call, _) in calls.items()}, queries, patches, number
        )

    def overlay(
        self,
        picture: Any,
        query: int | tuple[int, int] | str | None = None,
        *,
        layer: str | int | None = None,
        batch: int = 0,
        number: int = 0,
        patches: Patches | None = None,
        **options: Any,
    ) -> Figure:
        """Draw what a query attends to over the picture, a panel for each head.

            recording.overlay(picture)  # the class token
            recording.overlay(picture, (4, 7))  # the patch in row 4, column 7
            recording.overlay(picture, "dog")  # a word of a labelled recording of a vision-language model

        Args:
            picture: The picture, as in `figures.overlay`.
            query: A patch (row, column), a token's number, or a word of the labels (the mean of its tokens).
                Default: the class token, or the only query of a pooling head.
            layer: The layer, as in `recording[layer]`. Default: the last one with patches.
            batch: The batch entry.
            number: The number of the picture, as `picture` in `patches`.
            patches: Where the patches are among the keys, for models of which this isn't found. Default:
                `recording.patches(layer)`.
            **options: The options of `figures.overlay`.

        Returns:
            The figure.

        Raises:
            TypeError: If patches has the wrong type.
            ValueError: If the patches aren't known, or the query isn't one token or word.
            IndexError: If the query doesn't exist.
        """
        from manyheads import figures  # this imports matplotlib

        name = self._picture_layer() if layer is None else self._find(layer)
        if patches is None:
            patches = self.patches(name, batch=batch, picture=number)
        elif not isinstance(patches, Patches):
            raise TypeError(f"Expected patches to be Patches, got {kind(patches)}.")
        amap = pictures.check_map(name, self._picture_call(name, number)[0]).only(batch=batch)
        rows, query_name, place = pictures.resolve_query(amap, patches, query)
        image = amap.image(rows, patches).mean(2)[0]  # [h, rows, cols]
        which = f", picture {number}" if number else ""
        options.setdefault("title", f"{name}, {query_name}{which}")
        options.setdefault("titles", [f"head {head}" for head in amap.heads])
        return figures.overlay(picture, image, query=place, **options)

    # -- figures, viewer, files --------------------------------------------------------------------

    def plot(self, **options: Any) -> Figure:
        """Draw all layers and heads as a grid of heatmaps.

        Args:
            **options: The options of `figures.grid`.

        Returns:
            The figure.

        Raises:
            ValueError: If nothing was recorded, or only statistics.
        """
        from manyheads import figures  # this imports matplotlib

        self._check_maps()
        if not self._calls:
            raise ValueError(
                "Nothing was recorded, so there is nothing to draw. Call the model inside observe(...)."
            )
        maps: dict[str, AttentionMap] = {}
        for name, (*_, call) in self._calls.items():
            if isinstance(call, Reduced):
                raise ValueError(
                    f'{name} was observed with keep="statistics", which keeps no weights to draw. Observe '
                    'with keep="maps", or draw the statistics.'
                )
            maps[name] = call
        return figures.grid(maps, **options)

    def view(self, *others: Any, picture: Any = None, port: int = 0, browser: bool = True) -> Any:
        """Show every layer and head in a browser, or in this notebook, down to single weights.

        In a script, use `recording.view().wait()`, which keeps the server running until you interrupt it.

        Args:
            *others: More recordings, maps or files, to compare side by side.
            picture: The picture that the model read, as in `figures.overlay`, to show what a query attends to
                in it; a list has one for each batch entry.
            port: Port to listen on (0 picks a free one).
            browser: If True, open a browser.

        Returns:
            The running server, or in a notebook its widget.

        Raises:
            TypeError, ValueError: If `others` can't be shown, or nothing was recorded.
            OSError: If the port is in use.
        """
        self._check_maps()
        return extras.view(self, *others, picture=picture, port=port, browser=browser)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the recording in a safetensors file that `manyheads.open_run` reads (docs/format.md).

        Args:
            path: The file.

        Raises:
            ValueError: If a mask can't be saved, such as a `Rule`.
            OSError: If the file can't be written.
        """
        self._check_maps()
        entries = [
            storage.Entry(name, n, call.stored())
            for name, calls in self._calls.items()
            for n, call in enumerate(calls)
        ]
        storage.write(path, entries, provenance=self.provenance)

    def __repr__(self) -> str:
        lines = [
            f"{n:>4}  {name}: [b, h, t, s] = {list(calls[-1].shape)}"
            + (f", the last of {len(calls)} calls; all: .calls({n})" if len(calls) > 1 else "")
            for n, (name, calls) in enumerate(self._calls.items())
        ]
        if self.words is not None:
            lines += [
                f"{n:>4}  {name}: [b, s, rows, cols] = {list(x.shape)} of {self.words.steps[name]} steps"
                for n, (name, x) in enumerate(self.words.sums.items())
            ]
        missed = [f"   -  {name}: not recorded, a softmax of {list(x)}" for name, x in self.missed.items()]
        size = f"layers: {len(lines)}, {amount(self.nbytes)}" if lines else "nothing recorded yet"
        return "\n".join([f"Recording({size})", *lines, *missed])


def open_run(path: str | os.PathLike[str]) -> Recording:
    """Open a file that `Recording.save` wrote. It is memory-mapped: tensors are read when they are needed.

    Args:
        path: The file.

    Returns:
        The recording.

    Raises:
        ValueError: If it isn't such a file, or is damaged.
        OSError: If it can't be read.
    """
    run = storage.read(path)
    recording = Recording(run.provenance)
    for name, _, stored in run.entries:
        call = AttentionMap.of(*stored) if isinstance(stored, storage.StoredMap) else Reduced.restored(stored)
        recording._calls.setdefault(name, []).append(call)
    return recording


def _brief(names: Iterable[Any]) -> str:
    """Return the first few names, as errors list them."""
    listed = list(map(str, names))
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "") or "no layer"


# -- paths -----------------------------------------------------------------------------------------


def paths_within(name: str, paths: Iterable[str]) -> list[str]:
    """Return the paths of which a name is one or more whole components, or else a substring."""
    paths = list(paths)
    whole_parts = [path for path in paths if name == path or f".{name}." in f".{path}."]
    return whole_parts or [path for path in paths if name in path]


def _find(name: str | int, names: list[str]) -> str:
    """Return the path of a layer of these names, as `recording[name]` finds it."""
    if isinstance(name, bool) or not isinstance(name, str | int):
        pair: Any = name
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        hint = f" For one of its calls, use recording.calls({pair[0]!r})[{pair[1]!r}]." if is_pair else ""
        raise TypeError(f"Expected a layer's path or number, got {kind(name)}.{hint}")
    if isinstance(name, int):
        if not -len(names) <= name < len(names):
            raise NoSuchLayer(
                f"There is no layer {name}: {len(names)} layers were recorded. "
                f"Use 0 to {len(names) - 1}, or a name."
            )
        return names[name]
    matches = [name] if name in names else paths_within(name, names)
    if len(matches) == 1:
        return matches[0]
    if matches:
        examples = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
        raise NoSuchLayer(
            f"{name!r} matches {len(matches)} of the recorded layers: {examples}. Give more of the path."
        )
    raise NoSuchLayer(f"No layer {name!r} was recorded{close_matches(name, names)}.")


def close_matches(name: str, paths: Iterable[str]) -> str:
    """Return text to append to an error: the most similar paths, or the first ones if none is similar."""
    paths = [path for path in paths if path]
    similar = difflib.get_close_matches(name, paths, n=4, cutoff=0.5)
    if similar:
        return f". Choose a similar one: {', '.join(similar)}"
    return f". Choose one of {', '.join(paths[:6])}{', …' if len(paths) > 6 else ''}" if paths else ""
