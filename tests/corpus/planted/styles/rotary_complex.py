"""Rotary positions as a product of complex numbers, neighbours in pairs."""

import torch


def apply_rotary_emb(xq, xk, theta=10000.0):
    """xq and xk [b, t, h, d] → both turned by their positions 0 … t - 1."""
    d = xq.shape[-1]
    freqs = 1.0 / (theta ** (torch.arange(0, d, 2).float() / d))
    t = torch.arange(xq.shape[1]).float()
    freqs = torch.outer(t, freqs)
    freqs_cis = torch.polar(torch.ones_like(freqs), freqs)[None, :, None, :]
    xq_ = torch.view_as_complex(xq.unflatten(-1, (-1, 2)).contiguous())
    xk_ = torch.view_as_complex(xk.unflatten(-1, (-1, 2)).contiguous())
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(-2)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(-2)
    return xq_out.type_as(xq), xk_out.type_as(xk)
