"""What the tests of maps over ranks compute on each rank, and on one process."""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import manyheads as mh
from manyheads import AttentionMap, Causal, Diagonal, SameToken, Window, measures, shards, storage
from manyheads.distributed import balanced_positions, sharded_map
from manyheads.distributed.sharded_map import ShardedMap
from tests.cases import FACTORS, Case, build, make, pairwise, specs
from tests.sharded import TOKENS, positions_of, raise_on_rank_1

SIZES = (
    (2, 4, 2, 24, 24, 8, 8),
    (1, 6, 1, 24, 24, 5, 3),
    (1, 3, 3, 24, 24, 16, 16),
)
CASES = pairwise(FACTORS | {"sizes": SIZES, "offset": ("default",)}, seed=11)
IDS = torch.tensor([n * n % 5 for n in range(TOKENS)])
INSIDE = (Diagonal(-1), SameToken(IDS) & Causal() & ~Diagonal(0), Window(left=3, right=2) | mh.Keys([0]))
EVERY = 3  # of the cases, one in this many has `compute_more`
TILES: tuple[Any, ...] = (
    (),
    (0, -1, 5),
    (..., slice(3, 20, 4), [7, 2, 2]),
    (slice(None), [1, 0], slice(None), -1),
    (0, slice(1, None), torch.tensor([23, 0, 11]), slice(4, 9)),
    (0, 0, slice(5, 5)),
)


def compute(amap: Any, v: Tensor, w_o: Tensor) -> dict[str, Any]:
    """Every statistic of a map or a sharded map."""
    found: dict[str, Any] = amap.statistics(
        "entropy", "distance", "row_max", "logits_max", "sink_weight", "divergence",
        received=[(), 5, {"normalize": "age"}, (7, "age")], top=[1, 5, 30], mass=[(each,) for each in INSIDE],
        pooled=[(4, 6), (4, 6, "max"), (5, 7), (5, 7, "max"), (24, 24)],
    )  # fmt: skip
    found["value_norms"] = amap.value_norms(v, w_o)
    found["mean mass"] = [amap.mass(each, mean=True) for each in INSIDE]
    found["has keys"] = [amap.masses(each)[1] for each in INSIDE]
    found["first key"] = amap.mass(amap.first_key())
    found["lse"] = amap.lse
    return found


def compute_more(amap: Any) -> dict[str, Any]:
    """Head scores, related maps and images of a map or a sharded map, which take many rounds of the keys."""
    found: dict[str, Any] = {}
    layers = [amap, amap.under(Causal())]
    found["head scores"] = [score.mean_weight(amap, IDS) for score in measures.SCORES.values()]
    found["head scores"].append(measures.local(amap, 2))
    found["rollout"] = [measures.rollout(layers, [-1, 5]), measures.rollout_mean(layers, slice(3, None))]
    found["rollout"].append(measures.rollout(layers[::-1], 7))
    stored = amap.to(torch.bfloat16)
    found["between maps"] = [amap.divergence(layers[1]), stored.divergence(layers[1])]
    found["stored"] = [stored.received(), stored.compact(always=True).logits_max()]
    found["images"] = [amap.image(5, [4, 3, 2, 9, 8, 7], (2, 3)), amap.image([0, -1], grid=(4, 6))]
    found["images"].append(amap.to_circuitsvis(max_bytes=1e6)["attention"])
    if find_spec("xarray") is not None:
        tile = amap.to_xarray(0, [1, 0], slice(3, 9))
        assert tile.dims == ("head", "query", "key")
        found["images"].append(torch.from_numpy(tile.values))
    return found


PER_QUERY = {"entropy", "distance", "row_max", "sink_weight", "top", "mass", "has keys", "first key", "lse"}


def run_cases(mesh: DeviceMesh, cases: Sequence[tuple[int, str, Case]]) -> list[dict[str, Any] | None]:
    """The statistics of each case on its number of ranks; None on other ranks."""
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, mesh.size() + 1)}
    results: list[dict[str, Any] | None] = []
    for ranks, layout, case in cases:
        if meshes[ranks].get_coordinate() is None:
            results.append(None)
            continue
        smap, v, w_o = sharded(meshes[ranks], case, layout)
        found = compute(smap, v, w_o)
        found["tiles"] = [smap[index] for index in TILES]
        found["gathered"] = smap.gather(found["entropy"])
        if not len(results) % EVERY:
            found |= compute_more(smap)
        some = smap.only(batch=[0], heads=[1, 2])
        found["some"] = [some[...], some.under(Causal())[...], some.received()]
        assert some.heads == (1, 2)
        results.append(found)
    return results


def arguments_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    inputs = make(case)
    arguments = {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.arguments().items()}
    arguments.pop("offset")
    if arguments["bias"] is not None:
        arguments["bias"] = arguments["bias"].detach()
    heads, width = case.sizes[1], case.sizes[6]
    w_o = torch.randn(6, heads * width, generator=torch.Generator().manual_seed(1))
    return inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), w_o, arguments


def sharded(mesh: DeviceMesh, case: Case, layout: str) -> tuple[ShardedMap, Tensor, Tensor]:
    q, k, v, w_o, arguments = arguments_of(case)
    at = positions_of(layout, mesh.get_local_rank(), mesh.size())
    smap = ShardedMap.of(
        q[:, :, at], k[:, :, at], mesh=mesh, positions=None if layout == "contiguous" else at, **arguments
    )
    return smap, v[:, :, at], w_o


def whole(case: Case) -> tuple[AttentionMap, Tensor, Tensor]:
    q, k, v, w_o, arguments = arguments_of(case)
    return mh.attention_with_map(q, k, v, **arguments)[1], v, w_o


def check_properties(mesh: DeviceMesh) -> None:
    """Any mask of the algebra, at any positions of tokens: the map of the ranks is that of one process.

    Every rank draws the same examples.
    """
    tokens = 12

    @settings(
        max_examples=40, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        spec=specs(2, 2, tokens, tokens), inside=specs(2, 2, tokens, tokens), seed=st.integers(0, 1000),
        heads=st.sampled_from((1, 2)), sink=st.booleans(), bias=st.booleans(), scattered=st.booleans(),
    )  # fmt: skip
    def equal(spec: Any, inside: Any, seed: int, heads: int, sink: bool, bias: bool, scattered: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(2, 2, tokens, 4, generator=generator, dtype=torch.float64)
        k = torch.randn(2, heads, tokens, 4, generator=generator, dtype=torch.float64)
        every = torch.randperm(tokens, generator=generator) if scattered else torch.arange(tokens)
        at = every.chunk(mesh.size())[mesh.get_local_rank()]
        options: dict[str, Any] = {
            "sink": torch.randn(2, generator=generator) if sink else None,
            "bias": mh.ALiBi(2) if bias else None,
        }
        one = mh.attention_with_map(q, k, k, mask=build(spec), **options)[1]
        smap = ShardedMap.of(q[:, :, at], k[:, :, at], mesh=mesh, positions=at, mask=build(spec), **options)
        same(smap.dense(), one.dense())
        names = ("entropy", "distance", "row_max", "sink_weight", "logits_max", "received", "divergence")
        found, expected = (
            each.statistics(*names, top=3, pooled=[(5, 4), (3, 6, "max")]) for each in (smap, one)
        )
        for name in names:
            rows = name in PER_QUERY
            same(found[name], expected[name][:, :, at] if rows else expected[name])
        same(found["top"].weights, expected["top"].weights[:, :, at])
        for pair in zip(found["pooled"], expected["pooled"], strict=True):
            same(*pair)
        same(smap.mass(build(inside)), one.mass(build(inside))[:, :, at])
        same(smap.mass(build(inside), mean=True), one.mass(build(inside), mean=True))
        same(smap.under(build(inside)).lse, one.under(build(inside)).lse[:, :, at])
        x = torch.randn(2, 2, tokens, 6, generator=generator, dtype=torch.float64)
        other = mh.attention_with_map(x, x, x, mask=build(inside))[1]
        theirs = ShardedMap.of(x[:, :, at], x[:, :, at], mesh=mesh, positions=at, mask=build(inside))
        same(smap.divergence(theirs), one.divergence(other))
        same(theirs.divergence(smap), one.divergence(other))
        for maps in ((smap, theirs), (theirs, smap)):
            whole_maps = [one if each is smap else other for each in maps]
            same(measures.rollout(maps, [0, 7]), measures.rollout(whole_maps, [0, 7]))

    equal()


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def save_cases(mesh: DeviceMesh, folder: Path, cases: Sequence[tuple[int, str, Case]]) -> None:
    """Save each case from its number of ranks, at its number."""
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, mesh.size() + 1)}
    for number, (ranks, layout, case) in enumerate(cases):
        if meshes[ranks].get_coordinate() is not None:
            sharded(meshes[ranks], case, layout)[0].save(folder / f"{number}.safetensors")


def save_long(mesh: DeviceMesh, folder: Path, tokens: int, heads: int, size: int) -> None:
    """Save a map whose tensors are long enough to be mapped, twice."""
    q, k = long_tensors(tokens, heads, size)
    at = balanced_positions(tokens, mesh)
    options = {"mesh": mesh, "positions": at, "mask": Causal() & Window(left=300)}
    for times in (2.0, 1.0):  # the second save replaces the first
        smap = ShardedMap.of(q[:, :, at] * times, k[:, :, at], tokens=[f"t{n}" for n in range(tokens)],
                             provenance={"model": "an example"}, **options)  # fmt: skip
        smap.save(folder / "long.safetensors")


def long_tensors(tokens: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, tokens, size, generator=generator)
    return q, torch.randn(1, 1, tokens, size, generator=generator)


def message(call: Callable[[], Any]) -> str:
    """The type and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail(mesh: DeviceMesh, folder: Path) -> dict[str, str]:
    """The messages of wrong calls and faults on this rank."""
    rank = mesh.get_local_rank()
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(rank))
    smap = ShardedMap.of(x, x, mesh=mesh)
    ruled = smap.under(mh.Rule(lambda b, h, i, j: i >= j))
    smap.save(folder / "before.safetensors")

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shards, "write_shard", no_space)
        full = message(lambda: smap.save(folder / "before.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_encoded", no_space)
        full_index = message(lambda: smap.save(folder / "before.safetensors"))
    ids = torch.zeros(8 - rank, dtype=torch.int64)
    turned = ShardedMap.of(x, x, mesh=mesh, positions=torch.arange(4) + 4 * (1 - rank))
    changed = x.clone()
    in_place = ShardedMap.of(changed, x, mesh=mesh)
    if rank == 1:
        changed += 1
    return {
        "full disk": full,
        "full disk of the index": full_index,
        "rule": message(lambda: ruled.save(folder / "rule.safetensors")),
        "folder": message(lambda: smap.save(folder / "none" / "map.safetensors")),
        "other path": message(lambda: smap.save(folder / f"{rank}.safetensors")),
        "other index": message(lambda: smap[0, 0, rank]),
        "index": message(lambda: smap[0, 0, 99 if rank else 0]),
        "other statistic": message(lambda: smap.top(1 + rank)),
        "statistic": message(lambda: smap.statistics("entropy", "nothing")),
        "argument": message(lambda: smap.pooled(99, 1)),
        "other mask": message(lambda: smap.mass(Diagonal(rank))),
        "failing mask": message(lambda: smap.mass(mh.Rule(raise_on_rank_1))),
        "failing mask of a map": message(lambda: smap.under(mh.Rule(raise_on_rank_1))),
        "mask": message(lambda: smap.mass(None)),  # type: ignore[arg-type]
        "values": message(lambda: smap.value_norms(x[:, :, :3], torch.ones(3, 16))),
        "changed": message(in_place.entropy),
        "dense": message(lambda: smap.dense(max_bytes=100)),
        "pickle": message(lambda: pickle.dumps(smap)),
        "grid": message(lambda: smap.image(0, grid=(3, 3))),
        "image": message(lambda: smap.image(99 if rank else 0, grid=(2, 4))),
        "xarray": message(lambda: smap.to_xarray(0, max_bytes=10)),
        "view": message(lambda: smap.view()),
        "value_norm": message(lambda: smap.value_norm),
        "again": message(lambda: smap.again(smap.problem)),
        "ids": message(lambda: measures.induction(smap, ids)),
        "width": message(lambda: measures.local(smap, -rank)),
        "rows": message(lambda: measures.rollout([smap], None)),
        "other rows": message(lambda: measures.rollout([smap], rank)),
        "dtype": message(lambda: smap.to(torch.int8)),
        "device": message(lambda: smap.to("meta")),
        "other dtype": message(lambda: smap.to((torch.bfloat16, torch.float16)[rank])),
        "one map": message(lambda: smap.divergence(mh.attention_with_map(x, x, x)[1])),  # type: ignore[arg-type]
        "other shape": message(lambda: smap.divergence(smap.only(heads=[0]))),
        "other positions": message(lambda: smap.divergence(turned)),
        "other call": message(lambda: smap.dense() if rank else smap.entropy()),
        "unknown": message(lambda: smap.nothing),
        "lse": message(lambda: ShardedMap.of(x, x, x[..., :2, 0], mesh=mesh)),
        "lengths": message(lambda: ShardedMap.of(x, x, mesh=mesh, lengths=[4, 3])),
        "mesh": message(lambda: ShardedMap.of(x, x, mesh=None)),  # type: ignore[arg-type]
        "one lse": message(lambda: ShardedMap.of(x, x, x[..., 0] if rank else None, mesh=mesh)),
        "twice": message(lambda: ShardedMap.of(x, x, mesh=mesh, positions=torch.arange(4))),
        "gather": message(lambda: smap.gather(x[:, :, :3, 0])),
        "labels": message(lambda: smap.labelled(["a"])),
        "head": message(lambda: smap.only(heads=5)),
        "repr": str(smap),
    }


def fail_alone(mesh: DeviceMesh, timeout: float) -> tuple[str, float]:
    """The message and the seconds of a statistic in which rank 1 fails in the middle, alone."""
    x = torch.ones(1, 2, 4, 8)
    smap = ShardedMap.of(x, x, mesh=mesh)

    def no_memory(*_: Any) -> None:
        raise MemoryError("out of memory")

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank() == 1:
            patch.setattr(sharded_map, "add_block", no_memory)
        error = message(smap.received)
    spent = time.monotonic() - start
    if mesh.get_local_rank() == 1:
        time.sleep(2 * timeout)  # a process that ends would close its connections
    return error, spent
