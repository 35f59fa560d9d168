"""Find induction heads: they attend to the token that followed an earlier occurrence of the current token."""

import torch

import manyheads
from manyheads import lm

model, tokenizer = lm.load()  # the small model of the package
half = torch.randint(300, 2000, (100,), generator=torch.Generator().manual_seed(0))
ids = torch.cat([half, half])[None]  # [b, t]: random tokens, twice

with manyheads.observe(model) as recording, torch.no_grad():
    model(ids)

table = recording.table(ids).sorted("induction")
print("layer               head  induction")
for row in table[:5]:
    print(f"{row.layer:18}  {row.head:4}  {row.induction:.2f}")
assert table[0].induction > 0.5

recording.plot().savefig("induction_heads.png", dpi=120)
print("wrote induction_heads.png")
