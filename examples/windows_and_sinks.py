"""Sliding windows and attention sinks: as masks, and as a learned logit per head."""

import torch

from manyheads import Causal, Prefix, Window, attention_with_map

q, k, v = (torch.randn(1, 4, 1024, 32) for _ in range(3))  # [b, h, t, d]

# Each query attends to itself and the 127 keys before it.
window = Window(left=127, right=0)
_, amap = attention_with_map(q, k, v, mask=window)
print("a window, drawn for 12 tokens:")
print(Window(left=3, right=0).draw(12, 12))
assert amap[0, 0, 500, :373].sum() == 0

# StreamingLLM (Xiao et al. 2024, arXiv:2309.17453): the first four keys stay visible.
streaming = Causal() & (window | Prefix(4))
_, amap = attention_with_map(q, k, v, mask=streaming)
print("weight on the first four keys:", f"{amap[0, 0, -1, :4].sum():.3f}")

# gpt-oss: a learned logit per head is added to the denominator of the softmax.
sink = torch.full((4,), 3.0)  # [h]
_, amap = attention_with_map(q, k, v, mask=window, sink=sink)
share = amap.sink_weight()  # [b, h, t]
print("share of the sink, mean:", f"{share.mean():.3f}")
assert torch.allclose(amap[0, 0, -1].sum(), 1 - share[0, 0, -1], atol=1e-5)
