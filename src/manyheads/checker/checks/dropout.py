"""Checks of training mode: dropout that stays on or off, is lost, or is applied in the wrong place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.checks.evidence import run_sequence
from manyheads.checker.checks.registry import Check, check, convention, failed, passed, unchecked
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.candidate import seeded
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Attention, Inputs, exact, largest_difference
from manyheads.checker.overrides import Bug, compose, override, wrap

CALLS, COPIES = 64, 32  # calls in training, each with copies of one input: dropout is averaged over both
RATES = (0.1, 0.2, 0.3, 0.5)  # tried if nothing says the rate
SIGMAS = 6.0  # standard errors that chance explains


@check("training and evaluation", Attention, Encoding)
def check_training(adapter: Adapter) -> Iterator[Check]:
    """Compare outputs of several seeds in evaluation and in training, and training after an evaluation."""
    inputs = adapter.draw(torch.Generator().manual_seed(23), 2, 6, 8)

    def run(*modes: tuple[int, bool]) -> list[Tensor]:
        """Return the output for each seed and mode, in order, of a new instance."""
        return run_sequence(adapter, [adapter.call(inputs, seed=n, training=mode) for n, mode in modes])

    first, again, *others = run((1, False), (1, False), (2, False), (3, False))
    if largest_difference(first, again):
        yield unchecked("its output depends on earlier calls")
        return
    if difference := max(largest_difference(first, other) for other in others):
        reason = "in evaluation its output depends on the random seed: dropout is left on."
        yield failed(reason, difference, 0.0)
        return
    if drops_outside_training(adapter, inputs):
        reason = "with training=False its output depends on the random seed."
        yield failed(reason, bug=BUGS["dropout-left-on"])
        return
    trained, other, *evaluated, again = run((1, True), (2, True), (1, False), (2, False), (1, True))
    if difference := largest_difference(*evaluated):
        yield failed("in evaluation after training, dropout stays on.", difference, 0.0)
        return
    if (difference := largest_difference(trained, again)) > adapter.allowed_error(inputs):
        reason = "training after an evaluation gives another output than before"
        bug = BUGS["dropout-lost"] if torch.equal(again, first) else None
        yield failed(f"{reason}{': dropout stays off' if bug else ''}.", difference, bug=bug)
        return
    is_random = largest_difference(trained, other) > 0
    if is_random and (bug := find_misplaced(adapter)) is not None:
        yield failed("the average output in training isn't the output in evaluation.", bug=bug)
        return
    if not bool(trained.isfinite().all()):
        yield failed("in training its output isn't finite.")
        return
    if not is_random and not torch.equal(trained, first):
        yield failed("in training its output is the same with every seed, and not that of evaluation.")
        return
    yield passed("evaluation isn't random" + ", nor is training" * (not is_random), 0.0, 0.0)
    rates = [name for name in adapter.init if names.constructor_value(name)[0] == "dropout"]
    if not is_random and any(adapter.init[name] for name in rates):
        reason = f"in training its output isn't random: {', '.join(rates)} of its constructor is unused."
        yield convention(reason, name="unused dropout")
    if "weights" in adapter.features:
        inputs = inputs.but(need_weights=True)
        kept, dropped = (adapter.run(inputs, seed=1, training=training).weights for training in (False, True))
        if kept is not None and dropped is not None and largest_difference(kept, dropped) > 1e-5:
            reason = "in training its weights are those after dropout, as in PyTorch."
            yield convention(reason, name="weights after dropout")


def drops_outside_training(adapter: Adapter, inputs: Inputs) -> bool:
    """Return True if a function with a rate of dropout and a flag `training` drops without the flag."""
    defaults = {arg.name: arg.default for arg in adapter.description.call}
    rate = adapter.arguments.get("dropout", "") if isinstance(adapter, AttentionAdapter) else ""
    if type(defaults.get(rate)) not in (int, float) or not isinstance(defaults.get("training"), bool):
        return False
    calls = [adapter.call(inputs, seed=seed) for seed in (1, 2)]
    calls = [replace(call, kwargs={**call.kwargs, rate: 0.5, "training": False}) for call in calls]
    return not torch.equal(*run_sequence(adapter, calls))


def find_misplaced(adapter: Adapter) -> Bug | None:
    """Return a bug that explains why the mean output in training isn't the output in evaluation, else None.

    Dropout leaves the mean unchanged where the rest is linear, so after the softmax. A mean that is neither
    that nor the mean of one of the bugs may have another cause, such as dropout of the projected queries.
    """
    if not isinstance(adapter, AttentionAdapter):
        return None
    single = adapter.draw(torch.Generator().manual_seed(30), 1, 4, 6)
    copies = {
        name: x.repeat(COPIES, *[1] * (x.dim() - 1)) for name, x in single.tensors().items() if name != "sink"
    }
    inputs = single.but(**copies)
    calls = [adapter.call(inputs, seed=seed, training=seed > 0) for seed in range(CALLS + 1)]
    try:
        answers = adapter.candidate.call_sequence(tuple(calls))
        evaluated, *outs = (adapter.read(answer.output, inputs).out.to(torch.float64) for answer in answers)
    except (CodeError, UnexpectedOutput):
        return None
    mean, error = mean_and_error([out.mean(0) for out in outs])
    is_finite = mean.isfinite() & error.isfinite()  # dropout of scores of -inf gives NaN
    if not bool((error[is_finite] > 0).any()):
        return None

    def is_mean(expected: Tensor, rounding: Tensor | float) -> bool:
        sigma = torch.hypot(error, torch.as_tensor(rounding)) + adapter.allowed_error(inputs)
        return bool(((mean - expected).abs() <= SIGMAS * sigma)[is_finite].all())

    if is_mean(evaluated[0], 0.0) and bool(is_finite.all()):
        return None
    known = [*adapter.init.values(), *adapter.description.attributes.values()]
    for rate in dict.fromkeys([x for x in known if type(x) is float and 0 < x < 1] + [*RATES]):
        drop = torch.nn.Dropout(rate)
        for name, step in (
            (
                "dropout-before-softmax",
                wrap(mask_scores=lambda o, mask, scores, drop=drop: mask(drop(scores))),
            ),
            ("dropout-unscaled", override(dropout=lambda o, weights, rate=rate: weights * (1 - rate))),
        ):
            oracle = compose(adapter.right, *adapter.convention, step)
            with seeded(0):
                drawn = [exact(adapter.weights, inputs, oracle).out.mean(0) for _ in range(CALLS)]
            if is_mean(*mean_and_error(drawn)):
                return BUGS[name]
    return None


def mean_and_error(draws: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean of some draws, and its standard error."""
    stacked = torch.stack(draws)
    return stacked.mean(0), stacked.std(0) / len(draws) ** 0.5
