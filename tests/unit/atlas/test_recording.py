"""Atlases: their numbers, computed again from dense weights, and the same bits after interruptions."""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads import atlas, lm
from manyheads.atlas import corpus, recording, summaries
from manyheads.atlas.summaries import MEASURES, SINK
from manyheads.observe import observe
from manyheads.text import models

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")

LENGTH, BATCH = 24, 4
BOUND = 64 * 2.0**-24  # the relative error of a weight: exp of a float32 score between −64 and 64
SENTENCES = [
    "the file you want to read is not the file you need to read. ",
    "open the file, read the file, and close the file again. ",
    "a mask hides keys; a window is a mask of a band. ",
    "heads attend to the token before, or to the first token. ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, and a small corpus."""
    folder = tmp_path_factory.mktemp("atlas")
    _, tokenizer = lm.load()
    torch.manual_seed(0)
    config = lm.Config(tokenizer.get_vocab_size(), embed=16, heads=2, layers=2, hidden=16, context=LENGTH)
    model = lm.LanguageModel(config)
    for parameter in model.parameters():
        parameter.data *= 3  # so that heads attend to some keys more than to others
    (folder / "model").mkdir()
    lm.save(folder / "model", model, tokenizer)
    (folder / "text").mkdir()
    for n in range(3):
        text = "\n".join(SENTENCES[(n + i) % 4] * (1 + i % 3) for i in range(12 + n))
        (folder / "text" / f"{n}.txt").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SMALLEST", 400)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def record(folder: Path, out: Path, **options) -> atlas.Atlas:
    return atlas.record(folder / "model", [folder / "text"], out, batch_size=BATCH, **options)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> atlas.Atlas:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SMALLEST", 400)
        return record(folder, folder / "atlas", ablate=True)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != recording.LOCK}


@pytest.fixture(scope="module")
def dense(folder: Path, recorded: atlas.Atlas) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of each window, and the weights of all heads `[h, t, t]` in float64, from q and k."""
    model = models.load(folder / "model")
    plan = recorded.plan
    found = []
    for parts in plan.text.shards:
        for part in parts:
            for window in corpus.windows(plan.text, part, model.encode, LENGTH):
                with observe(model.module) as maps, torch.no_grad():
                    model.module(torch.tensor([window.ids]))
                weights = []
                for layer in maps:
                    problem = maps[layer].problem
                    scores = problem.q[0].double() @ problem.k[0].double().mT * problem.scale  # [h, t, t]
                    assert scores.abs().max() < 64
                    future = torch.ones(scores.shape[1:]).triu(1).bool()
                    weights.append(scores.masked_fill(future, -math.inf).softmax(-1))
                found.append((window.ids, torch.cat(weights)))
    return found


def measure(ids: list[int], w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each measure of each query, `[h, t]`, NaN where it isn't counted: in loops, by definition."""
    h, t, _ = w.shape
    found = {name: torch.full((h, t), math.nan, dtype=torch.float64) for name in MEASURES}
    for i in range(t):
        row = w[:, i, : i + 1]
        found["current_token"][:, i] = row[:, i]
        found["first_token"][:, i] = found["first_position"][:, i] = row[:, 0]
        found["row_max"][:, i] = row.amax(-1)
        found["entropy"][:, i] = -torch.special.xlogy(row, row).sum(-1)
        found["distance"][:, i] = row @ (i - torch.arange(i + 1, dtype=torch.float64))
        if i:
            found["previous_token"][:, i] = row[:, i - 1]
        same = [j for j in range(i) if ids[j] == ids[i]]
        if same:
            found["same_token"][:, i] = found["duplicate_token"][:, i] = row[:, same].sum(-1)
            found["induction"][:, i] = row[:, [j + 1 for j in same]].sum(-1)
    return found


@pytest.mark.full
def test_scores_are_those_of_dense_weights(recorded: atlas.Atlas, dense: list) -> None:
    assert len(dense) > 3 * BATCH
    assert recorded.facts["tokens"] == sum(len(ids) for ids, _ in dense)
    assert recorded.facts["windows"] == len(dense)
    found = [measure(ids, w) for ids, w in dense]
    every = {name: torch.cat([each[name] for each in found], 1).numpy() for name in MEASURES}  # [h, n]
    rows = recorded.rows("scores")
    assert len(rows) == 4 * len(MEASURES)
    for row in rows:
        values = every[row["score"]][2 * row["layer"] + row["head"]]
        values = values[~np.isnan(values)]
        assert row["queries"] == len(values)
        if not len(values):
            assert row["mean"] is None
            continue
        assert row["mean"] == pytest.approx(values.mean(), rel=BOUND, abs=BOUND)
        assert row["std"] == pytest.approx(values.std(), rel=BOUND, abs=2 * BOUND)
        assert (row["min"], row["max"]) == pytest.approx((values.min(), values.max()), rel=BOUND, abs=BOUND)
        scale = summaries.scale_of(row["score"], LENGTH)
        for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
            low, high = (np.quantile(values, share, method=method) for method in ("lower", "higher"))
            at, low, high = (float(scale.apply(torch.tensor(x))) for x in (row[name], low, high))
            assert low - 1.01 <= at <= high + 1.01
    for row in recorded.rows("heads"):
        n = 2 * row["layer"] + row["head"]
        for name in ("entropy", "induction"):
            assert row[name] == pytest.approx(np.nanmean(every[name][n]), rel=BOUND, abs=BOUND)


@pytest.mark.full
def test_positions_received_and_sinks_are_those_of_dense_weights(recorded: atlas.Atlas, dense: list) -> None:
    found = [measure(ids, w) for ids, w in dense]
    for row in recorded.rows("positions"):
        n, places = 2 * row["layer"] + row["head"], slice(row["first"], row["last"] + 1)
        for name in ("entropy", "distance", "row_max", "first_token"):
            values = np.concatenate([each[name][n, places].numpy() for each in found])
            assert row["queries"] == len(values)
            assert row[name] == pytest.approx(values.mean(), rel=BOUND, abs=BOUND)
    for row in recorded.rows("received"):
        n, places = 2 * row["layer"] + row["head"], range(row["first"], row["last"] + 1)
        values = [w[n, j:, j].mean() for _, w in dense for j in places if j < w.shape[2]]
        assert row["received"] == pytest.approx(float(np.mean(values)), rel=BOUND, abs=BOUND)
    for row in recorded.rows("heads"):
        n = 2 * row["layer"] + row["head"]
        first = torch.cat([w[n, 1:, 0] for _, w in dense])
        assert row["sink_rate"] == pytest.approx(float((first > SINK).double().mean()), abs=1e-12)


@pytest.mark.full
def test_similarity_is_the_overlap_of_dense_weights(recorded: atlas.Atlas, dense: list) -> None:
    total, count = torch.zeros(4, 4, dtype=torch.float64), 0
    for _, w in dense:
        t = w.shape[1]
        r = min(8, t)
        roots = w[:, [(2 * n + 1) * t // (2 * r) for n in range(r)]].sqrt()
        total += torch.einsum("hrs,grs->hg", roots, roots)
        count += r
    for row in recorded.rows("similarity"):
        n, m = 2 * row["layer"] + row["head"], 2 * row["other_layer"] + row["other_head"]
        assert row["overlap"] == pytest.approx(float(total[n, m]) / count, rel=BOUND, abs=BOUND)


@pytest.mark.full
def test_examples_are_weights_of_their_passages(recorded: atlas.Atlas, folder: Path) -> None:
    rows = recorded.rows("examples")
    assert {(row["layer"], row["head"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for row in rows[::5]:
        maps = recorded.read_passage(row["passage"], folder / "model")
        weights = maps[row["layer"]][0, row["head"], row["query"]]
        assert weights[row["keys"]].tolist() == pytest.approx(row["weights"], abs=1e-6)
        assert row["keys"][0] == int(weights.argmax())
        labels = recorded.passage(row["passage"]).labels
        assert [labels[key] for key in row["keys"]] == row["key_tokens"]
    for layer in range(2):
        values = [row["surprise"] for row in rows if (row["layer"], row["head"]) == (layer, 0)]
        assert values == sorted(values, reverse=True)
        assert 0 < len(values) <= summaries.EXAMPLES


@pytest.mark.full
def test_the_cost_of_ablation_is_the_loss_without_the_head(
    recorded: atlas.Atlas, dense: list, folder: Path
) -> None:
    model = models.load(folder / "model").module
    for row in recorded.rows("ablation")[::3]:
        plain, ablated, count = 0.0, 0.0, 0
        for ids, _ in dense:
            tokens = torch.tensor([ids])
            with torch.no_grad():
                plain += float(model_loss(model, tokens))
                with observe(model, ablate=[(row["layer"], row["head"])]):
                    ablated += float(model_loss(model, tokens))
            count += len(ids) - 1
        assert row["tokens"] == count
        assert row["loss"] == pytest.approx(plain / count, abs=1e-5)
        assert row["cost"] == pytest.approx((ablated - plain) / count, rel=BOUND, abs=BOUND)


def model_loss(model: lm.LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="sum")


@pytest.mark.full
def test_interrupted_and_continued_it_has_the_same_bits(
    recorded: atlas.Atlas, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_shard, left = recording._Run.measure_shard, 0

    def stop_after(run, shard: int):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return measure_shard(run, shard)

    monkeypatch.setattr(recording._Run, "measure_shard", stop_after)
    for stop in (0, 1, 2):
        left = stop
        with pytest.raises(KeyboardInterrupt):
            record(folder, tmp_path / "again", ablate=True)
        with pytest.raises(FileNotFoundError, match="isn't complete"):
            atlas.open(tmp_path / "again")
    assert len([*(tmp_path / "again" / "shards").iterdir()]) == 3
    left = 1000
    record(folder, tmp_path / "again", ablate=True)
    assert contents(tmp_path / "again") == contents(recorded.folder)
    left = 0
    record(folder, tmp_path / "again", ablate=True)  # complete: nothing is measured


def test_a_folder_of_another_model_text_or_option_is_an_error(
    recorded: atlas.Atlas, folder: Path, tmp_path: Path
) -> None:
    out = recorded.folder
    before = contents(out)
    with pytest.raises(ValueError, match="another model"):
        atlas.record("shipped", [folder / "text"], out, length=LENGTH, batch_size=BATCH, ablate=True)
    with pytest.raises(ValueError, match="another text"):
        atlas.record(folder / "model", [folder / "text" / "0.txt"], out, batch_size=BATCH, ablate=True)
    with pytest.raises(ValueError, match="started with --ablate True, got False"):
        record(folder, out)
    with pytest.raises(ValueError, match="started with --length 24, got 16"):
        record(folder, out, length=16, ablate=True)
    assert contents(out) == before
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"which has notes\.txt"):
        record(folder, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        atlas.open(tmp_path)


@pytest.mark.full
def test_the_paths_may_change_but_not_the_versions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "text", tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(recording._Run, "measure_shard", lambda run, shard: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record(folder, tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    plain = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(plain | {"versions": ["0.0", "1.0"]}))
    with pytest.raises(ValueError, match=r"started with manyheads 0\.0 and PyTorch 1\.0"):
        record(folder, tmp_path / "out")
    manifest.write_text(json.dumps(plain))
    moved = atlas.record(folder / "model", [tmp_path / "copy"], tmp_path / "out", batch_size=BATCH)
    assert moved.plan.text.files[0].path == str(tmp_path / "copy" / "0.txt")
    for damaged in ("{", "[]", '{"format": "x"}'):
        manifest.write_text(damaged)
        with pytest.raises(ValueError, match="isn't the manifest"):
            atlas.open(tmp_path / "out")


@pytest.mark.full
def test_a_shard_that_is_cut_short_is_an_error_and_is_measured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recording._Run, "finish", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record(folder, tmp_path / "out")
    path = tmp_path / "out" / "shards" / "00001.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"00001\.npz, got a file that is cut short or damaged\. Remove it"):
        record(folder, tmp_path / "out")
    path.unlink()
    record(folder, tmp_path / "out")
    table = tmp_path / "out" / "heads.parquet"
    table.write_bytes(table.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"heads\.parquet can't be read as a table"):
        _ = atlas.open(tmp_path / "out")["heads"]
    with pytest.raises(ValueError, match=r"Expected a table of the atlas, heads, .*, got 'x'"):
        _ = atlas.open(tmp_path / "out")["x"]
    (tmp_path / "out" / "atlas.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        atlas.open(tmp_path / "out")


def test_processes_of_a_launcher_that_was_killed_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("manyheads.distributed.processes.is_orphan", lambda: True)
        with pytest.raises(KeyboardInterrupt):
            record(folder, tmp_path / "out")
    record(folder, tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(
            OSError, match=r"manifest\.json can't be written: No space left .* Free some space"
        ):
            record(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [recording.LOCK]
    record(folder, tmp_path / "out")


def test_bad_options_are_errors(folder: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"length": 25}, "length"),
        ({"length": 1}, "length"),
        ({"threads": 0}, "threads"),
    ):
        with pytest.raises(ValueError, match=message):
            record(folder, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="batch_size"):
        atlas.record(folder / "model", [folder / "text"], tmp_path / "out", batch_size=0)
    with pytest.raises(TypeError, match="folder of an atlas"):
        atlas.open(3)
    with pytest.raises(FileNotFoundError, match="got nowhere"):
        atlas.record("nowhere", [folder / "text"], tmp_path / "out")


def test_a_passage_of_another_model_is_an_error(recorded: atlas.Atlas) -> None:
    with pytest.raises(ValueError, match="has other weights"):
        recorded.read_passage(0, "shipped")
    with pytest.raises(ValueError, match="number of a passage"):
        recorded.passage(10_000)


def test_clusters_join_heads_that_overlap() -> None:
    overlap = np.eye(5)
    for one, other, value in ((0, 3, 0.9), (1, 2, 0.8), (1, 4, 0.7), (2, 4, 0.6)):
        overlap[one, other] = overlap[other, one] = value
    assert atlas.tables.cluster(overlap) == [1, 0, 0, 1, 0]
    assert atlas.tables.cluster(np.eye(1)) == [0]
