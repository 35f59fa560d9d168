"""Bugs in the projections: weights and inputs of other roles, missing biases, missing layers."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from torch import Tensor

from manyheads.checker.bugs.family import bug, override, register, transform
from manyheads.checker.oracle import Attention, Oracle, linear

OWN = "use each projection for what its name says: q = W_q x, k = W_k y, v = W_v y"


def project_with(roles: dict[str, str]) -> dict[str, object]:
    """Return the step that uses the parameters of other roles."""

    def project(o: Attention, role: str, x: Tensor) -> Tensor:
        role = roles.get(role, role)
        return linear(x, o.weight(role), o.bias(role))

    return {"project": project}


def exchanged(**roles: str) -> type[Oracle]:
    """Return an oracle that uses the weights of other roles."""
    return override(**project_with(roles))


ROLES: list[tuple[str, str, list[dict[str, str]]]] = [
    ("q-k-swapped", "whose query and key weights are swapped", [{"q": "k", "k": "q"}]),
    ("k-v-swapped", "whose key and value weights are swapped", [{"k": "v", "v": "k"}]),
    ("q-v-swapped", "whose query and value weights are swapped", [{"q": "v", "v": "q"}]),
    ("roles-turned", "whose query, key and value weights are exchanged in a circle",
     [{"q": "k", "k": "v", "v": "q"}, {"q": "v", "k": "q", "v": "k"}]),
    ("key-from-query-weights", "whose keys are projected by the query weights", [{"k": "q"}]),
    ("query-from-key-weights", "whose queries are projected by the key weights", [{"q": "k"}]),
    ("value-from-key-weights", "whose values are projected by the key weights", [{"v": "k"}]),
    ("key-from-value-weights", "whose keys are projected by the value weights", [{"k": "v"}]),
    ("value-from-query-weights", "whose values are projected by the query weights", [{"v": "q"}]),
    ("one-projection", "whose queries, keys and values all come from the query weights", [{"k": "q", "v": "q"}]),
    ("output-from-value-weights", "whose output is projected by the value weights", [{"o": "v"}]),
]  # fmt: skip
for name, description, variants in ROLES:
    register(name, description, OWN, *(exchanged(**roles) for roles in variants))


def exchanged_arguments(a: str, b: str) -> type[Oracle]:
    """Return an oracle that exchanges two inputs together with their weights."""
    roles = {a: b, b: a}

    class Exchanged(Attention):
        def source(self, role: str) -> Tensor:
            return super().source(roles.get(role, role))

        def project(self, role: str, x: Tensor) -> Tensor:
            role = roles.get(role, role)
            return linear(x, self.weight(role), self.bias(role))

    return Exchanged


register(
    "q-k-arguments-swapped",
    "whose queries and keys are swapped",
    "q comes first: attention(q, k, v)",
    exchanged_arguments("q", "k"),
)
register(
    "k-v-arguments-swapped",
    "whose keys and values are swapped",
    "k comes before v: attention(q, k, v)",
    exchanged_arguments("k", "v"),
)
register(
    "q-v-arguments-swapped",
    "whose queries and values are swapped",
    "attention(q, k, v), in that order",
    exchanged_arguments("q", "v"),
)


def unprojected(role: str) -> type[Oracle]:
    """Return an oracle without the projection of a role."""

    class Unprojected(Attention):
        def project(self, which: str, x: Tensor) -> Tensor:
            return x if which == role else super().project(which, x)

    return Unprojected


for name, description, role in (
    ("value-unprojected", "whose values are not projected", "v"),
    ("key-unprojected", "whose keys are not projected", "k"),
    ("query-unprojected", "whose queries are not projected", "q"),
    ("output-missing", "without its output projection", "o"),
):
    register(name, description, f"project it: use the {role} weights", unprojected(role))
register("output-twice", "whose output projection is applied twice", "apply the output projection once",
         transform(project_output=lambda o, x: o.project("o", x)))  # fmt: skip


def without_bias(roles: str) -> type[Oracle]:
    """Return an oracle without the biases of some roles."""

    class WithoutBias(Attention):
        def bias(self, role: str) -> Tensor | None:
            return None if role in roles else super().bias(role)

    return WithoutBias


for name, description, every in (
    ("input-bias-missing", "without the biases of its query, key and value projections", ("qkv", "qv")),
    ("query-bias-missing", "without the bias of its query projection", ("q",)),
    ("key-bias-missing", "without the bias of its key projection", ("k",)),
    ("value-bias-missing", "without the bias of its value projection", ("v",)),
    ("output-bias-missing", "without the bias of its output projection", ("o",)),
    ("biases-missing", "without any of its biases", ("qkvo",)),
):
    register(name, description, "add the bias of the layer: x @ weight.T + bias", *map(without_bias, every))


@bug("biases-exchanged", "whose query and value biases are swapped", OWN)
class BiasesExchanged(Attention):
    """Swaps two biases."""

    def bias(self, role: str) -> Tensor | None:
        return super().bias({"q": "v", "v": "q"}.get(role, role))


def add_output_bias(o: Attention, x: Tensor) -> Tensor:
    bias = o.bias("o")
    return x if bias is None else x + bias


register("output-bias-twice", "whose output bias is added twice", "add it once; nn.Linear adds its own",
         transform(project_output=add_output_bias))  # fmt: skip


def with_transposed_weight(roles: str) -> type[Oracle]:
    """Return an oracle that multiplies with the transposed weights of some roles."""

    class Transposed(Attention):
        def weight(self, role: str) -> Tensor:
            return super().weight(role).mT if role in roles else super().weight(role)

    return Transposed


register("weight-transposed", "whose projections use their weights transposed",
         "nn.Linear computes x @ weight.T: transpose the weight, or call the layer",
         *map(with_transposed_weight, ("qkvo", "qkv", "o", "q", "k", "v")))  # fmt: skip
register("residual-added", "that adds its input to its output", "leave the residual to the block that contains the attention",
         transform(project_output=lambda o, x: x + o.x.query))  # fmt: skip
register("context-ignored", "whose keys and values come from the queries' sequence rather than from the other one",
         "project keys and values from the context (memory), queries from x", override(source=lambda o, role: o.x.query))  # fmt: skip


def with_source(role: str, other: str) -> type[Oracle]:
    """Return an oracle that projects the input of another role."""

    class WithSource(Attention):
        def source(self, which: str) -> Tensor:
            return super().source(other if which == role else which)

    return WithSource


for name, description, fix, role, other in (
    ("values-from-x", "whose values come from the queries' sequence rather than from the keys'",
     "project keys and values from the same sequence", "v", "q"),
    ("keys-from-x", "whose keys come from the queries' sequence rather than from the values'",
     "project keys and values from the same sequence", "k", "q"),
    ("queries-from-context", "whose queries come from the keys' sequence", "project queries from x", "q", "k"),
    ("key-as-value-input", "that ignores its value input and projects the key input",
     "project values from the value argument", "v", "k"),
):  # fmt: skip
    register(name, description, fix, with_source(role, other))
register("output-scaled", "whose output is divided by the number of heads", "concatenate the heads, don't average them",
         override(merge_heads=lambda o, x: Attention.merge_heads(o, x) / x.shape[1]))  # fmt: skip
register("output-scaled-by-d", "whose output is divided by √d", "scale the scores, not the output",
         transform(mix=lambda o, x: x / o.q.shape[-1] ** 0.5))  # fmt: skip
