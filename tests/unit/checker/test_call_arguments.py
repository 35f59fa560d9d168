"""Arguments of a call that are neither tokens nor masks: objects for a cache, grids, numbers of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- objects for a cache ---------------------------------------------------------------------------


class Rolling:
    """The keys and values that the next tokens may still need, of a window of this size."""

    def __init__(self, window: int) -> None:
        self.window, self.length = window, 0
        self.k: Any = None
        self.v: Any = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length += k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        first = max(0, k.shape[2] - self.window + 1)
        self.k, self.v = k[:, :, first:], v[:, :, first:]
        return k, v


class TooShort(Rolling):
    """The same, less one key."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().append(k, v)
        self.k, self.v = self.k[:, :, 1:], self.v[:, :, 1:]
        return k, v


class WindowLayer(Layer):
    """Attention of each token to the last `sliding_window` tokens, itself included.

    cache: Rolling(sliding_window), which each call updates.
    """

    def __init__(self, dim: int = 24, sliding_window: int = 4) -> None:
        super().__init__(dim)
        self.sliding_window = sliding_window

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.append(k, v)
        visible = past(q.shape[2], k.shape[2], self.sliding_window)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


class ShortWindowLayer(WindowLayer):
    """Attention of each token to the last `sliding_window` tokens, itself included.

    cache: TooShort(sliding_window), which each call updates.
    """


class Slots(NamedTuple):
    """Keys and values of earlier tokens, [b, h, n, d], and their number."""

    keys: Tensor
    values: Tensor
    length: int = 0


class NamedCache(Layer):
    """Causal attention, which returns its output and the next cache."""

    def forward(self, x: Tensor, cache: Slots | None = None) -> tuple[Tensor, Slots]:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat((cache.keys, k), 2), torch.cat((cache.values, v), 2)
        visible = past(q.shape[2], k.shape[2])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v), Slots(k, v, k.shape[2])


class NamedCacheMasked(NamedCache):
    """Causal attention, which returns its output and the next cache."""

    def forward(self, x: Tensor, cache: Slots | None = None) -> tuple[Tensor, Slots]:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat((cache.keys, k), 2), torch.cat((cache.values, v), 2)
        visible = past(q.shape[2], q.shape[2])
        visible = F.pad(visible, (0, k.shape[2] - q.shape[2]), value=False)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v), Slots(k, v, k.shape[2])


class Store:
    """The keys and values of one layer."""

    def __init__(self) -> None:
        self.k: Any = None
        self.v: Any = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k, v
        return k, v


class Stateful(Layer):
    """Causal attention. state: a Store that each call extends."""

    def forward(self, x: Tensor, state: Store | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if state is not None:
            k, v = state.extend(k, v)
        visible = past(q.shape[2], k.shape[2])
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


class StatefulUnmasked(Layer):
    """Causal attention. state: a Store that each call extends."""

    def forward(self, x: Tensor, state: Store | None = None) -> Tensor:
        q, k, v = self.heads(x)
        visible = past(q.shape[2], k.shape[2])
        if state is not None:
            k, v = state.extend(k, v)
            visible = torch.ones_like(visible[:, :1])
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("layer", "verdict"),
    [
        (Stateful, "passed"),
        (StatefulUnmasked, "failed"),
        (WindowLayer, "passed"),
        (ShortWindowLayer, "failed"),
        (NamedCache, "passed"),
        (NamedCacheMasked, "failed"),
    ],
)
def test_a_cache_of_a_class_of_the_file_is_used(layer: type, verdict: str) -> None:
    report = checker.check(layer)
    assert report.verdict == verdict, str(report)
    assert verdict in [check.status for check in report.checks if check.name == "cache"]


# -- numbers of tokens, rows and columns -----------------------------------------------------------


class Axial(Layer):
    """Attention with a rotary encoding by rows and columns.

    x: [b, prefix + rows · columns, dim], the tokens of a class and of registers first.
    shape: (rows, columns) of the image.
    """

    is_transposed = False

    def __init__(self, dim: int = 32, num_registers: int = 1) -> None:
        super().__init__(dim)
        self.num_registers = num_registers

    def rotate(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        rows, columns = shape[::-1] if self.is_transposed else shape
        at = torch.arange(rows * columns)
        frequencies = 10000.0 ** (-torch.arange(2) / 2)
        angles = torch.cat((at[:, None] // columns * frequencies, at[:, None] % columns * frequencies), -1)
        prefix, rest = x.tensor_split([1 + self.num_registers], 2)
        a, b = rest.chunk(2, -1)
        rotated = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat((prefix, torch.cat(rotated, -1)), 2)

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        q, k = self.rotate(q, shape), self.rotate(k, shape)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class AxialTransposed(Axial):
    """Attention with a rotary encoding by rows and columns: shape (rows, columns)."""

    is_transposed = True

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        return super().forward(x, shape)


class AxialQueries(Axial):
    """Attention with a rotary encoding by rows and columns: shape (rows, columns)."""

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((self.rotate(q, shape) @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


def test_the_numbers_of_rows_and_columns_are_passed() -> None:
    report = checker.check(Axial)
    assert report.verdict == "passed", str(report)
    assert any("rows and columns, except for the first 2 tokens" in note for note in report.notes)


@pytest.mark.parametrize(
    ("layer", "bug"), [(AxialTransposed, "rotary-grid-transposed"), (AxialQueries, "rotary-queries-only")]
)
def test_a_wrong_encoding_of_rows_and_columns_is_named(layer: type, bug: str) -> None:
    assert bugs(checker.check(layer)) == [bug]


class FirstTokens(Layer):
    """Attention of the first tokens to a context; those after them are returned unchanged.

    query_length: the number of the first tokens.
    """

    def forward(self, x: Tensor, query_length: int, context: Tensor) -> Tensor:
        first, rest = x.tensor_split([query_length], 1)
        q, k, v = (
            self.split(self.q_proj(first)),
            *map(self.split, (self.k_proj(context), self.v_proj(context))),
        )
        return torch.cat((self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v), rest), 1)


class AllTokens(Layer):
    """Attention of the first tokens to a context; those after them are returned unchanged.

    query_length: the number of the first tokens.
    """

    def forward(self, x: Tensor, query_length: int, context: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), *map(self.split, (self.k_proj(context), self.v_proj(context)))
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class Undocumented(AllTokens):
    """Attention to a context."""

    def forward(self, x: Tensor, query_length: int, context: Tensor) -> Tensor:
        return super().forward(x, query_length, context)


class Counted(Layer):
    """Attention to sequences of `seq_len` tokens, as in code that passes its sizes along."""

    def forward(self, x: Tensor, batch_size: int, seq_len: int, layer_idx: int) -> Tensor:
        q, k, v = (layer(x).view(batch_size, seq_len, 4, -1).transpose(1, 2)
                   for layer in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class CountedUnscaled(Counted):
    """Attention to sequences of `seq_len` tokens, as in code that passes its sizes along."""

    def forward(self, x: Tensor, batch_size: int, seq_len: int, layer_idx: int) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT).softmax(-1), v)


@pytest.mark.parametrize(
    ("layer", "verdict"),
    [
        (FirstTokens, "passed"),
        (AllTokens, "failed"),
        (Undocumented, "not judged"),
        (Counted, "passed"),
        (CountedUnscaled, "failed"),
    ],
)
def test_numbers_of_tokens_are_passed(layer: type, verdict: str) -> None:
    report = checker.check(layer)
    assert report.verdict == verdict, str(report)


def test_the_number_of_all_tokens_may_be_called_that_of_queries() -> None:
    report = checker.check(Undocumented, args={"query_length": "length"})
    assert report.verdict == "passed", str(report)


# -- windows of images -----------------------------------------------------------------------------


class Windows(Layer):
    """Attention in shifted windows of images [b, h, w, e], filled up with zeros to whole windows.

    An axis that one window fills isn't shifted.
    """

    def __init__(
        self,
        dim: int = 24,
        window_size: tuple[int, int] = (2, 2),
        shift: tuple[int, int] = (1, 1),
        stride: int = 3,
        separates: bool = True,
    ) -> None:
        super().__init__(dim)
        self.window_size, self.shift, self.stride, self.separates = window_size, shift, stride, separates
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, 4))

    def windows(self, x: Tensor) -> Tensor:
        (b, rows, columns, e), (m, n) = x.shape, self.window_size
        return x.view(b, rows // m, m, columns // n, n, e).transpose(2, 3).reshape(-1, m * n, e)

    def forward(self, x: Tensor) -> Tensor:
        (b, height, width, e), (m, n) = x.shape, self.window_size
        x = F.pad(x, (0, 0, 0, -width % n, 0, -height % m))
        rows, columns = x.shape[1:3]
        shift = [*self.shift]
        if rows <= m:
            shift[0] = 0
        if columns <= n:
            shift[1] = 0
        q, k, v = self.heads(self.windows(x.roll([-shift[0], -shift[1]], (1, 2))))
        at = torch.arange(m * n)
        distances = (at[:, None] // n - at // n + 1) * self.stride + at[:, None] % n - at % n + 1
        bias = self.relative_position_bias_table[distances].permute(2, 0, 1)
        side = (torch.arange(rows) >= rows - shift[0])[:, None] * 2 + (
            torch.arange(columns) >= columns - shift[1]
        )
        side = self.windows(side[None, :, :, None])[..., 0]
        other = (side[:, None] != side[:, :, None]).repeat(b, 1, 1)[:, None]
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        scores = scores.masked_fill(other, -torch.inf) if self.separates else scores
        out = self.merge(scores.softmax(-1), v).view(b, rows // m, columns // n, m, n, e)
        out = out.transpose(2, 3).reshape(b, rows, columns, e).roll(shift, (1, 2))
        return out[:, :height, :width]


def test_windows_of_images_are_known_whatever_the_size_of_the_image() -> None:
    report = checker.check(Windows)
    assert report.verdict == "passed", str(report)
    assert any("images of 4 × 6 and 3 × 4 and 1 × 4" in note for note in report.notes), report.notes
    assert [check.status for check in report.checks if check.name.startswith("grid (")] == ["passed"] * 2


class WindowsOfLargeImages(Windows):
    """Attention in shifted windows of images [b, h, w, e], filled up with zeros to whole windows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.shape[1] > 2 else 1.01)


@pytest.mark.parametrize(
    ("init", "names"), [({"separates": False}, ["window-wraps"]), ({"stride": 2}, ["window-index"])]
)
def test_wrong_windows_of_images_are_named(init: dict[str, Any], names: list[str]) -> None:
    assert bugs(checker.check(Windows, init=init)) == names


def test_a_small_image_counts() -> None:
    assert checker.check(WindowsOfLargeImages).verdict != "passed"
