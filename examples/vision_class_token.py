"""Plot what the class token of a vision transformer attends to in each head, over the image."""

import torch
import transformers
from matplotlib.figure import Figure

import manyheads

GRID, PATCH = 14, 8
config = transformers.ViTConfig(
    image_size=GRID * PATCH, patch_size=PATCH, hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
    intermediate_size=192,
)  # fmt: skip
model = transformers.ViTModel(config).eval()  # random weights; from_pretrained("…") needs the Hub
picture = torch.rand(1, 3, GRID * PATCH, GRID * PATCH)  # [b, colours, height, width]

with manyheads.observe(model) as recording, torch.no_grad():
    model(picture)

amap = recording[-1]  # the last layer; token 0 is the class token
patches = amap[0, :, 0, 1:].unflatten(-1, (GRID, GRID))  # [h, rows, columns]

figure = Figure(figsize=(10, 2.2), layout="constrained")
for head, axes in enumerate(figure.subplots(1, 6)):
    axes.imshow(picture[0].permute(1, 2, 0).numpy(), extent=(0, GRID, GRID, 0))
    axes.imshow(patches[head].numpy(), extent=(0, GRID, GRID, 0), alpha=0.7)
    axes.set_title(f"head {head}")
    axes.set_axis_off()
figure.savefig("vision_class_token.png", dpi=120)
print("wrote vision_class_token.png")
print("weight of the class token on itself, per head:", amap[0, :, 0, 0].tolist())
