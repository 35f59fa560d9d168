"""Time whole models with and without `manyheads.accelerate`, and on `attn_implementation="manyheads"`.

    python benchmarks/whole_models.py --length 2048 [--dtype bfloat16] [--rounds 5]

A Llama (4 layers of 12 heads of 64, tokens per forward: --length), a ViT (base: 12 layers of 12 heads of 64,
4 pictures of 197 patches) and a Whisper encoder (base: 6 layers of 8 heads of 64, 1500 frames), with random
weights and without gradients. The ways take turns in one process. Printed are the median of the tokens per
second, and the median over the rounds of the ratio to the plain model, which a change of the machine's speed
affects less.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import typer

import manyheads


def llama(length: int) -> tuple[Any, dict[str, Any], int]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=8000, max_position_embeddings=131072,
    )  # fmt: skip
    ids = torch.randint(0, 8000, (1, length))
    return transformers.LlamaModel(config), {"input_ids": ids, "use_cache": False}, length


def vit(length: int) -> tuple[Any, dict[str, Any], int]:
    import transformers

    return (
        transformers.ViTModel(transformers.ViTConfig()),
        {"pixel_values": torch.randn(4, 3, 224, 224)},
        4 * 197,
    )


def whisper(length: int) -> tuple[Any, dict[str, Any], int]:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048
    )
    return WhisperEncoder(config), {"input_features": torch.randn(1, 80, 3000)}, 1500


MODELS = {"Llama": llama, "ViT": vit, "Whisper encoder": whisper}
WAYS = ("plain", "accelerate", "manyheads")


def main(
    length: Annotated[int, typer.Option(help="Number of tokens of the Llama.")] = 2048,
    dtype: str = "float32",
    rounds: int = 5,
) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    manyheads.hf.register()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, Llama of {length} tokens")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, given, tokens = make(length)
        kind = getattr(torch, dtype)
        model = model.to(kind).eval()
        given = {
            key: x.to(kind) if getattr(x, "is_floating_point", bool)() else x for key, x in given.items()
        }
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        counts = {"plain": ""}
        with torch.no_grad():
            for _ in range(rounds + 1):
                for way in WAYS:
                    model.set_attn_implementation("manyheads" if way == "manyheads" else "sdpa")
                    with (
                        manyheads.accelerate() if way == "accelerate" else nullcontext() as report,
                        manyheads.hf.count(model) as calls,
                    ):
                        start = time.perf_counter()
                        model(**given)
                        seconds[way].append(time.perf_counter() - start)
                    if report is not None:
                        counts[way] = f"{report.accelerated} of {report.total} calls accelerated"
                    elif way == "manyheads":
                        counts[way] = f"{calls.total} calls on manyheads"
        for way in WAYS:
            rounds_of_way = seconds[way][1:]  # the first round warms up
            median = statistics.median(rounds_of_way)
            ratio = statistics.median(a / b for a, b in zip(seconds["plain"][1:], rounds_of_way, strict=True))
            print(
                f"{name:<16}{tokens:>6} tokens  {way:<11}{tokens / median:10,.0f} tokens/s "
                f"{ratio:6.2f} × plain  {counts[way]}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
