"""What is wrong in each mistake_NN.py of this folder; nothing in the files themselves says it."""

ANSWERS = {
    "mistake_01": "Scores are divided by the square root of the number of keys instead of the head's width.",
    "mistake_02": "F.softmax has no dim: it takes dim 1 of four, so it normalises over the heads.",
    "mistake_03": "The keys are transposed by a reshape to [b, h, d, t] instead of a transpose.",
    "mistake_04": "The values are mixed with the weights transposed: output j sums weights (i, j) over i.",
    "mistake_05": "The mask is applied after softmax and the rows are not normalised again.",
    "mistake_06": "The boolean mask is added to the scores as 0 and 1, so it hides nothing.",
    "mistake_07": "The padding mask is laid along queries: padded queries give zeros, padded keys are seen.",
    "mistake_08": "The padding mask is tiled over [b·h], which is batch-major: entries meet others' masks.",
    "mistake_09": "nn.MultiheadAttention lacks batch_first, so a batch-first input attends over the batch.",
    "mistake_10": "Key and value heads are tiled (0 1 0 1) instead of repeated each (0 0 1 1).",
    "mistake_11": "The values are projected by the key's layer; the value's layer is never used.",
    "mistake_12": "A ReLU is applied to the projected queries, keys and values.",
    "mistake_13": "The weights are detached before mixing: queries and keys get no gradient.",
    "mistake_14": "The query is scaled in place: the caller's tensor is changed (and a leaf is refused).",
    "mistake_15": "Softmax without subtracting the row's maximum: large scores overflow to inf / inf = NaN.",
    "mistake_16": "The output is squeezed: a batch of one or a target of one loses its dimension.",
    "mistake_17": "The exponent has lost its minus: frequencies grow with the dimension, 10000^(+2i/d).",
    "mistake_18": "rotate_half has lost the minus sign of its first half: not a rotation.",
    "mistake_19": "The padding mask is ignored when the weights are asked for.",
    "mistake_20": "Only the newest keys and values go to the cache: the third step has forgotten the first.",
}
