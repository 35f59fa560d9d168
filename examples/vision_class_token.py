"""Draw what the class token and a patch of a vision transformer attend to in each head, over the picture."""

import numpy as np
import torch
import transformers

import manyheads

GRID, PATCH = (12, 16), 14
config = transformers.Dinov2WithRegistersConfig(
    image_size=GRID[0] * PATCH, patch_size=PATCH, hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
    num_register_tokens=4,
)  # fmt: skip
torch.manual_seed(0)
model = transformers.Dinov2WithRegistersModel(
    config
).eval()  # random weights; from_pretrained("…") needs the Hub
for name, parameter in model.named_parameters():  # larger scores, because random ones give even weights
    if "query" in name or "key" in name or "q_proj" in name or "k_proj" in name:
        parameter.data *= 6

# A picture: sky, a hill, a house and the sun.
y, x = np.mgrid[0 : GRID[0] * PATCH, 0 : GRID[1] * PATCH] / (GRID[0] * PATCH)
picture = np.stack([0.55 + 0.2 * y, 0.75 + 0.1 * y, 0.95 - 0.1 * y], -1)  # [height, width, 3], 0 to 1
picture[y > 0.62 + 0.08 * np.sin(5 * x)] = (0.3, 0.5, 0.2)
picture[(abs(x - 0.45) < 0.13) & (y > 0.45) & (y < 0.75)] = (0.75, 0.3, 0.25)
picture[(y > 0.3) & (y < 0.46) & (abs(x - 0.45) < 1.2 * (y - 0.3))] = (0.3, 0.2, 0.2)
picture[(x - 1.05) ** 2 + (y - 0.22) ** 2 < 0.012] = (1.0, 0.85, 0.2)

pixels = (
    torch.tensor(picture, dtype=torch.float32).permute(2, 0, 1)[None] - 0.5
) / 0.5  # as a processor does
with manyheads.observe(model) as recording, torch.no_grad():
    model(pixels)

recording.overlay(picture, title="class token, last layer").savefig("vision_class_token.png", dpi=120)
recording.overlay(picture, (7, 6), title="patch 7, 6, last layer").savefig("vision_patch.png", dpi=120)
print("wrote vision_class_token.png")
print("wrote vision_patch.png")

amap, patches = recording[-1], recording.patches()
print("patches:", patches)
on_patches = amap.image(0).sum((-2, -1))[0]  # [h]; the rest is on the class token and the registers
print("the class token's weight on patches, per head:", [round(w, 2) for w in on_patches.tolist()])
