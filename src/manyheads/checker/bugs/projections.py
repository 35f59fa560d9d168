"""Bugs in the projections: weights and inputs of other roles, missing biases, missing layers.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from manyheads.checker.bugs.family import Bug, override, transform, wrap
from manyheads.checker.oracle import Attention, Oracle

OWN = "use each projection for what its name says: q = W_q x, k = W_k y, v = W_v y"
SAME = "project keys and values from the same sequence"


def redirect(roles: Mapping[str, str], *steps: str) -> type[Oracle]:
    """Return an oracle that takes other roles in these steps."""
    return wrap(**dict.fromkeys(steps, lambda o, step, role, *args: step(roles.get(role, role), *args)))


def without_projection(of: str) -> type[Oracle]:
    return wrap(project=lambda o, project, role, x: x if role == of else project(role, x))


def without_biases(of: str) -> type[Oracle]:
    return wrap(bias=lambda o, bias, role: None if role in of else bias(role))


def with_transposed_weights(of: str) -> type[Oracle]:
    return wrap(weight=lambda o, weight, role: weight(role).mT if role in of else weight(role))


def add_output_bias(oracle: Attention, x: Tensor) -> Tensor:
    bias = oracle.bias("o")
    return x if bias is None else x + bias


# fmt: off
BUGS = [
    *(Bug(name, description, OWN, *(redirect(roles, "project") for roles in variants)) for name, description, *variants in (
        ("q-k-swapped", "whose query and key weights are swapped", {"q": "k", "k": "q"}),
        ("k-v-swapped", "whose key and value weights are swapped", {"k": "v", "v": "k"}),
        ("q-v-swapped", "whose query and value weights are swapped", {"q": "v", "v": "q"}),
        ("roles-turned", "whose query, key and value weights are exchanged in a circle",
         {"q": "k", "k": "v", "v": "q"}, {"q": "v", "k": "q", "v": "k"}),
        ("key-from-query-weights", "whose keys are projected by the query weights", {"k": "q"}),
        ("query-from-key-weights", "whose queries are projected by the key weights", {"q": "k"}),
        ("value-from-key-weights", "whose values are projected by the key weights", {"v": "k"}),
        ("key-from-value-weights", "whose keys are projected by the value weights", {"k": "v"}),
        ("value-from-query-weights", "whose values are projected by the query weights", {"v": "q"}),
        ("one-projection", "whose queries, keys and values all come from the query weights", {"k": "q", "v": "q"}),
        ("output-from-value-weights", "whose output is projected by the value weights", {"o": "v"}),
    )),
    *(Bug(f"{a}-{b}-arguments-swapped", description, fix, redirect({a: b, b: a}, "source", "project")) for a, b, description, fix in (
        ("q", "k", "whose queries and keys are swapped", "q comes first: attention(q, k, v)"),
        ("k", "v", "whose keys and values are swapped", "k comes before v: attention(q, k, v)"),
        ("q", "v", "whose queries and values are swapped", "attention(q, k, v), in that order"),
    )),
    *(Bug(name, description, f"project it: use the {role} weights", without_projection(role)) for name, description, role in (
        ("value-unprojected", "whose values are not projected", "v"),
        ("key-unprojected", "whose keys are not projected", "k"),
        ("query-unprojected", "whose queries are not projected", "q"),
        ("output-missing", "without its output projection", "o"),
    )),
    Bug("output-twice", "whose output projection is applied twice", "apply the output projection once",
        transform(project_output=lambda o, x: o.project("o", x))),
    *(Bug(name, description, "add the bias of the layer: x @ weight.T + bias", *(without_biases(roles) for roles in variants))
      for name, description, *variants in (
        ("input-bias-missing", "without the biases of its query, key and value projections", "qkv", "qv"),
        ("query-bias-missing", "without the bias of its query projection", "q"),
        ("key-bias-missing", "without the bias of its key projection", "k"),
        ("value-bias-missing", "without the bias of its value projection", "v"),
        ("output-bias-missing", "without the bias of its output projection", "o"),
        ("biases-missing", "without any of its biases", "qkvo"),
    )),
    Bug("biases-exchanged", "whose query and value biases are swapped", OWN, redirect({"q": "v", "v": "q"}, "bias")),
    Bug("output-bias-twice", "whose output bias is added twice", "add it once; nn.Linear adds its own",
        transform(project_output=add_output_bias)),
    Bug("weight-transposed", "whose projections use their weights transposed",
        "nn.Linear computes x @ weight.T: transpose the weight, or call the layer",
        *(with_transposed_weights(roles) for roles in ("qkvo", "qkv", "o", "q", "k", "v"))),
    Bug("residual-added", "that adds its input to its output", "leave the residual to the block that contains the attention",
        transform(project_output=lambda o, x: x + o.x.query)),
    Bug("context-ignored", "whose keys and values come from the queries' sequence rather than from the other one",
        "project keys and values from the context (memory), queries from x", override(source=lambda o, role: o.x.query)),
    *(Bug(name, description, fix, redirect({role: other}, "source")) for name, description, fix, role, other in (
        ("values-from-x", "whose values come from the queries' sequence rather than from the keys'", SAME, "v", "q"),
        ("keys-from-x", "whose keys come from the queries' sequence rather than from the values'", SAME, "k", "q"),
        ("queries-from-context", "whose queries come from the keys' sequence", "project queries from x", "q", "k"),
        ("key-as-value-input", "that ignores its value input and projects the key input", "project values from the value argument", "v", "k"),
    )),
    Bug("output-scaled", "whose output is divided by the number of heads", "concatenate the heads, don't average them",
        transform(merge_heads=lambda o, x: x / o.q.shape[1])),
    Bug("output-scaled-by-d", "whose output is divided by √d", "scale the scores, not the output",
        transform(mix=lambda o, x: x / o.q.shape[-1] ** 0.5)),
]
# fmt: on
