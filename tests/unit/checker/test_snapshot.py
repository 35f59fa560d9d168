"""A check leaves the object under check, and the process, exactly as they were."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from manyheads import checker
from manyheads.checker.isolation.candidate import Call
from manyheads.checker.isolation.process import open_candidate
from manyheads.checker.isolation.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("one_thread", "quick")

WIDTH, HEADS = 24, 4


class Attention(nn.Module):
    """Self-attention with a key/value cache, buffers and counters that every call changes."""

    record: list[int] = []  # noqa: RUF012 (shared by all instances, on purpose)
    calls_of_all = 0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("longest", torch.zeros(1), persistent=False)
        self.register_buffer("late", None)
        self.cache_k = torch.zeros(1, 4, WIDTH)  # a plain attribute
        self.history: list[Tensor] = [torch.ones(3)]
        self.by_length: dict[int, Tensor] = {2: torch.ones(2, 2)}
        self.recent: deque[int] = deque([1, 2], maxlen=3)
        self.kinds = {"a"}
        self.counts = np.zeros(3)
        self.generator = torch.Generator().manual_seed(4)
        self.lock = threading.Lock()  # so that it can't be copied
        self.calls = 0
        self.before_call: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        type(self).calls_of_all += 1
        self.record.append(self.calls)
        self.before_call()
        b, t, _ = x.shape
        q, k, v = (
            f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)).to(self.mean))
            self.longest = torch.full((t,), float(t))
            self.late = x.detach()
            self.register_buffer(f"of_{t}", torch.zeros(t))
            self.cache_k[0, 0] = float(t)
            self.by_length[t] = x.detach()
            self.by_length[2].add_(1)
            self.history[0].mul_(2)
        self.history.append(x.detach())
        self.recent.append(t)
        self.kinds.add(str(t))
        self.counts += 1
        torch.rand(1, generator=self.generator)
        random.random()
        np.random.rand()  # noqa: NPY002
        weights = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return self.out_proj((self.drop(weights) @ v).transpose(1, 2).flatten(2))


def everything(part: Any, path: str = "", seen: dict[int, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Each part's path with its identity and content, independently of how a snapshot reads them."""
    seen = {} if seen is None else seen
    if id(part) in seen:
        yield path, ("the same as", seen[id(part)])
        return
    if isinstance(part, Tensor):
        seen[id(part)] = path
        storage = part.untyped_storage()
        yield path, (id(part), type(part), part.dtype, part.shape, part.stride(), part.storage_offset())
        yield f"{path}.storage", (storage._cdata, bytes(storage.tolist()))
        yield f"{path}.flags", (part.requires_grad, part.is_leaf, id(part.grad_fn))
        if part.is_leaf:
            yield from everything(part.grad, f"{path}.grad", seen)
        yield from everything(part._backward_hooks, f"{path}.hooks", seen)
        for name, value in vars(part).items():
            yield from everything(value, f"{path}.{name}", seen)
    elif isinstance(part, dict):
        seen[id(part)] = path
        yield path, (id(part), type(part), list(part))
        for key, value in part.items():
            yield from everything(value, f"{path}[{key!r}]", seen)
    elif isinstance(part, list | tuple | deque):
        seen[id(part)] = path
        yield path, (type(part), len(part))
        for n, value in enumerate(part):
            yield from everything(value, f"{path}[{n}]", seen)
    elif isinstance(part, nn.Module):
        seen[id(part)] = path
        yield path, (id(part), type(part))
        yield from everything(vars(part), path, seen)
    elif isinstance(part, np.ndarray):
        yield path, (id(part), part.tolist())
    elif isinstance(part, torch.Generator):
        yield path, (id(part), part.get_state().tolist())
    elif isinstance(part, set):
        yield path, (id(part), sorted(part))
    elif isinstance(part, int | float | str | None):
        yield path, part
    else:
        yield path, id(part)


def process_state() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()],  # noqa: NPY002
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    ]


def trained(module: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    """Train the module a little; gradients and Adam's moments are there afterwards."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(steps):
        train_step(module, optimizer)
    return optimizer


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.randn(2, 5, WIDTH)).square().mean().backward()
    optimizer.step()


def prepared() -> Attention:
    """A trained module with hooks, tied and frozen weights, and submodules of different modes."""
    torch.manual_seed(0)
    module = Attention(dropout=0.1)
    module.k_proj.bias.requires_grad_(False)
    trained(module)
    module.v_proj.bias.grad = None
    module.tied = nn.Module()
    module.tied.weight = module.q_proj.weight  # one parameter of two names
    module.rows = module.q_proj.weight.detach()[:3]  # a view of its storage
    module.q_proj.weight.register_hook(lambda grad: grad)
    module.q_proj.weight.note = {"decay": 0.1}  # type: ignore[attr-defined]
    module.register_forward_pre_hook(lambda *_: None)
    module.out_proj.register_full_backward_hook(lambda *_: None)
    module.train()
    module.v_proj.eval()
    return module


def test_a_trained_module_is_as_it_was() -> None:
    module = prepared()
    parts, state = dict(everything(module)), process_state()
    shared = list(Attention.record), Attention.calls_of_all
    found = checker.check(module, "self")
    assert any(check.name == "values" and check.status == "passed" for check in found.checks), found
    assert dict(everything(module)) == parts
    assert process_state() == state
    assert (Attention.record, Attention.calls_of_all) == shared
    state_check = next(check for check in found.checks if check.name == "state")
    assert "it changes the buffer" in state_check.reason  # which no output depends on
    checker.assert_attention(module, "self")
    assert dict(everything(module)) == parts
    assert process_state() == state


@pytest.mark.full
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_check_inside_a_mode_of_the_caller(mode: Callable[[], Any]) -> None:
    module = prepared()
    parts = dict(everything(module))
    with mode():
        found = checker.check(module, "self")
        assert not torch.is_grad_enabled()
    assert any(check.name == "gradients" and check.status == "passed" for check in found.checks), found
    assert dict(everything(module)) == parts


@pytest.mark.full
def test_training_goes_on_as_without_a_check() -> None:
    after = []
    for check in (False, True):
        torch.manual_seed(1)
        module = Attention(dropout=0.1)
        optimizer = trained(module)
        if check:
            checker.check(module, "self")
        for _ in range(3):
            train_step(module, optimizer)
        after.append([*module.state_dict().values(), *(p.grad for p in module.parameters())])
    for without, with_check in zip(*after, strict=True):
        assert torch.equal(without, with_check)


class Stop(Exception):
    pass


CALLS: list[None] = []  # a global, because a check restores what the module counts


@pytest.mark.every(10)
@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, Stop, SystemExit, MemoryError])
@pytest.mark.parametrize("call", [1, 2, 10, 40])
def test_a_check_that_is_interrupted_restores_too(error: type[BaseException], call: int) -> None:
    module = prepared()
    CALLS.clear()

    def interrupt() -> None:
        CALLS.append(None)
        module.before_call = interrupt
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_autocast_enabled("cpu", True)
        torch.manual_seed(5)
        module.double()
        module.k_proj.requires_grad_(False)
        module.register_forward_hook(lambda *_: None)
        del module.cache_k
        if len(CALLS) >= call:
            raise error
        module.float()
        module.cache_k = torch.zeros(1, 4, WIDTH)
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)

    module.before_call = interrupt
    parts, state = dict(everything(module)), process_state()
    if issubclass(error, Exception | SystemExit):
        with contextlib.suppress(checker.Unclear):
            checker.check(module, "self")
    else:
        with pytest.raises(error):
            checker.check(module, "self")
    assert dict(everything(module)) == parts
    assert process_state() == state


def test_an_interrupt_while_restoring_waits() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    snapshot = Snapshot(module)
    with torch.no_grad():
        module.weight.zero_()

    class Interrupting(dict):  # type: ignore[type-arg]
        """Its finalizer, which runs while a part is restored, sends the signal of Ctrl-C."""

        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    module.added = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        snapshot.restore()
    assert torch.equal(module.weight, before)
    assert not hasattr(module, "added")


def test_a_snapshot_restores_once() -> None:
    module = nn.Linear(2, 2)
    with open_candidate(module) as candidate:
        candidate.load({"weight": torch.zeros(2, 2)})
    kept = module.weight.detach().clone()
    assert kept.any()
    with torch.no_grad():
        module.weight.add_(1)
    candidate.close()
    assert torch.equal(module.weight, kept + 1)


class Plain:
    """An object that is no module: tensors, counters and slots."""

    __slots__ = ("__dict__", "cache", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.cache = torch.zeros(3)
        self.inner = OrderedDict(a=torch.ones(2))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        self.cache.add_(1)
        self.inner["a"].add_(1)
        self.inner["b"] = q
        self.inner.move_to_end("a")
        self.late = k
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v

    def method(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self(q, k, v)


def closure() -> tuple[Callable[..., Tensor], Callable[[], list[Any]]]:
    calls, kept, total = 0, [torch.ones(2)], torch.zeros(1)

    def attention(q: Tensor, k: Tensor, v: Tensor, default: list[int] = [0]) -> Tensor:  # noqa: B006
        nonlocal calls
        calls += 1
        default[0] += 1
        attention.calls = calls  # type: ignore[attr-defined]
        kept.append(q)
        total.add_(1)
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v

    def state() -> list[Any]:
        return [calls, len(kept), float(total), vars(attention), attention.__defaults__]

    return attention, state


def test_objects_and_functions_with_state() -> None:
    for make in (lambda x: x, lambda x: x.method, lambda x: functools.partial(x.method)):
        thing = Plain()
        before = repr((thing.calls, thing.cache, vars(thing)))
        checker.check(make(thing), "attention")
        assert repr((thing.calls, thing.cache, vars(thing))) == before
    attention, state = closure()
    before = repr(state())
    checker.check(attention, "attention")
    assert repr(state()) == before


@pytest.mark.full
def test_a_function_around_a_module() -> None:
    module = prepared()
    parts = dict(everything(module))
    checker.check(lambda: module, "self")  # a factory that returns it
    assert dict(everything(module)) == parts
    with open_candidate(functools.partial(lambda layer, x: layer(x), module)) as candidate:
        candidate.call(Call((torch.randn(2, 5, WIDTH),)))
        assert dict(everything(module)) != parts
    assert dict(everything(module)) == parts


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.data.resize_(5, 5),
        lambda m: setattr(m.weight, "data", torch.zeros(3)),
        lambda m: m.weight.untyped_storage().resize_(0),
        lambda m: m.weight.requires_grad_(False),
        lambda m: setattr(m.weight, "grad", torch.ones_like(m.weight)),
        lambda m: m.weight.grad.zero_() if m.weight.grad is not None else m.bias.grad.zero_(),
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: m.half().float(),
        lambda m: m.requires_grad_(False),
        lambda m: m.zero_grad(),
        lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda m: m.register_buffer("more", torch.zeros(1)),
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
        lambda m: m.weight.register_hook(lambda grad: grad),
        lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda m: parametrizations.weight_norm(m),
        lambda m: parametrizations.spectral_norm(m),
        lambda m: m.train(not m.training),
        lambda m: setattr(m, "__class__", nn.Identity),
        lambda m: m.weight.__dict__.update(note=1),
        lambda m: m.cache.copy_(m.weight * 2),  # a leaf becomes part of a graph
        lambda m: m.row.add_(m.weight[0]),  # a view that becomes part of a graph, with its base
        lambda m: m.sparse.mul_(2),
        lambda m: m.graph.detach_(),
    ],
)
def test_every_kind_of_change_is_undone(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module: Any = nn.Linear(2, 2)
    module.cache = torch.zeros(2, 2)
    module.sparse = torch.eye(2).to_sparse()
    module(torch.ones(1, 2)).sum().backward()
    module.graph = torch.ones(2)
    module.rows = torch.zeros(2, 2)
    module.row = module.rows[0]
    module.row.note = "first"
    dense = module.sparse.to_dense()
    sparse = vars(module).pop("sparse")  # no storage to compare
    parts = dict(everything(module))
    module.sparse = sparse
    snapshot = Snapshot(module)
    change(module)
    snapshot.restore()
    assert module.sparse is sparse
    assert torch.equal(module.sparse.to_dense(), dense)
    del module.sparse
    assert dict(everything(module)) == parts
    module.sparse = sparse
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.full
def test_lazy_and_parametrized_parts() -> None:
    lazy = nn.LazyLinear(3)
    snapshot = Snapshot(lazy)
    lazy(torch.ones(2, 4))
    assert type(lazy) is nn.Linear
    snapshot.restore()
    assert type(lazy) is nn.LazyLinear
    assert lazy.has_uninitialized_params()
    assert lazy(torch.ones(2, 5)).shape == (2, 3)  # as if it had never been called

    for normed in (parametrizations.weight_norm, parametrizations.spectral_norm):
        torch.manual_seed(0)
        module = prepared()
        normed(module.q_proj)
        module.q_proj.train()
        parts = dict(everything(module))
        with contextlib.suppress(checker.Unclear):  # its weights are found under no name
            checker.check(module, "self")
        assert dict(everything(module)) == parts


def test_a_scripted_module() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(-2, -1) / 24**0.5
            return scores.softmax(-1) @ self.v(x)

    with pytest.warns(DeprecationWarning, match="script"):
        module = torch.jit.script(Head())
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with open_candidate(module) as candidate:
        candidate.load({name: torch.zeros_like(x) for name, x in before.items()})
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name])
    assert module.training
