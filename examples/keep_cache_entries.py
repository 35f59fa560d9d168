"""Which entries of a key/value cache to keep: what four policies drop, and what it costs a model."""

from pathlib import Path

import torch

from manyheads import figures, lm, policies

model, tokenizer = lm.load()
pages = [Path(__file__).parents[1] / name for name in ("README.md", "docs/checker.md", "docs/viewer.md")]
ids = torch.tensor([tokenizer.encode(page.read_text(encoding="utf-8")).ids[:512] for page in pages])  # [b, t]

kinds = {
    "recency": policies.Recency,
    "attention sinks": policies.AttentionSinks,
    "SnapKV": policies.SnapKV,
    "H2O": policies.H2O,
}
costs = {}
print("of 384 tokens, keep   weight on dropped keys   increase of the loss (nats per token)")
for name, kind in kinds.items():
    costs[name] = {}
    for budget in (16, 32, 64, 128, 256):
        cost = policies.measure_model(kind(budget), model, ids, prompt=384)
        costs[name][budget] = cost
        print(f"{name:>15} {budget:4} {cost.dropped.mean():20.3f} {cost.loss.mean():24.3f}")

figure = figures.cache_costs(costs, title="The shipped model: 128 tokens after a prompt of 384")
figure.savefig("cache_costs.png")
print("wrote cache_costs.png")
