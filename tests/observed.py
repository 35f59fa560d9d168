"""Models to observe, and assertions: outputs bit for bit, weights against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import manyheads as mh
from manyheads import observe
from manyheads.observe import Recording, intercept

E, H, D = 16, 4, 4
Q, K, V = (2, H, 5, 8), (2, H, 7, 8), (2, H, 7, 8)
KERNEL = F.scaled_dot_product_attention
randn = torch.randn


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], message: str) -> Iterator[None]:
    """Expect an error of one line with this message; " … " matches anything."""
    with pytest.raises(error) as raised:
        yield
    text = rest = str(raised.value)
    assert "\n" not in text
    for part in message.split(" … "):
        assert part in rest, text
        rest = rest.partition(part)[2]


def stance() -> str:
    """Return the mode of torch.compile: `default`, or `force_eager` while a model is observed."""
    return torch._dynamo.eval_frame._stance.stance


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Assert after every test that no mode is active, nothing is patched, and torch.compile compiles."""
    yield
    assert _get_current_function_mode_stack() == []
    assert F.scaled_dot_product_attention is KERNEL
    assert stance() == "default"
    assert intercept._thread.running == ()
    assert intercept._thread.mode is None


def hooks(model: nn.Module) -> list[int]:
    """Return how many hooks each module has, of each kind."""
    kinds = ("hooks", "pre_hooks", "hooks_always_called", "hooks_with_kwargs")
    return [len(getattr(module, f"_forward_{kind}")) for module in model.modules() for kind in kinds]


def assert_identical(one: Any, other: Any) -> None:
    """Assert that two trees are equal bit for bit, in shape, dtype and strides."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_stride=True)
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_identical(x, y)
    else:
        assert one == other


def record(model: nn.Module, *args: Any, observing: dict[str, Any] | None = None, **kwargs: Any) -> Recording:
    """Record one call, and assert that its output is the same as without `observe` and no hook is left."""
    before = hooks(model)
    torch.manual_seed(1)
    alone = model(*args, **kwargs)
    torch.manual_seed(1)
    with observe(model, **observing or {}) as recording:
        out = model(*args, **kwargs)
    assert_identical(out, alone)
    assert hooks(model) == before
    return recording


def weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
):
    """Return softmax(scale · q·kᵀ + mask) in float64, and the error that a map may have.

    Of any number of dimensions; key heads are repeated for query heads; a fully masked row is 0.
    The budget is that of docs/explanation/numerics.md, for scores in float32 (float64 for float64).
    """

    def soft(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, y = q.detach().to(dtype), k.detach().to(dtype)
        if x.dim() > 2 and y.dim() > 2 and y.shape[-3] not in (1, x.shape[-3]) and x.shape[-3] != 1:
            y = y.repeat_interleave(x.shape[-3] // y.shape[-3], -3)
        score = x @ y.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # [..., t, s]
        if mask is not None:
            is_mask = mask.dtype == torch.bool
            score = score.masked_fill(~mask, -torch.inf) if is_mask else score + mask.to(dtype)
        if causal:
            score = score.masked_fill(torch.ones(score.shape[-2:]).tril() == 0, -torch.inf)
        nothing = (score == -torch.inf).all(-1, keepdim=True)
        return score, torch.where(nothing, 0.0, score).softmax(-1).masked_fill(nothing, 0.0)

    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    score, true = soft(torch.float64)
    if not true.numel():
        return true, 0.0
    plain = (soft(compute)[1] - true).abs().max()
    most = score.masked_fill(score == -torch.inf, 0.0).abs().max()
    return true, float(2 * plain + torch.finfo(compute).eps * (1 + most) * true.max())


def assert_weights(amap: mh.AttentionMap, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> None:
    """Assert that the map's weights are those of q and k, which may have any number of dimensions."""
    true, budget = weights(q, k, *args, **kwargs)
    dense = amap.dense()
    assert dense.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert dense.numel() == true.numel()
    torch.testing.assert_close(dense.double().reshape(true.shape), true, rtol=0, atol=budget)


def assert_agree(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# -- models ----------------------------------------------------------------------------------------


class Function(nn.Module):
    """A model that calls a function, and nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Call(nn.Module):
    """PyTorch's attention, and nothing else."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


class CausalAttention(nn.Module):
    """An attention layer as in nanoGPT: q, k and v are views of one product."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(E, 3 * E)
        self.c_proj = nn.Linear(E, E)
        self.dropout = dropout
        self.midway: Callable[[], Any] = lambda: None

    def heads(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.c_attn(x).split(E, -1)]  # [b, h, t, d]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.midway()
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.attn = CausalAttention(dropout)
        self.mlp = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + F.gelu(self.mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0, how: str = "plain") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


KEYS = ["layers.0.attn", "layers.1.attn"]


def inputs_of(model: nn.Module, names: Sequence[str], *args: Any) -> dict[str, Tensor]:
    """Return the first input of each of these modules in a forward."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, a, name=name: found.setdefault(name, a[0])
            )
            for name in names
        ]
        model(*args)
    for handle in handles:
        handle.remove()
    return found


def assert_gpt_weights(recording: Recording, model: nn.Module, x: Tensor) -> None:
    for name, given_ in inputs_of(model, list(recording), x).items():
        q, k, _ = model.get_submodule(name).heads(given_)
        assert_weights(recording[name], q, k, causal=True)


def gradients(model: nn.Module, x: Tensor, observed: bool, **options: Any) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    with observe(model, **options) if observed else nullcontext():
        model(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


PADDING: dict[str, Tensor | None] = {
    "none": None,
    "right": torch.arange(6) >= torch.tensor([[6], [4], [1]]),
    "left": torch.arange(6) < torch.tensor([[0], [2], [5]]),
    "within": torch.arange(6) == torch.tensor([[6], [2], [3]]),
    "floats": torch.where(torch.arange(6) >= torch.tensor([[6], [4], [1]]), -torch.inf, 0.0),
    "all of one": torch.arange(6) >= torch.tensor([[6], [0], [3]]),
}


nested = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:enable_nested_tensor is True",
    "ignore:.*does not support backward",
)


def encoder(**options: Any) -> nn.TransformerEncoder:
    rest = {name: options.pop(name) for name in ("norm", "enable_nested_tensor") if name in options}
    layer = nn.TransformerEncoderLayer(E, H, 32, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, **rest)


OURS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: mh.MultiHeadAttention(E, H),
    "grouped": lambda: mh.MultiHeadAttention(E, H, kv_heads=2),
    "rotary": lambda: mh.MultiHeadAttention(E, H, kv_heads=1, position=mh.Rotary(D)),
    "normed": lambda: mh.MultiHeadAttention(E, H, qk_norm=nn.RMSNorm),
    "ALiBi": lambda: mh.MultiHeadAttention(E, H, bias=mh.ALiBi(H)),
    "relative": lambda: mh.MultiHeadAttention(E, H, bias=mh.Relative.learned(H, 4)),
    "dropout": lambda: mh.MultiHeadAttention(E, H, dropout=0.3),
    "one head": lambda: mh.SelfAttention(E),
}
