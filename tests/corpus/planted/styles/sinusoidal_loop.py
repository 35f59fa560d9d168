"""The sinusoidal encoding one number at a time."""

import math

import torch


def get_positional_encoding(max_len, d_model):
    """[max_len, d_model]"""
    pe = torch.zeros(max_len, d_model)
    for pos in range(max_len):
        for i in range(0, d_model, 2):
            angle = pos / (10000 ** (i / d_model))
            pe[pos, i] = math.sin(angle)
            pe[pos, i + 1] = math.cos(angle)
    return pe
