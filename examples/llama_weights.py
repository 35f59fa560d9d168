"""Read the attention weights of a Llama that uses a fused kernel.

The model's own kernel computes the output. manyheads records q, k and the log-sum-exp, and computes weights
on request.
"""

import torch
import transformers

import manyheads

config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).eval()  # random weights; from_pretrained("…") needs the Hub
ids = torch.randint(256, (1, 2048))  # [b, t]

with torch.no_grad():
    plain = model(ids).logits
    with manyheads.observe(model) as recording:
        observed = model(ids).logits
assert torch.equal(plain, observed)  # observing does not change the output

print(recording)
amap = recording["model.layers.2.self_attn"]
print("head 5, last query, last five keys:", amap[0, 5, -1, -5:])
print("entropy of each head, in nats:", amap.entropy().mean(-1)[0])  # [h]
