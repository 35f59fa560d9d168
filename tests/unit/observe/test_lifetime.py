"""`observe` during and after its block: names, hooks, modes, compiled models, threads and bad input."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import manyheads as mh
from manyheads import observe
from manyheads.observe import NoSuchLayer, Recording, intercept
from tests.observed import (
    GPT,
    KERNEL,
    KEYS,
    PADDING,
    Block,
    Call,
    CausalAttention,
    E,
    Function,
    H,
    K,
    Q,
    V,
    assert_gpt_weights,
    assert_identical,
    assert_weights,
    encoder,
    hooks,
    inputs_of,
    nested,
    nothing_left,  # noqa: F401
    raises,
    randn,
    record,
    stance,
)
from tests.waiting import HANG

pytestmark = pytest.mark.usefixtures("one_thread")


# -- what isn't recorded ----------------------------------------------------------------------------


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class HandMadeAttention(ByHand):
    pass


class Half(nn.Module):
    """A call of PyTorch's attention, attention written out by hand, and a softmax that isn't attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.written, self.router = Call(), ByHand(), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self.fused(x, x, x)) + self.router(x[:, 0])[:, None]


def test_attention_written_out_by_hand_is_named() -> None:
    model, x = Half(), randn(2, 4, 6, 8)
    with (
        pytest.warns(UserWarning, match=r"isn't recorded: written \[2, 4, 6, 6\]\."),
        mh.observe(model) as recording,
    ):
        model(x)
    assert (list(recording), recording.missed) == (["fused"], {"written": (2, 4, 6, 6)})
    assert "written: not recorded, a softmax of [2, 4, 6, 6]" in repr(recording)


# -- the recording as a mapping --------------------------------------------------------------------


def test_a_recording_is_a_mapping_in_order_of_first_call():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(self.first(x)) if x.shape[1] > 3 else self.second(x))

    model = Backwards()
    with observe(model) as recording:
        model(randn(1, 3, E))
        model(randn(1, 4, E))
    assert list(recording) == list(recording.keys()) == ["second.attn", "first.attn"]
    assert [call.shape[3] for call in recording.calls("first.attn")] == [3, 4, 4]
    last = recording.calls("first.attn")[-1]
    assert all(recording[name] is last for name in ("first.attn", "first", 1, -1))
    assert [amap for _, amap in recording.items()] == [recording[0], recording[1]]
    assert recording["sec"] is recording[0] is recording.get("second.attn")
    assert "first.attn" in recording
    assert "third" not in recording
    assert recording.get("third") is None
    text = repr(recording)
    assert text.index("second.attn") < text.index("first.attn")
    assert "[1, 4, 4, 4]" in text
    assert "the last of 3 calls; all: .calls(1)" in text
    with raises(TypeError, "got a tuple. For one of its calls, use recording.calls('first.attn')[0]."):
        recording["first.attn", 0]


def test_a_layer_is_found_by_a_unique_part_of_its_path():
    model = GPT(layers=11)
    recording = record(model, randn(1, 3, E))
    assert recording["layers.1"] is recording["layers.1.attn"]  # whole parts before letters: not layers.10
    assert recording["10"] is recording[10] is recording["layers.10.attn"]
    with raises(NoSuchLayer, "'attn' matches 11 of the recorded layers: layers.0.attn, … , …. Give more"):
        recording["attn"]
    with raises(NoSuchLayer, "No layer 'layer.3.attn' was recorded. Choose a similar one: … layers.3.attn"):
        recording["layer.3.attn"]
    with raises(NoSuchLayer, "There is no layer 11: 11 layers were recorded"):
        recording[11]
    with raises(NoSuchLayer, "There is no layer -12: 11 layers were recorded"):
        recording.calls(-12)
    for wrong, kind in ((1.5, "float"), (True, "bool"), (None, "NoneType")):
        with raises(TypeError, f"Expected a layer's path or number, got a {kind}"):
            recording[wrong]


def test_one_module_in_two_places_or_called_twice():
    attn = CausalAttention()
    model = nn.ModuleDict({"one": attn, "two": attn})
    model.forward = lambda x: model["two"](model["one"](x))  # type: ignore[method-assign]
    x = randn(2, 5, E)
    recording = record(model, x)
    assert list(recording) == ["one"]
    assert len(recording.calls("one")) == 2
    for call, given_ in zip(recording.calls("one"), (x, attn(x)), strict=True):
        assert_weights(call, *attn.heads(given_)[:2], causal=True)


def test_two_calls_within_one_module():
    x, y = randn(Q), randn(K)
    twice = Function(lambda x, y: KERNEL(KERNEL(x, x, x), y, y))
    own, cross = record(twice, x, y).calls("")
    assert_weights(own, x, x)
    assert_weights(cross, KERNEL(x, x, x), y)


def test_the_observed_module_may_be_the_attention_or_a_part_of_a_model():
    model, x = GPT(), randn(2, 5, E)
    assert list(record(model.layers[0].attn, x)) == [""]
    with observe(model.layers[1]) as recording:
        model(x)
    assert list(recording) == ["attn"]
    assert len(recording.calls(0)) == 1
    assert_weights(
        recording[0], *model.layers[1].attn.heads(inputs_of(model, KEYS, x)[KEYS[1]])[:2], causal=True
    )


def test_maps_have_the_provenance_of_their_layer():
    recording = record(GPT(), randn(2, 5, E))
    assert recording.provenance == {"model": "GPT"}
    assert [amap.provenance for amap in recording.values()] == [
        {"model": "GPT", "layer": name} for name in KEYS
    ]


def test_attention_outside_the_model_is_not_recorded():
    model, q, x = GPT(), randn(Q), randn(2, 5, E)
    with observe(model) as recording:
        F.scaled_dot_product_attention(q, q, q)
        mh.attention(q, q, q)
        GPT()(mh.MultiHeadAttention(E, H)(x))
        assert len(recording) == 0
        assert "nothing recorded yet" in repr(recording)
        model(x)
    assert list(recording) == KEYS


def test_forward_called_directly():
    model, x = GPT(), randn(2, 5, E)
    with observe(model) as recording:
        assert_identical(model.forward(x), model(x))
    assert [len(recording.calls(name)) for name in KEYS] == [2, 2]
    with raises(ValueError, "The model wasn't called inside observe"), observe(model.layers[0].attn):
        model.layers[0].attn.c_attn.forward(x)


def test_a_module_that_calls_itself():
    class Again(CausalAttention):
        def forward(self, x: Tensor, times: int = 3) -> Tensor:
            return super().forward(x if times == 1 else self(x, times - 1))

    assert len(record(Again(), randn(2, 5, E)).calls("")) == 3


# -- nothing is left behind ------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_exception_within_forward(error: type[BaseException]):
    model, x = GPT(), randn(2, 5, E)
    before = hooks(model)

    def stop() -> None:
        raise error

    model.layers[1].attn.midway = stop
    with pytest.raises(error), observe(model) as recording:
        model(x)
    assert hooks(model) == before
    assert list(recording) == KEYS[:1]
    with observe(model) as recording:  # again, and caught within
        with pytest.raises(error):
            model(x)
        model.layers[1].attn.midway = lambda: None
        model(x)
    assert [len(recording.calls(name)) for name in recording] == [2, 1]
    assert hooks(model) == before
    assert_gpt_weights(record(model, x), model, x)


def test_an_exception_within_the_block():
    model = GPT()
    before = hooks(model)
    with pytest.raises(Stop), observe(model):
        raise Stop
    with pytest.raises(Stop), observe(model):
        raise Stop(model(randn(1, 3, E)).shape)
    assert hooks(model) == before


def test_nesting():
    model, other, x = GPT(), GPT(), randn(2, 5, E)
    with observe(model) as outer:
        with observe(model) as inner, observe(model.layers[1]) as part, observe(other) as another:
            assert_identical(model(x), model(x))
            other(x)
        model(x)
    assert [len(outer.calls(name)) for name in KEYS] == [3, 3]
    assert [len(inner.calls(name)) for name in KEYS] == [2, 2]
    assert [len(another.calls(name)) for name in KEYS] == [1, 1]
    assert list(part) == ["attn"]
    assert len(part.calls(0)) == 2
    assert_identical(outer[0].dense(), inner[0].dense())


def test_blocks_that_end_in_another_order():
    model, x = GPT(), randn(2, 5, E)
    one, two = observe(model), observe(model)
    first, second = one.__enter__(), two.__enter__()
    model(x)
    one.__exit__(None, None, None)
    model(x)
    two.__exit__(None, None, None)
    model(x)
    assert (len(first.calls(0)), len(second.calls(0))) == (1, 2)
    assert not any(hooks(model))


def test_hooks_of_the_user_are_kept_and_called_once():
    model, x = GPT(), randn(2, 5, E)
    called: list[str] = []
    model.register_forward_pre_hook(lambda *_: called.append("pre"))
    model.layers[0].attn.register_forward_hook(lambda *_: called.append("forward"))
    model.layers[1].attn.register_forward_hook(lambda _, args, out: out * 2)
    model.layers[1].attn.register_full_backward_hook(lambda *_: called.append("backward"))
    x.requires_grad_()
    with observe(model) as recording:
        model.layers[0].mlp.register_forward_hook(lambda *_: called.append("within"))
        model(x).sum().backward()
    assert sorted(called) == ["backward", "forward", "pre", "within"]
    model(x).sum().backward()
    assert len(called) == 8
    assert len(recording.calls(0)) == 1
    record(model, x)


@nested
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("nesting", [False, True])
def test_hooks_of_the_user_in_a_transformer_encoder(nesting: bool, grad: bool):
    model, x = encoder(enable_nested_tensor=nesting).eval(), randn(3, 6, E)
    called: list[int] = []
    model.layers[1].linear1.register_forward_hook(lambda *_: called.append(1))
    with torch.set_grad_enabled(grad):
        record(model, x)
        assert len(called) == 2  # alone, and observed
        skips_padding = nesting and not grad
        error = raises(ValueError, "skips padding, and can't be observed with other hooks")
        with error if skips_padding else nullcontext():
            record(model, x, src_key_padding_mask=PADDING["right"])
        assert skips_padding or len(called) == 4


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met += func is KERNEL
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user():
    model, x = GPT(), randn(2, 5, E)
    with Counting() as around, torch.device("cpu"):
        assert_gpt_weights(record(model, x), model, x)
    assert around.met == 6  # alone, observed, and for its inputs; twice each

    def within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Counting() as inside, torch.device("cpu"):
            out = F.scaled_dot_product_attention(q, k, v)
        assert inside.met == 1
        return out

    q = randn(Q)
    assert_weights(record(Function(within), q, q, q)[0], q, q)
    with observe(model) as recording, Counting() as inside:
        model(x)
    assert inside.met == 2
    assert len(recording.calls(0)) == 1


def test_copies_and_pickles_of_an_observed_model(tmp_path: Path):
    model, x = GPT(), randn(2, 5, E)
    with observe(model) as recording:
        out = model(x)
        twin = copy.deepcopy(model)
        assert_identical(twin(x), out)
    assert len(recording.calls(0)) == 1
    assert_identical(twin(x), out)
    assert_identical(copy.deepcopy(twin)(x), out)
    assert len(recording.calls(0)) == 1
    assert _get_current_function_mode_stack() == []
    assert_gpt_weights(record(twin, x), twin, x)
    assert_identical(copy.deepcopy(model)(x), out)
    attn = mh.MultiHeadAttention(E, H)
    record(attn, x)
    assert_identical(pickle.loads(pickle.dumps(attn))(x), attn(x))


def test_replicas_of_data_parallel_are_the_model():
    model, x = GPT(), randn(2, 5, E)

    def replica(module: nn.Module) -> nn.Module:
        """Copy the module as torch.nn.parallel.replicate does, which needs GPUs."""
        twin = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else parameter.clone())
        for name, child in module._modules.items():
            setattr(twin, name, replica(child))
        return twin

    with observe(model) as recording:
        twins = [replica(model) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pair: pair[0](pair[1]), zip(twins, x[:, None], strict=True)))
    assert [len(recording.calls(name)) for name in KEYS] == [2, 2]


def test_functional_call():
    model, x = GPT(), randn(2, 5, E)
    parameters = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    with observe(model) as recording:
        out = torch.func.functional_call(model, parameters, (x,))
    assert_identical(out, torch.func.functional_call(model, parameters, (x,)))
    assert list(recording) == KEYS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_models_raise():
    model, x = GPT(), randn(2, 5, E)
    with raises(ValueError, "is inside a torch.func transform: call the model without one"), observe(model):
        torch.func.vmap(model)(x[None])
    with raises(ValueError, "has a shape but no numbers"), observe(nowhere := GPT().to("meta")):
        nowhere(x.to("meta"))
    traced = torch.jit.trace(nn.Linear(2, 2), randn(1, 2))
    with raises(TypeError, "is a TorchScript module, … . Observe the model that it was made from"):
        observe(traced).__enter__()
    with raises(TypeError, "part is a TorchScript module"):
        observe(nn.ModuleDict({"part": traced})).__enter__()


LAYER = nn.TransformerEncoderLayer(E, H, 32, batch_first=True).eval()
MULTI = LAYER.self_attn
PACKED = MULTI.in_proj_weight, MULTI.in_proj_bias, MULTI.out_proj.weight, MULTI.out_proj.bias
OTHERS = [w for part in (LAYER.norm1, LAYER.norm2, LAYER.linear1, LAYER.linear2) for w in part.parameters()]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BY_NAME: dict[str, Callable[[Tensor], Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda x: FLASH(*[x[:, None]] * 3),
    "_scaled_dot_product_attention_math": lambda x: torch._scaled_dot_product_attention_math(
        *[x[:, None]] * 3
    ),
    "_native_multi_head_attention": lambda x: torch._native_multi_head_attention(x, x, x, E, H, *PACKED),
    "_transformer_encoder_layer_fwd": lambda x: torch._transformer_encoder_layer_fwd(
        x, E, H, *PACKED, False, False, 1e-5, *OTHERS
    ),
}


@pytest.mark.parametrize("kernel", BY_NAME)
def test_kernels_called_by_name_raise(kernel: str):
    """Also beside an attention call that can be recorded."""
    model, x = Function(lambda x: (model.attn(x), BY_NAME[kernel](x))), randn(2, 5, E)
    model.attn = CausalAttention()
    with torch.no_grad():
        model(x)
        with raises(ValueError, f"calls the kernel {kernel} … directly"), observe(model):
            model(x)


# -- compiled models -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["whole", "in place", "parts", "parts in place", "function"])
@pytest.mark.parametrize("before", [True, False], ids=["run before", "not run before"])
def test_compiled_models_run_eagerly(way: str, before: bool):
    torch._dynamo.reset()
    model, x = GPT().requires_grad_(False), randn(2, 5, E)
    alone = model(x)
    observable = run = model
    match way:
        case "whole":
            observable = run = torch.compile(model, backend="eager")
        case "in place":
            model.compile(backend="eager")
        case "parts":
            model.layers[0].attn = torch.compile(model.layers[0].attn, backend="eager")
            model.layers[1] = torch.compile(model.layers[1], backend="eager")
        case "parts in place":
            for layer in model.layers:
                layer.attn.compile(backend="eager", fullgraph=True)
        case "function":
            run = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    if before:
        run(x)
    with observe(observable) as recording:
        assert_identical(run(x), alone)
    assert list(recording) == KEYS
    assert [len(recording.calls(name)) for name in recording] == [1, 1]
    assert not any(hooks(model))
    counted = torch._dynamo.testing.CompileCounter()
    assert_identical(
        torch.compile(lambda x: model.layers[0].mlp(x), backend=counted)(x), model.layers[0].mlp(x)
    )
    assert counted.frame_count == 1


@pytest.mark.full
def test_a_model_compiled_in_the_block_is_recorded():
    """In a process that compiled nothing before, and doesn't load PyTorch's compiler for `observe`."""
    code = """
import sys
import torch
import torch.nn.functional as F
from manyheads import observe

class Attention(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)

class Compiling(torch.nn.Module):
    def forward(self, x):
        return torch.compile(Attention(), backend="eager", fullgraph=True)(x)

plain, compiling, x, compile = Attention(), Compiling(), torch.randn(1, 2, 5, 8), torch.compile
with observe(plain) as recording:
    plain(x)
assert len(recording) == 1 and "torch._dynamo" not in sys.modules
with observe(compiling) as recording:
    compiling(x)
    compiling(x)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
assert [len(recording.calls(name)) for name in recording] == [2]
assert torch._dynamo.eval_frame._stance.stance == "default" and torch.compile is compile
with observe(compiling) as recording:
    compiling(x)
assert len(recording) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_compiled_model_on_another_thread():
    model, x = GPT().requires_grad_(False), randn(2, 5, E)
    compiled = torch.compile(model, backend="eager")
    alone = compiled(x)
    with observe(compiled) as recording:
        assert_identical(in_threads(lambda: compiled(x))[0], alone)
    assert list(recording) == KEYS


def test_names_imported_in_the_block_work_after_it():
    model, x = GPT(), randn(2, 5, E)
    with observe(model):
        from torch.nn.functional import scaled_dot_product_attention as bound

        model(x)
    q = randn(Q)
    run = torch.compile(lambda q: bound(q, q, q), backend="eager", fullgraph=True)
    assert_identical(run(q), KERNEL(q, q, q))


# -- threads ---------------------------------------------------------------------------------------


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(HANG) for future in [pool.submit(work) for work in works]]


def test_calls_on_several_threads_at_once():
    model, inputs = GPT(), [randn(2, 5 + n, E) for n in range(4)]
    together = threading.Barrier(4)
    model.layers[0].attn.midway = lambda: together.wait(HANG)
    with observe(model) as recording:
        outs = in_threads(*(lambda x=x: model(x) for x in inputs))
    model.layers[0].attn.midway = lambda: None
    for x, out in zip(inputs, outs, strict=True):
        assert_identical(model(x), out)
    for name in KEYS:
        assert sorted(call.shape[3] for call in recording.calls(name)) == [5, 6, 7, 8]
        for call in recording.calls(name):
            x = inputs[call.shape[3] - 5]
            q, k, _ = model.get_submodule(name).heads(inputs_of(model, KEYS, x)[name])
            assert_weights(call, q, k, causal=True)


def test_each_thread_may_observe_for_itself():
    models, x = [GPT() for _ in range(3)], randn(2, 5, E)
    together = threading.Barrier(3)
    for model in models:
        model.layers[1].attn.midway = lambda: together.wait(HANG)

    def work(model: nn.Module) -> Recording:
        model(x)
        with observe(model) as recording:
            model(x)
        return recording

    found = in_threads(*(lambda model=model: work(model) for model in models))
    for model, recording in zip(models, found, strict=True):
        model.layers[1].attn.midway = lambda: None
        assert [len(recording.calls(name)) for name in recording] == [1, 1]
        assert_gpt_weights(recording, model, x)


def test_another_model_on_another_thread_is_not_recorded():
    model, other, x = GPT(), GPT(), randn(2, 5, E)
    model.layers[1].attn.midway = lambda: in_threads(lambda: other(x))
    recording = record(model, x)
    assert [len(recording.calls(name)) for name in recording] == [1, 1]


def test_a_thread_that_outlives_the_block():
    model, x = GPT(), randn(2, 5, E)
    alone = model(x)
    inside, over = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        over.wait(HANG)

    def work() -> tuple[Tensor, list[Any]]:
        out = model(x)
        return out, [*_get_current_function_mode_stack(), *intercept._thread.running]

    with ThreadPoolExecutor(1) as pool:
        with observe(model) as recording:
            model(x)
            model.layers[0].attn.midway = wait
            future = pool.submit(work)
            inside.wait(HANG)
        over.set()
        out, left = future.result(HANG)
    assert_identical(out, alone)
    assert left == []
    assert not any(hooks(model))
    assert [len(recording.calls(name)) for name in KEYS] == [1, 1]
    assert stance() == "default"


def test_a_thread_that_began_before_the_block():
    model, x = GPT(), randn(2, 5, E)
    alone = model(x)
    inside, on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        on.wait(HANG)

    model.layers[0].attn.midway = wait
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: (model(x), _get_current_function_mode_stack()))
        inside.wait(HANG)
        model.layers[0].attn.midway = lambda: None
        with observe(model) as recording:
            model(x)
            on.set()
            out, left = future.result(HANG)
    assert_identical(out, alone)
    assert left == []
    assert len(recording.calls(KEYS[0])) >= 1


def test_functions_on_other_threads_of_a_module_give_a_warning():
    def attend_on_threads(x: Tensor) -> Tensor:
        x = model.attn(x)
        return sum(in_threads(*(lambda: F.scaled_dot_product_attention(x, x, x),) * 2))

    model, x = Function(attend_on_threads), randn(2, 5, E)
    model.attn = CausalAttention()
    with pytest.warns(UserWarning, match="2 attention calls ran on threads where no module of the model was"):
        recording = record(model, x)
    assert list(recording) == ["attn"]


def test_other_threads_attention_is_not_recorded():
    model, x = GPT(), randn(2, 5, E)
    with observe(model) as recording:
        model(x)
        in_threads(lambda: F.scaled_dot_product_attention(x, x, x))
        F.scaled_dot_product_attention(x, x, x)
    assert [len(recording.calls(name)) for name in recording] == [1, 1]


# -- bad input -------------------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep": "entropy"}, ValueError, 'Expected keep to be … got \'entropy\''),
    ({"keep": 3}, TypeError, "Expected keep to be … got an int"),
    ({"keep": None}, TypeError, "Expected keep to be … got a NoneType"),
    ({"keep": []}, ValueError, "keep"),
    ({"keep": ["entropie"]}, ValueError, "Expected statistics among entropy, … got 'entropie'"),
    ({"keep": ["top"]}, TypeError, "arguments of top to be k"),
    ({"keep": {"entropy": 3}}, TypeError, "arguments of entropy to be no arguments"),
    ({"keep": {"previous_token": 4}}, TypeError, "previous_token"),
    ({"keep": {"top": 0}}, ValueError, "at least 1, got 0"),
    ({"keep": {"pooled": (6, 6)}}, ValueError, "at most 5 rows, … got 6"),
    ({"keep": "statistics", "dtype": torch.float16}, ValueError, "dtype"),
    ({"keep": "statistics", "device": "cpu"}, ValueError, "device"),
    ({"dtype": torch.int8}, TypeError, "Expected dtype to be one of … got torch.int8"),
    ({"device": "nowhere"}, ValueError, "floating-point dtype, got 'nowhere'"),
    ({"device": "meta"}, ValueError, "meta"),
    ({"max_bytes": "1GB"}, TypeError, "max_bytes to be a whole number, got '1GB'"),
    ({"max_bytes": -1}, ValueError, "max_bytes to be at least 0, got -1"),
    ({"layers": "layers.7"}, ValueError, "no module 'layers.7'. Choose a similar one: layers.1"),
    ({"layers": "0.mlp"}, ValueError, "layers names '0.mlp', which made no attention call. Choose one of "),
    ({"layers": [0, 2]}, ValueError, "layers names 2, which made no attention call"),
    ({"layers": -1}, ValueError, "at least 0, got -1"),
    ({"layers": []}, ValueError, "layers"),
    ({"layers": [None]}, TypeError, "to be a module's path or a number, got None"),
    ({"layers": 1.5}, TypeError, "Expected layers to be … got a float"),
    ({"heads": [1, 4]}, ValueError, "layers.0.attn has 4 heads, and heads= names head 4"),
    ({"heads": -5}, ValueError, "layers.0.attn has 4 heads, and heads= names head -5"),
    ({"heads": []}, ValueError, "heads"),
    ({"heads": [True]}, TypeError, "a head in heads to be a whole number, got True"),
    ({"heads": torch.tensor([1])}, TypeError, "Expected heads to be head numbers, got a Tensor"),
    ({"ablate": ("layers.0.attn", 1)}, TypeError, 'pairs (layer, head) such as ("layers.3.attn", 5), got'),
    ({"ablate": [("layers.0",)]}, TypeError, "to be pairs … got ('layers.0',)"),
    ({"ablate": 3}, TypeError, "to be pairs … got 3"),
    ({"ablate": [("layer.0", 1)]}, ValueError, "no module 'layer.0'. Choose a similar one: layers.0"),
    ({"ablate": [("mlp", 0)]}, ValueError, "ablate names 'mlp', which made no attention call"),
    ({"ablate": [(2, 0)]}, ValueError, "ablate names 2, which made no attention call"),
    ({"ablate": [("layers.1", 4)]}, ValueError, "layers.1.attn has 4 heads, … and ablate= names head 4"),
    ({"ablate": [("layers.1", -1)]}, ValueError, "at least 0, got -1"),
    ({"ablate": [("layers.1", "2")]}, TypeError, "a whole number, got '2'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=str)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str):
    model, x = GPT(), randn(2, 5, E)
    with raises(error, message), observe(model, **options):
        model(x)
    assert not any(hooks(model))


@pytest.mark.parametrize("model", [None, "gpt2", GPT, lambda x: x, [GPT()]])
def test_only_modules_are_observed(model: Any):
    with raises(TypeError, f"Expected observe to get a torch.nn.Module, got a {type(model).__name__}"):
        observe(model).__enter__()


@pytest.mark.parametrize(
    "model", [nn.Linear(E, E), nn.GRU(E, E), ByHand()], ids=lambda model: type(model).__name__
)
def test_a_model_without_attention_that_can_be_recorded(model: nn.Module):
    intercepted = "scaled_dot_product_attention, … MultiheadAttention … Hugging Face … manyheads"
    with (
        raises(
            ValueError,
            f"{type(model).__name__} made no attention call that can be recorded. … {intercepted}",
        ),
        observe(model),
    ):
        model(randn(2, 5, E))


def test_a_model_whose_attention_is_made_by_hand():
    model = nn.Sequential(nn.Linear(E, E), HandMadeAttention())
    with raises(ValueError, "may implement attention themselves: 1 (HandMadeAttention)."), observe(model):
        model(randn(2, 5, E))
    with (
        raises(ValueError, "may implement attention themselves: HandMadeAttention (HandMadeAttention)."),
        observe(model[1]),
    ):
        model[1](randn(2, 5, E))


def test_no_forward_within_the_block():
    model = GPT()
    with (
        raises(ValueError, "wasn't called inside observe … Call model(inputs) there"),
        observe(model),
    ):
        pass
    with raises(ValueError, "The model wasn't called inside observe"), observe(model):
        GPT()(randn(1, 3, E))


CALLS: list[tuple[dict[str, Any], Any, str]] = [
    ({"attn_mask": torch.tensor(torch.nan).expand(5, 7)}, ValueError, "in attn_mask, got NaN"),
    ({"attn_mask": torch.full((5, 7), torch.inf)}, ValueError, "finite numbers … in attn_mask … +inf"),
    ({"attn_mask": torch.ones(5, 7, dtype=torch.int64)}, TypeError, "attn_mask to be boolean or of floats"),
    ({"attn_mask": torch.ones(5, 6)}, (ValueError, RuntimeError), "6"),
    ({"query": [1.0]}, TypeError, "query"),
    ({"value": None}, TypeError, "value"),
    ({"query": randn(8)}, ValueError, "query to be [..., length, width], got [8]"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), CALLS, ids=[message for *_, message in CALLS])
def test_unsupported_calls_raise(arguments: dict[str, Any], error: Any, message: str):
    whole_call = {"query": randn(Q), "key": randn(K), "value": randn(V)} | arguments
    with raises(error, message), observe(model := Call()):
        model(**whole_call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_raise():
    q = torch.nested.nested_tensor([randn(H, 3, 8), randn(H, 4, 8)])
    with raises(ValueError, "is a nested tensor, … : pad it and pass a mask"), observe(model := Call()):
        model(q, q, q)


def test_ids_that_do_not_fit():
    recording = record(GPT(), randn(2, 5, E))
    with raises(TypeError, "Expected ids to be the tokens, … got an int"):
        recording.table(ids=3)
    with raises(ValueError, "Expected ids to be [s] or [b, s], one for each of s = 5 keys, got [4]"):
        recording.table(ids=torch.arange(4))
