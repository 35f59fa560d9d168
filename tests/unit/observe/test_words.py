"""Words of a picture: sums over steps and layers equal to those of the maps, in the memory of one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads import TokenizedText, observe
from tests.observed import raises

E, H, S = 16, 2, 6
ROWS, COLS = 8, 6


class Attention(nn.Module):
    """Attention of places to tokens, or to each other; the attributes are those of diffusers."""

    def __init__(self, is_cross: bool | None) -> None:
        super().__init__()
        self.is_cross_attention = is_cross
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        keys = x if text is None else text
        q, k = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (4 * self.q(x), self.k(keys)))
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class UNet(nn.Module):
    """Two resolutions: the finer has self-attention too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Attention(False)
        self.fine, self.coarse = Attention(True), Attention(True)

    def forward(self, sample: Tensor, text: Tensor) -> Tensor:
        x = sample.flatten(2).mT  # [b, places, E]
        x = x + self.fine(self.inside(x), text)
        small = F.avg_pool2d(x.mT.unflatten(2, sample.shape[2:]), 2, ceil_mode=True)
        self.coarse(small.flatten(2).mT, text)
        return x.mT.unflatten(2, sample.shape[2:])


def steps(
    b: int = 1, count: int = 3, rows: int = ROWS, cols: int = COLS
) -> tuple[UNet, list[Tensor], Tensor]:
    torch.manual_seed(0)
    return UNet().eval(), [torch.randn(b, E, rows, cols) for _ in range(count)], torch.randn(b, S, E)


@pytest.mark.parametrize("cols", [6, 7])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_images_are_means_of_the_maps(cols: int, interpolation: str) -> None:
    model, pictures, text = steps(b=2, cols=cols)
    with torch.no_grad(), observe(model) as maps, observe(model, keep="words") as recording:
        for picture in pictures:
            model(picture, text)
    layers = []
    for name, shape in (("fine", (ROWS, cols)), ("coarse", (4, -(-cols // 2)))):
        mean = torch.stack([amap[1].mean(0) for amap in maps.calls(name)]).mean(0)  # [t, s]
        image = mean.mT.unflatten(1, shape)[None]
        options: dict[str, Any] = {} if interpolation == "nearest" else {"align_corners": False}
        layers.append(F.interpolate(image, size=(ROWS, cols), mode=interpolation, **options)[0])
    images, words = recording.word_images(batch=1, interpolation=interpolation)
    torch.testing.assert_close(images, torch.stack(layers).mean(0).clamp(0, 1), atol=1e-6, rtol=1e-5)
    assert words == [str(n) for n in range(S)]
    only = recording.word_images(batch=-1, layers="fine").images
    numbered = [recording.word_images(batch=-1, layers=layers).images for layers in (0, [0], ["fine", -2])]
    assert all(torch.equal(each, only) for each in numbered)
    torch.testing.assert_close(only, layers[0], atol=1e-6, rtol=1e-5)
    assert recording.word_images(batch=0, grid=(3, 5)).images.shape == (S, 3, 5)


def test_the_output_is_unchanged_and_the_memory_is_that_of_a_step() -> None:
    model, pictures, text = steps(count=6)
    sizes = []
    with torch.no_grad(), observe(model, keep="words") as recording:
        for picture in pictures:
            out = model(picture, text)
            sizes.append(recording.nbytes)
    with torch.no_grad():
        assert torch.equal(out, model(pictures[-1], text))
    assert set(sizes) == {4 * S * (ROWS * COLS + 12)}
    assert "fine: [b, s, rows, cols] = [1, 6, 8, 6] of 6 steps" in repr(recording)


def test_chosen_heads_and_layers_are_averaged() -> None:
    model, pictures, text = steps(count=1)
    with (
        torch.no_grad(),
        observe(model) as maps,
        observe(model, keep="words", heads=[1], layers="fine") as one,
    ):
        model(pictures[0], text)
    assert list(one.words.sums) == ["fine"]
    torch.testing.assert_close(one.word_images().images.flatten(1).mT, maps["fine"][0, 1])


def test_tokens_of_a_word_are_added_up() -> None:
    """A prompt of five tokens, padded to six; special tokens and punctuation have no images."""
    model, pictures, text = steps(count=1)
    with torch.no_grad(), observe(model, keep="words") as recording:
        model(pictures[0], text)
    every = recording.word_images().images
    tokens = TokenizedText(("<s>", "fox", "glove", ",", " red"), special=(0,))
    images, words = recording.word_images(tokens)
    assert words == ["foxglove", "red"]
    torch.testing.assert_close(images, torch.stack((every[1] + every[2], every[4])))
    assert recording.word_images(["a", "b"]).words == ["a", "b"]
    with pytest.raises(ValueError, match="at least one word"):
        recording.word_images(TokenizedText(("<s>", "."), special=(0,)))
    with pytest.raises(ValueError, match="labels of the 6 keys, or of the first of them, got 7"):
        recording.word_images(["x"] * 7)
    with pytest.raises(TypeError, match="list of strings"):
        recording.word_images("fox")


class Joint(nn.Module):
    """One sequence of text and picture."""

    def __init__(self, processor: str) -> None:
        super().__init__()
        self.attn = Attention(None)
        self.attn.processor = type(processor, (), {})()
        self.is_text_first = processor == "FluxAttnProcessor"
        self.config = type("Config", (), {"patch_size": 2})()

    def forward(self, hidden_states: Tensor, text: Tensor) -> None:
        x = hidden_states.flatten(2).mT if hidden_states.dim() == 4 else hidden_states
        x = x.unflatten(1, (-1, 4)).mean(2)  # patches of four places, whose order doesn't matter here
        self.attn(torch.cat((text, x) if self.is_text_first else (x, text), 1))


@pytest.mark.parametrize("processor", ["JointAttnProcessor2_0", "FluxAttnProcessor"])
@pytest.mark.parametrize("given", [False, True])
def test_joint_attention_is_cut_into_text_and_picture(processor: str, given: bool) -> None:
    model = Joint(processor).eval()
    picture, text = torch.randn(1, E, ROWS, COLS), torch.randn(1, S, E)
    picture, grid = (picture.flatten(2).mT, {"words": (4, 3)}) if given else (picture, "words")
    with torch.no_grad(), observe(model) as maps, observe(model, keep=grid) as recording:
        model(picture, text)
    w = maps["attn"][0].mean(0)  # [18, 18]
    want = w[S:, :S] if processor == "FluxAttnProcessor" else w[:12, 12:]
    torch.testing.assert_close(recording.word_images().images.flatten(1).mT, want)


def test_joint_attention_of_an_unknown_order_raises() -> None:
    model, inputs = Joint("AnotherProcessor").eval(), (torch.randn(1, E, ROWS, COLS), torch.randn(1, S, E))
    message = "attn has 18 queries … their order isn't known for AnotherProcessor"
    with raises(ValueError, message), observe(model, keep="words"):
        model(*inputs)


def test_what_isnt_a_picture_raises() -> None:
    model, pictures, text = steps()
    message = "fine has 48 queries, which aren't the places of a picture of 5 × 5"
    with raises(ValueError, message), observe(model, keep={"words": (5, 5)}):
        model(pictures[0], text)
    with raises(ValueError, "The size of the picture isn't known"), observe(model.fine, keep="words"):
        model.fine(torch.randn(1, 12, E), text)
    with raises(ValueError, "one picture, or batch of pictures, at a time"), observe(model, keep="words"):
        model(pictures[0], text)
        model(pictures[0], text[:, :3])


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (["words", "entropy"], ValueError, '"words" alone, got entropy beside it'),
        ({"words": 5}, TypeError, "to be .rows, cols., got 5"),
        ({"words": (0, 5)}, ValueError, "at least 1, got 0"),
        ({"words": (2.0, 5)}, TypeError, "whole number"),
    ],
)
def test_wrong_values_of_keep(keep: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), observe(UNet(), keep=keep):
        pass


def test_wrong_arguments_and_other_recordings() -> None:
    model, pictures, text = steps(b=2, count=1)
    with torch.no_grad(), observe(model) as maps, observe(model, keep="words") as recording:
        model(pictures[0], text)
    with raises(ValueError, 'Observe with observe(model, keep="words").'):
        maps.word_images()
    with raises(ValueError, "batch=-1 is the prompt of a single picture"):
        recording.word_images()
    with raises(ValueError, "batch to be at most 1"):
        recording.word_images(batch=2)
    with raises(KeyError, "No layer 'fin_' was recorded"):
        recording.word_images(batch=0, layers="fin_")
    with raises(KeyError, "There is no layer 2: 2 layers"):
        recording.word_images(batch=0, layers=2)
    with raises(ValueError, "interpolation to be one of bilinear"):
        recording.word_images(batch=0, interpolation="linear")
    with raises(TypeError, "(rows, cols), got 5"):
        recording.word_images(batch=0, grid=5)
    assert "fine" not in recording
    assert recording.get("fine") is None
    with raises(KeyError, "has no maps. Use word_images()"):
        recording[0]
    for use in (recording.plot, recording.table, recording.view, lambda: recording.save("run.safetensors")):
        with raises(ValueError, "has no maps. Use word_images()"):
            use()
    with raises(ValueError, "has no maps. Use word_images()"):
        recording.label(["a"] * S)
    with raises(ValueError, "apply to maps"), observe(model, keep="words", device="cpu"):
        pass
    with raises(MemoryError, "max_bytes"), torch.no_grad(), observe(model, keep="words", max_bytes=100):
        model(pictures[0], text)
