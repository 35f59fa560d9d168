"""The findings of `manyheads show`, for the runs of the viewer: weights that stand out, as sentences."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyheads import highlights
from manyheads.maps import AttentionMap, sequence_labels
from manyheads.tokens import TokenizedText

if TYPE_CHECKING:
    from manyheads.viewer.runs import Layer, ViewedRun

Steps = Generator[None, None, dict[str, Any]]


def find(run: ViewedRun, batch: int) -> Steps:
    """Find the weights of a run that stand out most, and yield between the heads.

    Layers are compared with each other if they are self-attention over the same tokens. An encoder and a
    decoder have findings of their own.

    Args:
        run: The run.
        batch: The sequence.

    Returns:
        As "findings" for each weight its layer, head, query and key (counted from 0), weight and sentence;
        as "searched" the number of tokens that were searched, as "tokens" that of the longest text, both 0 if
        no layer is self-attention over labeled tokens.
    """
    findings, searched, tokens = [], 0, 0
    for labels, layers in _group(run, batch):
        searched, tokens = max(searched, min(len(labels), highlights.SEARCHED)), max(tokens, len(labels))
        text = _to_text(labels)
        maps = [layer.map.only(batch=batch) for layer in layers]
        ids = run.ids(maps[0])
        assert ids is not None  # the layers have labels
        candidates = yield from highlights.candidate_steps(maps, ids.tolist(), highlights.left_out(text))
        for finding in highlights.select_findings(candidates):
            layer = layers[finding.layer]
            named = replace(finding, layer=layer.number, head=layer.call.heads[finding.head])
            findings.append(
                {
                    "layer": run.layers.index(layer),
                    "head": finding.head,
                    "query": finding.query,
                    "key": finding.key,
                    "weight": finding.weight,
                    "sentence": highlights.describe(named, text),
                }
            )
    return {"findings": findings, "searched": searched, "tokens": tokens}


def _group(run: ViewedRun, batch: int) -> list[tuple[Sequence[str], list[Layer]]]:
    """Return the layers of self-attention over a whole text, by the labels of its tokens."""
    groups: list[tuple[Sequence[str], list[Layer]]] = []
    for layer in run.layers:
        if not isinstance(layer.call, AttentionMap) or batch >= layer.call.shape[0]:
            continue
        labels = sequence_labels(layer.call.tokens, batch)
        if labels is None or layer.call.shape[2] != layer.call.shape[3]:
            continue
        same = next((layers for other, layers in groups if list(other) == list(labels)), None)
        if same is None:
            groups.append((labels, [layer]))
        else:
            same.append(layer)
    return groups


def _to_text(labels: Sequence[str]) -> TokenizedText:
    """Return labels as a text. Those of a list become words of their own."""
    return (
        labels if isinstance(labels, TokenizedText) else TokenizedText(tuple(f" {label}" for label in labels))
    )
