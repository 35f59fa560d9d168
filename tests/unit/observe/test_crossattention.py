"""Cross-attention of recorded models: found by path, mask and shape; steps of a generation are joined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads import observe
from manyheads.observe.crossattention import read_name

E, H = 16, 2


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(E, H, 1, 2, 32, batch_first=True).eval()


@pytest.mark.parametrize("t", [4, 7, 9])
def test_the_layers_of_a_transformer_are_found(t: int) -> None:
    """Also if there are as many queries as keys."""
    model, mask = transformer(), nn.Transformer.generate_square_subsequent_mask(t)
    with observe(model) as recording, torch.no_grad():
        model(torch.randn(1, 7, E), torch.randn(1, t, E), tgt_mask=mask)
    names = [f"decoder.layers.{n}.multihead_attn" for n in range(2)]
    found = recording.align([(0, 0), (1, 1)], median_filter=1)
    assert found.heads == ((names[0], 0), (names[1], 1))
    assert [head.layer for head in recording.find_alignment_heads(least=-1, median_filter=1)] != []
    assert found.path[-1].tolist() == [t - 1, 6]
    for name in ("decoder.layers.0.self_attn", "encoder.layers.0.self_attn"):
        with pytest.raises(ValueError, match="which is self-attention"):
            recording.align([(name, 0)])


class Attention(nn.Module):
    """Attention whose name says nothing about its keys."""

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        q, k = (each.unflatten(-1, (H, -1)).transpose(1, 2) for each in (x, memory))  # [b, h, t, d]
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor, memory: Tensor, past: Tensor | None = None) -> Tensor:
        """The query of a step attends to itself and those before it."""
        own = x if past is None else torch.cat((past, x), 1)
        return self.second(self.first(x, own, causal=past is None), memory)


def test_unnamed_layers_are_judged_by_mask_and_shape() -> None:
    model, x = Decoder(), torch.randn(1, 5, E)
    with observe(model) as recording:
        model(x, torch.randn(1, 9, E))
    assert recording.align([(0, 0)]).heads == (("second", 0),)
    with observe(model) as recording:
        model(x, torch.randn(1, 5, E))
    with pytest.raises(ValueError, match="Expected a recording with cross-attention layers, got only other"):
        recording.align([(0, 0)])
    assert recording.align([("second", 0)]).heads == (("second", 0),)  # a named layer is taken
    with pytest.raises(ValueError, match="which is self-attention"):
        recording.align([("first", 0)])


@pytest.mark.parametrize("prompt", [1, 3])
def test_steps_are_the_queries_of_one_sequence(prompt: int) -> None:
    """Also in a second sequence over the same keys, whose first call has as many queries as a step."""
    model, x, memory = Decoder(), torch.randn(2, 8, E), torch.randn(1, 30, E)
    with observe(model) as recording:
        for sequence in x:
            model(sequence[None, :prompt], memory)
            for n in range(prompt, 8):
                model(sequence[None, n : n + 1], memory, past=sequence[None, :n])
    with observe(model) as whole:
        model(x[1:], memory)
    found, want = (each.align([("second", 0)], median_filter=3) for each in (recording, whole))
    assert torch.equal(found.path, want.path)
    torch.testing.assert_close(found.pooled(8, 30), want.pooled(8, 30))


def test_sequences_that_are_reordered_raise() -> None:
    """As in beam search, in which a step may go on with another sequence of the batch."""
    model, x, memory = Decoder(), torch.randn(2, 4, E), torch.randn(2, 30, E)
    with observe(model) as recording:
        model(x[:, :1], memory)
        model(x[:, 1:2], memory, past=x[:, :1])
        model(x[:, 2:3], memory, past=x[[1, 0], :2])
    with pytest.raises(ValueError, match="as in beam search, which reorders the sequences"):
        recording.align([("second", 0)], batch=0)


def test_statistics_have_no_weights_to_align() -> None:
    model = transformer()
    with observe(model, keep="statistics") as recording, torch.no_grad():
        model(torch.randn(1, 7, E), torch.randn(1, 4, E))
    for call in (lambda: recording.align([(0, 0)]), recording.find_alignment_heads):
        with pytest.raises(ValueError, match='keep="statistics", which keeps no weights to align'):
            call()


def test_recorded_heads_have_their_numbers_in_the_model() -> None:
    model = transformer()
    with observe(model, heads=[1]) as recording, torch.no_grad():
        model(torch.randn(1, 7, E), torch.randn(1, 4, E))
    assert recording.find_alignment_heads(least=-1, median_filter=1)[0].head == 1
    assert recording.align([(1, 1)]).heads[0][1] == 1
    with pytest.raises(ValueError, match="has the heads 1, and heads= names head 0"):
        recording.align([(1, 0)])


def test_a_recording_of_a_file_is_aligned_too(tmp_path) -> None:
    from manyheads import open_run

    model = transformer()
    with observe(model) as recording, torch.no_grad():
        model(torch.randn(1, 20, E), torch.randn(1, 4, E))
    recording.save(tmp_path / "run.safetensors")
    opened = open_run(tmp_path / "run.safetensors")
    assert torch.equal(opened.align([(0, 0)]).path, recording.align([(0, 0)]).path)


@pytest.mark.parametrize(
    ("path", "cross"),
    [
        ("model.decoder.layers.0.encoder_attn", True),
        ("model.encoder.layers.0.self_attn", False),
        ("decoder.block.0.layer.1.EncDecAttention", True),
        ("decoder.block.0.layer.0.SelfAttention", False),
        ("bert.encoder.layer.0.crossattention.self", True),
        ("cross_encoder.encoder.layer.0.attention.self", False),
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn2", True),
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn1", None),
        ("h.0.attn", None),
        ("", None),
    ],
)
def test_paths_tell_cross_from_self_attention(path: str, cross: bool | None) -> None:
    assert read_name(path) is cross
