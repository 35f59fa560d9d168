"""The sinusoidal encoding as a table that a function makes."""

import torch


def positional_encoding(length: int, d_model: int) -> torch.Tensor:
    """[length, d_model], sine and cosine by turns."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    power = 2 * torch.arange(d_model // 2, dtype=torch.float64) / d_model
    angles = positions / 10000.0**power
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    return table.float()
