"""Write src/manyheads/classic/test_values.py: fixed inputs and weights, and the outputs they must give.

    python scripts/make_test_values.py

Everything is drawn from one seed, to four decimals; the outputs are computed here, in Python's own
floats (float64), from the formula written out below, which shares no code with the library.
"""

from __future__ import annotations

import math
import os
import random
import textwrap
from pathlib import Path

SEED = 20240607
BATCH, SEQ, INPUT, HIDDEN, HEADS = 3, 5, 7, 9, 3
TARGET = Path(__file__).parent.parent / "src/manyheads/classic/test_values.py"

Vector = list[float]
Matrix = list[Vector]

HEADER = '''"""Fixed values to check a self-attention with: assign the weights, compare the output.

    model = SelfAttention(input_size=7, hidden=9)
    model.q.weight.data = SelfAttentionTestValues.q_weight
    ...
    torch.allclose(model(SelfAttentionTestValues.x), SelfAttentionTestValues.output, atol=1e-6)

Written by scripts/make_test_values.py, which says how: change it there.
"""

import torch
from torch import Tensor


def _values(shape: tuple[int, ...], *numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(shape)


# fmt: off
'''

SELF = '''

class SelfAttentionTestValues:
    """x `[3, 5, 7]` through one head of width 9: output `[3, 5, 9]`."""

    input_size, hidden = 7, 9
'''

MULTI = '''

class MultiHeadAttentionTestValues:
    """x `[3, 5, 7]` through three heads of width 3, without and with a causal mask: `[3, 5, 9]`."""

    input_size, hidden, num_heads = 7, 9, 3
'''


# -- the formula -----------------------------------------------------------------------------------


def linear(x: Matrix, weight: Matrix, bias: Vector) -> Matrix:
    """y[i][o] = Σ_c x[i][c] · weight[o][c] + bias[o]."""
    return [
        [sum(a * w for a, w in zip(row, ws, strict=True)) + c for ws, c in zip(weight, bias, strict=True)]
        for row in x
    ]


def head(q: Matrix, k: Matrix, v: Matrix, causal: bool) -> Matrix:
    """out[i] = Σ_j p[i][j] · v[j], with p[i] the softmax over j of q[i] · k[j] / √d; causal: j ≤ i."""
    out = []
    for i, asking in enumerate(q):
        seen = range(i + 1) if causal else range(len(k))
        scores = [
            sum(a * b for a, b in zip(asking, k[j], strict=True)) / math.sqrt(len(asking)) for j in seen
        ]
        exps = [math.exp(score) for score in scores]
        p = [e / sum(exps) for e in exps]
        out.append([sum(p[j] * v[j][c] for j in seen) for c in range(len(v[0]))])
    return out


def attention(x: Matrix, given: dict[str, Matrix], heads: int, causal: bool) -> Matrix:
    """One sequence: project, attend with each head to its share of the columns, put side by side, mix."""
    q, k, v = (linear(x, given[f"{n}_weight"], given[f"{n}_bias"][0]) for n in "qkv")
    size = HIDDEN // heads
    parts = []
    for h in range(heads):
        share = slice(h * size, (h + 1) * size)
        parts.append(head(*([row[share] for row in m] for m in (q, k, v)), causal=causal))
    joined = [[number for part in parts for number in part[i]] for i in range(len(x))]
    if "mix_weight" not in given:
        return joined
    return linear(joined, given["mix_weight"], given["mix_bias"][0])


# -- the values ------------------------------------------------------------------------------------


def draw(rng: random.Random, rows: int, columns: int, spread: float) -> Matrix:
    return [[round(rng.uniform(-spread, spread), 4) for _ in range(columns)] for _ in range(rows)]


def write(name: str, shape: tuple[int, ...], rows: Matrix, digits: int) -> str:
    numbers = ", ".join(f"{number:.{digits}f}" for row in rows for number in row)
    lines = textwrap.fill(numbers, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"    {name} = _values(\n        {shape!r},\n{lines},\n    )\n"


def values(rng: random.Random, names: str, heads: int, causals: dict[str, bool]) -> str:
    """The body of one class."""
    widths = {"q": INPUT, "k": INPUT, "v": INPUT, "mix": HIDDEN}
    x = draw(rng, BATCH * SEQ, INPUT, spread=1.0)
    given: dict[str, Matrix] = {}
    parts = [write("x", (BATCH, SEQ, INPUT), x, 4)]
    for name in names.split():
        given[f"{name}_weight"] = draw(rng, HIDDEN, widths[name], spread=0.5)
        given[f"{name}_bias"] = draw(rng, 1, HIDDEN, spread=0.5)
        parts.append(write(f"{name}_weight", (HIDDEN, widths[name]), given[f"{name}_weight"], 4))
        parts.append(write(f"{name}_bias", (HIDDEN,), given[f"{name}_bias"], 4))
    for name, causal in causals.items():
        sequences = [x[b * SEQ : (b + 1) * SEQ] for b in range(BATCH)]
        out = [row for sequence in sequences for row in attention(sequence, given, heads, causal)]
        parts.append(write(name, (BATCH, SEQ, HIDDEN), out, 8))
    return "".join(parts)


def text() -> str:
    """The whole module."""
    rng = random.Random(SEED)
    one = values(rng, "q k v", 1, {"output": False})
    many = values(rng, "q k v mix", HEADS, {"output": False, "output_causal": True})
    return HEADER + SELF + one + MULTI + many


if __name__ == "__main__":
    unfinished = TARGET.with_suffix(".unfinished")
    unfinished.write_text(text(), encoding="utf-8")
    os.replace(unfinished, TARGET)
    print(f"wrote {TARGET}")
