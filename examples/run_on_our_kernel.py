"""Run a model of transformers on manyheads' kernel, and accelerate a model of PyTorch.

Every layer of the transformers model runs on our kernel, which a count of its calls proves. `accelerate`
sends PyTorch's own attention calls to the same kernel where that is faster.
"""

import time

import torch
import transformers

import manyheads

manyheads.hf.register()
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).eval()  # random weights; from_pretrained("…") needs the Hub
ids = torch.randint(256, (1, 1024))  # [b, t]

with torch.no_grad():
    expected = model(ids).logits

    start = time.perf_counter()
    with manyheads.accelerate() as report:
        accelerated = model(ids).logits
    print(f"accelerated, {time.perf_counter() - start:.2f} s: {report}")

    model.set_attn_implementation("manyheads")
    with manyheads.hf.count(model) as calls:
        logits = model(ids).logits
print(f"on manyheads: {calls}")

for name, other in (("accelerated", accelerated), ("on manyheads", logits)):
    print(f"largest difference of the logits, {name}: {(other - expected).abs().max():.1e}")
assert len(calls.layers) == config.num_hidden_layers
