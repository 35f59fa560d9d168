"""Multi-head attention you can see through: exact, fast, and every head's weights at any length."""

from manyheads import measures
from manyheads.biases import ALiBi, Dense, Relative
from manyheads.cache import Cache
from manyheads.functional import attention, attention_with_map, explain
from manyheads.layers import CrossAttention, MultiHeadAttention, SelfAttention
from manyheads.maps import AttentionMap
from manyheads.masks import (
    AfterSameToken,
    Causal,
    Diagonal,
    Documents,
    Drop,
    Full,
    Keep,
    Keys,
    Lengths,
    Mask,
    Prefix,
    Rule,
    SameToken,
    Window,
)
from manyheads.observe import observe, open_run
from manyheads.positions import Rotary, Sinusoidal

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AfterSameToken",
    "AttentionMap",
    "Cache",
    "Causal",
    "CrossAttention",
    "Dense",
    "Diagonal",
    "Documents",
    "Drop",
    "Full",
    "Keep",
    "Keys",
    "Lengths",
    "Mask",
    "MultiHeadAttention",
    "Prefix",
    "Relative",
    "Rotary",
    "Rule",
    "SameToken",
    "SelfAttention",
    "Sinusoidal",
    "Window",
    "attention",
    "attention_with_map",
    "explain",
    "measures",
    "observe",
    "open_run",
]
