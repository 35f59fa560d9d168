"""A map over several processes equals the map of one: every statistic, mask and layout; and its errors."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import AttentionMap, Causal, Window, attention_with_map, open_run
from manyheads.statistics import TopKeys
from manyheads.viewer.pyramid import Pyramid
from tests.cases import Case, make
from tests.ranks import on_ranks
from tests.sharded import LAYOUTS, positions_of
from tests.sharded_maps import (
    CASES,
    EVERY,
    PER_QUERY,
    TILES,
    check_properties,
    compute,
    compute_more,
    fail,
    fail_alone,
    long_tensors,
    run_cases,
    save_cases,
    save_long,
    whole,
)

LONG = 8192  # tokens of a map whose shards are mapped


def close(got: Any, expected: Any, case: Case, name: str) -> None:
    """Compare trees of tensors; the keys of `top` where their weights are distinct."""
    if isinstance(expected, TopKeys):
        close(got.weights, expected.weights, case, name)
        gap = torch.nn.functional.pad(expected.weights, (0, 1)).diff(dim=-1).neg()
        before = torch.cat((gap.new_ones(*gap.shape[:-1], 1), gap[..., :-1]), -1)
        clear = (gap > 1e-3) & (before > 1e-3)
        clear[..., -1] = False  # the next weight isn't known
        assert torch.equal(got.keys[clear], expected.keys[clear]), f"{case} {name}"
        assert torch.equal(got.keys < 0, expected.keys < 0), f"{case} {name}"
    elif isinstance(expected, list | tuple):
        for n, pair in enumerate(zip(got, expected, strict=True)):
            close(*pair, case, f"{name}[{n}]")
    else:
        # Scores of 1,500 have rounding errors of 1e-4, which aren't the same in blocks of other sizes.
        tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-5
        tolerance *= 300 if case.size == "thousands" else 1
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, equal_nan=True,
            msg=lambda text: f"{case} {name}: {text}",
        )  # fmt: skip


def join(results: list[Any], layout: str, name: str) -> Any:
    """Return the rows of all ranks in the order of positions; of other results, that of rank 0."""
    if name not in PER_QUERY:
        for other in results[1:]:
            assert_same(other, results[0])
        return results[0]
    if isinstance(results[0], list):
        return [join([each[n] for each in results], layout, name) for n in range(len(results[0]))]
    if isinstance(results[0], tuple):
        return type(results[0])(*(join([each[n] for each in results], layout, name) for n in (0, 1)))
    order = torch.cat([positions_of(layout, rank, len(results)) for rank in range(len(results))]).argsort()
    return torch.cat(results, 2)[:, :, order]


def assert_same(x: Any, y: Any) -> None:
    if isinstance(x, list):
        for pair in zip(x, y, strict=True):
            assert_same(*pair)
    else:
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check(folder: Path, cases: Sequence[tuple[int, str, Case]], ranks: int) -> None:
    """Compare each case, on its number of ranks and in its layout, with the map of one process."""
    results = on_ranks(ranks, folder, run_cases, cases, timeout=240)
    for number, (n, layout, case) in enumerate(cases):
        amap, v, w_o = whole(case)
        expected = compute(amap, v, w_o)
        expected["tiles"] = [amap[index] for index in TILES]
        expected["gathered"] = expected["entropy"]
        if not number % EVERY:
            expected |= compute_more(amap)
        some = amap.only(batch=[0], heads=[1, 2])
        expected["some"] = [some[...], some.under(Causal())[...], some.received()]
        found = [results[rank][number] for rank in range(n)]
        for name in expected:
            got = join([each[name] for each in found], layout, name)
            close(got, expected[name], case, f"{layout} {n} ranks: {name}")
        for top in join([each["top"] for each in found], layout, "top"):
            picked = expected["tiles"][0].gather(-1, top.keys.clamp(min=0)).masked_fill(top.keys < 0, 0.0)
            close(top.weights, picked, case, f"{layout} {n} ranks: weights of the keys of top")


@pytest.mark.parametrize(
    "first", [pytest.param(0, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.exhaustive)]
)
def test_every_statistic_of_the_table_of_cases(first: int, tmp_path: Path) -> None:
    """On 1 to 4 ranks, in four layouts of positions."""
    check(tmp_path, [(1 + n % 4, LAYOUTS[n // 4 % 4], case) for n, case in enumerate(CASES[first::12])], 4)


@pytest.mark.full
def test_any_mask_at_any_positions(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_properties)


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, [(2, "balanced", CASES[0]), (2, "scattered", CASES[1])], 2)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_saved_maps_are_opened_as_one(tmp_path: Path) -> None:
    """From 1 to 4 ranks and any layout: the tensors bit for bit, with the mask, the bias and the sink."""
    cases = [case for case in CASES if not has_rule(case)][:24]
    chosen = [(1 + n % 4, LAYOUTS[n // 4 % 4], case) for n, case in enumerate(cases)]
    on_ranks(4, tmp_path, save_cases, tmp_path, chosen)
    for number, (ranks, layout, case) in enumerate(chosen):
        path = tmp_path / f"{number}.safetensors"
        amap, v, w_o = whole(case)
        opened = AttentionMap.open(path)
        assert len([*tmp_path.glob(f"{number}.*-of-{ranks}.safetensors")]) == ranks
        assert torch.equal(opened.problem.q, amap.problem.q)
        assert torch.equal(opened.problem.k, amap.problem.k)
        expected = compute(amap, v, w_o)
        got = compute(opened, v, w_o)
        for name, value in expected.items():
            close(got[name], value, case, f"{layout} {ranks} ranks, opened: {name}")


def has_rule(case: Case) -> bool:
    """Whether the mask of a case has a function, which can't be saved."""
    mask = make(case).arguments()["mask"]
    return mask is not None and "Rule" in str(mask)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map of 4 ranks whose tensors are long enough to be mapped, saved over another one."""
    folder = tmp_path_factory.mktemp("long")
    on_ranks(4, folder, save_long, folder, LONG, 2, 32)
    return folder / "long.safetensors"


@pytest.mark.full
def test_a_long_map_is_mapped_and_not_copied(long: Path) -> None:
    assert len([*long.parent.glob("long.*-of-4.safetensors")]) == 4  # those of the first save are removed
    q, k = long_tensors(LONG, 2, 32)
    one = attention_with_map(q, k, k, mask=Causal() & Window(left=300))[1]
    amap = AttentionMap.open(long)
    if sys.platform == "linux":
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert len(re.findall(r"-of-4\.safetensors", mapped)) >= 8  # q and k of each shard
    assert torch.equal(amap.problem.q, q)
    assert torch.equal(amap.problem.k, k)
    assert amap.tokens == tuple(f"t{n}" for n in range(LONG))
    assert amap.provenance == {"model": "an example"}
    for index in ((0, 1, slice(4000, 4200), slice(3900, 4150)), (0, 0, [8191, 0, 2048], slice(None))):
        torch.testing.assert_close(amap[index], one[index], rtol=1e-5, atol=1e-6)
    for name in ("entropy", "received", "row_max"):
        got, expected = (each.statistics(name)[name] for each in (amap, one))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    amap.problem.q[0, 0, 0, 0] = 7.0  # a private copy of a page
    assert torch.equal(AttentionMap.open(long).problem.q, q)
    assert len(open_run(long)) == 1
    del amap
    if sys.platform == "linux":
        assert "-of-4.safetensors" not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_viewer_shows_a_map_of_shards(long: Path, tmp_path: Path) -> None:
    """Its tiles, sums and weights are those of the same map in one file."""
    q, k = long_tensors(LONG, 2, 32)
    single = tmp_path / "single.safetensors"
    attention_with_map(q, k, k, mask=Causal() & Window(left=300))[1].save(single)
    pyramids = [Pyramid(open_run(path)[0].only(0, 1)) for path in (long, single)]
    for pyramid in pyramids:
        assert [*pyramid.scan()][-1] == 1.0
    for level, x, y in ((0, 3, 3), (2, 1, 1), (4, 0, 0), (pyramids[0].top, 0, 0)):
        got, expected = (pyramid.tile(level, x, y).cells for pyramid in pyramids)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert pyramids[0].weight(5000, 4990) == pytest.approx(pyramids[1].weight(5000, 4990), abs=1e-6)
    assert pyramids[0].marginals is not None
    assert pyramids[1].marginals is not None
    torch.testing.assert_close(
        tuple(pyramids[0].marginals), tuple(pyramids[1].marginals), rtol=1e-4, atol=1e-5
    )


@pytest.mark.full
def test_damaged_shards_are_a_sentence(long: Path, tmp_path: Path) -> None:
    def copy(name: str) -> tuple[Path, Path]:
        """A copy of the map, and its second shard."""
        folder = tmp_path / name
        shutil.copytree(long.parent, folder)
        return folder / long.name, next(folder.glob("long.*.2-of-4.safetensors"))

    index, shard = copy("missing")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"Expected shard 2 of 4, .*, got none\. Keep the index and"):
        AttentionMap.open(index)

    index, shard = copy("short")
    with open(shard, "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ValueError, match=r"shard 2 of 4, .*to have [\d,]+ bytes, got 100,000: it was cut"):
        AttentionMap.open(index)

    index, shard = copy("other")
    content = shard.read_bytes()
    save = shard.name.split(".")[1].encode()
    shard.write_bytes(content.replace(save, b"0" * len(save), 1))
    with pytest.raises(ValueError, match=r"shard 2 of 4, .*to belong to the save [0-9a-f]+, got '00000000'"):
        AttentionMap.open(index)

    index, shard = copy("renamed")
    shard.write_bytes(shard.with_name(shard.name.replace(".2-of", ".3-of")).read_bytes())
    with pytest.raises(ValueError, match=r"shard 2 of 4, .*to begin at token [1-9]\d*, got '[1-9]\d*'"):
        AttentionMap.open(index)

    index, shard = copy("swapped")
    third = shard.with_name(shard.name.replace(".2-of", ".3-of"))
    shard.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"shard 2 of 4, .*damaged file"):
        AttentionMap.open(index)
    with pytest.raises(ValueError, match=r"Expected the index of a map, got one of its shards"):
        AttentionMap.open(third)


# -- errors ----------------------------------------------------------------------------------------

MESSAGES = {
    "full disk": "OSError: Rank 1 can't write its shard .*2-of-2.safetensors: No space left on device",
    "full disk of the index": "OSError: Rank 0 can't write the index .*before.safetensors: No space left",
    "rule": "ValueError: .*its mask has Rule.*, whose function can't be saved",
    "folder": "FileNotFoundError: Expected a folder .*none to save map.safetensors in",
    "other path": "ValueError: Expected the same path on every rank, got .*0.safetensors on rank 0 and",
    "other index": r"ValueError: Expected the same index .*, got \(0, 0, 0\) on rank 0 and \(0, 0, 1\)",
    "index": "(ValueError: .*got on rank 1 )?IndexError: query 99 doesn't exist: t = 8",
    "other statistic": r"ValueError: Expected the same statistics .*got Top\(k=1\) on rank 0 and Top\(k=2\)",
    "statistic": "ValueError: Expected statistics among entropy, .*, got 'nothing'",
    "argument": "ValueError: Expected pooled to have at most 8 rows, as t = 8, got 99",
    "other mask": r"ValueError: .*got Mass\(mask=Diagonal\(0\), mean=False\) on rank 0",
    "failing mask": "(ValueError: .*got on rank 1 )?RuntimeError: a failure in a rule",
    "failing mask of a map": "(ValueError: .*got on rank 1 )?RuntimeError: a failure in a rule",
    "mask": "TypeError: Expected a mask for mass, got None",
    "values": r"ValueError: Expected v to be \[b, g, n, w\] = \[1, 2, 4, w\], the values of",
    "changed": "(ValueError: .*got on rank 1 )?RuntimeError: q or k was changed in place",
    "dense": "ValueError: The weights .* would take .*Read a tile",
    "pickle": "TypeError: Expected a map of one process to pickle or copy, got a ShardedMap",
    "grid": r"ValueError: Expected 9 keys for grid=\(3, 3\), got 8 of s = 8 keys",
    "image": "(ValueError: .*got on rank 1 )?IndexError: query 99 doesn't exist: t = 8",
    "xarray": r"ValueError: The tile \[1, 2, 8, 8\] would take .*Read fewer|ImportError: to_xarray needs",
    "view": "AttributeError: Expected a map of one process to view, .*and run manyheads view map.safetensors",
    "value_norm": r"AttributeError: ShardedMap has no value_norm, .*Pass them: smap.value_norms\(v, w_o\)",
    "again": r"AttributeError: ShardedMap has no again, .*AttentionMap.open\(path\).again",
    "ids": "ValueError: .*Expected ids to be .*one for each of s = 8 keys, got",
    "width": "(ValueError: .*got on rank 1 )?ValueError: Expected Window's left, .* to be at least 0",
    "rows": "ValueError: Expected the rows of rollout, e.g. rows=-1",
    "other rows": "ValueError: Expected the same rows on every rank, got one on rank 0 and another one",
    "dtype": "TypeError: Expected one of .* to store a map in, got torch.int8",
    "device": "ValueError: Expected a device with memory, got meta",
    "other dtype": "ValueError: Expected the same place on every rank, got torch.bfloat16 on rank 0 and",
    "one map": r"TypeError: Expected a ShardedMap for divergence, got an? AttentionMap.*Save both maps",
    "other shape": r"ValueError: Expected maps of one shape for divergence, got \[1, 2, 8, 8\] and",
    "other positions": "ValueError: Expected maps whose tokens are on the same ranks for divergence",
    "other call": "ValueError: Expected the same call on every rank, got one that compares statistics on",
    "unknown": "AttributeError: ShardedMap has no attribute 'nothing'",
    "lse": r"ValueError: Expected lse to be \[b, h, n\] = \[1, 2, 4\], got \[1, 2, 2\]",
    "lengths": r".*ValueError: Expected lengths of 2 ranks, 4 for rank 1, got \[4, 3\]",
    "mesh": "TypeError: Expected mesh to be a DeviceMesh, got a NoneType",
    "one lse": "ValueError: Expected the same number of log-sum-exps on every rank, got 0 on rank 0 and 1",
    "twice": "ValueError: Expected each position once, got position 0 twice",
    "gather": r"ValueError: Expected rows to be \[b, h, n, …\] with n = 4 rows of this rank, got \[1, 2, 3\]",
    "labels": "ValueError: Expected tokens to be a list of s = 8 strings",
    "head": r"IndexError: head \[5\] doesn't exist: h = 2",
    "repr": r"ShardedMap\(\[b=1, h=2, t=8, s=8\], mask=None, rank [01] of 2 with 4 tokens, float32 on cpu",
}


@pytest.mark.full
def test_errors_are_the_same_sentence_on_every_rank(tmp_path: Path) -> None:
    """And a save that fails leaves the files of the one before."""
    results = on_ranks(2, tmp_path, fail, tmp_path)
    for messages in results:
        assert messages.keys() == MESSAGES.keys()
        for name, expected in MESSAGES.items():
            assert re.match(expected, messages[name]), f"{name}: {messages[name]}"
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == 3, files
    assert AttentionMap.open(tmp_path / "before.safetensors").shape == (1, 2, 8, 8)
    assert not [*tmp_path.glob(".*.part")]


@pytest.mark.full
def test_an_error_on_one_rank_alone_ends_the_others_at_the_time_out(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, fail_alone, 2.0, timeout=2)
    assert found[1][0] == "MemoryError: out of memory"
    message, spent = found[0]
    assert message.startswith(
        "ConnectionError: Another process didn't respond within 2 s. Look for the cause"
    )
    assert "\n" not in message
    assert spent > 1.5
