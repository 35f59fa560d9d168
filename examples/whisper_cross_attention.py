"""Find the times of words by the cross-attention of Whisper: which audio frames each token attends to."""

import torch
import transformers

import manyheads
from manyheads import figures

config = transformers.WhisperConfig(
    vocab_size=128,
    num_mel_bins=16,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_source_positions=100,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
model = transformers.WhisperModel(config).eval()  # random weights; from_pretrained("…") needs the Hub
sound = torch.randn(1, 16, 200)  # [b, mel bins, frames]; the encoder halves the frames
ids = torch.tensor([[1, 20, 30, 40, 50]])  # the start token, and the transcript

with manyheads.observe(model) as recording, torch.no_grad():
    model(sound, decoder_input_ids=ids)

names = [name for name in recording if "encoder_attn" in name]
print("cross-attention:", names)
amap = recording[names[-1]]  # [b, h, tokens, frames]
print("frame with the largest weight, for each token and head:", amap.top(1).keys[0, :, :, 0].tolist())

# Each query predicts the next token, whose sound it attends to.
tokens = manyheads.TokenizedText(("the", " train", " left", ".", "<end>"), special=(4,))
best = recording.find_alignment_heads(most=2, least=-1)
print("heads that follow the order of the tokens best:", best)
alignment = recording.align(best, tokens=tokens, seconds=0.02)
for word in alignment.words:
    print(f"{word.start:.2f} to {word.end:.2f} s: {word.text}")

figure = figures.alignment(alignment, title="Random weights follow no sound")
figure.savefig("whisper_cross_attention.png", dpi=120)
print("wrote whisper_cross_attention.png")
