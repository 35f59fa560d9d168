"""Rotary positions on neighbouring pairs: (0, 1), (2, 3), …"""

import torch


def apply_rotary(x, positions, base=10000.0):
    """x [b, h, t, d], positions [t] → x turned, [b, h, t, d]."""
    d = x.shape[-1]
    freqs = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    angles = positions[:, None].float() * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    turned = (x1 * cos - x2 * sin, x1 * sin + x2 * cos)
    return torch.stack(turned, dim=-1).flatten(-2)
