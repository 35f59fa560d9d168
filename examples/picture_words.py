"""Find which words of a prompt a diffusion model uses where in its picture; needs the extra `diffusion`."""

import diffusers
import torch

import manyheads
from manyheads import TokenizedText, figures

transformer = diffusers.PixArtTransformer2DModel(
    num_attention_heads=4,
    attention_head_dim=16,
    out_channels=8,
    num_layers=4,
    cross_attention_dim=64,
    sample_size=32,
    patch_size=2,
    caption_channels=48,
).eval()  # random weights; from_pretrained("…") needs the Hub
scheduler = diffusers.DDIMScheduler()
scheduler.set_timesteps(4)
latents = torch.randn(
    1, 4, 32, 32, generator=torch.Generator().manual_seed(0)
)  # [b, channels, rows, columns]
text = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(1))  # from a text encoder

with manyheads.observe(transformer, keep="words") as recording, torch.no_grad():
    for t in scheduler.timesteps:
        unknown = {"resolution": None, "aspect_ratio": None}
        out = transformer(latents, text, timestep=t[None], added_cond_kwargs=unknown).sample
        latents = scheduler.step(out[:, :4], t, latents).prev_sample
print(recording)

prompt = TokenizedText(("a", " red", " fox", " in", " snow", "</s>"), special=(5,))
images, words = recording.word_images(prompt)
for word, image in zip(words, images, strict=True):
    print(f"{word}: weights from {image.min():.3f} to {image.max():.3f} on {tuple(image.shape)} patches")

picture = latents[0, :3].sigmoid()  # a VAE would decode it
figures.overlay(picture, images, titles=words, label="mean weight on the word").savefig("picture_words.png")
print("wrote picture_words.png")
