"""The attention of our encoder layer."""

from torch import Tensor, nn

TARGET = "EncoderSelfAttention"


class EncoderSelfAttention(nn.Module):
    """Self-attention over the tokens of each sentence.

    Args:
        x: [batch_size, seq_len, embed_dim]
    Returns:
        [batch_size, seq_len, embed_dim]
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.mha(x, x, x, need_weights=False)
        return out
