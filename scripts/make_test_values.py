"""Write src/manyheads/classic/test_values.safetensors: fixed inputs and weights, and their expected outputs.

    python scripts/make_test_values.py

All inputs and weights are random numbers of one seed, with four decimals. The outputs are computed in float64
from the formula below, which shares no code with the library.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

SEED = 20240607
BATCH, SEQ, INPUT, HIDDEN, HEADS = 3, 5, 7, 9, 3
TARGET = Path(__file__).parents[1] / "src/manyheads/classic/test_values.safetensors"

Vector = list[float]
Matrix = list[Vector]


# -- the formula -----------------------------------------------------------------------------------


def linear(x: Matrix, weight: Matrix, bias: Vector) -> Matrix:
    """Return y[i][o] = Σ_c x[i][c] · weight[o][c] + bias[o]."""
    return [
        [sum(a * w for a, w in zip(row, ws, strict=True)) + c for ws, c in zip(weight, bias, strict=True)]
        for row in x
    ]


def head(q: Matrix, k: Matrix, v: Matrix, causal: bool) -> Matrix:
    """Return Σ_j p[i][j] · v[j], where p[i] is the softmax of q[i] · k[j] / √d over j (causal: j ≤ i)."""
    out = []
    for i, query in enumerate(q):
        visible = range(i + 1) if causal else range(len(k))
        scores = [
            sum(a * b for a, b in zip(query, k[j], strict=True)) / math.sqrt(len(query)) for j in visible
        ]
        exps = [math.exp(score) for score in scores]
        p = [exp / sum(exps) for exp in exps]
        out.append([sum(p[j] * v[j][c] for j in visible) for c in range(len(v[0]))])
    return out


def attention(x: Matrix, weights: dict[str, Matrix], heads: int, causal: bool) -> Matrix:
    """Attend over a sequence: project, split into heads, attend, concatenate, mix."""
    q, k, v = (linear(x, weights[f"{name}_weight"], weights[f"{name}_bias"][0]) for name in "qkv")
    size = HIDDEN // heads
    outputs = []
    for h in range(heads):
        columns = slice(h * size, (h + 1) * size)
        outputs.append(head(*([row[columns] for row in rows] for rows in (q, k, v)), causal=causal))
    joined = [[number for output in outputs for number in output[i]] for i in range(len(x))]
    if "mix_weight" not in weights:
        return joined
    return linear(joined, weights["mix_weight"], weights["mix_bias"][0])


# -- the values ------------------------------------------------------------------------------------


def draw(rng: random.Random, rows: int, columns: int, spread: float) -> Matrix:
    """Return random numbers with four decimals."""
    return [[round(rng.uniform(-spread, spread), 4) for _ in range(columns)] for _ in range(rows)]


def values(rng: random.Random, names: str, heads: int, outputs: dict[str, bool]) -> dict[str, Tensor]:
    """Return the input, weights and outputs of a module. `outputs` has True for the causal ones."""
    widths = {"q": INPUT, "k": INPUT, "v": INPUT, "mix": HIDDEN}
    x = draw(rng, BATCH * SEQ, INPUT, spread=1.0)
    weights: dict[str, Matrix] = {}
    for name in names.split():
        weights[f"{name}_weight"] = draw(rng, HIDDEN, widths[name], spread=0.5)
        weights[f"{name}_bias"] = draw(rng, 1, HIDDEN, spread=0.5)
    tensors = {"x": torch.tensor(x).reshape(BATCH, SEQ, INPUT)}
    for name, rows in weights.items():
        tensors[name] = torch.tensor(rows[0] if name.endswith("bias") else rows)
    sequences = [x[b * SEQ : (b + 1) * SEQ] for b in range(BATCH)]
    for name, causal in outputs.items():
        out = [attention(sequence, weights, heads, causal) for sequence in sequences]
        tensors[name] = torch.tensor([[[round(number, 8) for number in row] for row in rows] for rows in out])
    return tensors


def content() -> bytes:
    """Return the content of the file."""
    rng = random.Random(SEED)
    modules = {
        "SelfAttention": values(rng, "q k v", 1, {"output": False}),
        "MultiHeadAttention": values(rng, "q k v mix", HEADS, {"output": False, "output_causal": True}),
    }
    return save(
        {f"{module}.{name}": tensor for module, values in modules.items() for name, tensor in values.items()}
    )


if __name__ == "__main__":
    TARGET.write_bytes(content())
    print(f"wrote {TARGET}")
