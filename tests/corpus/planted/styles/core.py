"""torch.nn.functional.scaled_dot_product_attention's signature and conventions, in plain torch."""

import math

import torch


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """query [b, h, t, d], key and value [b, h, s, d] → [b, h, t, d].

    A boolean attn_mask keeps where it is True; a mask of floats is added to the scores. is_causal lets
    query i see the keys 0 … i.
    """
    length, source = query.size(-2), key.size(-2)
    scale_factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    keep = torch.ones(length, source, dtype=torch.bool, device=query.device)
    bias = torch.zeros(length, source, dtype=query.dtype, device=query.device)

    if is_causal:
        assert attn_mask is None
        keep = keep.tril(diagonal=0)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            keep = keep & attn_mask
        else:
            bias = bias + attn_mask
            keep = keep & ~torch.isneginf(attn_mask)
    if enable_gqa:
        group = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(group, dim=-3)
        value = value.repeat_interleave(group, dim=-3)

    attn_weight = query @ key.transpose(-2, -1) * scale_factor + bias
    attn_weight = attn_weight.masked_fill(~keep, -torch.inf)
    attn_weight = torch.softmax(attn_weight, dim=-1)
    attn_weight = attn_weight.masked_fill(~keep, 0.0)
    attn_weight = torch.dropout(attn_weight, dropout_p, train=True)
    return attn_weight @ value
