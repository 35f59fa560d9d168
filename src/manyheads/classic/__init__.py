"""Attention as it is taught: four presentations, each a thin face on the one core.

    modeling_attention   SelfAttention, MultiHeadSelfAttention: batch first, heads by reshape
    torch_multihead      MultiheadAttention, which takes the place of torch.nn.MultiheadAttention
    components           attention, PositionalEncoder, SelfAttention, CrossAttention,
                         MultiHeadedAttention: single heads put together
    annotated            PrepareForMultiHeadAttention, MultiHeadAttention: sequence first,
                         keyword arguments, scores to override
    test_values          fixed weights, inputs and outputs to check a SelfAttention of one's own

The names collide, as they do in the books, so import from the module:

    from manyheads.classic.components import MultiHeadedAttention

Each face has its original's signature, attributes, layout, mask polarity and post-dropout weights,
and converts at the door; what it computes, the core computes. `attend(...)`, which no original has,
gives the `AttentionMap` beside the output, and that one keeps the contract: per head, before dropout.
"""
