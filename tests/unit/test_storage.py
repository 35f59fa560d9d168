"""Maps and runs in files: the same weights bit for bit, one sentence for what isn't such a file, no third."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import manyheads as mh
from manyheads import AttentionMap, TokenizedText, biases, masks, scores, storage
from manyheads.problem import Problem
from manyheads.storage import Entry, FileContent, StoredMap, StoredStatistics
from tests.cases import CASES, Case, build, make, specs

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(__file__).parents[1] / "data"
SPECS = specs(2, 4, 5, 7, rules=False)


def stored(problem: Problem, tokens: Any = None, provenance: Any = None) -> StoredMap:
    amap = AttentionMap.of(problem, None, tokens, provenance)
    return StoredMap(amap.problem, amap.lse, amap.tokens, amap.provenance)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def simple(
    mask: Any = None, t: int = 5, s: int = 5, dtype: torch.dtype = torch.float32, **more: Any
) -> StoredMap:
    q, k = randn(2, 4, t, 8, dtype=dtype), randn(2, 2, s, 8, dtype=dtype)
    return stored(Problem.of(q, k, k, mask=mask, **more))


def there_and_back(content: Any, path: Path) -> Any:
    storage.write(path, [Entry("layer", 0, content)])
    (entry,) = storage.read(path).entries
    assert entry[:2] == ("layer", 0)
    return entry.content


def weights(content: StoredMap) -> Tensor:
    return AttentionMap.of(*content).dense()


def same(x: Tensor, y: Tensor) -> bool:
    """The same bits, NaN included."""
    bits = [z.detach().contiguous()[..., None].view(torch.uint8) for z in (x, y)]
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(*bits)


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("case", [case for case in CASES if case.mask != "rule"], ids=str)
def test_every_case_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    inputs = make(case)
    before = stored(Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments()))
    after = there_and_back(before, tmp_path / "map.safetensors")
    old, new = before.problem, after.problem
    assert same(new.q, old.q.contiguous())
    assert same(new.k, old.k.contiguous())
    assert same(after.lse, before.lse)
    assert (new.shape, new.scale, new.softcap) == (old.shape, old.scale, old.softcap)
    assert str(new.mask) == str(old.mask)
    for part in ("bias", "sink", "offset"):
        assert fields_of(getattr(new, part)) == fields_of(getattr(old, part))
    assert torch.equal(scores.visible(new), scores.visible(old))
    # How a matrix product rounds depends on how its factors lie: they are compact in a file.
    compact = Problem.of(
        inputs.q.contiguous(), inputs.k.contiguous(), inputs.v.contiguous(), **inputs.arguments()
    )
    expected = AttentionMap.of(compact, before.lse).dense()
    assert same(weights(after), expected)
    if case.layout == "contiguous":
        assert same(weights(after), weights(before))


@given(SPECS, st.none() | st.integers(-3, 3) | st.tuples(*[st.integers(-3, 3)] * 2))
def test_masks_in_masks_come_back(tmp_path_factory: pytest.TempPathFactory, spec: Any, offset: Any) -> None:
    offset = torch.tensor(offset) if isinstance(offset, tuple) else offset
    before = simple(build(spec), t=5, s=7, offset=offset)
    after = there_and_back(before, tmp_path_factory.getbasetemp() / "masks.safetensors")
    assert fields_of(after.problem.mask) == fields_of(before.problem.mask)
    assert torch.equal(scores.visible(after.problem), scores.visible(before.problem))
    assert same(weights(after), weights(before))


@given(SPECS, st.sampled_from(["none", "alibi", "relative", "dense", "dense queries"]),
       st.lists(st.integers(0, 1), min_size=1, max_size=3, unique=True) | st.none(),
       st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True) | st.none())  # fmt: skip
def test_some_heads_and_sequences_come_back(
    tmp_path_factory: pytest.TempPathFactory, spec: Any, bias: str, batch: Any, heads: Any
) -> None:
    inputs = make(Case((2, 4, 2, 5, 7, 8, 8), bias=bias, sink="own", offset="each"))
    whole = Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments() | {"mask": build(spec)})
    amap = AttentionMap.of(whole).only(batch, heads)
    after = there_and_back(amap.stored(), tmp_path_factory.getbasetemp() / "some.safetensors")
    assert same(weights(after), amap.dense())
    again = AttentionMap.of(*after).only([0], [0])
    assert same(
        weights(there_and_back(again.stored(), tmp_path_factory.getbasetemp() / "less")), again.dense()
    )
    twice = amap.only([0], [0])
    assert same(
        weights(there_and_back(twice.stored(), tmp_path_factory.getbasetemp() / "less")), twice.dense()
    )


def test_what_is_picked_whole_is_still_shared(tmp_path: Path) -> None:
    table = mh.Keep(torch.rand(2, 1, 5, 5) < 0.6)
    maps = [AttentionMap.of(simple(table).problem).only(heads=[1, 2]) for _ in range(2)]
    storage.write(tmp_path / "run", [Entry("layer", n, amap.stored()) for n, amap in enumerate(maps)])
    assert sum(name.endswith("mask.tensor") for name in _header(tmp_path / "run")) == 1


def fields_of(value: Any) -> Any:
    """Return all fields of a mask or bias as nested tuples, those that binding fills in included."""
    if isinstance(value, masks.Mask | biases.Bias):
        return (type(value), *(fields_of(getattr(value, name)) for name in value.names))
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def test_every_mask_and_bias_has_its_word() -> None:
    """All that the library has, but for those that only share code, and those that can't be written."""
    made = {cls for module in (masks, biases) for cls in vars(module).values() if isinstance(cls, type)}
    found = {cls for base in (masks.Mask, biases.Bias) for cls in _subclasses(base)} & made
    shared, unwritten = {masks.Band, masks.Ids}, {masks.Rule, masks.Only, biases.OnlyBias}
    assert found - shared - unwritten == set(storage.WORDS)
    for cls, schema in storage.PARTS.values():
        assert set(schema) == set(cls.names) - set(cls.unbound), cls


def test_statistics_come_back(tmp_path: Path) -> None:
    tensors = {
        f"of {dtype}": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in storage.DTYPES.values()
    }
    tensors |= {"a scalar": torch.tensor(0.1), "nothing": torch.zeros(0, 3), "nan": torch.tensor([math.nan])}
    plain = {"top": 8, "names": ["a", "b"], "inner": {"é\n": None, "x": [True, 0.1, -(2**60)]}, "": "\ud800"}
    after = there_and_back(StoredStatistics(tensors, plain, ("a", "é")), tmp_path / "run.safetensors")
    assert (after.plain, after.tokens) == (plain, ("a", "é"))
    assert list(after.tensors) == list(tensors)
    assert all(same(after.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_run_comes_back_in_order(tmp_path: Path) -> None:
    labels = tuple("abcde")
    several = (tuple("abcde"), ("é", "\x00", "\ud83d", "", "🙂"))
    maps = [simple(mh.Causal()) for _ in range(3)]
    entries = [
        Entry("layers.1.attn", 0, maps[0]._replace(tokens=labels, provenance={"model": "x", "n": (1, 2)})),
        Entry("layers.0/attn", 0, maps[1]._replace(tokens=several)),
        Entry("layers.1.attn", 1, maps[2]._replace(tokens=labels)),
        Entry("", 0, StoredStatistics({"entropy": torch.ones(2, 4, 5)}, {"tokens": 5})),
    ]
    path = tmp_path / "run.safetensors"
    storage.write(path, entries, tokens=labels, provenance={"made by": "a test"})
    run = storage.read(path)
    assert [entry[:2] for entry in run.entries] == [entry[:2] for entry in entries]
    assert (run.tokens, run.provenance) == (labels, {"made by": "a test"})
    contents: list[Any] = [entry.content for entry in run.entries]
    assert [content.tokens for content in contents[:3]] == [labels, several, labels]
    assert contents[0].provenance == {"model": "x", "n": [1, 2]}
    assert all(same(weights(after), weights(before)) for after, before in zip(contents, maps, strict=False))
    assert len(_header(path)["__metadata__"]["run"]) < 2500  # equal labels are written once


def test_no_entries_is_a_run_too(tmp_path: Path) -> None:
    storage.write(tmp_path / "run", [])
    assert storage.read(tmp_path / "run") == FileContent((), None, {})


def test_a_map_saves_and_opens(tmp_path: Path) -> None:
    _, amap = mh.attention_with_map(*(randn(1, 2, 6, 4) for _ in range(3)), mask=mh.Causal())
    amap = AttentionMap.of(amap.problem, amap.lse, list("manyhe"), {"model": "none"})
    amap.save(tmp_path / "map.safetensors")
    again = AttentionMap.open(tmp_path / "map.safetensors")
    assert same(again.dense(), amap.dense())
    assert (again.tokens, again.provenance) == (tuple("manyhe"), {"model": "none"})
    again.save(tmp_path / "map.safetensors")  # over the file that it reads from
    assert same(again.dense(), amap.dense())
    assert same(AttentionMap.open(tmp_path / "map.safetensors").dense(), amap.dense())


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_is_no_single_map(tmp_path: Path, count: int) -> None:
    storage.write(tmp_path / "run", [Entry("layer", n, simple()) for n in range(count)])
    with pytest.raises(ValueError, match="open_run"):
        AttentionMap.open(tmp_path / "run")


# -- how tensors lie in a file ---------------------------------------------------------------------


def _header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    header: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header


def test_safetensors_reads_it_and_all_is_aligned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = tmp_path / "map.safetensors"
    before = simple(mh.Keep(torch.rand(5, 3) < 0.6), 5, 3, torch.float16, offset=torch.tensor([0, 1]))
    storage.write(path, [Entry("layer", 0, before)])
    tensors = load_file(path)
    assert same(tensors["0.q"], before.problem.q)
    assert same(tensors["0.lse"], before.lse)
    header = _header(path)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 64 == 56
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_views_are_stored_compactly_and_shared_tensors_once(tmp_path: Path) -> None:
    wide = randn(1, 2, 1000, 64)
    q, k = wide[:, :, :10, :8], wide[:, :, :10, :8]  # two views of the same numbers
    table = mh.Keep(torch.rand(10, 10) < 0.6)
    path = tmp_path / "map.safetensors"
    entries = [Entry("layer", n, stored(Problem.of(q, k, k, mask=table & mh.Causal()))) for n in range(3)]
    storage.write(path, entries)
    header = _header(path)
    assert sorted(header) == ["0.lse", "0.mask.left.tensor", "0.q", "1.lse", "2.lse", "__metadata__"]
    assert header["0.q"]["data_offsets"][1] - header["0.q"]["data_offsets"][0] == 2 * 10 * 8 * 4
    for entry in storage.read(path).entries:
        assert isinstance(entry.content, StoredMap)
        assert same(entry.content.problem.q, q.contiguous())
        assert entry.content.problem.q is entry.content.problem.k


def test_other_views_of_the_same_memory_are_stored_too(tmp_path: Path) -> None:
    x = randn(3, 3)
    views = {"rows": x, "columns": x.T, "first": x[:1], "bits": x.view(torch.int32)}
    after = there_and_back(StoredStatistics(views, {}), tmp_path / "run")
    assert all(same(after.tensors[name], view) for name, view in views.items())


def test_tensors_of_every_sort_are_stored_by_their_numbers(tmp_path: Path) -> None:
    z = torch.randn(1, 2, 5, 4, dtype=torch.complex64)
    negative = z.conj().imag  # a view with its sign pending, at the same place in memory as
    positive = z.imag
    assert negative.is_neg()
    with torch.inference_mode():
        inference = randn(3)
    tensors = {
        "parameter": torch.nn.Parameter(randn(3)),
        "of a graph": randn(3).requires_grad_() * 2,
        "inference": inference,
        "negative": negative,
        "positive": positive,
        "expanded": randn(1).expand(4, 3),
        "transposed": randn(4, 3).T,
    }
    after = there_and_back(StoredStatistics(tensors, {}), tmp_path / "run.safetensors")
    for name, tensor in tensors.items():
        numbers = torch.tensor(tensor.tolist())
        assert same(after.tensors[name], numbers), name
    assert after.tensors["negative"].abs().min() > 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of what is mapped")
def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    def resident() -> int:
        """Bytes of the file that are in this process's memory."""
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                inside = line.endswith(str(path))
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
        return found

    path = tmp_path / "map.safetensors"
    q = torch.zeros(1, 1, 2**17, 64)  # 32 MB
    storage.write(
        path, [Entry("layer", 0, StoredMap(Problem.of(q, q.clone(), q), torch.zeros(1, 1, 2**17), None, {}))]
    )
    (entry,) = storage.read(path).entries
    assert isinstance(entry.content, StoredMap)
    amap = AttentionMap.of(*entry.content)
    assert resident() < 2e6
    assert amap[0, 0, 1000:1004, 2000:2004].shape == (4, 4)
    assert resident() < 4e6
    amap.problem.q.sum()
    assert resident() > 30e6  # this way of looking can see it


def test_changing_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    after = there_and_back(simple(), path)
    before = path.read_bytes()
    amap = AttentionMap.of(*after)
    after.problem.q.add_(1)
    assert path.read_bytes() == before
    with pytest.raises(RuntimeError, match="in place"):
        amap.dense()


# -- writing: whole or not at all, and refusals ----------------------------------------------------


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.safetensors"
    storage.write(path, [Entry("layer", 0, simple())])
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for place in (path, tmp_path / "new.safetensors"):
        with pytest.raises(OSError, match="No space"):
            storage.write(place, [Entry("layer", 0, simple())])
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage.write(tmp_path / "map", [Entry("layer", 0, simple())])
    assert os.listdir(tmp_path) == []


def test_writing_where_no_file_can_be_raises(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="got the folder"):
        storage.write(tmp_path, [])
    with pytest.raises(FileNotFoundError, match=r"Expected a folder .*nowhere.* Create it first\.$"):
        storage.write(tmp_path / "nowhere" / "map", [])


def deep(times: int) -> masks.Mask:
    mask: masks.Mask = mh.Causal()
    for _ in range(times):
        mask = ~mask
    return mask


def nested(times: int) -> Any:
    return [] if times == 0 else [nested(times - 1)]


def kept(**tensors: Any) -> Entry:
    return Entry("layer", 0, StoredStatistics(tensors, {}))


class Own(masks.Mask):
    """A mask that a caller has written."""

    def keep(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i


def one(**fields: Any) -> Entry:
    """A map, with some of what is kept of it changed."""
    return Entry("layer", 0, simple()._replace(**fields))


REFUSED: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("rule", lambda: Entry("layer", 0, simple(mh.Rule(lambda b, h, i, j: j <= i))),
     ["layer", "Rule(<lambda>)", "function", "Keep(tensor)"]),
    ("rule within", lambda: Entry("layer", 7, simple(mh.Causal() & ~mh.Rule(lambda b, h, i, j: j <= i))),
     ["Call 7", "Rule(<lambda>)", "function", "Keep(tensor)"]),
    ("a mask of the caller's", lambda: Entry("layer", 0, simple(Own())), ["Own", "Causal", "Keep"]),
    ("depth", lambda: Entry("layer", 0, simple(deep(101))), ["nested", "100", "Keep(tensor)"]),
    ("a far window", lambda: Entry("layer", 0, simple(mh.Window(2**60 + 1))), [str(2**60 + 1)[:5], "2^60"]),
    ("a far offset", lambda: Entry("layer", 0, simple(offset=2**61)), ["2**58"]),
    ("a far offset", lambda: Entry("layer", 0, simple(offset=torch.tensor([0, -(2**61)]))), ["2**58"]),
    ("an lse of another shape", lambda: one(lse=torch.zeros(2, 4, 6)),
     ["lse", "[2, 4, 5]", "[2, 4, 6]"]),
    ("an lse of another dtype", lambda: one(lse=torch.zeros(2, 4, 5).double()),
     ["lse", "float32", "float64"]),
    ("tokens", lambda: one(tokens=("a", "b")), ["tokens", "s = 5", "2"]),
    ("tokens each", lambda: one(tokens=(tuple("abcde"),)), ["b = 2", "[5]"]),
    ("tokens each", lambda: one(tokens=(tuple("abcde"), ("a",))), ["[5, 1]"]),
    ("tokens of numbers", lambda: one(tokens=(1, 2, 3, 4, 5)), ["strings", "1"]),
    ("one string", lambda: one(tokens="abcde"), ["list of s = 5 strings", "a str"]),
    ("provenance", lambda: one(provenance={"a": {"b": torch.ones(2)}}),
     ["provenance['a']['b']", "tensor"]),
    ("provenance", lambda: one(provenance={"a": [0.0, math.nan]}),
     ["provenance['a'][1]", "nan"]),
    ("provenance", lambda: one(provenance={"a": {1: 2}}),
     ["provenance['a']", "keys that are strings", "{1: 2}"]),
    ("provenance", lambda: one(provenance={"a": 2**70}), ["2^60"]),
    ("provenance", lambda: one(provenance=["a"]), ["dictionary", "['a']"]),
    ("provenance", lambda: one(provenance={"a": nested(200)}),
     ["provenance['a']", "nested", "100"]),
    ("a meta tensor", lambda: kept(entropy=torch.zeros(3, device="meta")), ["entropy", "meta"]),
    ("a dtype", lambda: kept(entropy=torch.zeros(3, dtype=torch.complex64)), ["entropy", "complex64", "F32"]),
    ("no tensor", lambda: kept(entropy=[1.0]), ["entropy", "tensor", "list"]),
    ("an endless axis", lambda: kept(entropy=torch.zeros(0, 2**20 + 1)), ["entropy", "empty", "1048577"]),
    ("many axes", lambda: kept(entropy=torch.zeros([1] * 9)), ["entropy", "at most 8 axes", "9"]),
    ("a name", lambda: Entry("layer\n1", 0, simple()), ["printable", "'layer\\n1'"]),
    ("a name", lambda: Entry("layer\0", 0, simple()), ["printable", "'layer\\x00'"]),
    ("a name", lambda: Entry(3, 0, simple()), ["string", "3"]),  # type: ignore[arg-type]
    ("a statistic's name", lambda: kept(**{"a\tb": torch.ones(1)}), ["printable", "'a\\tb'"]),
    ("a call", lambda: Entry("layer", -1, simple()), ["call", "-1"]),
    ("a call", lambda: Entry("layer", True, simple()), ["call", "True"]),
    ("much text", lambda: Entry("", 0, StoredStatistics({}, {"text": "x" * 2**25})), ["MB", "fewer calls"]),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_unsupported_content_raises(tmp_path: Path, entry: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        storage.write(tmp_path / "map", [entry()])
    one_sentence(caught.value, words)
    assert os.listdir(tmp_path) == []


def test_a_call_twice_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call 3 of 'layer' twice"):
        storage.write(tmp_path / "map", [Entry("layer", 3, simple())] * 2)


def test_the_deepest_masks_that_are_written_are_read(tmp_path: Path) -> None:
    before = simple(deep(100))
    assert same(weights(there_and_back(before, tmp_path / "map")), weights(before))
    plain = {"a": nested(98)}
    assert there_and_back(StoredStatistics({}, plain), tmp_path / "run").plain == plain


def test_a_header_as_large_as_can_be(tmp_path: Path) -> None:
    """What is just small enough to be written can be read."""
    frame = 400
    for size in (storage.HEADER - frame, storage.HEADER - 64):
        try:
            storage.write(tmp_path / "run", [Entry("a", 0, StoredStatistics({}, {"text": "x" * size}))])
        except ValueError:
            continue
        (entry,) = storage.read(tmp_path / "run").entries
        assert isinstance(entry.content, StoredStatistics)
        assert len(entry.content.plain["text"]) == size
    assert (tmp_path / "run").stat().st_size > storage.HEADER - frame


def one_sentence(error: BaseException, words: list[str]) -> None:
    """One sentence in our own voice: raised by a check of ours, not deep inside of something else."""
    text = str(error)
    assert text.endswith("."), text
    assert "\n" not in text
    assert len(text) < 1500
    for word in words:
        assert word in text, (word, text)
    assert error.__suppress_context__ or error.__context__ is None
    link: BaseException | None = error
    while link is not None:
        for frame, _ in deque(walk_tb(link.__traceback__), maxlen=1):
            place = Path(frame.f_code.co_filename)
            assert "manyheads" in place.parts or place.parent.name == "json", (place, repr(link))
        link = link.__context__


# -- reading what isn't a file of ours -------------------------------------------------------------


def sample() -> list[Entry]:
    """Everything that version 1 had when `tests/data/run-1.safetensors` was written: nothing is added here.

    The numbers are exact in every dtype and on every machine.
    """
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    every = [
        mh.Full(), mh.Causal(), mh.Window(2, None), mh.Diagonal(-1), mh.Prefix(2),
        mh.Prefix(torch.tensor([1, 3])), mh.Lengths(3), mh.Lengths(torch.tensor([4, 2]), left=True),
        mh.Keys([0, 2]), mh.Documents(ids), mh.SameToken(ids[0], queries=ids[1, :3]), mh.AfterSameToken(ids),
        mh.Keep(torch.tensor([[True, False, True, True]] * 3)),
        mh.Drop(torch.tensor([False, False, True, False]).reshape(1, 1, 1, 4)),
        ~mh.Causal() | mh.Diagonal(0) & mh.Window(1, 1),
    ]  # fmt: skip
    dense = torch.arange(12).reshape(3, 4) / 8
    dense[0, 1] = -math.inf
    table = torch.arange(10).reshape(2, 5) / 8
    several: list[Any] = [mh.ALiBi(2), mh.Relative(table), mh.Dense(dense), None]
    offsets: list[Any] = [None, 0, torch.tensor([1, -1])]
    sinks = [None, torch.tensor([0.5, -math.inf])]
    entries = []
    for n, mask in enumerate(every):
        q = ((torch.arange(24) * 7 + n) % 11 - 5).reshape(2, 2, 3, 2) / 4  # [b, h, t, d]
        k = ((torch.arange(16) * 5 + n) % 7 - 3).reshape(2, 1, 4, 2) / 4  # [b, g, s, d]
        dtype = mh.shapes.DTYPES[n % 4]
        problem = Problem.of(
            q.to(dtype), k.to(dtype), k.to(dtype), mask=mask, bias=several[n % 4], offset=offsets[n % 3],
            sink=sinks[n % 2], scale=0.5 + n / 4, softcap=None if n % 2 else 3.0,
        )  # fmt: skip
        content = stored(problem, ["the", "train", "left", "on"] if n % 2 else None, {"number": n})
        entries.append(Entry(f"layers.{n}.attn", n % 2, content))
    tensors = {"entropy": torch.arange(12.0).reshape(2, 2, 3), "keys": torch.tensor([[-1, 0]]).long()}
    kept = StoredStatistics(tensors, {"top": 8, "of": ["a", None, 0.5]}, ("the", "train"))
    return [*entries, Entry("layers.0.attn", 5, kept)]


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("files") / "run.safetensors"
    storage.write(path, sample(), tokens=("a", "b"), provenance={"made by": "a test"})
    return path.read_bytes()


def take_apart(raw: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header but for the run, the run, and the tensors' bytes."""
    stop = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:stop])
    return header, json.loads(header["__metadata__"].pop("run")), raw[stop:]


def put_together(header: dict[str, Any], run: Any, data: bytes) -> bytes:
    text = run if isinstance(run, str) else json.dumps(run)
    marked = header | {"__metadata__": header["__metadata__"] | {"run": text}}
    blob = json.dumps(marked).encode()
    blob += b" " * (-len(blob) % 8)  # as every writer does, so that numbers are aligned
    return len(blob).to_bytes(8, "little") + blob + data


def refuses(path: Path, raw: bytes, words: list[str]) -> None:
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r".") as caught:
        storage.read(path)
    assert str(caught.value).startswith(str(path))
    one_sentence(caught.value, words)


def test_taken_apart_and_put_together_is_the_same(whole_file: bytes, tmp_path: Path) -> None:
    """The forger's tools leave nothing behind, so that what is refused below is refused for its edit."""
    (tmp_path / "run").write_bytes(put_together(*take_apart(whole_file)))
    usable(storage.read(tmp_path / "run"))


def test_reading_where_there_is_no_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Expected a file .*/nothing, got none\.$"):
        storage.read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"Expected a file .*, got a folder\.$"):
        storage.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="Expected a file"):
        storage.read(str(tmp_path / "a\0b"))
    if hasattr(os, "mkfifo"):  # which would wait for ever for somebody to write
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FileNotFoundError, match="Expected a file"):
            storage.read(tmp_path / "pipe")


def test_cut_short_anywhere(whole_file: bytes, tmp_path: Path) -> None:
    stop = 8 + int.from_bytes(whole_file[:8], "little")
    cuts = {*range(20), *range(20, stop, 97), *range(stop - 3, stop + 3), *range(stop, len(whole_file), 101)}
    for cut in sorted(cuts):
        refuses(tmp_path / "run", whole_file[:cut], ["isn't a safetensors file", "truncated"])
    refuses(tmp_path / "run", whole_file + b"\0", ["isn't a safetensors file"])


class Trap:
    """Pickled, it would leave a mark when opened."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def test_files_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    for raw in (b"{}", b"\x89PNG\r\n\x1a\n" + bytes(100), b"x" * 1000, pickle.dumps(Trap())):
        refuses(path, raw, ["isn't a safetensors file"])
    assert not (tmp_path / "sprung").exists()
    torch.save(torch.ones(3), path)
    refuses(path, path.read_bytes(), ["isn't a safetensors file"])
    not_ours = ["but not a manyheads file"]
    refuses(path, save({"q": torch.ones(3)}), [*not_ours, "got none."])
    refuses(path, save({"q": torch.ones(3)}, {"format": "pt"}), [*not_ours, "{'format': 'pt'}"])
    ours = {"format": "manyheads", "version": "1", "run": "{}"}
    for wrong in (
        {"format": "many"},
        {"version": ""},
        {"version": "0"},
        {"version": "1.0"},
        {"version": "²"},
    ):
        refuses(path, save({}, ours | wrong), not_ours)
    for missing in ours:
        refuses(path, save({}, {name: text for name, text in ours.items() if name != missing}), not_ours)
    for version in ("5", "10", "9" * 5000):
        refuses(path, save({}, ours | {"version": version}), [f"version {version[:9]}", "up to 4", "Upgrade"])
    refuses(path, (2**63).to_bytes(8, "little") + b"{}", ["header has 9,223,372,036,854,775,808"])
    refuses(path, (2**25 + 1).to_bytes(8, "little") + bytes(2**25 + 1), ["header has 33,554,433"])


def test_broken_json(whole_file: bytes, tmp_path: Path) -> None:
    header, _, data = take_apart(whole_file)
    texts = (
        "",
        "{",
        "{}",
        "[]",
        "null",
        "1" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
        "NaN",
        '"\\ud800"',
        "\0",
    )
    for text in texts:
        refuses(tmp_path / "run", put_together(header, text, data), ["isn't a valid manyheads file"])


def changed(n: int, /, **fields: Any) -> Callable[[Any, Any], None]:
    """An edit of the problem of entry n."""

    def edit(run: Any, header: Any) -> None:
        run["entries"][n]["map"].update(fields)

    return edit


def masked(n: int, /, **fields: Any) -> Callable[[Any, Any], None]:
    """An edit of the mask of entry n."""

    def edit(run: Any, header: Any) -> None:
        run["entries"][n]["map"]["mask"].update(fields)

    return edit


def top(*path: Any, to: Any) -> Callable[[Any, Any], None]:
    """An edit at this path of the run."""

    def edit(run: Any, header: Any) -> None:
        for step in path[:-1]:
            run = run[step]
        run[path[-1]] = to

    return edit


def without(*path: Any) -> Callable[[Any, Any], None]:
    def edit(run: Any, header: Any) -> None:
        for step in path[:-1]:
            run = run[step]
        del run[path[-1]]

    return edit


def retyped(name: str, **said: Any) -> Callable[[Any, Any], None]:
    """An edit of what the header says of a tensor."""

    def edit(run: Any, header: Any) -> None:
        header[name].update(said)

    return edit


def added(run: Any, header: Any) -> None:
    header["left over"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def twice(run: Any, header: Any) -> None:
    run["entries"].append(copy.deepcopy(run["entries"][0]))


def at(name: str) -> dict[str, str]:
    return {"tensor": name}


def chain(times: int, word: str = "Not", field: str = "mask") -> Any:
    tree: Any = {"is": "Causal"}
    for _ in range(times):
        tree = {"is": word, field: tree}
    return tree


CAUSAL = {"is": "Causal"}
HOSTILE: list[tuple[str, Callable[[Any, Any], None], list[str]]] = [
    # what a run must give
    ("a field less", without("tokens"), ["Expected a run to have", "tokens"]),
    ("a field more", top("more", to=1), ["Expected a run to have", "more"]),
    ("entries", top("entries", to={}), ["entries", "list", "{}"]),
    ("an entry", top("entries", 3, to=None), ["entry 3", "None"]),
    ("an entry of both kinds", top("entries", 3, "statistics", to={}), ["entry 3", "statistics"]),
    ("a name", top("entries", 3, "name", to=3), ["entry 3", "name", "str"]),
    ("a name", top("entries", 3, "name", to="../\n"), ["printable", "'../\\n'"]),
    ("a call", top("entries", 3, "call", to=-1), ["call", "-1"]),
    ("a call", top("entries", 3, "call", to=True), ["call", "int", "True"]),
    ("a call twice", twice, ["call 0 of 'layers.0.attn' twice"]),
    ("provenance", top("provenance", to=None), ["provenance", "dict", "None"]),
    ("provenance", top("provenance", to={"a": math.inf}), ["provenance['a']", "finite", "inf"]),
    ("tokens of statistics", top("entries", 15, "tokens", to=3), ["entry 15", "tokens 3", "has 3 lists"]),
    ("plain", top("entries", 15, "plain", to={"a": [math.nan]}), ["plain['a'][0]", "finite", "nan"]),
    ("plain", top("entries", 15, "plain", to=[]), ["entry 15", "plain", "dict", "[]"]),
    # tokens
    ("labels", top("labels", to=[["a", 1]]), ["tokens", "strings", "1"]),
    ("labels", top("labels", to=["abc"]), ["tokens", "strings", "a str"]),
    ("a text", top("labels", 0, to={"pieces": ["a"]}), ["a text to have pieces, special", "['pieces']"]),
    ("a text", top("labels", 0, to={"pieces": [1], "special": []}), ["pieces to have only str", "an int"]),
    ("a text", top("labels", 0, to={"pieces": ["a"], "special": [3]}), ["special", "(3,)"]),
    ("a text", top("labels", 0, to={"pieces": ["a"], "special": []}), ["entry 1", "s = 4", "1"]),
    ("tokens of the run", top("tokens", to=7), ["tokens 7", "has 3 lists"]),
    ("tokens of the run", top("tokens", to="a"), ["tokens", "int or null", "'a'"]),
    ("tokens too few", top("labels", 0, to=["a"]), ["entry 1", "tokens", "s = 4", "1"]),
    ("tokens for three", top("labels", 0, to=[list("abcd")] * 3), ["entry 1", "b = 2", "[4, 4, 4]"]),
    # tensors that aren't there, are left over, lie
    ("no such tensor", changed(0, q=at("../../etc/passwd")), ["'../../etc/passwd'", "isn't in the file"]),
    ("a tensor unnamed", changed(0, q="0.q"), ["entry 0", "q", "Tensor", "'0.q'"]),
    ("a tensor by number", changed(0, q=at(0)), ["entry 0", "tensor", "str", "0"]),  # type: ignore[arg-type]
    ("two tensors", changed(0, q={"tensor": "0.q", "and": "0.k"}), ["entry 0", "tensor", "'and'"]),
    ("no tensor", changed(0, q=None), ["entry 0", "q", "Tensor", "None"]),
    ("a tensor left over", added, ["no entry", "'left over'"]),
    ("a tensor left over", changed(0, k=at("0.q")), ["no entry", "'0.k'"]),
    ("no longer needed", changed(12, mask=None), ["no entry", "'12.mask.tensor'"]),
    ("a dtype", retyped("0.q", dtype="I16"), ["entry 0", "q", "int16"]),
    ("a dtype", retyped("2.q", dtype="F16"), ["isn't a safetensors file"]),
    ("a dtype", retyped("15.keys", dtype="F8_E4M3", shape=[16]), ["15.keys", "F8_E4M3"]),
    ("a dtype", retyped("1.q", dtype="F16"), ["entry 1", "float16", "bfloat16"]),
    ("a shape", retyped("0.q", shape=[2, 2, 7]), ["isn't a safetensors file"]),
    ("a shape", retyped("0.q", shape=[2, 3, 2, 2]), ["entry 0", "ALiBi", "h = 3"]),
    ("a shape", retyped("0.q", shape=[24]), ["entry 0", "q", "[24]"]),
    ("a shape", retyped("0.lse", shape=[2, 3, 2]), ["entry 0", "lse", "[2, 3, 2]"]),
    ("a shape", retyped("15.keys", shape=[1] * 8 + [2]), ["15.keys", "at most 8 axes", "9"]),
    # numbers
    ("scale", changed(0, scale=math.nan), ["entry 0", "scale", "nan"]),
    ("scale", changed(0, scale=None), ["entry 0", "scale", "float or int", "None"]),
    ("offset", changed(0, offset=None), ["entry 0", "offset", "None"]),
    ("offset", changed(0, offset=0.5), ["entry 0", "offset", "0.5"]),
    ("offset", changed(0, offset=2**60 + 1), ["entry 0", "2^60"]),
    ("offset", changed(2, offset=at("2.q")), ["entry 2", "offset", "[b] = [2]"]),
    ("sink", changed(0, sink=0.5), ["entry 0", "sink", "Tensor or null", "0.5"]),
    ("sink", changed(0, sink=at("9.mask.ids")), ["entry 0", "sink", "floats", "int64"]),
    # masks and biases
    ("a mask unknown", changed(0, mask={"is": "Rule", "fn": "os.system"}), ["entry 0", "one of", "'Rule'"]),
    ("a mask by its path", changed(0, mask={"is": "manyheads.masks.Causal"}), ["entry 0", "'manyheads"]),
    ("a mask of no word", changed(0, mask={"is": None}), ["entry 0", "None"]),
    ("a mask as text", changed(0, mask="Causal()"), ["entry 0", "mask", "Mask or null", "'Causal()'"]),
    ("a bias as mask", changed(0, mask={"is": "ALiBi", "slopes": at("0.bias.slopes")}), ["entry 0", "mask"]),
    ("a mask as bias", changed(0, bias=CAUSAL), ["entry 0", "bias", "Bias or null"]),
    ("a field more", changed(0, mask=CAUSAL | {"n": 1}), ["entry 0", "Causal", "no fields", "['n']"]),
    ("a field less", changed(0, mask={"is": "Window", "left": 1}), ["entry 0", "Window", "right"]),
    ("a bound field", masked(12, first=3), ["entry 12", "Keep", "first"]),
    ("a class's secret", masked(12, __class__=3), ["entry 12", "Keep", "__class__"]),
    ("window", masked(2, left=-1), ["entry 2", "Window's left", "-1"]),
    ("window", masked(2, left=2**61), ["entry 2", "2^60"]),
    ("window", masked(2, left=at("0.q")), ["entry 2", "left", "int or null", "0.q"]),
    ("prefix", masked(5, n=at("0.q")), ["entry 5", "Prefix", "float16"]),
    ("lengths", masked(6, left=1), ["entry 6", "left", "bool", "1"]),
    ("keys", masked(8, keys=[2**61]), ["entry 8", "2^60"]),
    ("keys", masked(8, keys=["x" * 5000]), ["entry 8", "Keys", "…."]),
    ("documents", masked(9, queries=at("9.mask.ids")), ["entry 9", "queries", "[2, 4]", "t = 3"]),
    ("documents", masked(9, ids=None), ["entry 9", "ids", "Tensor", "None"]),
    ("keep", masked(12, tensor=at("13.mask.tensor")), ["no entry", "'12.mask.tensor'"]),
    ("keep", retyped("12.mask.tensor", shape=[4, 3]), ["entry 12", "Keep", "[4, 3]"]),
    ("and", changed(0, mask={"is": "And", "left": CAUSAL, "right": None}), ["entry 0", "right", "Mask"]),
    ("masks in masks", changed(0, mask=chain(101)), ["entry 0", "nested", "100"]),
    ("masks in tensors", changed(0, q=chain(300, "x", "tensor")), ["entry 0"]),
    ("alibi", changed(0, bias={"is": "ALiBi", "slopes": 8}), ["entry 0", "slopes", "Tensor", "8"]),
    ("dense", retyped("2.bias.values", shape=[4, 3]), ["entry 2", "Dense", "[4, 3]"]),
    # statistics
    ("statistics", top("entries", 15, "statistics", to=[]), ["entry 15", "statistics", "dict", "[]"]),
    ("statistics", top("entries", 15, "statistics", "keys", to=1), ["entry 15", "keys", "Tensor", "1"]),
    ("statistics", top("entries", 15, "statistics", "a\nb", to=at("0.q")), ["printable", "a\\nb"]),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused(
    whole_file: bytes, tmp_path: Path, edit: Callable[[Any, Any], None], words: list[str]
) -> None:
    header, run, data = take_apart(whole_file)
    edit(run, header)
    refuses(tmp_path / "run", put_together(header, run, data), words)


BAD_NUMBERS = [
    ("12.mask.tensor", b"\x02", ["12.mask.tensor", "boolean", "0 and 1"]),
    ("0.bias.slopes", np.float32(math.nan).tobytes(), ["entry 0", "ALiBi", "finite", "nan"]),
    ("2.bias.values", np.float32(math.inf).tobytes(), ["entry 2", "Dense", "+inf"]),
    ("2.bias.values", np.float32(math.nan).tobytes(), ["entry 2", "Dense", "NaN"]),
    ("1.bias.table", np.float32(math.inf).tobytes(), ["entry 1", "Relative", "finite", "inf"]),
    ("1.sink", np.float32(math.nan).tobytes(), ["entry 1", "sink", "nan"]),
    ("1.sink", np.float32(math.inf).tobytes(), ["entry 1", "sink", "inf"]),
    ("2.offset", np.int64(-(2**62)).tobytes(), ["entry 2", "2**58"]),
    ("5.mask.n", np.int64(-1).tobytes(), ["entry 5", "Prefix", "-1"]),
]


@pytest.mark.parametrize(("name", "number", "words"), BAD_NUMBERS, ids=[row[0] for row in BAD_NUMBERS])
def test_numbers_that_cannot_be(
    whole_file: bytes, tmp_path: Path, name: str, number: bytes, words: list[str]
) -> None:
    header, run, data = take_apart(whole_file)
    start = header[name]["data_offsets"][0]
    refuses(
        tmp_path / "run",
        put_together(header, run, data[:start] + number + data[start + len(number) :]),
        words,
    )


def test_an_empty_tensor_has_no_endless_axis(tmp_path: Path) -> None:
    header, run, data = take_apart(made_bytes(tmp_path, [kept(nothing=torch.zeros(0, 3))]))
    for shape in ([0, 2**20 + 1], [0, 2**63], [2**40, 0]):
        header["0.nothing"]["shape"] = shape
        refuses(tmp_path / "run", put_together(header, run, data), ["0.nothing", "empty", "1048576"])


def made_bytes(folder: Path, entries: list[Entry]) -> bytes:
    storage.write(folder / "made", entries)
    return (folder / "made").read_bytes()


def test_a_misplaced_tensor(tmp_path: Path) -> None:
    """Its numbers don't begin at a multiple of their size."""
    tensors = {"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(2)}
    header, run, data = take_apart(made_bytes(tmp_path, [kept(**tensors)]))
    assert header["0.b"]["data_offsets"] == [0, 8]
    header["0.a"]["data_offsets"], header["0.b"]["data_offsets"] = [0, 1], [1, 9]
    refuses(tmp_path / "run", put_together(header, run, data[8:] + data[:8]), ["0.b", "multiple"])


# -- at random -------------------------------------------------------------------------------------


def usable(run: FileContent) -> None:
    """Everything in it can be computed."""
    for entry in run.entries:
        if isinstance(entry.content, StoredStatistics):
            assert all(tensor.numel() == 0 or str(tensor.sum()) for tensor in entry.content.tensors.values())
            continue
        amap = AttentionMap.of(*entry.content)
        if math.prod(amap.shape) > 10_000:
            continue
        assert amap.dense().shape == amap.shape
        assert amap.entropy().shape == amap.shape[:3]
        assert amap.problem.mask is None or amap.problem.mask.normal()


def read_or_refuse(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    refused: ValueError | None = None
    try:
        usable(storage.read(path))
    except ValueError as error:
        refused = error
    if refused is not None:
        one_sentence(refused, [str(path)])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "run"


FUZZ = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FUZZ
@given(st.data())
def test_flipped_bytes(whole_file: bytes, scratch: Path, data: st.DataObject) -> None:
    raw = bytearray(whole_file)
    stop = 8 + int.from_bytes(raw[:8], "little")
    place = st.integers(0, 7) | st.integers(8, stop - 1) | st.integers(stop, len(raw) - 1)
    for where, byte in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=3)):
        raw[where] = byte
    read_or_refuse(scratch, bytes(raw))


@FUZZ
@given(st.data())
def test_pieces_cut_out_and_put_in(whole_file: bytes, scratch: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole_file)))
    stop = data.draw(st.integers(start, min(start + 200, len(whole_file))))
    put = data.draw(st.binary(max_size=20))
    read_or_refuse(scratch, whole_file[:start] + put + whole_file[stop:])


ANYTHING = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 2**60, 2**63, -(2**63), 10**25, 0.5, -0.0, 1e308,
                     math.nan, math.inf, "", "Causal", "Keep", "F16", "BOOL", "0.q", "12.mask.tensor"])
    | st.builds(at, st.sampled_from(["0.q", "0.lse", "9.mask.ids", "12.mask.tensor", "5.mask.n", "1.sink"]))
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["is", "tensor", "left", "mask", "n", "ids"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a JSON tree."""
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from places(inner, (*path, step))


@FUZZ
@given(st.data())
def test_edited_json(whole_file: bytes, scratch: Path, data: st.DataObject) -> None:
    header, run, tensors = take_apart(whole_file)
    both = {"run": run, "header": header}
    for _ in range(data.draw(st.integers(1, 2))):
        everywhere = list(places(both))
        path = data.draw(st.sampled_from(everywhere))
        parent: Any = both
        for step in path[:-1]:
            parent = parent[step]
        match data.draw(st.sampled_from(["change", "move", "remove", "copy"])):
            case "change":
                parent[path[-1]] = data.draw(ANYTHING)
            case "move":  # something else of the file's own
                found: Any = both
                for step in data.draw(st.sampled_from(everywhere)):
                    found = found[step]
                parent[path[-1]] = copy.deepcopy(found)
            case "remove" if len(path) > 1:
                del parent[path[-1]]
            case "copy" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[path[-1]]))
    if isinstance(both["header"], dict) and isinstance(both["header"].get("__metadata__"), dict):
        read_or_refuse(scratch, put_together(both["header"], both["run"], tensors))


# -- what later versions must read -----------------------------------------------------------------


def test_version_1_is_read_for_ever() -> None:
    """`sample()` as version 1 wrote it: no later version may need another file."""
    run = storage.read(DATA / "run-1.safetensors")
    made = sample()
    assert (run.tokens, run.provenance) == (("a", "b"), {"made by": "manyheads"})
    assert [entry[:2] for entry in run.entries] == [entry[:2] for entry in made]
    for after, before in zip(run.entries, made, strict=True):
        if isinstance(after.content, StoredStatistics) or isinstance(before.content, StoredStatistics):
            assert isinstance(after.content, StoredStatistics)
            assert isinstance(before.content, StoredStatistics)
            assert after.content.plain == before.content.plain
            assert after.content.tokens == before.content.tokens
            assert all(same(after.content.tensors[name], x) for name, x in before.content.tensors.items())
            continue
        old, new = before.content.problem, after.content.problem
        for part in ("mask", "bias", "sink", "offset", "scale", "softcap"):
            assert fields_of(getattr(new, part)) == fields_of(getattr(old, part))
        assert after.content[2:] == before.content[2:]  # tokens and provenance
        # Where exp and sums may differ in their last bit from one machine to the next.
        torch.testing.assert_close(weights(after.content), weights(before.content))


def test_a_map_of_version_1_is_read_for_ever() -> None:
    amap = AttentionMap.open(DATA / "map-1.safetensors")
    assert amap.shape == (1, 1, 3, 3)
    assert amap.tokens == ("the", "train", "left")
    assert amap.provenance == {"model": "an example"}
    score = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [3.0, 0.0, 1.0]])  # q·k, scale 1
    expected = score.masked_fill(~torch.ones(3, 3).tril().bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(amap.dense()[0, 0], expected)


def test_a_map_of_version_2_is_read_for_ever() -> None:
    amap = AttentionMap.open(DATA / "map-2.safetensors")
    assert amap.tokens == TokenizedText(("[CLS]", "né", " 机", "", "[SEP]"), (0, 4))
    assert amap.shape == (1, 1, 5, 5)


def test_a_map_of_version_3_is_read_for_ever() -> None:
    amap = AttentionMap.open(DATA / "map-3.safetensors")
    assert amap.shape == (1, 2, 3, 3)
    assert amap.value_norm is not None
    assert amap.value_norm.tolist() == [[[5.0, 13.0, 0.0]]]  # of the values [3, 4], [5, 12] and [0, 0]


def test_a_map_of_version_4_is_read_for_ever() -> None:
    """It is that of version 1, in two shards."""
    amap, before = (AttentionMap.open(DATA / f"map-{version}.safetensors") for version in (4, 1))
    assert (amap.tokens, amap.provenance) == (before.tokens, before.provenance)
    torch.testing.assert_close(amap.dense(), before.dense())
    with pytest.raises(ValueError, match="Expected the index of a map, got one of its shards"):
        AttentionMap.open(DATA / "map-4.00000004.1-of-2.safetensors")


@pytest.mark.parametrize("name", ["map-1", "map-2"])
def test_maps_of_earlier_versions_have_no_norms_of_values(name: str) -> None:
    assert AttentionMap.open(DATA / f"{name}.safetensors").value_norm is None


def test_norms_of_values_come_back(tmp_path: Path) -> None:
    problem = simple(mh.Causal()).problem
    norm = torch.rand(4, 2, 5)[::2]  # not contiguous
    AttentionMap.of(problem, value_norm=norm).save(tmp_path / "map")
    assert _header(tmp_path / "map")["__metadata__"]["version"] == "3"
    after = AttentionMap.open(tmp_path / "map").value_norm
    assert after is not None
    assert same(after, norm.contiguous())
    AttentionMap.of(problem).save(tmp_path / "map")  # older versions read files without norms
    assert _header(tmp_path / "map")["__metadata__"]["version"] == "1"
    assert AttentionMap.open(tmp_path / "map").value_norm is None


@pytest.mark.parametrize("wrong", [torch.rand(2, 4, 5), torch.rand(2, 2, 5).double(), torch.rand(2, 5)])
def test_norms_of_values_of_another_shape_or_dtype_are_refused(tmp_path: Path, wrong: Tensor) -> None:
    from safetensors.torch import load_file, save

    path = tmp_path / "map.safetensors"
    with pytest.raises(ValueError, match=r"Expected value_norm to be torch.float32, \[b, g, s\]"):
        storage.write(path, [Entry("layer", 0, simple()._replace(value_norm=wrong))])
    storage.write(path, [Entry("layer", 0, simple()._replace(value_norm=torch.rand(2, 2, 5)))])
    tensors = load_file(path) | {"0.value_norm": wrong}
    refuses(path, save(tensors, _header(path)["__metadata__"]), ["Expected value_norm to be torch.float32"])


def test_tokens_with_their_text(tmp_path: Path) -> None:
    text, other = TokenizedText(("[CLS]", "né", " 机", "", '\n"\ud800'), (0,)), TokenizedText(tuple("abcde"))
    amap = AttentionMap.of(Problem.of(*(randn(2, 1, 5, 4) for _ in range(3))))
    for tokens in (text, (text, other), (text, tuple("abcde")), tuple("abcde")):
        amap.labelled(tokens).save(tmp_path / "map")
        version = _header(tmp_path / "map")["__metadata__"]["version"]
        assert version == (
            "1" if tokens == tuple("abcde") else "2"
        )  # older versions read files without texts
        assert AttentionMap.open(tmp_path / "map").tokens == tokens
    with pytest.raises(ValueError, match="s = 5"):
        amap.labelled(other[:4])


def test_the_page_on_the_format_is_right(tmp_path: Path) -> None:
    """Its example can be read, and it has every word."""
    from safetensors.torch import save

    page = (DATA.parents[1] / "docs" / "format.md").read_text("utf-8")
    run = page.split("```json")[1].split("```")[0]
    tensors = {"0.q": randn(1, 1, 3, 2), "0.k": randn(1, 1, 3, 2), "0.lse": randn(1, 1, 3)}
    tensors |= {"0.bias.slopes": randn(1), "1.entropy": randn(1, 1, 3)}
    (tmp_path / "run").write_bytes(save(tensors, {"format": "manyheads", "version": "1", "run": run}))
    found = storage.read(tmp_path / "run")
    usable(found)
    assert isinstance(found.entries[0].content, StoredMap)
    assert str(found.entries[0].content.problem.mask) == "Causal() & Window(left=255, right=None)"
    table = page.split("## Masks and biases")[1].split("## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    documented = {word: set(_quoted(fields)) for words, fields in rows for word in _quoted(words)}
    assert documented == {word: set(schema) for word, (_, schema) in storage.PARTS.items()}
    assert f"dtypes are\n  {', '.join(storage.DTYPES)}." in page


def _quoted(text: str) -> list[str]:
    """The names between backticks: not shapes."""
    return [word for word in text.split("`")[1::2] if word.isidentifier()]


def test_safetensors_is_loaded_when_a_file_is_opened() -> None:
    code = (
        "import sys; from manyheads import storage; assert 'safetensors' not in sys.modules;"
        f"storage.read({str(DATA / 'map-1.safetensors')!r}); assert 'safetensors' in sys.modules"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
