"""Check an attention module in pytest: `pytest examples/test_my_attention.py`."""

import math

import torch
from torch import nn

from manyheads import checker


class MyAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, e = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, -1).transpose(1, 2)  # [b, t, e] → [b, h, t, d]
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [b, h, t, t]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


class Unscaled(MyAttention):
    """The same module, with a bug: its scores are too large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, e = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.mT).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


def test_my_attention_is_right() -> None:
    checker.assert_attention(MyAttention)


def test_a_bug_is_named() -> None:
    report = checker.check(Unscaled)
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["unscaled"]
    print(report)


if __name__ == "__main__":
    test_my_attention_is_right()
    test_a_bug_is_named()
