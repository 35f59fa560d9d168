"""Bugs of public reports that no style of the matrix can have: they are named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyheads import checker
from manyheads.checker.isolation.target import find

pytestmark = pytest.mark.usefixtures("one_thread", "quick")

LENGTHS = '''
import torch

def attention(q, k, v, lengths=None):
    """q [b, h, t, d], k and v [b, h, s, d]; lengths [b]: the number of keys of each sequence."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if lengths is not None:
        hidden = HIDDEN
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v
'''
PACKED = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = SPLIT
        y = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, e))
"""
SUMMED = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.query = nn.Linear(n_embd, head_size)
        self.key = nn.Linear(n_embd, head_size)
        self.value = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ self.value(x)

class SelfAttention(nn.Module):
    def __init__(self, n_embd, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, head_size) for _ in range(num_heads)])

    def forward(self, x):
        return JOIN(head(x) for head in self.heads)
"""
STABLE = '''
import torch

def attention(q, k, v):
    """q [b, h, t, d], k and v [b, h, s, d]."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    powers = torch.exp(scores - LARGEST)
    return powers / powers.sum(-1, keepdim=True) @ v
'''
FUSED = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, hidden_size=32, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * (hidden_size // n_head))
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        d = x.shape[-1] // self.n_head
        q, k, v = self.query_key_value(x).split([x.shape[-1], d, d], -1)
        q = q.unflatten(-1, (self.n_head, d)).transpose(1, 2)
        y = torch.softmax(q @ k[:, None].mT SCALE, -1) @ v[:, None]
        return self.dense(y.transpose(1, 2).flatten(2))
"""
RESIDUAL = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, input_dim, num_heads=2, use_residual=True):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(input_dim, input_dim, bias=False) for _ in range(3))

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (f(x).view(b, SPLIT for f in (self.W_q, self.W_k, self.W_v))
        y = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        return y.reshape(b, t, e) + x
"""
NESTED = """
import torch
from torch import nn

class Product(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v, mask):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal and GIVEN:
            triangle = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            mask = triangle if mask is None else mask & triangle
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

class SelfAttention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.product = Product(causal=True)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        '''mask [t, s]: True keeps.'''
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.product(q, k, v, mask).transpose(1, 2).flatten(2))
"""


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("source", "place", "text", "bug"),
    [
        (LENGTHS, "HIDDEN", "torch.arange(k.shape[2]) >= lengths[:, None]", ""),
        (LENGTHS, "HIDDEN", "torch.arange(k.shape[2]) > lengths[:, None]", "padding-off-by-one"),
        (LENGTHS, "HIDDEN", "torch.arange(1, k.shape[2] + 1) >= lengths[:, None]", "padding-off-by-one"),
        (PACKED, "SPLIT", "self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)", ""),
        (
            PACKED,
            "SPLIT",
            "self.qkv(x).view(b, 3, t, self.num_heads, -1).permute(1, 0, 3, 2, 4)",
            "packed-without-transpose",
        ),
        (
            PACKED,
            "SPLIT",
            "self.qkv(x).view(b, self.num_heads, t, -1).chunk(3, -1)",
            "split-without-transpose",
        ),
        (SUMMED, "JOIN", "sum", "heads-summed"),
        (FUSED, "SCALE", "/ d**0.5", ""),
        (FUSED, "SCALE", "", "unscaled"),
        (RESIDUAL, "SPLIT", "self.num_heads, t, -1)", "split-without-transpose"),
        (NESTED, "GIVEN", "True", ""),
        (NESTED, "GIVEN", "mask is not None", "causal-ignored"),
        (STABLE, "LARGEST", "scores.amax(-1, keepdim=True)", ""),
        (STABLE, "LARGEST", "scores.amax()", "no-max-subtracted"),
    ],
)
def test_a_bug_is_named(source: str, place: str, text: str, bug: str, tmp_path: Path) -> None:
    path = tmp_path / "candidate.py"
    path.write_text(source.replace(place, text), encoding="utf-8")
    found = checker.check(
        find(f"{path}:{'SelfAttention' if 'class SelfAttention' in source else 'attention'}")
    )
    assert found.passed == (not bug), [check for check in found.checks if check.status == "failed"]
    assert {diagnosis.bug for diagnosis in found.diagnosis} == ({bug} if bug else set())
