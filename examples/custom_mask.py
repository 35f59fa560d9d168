"""Write a custom mask in two ways: as a rule, and as a combination of masks."""

import torch

from manyheads import Causal, Diagonal, Documents, Rule, Window, attention, explain

q, k, v = (torch.randn(1, 2, 256, 32) for _ in range(3))  # [b, h, t, d]

# A rule is a function of batch entry, head, query and key. This one keeps every second key up to the query.
dilated = Rule(lambda b, h, i, j: ((i - j) % 2 == 0) & (j <= i))
print(dilated.draw(10, 10))

# A combination of masks: causal attention within each document, and to the previous token in any document.
documents = torch.arange(256) // 64  # [s]: four documents of 64 tokens
packed = Causal() & (Documents(documents) | Diagonal(-1))
print(packed)

for mask in (dilated, packed, Causal() & Window(left=31)):
    out = attention(q, k, v, mask=mask)
    kept = mask.bind(0, 256).keep(
        0, 0, torch.arange(256)[:, None], torch.arange(256)
    )  # [t, s], True = may attend
    peer = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    assert torch.allclose(out, peer, atol=1e-5)
    explain(q, k, v, mask=mask)  # prints which kernels support the mask, and why others don't
