"""Training: AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), warm-up and cosine, and a run that can be
killed at any moment and resumed.

What happens at a step is a pure function of the seed, the step and the state before it: the batch
and the dropout are drawn anew from (seed, step). So a resumed run ends in the same weights as one
that was never interrupted, bit for bit on one machine's CPU.

A run's folder holds its last checkpoint (see `checkpoint`), its token files `train.npy` and
`held_out.npy`, `log.jsonl` with one line per logged step, and TensorBoard's files where that is
installed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from manyheads.lm import checkpoint, data
from manyheads.lm.model import Config, LanguageModel
from manyheads.shapes import real, whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINING, HELD_OUT, LOG = "train.npy", "held_out.npy", "log.jsonl"
ROWS_AT_ONCE = 8  # when evaluating


def default_device() -> str:
    """cuda where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Options:
    """How to train; ValueError or TypeError for what can't be.

    steps: how many updates of the weights.
    context: the longest sequence, in tokens.
    seed: what the first weights, the order of the text and dropout are drawn from.
    device: where the model computes, as PyTorch names it.
    rows: sequences in one batch.
    repeated: how many of them are random tokens said twice, from which heads learn to copy.
    vocab: at most this many tokens.
    rate: the highest learning rate.
    decay: the weight decay, on matrices only.
    dropout: the probability with which a number is dropped, of embeddings and of what a layer adds.
    clip: the largest norm of the gradient.
    log_every, evaluate_every, save_every: steps between two lines of the log, two losses on text held out,
        and two checkpoints.
    """

    steps: int = 3000
    context: int = 512
    seed: int = 0
    device: str = "cpu"
    rows: int = 8
    repeated: int = 0
    vocab: int = 3072
    rate: float = 2e-3
    decay: float = 0.1
    dropout: float = 0.05
    clip: float = 1.0
    log_every: int = 10
    evaluate_every: int = 500
    save_every: int = 100

    def __post_init__(self) -> None:
        whole(self.seed, "seed")
        whole(self.context, "context", 2)
        for name in ("steps", "rows", "log_every", "evaluate_every", "save_every"):
            whole(getattr(self, name), name, 1)
        whole(self.repeated, "repeated")
        if self.repeated > self.rows:
            raise ValueError(f"repeated must be at most rows = {self.rows}, and {self.repeated} came.")
        check_device(self.device)
        for name in ("rate", "clip"):
            real(getattr(self, name), name, lambda x: 0 < x < math.inf, "a positive number")
        real(self.decay, "decay", lambda x: 0 <= x < math.inf, "a number of at least 0")
        real(self.dropout, "dropout", lambda p: 0 <= p <= 1, "a number between 0 and 1")

    def cut_at(self, step: int) -> int:
        """Into how many pieces a batch's sequences are cut at a step: 8 in the first quarter, then 4, 2, 1.

        Short sequences first (Li et al. 2022, arXiv:2108.06084): with fewer places to look at, heads
        find the one that matters sooner. The number of tokens stays the same.
        """
        cut = (8, 4, 2, 1)[min(3, 4 * step // self.steps)]
        return cut if self.context % cut == 0 and self.context // cut >= 32 else 1

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then half a cosine down to a twentieth."""
        warm = max(1, min(100, self.steps // 10))
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def check_device(name: str) -> None:
    """Refuse a device that isn't one, or isn't here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f'device must be one that this machine has, such as "{default_device()}", and '
            f'"{name}" came: {str(error).splitlines()[0]}.'
        ) from None
    if name == "meta":
        raise ValueError('device must be one that computes, and "meta" came.')


def autocast_dtype(device: str) -> torch.dtype | None:
    """bfloat16 where it is faster: a GPU that has it, a CPU with AMX or AVX-512 BF16; else None.

    A rule rather than a measurement, since a measured choice could differ between two runs of one
    seed. On one core with AMX the recipe's model trains on sequences of 512 tokens at 6,900 tokens/s
    in bfloat16 and 5,200 in float32 (medians of five, by CPU time); a CPU without such instructions
    emulates bfloat16.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    if kind == "cpu":
        has = torch.cpu.get_capabilities()
        return torch.bfloat16 if has.get("amx_bf16") or has.get("avx512_bf16") else None
    return None


class Run:
    """A training run in a folder: what a checkpoint holds, alive."""

    def __init__(self, out: Path, options: Options, tokenizer: Tokenizer, facts: Mapping[str, Any]):
        self.out, self.options, self.tokenizer, self.facts = out, options, tokenizer, facts
        self.step = 0  # steps done
        self.seconds = 0.0
        self.training = data.read_tokens(out / TRAINING)  # [n]
        self.held_out = data.read_tokens(out / HELD_OUT)  # [n]
        config = Config(vocab=tokenizer.get_vocab_size(), context=options.context)
        torch.manual_seed(options.seed)
        self.model = LanguageModel(config, options.dropout).to(options.device).train()
        named = dict(self.model.named_parameters())
        self.names = sorted(named, key=lambda name: named[name].dim() < 2)  # matrices first
        matrices = sum(parameter.dim() >= 2 for parameter in named.values())
        groups = [
            {"params": [named[n] for n in self.names[:matrices]], "weight_decay": options.decay},
            {"params": [named[n] for n in self.names[matrices:]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))
        self.dtype = autocast_dtype(options.device)

    @classmethod
    def begin(cls, out: Path, options: Options, paths: Sequence[Path]) -> Run:
        """Prepare the text and write the checkpoint of step 0."""
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"--out wants a folder, and {out} is a file.")
        for name in (*checkpoint.FILES, checkpoint.WRITTEN):
            if (out / name).exists():
                raise FileExistsError(
                    f"{out} already holds a run ({name}): add --resume to go on with it, or choose "
                    "another --out."
                )
        documents = data.text_documents(paths) if paths else data.python_documents()
        training, held_out = data.split(documents)
        tokenizer = data.train_tokenizer(training, options.vocab)
        facts: dict[str, Any] = {
            "text": "files" if paths else "python",
            "documents_sha256": data.digest(documents),
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / LOG).unlink(missing_ok=True)
        for name, side in ((TRAINING, training), (HELD_OUT, held_out)):
            ids = data.encode(tokenizer, side)
            if len(ids) < (options.context + 2 if name == TRAINING else 2):
                raise ValueError(
                    f"the text gives {len(ids)} tokens in {name}, and a context of {options.context} "
                    "wants more of them: give more --data or a smaller --context."
                )
            data.write_tokens(out / name, ids)
            facts[name] = {
                "documents": len(side),
                "bytes": data.byte_count(side),
                "tokens": len(ids),
                "sha256": checkpoint.file_digest(out / name),
            }
        run = cls(out, options, tokenizer, facts)
        run.save()
        return run

    @classmethod
    def resume(cls, out: Path, given: Mapping[str, Any], paths: Sequence[Path]) -> Run:
        """Take up a run where its checkpoint left it; what is given anew must say the same."""
        from tokenizers import Tokenizer

        checkpoint.settle(out)
        for name in checkpoint.FILES:
            if not (out / name).is_file():
                raise FileNotFoundError(
                    f"--resume wants a checkpoint to go on from, and {out} has no {name}: start "
                    "without --resume, or name another --out."
                )
        state = checkpoint.read_json(out / "state.json")
        try:
            options = Options(**state["options"])
            facts, step, seconds = state["facts"], state["step"], state["seconds"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{out / 'state.json'} isn't the state of a run: {error}.") from None
        for name, value in given.items():
            if getattr(options, name) != value:
                raise ValueError(
                    f"the run in {out} was started with --{name} {getattr(options, name)}, and "
                    f"{value} came: leave it out to resume, or start anew in another --out."
                )
        if paths and data.digest(data.text_documents(paths)) != facts["documents_sha256"]:
            raise ValueError(
                f"the run in {out} was started on other text than --data gives: leave --data out "
                "to resume, or start anew in another --out."
            )
        for name in (TRAINING, HELD_OUT):
            if not (out / name).is_file():
                raise FileNotFoundError(f"--resume wants the run's token files, and {out} has no {name}.")
            if checkpoint.file_digest(out / name) != facts[name]["sha256"]:
                raise ValueError(f"{out / name} has changed since the run began: start anew.")
        run = cls(out, options, Tokenizer.from_file(str(out / "tokenizer.json")), facts)
        run.restore()
        run.step, run.seconds = step, seconds
        run.trim_log()
        return run

    def save(self) -> None:
        """Write the checkpoint: what `resume` needs and what `checkpoint.load` needs."""
        moments = {}
        for index, name in enumerate(self.names):
            for key, value in self.optimizer.state_dict()["state"].get(index, {}).items():
                moments[f"{name}/{key}"] = value
        state = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "options": asdict(self.options),
            "facts": self.facts,
        }
        checkpoint.save(self.out, self.model, self.tokenizer, optimizer=moments, state=state)

    def restore(self) -> None:
        """Weights and AdamW's moments from the folder."""
        weights = self.model.state_dict()
        self.model.load_state_dict(checkpoint.read_tensors(self.out / "model.safetensors", weights))
        named = dict(self.model.named_parameters())
        wanted: dict[str, torch.Tensor] = {}
        for name in self.names:
            wanted |= {f"{name}/exp_avg": named[name], f"{name}/exp_avg_sq": named[name]}
            wanted[f"{name}/step"] = torch.zeros(())
        path = self.out / "optimizer.safetensors"
        if not checkpoint.tensor_names(path):  # the checkpoint of step 0: AdamW has no moments yet
            return
        moments = checkpoint.read_tensors(path, wanted)
        keys = ("step", "exp_avg", "exp_avg_sq")
        self.optimizer.load_state_dict(
            {
                "state": {
                    index: {key: moments[f"{name}/{key}"] for key in keys}
                    for index, name in enumerate(self.names)
                },
                "param_groups": self.optimizer.state_dict()["param_groups"],
            }
        )

    def trim_log(self) -> None:
        """Drop what was logged after the checkpoint, and a line that was cut short."""
        log = self.out / LOG
        lines = log.read_text("utf-8").splitlines(keepends=True) if log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
        checkpoint.write(log, lambda path: path.write_text("".join(kept), "utf-8"))

    def advance(self) -> tuple[float, float]:
        """One step: (loss in nats per token, norm of the gradient before clipping)."""
        options, cut = self.options, self.options.cut_at(self.step)
        ids, targets = data.batch(
            self.training,
            rows=options.rows * cut,
            context=options.context // cut,
            repeated=options.repeated * cut,
            vocab=self.model.config.vocab,
            seed=options.seed,
            step=self.step,
        )
        drawn = np.random.SeedSequence([options.seed, self.step, 1]).generate_state(1, np.uint32)
        torch.manual_seed(int(drawn[0]))  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate_at(self.step)
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.model(torch.from_numpy(ids).to(options.device))  # [b, t, vocab]
        flat = torch.from_numpy(targets).to(options.device).flatten()  # [b·t]
        loss = F.cross_entropy(logits.float().flatten(0, 1), flat, ignore_index=data.IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item(), norm.item()

    def autocast(self) -> torch.autocast:
        """bfloat16 where it helps, else as it is."""
        kind = torch.device(self.options.device).type
        return torch.autocast(kind, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def bits_per_byte(self, loss: float) -> float:
        """Nats per held-out token as bits per byte of held-out text."""
        held = self.facts[HELD_OUT]
        return loss / math.log(2) * (held["tokens"] - 1) / held["bytes"]


@torch.no_grad()
def held_out_loss(model: LanguageModel, ids: data.Tokens, most: int | None = None) -> float:
    """Mean loss in nats per token over a row of ids `[n]`, in windows of the model's context.

    Every token but the first is foretold once, from what comes before it in its window. With
    `most`, only that many windows, spread evenly.
    """
    was = model.training
    model.eval()
    context = model.config.context
    starts = list(range(0, len(ids) - 1, context))
    if most is not None and len(starts) > most:
        starts = [starts[round(i)] for i in np.linspace(0, len(starts) - 1, most)]
    windows = [torch.from_numpy(ids[s : s + context + 1].astype(np.int64)) for s in starts]
    full = [window for window in windows if len(window) == context + 1]
    batches = [torch.stack(full[i : i + ROWS_AT_ONCE]) for i in range(0, len(full), ROWS_AT_ONCE)]
    batches += [window[None] for window in windows if len(window) <= context]
    total, count = 0.0, 0
    for rows in batches:  # [b, t + 1]
        rows = rows.to(model.embedding.weight.device)
        logits = model(rows[:, :-1])  # [b, t, vocab]
        targets = rows[:, 1:].flatten()  # [b·t]
        total += float(F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"))
        count += targets.numel()
    model.train(was)
    return total / count


def train(
    out: str | os.PathLike[str],
    given: Mapping[str, Any] | None = None,
    paths: Sequence[Path] = (),
    *,
    resume: bool = False,
) -> Run:
    """Train a language model in the folder `out`, or resume the run that is there.

    `given` are the fields of `Options` that the caller sets; `paths` are text files or folders of
    them, without which the text is Python's own documentation. SIGINT and SIGTERM save a checkpoint
    and raise KeyboardInterrupt. ValueError, TypeError or OSError, one sentence, for wrong input. The
    optimizer is AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).
    """
    out, given = Path(out), dict(given or {})
    with torch.random.fork_rng():
        if resume:
            run = Run.resume(out, given, paths)
        else:
            run = Run.begin(out, Options(**{"device": default_device(), **given}), paths)
        _loop(run)
    return run


def _loop(run: Run) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    options, begun, done_before = run.options, time.perf_counter() - run.seconds, run.step
    per_step = options.rows * options.context
    console = Console(stderr=True)
    if run.step >= options.steps:
        console.print(f"{run.out} is finished: all its {options.steps} steps are done.", soft_wrap=True)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with (
        _stop_requests() as stop,
        _writers(run) as write,
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("", total=options.steps, completed=run.step, loss=math.nan, speed=0.0)
        while run.step < options.steps:
            loss, norm = run.advance()
            run.seconds = time.perf_counter() - begun
            speed = per_step * (run.step - done_before) / (time.perf_counter() - started)
            bar.update(task, completed=run.step, loss=loss, speed=speed)
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss became {loss} at step {run.step}: start again with another --seed or "
                    "other --data; the checkpoint before it stands."
                )
            last = run.step == options.steps
            evaluate = run.step % options.evaluate_every == 0 or last
            if evaluate or run.step % options.log_every == 0:
                line = {
                    "step": run.step,
                    "loss": round(loss, 5),
                    "rate": round(options.rate_at(run.step - 1), 7),
                    "gradient_norm": round(norm, 4),
                    "tokens_per_s": round(speed),
                    "seconds": round(run.seconds, 1),
                }
                if evaluate:
                    held = held_out_loss(run.model, run.held_out, most=128)
                    line["held_out_loss"] = round(held, 5)
                    line["held_out_bits_per_byte"] = round(run.bits_per_byte(held), 4)
                write(line)
            if stop.is_set() or last or run.step % options.save_every == 0:
                run.save()
            if stop.is_set() and not last:
                console.print(f"stopped and saved at step {run.step}; --resume goes on from there")
                raise KeyboardInterrupt


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that no step is cut in two; a second one raises."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield asked
        return
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _writers(run: Run) -> Iterator[Any]:
    """A function that writes a line to the log, and to TensorBoard where it is installed."""
    board = None
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(run.out / "tensorboard", purge_step=run.step + 1)
    with open(run.out / LOG, "a", encoding="utf-8") as log:

        def write(line: Mapping[str, float]) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()
            for name, value in line.items():
                if board is not None and name != "step":
                    board.add_scalar(name, value, int(line["step"]))

        try:
            yield write
        finally:
            if board is not None:
                board.close()
