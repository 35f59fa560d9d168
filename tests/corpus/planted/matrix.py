"""Which bugs are planted in which styles.

A style is an ordinary file in `styles/`, right as it stands. A bug is planted by replacing pieces of
its text, each of which stands in it once; the pieces are found in the whole text before any is replaced.
"""

from __future__ import annotations

from pathlib import Path

STYLES = Path(__file__).parent / "styles"

# The class or the function that each file is about.
TARGET = {
    "aligned": "causal_attention",
    "annotated": "MultiHeadedAttention",
    "cached": "CachedSelfAttention",
    "core": "scaled_dot_product_attention",
    "cross": "Attention",
    "einsum": "EinsumAttention",
    "encoder": "EncoderSelfAttention",
    "gqa": "Attention",
    "gqa_cached": "GroupedQueryAttention",
    "grouped": "grouped_attention",
    "headlist": "MultiHeadAttention",
    "memory": "CrossAttention",
    "nanogpt": "CausalSelfAttention",
    "returns": "attention",
    "rotary": "apply_rotary",
    "rotary_complex": "apply_rotary_emb",
    "rotary_half": "RotaryEmbedding",
    "rotary_pairs": "rotary_embed",
    "rotary_tables": "RotaryPositionalEmbeddings",
    "separate": "SelfAttention",
    "sequence": "MultiHeadAttention",
    "simple": "SelfAttention",
    "sink_manual": "sink_attention",
    "sink_module": "SinkAttention",
    "sinks": "attention",
    "sinusoidal": "PositionalEncoding",
    "sinusoidal_function": "positional_encoding",
    "sinusoidal_live": "SinusoidalPositions",
    "sinusoidal_loop": "get_positional_encoding",
    "sinusoidal_sequence": "PositionalEncoding",
    "torchlike": "MultiheadAttention",
}

# What a user would say with `--like`: mostly nothing.
KIND: dict[str, str | None] = dict.fromkeys(TARGET) | {
    "rotary": "rotary",
    "sinusoidal_function": "positional",
}

Edits = list[tuple[str, str]]
PLANTS: dict[str, dict[str, Edits]] = {}


def target(style: str) -> str:
    return TARGET[style]


def source(style: str, bug: str | None = None) -> str:
    """The text of a style, with a bug planted in it or as it stands."""
    text = (STYLES / f"{style}.py").read_text(encoding="utf-8")
    places = []
    for old, new in PLANTS[style][bug] if bug else []:
        if text.count(old) != 1:
            raise ValueError(f"{style}, {bug}: expected {old!r} once, found it {text.count(old)} times.")
        places.append((text.index(old), old, new))
    for start, old, new in sorted(places, reverse=True):  # from the end, so that the places stay right
        text = text[:start] + new + text[start + len(old) :]
    return text


def write(folder: str | Path, style: str, bug: str | None = None) -> str:
    """Write a style to a file of its own; returns `path.py:name`, as the command takes it."""
    path = Path(folder) / f"{style}_{(bug or 'right').replace('-', '_')}.py"
    path.write_text(source(style, bug), encoding="utf-8")
    return f"{path}:{target(style)}"


# -- annotated -----------------------------------------------------------------------------------------

SCALE = " / math.sqrt(d_k)"
FILL = "        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)\n"
EMPTY = (
    "    if mask is not None:\n"
    "        p_attn = p_attn.masked_fill(mask == 0, 0.0)  # a query that sees nothing takes nothing\n"
)
SOFTMAX = "scores.softmax(dim=-1)"
CALL = "attention(query, key, value, mask, self.dropout)"
PROJECT = "self.linears[i](x) for i, x in enumerate(inputs)"
PLANTS["annotated"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / math.sqrt(query.size(1) * d_k)")],
    "scaled-by-d": [(SCALE, " / d_k")],
    "multiplied": [(SCALE, " * math.sqrt(d_k)")],
    "scaled-by-length": [(SCALE, " / math.sqrt(key.size(-2))")],
    "scaled-by-heads": [(SCALE, " / math.sqrt(query.size(1))")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [("key.transpose(-2, -1)", "query.transpose(-2, -1)")],
    "mask-ignored": [(CALL, "attention(query, key, value, None, self.dropout)")],
    "masked-zero": [("torch.finfo(scores.dtype).min", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [("    if mask is not None:\n" + FILL, "")],
    "masked-ones-added": [(FILL, "        scores = scores + mask\n"), (EMPTY, "")],
    "polarity-swapped": [
        ("scores.masked_fill(mask == 0", "scores.masked_fill(mask != 0"),
        ("p_attn.masked_fill(mask == 0", "p_attn.masked_fill(mask != 0"),
    ],
    "mask-transposed": [
        (
            "        inputs =",
            "        mask = mask if mask is None else mask.transpose(-2, -1)\n        inputs =",
        )
    ],
    "first-mask-for-all": [
        ("        inputs =", "        mask = mask if mask is None else mask[:1]\n        inputs =")
    ],
    "empty-rows-nan": [("torch.finfo(scores.dtype).min", '-float("inf")'), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "scores.softmax(dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "scores.softmax(dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "scores.softmax(dim=0)")],
    "softmax-twice": [(SOFTMAX, "scores.softmax(dim=-1).softmax(dim=-1)")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "scores.flatten(-2).softmax(dim=-1).view_as(scores)")],
    "log-softmax": [(SOFTMAX, "scores.log_softmax(dim=-1)")],
    "sigmoid": [(SOFTMAX, "scores.sigmoid()")],
    "base-two": [(SOFTMAX, "(scores * math.log(2)).softmax(dim=-1)")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)")],
    "dropout-left-on": [("p_attn = dropout(p_attn)", "p_attn = nn.functional.dropout(p_attn, dropout.p)")],
    "weights-transposed": [("matmul(p_attn, value)", "matmul(p_attn.transpose(-2, -1), value)")],
    "keys-as-values": [("matmul(p_attn, value)", "matmul(p_attn, key)")],
    "queries-as-values": [("matmul(p_attn, value)", "matmul(p_attn, query)")],
    "split-without-transpose": [
        ("x.view(nbatches, -1, self.h, self.d_k).transpose(1, 2)", "x.view(nbatches, self.h, -1, self.d_k)")
    ],
    "merge-without-transpose": [("x.transpose(1, 2).reshape(", "x.reshape(")],
    "heads-ignored": [
        ("x.view(nbatches, -1, self.h, self.d_k)", "x.view(nbatches, -1, 1, self.h * self.d_k)")
    ],
    "first-head-for-all": [("matmul(p_attn, value)", "matmul(p_attn[:, :1], value)")],
    "q-k-swapped": [(PROJECT, "self.linears[i](x) for i, x in zip((1, 0, 2), inputs)")],
    "k-v-swapped": [(PROJECT, "self.linears[i](x) for i, x in zip((0, 2, 1), inputs)")],
    "q-v-swapped": [(PROJECT, "self.linears[i](x) for i, x in zip((2, 1, 0), inputs)")],
    "key-from-query-weights": [(PROJECT, "self.linears[i](x) for i, x in zip((0, 0, 2), inputs)")],
    "value-unprojected": [(PROJECT, "self.linears[i](x) if i < 2 else x for i, x in enumerate(inputs)")],
    "output-missing": [("return self.linears[3](x)", "return x")],
    "output-twice": [("return self.linears[3](x)", "return self.linears[3](self.linears[3](x))")],
    "input-bias-missing": [("self.linears[i](x)", "nn.functional.linear(x, self.linears[i].weight)")],
    "output-bias-missing": [("self.linears[3](x)", "nn.functional.linear(x, self.linears[3].weight)")],
    "weight-transposed": [("self.linears[i](x)", "x @ self.linears[i].weight + self.linears[i].bias")],
    "residual-added": [("return self.linears[3](x)", "return inputs[0] + self.linears[3](x)")],
    "context-ignored": [("inputs = (query, key, value)", "inputs = (query, query, query)")],
    "values-from-x": [("inputs = (query, key, value)", "inputs = (query, key, query)")],
}

# -- nanogpt -------------------------------------------------------------------------------------------

SCALE = " * (1.0 / math.sqrt(k.size(-1)))"
FILL = '        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))\n'
SOFTMAX = "F.softmax(att, dim=-1)"
TRIL = "torch.tril(torch.ones(block_size, block_size))"
SPLIT = ".view(B, T, self.n_head, C // self.n_head).transpose(1, 2)"
PLANTS["nanogpt"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " * (1.0 / math.sqrt(C))")],
    "scaled-by-d": [(SCALE, " * (1.0 / k.size(-1))")],
    "multiplied": [(SCALE, " * math.sqrt(k.size(-1))")],
    "scaled-by-length": [(SCALE, " * (1.0 / math.sqrt(T))")],
    "scaled-by-heads": [(SCALE, " * (1.0 / math.sqrt(self.n_head))")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [("q @ k.transpose(-2, -1)", "q @ q.transpose(-2, -1)")],
    "causal-ignored": [(FILL, "")],
    "causal-strict": [(TRIL, "torch.tril(torch.ones(block_size, block_size), diagonal=-1)")],
    "causal-late": [(TRIL, "torch.tril(torch.ones(block_size, block_size), diagonal=1)")],
    "causal-flipped": [(TRIL, "torch.triu(torch.ones(block_size, block_size))")],
    "masked-zero": [('float("-inf")', "0.0")],
    "masked-after-softmax": [
        (FILL, ""),
        (SOFTMAX, SOFTMAX + ".masked_fill(self.bias[:, :, :T, :T] == 0, 0.0)"),
    ],
    "masked-ones-added": [(FILL, "        att = att + self.bias[:, :, :T, :T]\n")],
    "polarity-swapped": [("self.bias[:, :, :T, :T] == 0", "self.bias[:, :, :T, :T] == 1")],
    "softmax-over-queries": [(SOFTMAX, "F.softmax(att, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "F.softmax(att, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "F.softmax(att, dim=0)")],
    "softmax-twice": [(SOFTMAX, "F.softmax(F.softmax(att, dim=-1), dim=-1)")],
    "softmax-missing": [("        att = F.softmax(att, dim=-1)\n", "")],
    "softmax-joint": [(SOFTMAX, "F.softmax(att.flatten(2), dim=-1).view_as(att)")],
    "log-softmax": [(SOFTMAX, "F.log_softmax(att, dim=-1)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(att)")],
    "base-two": [(SOFTMAX, "torch.exp2(att) / torch.exp2(att).sum(dim=-1, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "torch.exp(att) / torch.exp(att).sum(dim=-1, keepdim=True)")],
    "dropout-left-on": [("self.attn_dropout(att)", "F.dropout(att, self.attn_dropout.p)")],
    "weights-transposed": [("y = att @ v", "y = att.transpose(-2, -1) @ v")],
    "keys-as-values": [("y = att @ v", "y = att @ k")],
    "queries-as-values": [("y = att @ v", "y = att @ q")],
    "split-without-transpose": [
        (x + SPLIT, x + ".reshape(B, self.n_head, T, C // self.n_head)") for x in "qkv"
    ],
    "merge-without-transpose": [
        ("y.transpose(1, 2).contiguous().view(B, T, C)", "y.contiguous().view(B, T, C)")
    ],
    "heads-ignored": [(x + SPLIT, x + ".view(B, T, 1, C).transpose(1, 2)") for x in "qkv"],
    "first-head-for-all": [("y = att @ v", "y = att[:, :1] @ v")],
    "q-k-swapped": [("q, k, v = self.c_attn", "k, q, v = self.c_attn")],
    "k-v-swapped": [("q, k, v = self.c_attn", "q, v, k = self.c_attn")],
    "q-v-swapped": [("q, k, v = self.c_attn", "v, k, q = self.c_attn")],
    "value-unprojected": [("v = v.view(", "v = x.view(")],
    "output-missing": [("self.c_proj(y)", "y")],
    "output-twice": [("self.c_proj(y)", "self.c_proj(self.c_proj(y))")],
    "input-bias-missing": [("self.c_attn(x)", "F.linear(x, self.c_attn.weight)")],
    "output-bias-missing": [("self.c_proj(y)", "F.linear(y, self.c_proj.weight)")],
    "weight-transposed": [("self.c_proj(y)", "y @ self.c_proj.weight + self.c_proj.bias")],
    "residual-added": [("return self.resid", "return x + self.resid")],
}

# -- einsum --------------------------------------------------------------------------------------------

SCALE = " / d**0.5"
FILL = '        scores = scores.masked_fill(~allowed, float("-inf"))\n'
EMPTY = "        weights = torch.where(allowed, weights, torch.zeros_like(weights))\n"
SOFTMAX = "torch.softmax(scores, dim=-1)"
MIX = 'torch.einsum("bhts,bhsd->bhtd", weights, v)'
PLANTS["einsum"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / x.shape[-1] ** 0.5")],
    "scaled-by-d": [(SCALE, " / d")],
    "multiplied": [(SCALE, " * d**0.5")],
    "scaled-by-length": [(SCALE, " / x.shape[1] ** 0.5")],
    "scaled-by-heads": [(SCALE, " / q.shape[1] ** 0.5")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [('"bhtd,bhsd->bhts", q, k', '"bhtd,bhsd->bhts", q, q')],
    "mask-ignored": [("allowed = allowed & mask", "allowed & mask")],
    "causal-ignored": [("allowed = allowed.tril()", "allowed.tril()")],
    "causal-strict": [("allowed.tril()", "allowed.tril(-1)")],
    "causal-late": [("allowed.tril()", "allowed.tril(1)")],
    "causal-flipped": [("allowed.tril()", "allowed.triu()")],
    "masked-zero": [('float("-inf")', "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "        scores = scores + allowed\n"), (EMPTY, "")],
    "polarity-swapped": [("allowed = allowed & mask", "allowed = allowed & ~mask")],
    "mask-transposed": [
        ("mask[:, None, None, :]", "mask[:, None, :, None]"),
        ("else mask[:, None]", "else mask[:, None].mT"),
    ],
    "padding-ignored": [("if mask is not None:", "if mask is not None and mask.dim() == 3:")],
    "first-mask-for-all": [("allowed = allowed & mask", "allowed = allowed & mask[:1]")],
    "empty-rows-nan": [(EMPTY, "")],
    "empty-rows-uniform": [('float("-inf")', "-1e9"), (EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(scores, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "torch.softmax(scores, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "torch.softmax(scores, dim=0)")],
    "softmax-twice": [(SOFTMAX, "torch.softmax(torch.softmax(scores, dim=-1), dim=-1)")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "torch.softmax(scores.flatten(2), dim=-1).reshape(scores.shape)")],
    "log-softmax": [(SOFTMAX, "torch.log_softmax(scores, dim=-1)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(scores)")],
    "base-two": [(SOFTMAX, "torch.exp2(scores) / torch.exp2(scores).sum(-1, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)")],
    "weights-transposed": [(MIX, 'torch.einsum("bhst,bhsd->bhtd", weights, v)')],
    "keys-as-values": [(MIX, 'torch.einsum("bhts,bhsd->bhtd", weights, k)')],
    "queries-as-values": [(MIX, 'torch.einsum("bhts,bhsd->bhtd", weights, q)')],
    "first-head-for-all": [(MIX, 'torch.einsum("bts,bhsd->bhtd", weights[:, 0], v)')],
    "q-k-swapped": [("x, self.W_q)", "x, self.W_k)"), ("x, self.W_k)", "x, self.W_q)")],
    "k-v-swapped": [("x, self.W_k)", "x, self.W_v)"), ("x, self.W_v)", "x, self.W_k)")],
    "q-v-swapped": [("x, self.W_q)", "x, self.W_v)"), ("x, self.W_v)", "x, self.W_q)")],
    "output-missing": [
        ('torch.einsum("bhtd,hde->bte", heads, self.W_o)', "heads.transpose(1, 2).flatten(2)")
    ],
    "residual-added": [("return out, weights", "return x + out, weights")],
    "weights-before-mask": [
        ("scores = scores.masked_fill(", "masked = scores.masked_fill("),
        (SOFTMAX, "torch.softmax(masked, dim=-1)"),
        ("return out, weights", "return out, scores.softmax(dim=-1)"),
    ],
    "weights-are-scores": [("return out, weights", "return out, scores")],
    "weights-averaged": [("return out, weights", "return out, weights.mean(dim=1)")],
}

# -- torchlike -----------------------------------------------------------------------------------------

SCALE = " * self.head_dim**-0.5"
FILL = ".masked_fill(hidden, torch.finfo(scores.dtype).min)"
EMPTY = ".masked_fill(hidden, 0.0)"
SOFTMAX = "F.softmax(scores, dim=-1)"
PACKED = "w_q, w_k, w_v = self.in_proj_weight"
BIASES = "b_q, b_k, b_v = self.in_proj_bias"
MIX = "torch.matmul(dropped, v)"
LENGTHS = {"q": "tgt_len", "k": "src_len", "v": "src_len"}
GIVEN = "return output, weights.mean(dim=1) if average_attn_weights else weights"
PLANTS["torchlike"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " * embed_dim**-0.5")],
    "scaled-by-d": [(SCALE, " / self.head_dim")],
    "multiplied": [(SCALE, " * self.head_dim**0.5")],
    "scaled-by-length": [(SCALE, " * src_len**-0.5")],
    "scaled-by-heads": [(SCALE, " * self.num_heads**-0.5")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, f"({SOFTMAX}{SCALE})")],
    "queries-as-keys": [("torch.matmul(q, k.transpose(2, 3))", "torch.matmul(q, q.transpose(2, 3))")],
    "mask-ignored": [
        ("hidden = hidden | attn_mask\n", "hidden | attn_mask\n"),
        ("bias = bias + attn_mask", "bias + attn_mask"),
        ("hidden = hidden | attn_mask.isneginf()", "hidden | attn_mask.isneginf()"),
    ],
    "masked-zero": [("torch.finfo(scores.dtype).min", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [("(scores + bias)" + FILL, "scores + bias + hidden"), (EMPTY, "")],
    "polarity-swapped": [
        ("hidden | attn_mask\n", "hidden | ~attn_mask\n"),
        ("hidden | key_padding_mask", "hidden | ~key_padding_mask"),
    ],
    "mask-transposed": [
        ("hidden | attn_mask\n", "hidden | attn_mask.transpose(-2, -1)\n"),
        ("key_padding_mask[:, None, None, :]", "key_padding_mask[:, None, :, None]"),
    ],
    "padding-ignored": [("hidden = hidden | key_padding_mask", "hidden | key_padding_mask")],
    "first-mask-for-all": [("key_padding_mask[:, None, None, :]", "key_padding_mask[:1, None, None, :]")],
    "empty-rows-nan": [("torch.finfo(scores.dtype).min", "-torch.inf"), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "F.softmax(scores, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "F.softmax(scores, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "F.softmax(scores, dim=0)")],
    "softmax-twice": [(SOFTMAX, "F.softmax(F.softmax(scores, dim=-1), dim=-1)")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "F.softmax(scores.flatten(2), dim=-1).view_as(scores)")],
    "log-softmax": [(SOFTMAX, "F.log_softmax(scores, dim=-1)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(scores)")],
    "base-two": [(SOFTMAX, "(torch.exp2(scores) / torch.exp2(scores).sum(-1, keepdim=True))")],
    "no-max-subtracted": [(SOFTMAX, "(torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True))")],
    "dropout-left-on": [
        ("F.dropout(weights, self.dropout, self.training)", "F.dropout(weights, self.dropout)")
    ],
    "weights-transposed": [(MIX, "torch.matmul(dropped.transpose(2, 3), v)")],
    "keys-as-values": [(MIX, "torch.matmul(dropped, k)")],
    "queries-as-values": [(MIX, "torch.matmul(dropped, q)")],
    "split-without-transpose": [
        (
            f"{x}.reshape(bsz, {n}, self.num_heads, self.head_dim).transpose(1, 2)",
            f"{x}.reshape(bsz, self.num_heads, {n}, self.head_dim)",
        )
        for x, n in LENGTHS.items()
    ],
    "merge-without-transpose": [("context.transpose(1, 2).reshape(", "context.reshape(")],
    "heads-ignored": [
        (f"{x}.reshape(bsz, {n}, self.num_heads, self.head_dim)", f"{x}.reshape(bsz, {n}, 1, embed_dim)")
        for x, n in LENGTHS.items()
    ]
    + [(SCALE, " * embed_dim**-0.5")],
    "first-head-for-all": [(MIX, "torch.matmul(dropped[:, :1], v)")],
    "q-k-swapped": [
        (PACKED, "w_k, w_q, w_v = self.in_proj_weight"),
        (BIASES, "b_k, b_q, b_v = self.in_proj_bias"),
    ],
    "k-v-swapped": [
        (PACKED, "w_q, w_v, w_k = self.in_proj_weight"),
        (BIASES, "b_q, b_v, b_k = self.in_proj_bias"),
    ],
    "q-v-swapped": [
        (PACKED, "w_v, w_k, w_q = self.in_proj_weight"),
        (BIASES, "b_v, b_k, b_q = self.in_proj_bias"),
    ],
    "key-from-query-weights": [("F.linear(key, w_k, b_k)", "F.linear(key, w_q, b_q)")],
    "value-unprojected": [("F.linear(value, w_v, b_v)", "value")],
    "output-missing": [("self.out_proj(context)", "context")],
    "output-twice": [("self.out_proj(context)", "self.out_proj(self.out_proj(context))")],
    "input-bias-missing": [(f", w_{x}, b_{x})", f", w_{x})") for x in "qkv"],
    "output-bias-missing": [("self.out_proj(context)", "F.linear(context, self.out_proj.weight)")],
    "weight-transposed": [(f", w_{x}, b_{x})", f", w_{x}.t(), b_{x})") for x in "qkv"],
    "residual-added": [("self.out_proj(context)", "query + self.out_proj(context)")],
    "context-ignored": [
        ("F.linear(key, w_k, b_k)", "F.linear(query, w_k, b_k)"),
        ("F.linear(value, w_v, b_v)", "F.linear(query, w_v, b_v)"),
    ],
    "values-from-x": [("F.linear(value, w_v, b_v)", "F.linear(query, w_v, b_v)")],
    "weights-before-mask": [
        (GIVEN, GIVEN.replace("weights.mean", "given.mean").replace("else weights", "else given")),
        (
            "        scores = (scores + bias)",
            "        given = F.softmax(scores, -1)\n        scores = (scores + bias)",
        ),
    ],
    "weights-are-scores": [(GIVEN, "return output, scores.mean(dim=1) if average_attn_weights else scores")],
    "weights-averaged": [(GIVEN, "return output, weights.mean(dim=1)")],
    "mask-dropped-with-weights": [
        (
            "        scores = torch.matmul(",
            "        if need_weights:\n"
            "            hidden, bias = torch.zeros_like(hidden), torch.zeros_like(bias)\n"
            "        scores = torch.matmul(",
        )
    ],
    "weights-after-dropout": [
        (GIVEN, "return output, dropped.mean(dim=1) if average_attn_weights else dropped")
    ],
}

# -- headlist ------------------------------------------------------------------------------------------

SCALE = " * k.shape[-1] ** -0.5"
FILL = '        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))\n'
SOFTMAX = "F.softmax(wei, dim=-1)"
TRIL = "torch.tril(torch.ones(block_size, block_size))"
PLANTS["headlist"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " * x.shape[-1] ** -0.5")],
    "scaled-by-d": [(SCALE, " / k.shape[-1]")],
    "multiplied": [(SCALE, " * k.shape[-1] ** 0.5")],
    "scaled-by-length": [(SCALE, " * T**-0.5")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [("q @ k.transpose(-2, -1)", "q @ q.transpose(-2, -1)")],
    "causal-ignored": [(FILL, "")],
    "causal-strict": [(TRIL, "torch.tril(torch.ones(block_size, block_size), diagonal=-1)")],
    "causal-late": [(TRIL, "torch.tril(torch.ones(block_size, block_size), diagonal=1)")],
    "causal-flipped": [(TRIL, "torch.triu(torch.ones(block_size, block_size))")],
    "masked-zero": [('float("-inf")', "0")],
    "masked-after-softmax": [(FILL, ""), (SOFTMAX, SOFTMAX + " * self.tril[:T, :T]")],
    "masked-ones-added": [(FILL, "        wei = wei + self.tril[:T, :T]\n")],
    "polarity-swapped": [("self.tril[:T, :T] == 0", "self.tril[:T, :T] == 1")],
    "softmax-over-queries": [(SOFTMAX, "F.softmax(wei, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "F.softmax(wei, dim=0)")],
    "softmax-twice": [(SOFTMAX, "F.softmax(F.softmax(wei, dim=-1), dim=-1)")],
    "softmax-missing": [(f"        wei = {SOFTMAX}\n", "")],
    "softmax-joint": [(SOFTMAX, "F.softmax(wei.view(len(x), -1), dim=-1).view(len(x), T, T)")],
    "log-softmax": [(SOFTMAX, "F.log_softmax(wei, dim=-1)")],
    "sigmoid": [(SOFTMAX, "F.sigmoid(wei)")],
    "base-two": [(SOFTMAX, "2**wei / (2**wei).sum(dim=-1, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "wei.exp() / wei.exp().sum(dim=-1, keepdim=True)")],
    "dropout-left-on": [("self.dropout(wei)", "F.dropout(wei, self.dropout.p)")],
    "weights-transposed": [("return wei @ v", "return wei.transpose(-2, -1) @ v")],
    "keys-as-values": [("return wei @ v", "return wei @ k")],
    "queries-as-values": [("return wei @ v", "return wei @ q")],
    "first-head-for-all": [("head(x) for head in self.heads", "self.heads[0](x) for _ in self.heads")],
    "q-k-swapped": [("self.key(x)", "self.query(x)"), ("self.query(x)", "self.key(x)")],
    "k-v-swapped": [("self.key(x)", "self.value(x)"), ("self.value(x)", "self.key(x)")],
    "q-v-swapped": [("self.value(x)", "self.query(x)"), ("self.query(x)", "self.value(x)")],
    "output-missing": [("self.dropout(self.proj(out))", "self.dropout(out)")],
    "output-twice": [("self.proj(out)", "self.proj(self.proj(out))")],
    "output-bias-missing": [("self.proj(out)", "F.linear(out, self.proj.weight)")],
    "weight-transposed": [("self.proj(out)", "out @ self.proj.weight + self.proj.bias")],
    "residual-added": [("return out", "return x + out")],
}

# -- separate ------------------------------------------------------------------------------------------

SCALE = "self.scaling = self.head_dim**-0.5"
ADD = "            attn_scores = (attn_scores + attention_mask).masked_fill(hidden, lowest)\n"
EMPTY = "        if hidden is not None:\n            attn_weights = attn_weights.masked_fill(hidden, 0.0)\n"
SOFTMAX = "nn.functional.softmax(attn_scores, dim=-1)"
MIX = "torch.matmul(attn_probs, value_states)"
SHAPE = "shape = (batch, length, self.num_heads, self.head_dim)"
LOWEST = "            lowest = torch.finfo"
GIVEN = "(attn_weights if output_attentions else None)"
PLANTS["separate"] = {
    "unscaled": [(" * self.scaling", "")],
    "scaled-by-width": [(SCALE, "self.scaling = hidden_size**-0.5")],
    "scaled-by-d": [(SCALE, "self.scaling = 1 / self.head_dim")],
    "multiplied": [(SCALE, "self.scaling = self.head_dim**0.5")],
    "scaled-by-length": [(" * self.scaling", " * length**-0.5")],
    "scaled-by-heads": [(SCALE, "self.scaling = self.num_heads**-0.5")],
    "scaled-after-softmax": [(" * self.scaling", ""), (SOFTMAX, SOFTMAX + " * self.scaling")],
    "queries-as-keys": [("key_states.transpose(2, 3)", "query_states.transpose(2, 3)")],
    "mask-ignored": [(ADD, ""), (EMPTY, "")],
    "masked-zero": [("masked_fill(hidden, lowest)", "masked_fill(hidden, 0.0)"), (EMPTY, "")],
    "masked-after-softmax": [(ADD, "")],
    "polarity-swapped": [
        ("attention_mask <= lowest", "attention_mask > lowest"),
        ("(attn_scores + attention_mask).masked_fill", "attn_scores.masked_fill"),
    ],
    "mask-transposed": [
        (LOWEST, "            attention_mask = attention_mask.transpose(2, 3)\n" + LOWEST),
    ],
    "first-mask-for-all": [(LOWEST, "            attention_mask = attention_mask[:1]\n" + LOWEST)],
    "empty-rows-nan": [("masked_fill(hidden, lowest)", 'masked_fill(hidden, float("-inf"))'), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "nn.functional.softmax(attn_scores, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "nn.functional.softmax(attn_scores, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "nn.functional.softmax(attn_scores, dim=0)")],
    "softmax-twice": [(SOFTMAX, f"nn.functional.softmax({SOFTMAX}, dim=-1)")],
    "softmax-missing": [(SOFTMAX, "attn_scores")],
    "softmax-joint": [
        (SOFTMAX, "nn.functional.softmax(attn_scores.flatten(2), dim=-1).view_as(attn_scores)")
    ],
    "log-softmax": [(SOFTMAX, "nn.functional.log_softmax(attn_scores, dim=-1)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(attn_scores)")],
    "base-two": [(SOFTMAX, "torch.exp2(attn_scores) / torch.exp2(attn_scores).sum(-1, True)")],
    "no-max-subtracted": [(SOFTMAX, "torch.exp(attn_scores) / torch.exp(attn_scores).sum(-1, True)")],
    "dropout-left-on": [("training=self.training", "training=True")],
    "weights-transposed": [(MIX, "torch.matmul(attn_probs.transpose(2, 3), value_states)")],
    "keys-as-values": [(MIX, "torch.matmul(attn_probs, key_states)")],
    "queries-as-values": [(MIX, "torch.matmul(attn_probs, query_states)")],
    "split-without-transpose": [
        (SHAPE, "shape = (batch, self.num_heads, length, self.head_dim)"),
        *[
            (
                f"_proj(hidden_states).view(shape).transpose(1, 2)\n        {after}",
                f"_proj(hidden_states).view(shape)\n        {after}",
            )
            for after in ("key", "value")
        ],
        ("self.v_proj(hidden_states).view(shape).transpose(1, 2)", "self.v_proj(hidden_states).view(shape)"),
    ],
    "merge-without-transpose": [("attn_output.transpose(1, 2).contiguous()", "attn_output.contiguous()")],
    "heads-ignored": [
        (SHAPE, "shape = (batch, length, 1, width)"),
        (SCALE, "self.scaling = hidden_size**-0.5"),
    ],
    "first-head-for-all": [(MIX, "torch.matmul(attn_probs[:, :1], value_states)")],
    "q-k-swapped": [("= self.q_proj(", "= self.k_proj("), ("= self.k_proj(", "= self.q_proj(")],
    "k-v-swapped": [("= self.k_proj(", "= self.v_proj("), ("= self.v_proj(", "= self.k_proj(")],
    "q-v-swapped": [("= self.q_proj(", "= self.v_proj("), ("= self.v_proj(", "= self.q_proj(")],
    "value-unprojected": [("self.v_proj(hidden_states)", "hidden_states")],
    "output-missing": [("        attn_output = self.out_proj(attn_output)\n", "")],
    "output-twice": [("self.out_proj(attn_output)", "self.out_proj(self.out_proj(attn_output))")],
    "input-bias-missing": [
        (f"self.{x}_proj(hidden_states)", f"(hidden_states @ self.{x}_proj.weight.T)") for x in "qkv"
    ],
    "output-bias-missing": [("self.out_proj(attn_output)", "attn_output @ self.out_proj.weight.T")],
    "weight-transposed": [
        (f"self.{x}_proj(hidden_states)", f"(hidden_states @ self.{x}_proj.weight + self.{x}_proj.bias)")
        for x in "qkv"
    ],
    "residual-added": [("self.out_proj(attn_output)", "self.out_proj(attn_output) + hidden_states")],
    "weights-before-mask": [
        (
            "        hidden = None\n",
            "        hidden = None\n        given = nn.functional.softmax(attn_scores, dim=3)\n",
        ),
        (GIVEN, "(given if output_attentions else None)"),
    ],
    "weights-are-scores": [(GIVEN, "(attn_scores if output_attentions else None)")],
    "weights-averaged": [(GIVEN, "(attn_weights.mean(dim=1) if output_attentions else None)")],
    "mask-dropped-with-weights": [
        ("if attention_mask is not None:", "if attention_mask is not None and not output_attentions:")
    ],
    "weights-after-dropout": [(GIVEN, "(attn_probs if output_attentions else None)")],
}

# -- cross ---------------------------------------------------------------------------------------------

SCALE = "self.scale = dim_head**-0.5"
FILL = "            sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)\n"
EMPTY = "        if exists(mask):\n            attn = attn.masked_fill(~mask, 0.0)\n"
SOFTMAX = "self.attend(sim)"
MADE = "self.attend = nn.Softmax(dim=-1)"
MIX = 'torch.einsum("bhij,bhjd->bhid", attn, v)'
PLANTS["cross"] = {
    "unscaled": [(" * self.scale", "")],
    "scaled-by-width": [(SCALE, "self.scale = dim**-0.5")],
    "scaled-by-d": [(SCALE, "self.scale = 1 / dim_head")],
    "multiplied": [(SCALE, "self.scale = dim_head**0.5")],
    "scaled-by-length": [(" * self.scale", " * k.shape[-2] ** -0.5")],
    "scaled-by-heads": [(SCALE, "self.scale = heads**-0.5")],
    "scaled-after-softmax": [(" * self.scale", ""), (SOFTMAX, SOFTMAX + " * self.scale")],
    "queries-as-keys": [('"bhid,bhjd->bhij", q, k', '"bhid,bhjd->bhij", q, q')],
    "masked-zero": [("-torch.finfo(sim.dtype).max", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "            sim = sim + mask\n"), (EMPTY, "")],
    "polarity-swapped": [
        ("sim.masked_fill(~mask", "sim.masked_fill(mask"),
        ("attn.masked_fill(~mask", "attn.masked_fill(mask"),
    ],
    "mask-transposed": [("mask[:, None, None, :]", "mask[:, None, :, None]")],
    "padding-ignored": [(FILL, ""), (EMPTY, "")],
    "first-mask-for-all": [("mask[:, None, None, :]", "mask[:1, None, None, :]")],
    "empty-rows-nan": [("-torch.finfo(sim.dtype).max", '-float("inf")'), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(MADE, "self.attend = nn.Softmax(dim=-2)")],
    "softmax-over-heads": [(MADE, "self.attend = nn.Softmax(dim=1)")],
    "softmax-over-batch": [(MADE, "self.attend = nn.Softmax(dim=0)")],
    "softmax-twice": [(SOFTMAX, "self.attend(self.attend(sim))")],
    "softmax-missing": [(SOFTMAX, "sim")],
    "softmax-joint": [(SOFTMAX, "self.attend(sim.flatten(2)).view_as(sim)")],
    "log-softmax": [(MADE, "self.attend = nn.LogSoftmax(dim=-1)")],
    "sigmoid": [(MADE, "self.attend = nn.Sigmoid()")],
    "base-two": [(SOFTMAX, "sim.exp2() / sim.exp2().sum(dim=-1, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "sim.exp() / sim.exp().sum(dim=-1, keepdim=True)")],
    "dropout-left-on": [("self.dropout(attn)", "nn.functional.dropout(attn, self.dropout.p)")],
    "weights-transposed": [(MIX, 'torch.einsum("bhji,bhjd->bhid", attn, v)')],
    "keys-as-values": [(MIX, 'torch.einsum("bhij,bhjd->bhid", attn, k)')],
    "queries-as-values": [(MIX, 'torch.einsum("bhij,bhjd->bhid", attn, q)')],
    "split-without-transpose": [
        (
            "t.unflatten(-1, (self.heads, -1)).transpose(1, 2)",
            "t.reshape(t.shape[0], self.heads, t.shape[1], -1)",
        )
    ],
    "merge-without-transpose": [("out.transpose(1, 2).flatten(2)", "out.reshape(*x.shape[:2], -1)")],
    "heads-ignored": [("(self.heads, -1)", "(1, -1)"), (SCALE, "self.scale = inner_dim**-0.5")],
    "first-head-for-all": [(MIX, 'torch.einsum("bij,bhjd->bhid", attn[:, 0], v)')],
    "k-v-swapped": [("k, v = self.to_kv", "v, k = self.to_kv")],
    "key-from-query-weights": [("chunk(2, dim=-1)\n", "chunk(2, dim=-1)\n        k = self.to_q(context)\n")],
    "output-bias-missing": [("self.to_out(out)", "out @ self.to_out.weight.T")],
    "residual-added": [("return self.to_out(out)", "return self.to_out(out) + x")],
    "context-ignored": [("context = context if exists(context) else x", "context = x")],
    "values-from-x": [
        ("chunk(2, dim=-1)\n", "chunk(2, dim=-1)\n        v = self.to_kv(x).chunk(2, dim=-1)[1]\n")
    ],
}

# -- gqa -----------------------------------------------------------------------------------------------

SCALE = " / math.sqrt(self.head_dim)"
FILL = "        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)\n"
EMPTY = "        probs = probs.masked_fill(hidden, 0.0)\n"
SOFTMAX = "F.softmax(scores, dim=-1)"
MIX = "torch.matmul(probs, values)"
PLANTS["gqa"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / math.sqrt(x.shape[-1])")],
    "scaled-by-d": [(SCALE, " / self.head_dim")],
    "multiplied": [(SCALE, " * math.sqrt(self.head_dim)")],
    "scaled-by-length": [(SCALE, " / math.sqrt(seqlen)")],
    "scaled-by-heads": [(SCALE, " / math.sqrt(self.n_heads)")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [("keys.transpose(2, 3)", "xq.transpose(2, 3)")],
    "causal-ignored": [("torch.ones(seqlen", "torch.zeros(seqlen")],
    "causal-strict": [("diagonal=1", "diagonal=0")],
    "causal-late": [("diagonal=1", "diagonal=2")],
    "causal-flipped": [("triu(diagonal=1)", "tril(diagonal=-1)")],
    "masked-zero": [("torch.finfo(scores.dtype).min", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "        scores = scores + ~hidden\n"), (EMPTY, "")],
    "polarity-swapped": [("hidden | ~mask", "hidden | mask")],
    "mask-transposed": [("~mask[:, None, None, :]", "~mask[:, None, :, None]")],
    "padding-ignored": [("hidden = hidden | ~mask", "hidden | ~mask")],
    "first-mask-for-all": [("~mask[:, None, None, :]", "~mask[:1, None, None, :]")],
    "empty-rows-nan": [("torch.finfo(scores.dtype).min", '-float("inf")'), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "F.softmax(scores, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "F.softmax(scores, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "F.softmax(scores, dim=0)")],
    "softmax-twice": [(SOFTMAX, "F.softmax(F.softmax(scores, dim=-1), dim=-1)")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "F.softmax(scores.flatten(2), dim=-1).view_as(scores)")],
    "log-softmax": [(SOFTMAX, "F.log_softmax(scores, dim=-1)")],
    "sigmoid": [(SOFTMAX, "F.sigmoid(scores)")],
    "base-two": [(SOFTMAX, "scores.exp2() / scores.exp2().sum(dim=-1, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)")],
    "weights-transposed": [(MIX, "torch.matmul(probs.transpose(2, 3), values)")],
    "keys-as-values": [(MIX, "torch.matmul(probs, keys)")],
    "queries-as-values": [(MIX, "torch.matmul(probs, xq)")],
    "merge-without-transpose": [("output.transpose(1, 2).contiguous()", "output.contiguous()")],
    "first-head-for-all": [(MIX, "torch.matmul(probs[:, :1], values)")],
    "key-heads-tiled": [
        (
            "x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)",
            "x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim)",
        )
    ],
    "key-heads-first-only": [("x[:, :, :, None, :].expand", "x[:, :, :1, None, :].expand")],
    "k-v-swapped": [("self.wk(x)", "self.wv(x)"), ("self.wv(x)", "self.wk(x)")],
    "output-missing": [("return self.wo(output)", "return output")],
    "output-twice": [("self.wo(output)", "self.wo(self.wo(output))")],
    "weight-transposed": [("self.wo(output)", "output @ self.wo.weight")],
    "residual-added": [("return self.wo(output)", "return x + self.wo(output)")],
}

# -- core ----------------------------------------------------------------------------------------------

SCALE = "1 / math.sqrt(query.size(-1))"
FILL = "    attn_weight = attn_weight.masked_fill(~keep, -torch.inf)\n"
EMPTY = "    attn_weight = attn_weight.masked_fill(~keep, 0.0)\n"
SOFTMAX = "torch.softmax(attn_weight, dim=-1)"
MIX = "return attn_weight @ value"
GROUPS = ("key", "value")
PLANTS["core"] = {
    "unscaled": [(SCALE, "1.0")],
    "scaled-by-width": [(SCALE, "1 / math.sqrt(query.size(-1) * query.size(-3))")],
    "scaled-by-d": [(SCALE, "1 / query.size(-1)")],
    "multiplied": [(SCALE, "math.sqrt(query.size(-1))")],
    "scaled-by-length": [(SCALE, "1 / math.sqrt(key.size(-2))")],
    "scaled-by-heads": [(SCALE, "1 / math.sqrt(query.size(1))")],
    "scaled-after-softmax": [(" * scale_factor", ""), (SOFTMAX, SOFTMAX + " * scale_factor")],
    "queries-as-keys": [("query @ key.transpose(-2, -1)", "query @ query.transpose(-2, -1)")],
    "mask-ignored": [
        ("keep = keep & attn_mask\n", "keep & attn_mask\n"),
        ("bias = bias + attn_mask", "bias + attn_mask"),
        ("keep = keep & ~torch.isneginf", "keep & ~torch.isneginf"),
    ],
    "causal-ignored": [("keep = keep.tril(diagonal=0)", "keep.tril(diagonal=0)")],
    "causal-strict": [("diagonal=0", "diagonal=-1")],
    "causal-late": [("diagonal=0", "diagonal=1")],
    "causal-flipped": [("keep.tril(diagonal=0)", "keep.triu(diagonal=0)")],
    "masked-zero": [("-torch.inf", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "    attn_weight = attn_weight + keep\n"), (EMPTY, "")],
    "polarity-swapped": [("keep & attn_mask\n", "keep & ~attn_mask\n")],
    "mask-transposed": [("keep & attn_mask\n", "keep & attn_mask.mT\n")],
    "first-mask-for-all": [("keep & attn_mask\n", "keep & attn_mask[:1]\n")],
    "empty-rows-nan": [(EMPTY, "")],
    "empty-rows-uniform": [("-torch.inf", "torch.finfo(query.dtype).min"), (EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(attn_weight, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "torch.softmax(attn_weight, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "torch.softmax(attn_weight, dim=0)")],
    "softmax-twice": [(SOFTMAX, f"torch.softmax({SOFTMAX}, dim=-1)")],
    "softmax-missing": [(f"    attn_weight = {SOFTMAX}\n", "")],
    "softmax-joint": [(SOFTMAX, "torch.softmax(attn_weight.flatten(-2), dim=-1).view_as(attn_weight)")],
    "log-softmax": [(SOFTMAX, "torch.log_softmax(attn_weight, dim=-1)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(attn_weight)")],
    "base-two": [(SOFTMAX, "torch.softmax(attn_weight * math.log(2), dim=-1)")],
    "no-max-subtracted": [(SOFTMAX, "attn_weight.exp() / attn_weight.exp().sum(dim=-1, keepdim=True)")],
    "weights-transposed": [(MIX, "return attn_weight.mT @ value")],
    "keys-as-values": [(MIX, "return attn_weight @ key")],
    "queries-as-values": [(MIX, "return attn_weight @ query")],
    "first-head-for-all": [(MIX, "return attn_weight[:, :1] @ value")],
    "key-heads-tiled": [
        (f"{x}.repeat_interleave(group, dim=-3)", f"{x}.repeat(1, group, 1, 1)") for x in GROUPS
    ],
    "key-heads-first-only": [
        (f"{x}.repeat_interleave(group, dim=-3)", f"{x}[:, :1].expand(-1, query.size(-3), -1, -1)")
        for x in GROUPS
    ],
}

# -- simple --------------------------------------------------------------------------------------------

SCALE = " / self.key_dim**0.5"
FILL = '        if mask is not None:\n            scores = scores.masked_fill(~mask, float("-inf"))\n'
EMPTY = "        if mask is not None:\n            attention = attention.masked_fill(~mask, 0)\n"
SOFTMAX = "torch.softmax(scores, dim=2)"
MIX = "torch.bmm(attention, values)"
PLANTS["simple"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / x.size(2) ** 0.5")],
    "scaled-by-d": [(SCALE, " / self.key_dim")],
    "multiplied": [(SCALE, " * self.key_dim**0.5")],
    "scaled-by-length": [(SCALE, " / x.size(1) ** 0.5")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [
        ("torch.bmm(queries, keys.transpose(1, 2))", "torch.bmm(queries, queries.transpose(1, 2))")
    ],
    "mask-ignored": [(FILL, ""), (EMPTY, "")],
    "masked-zero": [('float("-inf")', "0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [('scores.masked_fill(~mask, float("-inf"))', "scores + mask"), (EMPTY, "")],
    "polarity-swapped": [
        ("scores.masked_fill(~mask", "scores.masked_fill(mask"),
        ("attention.masked_fill(~mask", "attention.masked_fill(mask"),
    ],
    "mask-transposed": [
        ("scores.masked_fill(~mask", "scores.masked_fill(~mask.mT"),
        ("attention.masked_fill(~mask", "attention.masked_fill(~mask.mT"),
    ],
    "first-mask-for-all": [
        ("scores.masked_fill(~mask", "scores.masked_fill(~mask[0]"),
        ("attention.masked_fill(~mask", "attention.masked_fill(~mask[0]"),
    ],
    "empty-rows-nan": [(EMPTY, "")],
    "empty-rows-uniform": [('float("-inf")', "-1e9"), (EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(scores, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "torch.softmax(scores, dim=0)")],
    "softmax-twice": [(SOFTMAX, "torch.softmax(torch.softmax(scores, dim=2), dim=2)")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "torch.softmax(scores.flatten(1), dim=1).view_as(scores)")],
    "log-softmax": [(SOFTMAX, "torch.log_softmax(scores, dim=2)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(scores)")],
    "base-two": [(SOFTMAX, "2**scores / (2**scores).sum(dim=2, keepdim=True)")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(dim=2, keepdim=True)")],
    "weights-transposed": [(MIX, "torch.bmm(attention.transpose(1, 2), values)")],
    "keys-as-values": [(MIX, "torch.bmm(attention, keys)")],
    "queries-as-values": [(MIX, "torch.bmm(attention, queries)")],
    "q-k-swapped": [("self.key(x)", "self.query(x)"), ("self.query(x)", "self.key(x)")],
    "k-v-swapped": [("self.key(x)", "self.value(x)"), ("self.value(x)", "self.key(x)")],
    "q-v-swapped": [("self.value(x)", "self.query(x)"), ("self.query(x)", "self.value(x)")],
    "input-bias-missing": [(f"self.{x}(x)", f"x @ self.{x}.weight.t()") for x in ("query", "key", "value")],
}

# -- sequence ------------------------------------------------------------------------------------------

SCALE = "1 / math.sqrt(self.d_k)"
FILL = '            scores = scores.masked_fill(mask == 0, float("-inf"))\n'
EMPTY = "        if mask is not None:\n            attn = attn.masked_fill(mask == 0, 0.0)\n"
SOFTMAX = "self.softmax(scores)"
MADE = "self.softmax = nn.Softmax(dim=1)"
MIX = 'torch.einsum("ijbh,jbhd->ibhd", attn, value)'
PLANTS["sequence"] = {
    "unscaled": [(" * self.scale", "")],
    "scaled-by-width": [(SCALE, "1 / math.sqrt(d_model)")],
    "scaled-by-d": [(SCALE, "1 / self.d_k")],
    "multiplied": [(SCALE, "math.sqrt(self.d_k)")],
    "scaled-by-length": [(" * self.scale", " / math.sqrt(key.shape[0])")],
    "scaled-by-heads": [(SCALE, "1 / math.sqrt(self.heads)")],
    "scaled-after-softmax": [(" * self.scale", ""), (SOFTMAX, SOFTMAX + " * self.scale")],
    "queries-as-keys": [('"ibhd,jbhd->ijbh", query, key', '"ibhd,jbhd->ijbh", query, query')],
    "mask-ignored": [(FILL, ""), (EMPTY, "")],
    "masked-zero": [('float("-inf")', "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "            scores = scores + mask\n"), (EMPTY, "")],
    "polarity-swapped": [
        ("scores.masked_fill(mask == 0", "scores.masked_fill(mask != 0"),
        ("attn.masked_fill(mask == 0", "attn.masked_fill(mask != 0"),
    ],
    "mask-transposed": [("mask.unsqueeze(-1)", "mask.transpose(0, 1).unsqueeze(-1)")],
    "first-mask-for-all": [("mask.unsqueeze(-1)", "mask[:, :, :1].unsqueeze(-1)")],
    "empty-rows-nan": [(EMPTY, "")],
    "empty-rows-uniform": [('float("-inf")', "-1e9"), (EMPTY, "")],
    "softmax-over-queries": [(MADE, "self.softmax = nn.Softmax(dim=0)")],
    "softmax-over-heads": [(MADE, "self.softmax = nn.Softmax(dim=3)")],
    "softmax-over-batch": [(MADE, "self.softmax = nn.Softmax(dim=2)")],
    "softmax-twice": [(SOFTMAX, "self.softmax(self.softmax(scores))")],
    "softmax-missing": [(SOFTMAX, "scores")],
    "softmax-joint": [(SOFTMAX, "scores.flatten(0, 1).softmax(dim=0).view_as(scores)")],
    "log-softmax": [(MADE, "self.softmax = nn.LogSoftmax(dim=1)")],
    "sigmoid": [(MADE, "self.softmax = nn.Sigmoid()")],
    "base-two": [(SOFTMAX, "self.softmax(scores * math.log(2.0))")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(dim=1, keepdim=True)")],
    "dropout-left-on": [("self.dropout(attn)", "nn.functional.dropout(attn, self.dropout.p)")],
    "weights-transposed": [(MIX, 'torch.einsum("jibh,jbhd->ibhd", attn, value)')],
    "keys-as-values": [(MIX, 'torch.einsum("ijbh,jbhd->ibhd", attn, key)')],
    "queries-as-values": [(MIX, 'torch.einsum("ijbh,jbhd->ibhd", attn, query)')],
    "heads-ignored": [
        ("*x.shape[:-1], self.heads, self.d_k)", "*x.shape[:-1], 1, self.heads * self.d_k)"),
        (SCALE, "1 / math.sqrt(d_model)"),
    ],
    "first-head-for-all": [(MIX, 'torch.einsum("ijb,jbhd->ibhd", attn[..., 0], value)')],
    "q-k-swapped": [("self.query(query)", "self.key(query)"), ("self.key(key)", "self.query(key)")],
    "k-v-swapped": [("self.key(key)", "self.value(key)"), ("self.value(value)", "self.key(value)")],
    "q-v-swapped": [("self.query(query)", "self.value(query)"), ("self.value(value)", "self.query(value)")],
    "key-from-query-weights": [("self.key(key)", "self.query(key)")],
    "value-unprojected": [("self.value(value)", "value.view(*value.shape[:2], self.heads, self.d_k)")],
    "output-missing": [("return self.output(x)", "return x")],
    "output-twice": [("self.output(x)", "self.output(self.output(x))")],
    "input-bias-missing": [("self.linear(x)", "nn.functional.linear(x, self.linear.weight)")],
    "output-bias-missing": [("self.output(x)", "nn.functional.linear(x, self.output.weight)")],
    "weight-transposed": [("self.linear(x)", "(x @ self.linear.weight + self.linear.bias)")],
    "residual-added": [
        (
            "        seq_len, batch_size, _ = query.shape\n",
            "        residual = query\n        seq_len, batch_size, _ = query.shape\n",
        ),
        ("return self.output(x)", "return residual + self.output(x)"),
    ],
    "context-ignored": [
        ("        key = self.key(key)\n        value = self.value(value)\n", ""),
        (
            "        query = self.query(query)\n",
            "        key, value = self.key(query), self.value(query)\n        query = self.query(query)\n",
        ),
    ],
    "values-from-x": [
        ("        value = self.value(value)\n", ""),
        (
            "        query = self.query(query)\n",
            "        value = self.value(query)\n        query = self.query(query)\n",
        ),
    ],
}

# -- sinks ---------------------------------------------------------------------------------------------

SCALE = " * (1 / math.sqrt(d))"
FILL = '        scores = scores.masked_fill(~mask, -float("inf"))\n'
SOFTMAX = "torch.softmax(logits, dim=-1)"
KEPT = "weights = probs[..., :-1]"
MIX = 'torch.einsum("bhqk,bhkd->bhqd", weights, v)'
PLANTS["sinks"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " * (1 / math.sqrt(h * d))")],
    "scaled-by-d": [(SCALE, " * (1 / d)")],
    "multiplied": [(SCALE, " * math.sqrt(d)")],
    "scaled-by-length": [(SCALE, " * (1 / math.sqrt(k.shape[2]))")],
    "scaled-by-heads": [(SCALE, " * (1 / math.sqrt(h))")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "queries-as-keys": [('"bhqd,bhkd->bhqk", q, k', '"bhqd,bhkd->bhqk", q, q')],
    "mask-ignored": [("scores = scores.masked_fill(", "scores.masked_fill(")],
    "masked-zero": [('-float("inf")', "0.0")],
    "masked-after-softmax": [
        ("    if mask is not None:\n" + FILL, ""),
        (KEPT, f"{KEPT}\n    if mask is not None:\n        weights = weights * mask"),
    ],
    "masked-ones-added": [(FILL, "        scores = scores + mask\n")],
    "polarity-swapped": [("masked_fill(~mask", "masked_fill(mask")],
    "mask-transposed": [("masked_fill(~mask", "masked_fill(~mask.transpose(-2, -1)")],
    "first-mask-for-all": [("masked_fill(~mask", "masked_fill(~mask[:1]")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(logits, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "torch.softmax(logits, dim=1)")],
    "softmax-over-batch": [(SOFTMAX, "torch.softmax(logits, dim=0)")],
    "softmax-twice": [(SOFTMAX, "torch.softmax(torch.softmax(logits, dim=-1), dim=-1)")],
    "softmax-missing": [(SOFTMAX, "logits")],
    "log-softmax": [(SOFTMAX, "torch.log_softmax(logits, dim=-1)")],
    "base-two": [(SOFTMAX, "torch.softmax(logits * math.log(2), dim=-1)")],
    "no-max-subtracted": [(SOFTMAX, "logits.exp() / logits.exp().sum(dim=-1, keepdim=True)")],
    "weights-transposed": [(MIX, 'torch.einsum("bhkq,bhkd->bhqd", weights, v)')],
    "keys-as-values": [(MIX, 'torch.einsum("bhqk,bhkd->bhqd", weights, k)')],
    "queries-as-values": [(MIX, 'torch.einsum("bhqk,bhkd->bhqd", weights, q)')],
    "first-head-for-all": [(MIX, 'torch.einsum("bqk,bhkd->bhqd", weights[:, 0], v)')],
    "sink-left-out": [(SOFTMAX, "torch.softmax(scores, dim=-1)"), (KEPT, "weights = probs")],
    "sink-as-key": [
        (KEPT, "weights = torch.cat([probs[..., :1] + probs[..., -1:], probs[..., 1:-1]], dim=-1)")
    ],
}

# -- cached --------------------------------------------------------------------------------------------

SCALE = " / math.sqrt(self.head_dim)"
FILL = "        scores = scores.masked_fill(columns > rows, -math.inf)\n"
SOFTMAX = "scores.softmax(-1)"
PACKED = "q, k, v = qkv[0], qkv[1], qkv[2]"
PLANTS["cached"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / math.sqrt(e)")],
    "scaled-by-d": [(SCALE, " / self.head_dim")],
    "multiplied": [(SCALE, " * math.sqrt(self.head_dim)")],
    "scaled-by-length": [(SCALE, " / math.sqrt(s)")],
    "scaled-by-heads": [(SCALE, " / math.sqrt(self.num_heads)")],
    "scaled-after-softmax": [(SCALE, ""), (SOFTMAX, SOFTMAX + SCALE)],
    "causal-ignored": [(FILL, "")],
    "causal-strict": [("columns > rows", "columns >= rows")],
    "causal-late": [("columns > rows", "columns > rows + 1")],
    "causal-flipped": [("columns > rows", "columns < rows")],
    "masked-zero": [("-math.inf", "0.0")],
    "masked-after-softmax": [(FILL, ""), (SOFTMAX, "scores.softmax(-1).masked_fill(columns > rows, 0.0)")],
    "softmax-over-queries": [(SOFTMAX, "scores.softmax(-2)")],
    "softmax-over-heads": [(SOFTMAX, "scores.softmax(1)")],
    "softmax-twice": [(SOFTMAX, "scores.softmax(-1).softmax(-1)")],
    "sigmoid": [(SOFTMAX, "scores.sigmoid()")],
    "base-two": [(SOFTMAX, "(scores * math.log(2)).softmax(-1)")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(-1, keepdim=True)")],
    "keys-as-values": [("y = attn @ v", "y = attn @ k")],
    "merge-without-transpose": [("y.permute(0, 2, 1, 3).reshape(", "y.reshape(")],
    "first-head-for-all": [("y = attn @ v", "y = attn[:, :1] @ v")],
    "q-k-swapped": [(PACKED, "k, q, v = qkv[0], qkv[1], qkv[2]")],
    "k-v-swapped": [(PACKED, "q, v, k = qkv[0], qkv[1], qkv[2]")],
    "q-v-swapped": [(PACKED, "v, k, q = qkv[0], qkv[1], qkv[2]")],
    "output-missing": [("self.out(y)", "y")],
    "output-bias-missing": [("self.out(y)", "y @ self.out.weight.mT")],
    "input-bias-missing": [("self.qkv(x)", "(x @ self.qkv.weight.mT)")],
    "residual-added": [("return self.out(y)", "return x + self.out(y)")],
    "first-key-only": [("torch.arange(s - t, s, device", "torch.arange(t, device")],
}

# -- aligned -------------------------------------------------------------------------------------------

SCALE = "(q / q.size(3) ** 0.5)"
FUTURE = "triu(1 + s - t)"
FILL = '    scores = scores.masked_fill(future, float("-inf"))\n'
SOFTMAX = "torch.softmax(scores, dim=3)"
MIX = "return weights @ v"
PLANTS["aligned"] = {
    "unscaled": [(SCALE, "q")],
    "scaled-by-width": [(SCALE, "(q / (q.size(1) * q.size(3)) ** 0.5)")],
    "scaled-by-d": [(SCALE, "(q / q.size(3))")],
    "multiplied": [(SCALE, "(q * q.size(3) ** 0.5)")],
    "scaled-by-length": [(SCALE, "(q / s**0.5)")],
    "scaled-by-heads": [(SCALE, "(q / q.size(1) ** 0.5)")],
    "scaled-after-softmax": [(SCALE, "q"), (SOFTMAX, SOFTMAX + " / q.size(3) ** 0.5")],
    "causal-ignored": [(FILL, "")],
    "causal-strict": [(FUTURE, "triu(s - t)")],
    "causal-late": [(FUTURE, "triu(2 + s - t)")],
    "causal-flipped": [(FUTURE, "tril(s - t - 1)")],
    "masked-zero": [('float("-inf")', "0.0")],
    "masked-after-softmax": [(FILL, ""), (SOFTMAX, SOFTMAX + " * ~future")],
    "masked-ones-added": [(FILL, "    scores = scores + ~future\n")],
    "polarity-swapped": [("masked_fill(future", "masked_fill(~future")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(scores, dim=2)")],
    "softmax-over-heads": [(SOFTMAX, "torch.softmax(scores, dim=1)")],
    "softmax-twice": [(SOFTMAX, "torch.softmax(torch.softmax(scores, dim=3), dim=3)")],
    "softmax-joint": [(SOFTMAX, "torch.softmax(scores.flatten(2), dim=2).view_as(scores)")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(scores)")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(3, keepdim=True)")],
    "keys-as-values": [(MIX, "return weights @ k")],
    "first-head-for-all": [(MIX, "return weights[:, :1] @ v")],
    "first-key-only": [(FUTURE, "triu(1)")],
}

# -- encoder -------------------------------------------------------------------------------------------

SCALE = " / math.sqrt(self.attention_head_size)"
FILL = "            logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)\n"
EMPTY = (
    "        if attention_mask is not None:\n"
    "            attention_probs = attention_probs.masked_fill(~visible, 0.0)\n"
)
SOFTMAX = "nn.Softmax(dim=-1)(logits)"
MIX = "torch.matmul(dropped_probs, value_layer)"
GIVEN = "(context_layer, attention_probs) if"
PLANTS["encoder"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / math.sqrt(hidden_states.size(-1))")],
    "scaled-by-d": [(SCALE, " / self.attention_head_size")],
    "multiplied": [(SCALE, " * math.sqrt(self.attention_head_size)")],
    "scaled-by-length": [(SCALE, " / math.sqrt(hidden_states.size(1))")],
    "scaled-by-heads": [(SCALE, " / math.sqrt(self.num_attention_heads)")],
    "queries-as-keys": [("key_layer.transpose(-1, -2)", "query_layer.transpose(-1, -2)")],
    "masked-zero": [("torch.finfo(logits.dtype).min", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "")],
    "masked-ones-added": [(FILL, "            logits = logits + visible\n"), (EMPTY, "")],
    "polarity-swapped": [
        ("attention_mask[:, None, None, :].bool()", "~attention_mask[:, None, None, :].bool()")
    ],
    "mask-transposed": [("attention_mask[:, None, None, :]", "attention_mask[:, None, :, None]")],
    "padding-ignored": [(FILL, ""), (EMPTY, "")],
    "first-mask-for-all": [("attention_mask[:, None, None, :]", "attention_mask[:1, None, None, :]")],
    "empty-rows-nan": [("torch.finfo(logits.dtype).min", "-torch.inf"), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "nn.Softmax(dim=-2)(logits)")],
    "softmax-over-heads": [(SOFTMAX, "nn.Softmax(dim=1)(logits)")],
    "softmax-over-batch": [(SOFTMAX, "nn.Softmax(dim=0)(logits)")],
    "softmax-twice": [(SOFTMAX, f"nn.Softmax(dim=-1)({SOFTMAX})")],
    "softmax-missing": [(SOFTMAX, "logits")],
    "log-softmax": [(SOFTMAX, "nn.LogSoftmax(dim=-1)(logits)")],
    "sigmoid": [(SOFTMAX, "logits.sigmoid()")],
    "no-max-subtracted": [(SOFTMAX, "logits.exp() / logits.exp().sum(-1, keepdim=True)")],
    "dropout-left-on": [
        ("self.dropout(attention_probs)", "nn.functional.dropout(attention_probs, self.dropout.p)")
    ],
    "weights-transposed": [(MIX, "torch.matmul(dropped_probs.transpose(-1, -2), value_layer)")],
    "keys-as-values": [(MIX, "torch.matmul(dropped_probs, key_layer)")],
    "split-without-transpose": [
        (
            "shape = (*x.shape[:-1], self.num_attention_heads, self.attention_head_size)",
            "shape = (x.shape[0], self.num_attention_heads, x.shape[1], self.attention_head_size)",
        ),
        ("x.view(shape).permute(0, 2, 1, 3)", "x.view(shape)"),
    ],
    "merge-without-transpose": [
        ("context_layer.permute(0, 2, 1, 3).contiguous()", "context_layer.contiguous()")
    ],
    "first-head-for-all": [(MIX, "torch.matmul(dropped_probs[:, :1], value_layer)")],
    "q-k-swapped": [("self.query(hidden", "self.key(hidden"), ("self.key(hidden", "self.query(hidden")],
    "k-v-swapped": [("self.value(hidden", "self.key(hidden"), ("self.key(hidden", "self.value(hidden")],
    "q-v-swapped": [("self.value(hidden", "self.query(hidden"), ("self.query(hidden", "self.value(hidden")],
    "value-unprojected": [("self.value(hidden_states)", "hidden_states")],
    "input-bias-missing": [
        (f"self.{x}(hidden_states)", f"hidden_states @ self.{x}.weight.T") for x in ("query", "key", "value")
    ],
    "weight-transposed": [
        (f"self.{x}(hidden_states)", f"hidden_states @ self.{x}.weight + self.{x}.bias")
        for x in ("query", "key", "value")
    ],
    "residual-added": [
        (
            "context_layer.view(*hidden_states.shape)",
            "context_layer.view(*hidden_states.shape) + hidden_states",
        )
    ],
    "weights-before-mask": [(GIVEN, "(context_layer, attention_scores.softmax(-1)) if")],
    "weights-are-scores": [(GIVEN, "(context_layer, attention_scores) if")],
    "weights-averaged": [(GIVEN, "(context_layer, attention_probs.mean(1)) if")],
    "mask-dropped-with-weights": [
        (
            "        logits = attention_scores\n",
            "        logits = attention_scores\n"
            "        attention_mask = None if output_attentions else attention_mask\n",
        )
    ],
    "weights-after-dropout": [(GIVEN, "(context_layer, dropped_probs) if")],
}

# -- returns -------------------------------------------------------------------------------------------

SCALE = " / q.shape[-1] ** 0.5"
POWERS = "torch.exp(logits - top)"
SHARES = "powers / total.clamp(min=torch.finfo(raw.dtype).tiny)"
MIX = "out = weights @ v"
GIVEN = "return out, weights"
PLANTS["returns"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / (q.shape[1] * q.shape[3]) ** 0.5")],
    "scaled-by-d": [(SCALE, " / q.shape[-1]")],
    "multiplied": [(SCALE, " * q.shape[-1] ** 0.5")],
    "scaled-by-length": [(SCALE, " / k.shape[2] ** 0.5")],
    "scaled-by-heads": [(SCALE, " / q.shape[1] ** 0.5")],
    "scaled-after-softmax": [(SCALE, ""), (SHARES, SHARES + SCALE)],
    "queries-as-keys": [("q @ k.transpose(-2, -1)", "q @ q.transpose(-2, -1)")],
    "mask-ignored": [("logits = raw.masked_fill(~mask", "logits = raw.masked_fill(~mask & False")],
    "masked-zero": [('float("-inf")', "0.0")],
    "masked-after-softmax": [
        ('raw.masked_fill(~mask, float("-inf"))', "raw"),
        (SHARES, SHARES + " * mask"),
    ],
    "masked-ones-added": [('raw.masked_fill(~mask, float("-inf"))', "raw + mask")],
    "polarity-swapped": [
        ("mask = torch.ones_like", "mask = torch.zeros_like"),
        ("masked_fill(~mask", "masked_fill(mask"),
    ],
    "mask-transposed": [("masked_fill(~mask", "masked_fill(~mask.transpose(-2, -1)")],
    "first-mask-for-all": [("masked_fill(~mask", "masked_fill(~mask[:1]")],
    "empty-rows-nan": [(SHARES, "powers / total")],
    "empty-rows-uniform": [('float("-inf")', "torch.finfo(raw.dtype).min")],
    "softmax-over-queries": [("powers.sum(dim=-1", "powers.sum(dim=-2"), ("amax(dim=-1", "amax(dim=-2")],
    "softmax-over-heads": [("powers.sum(dim=-1", "powers.sum(dim=1"), ("amax(dim=-1", "amax(dim=1")],
    "softmax-over-batch": [("powers.sum(dim=-1", "powers.sum(dim=0"), ("amax(dim=-1", "amax(dim=0")],
    "softmax-twice": [(SHARES, f"torch.softmax({SHARES}, dim=-1)")],
    "softmax-missing": [(SHARES, "logits")],
    "base-two": [(POWERS, "torch.exp2(logits - top)")],
    "no-max-subtracted": [(POWERS, "torch.exp(logits)")],
    "weights-transposed": [(MIX, "out = weights.transpose(-2, -1) @ v")],
    "keys-as-values": [(MIX, "out = weights @ k")],
    "queries-as-values": [(MIX, "out = weights @ q")],
    "first-head-for-all": [(MIX, "out = weights[:, :1] @ v")],
    "weights-before-mask": [(GIVEN, "return out, raw.softmax(dim=-1)")],
    "weights-are-scores": [(GIVEN, "return out, raw")],
    "weights-averaged": [(GIVEN, "return out, weights.mean(dim=1)")],
    "mask-dropped-with-weights": [("if mask is None:", "if mask is None or return_weights:")],
}

# -- memory --------------------------------------------------------------------------------------------

SCALE = " / self.d_head**0.5"
FILL = "energy.masked_fill(pad, torch.finfo(energy.dtype).min)"
EMPTY = ".masked_fill(pad, 0.0)"
SOFTMAX = "F.softmax(masked, dim=-1)"
MIX = '"bhqk,bhkd->bhqd", dropped, v'
GIVEN = "(out, weights) if need_weights"
PAD = "pad[:, None, None, :]"
PLANTS["memory"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / x.shape[-1] ** 0.5")],
    "scaled-by-d": [(SCALE, " / self.d_head")],
    "scaled-by-length": [(SCALE, " / memory.shape[1] ** 0.5")],
    "masked-zero": [("torch.finfo(energy.dtype).min", "0.0"), (EMPTY, "")],
    "masked-after-softmax": [(FILL, "energy")],
    "masked-ones-added": [(FILL, "energy + ~pad"), (EMPTY, "")],
    "polarity-swapped": [(PAD, "~pad[:, None, None, :]")],
    "padding-ignored": [("pad = memory_key_padding_mask\n", "pad = None\n")],
    "first-mask-for-all": [(PAD, "pad[:1, None, None, :]")],
    "empty-rows-nan": [("torch.finfo(energy.dtype).min", '-float("inf")'), (EMPTY, "")],
    "empty-rows-uniform": [(EMPTY, "")],
    "softmax-over-queries": [(SOFTMAX, "F.softmax(masked, dim=-2)")],
    "softmax-over-heads": [(SOFTMAX, "F.softmax(masked, dim=1)")],
    "softmax-twice": [(SOFTMAX, "F.softmax(F.softmax(masked, dim=-1), dim=-1)")],
    "softmax-missing": [(SOFTMAX, "masked")],
    "sigmoid": [(SOFTMAX, "torch.sigmoid(masked)")],
    "log-softmax": [(SOFTMAX, "F.log_softmax(masked, dim=-1)")],
    "dropout-left-on": [("training=self.training", "training=True")],
    "keys-as-values": [(MIX, '"bhqk,bhkd->bhqd", dropped, k')],
    "split-without-transpose": [
        (
            "x.reshape(b, n, self.n_heads, self.d_head).swapaxes(1, 2)",
            "x.reshape(b, self.n_heads, n, self.d_head)",
        )
    ],
    "merge-without-transpose": [("out.swapaxes(1, 2).flatten(start_dim=2)", "out.reshape(x.shape)")],
    "first-head-for-all": [(MIX, '"bqk,bhkd->bhqd", dropped[:, 0], v')],
    "q-k-swapped": [("self.w_q(x)", "self.w_k(x)"), ("self.w_k(memory)", "self.w_q(memory)")],
    "k-v-swapped": [("self.w_k(memory)", "self.w_v(memory)"), ("self.w_v(memory)", "self.w_k(memory)")],
    "q-v-swapped": [("self.w_q(x)", "self.w_v(x)"), ("self.w_v(memory)", "self.w_q(memory)")],
    "key-from-query-weights": [("self.w_k(memory)", "self.w_q(memory)")],
    "value-unprojected": [("self.w_v(memory)", "memory")],
    "output-missing": [
        ("self.w_o(out.swapaxes(1, 2).flatten(start_dim=2))", "out.swapaxes(1, 2).flatten(start_dim=2)")
    ],
    "output-bias-missing": [("self.w_o(out", "F.linear(weight=self.w_o.weight, input=out")],
    "input-bias-missing": [
        ("self.w_q(x)", "x @ self.w_q.weight.T"),
        ("self.w_k(memory)", "memory @ self.w_k.weight.T"),
        ("self.w_v(memory)", "memory @ self.w_v.weight.T"),
    ],
    "residual-added": [("out = self.w_o(", "out = x + self.w_o(")],
    "context-ignored": [("self.w_k(memory)", "self.w_k(x)"), ("self.w_v(memory)", "self.w_v(x)")],
    "values-from-x": [("self.w_v(memory)", "self.w_v(x)")],
    "weights-before-mask": [(GIVEN, "(out, F.softmax(energy, dim=-1)) if need_weights")],
    "weights-are-scores": [(GIVEN, "(out, energy) if need_weights")],
    "weights-averaged": [(GIVEN, "(out, weights.mean(dim=1)) if need_weights")],
    "mask-dropped-with-weights": [("if pad is None:", "if pad is None or need_weights:")],
    "weights-after-dropout": [(GIVEN, "(out, dropped) if need_weights")],
}

# -- grouped -------------------------------------------------------------------------------------------

SCALE = " * d**-0.5"
SEEN = "j[None, :] <= i[:, None]"
SOFTMAX = "scores.softmax(dim=-1)"
MIX = '"bgrts,bgsd->bgrtd", weights, v'
PLANTS["grouped"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " * (h * d) ** -0.5")],
    "scaled-by-d": [(SCALE, " / d")],
    "multiplied": [(SCALE, " * d**0.5")],
    "scaled-by-heads": [(SCALE, " * h**-0.5")],
    "causal-ignored": [("scores = scores.where(", "scores.where(")],
    "causal-strict": [(SEEN, "j[None, :] < i[:, None]")],
    "causal-late": [(SEEN, "j[None, :] <= i[:, None] + 1")],
    "causal-flipped": [(SEEN, "j[None, :] >= i[:, None]")],
    "masked-zero": [('float("-inf")', "0.0")],
    "softmax-over-queries": [(SOFTMAX, "scores.softmax(dim=-2)")],
    "softmax-twice": [(SOFTMAX, "scores.softmax(dim=-1).softmax(dim=-1)")],
    "sigmoid": [(SOFTMAX, "scores.sigmoid()")],
    "no-max-subtracted": [(SOFTMAX, "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)")],
    "keys-as-values": [(MIX, '"bgrts,bgsd->bgrtd", weights, k')],
    "key-heads-tiled": [
        ("q.reshape(b, g, h // g, t, d)", "q.reshape(b, h // g, g, t, d).transpose(1, 2)"),
        ("return out.reshape(", "return out.transpose(1, 2).reshape("),
    ],
    "key-heads-first-only": [
        ('"bgrtd,bgsd->bgrts", q, k', '"bgrtd,bsd->bgrts", q, k[:, 0]'),
        (MIX, '"bgrts,bsd->bgrtd", weights, v[:, 0]'),
    ],
    "first-key-only": [("torch.arange(t, device=q.device) + (s - t)", "torch.arange(t, device=q.device)")],
}

# -- gqa_cached ----------------------------------------------------------------------------------------

SCALE = " / self.head_dim**0.5"
HIDDEN = "torch.triu(ones, diagonal=start + 1)"
SOFTMAX = "torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)"
MIX = "(attn_weights @ values)"
BOTH = ("keys", "values")
PLANTS["gqa_cached"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / x.shape[-1] ** 0.5")],
    "scaled-by-d": [(SCALE, " / self.head_dim")],
    "scaled-by-heads": [(SCALE, " / self.num_heads**0.5")],
    "scaled-after-softmax": [(SOFTMAX, "torch.softmax(attn_scores, dim=-1)" + SCALE)],
    "causal-ignored": [("attn_scores = attn_scores.masked_fill", "attn_scores.masked_fill")],
    "causal-strict": [(HIDDEN, "torch.triu(ones, diagonal=start)")],
    "causal-late": [(HIDDEN, "torch.triu(ones, diagonal=start + 2)")],
    "causal-flipped": [(HIDDEN, "torch.tril(ones, diagonal=start - 1)")],
    "masked-zero": [("-torch.inf", "0.0")],
    "softmax-over-heads": [("dim=-1)\n        context", "dim=1)\n        context")],
    "softmax-twice": [(SOFTMAX, f"{SOFTMAX}.softmax(dim=-1)")],
    "keys-as-values": [(MIX, "(attn_weights @ keys)")],
    "merge-without-transpose": [("values).transpose(1, 2).reshape", "values).reshape")],
    "key-heads-tiled": [
        (f"{x}.repeat_interleave(self.group_size, dim=1)", f"{x}.repeat(1, self.group_size, 1, 1)")
        for x in BOTH
    ],
    "key-heads-first-only": [
        (f"{x}.repeat_interleave(self.group_size, dim=1)", f"{x}[:, :1].expand(-1, self.num_heads, -1, -1)")
        for x in BOTH
    ],
    "k-v-swapped": [("self.W_key(x)", "self.W_value(x)"), ("self.W_value(x)", "self.W_key(x)")],
    "output-missing": [("self.out_proj(context)", "context")],
    "residual-added": [("self.out_proj(context)", "x + self.out_proj(context)")],
    "first-key-only": [(HIDDEN, "torch.triu(ones, diagonal=1)")],
}

# -- sink_module ---------------------------------------------------------------------------------------

SCALE = " / math.sqrt(self.head_dim)"
SOFTMAX = "torch.softmax(combined, dim=-1)[..., :-1]"
MIX = "torch.matmul(dropped, v)"
GIVEN = "return out, weights"
PLANTS["sink_module"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, " / math.sqrt(x.shape[-1])")],
    "scaled-by-d": [(SCALE, " / self.head_dim")],
    "scaled-by-heads": [(SCALE, " / math.sqrt(self.num_heads)")],
    "causal-ignored": [('scores.masked_fill(future, -float("inf"))', "scores")],
    "causal-strict": [("diagonal=1", "diagonal=0")],
    "causal-late": [("diagonal=1", "diagonal=2")],
    "causal-flipped": [
        ("torch.triu(torch.ones(t, t, device=x.device), diagonal=1)", "torch.tril(torch.ones(t, t), -1)")
    ],
    "masked-zero": [('-float("inf")', "0.0")],
    "softmax-over-queries": [(SOFTMAX, "torch.softmax(combined, dim=-2)[..., :-1]")],
    "softmax-twice": [(SOFTMAX, "torch.softmax(combined.softmax(dim=-1), dim=-1)[..., :-1]")],
    "dropout-left-on": [("self.dropout(weights)", "nn.functional.dropout(weights, self.dropout.p)")],
    "keys-as-values": [(MIX, "torch.matmul(dropped, k)")],
    "merge-without-transpose": [("v).transpose(1, 2).reshape", "v).reshape")],
    "key-heads-tiled": [
        (f"{x}.repeat_interleave(group, dim=1)", f"{x}.repeat(1, group, 1, 1)") for x in "kv"
    ],
    "key-heads-first-only": [
        (f"{x}.repeat_interleave(group, dim=1)", f"{x}[:, :1].repeat(1, self.num_heads, 1, 1)") for x in "kv"
    ],
    "k-v-swapped": [("self.k_proj(x)", "self.v_proj(x)"), ("self.v_proj(x)", "self.k_proj(x)")],
    "output-missing": [("        out = self.o_proj(out)\n", "")],
    "output-bias-missing": [("self.o_proj(out)", "out @ self.o_proj.weight.T")],
    "residual-added": [("self.o_proj(out)", "x + self.o_proj(out)")],
    "sink-left-out": [(SOFTMAX, "torch.softmax(masked, dim=-1)")],
    "sink-as-key": [
        (
            SOFTMAX,
            "torch.softmax(combined, dim=-1)\n"
            "        weights[..., 0] += weights[..., -1]\n"
            "        weights = weights[..., :-1]",
        )
    ],
    "weights-before-mask": [(GIVEN, "return out, torch.softmax(scores, dim=-1)")],
    "weights-are-scores": [(GIVEN, "return out, scores")],
    "weights-averaged": [(GIVEN, "return out, weights.mean(dim=1)")],
    "weights-after-dropout": [(GIVEN, "return out, dropped")],
}

# -- sink_manual ---------------------------------------------------------------------------------------

SCALE = ".div(d**0.5)"
SEEN = ".tril(s - t)"
POWERS = "(scores - top).exp()"
SINK = " + (sinks - top).exp()"
MIX = "powers / total, v)"
PLANTS["sink_manual"] = {
    "unscaled": [(SCALE, "")],
    "scaled-by-width": [(SCALE, ".div((q.shape[1] * d) ** 0.5)")],
    "scaled-by-d": [(SCALE, ".div(d)")],
    "multiplied": [(SCALE, ".mul(d**0.5)")],
    "causal-ignored": [("scores = scores.masked_fill", "scores.masked_fill")],
    "causal-late": [(SEEN, ".tril(s - t + 1)")],
    "causal-strict": [(SEEN, ".tril(s - t - 1)")],
    "causal-flipped": [(SEEN, ".triu(s - t)")],
    "masked-zero": [('float("-inf")', "0.0")],
    "base-two": [(POWERS, "(scores - top).exp2()"), (SINK, " + (sinks - top).exp2()")],
    "no-max-subtracted": [(POWERS, "scores.exp()"), (SINK, " + sinks.exp()")],
    "keys-as-values": [(MIX, "powers / total, k)")],
    "first-head-for-all": [('"bhts,bhsd->bhtd", powers / total', '"bts,bhsd->bhtd", (powers / total)[:, 0]')],
    "sink-left-out": [(SINK, "")],
    "sink-as-key": [
        (
            POWERS,
            "(scores - top).exp()\n"
            "    powers = torch.cat([powers[..., :1] + (sinks - top).exp(), powers[..., 1:]], dim=-1)",
        ),
        (SINK, ""),
    ],
    "first-key-only": [(SEEN, ".tril()")],
}

# -- positions -----------------------------------------------------------------------------------------

SINES = "        pe[:, 0::2] = torch.sin(position * div_term)\n"
COSINES = "        pe[:, 1::2] = torch.cos(position * div_term)\n"
PLANTS["sinusoidal"] = {
    "exponent-doubled": [
        ("torch.exp(torch.arange(0, d_model, 2)", "torch.exp(2 * torch.arange(0, d_model, 2)")
    ],
    "sin-cos-swapped": [("torch.sin(", "torch.cos("), ("torch.cos(", "torch.sin(")],
    "sin-cos-halves": [("pe[:, 0::2]", "pe[:, : d_model // 2]"), ("pe[:, 1::2]", "pe[:, d_model // 2 :]")],
    "positions-from-one": [("torch.arange(0, max_len)", "torch.arange(1, max_len + 1)")],
    "base-thousand": [("10000.0", "1000.0")],
    "even-only": [(COSINES, "")],
    "added-twice": [("x + self.pe[:, : x.size(1)]", "x + 2 * self.pe[:, : x.size(1)]")],
    "angles-inverted": [("* -(math.log(10000.0)", "* (math.log(10000.0)")],
    "dropout-left-on": [("self.dropout(x)", "nn.functional.dropout(x, self.dropout.p)")],
}
STACK = "torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)"
PLANTS["sinusoidal_function"] = {
    "exponent-doubled": [("power = 2 *", "power = 4 *")],
    "sin-cos-swapped": [(STACK, "torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)")],
    "sin-cos-halves": [(STACK, "torch.cat([angles.sin(), angles.cos()], dim=-1)")],
    "positions-from-one": [("torch.arange(length,", "torch.arange(1, length + 1,")],
    "base-thousand": [("10000.0", "1000.0")],
    "even-only": [(STACK, "torch.stack([angles.sin(), 0 * angles], dim=-1).flatten(1)")],
    "angles-inverted": [("positions / 10000.0", "positions * 10000.0")],
}
PLANTS["sinusoidal_loop"] = {
    "exponent-doubled": [("10000 ** (i / d_model)", "10000 ** (2 * i / d_model)")],
    "sin-cos-swapped": [("math.sin(angle)", "math.cos(angle)"), ("math.cos(angle)", "math.sin(angle)")],
    "sin-cos-halves": [
        ("pe[pos, i] =", "pe[pos, i // 2] ="),
        ("pe[pos, i + 1]", "pe[pos, (i + d_model) // 2]"),
    ],
    "positions-from-one": [("angle = pos /", "angle = (pos + 1) /")],
    "base-thousand": [("10000", "1000")],
    "even-only": [("            pe[pos, i + 1] = math.cos(angle)\n", "")],
    "angles-inverted": [("pos / (10000", "pos * (10000")],
}
PLANTS["sinusoidal_sequence"] = {
    "exponent-doubled": [
        ("* torch.arange(0, d_model, 2) / d_model", "* 2 * torch.arange(0, d_model, 2) / d_model")
    ],
    "sin-cos-swapped": [("torch.sin(", "torch.cos("), ("torch.cos(", "torch.sin(")],
    "sin-cos-halves": [("0, 0::2]", "0, : d_model // 2]"), ("0, 1::2]", "0, d_model // 2 :]")],
    "positions-from-one": [("torch.arange(max_len,", "torch.arange(1, max_len + 1,")],
    "base-thousand": [("10000.0", "1000.0")],
    "even-only": [("        table[:, 0, 1::2] = torch.cos(pos[:, None] * freq)\n", "")],
    "added-twice": [
        (
            "return self.dropout(x + self.table[: x.size(0)])",
            "x = x + self.table[: x.size(0)]\n        return self.dropout(x + self.table[: x.size(0)])",
        )
    ],
    "angles-inverted": [("torch.exp(-math.log", "torch.exp(math.log")],
    "dropout-left-on": [("self.dropout(x +", "nn.functional.dropout(p=self.dropout.p, input=x +")],
}
PLANTS["sinusoidal_live"] = {
    "exponent-doubled": [("torch.arange(0, dim, 2) / dim", "2 * torch.arange(0, dim, 2) / dim")],
    "sin-cos-swapped": [("angles.sin(), angles.cos()", "angles.cos(), angles.sin()")],
    "sin-cos-halves": [("emb[:, 0::2], emb[:, 1::2]", "emb[:, : self.dim // 2], emb[:, self.dim // 2 :]")],
    "positions-from-one": [("torch.arange(x.shape[1],", "torch.arange(1, x.shape[1] + 1,")],
    "base-thousand": [("10000.0", "1000.0")],
    "even-only": [("angles.sin(), angles.cos()", "angles.sin(), 0.0")],
    "added-twice": [("x + emb[None]", "x + 2 * emb[None]")],
    "angles-inverted": [("1.0 / 10000.0 **", "10000.0 **")],
}
PLANTS["rotary"] = {
    "rotary-halves": [
        ("x[..., 0::2]", "x[..., : d // 2]"),
        ("x[..., 1::2]", "x[..., d // 2 :]"),
        ("torch.stack(turned, dim=-1).flatten(-2)", "torch.cat(turned, dim=-1)"),
    ],
    "rotary-sign": [("x1 * cos - x2 * sin, x1 * sin + x2 * cos", "x1 * cos + x2 * sin, x2 * cos - x1 * sin")],
    "rotary-base": [("base=10000.0", "base=1000.0")],
    "rotary-positions-from-one": [("positions[:, None].float()", "(positions[:, None].float() + 1)")],
    "rotary-doubled": [("positions[:, None].float()", "2 * positions[:, None].float()")],
    "rotary-half-of-head": [
        (
            "    return torch.stack(turned, dim=-1).flatten(-2)",
            "    out = torch.stack(turned, dim=-1).flatten(-2)\n"
            "    return torch.cat([out[..., : d // 2], x[..., d // 2 :]], dim=-1)",
        )
    ],
}
PLANTS["rotary_half"] = {
    "rotary-halves": [
        ("x1, x2 = x.chunk(2, dim=-1)", "x1, x2 = x[..., 0::2], x[..., 1::2]"),
        ("torch.cat((-x2, x1), dim=-1)", "torch.stack((-x2, x1), dim=-1).flatten(-2)"),
        ("torch.cat((freqs, freqs), dim=-1)", "freqs.repeat_interleave(2, dim=-1)"),
    ],
    "rotary-sign": [("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)")],
    "rotary-base": [("base=10000", "base=1000")],
    "rotary-positions-from-one": [("torch.arange(q.shape[-2],", "torch.arange(1, q.shape[-2] + 1,")],
    "rotary-doubled": [("torch.cat((freqs, freqs), dim=-1)", "torch.cat((2 * freqs, 2 * freqs), dim=-1)")],
    "rotary-half-of-head": [
        (
            "return q_out, k_out",
            "half = q.shape[-1] // 2\n"
            "        q_out = torch.cat((q_out[..., :half], q[..., half:]), dim=-1)\n"
            "        k_out = torch.cat((k_out[..., :half], k[..., half:]), dim=-1)\n"
            "        return q_out, k_out",
        )
    ],
    "rotary-queries-only": [("return q_out, k_out", "return q_out, k")],
}
PLANTS["rotary_complex"] = {
    "rotary-halves": [
        (f"x{x}.unflatten(-1, (-1, 2)).contiguous()", f"x{x}.unflatten(-1, (2, -1)).mT.contiguous()")
        for x in "qk"
    ]
    + [(f"x{x}_ * freqs_cis).flatten(-2)", f"x{x}_ * freqs_cis).mT.flatten(-2)") for x in "qk"],
    "rotary-sign": [("torch.ones_like(freqs), freqs)", "torch.ones_like(freqs), -freqs)")],
    "rotary-base": [("theta=10000.0", "theta=1000.0")],
    "rotary-positions-from-one": [("torch.arange(xq.shape[1])", "torch.arange(1, xq.shape[1] + 1)")],
    "rotary-doubled": [("torch.ones_like(freqs), freqs)", "torch.ones_like(freqs), 2 * freqs)")],
    "rotary-half-of-head": [
        ("torch.ones_like(freqs), freqs)", "torch.ones_like(freqs), freqs * (torch.arange(d // 2) < d // 4))")
    ],
    "rotary-queries-only": [("xk_ * freqs_cis", "xk_")],
}
PLANTS["rotary_tables"] = {
    "rotary-halves": [
        ("a, b = x[..., :half], x[..., half:]", "a, b = x[..., 0::2], x[..., 1::2]"),
        (
            "torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)",
            "torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)",
        ),
        ("        half = self.d // 2\n", ""),
    ],
    "rotary-sign": [("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin")],
    "rotary-base": [("10_000", "1_000")],
    "rotary-positions-from-one": [("self.cos[:t], self.sin[:t]", "self.cos[1 : t + 1], self.sin[1 : t + 1]")],
    "rotary-doubled": [("torch.arange(max_len).float()", "2 * torch.arange(max_len).float()")],
    "rotary-half-of-head": [
        (
            "return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)",
            "turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)\n"
            "        return torch.cat([turned[..., :half], b], dim=-1)",
        )
    ],
}
PLANTS["rotary_pairs"] = {
    "rotary-halves": [
        (
            "x = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1)\n    return x.flatten(-2)",
            "half = x.shape[-1] // 2\n    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)",
        ),
        ("sinusoid.sin().repeat_interleave(2, dim=-1)", "sinusoid.sin().repeat(1, 2)"),
        ("sinusoid.cos().repeat_interleave(2, dim=-1)", "sinusoid.cos().repeat(1, 2)"),
    ],
    "rotary-sign": [("(-x[..., 1::2], x[..., 0::2])", "(x[..., 1::2], -x[..., 0::2])")],
    "rotary-base": [("10000.0", "1000.0")],
    "rotary-positions-from-one": [("positions[:, None] *", "(positions[:, None] + 1) *")],
    "rotary-doubled": [("positions[:, None] *", "2 * positions[:, None] *")],
    "rotary-half-of-head": [
        ("inv_freq = 10000.0", "inv_freq = (torch.arange(0, dim, 2) < dim // 2) * 10000.0"),
    ],
    "rotary-queries-only": [("    k = k * cos + rotate_every_two(k) * sin\n", "")],
}
