"""A sliding window whose keys and values roll through buffers, one token after another."""

import torch
from torch import nn


class LocalAttention(nn.Module):
    """Causal attention to the last `window` tokens, itself included.

    `forward(x, use_cache=True)` begins with a prompt. Then it takes one token [b, 1, e] at a time.
    Call `reset()` before another sequence.
    """

    def __init__(self, dim=32, num_heads=2, window=6, max_batch=4):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        shape = (max_batch, num_heads, window, dim // num_heads)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)
        self.seen = 0

    def reset(self):
        self.seen = 0
        self.k_cache.zero_()
        self.v_cache.zero_()

    def store(self, k, v):
        """Store the last tokens, and return those that a token may attend to."""
        b, _, t, _ = k.shape
        if t == 1 and self.seen >= self.window:  # the oldest one goes
            self.k_cache.copy_(self.k_cache.roll(-1, dims=2))
            self.v_cache.copy_(self.v_cache.roll(-1, dims=2))
        kept = min(t, self.window)
        first = min(self.seen, self.window - kept)
        self.k_cache[:b, :, first : first + kept] = k[:, :, t - kept :].detach()
        self.v_cache[:b, :, first : first + kept] = v[:, :, t - kept :].detach()
        self.seen += t
        filled = min(self.seen, self.window)
        return self.k_cache[:b, :, :filled], self.v_cache[:b, :, :filled]

    def forward(self, x, use_cache=False):
        t = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        i = torch.arange(t, device=x.device)
        distance = i[:, None] - i
        visible = (distance >= 0) & (distance < self.window)
        if use_cache:
            if self.seen and t > 1:
                raise ValueError("After the prompt, tokens come one at a time.")
            keys, values = self.store(k, v)
            if t == 1:
                k, v, visible = keys, values, torch.ones(1, keys.shape[2], dtype=torch.bool, device=x.device)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        y = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))
