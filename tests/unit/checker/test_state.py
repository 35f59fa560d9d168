"""What a call changes: arguments, global state, its own state; and dropout, in training and afterwards."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.isolation.candidate import Call, Candidate
from manyheads.checker.isolation.describe import describe

pytestmark = pytest.mark.usefixtures("one_thread", "quick")

F = nn.functional


class Attention(nn.Module):
    """Self-attention. mask [b, 1, t, s]: True keeps."""

    def __init__(self, embed_dim: int = 24, num_heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.num_heads = num_heads
        self.drop, self.last_drop = nn.Dropout(dropout), nn.Dropout(dropout)

    def start(self, x: Tensor, mask: Tensor | None) -> None:
        """Run before everything else."""

    def weigh(self, scores: Tensor) -> Tensor:
        return self.drop(scores.softmax(-1))

    def finish(self, out: Tensor) -> Tensor:
        return self.last_drop(out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.start(x, mask)
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x.clone()).chunk(3, -1)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = self.weigh(scores)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return self.finish(self.out_proj((weights @ v).transpose(1, 2).flatten(2)))


def attention(**steps: Any) -> type[Attention]:
    """Return the class with other steps."""
    return type("Attention", (Attention,), {"__doc__": Attention.__doc__, **steps})


def result(report: checker.Report, name: str) -> checker.Check:
    return next(each for each in report.checks if each.name == name)


# -- global state and arguments ----------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        *(
            (lambda seed=seed: torch.manual_seed(seed), "the random seed (torch.manual_seed)")
            for seed in range(4)
        ),
        (lambda: random.seed(1), "the random seed (random.seed)"),
        (lambda: np.random.seed(1), "the random seed (numpy.random.seed)"),  # noqa: NPY002
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
        (lambda: torch.set_grad_enabled(True), "grad mode"),
        (lambda: torch.set_grad_enabled(False), "grad mode"),
        (lambda: torch.set_float32_matmul_precision("medium"), "the precision of float32 products"),
    ],
)
def test_global_state_that_a_call_changes(change: Callable[[], Any], name: str) -> None:
    def finish(self: Any, out: Tensor) -> Tensor:
        change()
        return out

    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    found = result(checker.check(attention(finish=finish), "self"), "state")
    assert found.status == "failed"
    assert name in found.reason
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]  # noqa: NPY002


def test_random_numbers_of_a_call_are_no_change() -> None:
    def start(self: Any, x: Tensor, mask: Tensor | None) -> None:
        torch.rand(1)
        random.random()
        np.random.rand()  # noqa: NPY002
        with torch.random.fork_rng():
            torch.manual_seed(0)

    assert result(checker.check(attention(start=start), "self"), "state").status == "passed"


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("step", "name"),
    [
        ({"start": lambda self, x, mask: x.mul_(2)}, "the argument x in place"),
        ({"start": lambda self, x, mask: x[:1].add_(1)}, "the argument x in place"),
        (
            {"start": lambda self, x, mask: None if mask is None else mask[..., :1].logical_not_()},
            "the argument mask in place",
        ),
        ({"start": lambda self, x, mask: self.qkv.bias.data.add_(1)}, "the parameter qkv.bias in place"),
    ],
)
def test_arguments_and_parameters_that_a_call_changes(step: dict[str, Any], name: str) -> None:
    found = result(checker.check(attention(**step), "self"), "state")
    assert found.status == "failed"
    assert name in found.reason


@pytest.mark.full
def test_an_output_that_is_written_into_the_input() -> None:
    class Into(Attention):
        __doc__ = Attention.__doc__

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x, mask)
            with torch.no_grad():
                x.copy_(out)
            return x.view(x.shape)

    found = result(checker.check(Into, "self"), "state")
    assert "the argument x in place" in found.reason


# -- state between calls -----------------------------------------------------------------------------


class Causal(Attention):
    """Causal self-attention with a table of masks."""

    def __init__(self, embed_dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(embed_dim, num_heads, 0.0)
        self.register_buffer("table", None, persistent=False)
        self.calls = 0

    def masks(self, length: int) -> Tensor:
        self.calls += 1
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.ones(length, length, dtype=torch.bool).tril()
        return self.table[:length, :length]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.masks(x.shape[1])[None, None])


def test_a_table_that_grows_is_no_mistake() -> None:
    report = checker.check(Causal, "self")
    assert report.passed, report
    assert "it changes the buffer table in place, without effect on outputs" in result(report, "state").reason


class FirstLength(Causal):
    """Causal self-attention whose mask counts from the end of the first length."""

    def masks(self, length: int) -> Tensor:
        if self.table is None:
            self.table = torch.tensor(length)
        return torch.ones(length, length, dtype=torch.bool).tril(min(0, length - int(self.table)))


class Running(Attention):
    """Self-attention that adds a part of its last output."""

    last = 0.0

    def finish(self, out: Tensor) -> Tensor:
        out = out + self.last
        self.last = 0.01 * float(out.mean())
        return out


@pytest.mark.every(2)
@pytest.mark.parametrize(("wrong", "name"), [(FirstLength, "state"), (Running, "determinism")])
def test_an_output_that_depends_on_earlier_calls(wrong: type[nn.Module], name: str) -> None:
    for candidate in (wrong, wrong()):
        found = result(checker.check(candidate, "self"), name)
        assert found.status == "failed"
        assert "its output depends on earlier calls" in found.reason


def test_a_sequence_starts_from_the_state_before_the_first_call() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.calls += 1
            return torch.cat((self.count, torch.tensor([self.calls]), x))

    candidate = Candidate(Counter())
    call = Call((torch.zeros(1),))
    assert candidate.call(call).output.tolist() == [1, 1, 0]
    assert candidate.call(call).output.tolist() == [1, 2, 0]  # buffers are restored after each call
    for _ in range(2):
        outputs = [answer.output.tolist() for answer in candidate.call_sequence((call, call, call))]
        assert outputs == [[1, 1, 0], [2, 2, 0], [3, 3, 0]]


# -- dropout -----------------------------------------------------------------------------------------


class OffInForward(Attention):
    """Self-attention without a mask."""

    def start(self, x: Tensor, mask: Tensor | None) -> None:
        if not self.training:
            self.drop.p = self.last_drop.p = 0.0


class OffInTrain(Attention):
    """Self-attention that overrides train()."""

    def train(self, mode: bool = True) -> OffInTrain:
        if not mode:
            self.drop = self.last_drop = nn.Identity()
        return super().train(mode)


class StaysOn(Attention):
    """Self-attention whose dropout stays on once it was on."""

    def weigh(self, scores: Tensor) -> Tensor:
        self.was_on = getattr(self, "was_on", False) or self.training
        return F.dropout(scores.softmax(-1), 0.1, self.was_on)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (OffInForward, "dropout stays off"),
        (OffInTrain, "dropout stays off"),
        (StaysOn, "in evaluation after training, dropout stays on"),
        (attention(start=lambda self, x, mask: torch.manual_seed(3)), "the same with every seed"),
        (attention(finish=lambda self, out: out * (math.nan if self.training else 1.0)), "isn't finite"),
    ],
)
def test_dropout_that_is_lost_or_stays(wrong: type[nn.Module], reason: str) -> None:
    found = result(checker.check(wrong, "self"), "training and evaluation")
    assert found.status == "failed"
    assert reason in found.reason


def test_unused_dropout_is_a_convention() -> None:
    unused = attention(weigh=lambda self, scores: scores.softmax(-1), finish=lambda self, out: out)
    found = result(checker.check(unused, "self"), "unused dropout")
    assert found.status == "convention"
    assert "isn't random: dropout of its constructor is unused" in found.reason


def drop_unscaled(self: Attention, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return weights * (torch.rand_like(weights) > self.drop.p) if self.training else weights


@pytest.mark.every(4)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("weigh", "bug"),
    [
        (lambda self, scores: self.drop(scores).softmax(-1), "dropout-before-softmax"),
        (drop_unscaled, "dropout-unscaled"),
    ],
)
def test_misplaced_dropout_is_named(weigh: Any, bug: str, last: bool) -> None:
    steps = {} if last else {"finish": lambda self, out: out}
    report = checker.check(attention(weigh=weigh, **steps), "self")
    assert result(report, "training and evaluation").status == "failed"
    assert [diagnosis.bug for diagnosis in report.diagnosis] == [bug]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "steps",
    [
        {},
        {"finish": lambda self, out: out},  # of the weights alone
        {"weigh": lambda self, scores: scores.softmax(-1)},  # of the output alone
        {
            "weigh": lambda self, scores: (
                scores.softmax(-1) * self.drop(torch.ones(scores.shape[:2]))[..., None, None]
            )
        },
    ],
)
def test_right_dropout_passes(steps: dict[str, Any]) -> None:
    report = checker.check(attention(**steps), "self")
    assert report.passed, report


def test_dropout_before_the_softmax_under_a_causal_mask() -> None:
    class Early(Attention):
        """Causal self-attention."""

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            t = x.shape[1]
            self.future = torch.ones(t, t, dtype=torch.bool).triu(1)
            return super().forward(x)

        def weigh(self, scores: Tensor) -> Tensor:
            return self.drop(scores.masked_fill(self.future, -math.inf)).softmax(-1)  # NaN: 0 · inf

    report = checker.check(Early, "self")
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["dropout-before-softmax"]


# -- frozen parameters, inference mode, partials -----------------------------------------------------


def test_frozen_parameters_pass() -> None:
    module = Attention().requires_grad_(False)
    assert checker.check(module, "self").passed
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.out_proj.requires_grad_(True)
    assert checker.check(module, "self").passed


def test_a_frozen_parameter_is_not_one_that_no_gradient_reaches() -> None:
    detached = attention(finish=lambda self, out: out.detach() + 0 * self.out_proj.bias)
    assert result(checker.check(detached, "self"), "gradients").status == "failed"


def test_modules_of_inference_mode() -> None:
    with torch.inference_mode():
        module = Attention()
        assert checker.check(Attention, "self").passed
    with pytest.raises(
        checker.Unclear, match=r"Attention was built in torch.inference_mode.* Build it outside"
    ):
        checker.check(module, "self")


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, steps: int = 1
) -> Tensor:
    """Return attention. mask [b, 1, t, s]: True keeps."""
    scores = q @ k.mT * scale * steps
    if mask is None:
        return scores.softmax(-1) @ v
    return scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0) @ v


def test_a_partial_has_only_its_free_arguments() -> None:
    partial = functools.partial(functools.partial(attend, scale=6**-0.5), steps=1)
    found = describe(partial, partial)
    assert [argument.name for argument in found.call] == ["q", "k", "v", "mask"]
    assert (found.name, found.attributes) == ("attend", {"scale": 6**-0.5, "steps": 1})
    assert checker.check(partial, "attention").passed
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    assert "is_causal" not in [argument.name for argument in describe(causal, causal).call]


def test_a_partial_of_a_class_is_built() -> None:
    partial = functools.partial(Attention, 24, num_heads=4)
    candidate = Candidate(partial)
    found = candidate.describe()
    assert (found.type, found.name, found.torch_module) == ("class", "Attention", True)
    assert [argument.name for argument in found.init or ()] == ["dropout"]
    assert candidate.build({}).parameters["qkv.bias"] == (72,)
    assert checker.check(partial, "self").passed


# -- a context that evaluation keeps ----------------------------------------------------------------


class KeepsMemory(nn.Module):
    """Cross-attention of x [b, t, e] to memory [b, s, e], whose keys and values evaluation keeps."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.memory: Tensor | None = None
        self.kept: list[Tensor] = []

    def train(self, mode: bool = True) -> KeepsMemory:
        self.memory = None
        return super().train(mode)

    def is_kept(self, memory: Tensor) -> bool:
        return self.memory is memory

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        if self.training or not self.is_kept(memory):
            self.kept, self.memory = [self.k(memory), self.v(memory)], memory
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.q(x), *self.kept))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class KeepsShape(KeepsMemory):
    def is_kept(self, memory: Tensor) -> bool:
        return self.memory is not None and self.memory.shape == memory.shape


def test_evaluation_keeps_a_context_of_the_same_shape() -> None:
    assert checker.check(KeepsMemory).passed
    report = checker.check(KeepsShape)
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["context-kept"], report
