"""Fixed values to test self-attention modules with: assign the weights, and compare the output.

    model = SelfAttention(input_size=7, hidden=9)
    model.q.weight.data = SelfAttentionTestValues.q_weight
    ...
    torch.allclose(model(SelfAttentionTestValues.x), SelfAttentionTestValues.output, atol=1e-6)

`scripts/make_test_values.py` computed them by the formula of Vaswani et al. 2017 (arXiv:1706.03762).
"""

from pathlib import Path

from safetensors.torch import load_file

_VALUES = load_file(Path(__file__).with_suffix(".safetensors"))


class SelfAttentionTestValues:
    """Input x `[3, 5, 7]` and output `[3, 5, 9]` of a head of width 9."""

    input_size, hidden = 7, 9
    x = _VALUES["SelfAttention.x"]
    q_weight, q_bias = _VALUES["SelfAttention.q_weight"], _VALUES["SelfAttention.q_bias"]
    k_weight, k_bias = _VALUES["SelfAttention.k_weight"], _VALUES["SelfAttention.k_bias"]
    v_weight, v_bias = _VALUES["SelfAttention.v_weight"], _VALUES["SelfAttention.v_bias"]
    output = _VALUES["SelfAttention.output"]


class MultiHeadAttentionTestValues:
    """Input x `[3, 5, 7]` and output `[3, 5, 9]` of three heads of width 3, also with a causal mask."""

    input_size, hidden, num_heads = 7, 9, 3
    x = _VALUES["MultiHeadAttention.x"]
    q_weight, q_bias = _VALUES["MultiHeadAttention.q_weight"], _VALUES["MultiHeadAttention.q_bias"]
    k_weight, k_bias = _VALUES["MultiHeadAttention.k_weight"], _VALUES["MultiHeadAttention.k_bias"]
    v_weight, v_bias = _VALUES["MultiHeadAttention.v_weight"], _VALUES["MultiHeadAttention.v_bias"]
    mix_weight, mix_bias = _VALUES["MultiHeadAttention.mix_weight"], _VALUES["MultiHeadAttention.mix_bias"]
    output = _VALUES["MultiHeadAttention.output"]
    output_causal = _VALUES["MultiHeadAttention.output_causal"]
