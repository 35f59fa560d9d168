"""Masks against a double Python loop: every leaf, and compositions that hypothesis makes up."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import manyheads as mh
from manyheads.masks import Mask
from manyheads.shapes import Shape
from manyheads.trees import bound
from tests.cases import Spec, build, leaves, positions, sees, specs, visible
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Setting:
    spec: Spec
    shape: Shape
    offset: Any
    first: list[int]

    @property
    def mask(self) -> Mask:
        """The mask, checked and bound as a problem binds it."""
        mask = build(self.spec)
        mask.check(self.shape)
        place = self.shape.s - self.shape.t if self.offset is None else self.offset
        return mask.bind(place, self.shape.s)

    def truth(self) -> np.ndarray:
        n = self.shape
        return visible(self.spec, n.b, n.h, n.t, n.s, self.offset)


@st.composite
def settings(draw: st.DrawFn, leaf: bool = False, same_offset: bool = False) -> Setting:
    b, h = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    t, s = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    spec = draw(leaves(b, h, t, s) if leaf else specs(b, h, t, s))
    one = st.one_of(st.none(), st.integers(-4, 7))
    each = st.lists(st.integers(-4, 7), min_size=b, max_size=b).map(lambda x: torch.tensor(x))
    offset = draw(one if same_offset else st.one_of(one, each))
    return Setting(spec, Shape(b, h, h, t, s, 4, 4), offset, positions(offset, b, t, s))


def grid(setting: Setting) -> tuple[torch.Tensor, ...]:
    """b, h, i, j as tensors that broadcast to `[b, h, t, s]`."""
    n = setting.shape
    i = torch.arange(n.t)[None, None, :, None] + torch.tensor(setting.first)[:, None, None, None]
    return (
        torch.arange(n.b)[:, None, None, None],
        torch.arange(n.h)[None, :, None, None],
        i,
        torch.arange(n.s)[None, None, None, :],
    )


@hypothesis.settings(max_examples=120)
@given(st.one_of(settings(), settings(leaf=True)), st.sampled_from([torch.int64, torch.int32]))
def test_keep_is_the_loop(setting: Setting, dtype: torch.dtype) -> None:
    n = setting.shape
    keep = setting.mask.keep(*(x.to(dtype) for x in grid(setting)))
    assert (torch.as_tensor(keep).expand(n.b, n.h, n.t, n.s).numpy() == setting.truth()).all()


@given(settings())
def test_keep_is_the_same_of_ints(setting: Setting) -> None:
    n, mask, truth = setting.shape, setting.mask, setting.truth()
    for b, h, row, j in itertools.product(range(n.b), range(n.h), range(n.t), range(n.s)):
        answer = mask.keep(b, h, row + setting.first[b], j)
        assert bool(answer) is bool(truth[b, h, row, j])


@hypothesis.settings(max_examples=400)
@given(st.one_of(settings(), settings(leaf=True)), st.integers(-6, 10), st.integers(0, 5))
def test_span_is_conservative(setting: Setting, start: int, length: int) -> None:
    """Over all batch entries and heads, at positions that rows have and at others."""
    n, mask, rows = setting.shape, setting.mask, range(start, start + length)
    span = mask.span(rows)
    for j in range(n.s):
        seen = [
            sees(setting.spec, b, h, i, j, i - setting.first[b], n.s)
            for b in range(n.b)
            for h in range(n.h)
            for i in rows
        ]
        if any(seen):
            assert span.some[0] <= j < span.some[1]
        if span.all[0] <= j < span.all[1]:
            assert all(seen)


@pytest.mark.parametrize(
    ("mask", "rows", "some", "every"),
    [
        (mh.Causal(), range(4, 8), (0, 8), (0, 5)),
        (mh.Window(left=2, right=1), range(4, 6), (2, 7), (3, 6)),
        (mh.Causal() & mh.Window(left=2), range(4, 8), (2, 8), None),
        (~mh.Causal(), range(4, 8), (5, None), (8, None)),
        (mh.Diagonal(-1), range(3, 4), (2, 3), (2, 3)),
        (mh.Prefix(3), range(9), (0, 3), (0, 3)),
        (mh.Lengths(torch.tensor([2, 5])), range(9), (0, 5), (0, 2)),
        (mh.Keys([2, 3, 4]), range(9), (2, 5), (2, 5)),
        (mh.Keys([2, 4]), range(9), (2, 5), None),
        (mh.Documents(torch.tensor([0, 0, 1, 1, 2])), range(2, 4), (2, 4), (2, 4)),
        (mh.Documents(torch.tensor([0, 0, 1, 1, 2])), range(1, 3), (0, 4), None),
        (mh.Full(), range(3), (0, None), (0, None)),
        (mh.SameToken(torch.tensor([3, 1, 1, 3, 2])), range(1, 2), (1, 3), (1, 3)),
        (mh.AfterSameToken(torch.tensor([0, 1, 0, 2, 2])), range(2, 3), (1, 3), None),
        (mh.AfterSameToken(torch.tensor([0, 0, 1, 1, 1])), range(4, 5), (3, 5), None),
    ],
    ids=str,
)
def test_span_is_tight_where_kernels_gain(
    mask: Mask, rows: range, some: tuple[int, int | None], every: tuple[int, int | None] | None
) -> None:
    """A span that is always (everything, nothing) is conservative too; these must be exact."""
    span = mask.span(rows)
    assert (span.some[0], None if span.some[1] > 1 << 50 else span.some[1]) == some
    if every is None:
        assert span.all[0] >= span.all[1]
    else:
        assert (span.all[0], None if span.all[1] > 1 << 50 else span.all[1]) == every


@given(settings())
def test_the_normal_form_is_the_mask(setting: Setting) -> None:
    n, mask = setting.shape, setting.mask
    (low, high), segments, lengths, rest = mask.normal()
    b, h, i, j = grid(setting)
    keep = torch.ones(n.b, n.h, n.t, n.s, dtype=torch.bool)
    keep &= (j - i >= low) if low is not None else True
    keep &= (j - i <= high) if high is not None else True
    for part in (*segments, *lengths, *rest):
        keep &= torch.as_tensor(part.keep(b, h, i, j))
    assert (keep.numpy() == setting.truth()).all()
    assert all(isinstance(part, mh.Documents) for part in segments)
    assert all(isinstance(part, mh.Lengths) for part in lengths)


def test_the_normal_form_gathers() -> None:
    ids, n = torch.tensor([0, 0, 1]), torch.tensor([2])
    mask = mh.Causal() & (mh.Window(left=4) & mh.Documents(ids)) & mh.Full() & ~~mh.Lengths(n)
    band, segments, lengths, rest = mask.normal()
    assert band == (-4, 0)
    assert [len(part) for part in (segments, lengths, rest)] == [1, 1, 0]
    assert mh.Full().normal().band == (None, None)
    assert (mh.Causal() | mh.Prefix(2)).normal().rest != ()


@given(settings(same_offset=True))
def test_a_drawing_is_the_mask(setting: Setting) -> None:
    """draw, at a size that's given: batch entry 0 and head 0, with keys as many as the ids speak of."""
    n, mask = setting.shape, build(setting.spec)
    rows = mask.draw(n.t, n.s, setting.offset).split("\n")
    drawn = np.array([[mark == "■" for mark in row.split(" ")] for row in rows])
    columns = n.s if mask.extent() is None else max(n.s, mask.extent()[1])
    first = setting.first[0]
    for row, j in itertools.product(range(n.t), range(n.s)):
        assert drawn[row, j] == sees(setting.spec, 0, 0, row + first, j, row, columns)


@given(settings())
def test_repr_and_html_draw_the_same_table(setting: Setting) -> None:
    mask = build(setting.spec)
    table = mask.table()
    title, *rows = repr(mask).split("\n")
    assert title == str(mask)
    assert "\n".join(rows) == mask.draw()
    assert repr(mask).count("■") == int(table.sum())
    html = mask._repr_html_()
    colours = re.findall(r'<rect [^>]*fill="(#\w+)"', html)
    assert len(colours) == table.numel()
    common = {colours[n] for n, kept in enumerate(table.flatten().tolist()) if kept}
    other = {colours[n] for n, kept in enumerate(table.flatten().tolist()) if not kept}
    assert len(common) <= 1
    assert len(other) <= 1
    assert not common & other
    assert not re.search(r"<(?!/?(figure|figcaption|code|svg|rect)\b)", html)


def test_drawings_by_hand() -> None:
    assert mh.Causal().draw(3, 3) == "■ · ·\n■ ■ ·\n■ ■ ■"
    assert mh.Causal().draw(2, 4) == "■ ■ ■ ·\n■ ■ ■ ■"
    assert mh.Causal().draw(2, 4, offset=0) == "■ · · ·\n■ ■ · ·"
    assert mh.Lengths(1, left=True).draw(2, 3) == "· · ■\n· · ■"
    assert mh.Keep(torch.tensor([[True, False], [False, True]])).draw() == "■ ·\n· ■"
    assert mh.AfterSameToken(torch.tensor([7, 8, 7, 8])).draw() == "· · · ·\n· · · ·\n· ■ · ·\n· · ■ ·"


def test_str_reads_as_written() -> None:
    mask = (mh.Causal() & mh.Window(left=3)) | ~(mh.Prefix(2) | mh.Diagonal(-1))
    assert str(mask) == "Causal() & Window(left=3, right=None) | ~(Prefix(2) | Diagonal(-1))"
    assert str(mh.Causal() & (mh.Prefix(2) | mh.Full())) == "Causal() & (Prefix(2) | Full())"
    assert str(~(~mh.Causal())) == "~~Causal()"
    assert "[64, 64]" in str(mh.Keep(torch.ones(64, 64, dtype=torch.bool)))


def test_a_new_mask_is_a_frozen_dataclass_that_prints_its_fields() -> None:
    class Every(Mask):
        step: int
        first: int = bound(default=0)

        def keep(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i - j) % self.step == 0

    mask = Every(2)
    assert (mask.names, mask.unbound, str(mask)) == (("step", "first"), {"first": 0}, "Every(2)")
    assert repr(mask & mh.Causal()).startswith("Every(2) & Causal()\n■ ·")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.step = 3


EVERY: list[Mask] = [
    mh.Full(),
    mh.Causal(),
    mh.Window(left=1),
    mh.Prefix(torch.tensor([1, 2])),
    mh.Documents(torch.tensor([0, 1]), queries=torch.tensor([1, 0])),
    mh.Lengths(torch.tensor([1, 2]), left=True),
    mh.Diagonal(2),
    mh.Keys([0, 5]),
    mh.SameToken(torch.tensor([0, 1])),
    mh.AfterSameToken(torch.tensor([0, 1])),
    mh.Keep(torch.ones(2, 2, dtype=torch.bool)),
    mh.Drop(torch.ones(2, 2, dtype=torch.bool)),
    mh.Rule(lambda b, h, i, j: i == j),
    mh.Causal() & mh.Prefix(2),
    mh.Causal() | mh.Keep(torch.ones(2, 2, dtype=torch.bool)),
    ~mh.Documents(torch.tensor([0, 1])),
]


@pytest.mark.parametrize("mask", EVERY, ids=lambda mask: str(mask))
def test_masks_are_frozen_and_compare_by_identity(mask: Mask) -> None:
    assert mask == mask
    assert mask != mask.but()
    assert len({mask, mask.but(), mask}) == 2
    for name in [f.name for f in dataclasses.fields(mask)]:  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mask, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.other = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="no truth value"):
        bool(mask)


@pytest.mark.parametrize("mask", EVERY, ids=lambda mask: str(mask))
def test_tensors_move_with_the_mask(mask: Mask) -> None:
    moved = mask.to("meta")
    assert all(x.device.type == "meta" for x in moved.tensors())
    assert all(x.device.type == "cpu" for x in mask.tensors())
    assert len(moved.tensors()) == len(mask.tensors())
    assert str(mask)  # the original still draws


TRUE = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mh.Window(left=-1), ValueError, ["left", "-1"]),
        (lambda: mh.Window(right=-3), ValueError, ["right", "-3"]),
        (lambda: mh.Window(left=1.5), TypeError, ["left", "1.5"]),
        (lambda: mh.Window(left=True), TypeError, ["True"]),
        (lambda: mh.Prefix(-1), ValueError, ["Prefix", "-1"]),
        (lambda: mh.Prefix(torch.tensor([1, -2])), ValueError, ["Prefix", "-2"]),
        (lambda: mh.Prefix(torch.tensor([[1]])), TypeError, ["Prefix", "[b]", "[1, 1]"]),
        (lambda: mh.Lengths(torch.tensor([1.0])), TypeError, ["Lengths", "float32"]),
        (lambda: mh.Lengths("3"), TypeError, ["Lengths", "'3'"]),
        (lambda: mh.Lengths(torch.tensor([True])), TypeError, ["Lengths", "bool"]),
        (lambda: mh.Diagonal(0.5), TypeError, ["Diagonal", "0.5"]),
        (lambda: mh.Keys(3), TypeError, ["Keys", "3", "Keys([...])"]),
        (lambda: mh.Keys([1, -1]), ValueError, ["Keys", "-1"]),
        (lambda: mh.Keys([0.5]), TypeError, ["Keys", "0.5"]),
        (lambda: mh.Documents([0, 1]), TypeError, ["Documents", "list"]),
        (lambda: mh.Documents(torch.zeros(2, 2, 2).long()), TypeError, ["Documents", "[2, 2, 2]"]),
        (lambda: mh.SameToken(torch.zeros(3)), TypeError, ["SameToken", "float32"]),
        (
            lambda: mh.AfterSameToken(torch.zeros(3).long(), queries=TRUE),
            TypeError,
            ["AfterSameToken", "bool"],
        ),
        (lambda: mh.Keep(torch.ones(2, 2).long()), TypeError, ["Keep", "int64"]),
        (lambda: mh.Keep(torch.ones(2, 2)), TypeError, ["Keep", "float32"]),
        (lambda: mh.Drop([[True]]), TypeError, ["Drop", "list"]),
        (lambda: mh.Keep(torch.ones(3, dtype=torch.bool)), ValueError, ["Keep", "[3]", "Lengths"]),
        (lambda: mh.Keep(torch.ones(1, 2, 3, dtype=torch.bool)), ValueError, ["Keep", "[1, 2, 3]"]),
        (lambda: mh.Rule(3), TypeError, ["Rule", "int"]),
        (lambda: mh.Causal() & TRUE, TypeError, ["Tensor", "Keep", "Drop"]),
        (lambda: TRUE & mh.Causal(), TypeError, ["Tensor", "Keep", "Drop"]),
        (lambda: TRUE | mh.Causal(), TypeError, ["Tensor", "Keep", "Drop"]),
        (lambda: mh.Causal() | None, TypeError, ["NoneType"]),
        (lambda: 1 & mh.Causal(), TypeError, ["int"]),
        (lambda: mh.Causal() and mh.Full(), TypeError, ["&"]),
    ],
)
def test_invalid_masks_raise(make: Any, error: type[Exception], words: list[str]) -> None:
    with raises(error, *words):
        make()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (mh.Keep(torch.ones(2, 6, dtype=torch.bool)), ["[2, 6]", "[5, 6]", "Lengths"]),  # [b, s]
        (mh.Drop(torch.ones(2, 6, dtype=torch.bool)), ["Drop", "[2, 6]", "Lengths"]),
        (mh.Keep(torch.ones(2, 1, 5, 4, dtype=torch.bool)), ["[2, 1, 5, 4]", "[2, 3, 5, 6]"]),
        (mh.Causal() & mh.Lengths(torch.tensor([1, 2, 3])), ["Lengths", "3", "2"]),
        (~mh.Prefix(torch.tensor([1, 2, 3])), ["Prefix", "3", "2"]),
        (mh.Documents(torch.zeros(3, 6).long()), ["Documents", "[3, 6]", "2"]),
        (mh.Causal() & ~mh.SameToken(torch.zeros(2, 5).long()), ["SameToken", "s = 6 keys", "[2, 5]"]),
        (mh.Documents(torch.zeros(6).long(), queries=torch.zeros(4).long()), ["queries", "[4]", "5"]),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_raise(mask: Mask, words: list[str]) -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    with raises(ValueError, *words):
        mh.attention(q, k, k, mask=mask)


@pytest.mark.parametrize("kind", [mh.Lengths, mh.Prefix])
def test_numbers_of_keys_are_a_tensor(kind: type[Mask]) -> None:
    with raises(TypeError, f"integer tensor [b] for {kind.__name__}, got [8, 3]", "(torch.tensor([8, 3]))."):
        kind([8, 3])  # type: ignore[call-arg]


def test_left_lengths_need_the_number_of_keys() -> None:
    with pytest.raises(ValueError, match="Lengths"):
        mh.Lengths(2, left=True).keep(0, 0, 0, 0)
    assert mh.Lengths(2, left=True, s=5).keep(0, 0, 0, 3) is True


@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto"])
@pytest.mark.parametrize(
    "answer",
    [lambda b, h, i, j: 1, lambda b, h, i, j: (i - j).float(), lambda b, h, i, j: None],
    ids=["int", "float", "None"],
)
def test_a_rule_must_return_booleans(answer: Any, kernel: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match="Rule"):
        mh.attention(q, q, q, mask=mh.Rule(answer), kernel=kernel)


@pytest.mark.parametrize("kernel", ["reference", "chunked", "sdpa", "auto"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda b, h, i, j: True,
        lambda b, h, i, j: (j <= i)[0, 0],  # [t, s]
        lambda b, h, i, j: torch.tensor(True),
        lambda b, h, i, j: j[0] >= 0,  # [1, 1, s]
    ],
    ids=["bool", "[t, s]", "[]", "[1, 1, s]"],
)
def test_a_rule_may_return_a_tensor_that_broadcasts(answer: Any, kernel: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    keep = torch.as_tensor(answer(*torch.meshgrid(*map(torch.arange, (1, 2, 3, 3)), indexing="ij")))
    expected = mh.attention(q, q, q, mask=mh.Keep(keep.expand(1, 2, 3, 3)), kernel="reference")
    got = mh.attention(q, q, q, mask=mh.Rule(answer), kernel=kernel)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto"])
def test_a_rule_of_another_shape_raises(kernel: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    rule = mh.Rule(lambda b, h, i, j: torch.ones(7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got \[7\] from Rule"):
        mh.attention(q, q, q, mask=rule, kernel=kernel)


def test_empty_ids_match_nothing() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    mask = mh.Documents(torch.zeros(0).long())
    assert not mh.attention(q, k, k, mask=mask, kernel="chunked").any()
    assert "■" not in mask.draw(3, 3)


def test_values_outside_int64_do_not_wrap() -> None:
    """Ids at the ends of int64, and windows as wide as they can be said."""
    far = torch.tensor([2**63 - 1, -(2**63), 2**63 - 1])
    assert mh.SameToken(far).draw() == "■ · ■\n· ■ ·\n■ · ■"
    assert mh.Window(left=2**40, right=2**40).draw(2, 3) == "■ ■ ■\n■ ■ ■"
    assert mh.Diagonal(2**40).draw(2, 2) == "· ·\n· ·"
