"""Lesson 3, exercise 1: the sinusoidal encoding without a loop (Vaswani et al. 2017, section 3.5)."""

import torch


def sinusoidal(length, width):
    """Return the encoding of positions 0 … length − 1: `[length, width]`."""
    position = torch.arange(length, dtype=torch.float64)[:, None]  # [length, 1]
    column = torch.arange(0, width, 2, dtype=torch.float64)  # [width/2]: 0, 2, 4, …, the paper's 2i
    angle = position / 10000 ** (column / width)  # [length, width/2]
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()  # [length, width]
