"""Attention as textbooks present it: four presentations on the one implementation.

    modeling_attention   SelfAttention, MultiHeadSelfAttention: batch first, heads by reshape
    torch_multihead      MultiheadAttention, which replaces torch.nn.MultiheadAttention
    components           attention, PositionalEncoder, SelfAttention, CrossAttention, MultiHeadedAttention:
                         single heads that are combined
    annotated            PrepareForMultiHeadAttention, MultiHeadAttention: sequence first, keyword arguments,
                         scores that can be overridden
    test_values          fixed weights, inputs and outputs to test a SelfAttention with

Several modules have a class of the same name, so import from the module:

    from manyheads.classic.components import MultiHeadedAttention

Each class has the signature, attributes, layout, mask polarity and post-dropout weights of its original.
`attend(...)`, which no original has, also returns the `AttentionMap`: per head, before dropout.
"""
