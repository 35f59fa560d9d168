"""Cross-attention layers of a recording: which they are, and all queries of the last sequence as one map.

A decoder that generates calls its cross-attention once for each step, with the same keys. These calls are
joined here, because without positions it can't be known while recording whether a call goes on with the same
sequence. The self-attention before it, whose keys grow step by step, tells where the last sequence starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from manyheads.maps import AttentionMap
from manyheads.masks import Keep
from manyheads.observe.generation import band_and_keys, checksums, reached_keys
from manyheads.observe.summaries import Call, Reduced
from manyheads.problem import Problem

Calls = Mapping[str, Sequence[Call]]

# Names of modules, as in Bart, Whisper, Marian (encoder_attn), T5 (EncDecAttention), BERT (crossattention),
# the Annotated Transformer (src_attn) and diffusers (attn2); and of self-attention in all of these.
CROSS = re.compile(r"cross|enc_?dec|encoder_?attn|encoder_?attention|src_attn|attn2$", re.IGNORECASE)
SELF = re.compile(r"self", re.IGNORECASE)


def cross_layers(calls: Calls) -> list[str]:
    """Return the paths of the cross-attention layers, in order of first call."""
    return [name for name in calls if is_cross(name, calls)]


def is_cross(name: str, calls: Calls) -> bool:
    """Return True for a cross-attention layer, judged by its mask, its path and its shape.

    If the path doesn't tell, its calls must have several queries and another number of keys.
    """
    if not all(_has_no_band(call) for call in calls[name]):
        return False
    named = read_name(name)
    if named is not None:
        return named
    if ".".join((*name.split(".")[:-1], "self_attn")) in calls:  # a layer of nn.TransformerDecoder
        return True
    shapes = [call.shape for call in calls[name]]
    return any(t > 1 for _, _, t, _ in shapes) and all(t == 1 or t != s for _, _, t, s in shapes)


def is_self(name: str, calls: Calls) -> bool:
    """Return True for a layer that is certainly self-attention, judged by its mask and its path."""
    return not all(_has_no_band(call) for call in calls[name]) or read_name(name) is False


def read_name(path: str) -> bool | None:
    """Return True for a path of cross-attention, False for one of self-attention, None if it doesn't tell.

    The last two names count: BERT's cross-attention is `crossattention.self`.
    """
    names = path.split(".")[-2:]
    if any(map(CROSS.search, names)):
        return True
    return False if any(map(SELF.search, names)) else None


def _has_no_band(call: Call) -> bool:
    if isinstance(call, Reduced):
        return True
    return call.shape[2] == 1 or band_and_keys(call.problem)[0] == (None, None)


def last_sequence(name: str, calls: Calls) -> AttentionMap:
    """Return the map of the last sequence of a cross-attention layer, with the queries of all steps.

    Args:
        name: The path of the layer.
        calls: The calls of all layers.

    Returns:
        The map `[b, h, t, s]`.

    Raises:
        ValueError: If only statistics were recorded, or the steps belong to different sequences.
    """
    steps: list[AttentionMap] = []
    for call in calls[name]:
        if isinstance(call, Reduced):
            raise ValueError(
                f'{name} was observed with keep="statistics", which keeps no weights to align. Observe with '
                'keep="maps".'
            )
        steps.append(call)
    if len(steps) == 1:
        return steps[0]
    count = _count_rows(name, calls)
    chosen = [steps[-1]]
    for step in reversed(steps[:-1]):
        rows = sum(amap.shape[2] for amap in chosen)
        # Without recorded self-attention, a call of several queries is the start of a sequence.
        is_complete = chosen[0].shape[2] > 1 if count is None else rows >= count
        if is_complete or not _has_same_keys(step, chosen[0]):
            break
        chosen.insert(0, step)
    rows = sum(amap.shape[2] for amap in chosen)
    if count is not None and rows != count:
        raise ValueError(
            f"{name} has {rows} queries over the same keys, and the self-attention before it has {count}. "
            "Run the model once over the whole sequence, and align that."
        )
    return _stack(chosen)


def _count_rows(name: str, calls: Calls) -> int | None:
    """Return the number of queries of the last sequence, by the decoder's self-attention; None if unknown."""
    names = list(calls)
    before = names[: names.index(name)]
    if not before or is_cross(before[-1], calls):
        return None
    maps = [call for call in calls[before[-1]] if isinstance(call, AttentionMap)]
    last = maps[-1]
    is_encoder = _has_no_band(last) and last.shape[2] == last.shape[3] > 1
    if is_encoder or last.shape[0] != calls[name][-1].shape[0]:
        return None
    rows = last.shape[2]
    for step, later in zip(reversed(maps[:-1]), reversed(maps), strict=False):
        n = reached_keys(step, step.shape[3])
        if _starts_a_sequence(later):
            break
        if step.shape[:2] != later.shape[:2] or not torch.equal(
            checksums(later.problem.k, n), checksums(step.problem.k, n)
        ):
            raise ValueError(
                f"The keys of {before[-1]} don't continue those of the step before, as in beam search, which "
                "reorders the sequences. Run the model once over the final sequence, and align that."
            )
        rows += step.shape[2]
    return rows


def _starts_a_sequence(call: AttentionMap) -> bool:
    """Return True if a call of self-attention has no earlier keys."""
    return call.problem.offset == 0 if isinstance(call.problem.offset, int) else False


def _has_same_keys(one: AttentionMap, other: AttentionMap) -> bool:
    k, keys = one.problem.k, other.problem.k
    return k.shape == keys.shape and one.shape[:2] == other.shape[:2] and torch.equal(k, keys)


def _stack(steps: Sequence[AttentionMap]) -> AttentionMap:
    """Return the map of all queries of calls with the same keys."""
    if len(steps) == 1:
        return steps[0]
    problems = [amap.problem for amap in steps]
    last = problems[-1]
    visible = [band_and_keys(problem)[1] for problem in problems]
    same = all(
        keys is not None
        and visible[-1] is not None
        and torch.equal(keys, visible[-1])
        and problem.bias is None
        and (problem.scale, problem.softcap) == (last.scale, last.softcap)
        for problem, keys in zip(problems, visible, strict=True)
    )
    if not same:
        raise ValueError(
            "The steps of a cross-attention layer have different masks or biases, so they can't be joined. "
            "Run the model once over the whole sequence, and align that."
        )
    q = torch.cat([problem.q for problem in problems], 2)  # [b, h, t, d]
    keys = visible[-1]
    assert keys is not None
    mask = None if bool(keys.all()) else Keep(keys[:, None, None])
    problem = Problem.of(
        q, last.k, last.v, mask=mask, scale=last.scale, softcap=last.softcap, sink=last.sink, offset=0
    )
    lse = torch.cat([amap.lse for amap in steps], 2) if all(amap.knows_lse for amap in steps) else None
    return steps[-1].again(problem, lse)
