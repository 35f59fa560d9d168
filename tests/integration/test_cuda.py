"""The library on a GPU: every kernel on the table, maps, layers, observed models, training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import manyheads as mh
from manyheads import kernels
from manyheads.problem import Problem
from tests.cases import CASES, KERNELS, Case, gradients, make, over
from tests.unit.kernels.test_kernels import check, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = torch.device("cuda")
MIB = 2**20


def qkv(*sizes: int, dtype: torch.dtype = torch.float32, **options: bool) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, s, d = sizes
    shapes = ((b, h, t, d), (b, h, s, d), (b, h, s, d))
    q, k, v = (torch.randn(shape, dtype=dtype, device=DEVICE, **options) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES[::3] if torch.cuda.is_available() else CASES[:1], ids=str)
def test_table(case: Case, kernel: str) -> None:
    """Output, gradients and weights of every kernel, within the budget that holds on the CPU."""
    inputs = make(case)
    leaves, given = inputs.on(DEVICE)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    problem = Problem.of(q, k, v, **given)
    if kernel == "auto" and kernels.choose(problem).NAME == "flex":
        pytest.skip("test_flex.py has the cases of flex")
    if kernel != "auto" and kernels.verdicts(problem)[kernel]:
        with pytest.raises(ValueError, match=f'kernel="{kernel}"'):
            mh.attention(q, k, v, **given, kernel=kernel)
        return
    out, amap = mh.attention_with_map(q, k, v, **given, kernel=kernel)
    got = {"out": out} | gradients(out, leaves, inputs.upstream.to(DEVICE))
    check(case, kernel, {name: x.cpu() for name, x in got.items()})
    exact = truth(case)
    wrong = over(amap.dense().cpu(), exact.values["weights"], exact.errors["weights"])
    assert not wrong, f"weights: {wrong}"


STATISTICS = ("entropy", "received", "distance", "row_max")


@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Causal() & mh.Window(left=40)], ids=str)
def test_statistics_are_those_of_the_cpu(mask: mh.Mask | None) -> None:
    q, k, v = qkv(2, 4, 300, 300, 32)
    out, amap = mh.attention_with_map(q, k, v, mask=mask)
    there = mh.attention_with_map(q.cpu(), k.cpu(), v.cpu(), mask=mask)[1]
    got, expected = (x.statistics(*STATISTICS, top=4, pooled=(32, 32)) for x in (amap, there))
    for name in STATISTICS:
        assert got[name].device.type == "cuda"
        torch.testing.assert_close(got[name].cpu(), expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["top"].weights.cpu(), expected["top"].weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got["pooled"].cpu(), expected["pooled"], rtol=1e-4, atol=1e-6)
    assert out.device.type == "cuda"


def test_maps_of_long_texts_need_little_memory() -> None:
    """32,768 tokens: the weights of 8 heads would be 34 GB."""
    q, k, v = qkv(1, 8, 32768, 32768, 64, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _, amap = mh.attention_with_map(q, k, v, mask=mh.Causal())
    found = amap.statistics("entropy", "received")
    tile = amap[0, 3, 30000:30016, 29000:30016]
    assert torch.cuda.max_memory_allocated() - before < 1024 * MIB
    scores = q[0, 3, 30000:30016].double() @ k[0, 3].double().mT / 8
    scores[
        torch.arange(30000, 30016, device=DEVICE)[:, None] < torch.arange(32768, device=DEVICE)
    ] = -math.inf
    expected = scores.softmax(-1)
    torch.testing.assert_close(tile.double(), expected[:, 29000:30016], rtol=1e-4, atol=1e-7)
    entropy = torch.special.entr(expected).sum(-1)
    torch.testing.assert_close(found["entropy"][0, 3, 30000:30016].double(), entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = mh.MultiHeadAttention(64, 4).to(DEVICE)
    x = torch.randn(2, 50, 64, device=DEVICE)
    with torch.autocast("cuda", dtype):
        out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x), rtol=0.05, atol=0.02)


@torch.no_grad()
def test_a_layer_decodes_with_a_cache() -> None:
    layer = mh.MultiHeadAttention(64, 4, kv_heads=2, position=mh.Rotary(16)).to(DEVICE)
    x = torch.randn(2, 20, 64, device=DEVICE)
    whole = layer(x, mask=mh.Causal())
    cache = mh.Cache()
    parts = [layer(x[:, :12], cache=cache)] + [layer(x[:, n : n + 1], cache=cache) for n in range(12, 20)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_hugging_face_model_is_observed(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, attn_implementation=attention
    )
    model = transformers.GPT2Model(config).eval().to(DEVICE)
    ids = torch.randint(0, 100, (2, 40), device=DEVICE)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        with mh.observe(model) as recording:
            observed = model(ids).last_hidden_state
        eager = transformers.GPT2Model._from_config(config, attn_implementation="eager").to(DEVICE).eval()
        eager.load_state_dict(model.state_dict())
        weights = eager(ids, output_attentions=True).attentions
    torch.testing.assert_close(observed, plain, rtol=1e-4, atol=1e-5)
    for layer, expected in enumerate(weights):
        torch.testing.assert_close(recording[layer].dense(), expected, rtol=1e-4, atol=1e-6)


def test_a_language_model_trains(tmp_path: Path) -> None:
    from manyheads import lm

    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 400)
    sizes = {"layers": 2, "heads": 2, "embed": 32, "context": 32, "vocab_size": 280, "batch_size": 4}
    lm.train(tmp_path / "run", {"steps": 20, "device": "cuda", **sizes}, [text])
    lm.train(tmp_path / "run", {"steps": 30}, resume=True)
    model, _ = lm.load(tmp_path / "run")
    assert next(model.parameters()).isfinite().all()


def test_one_process_joins_through_nccl() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from manyheads import distributed

    if not dist.is_nccl_available():
        pytest.skip("PyTorch was built without NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        q, k, v = qkv(1, 4, 128, 128, 32, requires_grad=True)
        out = distributed.attention(q, k, v, mesh=mesh, mask=mh.Causal())
        torch.testing.assert_close(out, mh.attention(q, k, v, mask=mh.Causal()), rtol=1e-4, atol=1e-5)
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()
    finally:
        dist.destroy_process_group()
