"""The candidate called in this process and in its own: the same answers, limits, and invalid messages."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from manyheads.checker.isolation import process, protocol
from manyheads.checker.isolation.candidate import Answer, Call, Candidate, Change, Kept
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.isolation.process import CandidateProcess, open_candidate
from manyheads.checker.isolation.target import find
from manyheads.checker.isolation.trees import Foreign, with_strides
from manyheads.trees import DEPTH
from tests.waiting import HANG, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
own_process = pytest.mark.skipif(os.name != "posix", reason="needs inherited pipes")

CANDIDATES = '''
import collections, ctypes, dataclasses, os, signal, subprocess, sys, time, warnings
import numpy as np
import torch
from torch import nn
import neighbour

print("printed while importing")


class Head(nn.Module):
    """One head."""

    width = 3

    def __init__(self, size, causal=False, *, scale: float = 0.5, act=torch.relu):
        super().__init__()
        if size % 2:
            raise ValueError(f"size must be even,\\nnot {size}")
        self.q_proj = nn.Linear(size, size)
        self.register_buffer("steps", torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(2))
        self.size, self.causal, self._hidden = size, causal, 1
        self.scale = scale

    def forward(self, x, mask=None, *rest, need_weights: bool = False, **more):
        return self.q_proj(x) * self.scale

    class Inner(nn.Module):
        def forward(self, x):
            return x


class Many:
    """Returns its argument, or calls the method that it names: one process serves many tests."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, *others):
        if isinstance(x, str):
            return getattr(self, x)(*others)
        self.calls += 1
        return x

    def count(self):
        return self.calls

    def shout(self):
        print("é\\ud800" * 5000)
        os.write(1, b"straight to 1\\n" * 1000)
        os.write(2, b"straight to 2\\n" * 1000)
        subprocess.run(["echo", "from a child"])
        return 1

    def leave(self, how):
        if how == "exit":
            sys.exit("enough")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "generator":
            raise GeneratorExit
        return self.leave(how) + 1

    def objects(self):
        class Rude:
            def __repr__(self):
                raise RuntimeError("no")

        Pair = collections.namedtuple("Pair", "a b")
        Record = dataclasses.make_dataclass("Record", ["x"])
        return {
            "numpy": np.arange(4.0).reshape(2, 2).T,
            "scalar": np.float32(0.5),
            "strings": np.array(["a"]),
            "pair": Pair(torch.ones(1), None),
            "record": Record(1),
            "ordered": collections.OrderedDict(a=1),
            "rude": Rude(),
            "keys": {1: 2},
            "parameter": nn.Parameter(torch.ones(2)),
            "values": [True, -3, float("nan"), float("-inf"), "ü\\ud800", 2**70],
            "sparse": torch.eye(2).to_sparse(),
        }

    def loop(self):
        loop = []
        loop.append(loop)
        return loop

    def seed(self):
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        warnings.warn("two\\nlines")

    def state(self):
        return [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]

    def draw(self):
        return torch.rand(3)

    def in_place(self, x, more):
        more["y"][1].add_(1)
        return x.mul_(2)

    def layout(self, x):
        return [list(x.stride()), x.is_contiguous()]

    def one(self, x, y):
        return x is y

    def surroundings(self):
        here = os.getcwd()
        os.rmdir(here)
        return [here, sys.stdin.read(), neighbour.NAME, torch.cuda.is_available()]

    def allocate(self, count):
        return float(torch.ones(count).sum())

    def patched(self):
        def lie(*args, **kwargs):
            return True
        torch.equal = torch.allclose = torch.initial_seed = lie
        torch.get_default_dtype = lambda: torch.float32
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)

    def starts(self):
        """A process that leaves the group and one that is orphaned there."""
        stay = "import os, time; os.setsid(); time.sleep(1200)"
        first = subprocess.Popen([sys.executable, "-c", stay])
        code = (f"import os, subprocess, sys; os.setsid(); "
                f"null = subprocess.DEVNULL;"
                f"print(subprocess.Popen([sys.executable, '-c', {stay!r}], stdout=null, stderr=null).pid)")
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        child = os.fork()
        if child == 0:
            time.sleep(1200)
        return [first.pid, int(second.stdout), child]


def many():
    return Many()


def end(x):
    os._exit(0)


def fault(x):
    ctypes.string_at(0)


def endless(x):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1200)"])
    while True:
        pass


def hoard(x):
    kept = []
    while True:
        kept.append(torch.ones(2**20))


def huge(x):
    return torch.ones(2**40)


def close_all(x):
    os.closerange(3, 4096)
    return x


def forks(x):
    if os.fork() == 0:
        time.sleep(1200)
    os._exit(3)


def both(x):
    """Both processes come back from the call."""
    os.fork()
    return x


def flood(x):
    while True:
        os.write(1, b"x" * 2**16)


def forge(x):
    for descriptor in range(200, 260):
        try:
            os.write(descriptor, (2**60).to_bytes(8, "big"))
        except OSError:
            pass
    return x


def nothing():
    return 3


def fails():
    raise OSError("no such weights")


def defaults(q=None, k=None):
    return q @ k


def factory(size=4):
    return Head(size)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("candidates")
    (folder / "package" / "deep").mkdir(parents=True)
    for name, text in {
        "candidates": CANDIDATES,
        "neighbour": "NAME = 'next door'\n",
        "random": "def f(x):\n    return x\n",
        "syntax": "def f(x):\n    return (\n",
        "asks": "name = input('your name')\n",
        "lacks": "\nimport no_such_module\n",
        "quits": "import sys\nsys.exit(3)\n",
        "package/__init__": "",
        "package/deep/__init__": "",
        "package/base": "def double(x):\n    return 2 * x\n",
        "package/deep/mine": "from ..base import double\n",
    }.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Objects of the candidates' file in this process; sys.path and sys.modules as they were after."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield lambda name: find(f"{folder / 'candidates.py'}:{name}")
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def many(folder: Path) -> Iterator[CandidateProcess]:
    with CandidateProcess(f"{folder / 'candidates.py'}:many", timeout=HANG) as opened:
        yield opened


@pytest.fixture(params=["here", "there"])
def either(request: pytest.FixtureRequest) -> Candidate | CandidateProcess:
    """`Many` in this process and in its own."""
    if request.param == "here":
        return Candidate(request.getfixturevalue("here")("many"))
    if os.name != "posix":
        pytest.skip("needs inherited pipes")
    return request.getfixturevalue("many")


def ask(candidate: Candidate | CandidateProcess, method: str, *args: Any) -> Answer:
    return candidate.call(Call((method, *args), seed=12345))


# -- describing --------------------------------------------------------------------------------------


def check_head(candidate: Candidate | CandidateProcess) -> None:
    found = candidate.describe()
    assert (found.type, found.name, found.torch_module, found.parameters) == ("class", "Head", True, {})
    assert (found.doc, found.source.splitlines()[0]) == ("One head.", "class Head(nn.Module):")
    assert found.init is not None
    size, causal, scale, act = found.init
    assert (size.name, size.kind, size.required) == ("size", "positional", True)
    assert (causal.kind, causal.required, causal.default) == ("positional", False, False)
    assert (scale.kind, scale.default, scale.annotation) == ("keyword", 0.5, "float")
    assert "relu" in act.default
    kinds = {"x": "positional", "mask": "positional", "rest": "var_positional"}
    kinds |= {"need_weights": "keyword", "more": "var_keyword"}
    assert [(a.name, a.kind, a.required) for a in found.call] == [(n, k, n == "x") for n, k in kinds.items()]
    with pytest.raises(CandidateError, match=r"Call build\(\) first"):
        candidate.call(Call((torch.ones(4),)))
    expected = r"building Head raised ValueError: size must be even, \(candidates.py:\d+\)"
    with pytest.raises(CandidateError, match=expected) as raised:
        candidate.build({"size": 3})
    assert raised.value.kind == "init"
    assert "raise ValueError" in raised.value.details
    with pytest.raises(CandidateError, match="missing 1 required positional argument: 'size'"):
        candidate.build({})

    found = candidate.build({"size": 4, "causal": True})
    assert found.type == "class"
    assert found.parameters == {"q_proj.weight": (4, 4), "q_proj.bias": (4,), "unused": (2,)}
    assert found.buffers == {"steps": (1,)}
    assert found.layers == {"": "Head", "q_proj": "Linear"}
    assert found.attributes == {"size": 4, "causal": True, "scale": 0.5}

    # Weights go out and in, and what is computed is what float64 says.
    first = candidate.weights()
    candidate.build({"size": 4})
    assert all(torch.equal(value, first[name]) for name, value in candidate.weights().items())
    assert set(first) == set(found.parameters) | set(found.buffers)
    new = {"q_proj.weight": torch.randn(4, 4), "q_proj.bias": torch.randn(4)}
    candidate.load(new)
    assert torch.equal(candidate.weights()["q_proj.weight"], new["q_proj.weight"])
    x = torch.randn(2, 3, 4)
    given = torch.randn(2, 3, 4)
    answer = candidate.call(Call((x,), grads=("0",), cotangent=given))
    exact = x.double() @ new["q_proj.weight"].double().T + new["q_proj.bias"].double()
    torch.testing.assert_close(answer.output.double(), 0.5 * exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(answer.grads["0"], 0.5 * given @ new["q_proj.weight"])
    torch.testing.assert_close(answer.weight_grads["q_proj.bias"], 0.5 * given.sum((0, 1)))
    assert answer.weight_grads["unused"] is None
    assert answer.changed == ()

    # In another dtype for one call; exact values stay.
    answer = candidate.call(Call((x,), dtype=torch.float64))
    assert answer.output.dtype == torch.float64
    torch.testing.assert_close(answer.output, 0.5 * exact, rtol=1e-14, atol=1e-14)
    assert candidate.call(Call((x,), dtype=torch.bfloat16)).output.dtype == torch.bfloat16
    assert torch.equal(candidate.weights()["q_proj.weight"], new["q_proj.weight"])
    with pytest.raises(CandidateError, match=r"Mismatch in shape"):
        candidate.call(Call((x,), cotangent=torch.ones(1)))
    assert torch.equal(candidate.call(Call(kwargs={"x": x})).output, candidate.call(Call((x,))).output)


def test_a_class_in_this_process(here: Callable[[str], Any]) -> None:
    with Candidate(here("Head")) as candidate:
        check_head(candidate)


@own_process
def test_a_class_in_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # and named from there
    with CandidateProcess("candidates.py:Head") as candidate:
        check_head(candidate)


def test_pytorchs_own_function_and_layer_are_described() -> None:
    found = Candidate(nn.functional.scaled_dot_product_attention).describe()
    assert found.type == "function"
    defaults = {"value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    assert [(a.name, a.default) for a in found.call[2:6]] == list(defaults.items())
    assert [a.required for a in found.call[2:6]] == [True, False, False, False]
    found = Candidate(nn.MultiheadAttention(8, 2)).describe()
    assert (found.type, found.name) == ("module", "MultiheadAttention")
    assert found.init is None
    assert found.attributes["num_heads"] == 2


def test_factories(here: Callable[[str], Any]) -> None:
    assert Candidate(here("many")).describe().name == "Many"
    assert Candidate(here("factory")).describe().attributes["size"] == 4
    assert Candidate(here("defaults")).describe().type == "function"
    assert Candidate(lambda *args: args).describe().type == "function"
    with pytest.raises(CandidateError, match=r"Expected nothing\(\) to return a class, .*, got a int"):
        Candidate(here("nothing"))
    with pytest.raises(CandidateError, match=r"factory fails\(\) raised OSError: no such weights") as raised:
        Candidate(here("fails"))
    assert raised.value.kind == "import"
    with pytest.raises(CandidateError, match="got a dict"):
        Candidate({})
    with pytest.raises(CandidateError, match=r"no arguments for Head, .* got size"):
        Candidate(here("factory")).build({"size": 4})


@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        ("candidates", "Expected a target module:name or path/to/file.py:name, got 'candidates'"),
        ("{}/candidates.py:", "Expected a target module:name"),
        ("{}/candidats.py:Head", "Did you mean candidates.py"),
        ("{}/candidates.py:Haed", "Did you mean Head"),
        ("{}/candidates.py:Head.Iner", "Did you mean Inner"),
        ("no_such_package.x:f", "No module 'no_such_package' is found"),
        ("torch.nn:MultiHeadAttention", "Did you mean MultiheadAttention"),
        ("{}/syntax.py:f", r"SyntaxError: '\(' was never closed \(syntax.py:2\)"),
        ("{}/lacks.py:f", r"ModuleNotFoundError: No module named 'no_such_module' \(lacks.py:2\)"),
        ("{}/quits.py:f", r"SystemExit: 3 \(quits.py:2\)"),
    ],
)
def test_invalid_targets(here: Callable[[str], Any], folder: Path, target: str, pattern: str) -> None:
    with pytest.raises(CandidateError, match=pattern) as raised:
        find(target.format(folder))
    assert raised.value.kind == "import"
    assert str(raised.value).endswith((".", "?"))
    assert "\n" not in str(raised.value)


def test_targets(here: Callable[[str], Any], folder: Path) -> None:
    import random

    assert find(f"{folder}/candidates.py:Head.Inner").__name__ == "Inner"
    assert find(f"{folder}/package/deep/mine.py:double")(2) == 4
    assert find(f"{folder}/random.py:f")(1) == 1
    assert sys.modules["random"] is random
    assert find("torch.nn:MultiheadAttention") is nn.MultiheadAttention


@own_process
def test_an_import_that_reads_its_input_raises(folder: Path) -> None:
    with pytest.raises(CandidateError, match=r"EOFError: EOF when reading a line \(asks.py:1\)") as raised:
        CandidateProcess(f"{folder / 'asks.py'}:name")
    assert raised.value.kind == "import"


# -- calling -----------------------------------------------------------------------------------------


def test_outputs_come_back_as_trees(either: Candidate | CandidateProcess) -> None:
    output = ask(either, "objects").output
    assert torch.equal(output["numpy"], torch.tensor([[0.0, 2.0], [1.0, 3.0]], dtype=torch.float64))
    assert output["scalar"] == 0.5
    assert isinstance(output["strings"], Foreign)
    assert output["pair"] == (torch.ones(1), None)
    assert output["record"] == {"x": 1}
    assert output["ordered"] == {"a": 1}
    assert output["rude"] == Foreign("Rude", "a Rude whose repr raises RuntimeError")
    assert output["keys"] == Foreign("dict", "{1: 2}")
    assert type(output["parameter"]) is Tensor
    assert not output["parameter"].requires_grad
    true, three, nan, infinite, text, big = output["values"]
    assert (true, three, infinite, text) == (True, -3, -torch.inf, "ü\ud800")
    assert nan != nan
    assert big == Foreign("int", str(2**70))
    assert isinstance(output["sparse"], Foreign)
    deepest = ask(either, "loop").output
    for _ in range(32):
        [deepest] = deepest
    assert deepest == Foreign("list", "[[...]]")


def test_output_of_a_call_is_not_printed(
    either: Candidate | CandidateProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(either, "shout").output == 1
    assert capsys.readouterr().out == ""


def test_global_state_is_found_and_put_back(either: Candidate | CandidateProcess) -> None:
    before, drawn = ask(either, "state").output, ask(either, "draw").output
    answer = ask(either, "seed")
    names = ("the default dtype", "the number of threads", "deterministic algorithms")
    names += ("the precision of float32 products", "grad mode")
    assert answer.changed == tuple(Change("state", name) for name in names)
    others = {method: either.call(Call((method,), seed=1)).generators for method in ("seed", "draw")}
    assert others["seed"]["torch.manual_seed"] == answer.generators["torch.manual_seed"]
    assert not others["draw"].items() & ask(either, "draw").generators.items()
    assert ask(either, "state").output == before
    assert torch.equal(ask(either, "draw").output, drawn)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        assert torch.equal(drawn, torch.rand(3))


def test_calling_leaves_the_callers_random_numbers_alone(here: Callable[[str], Any]) -> None:
    state = torch.random.get_rng_state()
    candidate = Candidate(here("many"))
    ask(candidate, "seed")
    ask(candidate, "draw")
    Candidate(here("Head")).build({"size": 2})
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_seed_of_a_call_decides_what_it_draws(either: Candidate | CandidateProcess) -> None:
    first, second, again = (either.call(Call(("draw",), seed=seed)).output for seed in (1, 2, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_arguments_changed_in_place(either: Candidate | CandidateProcess) -> None:
    x, y = torch.randn(2, 3), torch.randn(4)
    kept = x.clone()
    more = {"y": [y, y[1:]]}
    answer = ask(either, "in_place", x, more)
    assert answer.changed == (Change("argument", "1"), Change("argument", "2.y.1"))
    assert torch.equal(answer.output, 2 * kept)
    assert torch.equal(x, kept)


def test_layouts_and_identity_reach_the_candidate(either: Candidate | CandidateProcess) -> None:
    x = torch.randn(2, 3, 4)
    for given in (x, x.transpose(0, 2), x[:, ::2], x[:, :1].expand(2, 5, 4), torch.tensor(1.0)):
        assert ask(either, "layout", given).output == [list(given.stride()), given.is_contiguous()]
        assert torch.equal(either.call(Call((given,))).output, given)
    assert either.call(Call((x[:, :0],))).output.shape == (2, 0, 4)
    assert ask(either, "one", x, x).output is True
    assert ask(either, "one", x, x.clone()).output is False


def test_instances_keep_their_state_between_calls(either: Candidate | CandidateProcess) -> None:
    before = ask(either, "count").output
    for _ in range(3):
        either.call(Call((torch.ones(1),)))
    assert ask(either, "count").output == before + 3


def test_a_sequence_keeps_objects_and_changes_until_its_end(either: Candidate | CandidateProcess) -> None:
    either.call_sequence(())
    before = ask(either, "count").output  # a sequence begins with the state before the first call
    x = torch.ones(2)
    made = Call(([x, x + 1],), function="builtins:list")
    calls = (
        made,
        Call((Kept(0),)),
        Call((Kept(1, "1"),)),
        Call(("count",)),
        Call((3.5,), function=".__call__"),
    )
    *_, item, count, last = (answer.output for answer in either.call_sequence(calls))
    assert torch.equal(item, x + 1)
    assert (count, last) == (before + 2, 3.5)
    assert ask(either, "count").output == before
    assert either.call(Call((Kept(-1),), before=(made,))).output[1].tolist() == [2, 2]
    with pytest.raises(CandidateError, match="no attribute 'nothing'"):
        either.call_sequence((Call((x,)), Call(("nothing",))))
    assert ask(either, "count").output == before


def test_functions_of_a_candidate(either: Candidate | CandidateProcess) -> None:
    functions = either.functions()
    assert [argument.name for argument in functions[".leave"]] == ["how"]
    assert functions["Head"][0].name == "size"
    assert ".__call__" not in functions


def test_errors_of_calls(either: Candidate | CandidateProcess) -> None:
    expected = r"calling Many raised SystemExit: enough \(candidates.py"
    with pytest.raises(CandidateError, match=expected) as raised:
        ask(either, "leave", "exit")
    assert raised.value.kind == "call"
    with pytest.raises(CandidateError, match="raised RecursionError") as raised:
        ask(either, "leave", "forever")
    assert raised.value.error == "builtins.RecursionError"
    assert "return self.leave(how) + 1" in raised.value.details
    with pytest.raises(CandidateError, match=r"AttributeError.*no attribute 'nothing'"):
        ask(either, "nothing")


@own_process
def test_an_interrupt_in_a_process_is_an_error_of_the_candidate(many: CandidateProcess) -> None:
    for how in ("interrupt", "generator"):
        with pytest.raises(CandidateError, match=r"raised (KeyboardInterrupt|GeneratorExit)") as raised:
            ask(many, "leave", how)
        assert raised.value.kind == "call"


def test_a_module_that_changes_itself() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("cache", None)
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            was = self.training
            with torch.no_grad():
                self.weight.mul_(2)
            self.seen = torch.zeros(3)
            self.cache = x
            self.eval()
            return x * self.weight.detach() + was

    module = Restless().train()
    weight, seen = module.weight, module.seen
    x = torch.randn(3, 2)
    answer = Candidate(module).call(Call((x,), training=True))
    assert answer.changed == (
        Change("state", "the training flag"),
        Change("parameter", "weight"),
        Change("buffer", "seen"),
        Change("buffer", "cache"),
    )
    assert torch.equal(answer.output, 2 * x + 1)
    assert torch.equal(Candidate(module).call(Call((x,))).output, 2 * x)
    assert module.weight is weight
    assert torch.equal(weight, torch.ones(2))
    assert module.seen is seen
    assert module.cache is None
    assert module.training
    assert module.norm.training
    assert weight.grad is None


def test_weights_keep_the_gradients_they_had() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.full((2, 2), 5.0)
    answer = Candidate(module).call(Call((torch.ones(1, 2),), cotangent=torch.ones(1, 2)))
    assert torch.equal(answer.weight_grads["weight"], torch.ones(2, 2))
    assert torch.equal(module.weight.grad, torch.full((2, 2), 5.0))
    assert module.bias.grad is None


@linux
def test_the_peak_of_a_call(many: CandidateProcess) -> None:
    count = 2**24  # floats: 64 MiB
    many.call(Call(("allocate", 1024), memory=True))
    peak = many.call(Call(("allocate", count), memory=True)).peak
    assert peak is not None
    assert 0.95 * 4 * count < peak < 1.25 * 4 * count
    assert many.call(Call(("allocate", count))).peak is None


@pytest.mark.full
@own_process
def test_compiled(folder: Path) -> None:
    x = torch.randn(2, 4)
    with CandidateProcess(f"{folder / 'candidates.py'}:factory") as candidate:
        eager = candidate.call(Call((x,))).output
        answer = candidate.call(Call((x,), compiled=True))
        torch.testing.assert_close(answer.output, eager)


# -- in a process ------------------------------------------------------------------------------------


@pytest.mark.full
@own_process
def test_surroundings(folder: Path) -> None:
    with open_candidate(f"{folder / 'candidates.py'}:many") as candidate:
        assert isinstance(candidate, CandidateProcess)
        where, read, name, gpu = ask(candidate, "surroundings").output
        assert read == ""
        assert name == "next door"
        assert gpu is False
        assert Path(where) != Path.cwd()
        # It removed its own folder and patched PyTorch; it still answers, and its changes are reported.
        assert ask(candidate, "patched").changed == (Change("state", "the default dtype"),)
        assert "printed while importing" in candidate._tail()
    assert not Path(where).parent.exists()
    candidate.close()
    with pytest.raises(CandidateError, match="is ended, and can't describe"):
        candidate.describe()
    assert isinstance(open_candidate(nn.Identity()), Candidate)


def ended(pid: int) -> bool:
    """Return True if a process is gone, or a zombie that init hasn't reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@linux
def test_ctrl_c_while_the_process_starts_leaves_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", interrupt)
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        CandidateProcess(f"{folder / 'candidates.py'}:many")
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_descendants_end_with_the_candidate(folder: Path) -> None:
    with CandidateProcess(f"{folder / 'candidates.py'}:many") as candidate:
        pids = ask(candidate, "starts").output
        assert all(map(psutil.pid_exists, pids))
    wait_until(lambda: all(map(ended, pids)))


@pytest.mark.full
@own_process
@pytest.mark.parametrize(
    ("name", "kind", "pattern"),
    [
        ("end", "crash", "exited with code 0 during call"),
        ("fault", "crash", "was ended by SIGSEGV"),
        ("endless", "timeout", "didn't end within 3 s"),
        ("flood", "timeout", "didn't end within 10 s"),
        ("hoard", "memory", "the limit is 1.07 GB"),
        ("huge", "memory", "can't allocate memory.*the limit is 1.07 GB"),
        ("close_all", "crash", "exited with code 1|closed its answer pipe"),
        ("forks", "crash", "exited with code 3"),
        ("forge", "protocol", "a header of 1152921504606846976 bytes"),
    ],
)
def test_hostile_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, pattern: str
) -> None:
    cut: list[Path] = []
    truncate = os.truncate
    monkeypatch.setattr(process, "OUTPUT_LIMIT", 2**20)
    monkeypatch.setattr(os, "truncate", lambda path, size: (cut.append(path), truncate(path, size)))
    limit = {"endless": 3, "flood": 10}.get(name, HANG)  # a flood needs time to reach the limit of its file
    with CandidateProcess(f"{folder / 'candidates.py'}:{name}", timeout=limit, memory=2**30) as candidate:
        root, folder = candidate._process.pid, candidate._output.parent
        with pytest.raises(CandidateError, match=pattern) as raised:
            candidate.call(Call((torch.ones(2),)))
        assert raised.value.kind == kind
        if name == "fault":
            assert "Segmentation fault" in raised.value.details
            assert "in fault" in raised.value.details
        if name == "flood":
            assert cut
            assert len(raised.value.details) <= 4000
        if name == "huge":  # refused, and nothing is broken
            assert candidate.weights() == {}
            return
        assert not process.process_tree(root)
        assert not folder.exists()
        with pytest.raises(CandidateError, match="is ended"):
            candidate.weights()


@pytest.mark.full
@linux
def test_a_call_that_forks_is_answered_once(folder: Path) -> None:
    x = torch.randn(3)
    with CandidateProcess(f"{folder / 'candidates.py'}:both") as candidate:
        for _ in range(2):
            assert torch.equal(candidate.call(Call((x,))).output, x)


SPAWNS = """
import subprocess, sys, time
from torch import nn


class Spawns(nn.Module):
    def __init__(self, dim=24, num_heads=4):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        code = "import os, time; os.setsid(); time.sleep(1200)"
        child = subprocess.Popen([sys.executable, "-c", code])
        with open(PIDS, "a") as file:
            print(child.pid, file=file)
        time.sleep(1200)
"""
COMMAND = "from manyheads.cli import main; main()"
SCRIPT = """
import signal, sys
from manyheads import checker
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
checker.check(sys.argv[2], "self")
"""


@pytest.mark.every(2)
@linux
@pytest.mark.parametrize(("code", "rc"), [(COMMAND, 143), (SCRIPT, 7)])
def test_a_terminated_checker_leaves_nothing(tmp_path: Path, code: str, rc: int) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "spawns.py").write_text(f"PIDS = {str(pids)!r}\n{SPAWNS}")
    command = [sys.executable, "-c", code, "check", f"{tmp_path / 'spawns.py'}:Spawns"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}) as checker:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        child = int(pids.read_text())
        parent = psutil.Process(child).ppid()
        assert list(temporary.glob("manyheads-*"))
        checker.send_signal(signal.SIGTERM)
    assert checker.returncode == rc
    wait_until(lambda: ended(child) and ended(parent))
    assert not list(temporary.glob("manyheads-*"))


@linux
def test_an_idle_candidate_ends_with_the_checker(folder: Path) -> None:
    code = (
        "import sys, torch; from manyheads.checker.isolation.process import CandidateProcess;"
        "from manyheads.checker.isolation.candidate import Call;"
        "p = CandidateProcess(sys.argv[1]); print(p.call(Call(('starts',))).output, flush=True);"
        "print(p._output.parent, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, f"{folder / 'candidates.py'}:many"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as checker:
        assert checker.stdout is not None
        pids, where = json.loads(checker.stdout.readline()), checker.stdout.readline().strip()
        checker.send_signal(signal.SIGTERM)
    wait_until(lambda: all(map(ended, pids)))
    wait_until(lambda: not Path(where).exists())


@own_process
def test_the_exception_of_a_signal_handler_passes_through() -> None:
    class Alarm(Exception):
        pass

    class Handler:
        def __call__(self, number: int, frame: Any) -> None:
            raise Alarm

    def exit_on(number: int, frame: Any) -> None:
        sys.exit(number)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        for handler, error in ((Handler(), Alarm), (exit_on, SystemExit), (Handler().__call__, Alarm)):
            signal.signal(signal.SIGUSR1, handler)
            candidate = Candidate(lambda x: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(error):
                candidate.call(Call((torch.ones(1),)))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.full
@linux
def test_the_candidate_ends_with_the_checker(folder: Path) -> None:
    code = (
        "import sys, torch; from manyheads.checker.isolation.process import CandidateProcess;"
        "from manyheads.checker.isolation.candidate import Call;"
        "p = CandidateProcess(sys.argv[1]);"
        "print(p._process.pid, p._output.parent, flush=True); p.call(Call((torch.ones(1),)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{folder / 'candidates.py'}:endless"], stdout=subprocess.PIPE, text=True
    ) as checker:
        assert checker.stdout is not None
        first, where = checker.stdout.readline().split()
        pid = int(first)
        wait_until(lambda: len(process.process_tree(pid)) > 1)  # its own child is there
        family = [member.pid for member in process.process_tree(pid)]
        checker.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(ended, family)))
    assert not Path(where).exists()


# -- messages ----------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    data = bytearray()

    def send(chunk: memoryview) -> int:
        data.extend(chunk[:1000])  # a pipe may take only some of the bytes
        return min(len(chunk), 1000)

    protocol.write(send, value)
    return bytes(data)


def taken(data: bytes, limit: int = 2**20) -> Any:
    rest = bytearray(data)

    def receive(count: int) -> bytes:
        if not rest:
            raise EOFError
        chunk = bytes(rest[: min(count, 1000)])
        del rest[: len(chunk)]
        return chunk

    value = protocol.read(receive, limit)
    assert not rest
    return value


@pytest.mark.parametrize("dtype", protocol.NAMES)
def test_every_dtype_survives_packing(dtype: torch.dtype) -> None:
    values = torch.randn(3, 4, 2, dtype=torch.float64) * 100
    whole = values.to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    for x in (whole, whole.mT, whole[..., :0], whole[0, 0, 0]):
        [back] = taken(packed([x]))
        assert back.dtype == dtype
        assert back.stride() == x.stride() or not x.numel()
        assert torch.equal(back, x)
    if dtype.is_complex:
        assert torch.equal(taken(packed(whole.conj())), whole.conj())


def test_values_survive_packing() -> None:
    call = Call(
        (1, (2.5, [None, True]), {"a": "é\ud800", "tuple": ()}), {"x": float("-inf")}, dtype=torch.float16
    )
    assert taken(packed(call)) == call
    assert taken(packed((dataclasses.replace(call, dtype=None), Foreign("a", "b"))))[1] == Foreign("a", "b")
    x = torch.ones(2)
    first, second = taken(packed([x, x]))
    assert first is second
    with pytest.raises(TypeError, match="Expected a tensor or a plain value to pack, got a object"):
        packed([object()])
    with pytest.raises(TypeError, match="got a dict"):
        packed({1: 2})


def message(tree: Any, tensors: Any = (), data: bytes = b"") -> bytes:
    header = json.dumps({"tree": tree, "tensors": tensors}).encode()
    return len(header).to_bytes(8, "big") + header + data


def described(dtype: Any = "float32", shape: Any = (2,), stride: Any = None) -> list[Any]:
    return [{"dtype": dtype, "shape": shape, "stride": stride}]


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        (b"\x00\x00\x01" + bytes(5), "a header of 1099511627776 bytes"),
        ((3).to_bytes(8, "big") + b"{,}", "isn't JSON"),
        ((3).to_bytes(8, "big") + b"\xff\xff\xff", "isn't JSON"),
        ((3).to_bytes(8, "big") + b"NaN", "got NaN"),
        ((200000).to_bytes(8, "big") + b"[" * 200000, "RecursionError"),
        ((2).to_bytes(8, "big") + b"[]", "without a tree"),
        (message({"tensor": 0}, described(shape=(2**20,))), "a message of 4194304 bytes"),
        (message({"tensor": 0}, described(shape=(2**39, 2**39))), "a tensor of shape"),
        (message({"tensor": 0}, described(shape=(0, 2**39, 2**39))), "a tensor of shape"),
        (message({"tensor": 0}, described(shape=(-1,))), "a tensor of shape"),
        (message({"tensor": 0}, described(shape=(True,))), "a bool instead of a int"),
        (message({"tensor": 0}, described(shape=(1,) * 65)), "a tensor of shape"),
        (message({"tensor": 0}, described(shape=(2,), stride=(2**38,))), "a message of"),
        (message({"tensor": 0}, described(shape=(2,), stride=(1, 1))), "a tensor of shape"),
        (message({"tensor": 0}, described(dtype="qint8")), "a tensor described as"),
        (message({"tensor": 0}, [{}]), "a tensor described as"),
        (message({"tensor": 1}, described(), bytes(8)), "a node"),
        (message({"tensor": "0"}, described(), bytes(8)), "a str instead of a int"),
        (message({"float": "1"}), "a node"),
        (message({"code": "x"}), "a node"),
        (message({"tuple": 1}), "a int instead of a list"),
        (message({"tuple": [], "dict": {}}), "a node"),
        (message({"record": ["CandidateError", {}]}), "a node"),
        (message({"record": ["Foreign", {"type": "a"}]}), "a record Foreign of"),
        (message({"record": ["Foreign", {"type": "a", "text": 3}]}), "whose text is a int"),
        (message([[]] * 2, described(), bytes(7)), "EOF"),
    ],
)
def test_invalid_messages(data: bytes, pattern: str) -> None:
    if pattern == "EOF":
        with pytest.raises(EOFError):
            taken(data)
        return
    with pytest.raises(CandidateError, match=pattern) as raised:
        taken(data)
    assert raised.value.kind == "protocol"


def test_a_tree_that_nests_too_deep() -> None:
    tree: Any = 1
    for _ in range(DEPTH - 1):
        tree = [tree]
    taken(message(tree))
    with pytest.raises(CandidateError, match="nested too deeply"):
        taken(message([tree]))


def test_other_bytes_of_a_boolean_are_true() -> None:
    back = taken(message({"tensor": 0}, described("bool", (3,)), b"\x00\x02\xff"))
    assert torch.equal(back, torch.tensor([False, True, True]))
    assert int(back.sum()) == 2


def test_records_have_the_types_of_their_fields() -> None:
    answer = Answer(None, {"0": None}, {}, (Change("state", "x"),), {"torch.manual_seed": 1}, None)
    assert taken(packed(answer)) == answer
    for wrong in ({"grads": {"0": 1}}, {"changed": ["x"]}, {"peak": 0.5}, {"peak": True}, {"changed": (1,)}):
        with pytest.raises(CandidateError, match=f"a record Answer whose {next(iter(wrong))} is"):
            taken(packed(dataclasses.replace(answer, **wrong)))


def test_with_strides_keeps_values_and_strides() -> None:
    x = torch.randn(3, 4, 5)
    for given in (x, x.permute(2, 0, 1), x[::2, 1:3], x[:1].expand(7, 4, 5), x[0, 0, 0]):
        copied = with_strides(given, given.stride())
        assert torch.equal(copied, given)
        assert copied.stride() == given.stride() or 1 in given.shape
        assert copied.data_ptr() != given.data_ptr()


@pytest.mark.full
@own_process
def test_checks_work_beside_many_open_files(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2,048 open files, and the limit is {hard}")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        for _ in range(1024):  # descriptors from 1,024 on don't fit into the sets of `select.select`
            stack.callback(os.close, os.dup(1))
        candidate = stack.enter_context(CandidateProcess(f"{folder / 'candidates.py'}:factory"))
        assert candidate.describe().name == "Head"


class Growing(nn.Module):
    """Adds a table of positions, which is lengthened when it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(4)

    def grow(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(float(length)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.grow(len(x))
        return x + self.table[: len(x)]


def test_a_table_that_a_call_lengthens_is_restored_with_its_length() -> None:
    with Candidate(Growing) as candidate, torch.no_grad():
        candidate.build({})
        for dtype in (None, torch.float16, None):
            x = torch.zeros(9)
            assert torch.equal(candidate.call(Call((x,), dtype=dtype)).output.float(), torch.arange(9.0))
        assert candidate.weights()["table"].shape == (4,)
        assert candidate.instance.length == 4


def test_buffers_may_keep_their_dtype() -> None:
    class Dtypes(Growing):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x, self.table]

    with Candidate(Dtypes) as candidate, torch.no_grad():
        candidate.build({})
        for buffers, expected in ((None, torch.float16), (torch.float32, torch.float32)):
            call = Call((torch.zeros(2),), dtype=torch.float16, buffers=buffers)
            assert [x.dtype for x in candidate.call(call).output] == [torch.float16, expected]
