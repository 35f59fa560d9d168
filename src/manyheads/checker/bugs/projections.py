"""Bugs in the projections: weights and inputs of other roles, missing biases, missing layers.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, override, transform, wrap

OWN = "use each projection for what its name says: q = W_q x, k = W_k y, v = W_v y"
SAME = "project keys and values from the same sequence"
ADD = "add the bias of the layer: x @ weight.T + bias"


def redirect(*steps: str, **roles: str) -> type[Oracle]:
    """Return an oracle whose steps take other roles, such as `q="k"`: the weights of k for q."""
    return wrap(**dict.fromkeys(steps, lambda o, step, role, *args: step(roles.get(role, role), *args)))


def without_projection(roles: str) -> type[Oracle]:
    return wrap(project=lambda o, project, role, x: x if role in roles else project(role, x))


def without_biases(roles: str) -> type[Oracle]:
    return wrap(bias=lambda o, bias, role: None if role in roles else bias(role))


def with_transposed_weights(roles: str) -> type[Oracle]:
    return wrap(weight=lambda o, weight, role: weight(role).mT if role in roles else weight(role))


def with_activations(*roles: str) -> list[type[Oracle]]:
    """Return oracles that apply an activation after the projections of these roles."""

    def variant(activation: Callable[[Tensor], Tensor], letters: str) -> type[Oracle]:
        return wrap(
            project=lambda o, project, role, x: (activation if role in letters else same)(project(role, x))
        )

    return [
        variant(activation, letters) for letters in roles for activation in (torch.relu, torch.tanh, gelu)
    ]


def same(x: Tensor) -> Tensor:
    return x


def add_output_bias(oracle: Attention, x: Tensor) -> Tensor:
    bias = oracle.bias("o")
    return x if bias is None else x + bias


# fmt: off
BUGS = [
    Bug("q-k-swapped", "whose query and key weights are swapped", OWN, redirect("project", q="k", k="q")),
    Bug("k-v-swapped", "whose key and value weights are swapped", OWN, redirect("project", k="v", v="k")),
    Bug("q-v-swapped", "whose query and value weights are swapped", OWN, redirect("project", q="v", v="q")),
    Bug("roles-turned", "whose query, key and value weights are exchanged in a circle", OWN,
        redirect("project", q="k", k="v", v="q"), redirect("project", q="v", k="q", v="k")),
    Bug("key-from-query-weights", "whose keys are projected by the query weights", OWN, redirect("project", k="q")),
    Bug("query-from-key-weights", "whose queries are projected by the key weights", OWN, redirect("project", q="k")),
    Bug("value-from-key-weights", "whose values are projected by the key weights", OWN, redirect("project", v="k")),
    Bug("key-from-value-weights", "whose keys are projected by the value weights", OWN, redirect("project", k="v")),
    Bug("value-from-query-weights", "whose values are projected by the query weights", OWN, redirect("project", v="q")),
    Bug("one-projection", "whose queries, keys and values all come from the query weights", OWN, redirect("project", k="q", v="q")),
    Bug("output-from-value-weights", "whose output is projected by the value weights", OWN, redirect("project", o="v")),
    Bug("q-k-arguments-swapped", "whose queries and keys are swapped", "q comes first: attention(q, k, v)",
        redirect("source", "project", q="k", k="q")),
    Bug("k-v-arguments-swapped", "whose keys and values are swapped", "k comes before v: attention(q, k, v)",
        redirect("source", "project", k="v", v="k")),
    Bug("q-v-arguments-swapped", "whose queries and values are swapped", "attention(q, k, v), in that order",
        redirect("source", "project", q="v", v="q")),
    Bug("value-unprojected", "whose values are not projected", "project it: use the v weights", without_projection("v")),
    Bug("key-unprojected", "whose keys are not projected", "project it: use the k weights", without_projection("k")),
    Bug("query-unprojected", "whose queries are not projected", "project it: use the q weights", without_projection("q")),
    Bug("projections-activated", "whose projected queries, keys or values pass through an activation", "the projections are linear: leave the activation out",
        *with_activations("qkv", "qkvo")),
    Bug("output-activated", "whose projected output passes through an activation", "the output projection is linear: leave the activation to the block",
        *with_activations("o")),
    Bug("output-missing", "without its output projection", "project it: use the o weights", without_projection("o")),
    Bug("output-twice", "whose output projection is applied twice", "apply the output projection once",
        transform(project_output=lambda o, x: o.project("o", x))),
    Bug("input-bias-missing", "without the biases of its query, key and value projections", ADD, without_biases("qkv"), without_biases("qv")),
    Bug("query-bias-missing", "without the bias of its query projection", ADD, without_biases("q")),
    Bug("key-bias-missing", "without the bias of its key projection", ADD, without_biases("k")),
    Bug("value-bias-missing", "without the bias of its value projection", ADD, without_biases("v")),
    Bug("output-bias-missing", "without the bias of its output projection", ADD, without_biases("o")),
    Bug("biases-missing", "without any of its biases", ADD, without_biases("qkvo")),
    Bug("biases-exchanged", "whose biases of queries, keys and values are added to others of them", OWN,
        *(redirect("bias", **roles) for roles in (
            {"q": "v", "v": "q"}, {"k": "v", "v": "k"}, {"q": "k", "k": "q"}, {"q": "k", "k": "v", "v": "q"}, {"q": "v", "k": "q", "v": "k"}))),
    Bug("output-bias-twice", "whose output bias is added twice", "add it once; nn.Linear adds its own", transform(project_output=add_output_bias)),
    Bug("weight-transposed", "whose projections use their weights transposed",
        "nn.Linear computes x @ weight.T: transpose the weight, or call the layer",
        *(with_transposed_weights(roles) for roles in ("qkvo", "qkv", "o", "q", "k", "v"))),
    Bug("residual-added", "that adds its input to its output", "leave the residual to the block that contains the attention",
        transform(project_output=lambda o, x: x + o.x.query)),
    Bug("context-ignored", "whose keys and values come from the queries' sequence rather than from the other one",
        "project keys and values from the context (memory), queries from x", override(source=lambda o, role: o.x.query)),
    Bug("values-from-x", "whose values come from the queries' sequence rather than from the keys'", SAME, redirect("source", v="q")),
    Bug("keys-from-x", "whose keys come from the queries' sequence rather than from the values'", SAME, redirect("source", k="q")),
    Bug("queries-from-context", "whose queries come from the keys' sequence", "project queries from x", redirect("source", q="k")),
    Bug("key-as-value-input", "that ignores its value input and projects the key input", "project values from the value argument",
        redirect("source", v="k")),
    Bug("output-scaled", "whose output is divided by the number of heads", "concatenate the heads, don't average them",
        transform(merge_heads=lambda o, x: x / o.q.shape[1])),
    Bug("output-scaled-by-d", "whose output is divided by √d", "scale the scores, not the output",
        transform(mix=lambda o, x: x / o.q.shape[-1] ** 0.5)),
]
# fmt: on
