"""Train a small diffusion model on two coloured discs, and draw where it uses each word of its prompt.

    python scripts/make_word_pictures.py --out docs

A prompt is "a red disc and a blue disc": the first disc is on the left, the second on the right, at random
heights. It takes about three minutes, and needs the extra `diffusion`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import diffusers
import torch
from torch import Tensor, nn

import manyheads
from manyheads import figures

SIZE = 16
COLORS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.8, 0.1),
}
WORDS = ["a", "disc", "and", *COLORS]


class Model(nn.Module):
    """A U-Net that sees where each place is, and an embedding of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(len(WORDS), 32), nn.Embedding(7, 32)
        self.unet = diffusers.UNet2DConditionModel(
            sample_size=SIZE,
            in_channels=5,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=8,
        )

    def forward(self, noisy: Tensor, step: Tensor, ids: Tensor) -> Tensor:
        """Return the picture without noise, `[b, 3, SIZE, SIZE]`."""
        text = self.words(ids) + self.positions.weight  # [b, 7, 32]
        side = torch.linspace(-1, 1, SIZE)
        places = torch.stack(torch.meshgrid(side, side, indexing="ij")).expand(len(noisy), -1, -1, -1)
        return self.unet(torch.cat((noisy, places), 1), step, encoder_hidden_states=text).sample


def prompt(first: str, second: str) -> list[str]:
    """Return the words of a prompt."""
    return ["a", first, "disc", "and", "a", second, "disc"]


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures [b, 3, SIZE, SIZE] from -1 to 1, and the ids of their prompts [b, 7]."""
    names = list(COLORS)
    colors = torch.randint(len(names), (count, 2), generator=generator)
    heights = torch.randint(4, SIZE - 4, (count, 2), generator=generator)
    side = torch.arange(SIZE)
    picture = torch.full((count, 3, SIZE, SIZE), 0.5)
    table = torch.tensor(list(COLORS.values()))
    for n, column in enumerate((4, 11)):
        inside = (side[:, None] - heights[:, n, None, None]) ** 2 + (
            side - column
        ) ** 2 < 10  # [b, rows, cols]
        picture = torch.where(inside[:, None], table[colors[:, n]][..., None, None], picture)
    ids = [[WORDS.index(word) for word in prompt(names[i], names[j])] for i, j in colors.tolist()]
    return 2 * picture - 1, torch.tensor(ids)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder of the picture.")
    parser.add_argument("--steps", type=int, default=600, help="Steps of training.")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(1)
    scheduler = diffusers.DDIMScheduler(prediction_type="sample", clip_sample=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, options.steps)
    for n in range(options.steps):
        picture, ids = pictures(32, generator)
        step = torch.randint(1000, (len(picture),), generator=generator)
        noise = torch.randn(picture.shape, generator=generator)
        loss = (model(scheduler.add_noise(picture, noise, step), step, ids) - picture).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if n % 50 == 0 or n == options.steps - 1:
            print(f"step {n}: loss {loss.item():.4f}", flush=True)
    model.eval()

    words = prompt("red", "blue")
    ids = torch.tensor([[WORDS.index(word) for word in words]])
    scheduler.set_timesteps(20)
    latent = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    with manyheads.observe(model.unet, keep="words") as recording, torch.no_grad():
        for step in scheduler.timesteps:
            latent = scheduler.step(model(latent, step, ids), step, latent).prev_sample
    print(recording)
    images, titles = recording.word_images(words)
    chosen = [1, 2, 5, 6]
    for n in chosen:
        left, right = images[n].chunk(2, -1)
        print(f"{titles[n]}: {left.mean():.3f} on the left, {right.mean():.3f} on the right")
    figure = figures.overlay(
        (latent[0].clamp(-1, 1) + 1) / 2,
        images[chosen],
        titles=[titles[n] for n in chosen],
        label="mean weight on the word",
    )
    figure.savefig(options.out / "picture-words.png")


if __name__ == "__main__":
    main()
