"""Lesson 3, exercise 1: the sinusoidal encoding without a loop (Vaswani et al. 2017, section 3.5).

PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i + 1) = cos(the same angle); positions start at 0.

Task: write `the_angles`, `[length, width/2]`, one for each position and each pair of columns. Then run

    manyheads check exercises/positions.py:sinusoidal --like positional
"""

import torch


def sinusoidal(length, width):
    """Return the encoding of positions 0 … length − 1: `[length, width]`."""
    position = torch.arange(length, dtype=torch.float64)[:, None]  # [length, 1]
    angle = the_angles(position, width)  # [length, width/2]
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()  # [length, width]


def the_angles(position, width):
    """Return one angle for each position and each pair of columns: `[length, width/2]`."""
    raise NotImplementedError("Write the_angles: position / 10000^(2i/width) for every pair i.")
