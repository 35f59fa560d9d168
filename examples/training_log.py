"""Log the scores of every head during training: a row for each head and step in a CSV file."""

import csv

import torch
from torch import nn

import manyheads
from manyheads import Causal, MultiHeadAttention, Rotary

torch.manual_seed(0)


class Model(nn.Module):
    """A model of two attention layers, which learns to continue a repeated sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList([MultiHeadAttention(64, 4, position=Rotary(16)) for _ in range(2)])
        self.unembed = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)  # [b, t, e]
        for layer in self.layers:
            x = x + layer(x, mask=Causal())
        return self.unembed(x)  # [b, t, vocabulary]


def batch(size: int) -> torch.Tensor:
    half = torch.randint(64, (size, 24))
    return torch.cat([half, half], dim=1)  # [b, t]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
log = []
print("induction score of each head (layer.head)")
print("step  loss  " + "  ".join(f"{layer}.{head:<2}" for layer in range(2) for head in range(4)))
for step in range(121):
    ids = batch(32)
    loss = nn.functional.cross_entropy(model(ids)[:, 24:-1].flatten(0, 1), ids[:, 25:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        ids = batch(4)
        with torch.no_grad(), manyheads.observe(model) as recording:
            model(ids)
        table = recording.table(ids)  # previous token, induction, entropy, … of every head
        log += [{"step": step, "loss": loss.item(), **row._asdict()} for row in table]
        print(f"{step:4}  {loss.item():.2f}  " + "  ".join(f"{row.induction:.2f}" for row in table))

with open("training_log.csv", "w", encoding="utf-8", newline="") as file:
    writer = csv.DictWriter(file, log[0])
    writer.writeheader()
    writer.writerows(log)
print("wrote training_log.csv")
