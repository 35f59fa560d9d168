"""`observe`: record the attention maps of a model that runs.

    with manyheads.observe(model) as recording:
        model(**inputs)
    recording["layers.3.attn"].entropy()

Hooks track which modules are running (`recorder`), attention calls are intercepted before PyTorch computes
them (`intercept`, `transformers`), and each is recorded under the path of the innermost running module
(`recording`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.functional import make_fusible
from manyheads.observe.intercept import record_attention
from manyheads.observe.recorder import Recorder
from manyheads.observe.recording import NoSuchLayer, Recording, open_run
from manyheads.observe.summaries import HEAD_SCORES, STANDARD, Reduced
from manyheads.observe.table import Table
from manyheads.observe.words import WordImages, read_keep
from manyheads.shapes import DTYPES, kind, most_bytes, whole
from manyheads.statistics import BY_NAME, make_reductions

__all__ = [
    "NoSuchLayer",
    "Recording",
    "Reduced",
    "Table",
    "WordImages",
    "observe",
    "open_run",
    "record_attention",
]


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
    ablate: Sequence[tuple[str | int, int]] = (),
    statistics: Mapping[str, Any] | None = None,
) -> Iterator[Recording]:
    """Record the attention maps of a model while the block runs, without changing its outputs.

    It records calls of `scaled_dot_product_attention`, `nn.MultiheadAttention` and everything built on it,
    Hugging Face models, and manyheads' own layers, on any thread. The model's own kernel computes its output;
    if it returns no log-sum-exp, that is computed when it is first needed. Compiled models run eagerly.

    Args:
        model: The model, or a part of it.
        keep: "maps" keeps q and k of every call. "statistics" computes statistics during the call and keeps
            only these: entropy, distance, row_max, received, and the head scores that need no tokens. To
            choose the statistics, pass a list of names, or a mapping from names to arguments of
            `AttentionMap.statistics`: `keep={"entropy": (), "top": 8}`. "words" adds up where in a picture
            a diffusion model uses each word of the prompt, over all steps (`Recording.word_images`);
            `keep={"words": (rows, cols)}` gives the size of its latent picture.
        layers: Which modules to record: paths, parts of paths, or numbers in order of first call.
        heads: Which query heads to record.
        max_bytes: The largest size of the recording, in bytes.
        device: The device to keep q and k on, e.g. "cpu".
        dtype: The precision to keep them in, e.g. torch.float16.
        ablate: Pairs (layer, head). The output of these heads is replaced by zeros.
        statistics: Statistics to compute together with the output where manyheads' kernel computes it, as in
            `attention_with_map(statistics=...)`, which takes less time than computing them from the maps.

    Yields:
        The `Recording`, an ordered mapping from paths of attention modules to maps.

    Raises:
        TypeError, ValueError: If an argument doesn't fit the model, a call can't be recorded, or, at the end
            of the block, no forward ran or no attention was called.
        MemoryError: If the recording exceeds max_bytes. It is raised inside the model's forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected observe to get a torch.nn.Module, got {kind(model)}.")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or type(model).__name__} is a TorchScript module, whose calls can't be intercepted. "
                "Observe the model that it was made from."
            )
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"Expected dtype to be one of {', '.join(map(str, DTYPES))}, got {dtype!r}.")
    words = read_keep(keep)
    kept = None if keep == "maps" or words is not None else _check_statistics(keep)
    if words is not None and (device is not None or dtype is not None):
        raise ValueError(
            'device= and dtype= apply to maps, and keep="words" keeps none. Leave them out, or use '
            'keep="maps".'
        )
    if kept is not None and (device is not None or dtype is not None):
        raise ValueError(
            'device= and dtype= apply to maps, and keep="statistics" keeps none. '
            'Leave them out, or use keep="maps".'
        )
    fused = make_fusible(statistics)
    if fused and keep != "maps":
        raise ValueError(
            f'statistics= are kept with maps, got keep={keep!r}. Name them in keep=, or use keep="maps".'
        )
    head_numbers = _as_list(heads, "heads", "head numbers")
    for head in head_numbers or ():
        whole(head, "a head in heads", least=-(1 << 30))
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or type(model).__name__
    recording = Recording({"model": str(name)})
    recording.words = words
    recorder = Recorder(
        model,
        recording,
        keep=kept,
        layers=_as_list(layers, "layers", "paths or numbers of layers"),
        heads=head_numbers,
        max_bytes=None if max_bytes is None else most_bytes(max_bytes),
        store=[target for target in (device, dtype) if target is not None],
        ablate=_check_pairs(ablate),
        statistics=statistics if fused else None,
    )
    with recorder.attached():
        yield recording
    recorder.check()


def _check_statistics(keep: Any) -> dict[str, Any]:
    """Return the statistics to keep, with their arguments."""
    if keep == "statistics":
        keep = STANDARD
    expected = 'Expected keep to be "maps", "statistics", "words" or names of statistics'
    if isinstance(keep, str):
        raise ValueError(f"{expected}, got {keep!r}.")
    if not isinstance(keep, Sequence | Mapping):
        raise TypeError(f"{expected}, got {kind(keep)}.")
    statistics = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(keep, ())
    if not statistics:
        raise ValueError(f"{expected}, got none.")
    for name, arguments in statistics.items():
        if name not in (*BY_NAME, *HEAD_SCORES):
            raise ValueError(
                f"Expected statistics among {', '.join((*BY_NAME, *HEAD_SCORES))}, got {name!r}."
            )
        if name in HEAD_SCORES and arguments != ():
            raise TypeError(f"{name} takes no arguments, got {arguments!r}. Use ().")
    # Raises an error for arguments that don't match the statistic.
    make_reductions({name: arguments for name, arguments in statistics.items() if name in BY_NAME})
    return statistics


def _check_pairs(ablate: Any) -> list[tuple[str | int, int]]:
    pairs = list(ablate) if isinstance(ablate, Iterable) and not isinstance(ablate, str) else [ablate]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f'Expected ablate to be pairs (layer, head) such as ("layers.3.attn", 5), got {pair!r}.'
            )
    return pairs


def _as_list(value: Any, option: str, content: str) -> list[Any] | None:
    """Return one or several layers or heads as a list; None for all of them."""
    if value is None:
        return None
    values = [value] if isinstance(value, str | int) else value
    if not isinstance(values, Iterable) or isinstance(values, Tensor):
        raise TypeError(f"Expected {option} to be {content}, got {kind(value)}.")
    values = list(values)
    if not values:
        raise ValueError(f"Expected {option} to be {content} (None for all), got an empty list.")
    return values
