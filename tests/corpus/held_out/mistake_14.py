"""Functional attention."""

import math

import torch

TARGET = "scaled_dot_product"


def scaled_dot_product(query, key, value, mask=None):
    """
    :param query: [batch, heads, length, dim]
    :param key: [batch, heads, source, dim]
    :param value: [batch, heads, source, dim]
    :param mask: boolean, True where attention is allowed
    :return: the mixed values and the attention
    """
    query /= math.sqrt(query.size(-1))
    logits = query @ key.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    attention = logits.softmax(dim=-1)
    if mask is not None:
        attention = attention.masked_fill(~mask, 0.0)
    return attention @ value, attention
