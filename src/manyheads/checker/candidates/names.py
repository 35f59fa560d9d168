"""Tables of the names that attention code uses, and what they mean; docs/checker.md shows them.

A role is never chosen because the numbers then agree: otherwise a swap of queries and keys would pass.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import re

# -- arguments of a constructor: by meaning, the value of a required argument, and its names --------

WIDTH, HEADS, GROUPS, KEY_WIDTH, VALUE_WIDTH, CONTEXT, LENGTH, BATCH = 24, 4, 2, 6, 20, 16, 512, 3
DROPOUT = 0.1  # replaces a default too: it must have no effect in evaluation

CONSTRUCTOR: dict[str, tuple[int | float | bool | str, tuple[str, ...]]] = {
    "the model width": (WIDTH, ("embed_dim", "d_model", "dim", "hidden_size", "hidden", "hidden_dim", "n_embd",
        "n_embed", "e", "embed_size", "emb_size", "emb_dim", "model_dim", "dim_model", "input_dim", "d_in", "in_dim",
        "dim_in", "in_features", "width", "embedding_dim", "d_embed", "d_emb", "size", "features", "channels",
        "embedding_size", "model_size", "input_size", "num_hiddens", "units", "query_dim", "q_dim", "d_x",
        "x_input_dim", "embed", "model", "hid_dim", "hidden_units", "num_hidden", "dmodel", "d", "emb", "k",
        "n_state", "in_channels", "n_channels", "num_channels", "hidden_channels", "d_hidden", "feature_dim", "ch")),
    "the number of heads": (HEADS, ("num_heads", "n_heads", "heads", "n_head", "h", "nhead", "num_attention_heads",
        "nheads", "n_h", "head_count", "number_of_heads", "attention_heads", "num_head", "head_num", "num_of_heads", "nb_heads", "heads_num", "H")),
    "the number of key heads": (GROUPS, ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "kv_heads", "n_groups",
        "n_query_groups", "num_groups", "groups", "num_query_groups", "n_kv_head", "g")),
    "the width of a head": (KEY_WIDTH, ("head_size", "head_dim", "dim_head", "d_head", "d_k", "key_dim", "dim_k",
        "d_key", "qk_dim", "d_q", "dim_q", "d_qk", "dk", "key_size", "query_size", "head_width", "q_size", "d_kv")),
    "the width of values or of the output": (VALUE_WIDTH, ("value_dim", "d_v", "dim_v", "d_value", "dv", "output_dim",
        "d_out", "out_dim", "out_features", "dim_out", "value_size", "output_size", "v_dim", "final_output_dim")),
    "the width of the other sequence": (CONTEXT, ("context_dim", "kv_dim", "cross_dim", "encoder_dim", "d_context",
        "memory_dim", "y_input_dim", "d_y", "cross_attention_dim", "d_cross", "dim_context", "d_memory")),
    "the longest text": (LENGTH, ("block_size", "max_len", "max_seq_len", "context_length", "max_length", "seq_len",
        "max_position_embeddings", "n_ctx", "max_positions", "sequence_length", "max_seq_length", "ctx_len",
        "context_size", "seq_length", "length", "n_positions", "max_sequence_length", "maxlen", "T")),
    "the batch": (BATCH, ("batch_size", "batch", "max_batch_size", "max_batch", "bsz")),
    "dropout": (DROPOUT, ("dropout", "dropout_p", "p", "dropout_prob", "attn_dropout", "attention_dropout",
        "resid_dropout", "proj_dropout", "drop", "p_drop", "dropout_rate", "drop_rate", "attn_drop", "proj_drop",
        "attn_pdrop", "resid_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "p_dropout")),
    "a bias": (True, ("bias", "qkv_bias", "use_bias", "add_bias", "attention_bias")),
    "causal": (True, ("causal", "is_causal", "masked", "autoregressive", "use_causal_mask")),
    "the number of the layer": (0, ("layer_idx", "layer_id", "layer_index", "layer_num")),
    "the implementation": ("eager", ("_attn_implementation", "attn_implementation")),
}  # fmt: skip

MODEL_WIDTH, NUMBER_OF_HEADS, KEY_HEADS, HEAD_WIDTH = [*CONSTRUCTOR][:4]  # meanings
REPLACED = ("dropout", "causal", "the number of the layer")  # meanings whose value replaces a default
CONFIGURATION = ("config", "cfg", "args", "conf", "params")

# -- arguments of a call ---------------------------------------------------------------------------

CALL: dict[str, tuple[str, ...]] = {
    "query": ("query", "q", "queries", "x_q", "xq", "query_states", "tgt", "query_layer", "Q",
              "latents"),
    "key": ("key", "k", "keys", "x_k", "xk", "key_states", "key_layer", "K"),
    "value": ("value", "v", "values", "x_v", "xv", "value_states", "value_layer", "V"),
    "x": ("x", "input", "inputs", "hidden_states", "hidden", "embeddings", "embedding", "src", "z", "tokens", "seq",
          "sequence", "X", "features", "inp", "xs", "hidden_state", "embedded"),
    "context": ("context", "memory", "y", "encoder_hidden_states", "encoder_output", "enc_out", "kv", "cond", "other",
                "x_kv", "key_value_states", "encoder_outputs", "source", "encoder_out", "mem", "Y", "xc", "xa"),
    "mask": ("mask", "attn_mask", "attention_mask", "src_mask", "att_mask", "masks", "tgt_mask", "keep", "visible",
             "hidden_mask", "attn_bias", "adj", "adjacency", "adj_matrix", "adj_mask"),
    "mask-of-keys": ("key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask", "key_mask", "key_padding",
                "src_padding_mask", "padding", "pad", "memory_key_padding_mask", "context_mask",
                "encoder_padding_mask", "memory_padding_mask", "memory_mask", "pad_masks"),
    "lengths": ("lengths", "valid_lens", "valid_len", "lens"),
    "segments": ("segment_ids", "doc_ids", "document_ids", "seg_ids", "seq_ids", "sequence_ids", "packing_ids"),
    "cumulative-lengths": ("cu_seqlens", "cu_seq_lens", "cu_lens", "cu_lengths", "cumulative_lengths"),
    "causal": ("causal", "is_causal", "masked", "use_causal_mask", "causal_mask", "use_causal"),
    "weights": ("need_weights", "return_weights", "output_attentions", "return_attention", "return_attn",
                "return_attn_weights", "need_attn", "return_attention_weights", "with_weights", "get_weights",
                "return_att", "return_scores", "output_attention", "need_attention", "return_attention_scores",
                "output_weights", "return_probs"),
    "average-weights": ("average_attn_weights",),
    "scale": ("scale", "scaling", "softmax_scale", "sm_scale"),
    "sink": ("sinks", "sink", "attention_sink", "attention_sinks", "sink_logits", "s_aux"),
    "dropout": ("dropout", "dropout_p", "p", "dropout_prob", "p_dropout"),
    "cache": ("past", "past_key_value", "past_key_values", "layer_past", "past_kv", "kv_cache", "cache", "prev_kv",
              "layer_cache", "kvcache", "past_kvs", "cached_kv", "previous_kv", "past_kv_cache", "kv_past", "past_state",
              "incremental_state"),
    "cached-keys": ("past_key", "past_k", "k_cache", "cache_k", "key_cache", "cached_k", "prev_k", "past_keys",
                    "cached_keys", "prev_keys", "k_past"),
    "cached-values": ("past_value", "past_v", "v_cache", "cache_v", "value_cache", "cached_v", "prev_v", "past_values",
                      "cached_values", "prev_values", "v_past"),
    "return-cache": ("use_cache", "return_cache", "use_kv_cache", "return_kv", "return_present", "return_kv_cache",
                     "return_intermediates"),
    "bias": ("position_bias", "score_bias", "rel_bias", "relative_bias", "alibi", "alibi_bias"),
    "positions": ("positions", "position_ids", "pos_ids", "position", "pos", "input_pos", "cache_position",
                  "token_positions", "input_positions", "segment_pos", "token_pos", "pos_idx"),
    "query-vectors": ("query_pos", "query_embed", "query_pos_embed", "query_position_embeddings", "q_pos", "tgt_pos",
                      "query_pos_emb", "object_queries"),
    "key-vectors": ("key_pos", "key_pos_embed", "key_pos_emb", "k_pos", "memory_pos", "mem_pos", "context_pos",
                    "spatial_position_embeddings"),
    "start": ("start_pos", "offset", "start", "pos_offset", "position_offset", "past_length", "past_len", "cache_len",
              "cur_pos", "past_key_values_length", "start_index", "cache_length", "start_position"),
    "cos-sin": ("position_embeddings", "rotary_emb", "rotary_pos_emb", "rope", "cos_sin", "rotary_embeddings"),
    "cos": ("cos", "rotary_cos", "cosines"),
    "sin": ("sin", "rotary_sin", "sines"),
    "angles": ("freqs_cis", "freqs_complex", "pos_cis"),
    "rows": ("H", "height", "grid_h", "grid_height", "num_rows", "n_rows", "rows"),
    "columns": ("W", "width", "grid_w", "grid_width", "num_cols", "n_cols", "num_columns", "cols", "columns"),
    "grid": ("grid", "grid_size", "grid_shape", "grid_hw", "patch_grid", "hw", "hw_shape", "spatial_shape", "x_size",
             "image_size", "img_size", "image_shape", "resolution", "input_resolution", "feat_size", "spatial_size"),
    "length": ("seq_len", "seqlen", "seq_length", "sequence_length", "n_tokens", "num_tokens", "tgt_len", "q_len"),
    "query-length": ("query_length", "query_len", "num_queries", "n_queries", "num_query_tokens", "n_query_tokens"),
    "batch": ("batch_size", "bsz", "batch"),
    "layer": ("layer_idx", "layer_id", "layer_index", "layer_num", "layer_number"),
    "grouped": ("enable_gqa",),
    "softcap": ("softcap", "soft_cap", "logit_cap", "logits_cap", "logit_softcap", "logits_soft_cap", "attn_softcap",
                "attn_logit_softcapping", "score_cap", "softcapping"),
    "window": ("window", "sliding_window", "window_size", "local_window", "attention_window", "attn_window"),
    "head-mask": ("head_mask", "layer_head_mask", "heads_mask", "cross_attn_head_mask", "cross_layer_head_mask"),
    "residual": ("residual", "res", "skip"),
    "module": ("module",),
}  # fmt: skip

# -- parameters: the role of the first pattern that a component of the path matches, from the end --

Q = r"q|query|queries|toqueries|wq|qs|toq|qproj|queryproj|qlinear|linearq|fcq|qw|projq|queryprojection|wquery|querylayer|tokeyq|qlin|lq|projquery|queryw|xq"
K = Q.replace("queries", "keys").replace("query", "key").replace("q", "k").replace("tokeyk|", "")
V = K.replace("keys", "values").replace("key", "value").replace("k", "v")
O = (r"o|out|output|attentionoutput|wo|toout|oproj|outproj|outputproj|olinear|outlinear|linearo|linearout|fco|fcout|proj|projection|"
     r"cproj|dense|fc|outprojection|outputprojection|wout|woutput|outputlayer|outputlinear|unify|unifyheads|mix|"
     r"final|finallinear|linear|projo|projout|combine|combineheads|lo|outlin|ow|concat|wconcat|finalproj")  # fmt: skip
QKV = r"qkv|inproj|cattn|wqkv|toqkv|querykeyvalue|qkvproj|projqkv|inprojection|qkvprojection|qkvlinear|qkvlayer|qkvlin|qkvw|linearqkv|packed"
KV = r"kv|tokv|wkv|kvproj|keyvalue|kvlinear|projkv|linearkv"

PARAMETERS: dict[str, re.Pattern[str]] = {
    role: re.compile(rf"(?:{words})")
    for role, words in (("qkv", QKV), ("kv", KV), ("q", Q), ("k", K), ("v", V), ("o", O))
}


GENERIC = ("linear", "lin", "layer", "proj", "net")  # names of layers that give no role
OTHER = re.compile(r"norm|ln|scale|gate|null|mem|rel|pos|cache")  # of layers besides the projections
NOT_LAYERS = ("embed", "embedding", "embeddings", "emb", "token", "tokens", "drop", "dropout")
OUTPUT_WORDS = ("o", "out", "output", "outputs", "concat", "combine", "wo")
# Names of weights that are parameters of the module, without a layer.
RAW_LAYER = re.compile(r"(?:^|_)(?:einsum|kernel|matrix|mat|linear|dense|proj|projection|layer)$", re.I)
SINK = re.compile(r"(^|\.)(sinks?|attn_sinks?|sink_logits?|attention_sinks?)$")

# The names of a constructor's window, the number of keys that each query sees, and its value.
WINDOW = re.compile(
    "|".join(CALL["window"])
    + r"|(?:local|sliding|attn|attention)_(?:attn_|attention_)?window(?:_size|_length)?|window_length"
)
WINDOW_SIZE = 3


def argument_role(name: str) -> str | None:
    """Return the role of a call's argument by the table, or None."""
    return next((role for role, names in CALL.items() if name in names), None)


def guess_mask_role(name: str) -> str | None:
    """Return "mask-of-keys" or "mask" for a name that contains "mask" and isn't in the table, or None."""
    if "mask" not in name.lower():
        return None
    keys = ("pad", "key", "ctx", "context", "mem", "enc", "src", "cross", "kv")
    return "mask-of-keys" if any(word in name.lower() for word in keys) else "mask"


def constructor_value(name: str) -> tuple[str, int | float | bool | str | None]:
    """Return the meaning of a constructor's argument and its value, or ("", None)."""
    values = ((meaning, value) for meaning, (value, names) in CONSTRUCTOR.items() if name in names)
    return next(values, ("", None))


def parameter_role(path: str) -> tuple[str, str, int | None] | None:
    """Return (role, "weight" or "bias", head) of a parameter by its path, or None.

    `heads.2.query.weight` is ("q", "weight", 2); `W_o` ("o", "weight", None); `b_q` ("q", "bias", None).
    """
    components = path.split(".")
    part = components.pop() if len(components) > 1 and components[-1] in ("weight", "bias") else "weight"
    numbers = [int(component) for component in components if component.isdigit()]
    words = [component.lower() for component in components if not component.isdigit()]
    is_list = bool(components) and components[-1].isdigit()
    # Of query.linear.weight, `query` gives the role; `linear` does only if `query` gives none.
    for n in sorted(range(len(words)), key=lambda n: (words[n] in GENERIC and n > 0, -n)):
        affixes = re.fullmatch(r"(b_|bias_)?(.+?)(_bias|_b|bias)?(_weights?|_w|_kernel)?", words[n])
        assert affixes is not None
        name = re.sub(r"^w_|[_-]", "", affixes[2])
        for role, pattern in PARAMETERS.items():
            if pattern.fullmatch(name):
                # A number before the name is a head; after it, a layer of a Sequential or an entry of a head's list.
                is_last = is_list and n == len(words) - 1
                head = numbers[0] if numbers and (not is_last or role not in ("o", "qkv")) else None
                is_bias = (affixes[1] or affixes[3]) and not path.endswith(".weight")  # of kv_b
                return role, "bias" if is_bias else part, head
    # Of a layer such as ff_q.weight, query_dense.weight or kv_einsum, a word of the name gives the role.
    is_layer = path.endswith((".weight", ".bias")) or RAW_LAYER.search(components[-1])
    for component in reversed(components if is_layer and not OTHER.search(path) else []):
        if len(letters := roles_of_words(component)) == 1:
            word = component.lower()
            is_bias = word.startswith(("b_", "bias_")) or word.endswith("_bias")
            return letters.pop(), "bias" if is_bias else part, None
    return None


def roles_of_words(component: str) -> set[str]:
    """Return the roles that the words of a name give, those of q, k and v before that of the output."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", component)]
    if any(word in NOT_LAYERS for word in words):
        return set()
    found = {role for word in words for role in ("qkv", "kv", *"qkv") if PARAMETERS[role].fullmatch(word)}
    if len(found) > 1 and found <= {*"qkv"}:  # key_value_dense
        found = {"".join(role for role in "qkv" if role in found)} & {"qkv", "kv"}
    return found or {"o" for word in words if word in OUTPUT_WORDS}


def is_generic(path: str) -> bool:
    """Return True if the name of a layer, such as `linear_layer`, says only that it is one."""
    return all(word in GENERIC for word in path.rpartition(".")[2].lower().split("_"))
