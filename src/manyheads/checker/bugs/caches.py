"""Bugs of caches, which are found by the tokens that affect a step and not by an oracle."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from manyheads.checker.overrides import Bug

# fmt: off
BUGS: dict[str, Bug] = {bug.name: bug for bug in (
    Bug("first-key-only", "whose causal mask counts queries from the first key, not from the end of the cache",
        "let query i of a step attend to the keys up to s - t + i, such as by torch.ones(t, s).tril(s - t)"),
    Bug("chunk-not-causal", "whose tokens attend to later tokens of their step if a cache precedes them",
        "let query i of a step attend to the cache and to the step's tokens up to i, such as by torch.ones(t, s).tril(s - t)"),
    Bug("chunk-raises", "that raises an error in a step of several tokens if a cache precedes them",
        "a step of t tokens has scores [t, s] for all s tokens so far: masks and biases need s columns, such as torch.ones(t, s).tril(s - t)"),
    Bug("cache-ignored", "that doesn't attend to the tokens in its cache",
        "concatenate the cached keys and values before the new ones, and attend to all of them"),
    Bug("cache-overwritten", "whose cache keeps only the tokens of the last step",
        "cache the concatenation of earlier and new keys and values"),
    Bug("window-lost-in-steps", "whose steps of one token attend to cached tokens outside of its window",
        "mask the cached keys j ≤ i − window in a step of one token too, or drop them from the cache"),
    Bug("window-trimmed", "whose cache is cut to the window, or overwritten, before a step of several tokens attends to it, so that the first of them lose keys of their windows",
        "cut or overwrite the cache after the step, or keep the last window − 1 tokens before the step's first one"),
    Bug("window-slots-hidden", "whose rolling cache hides the slots after the current one, which have the older tokens of its window once all slots were used",
        "mask slots by the positions that are stored in them, not by their numbers"),
    Bug("order-lost-in-steps", "whose steps don't depend on the order of the cached tokens: positions restart at 0 in each step, or positions or biases are left out",
        "add the number of cached tokens to the positions of queries and keys, and encode positions in steps too"),
    Bug("positions-by-length", "that reuses something computed for an earlier step of the same length, such as positions",
        "compute it from the position of the first token too, not from the length alone"),
    Bug("padding-in-steps", "whose steps with a cache treat padding before a sequence otherwise than a call without one, such as in positions",
        "number the tokens of a step as those of a call are: (attention_mask.cumsum(-1) - 1)[:, -t:], and mask the cached padding too"),
    Bug("cache-reordered-in-part", "whose method that reorders the batch entries of its cache moves one part of it and leaves another, such as keys without their values",
        "apply index_select(0, order) to everything that is cached by batch entry: keys, values and masks"),
    Bug("cache-not-emptied", "whose second sequence depends on what an earlier one left in its cache, although it was reset",
        "empty the cache, and set its length to 0, where a sequence begins"),
    Bug("cache-unasked", "whose calls without a cache depend on earlier calls",
        "read and fill the cache only in calls that ask for it"),
)}
