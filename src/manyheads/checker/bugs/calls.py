"""Bugs that checks find by comparing calls or with documentation: of dropout, state and idle layers."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from manyheads.checker.overrides import Bug

# fmt: off
BUGS: dict[str, Bug] = {bug.name: bug for bug in (
    Bug("dropout-left-on", "that applies dropout in evaluation too",
        "drop in training only: F.dropout(x, p, training=self.training), or a module nn.Dropout"),
    Bug("dropout-lost", "whose dropout stays off in training after one evaluation",
        "don't set the rate to 0 in evaluation: F.dropout(x, p, training=self.training), or a module nn.Dropout"),
    Bug("dropout-before-softmax", "that applies dropout to the scores: a dropped score still gets a weight",
        "apply dropout to the weights, after the softmax"),
    Bug("dropout-unscaled", "that doesn't divide by 1 − p what dropout keeps", "use F.dropout or nn.Dropout, which divide by 1 − p"),
    Bug("rotary-idle", "whose rotary encoding changes nothing: it isn't applied, or turns queries and keys by the same angle, as along the axis of heads",
        "rotate queries and keys by the positions of their tokens, on the axis of tokens: [b, h, t, d] or [b, t, h, d]"),
    Bug("norm-idle", "whose norm of queries and keys changes nothing: it isn't applied", "apply it to queries and keys after they are projected"),
    Bug("bias-idle", "whose relative bias changes nothing: it isn't added, or is the same for all keys", "add it to the scores, by the distances j - i of keys from queries"),
    Bug("projections-shared", "whose projections of queries, keys and values are one layer, with the same weights",
        "build a layer for each: nn.ModuleList([nn.Linear(e, e) for _ in range(4)]), or copy.deepcopy(layer) in each place"),
    Bug("input-changed", "that changes one of its arguments in place, so that the caller's next call with it is another",
        "compute a new tensor: x = x * 2 rather than x *= 2, masked_fill rather than masked_fill_ or x[...] = y"),
    Bug("buffer-changed", "that changes one of its buffers in place, and whose later calls differ",
        "compute a new tensor: bias = self.mask[:t, :t] + x rather than bias += x, which writes into the buffer"),
    Bug("longer-call-kept", "that keeps what it computed for a longer call, such as frequencies, and uses it in shorter ones too",
        "compute it from the length of each call, or keep the original beside it"),
    Bug("mask-kept", "that uses the mask of an earlier call again",
        "compute the mask in each call: its shape doesn't tell what it masks"),
    Bug("gradient-stopped", "through which no gradient reaches some of its parameters, inputs or steps",
        "compute the output without torch.no_grad, detach() and .data: keep a detached copy of the weights for plots"),
    Bug("rotary-rounded", "whose rotary positions or angles are computed in half precision, which doesn't have all positions of a long sequence",
        "compute positions, angles, cosines and sines in float32, and convert the result"),
    Bug("context-kept", "that reuses the keys and values of an earlier call's context",
        "compute keys and values in each call, or keep them only where the caller asks for it and empties them"),
)}
