"""Record and plot the cross-attention of Whisper: which audio frames each token attends to."""

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
ids = torch.tensor([[1, 20, 30, 40, 50]])  # the transcript's tokens

with manyheads.observe(model) as recording, torch.no_grad():
    model(sound, decoder_input_ids=ids)

names = [name for name in recording if "encoder_attn" in name]
print("cross-attention:", names)
amap = recording[names[-1]]  # [b, h, tokens, frames]
print("frame with the largest weight, for each token and head:", amap.top(1).keys[0, :, :, 0].tolist())

figure = figures.head(
    amap, ["<s>", "the", "train", "left", "."], head=0, keys=[f"{20 * n} ms" for n in range(100)]
)
figure.savefig("whisper_cross_attention.png", dpi=120)
print("wrote whisper_cross_attention.png")
