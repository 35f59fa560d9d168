"""Train the language model. A run can be interrupted at any time and resumed.

The optimizer is AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with warm-up and a cosine schedule. Each
step is a pure function of the seed, the step number and the state before it: the random numbers of the batch
and of dropout are seeded by (seed, step). So on the CPU of one machine, a resumed run gives the same bits as
an uninterrupted run.

On several processes (`parallel`) a step has the same batch, and a resumed run may have another number of
them. Rank 0 alone prints, writes the log and the weights; the optimizer's state is written by all.

`checkpoint` describes the files of a run's folder. If TensorBoard is installed, its files are written too.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.distributed import processes
from manyheads.distributed.processes import TIMEOUT, Group, own_device
from manyheads.lm import checkpoint, data, parallel
from manyheads.lm.checkpoint import HELD_OUT, LOG, OPTIMIZER, RESTORE, SHARDS, TRAINING
from manyheads.lm.model import Config, LanguageModel
from manyheads.shapes import amount, check_seed, real, whole

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer
    from torch.distributed.device_mesh import DeviceMesh

EVALUATION_ROWS = 8  # the number of windows in a batch of an evaluation
TOKENIZER_TEXT = 2**26  # bytes to train the tokenizer on; of longer texts, every n-th document is used
SMALLEST_VOCAB = 257  # the 256 bytes and the end-of-text token
LARGEST_VOCAB = 2**20  # the tokenizers library aborts the process if a size doesn't fit into memory
MOST_STEPS = 10**9
CHANGEABLE = ("steps", "accumulate")  # options that may be changed when a run is resumed
MOMENTS = ("exp_avg", "exp_avg_sq")  # the state of AdamW for each parameter, beside the step
ALONE = Group()  # the group of a run on one process
# Options that were renamed: the name in earlier versions, and the current name.
RENAMED = {"rows": "batch_size", "rate": "learning_rate", "vocab": "vocab_size"}


@dataclass(frozen=True)
class Options:
    """The options of a training run.

    Attributes:
        steps: The number of updates, at most 10^9.
        context: The longest sequence that the model is trained on, in tokens.
        seed: The random seed of weights, batches and dropout.
        device: The device, as PyTorch names it.
        layers: The number of layers.
        heads: The number of heads.
        embed: The model size.
        hidden: The width of the feed-forward layers, 7/3 of embed if None.
        batch_size: The number of sequences in a batch, of all processes together.
        accumulate: The number of parts of a process's batch, whose gradients are added to use less memory.
        repeated: The number of sequences in a batch that are repeated random tokens, to learn copying.
        vocab_size: The largest size of the vocabulary, from 257 to 2^20. A short text may give fewer tokens.
        learning_rate: The highest learning rate, at most 1.
        schedule_steps: The length of the schedules of learning rate and sequence length in steps, `steps` if
            None. Afterwards both are constant.
        decay: The weight decay of matrices, at most 1 / learning_rate.
        dropout: The dropout probability of embeddings and of the terms added to the residual stream.
        clip: The largest gradient norm. Larger gradients are scaled down to it.
        log_every: The number of steps between lines of the log.
        evaluate_every: The number of steps between evaluations on held-out text.
        save_every: The number of steps between checkpoints.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range, or the device isn't available.
    """

    steps: int = 3000
    context: int = 512
    seed: int = 0
    device: str = "cpu"
    layers: int = 4
    heads: int = 6
    embed: int = 192
    hidden: int | None = None
    batch_size: int = 8
    accumulate: int = 1
    repeated: int = 0
    vocab_size: int = 3072
    learning_rate: float = 2e-3
    schedule_steps: int | None = None
    decay: float = 0.1
    dropout: float = 0.05
    clip: float = 1.0
    log_every: int = 10
    evaluate_every: int = 500
    save_every: int = 100

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, smallest, largest in (
            ("steps", 1, MOST_STEPS),
            ("context", 2, None),
            ("batch_size", 1, None),
            ("accumulate", 1, self.batch_size),
            ("repeated", 0, self.batch_size),
            ("vocab_size", SMALLEST_VOCAB, LARGEST_VOCAB),
            ("log_every", 1, None),
            ("evaluate_every", 1, None),
            ("save_every", 1, None),
        ):
            whole(getattr(self, name), name, smallest, largest)
        if self.schedule_steps is not None:
            whole(self.schedule_steps, "schedule_steps", 1, MOST_STEPS)
        self.config(self.vocab_size)
        check_device(self.device)
        real(self.learning_rate, "learning_rate", lambda x: 0 < x <= 1, "a positive number of at most 1")
        real(self.clip, "clip", lambda x: 0 < x < math.inf, "a positive number")
        # AdamW multiplies the weights by 1 - rate * decay, which must not be negative.
        highest = 1 / self.learning_rate
        real(self.decay, "decay", lambda x: 0 <= x <= highest and x < math.inf, f"between 0 and {highest:g}")
        real(self.dropout, "dropout", lambda p: 0 <= p <= 1, "a number between 0 and 1")

    def config(self, vocab: int) -> Config:
        """Return the sizes of the model.

        Args:
            vocab: The size of the tokenizer's vocabulary.

        Returns:
            The sizes.

        Raises:
            TypeError: If a size isn't an integer.
            ValueError: If sizes are out of range or don't fit each other.
        """
        whole(self.embed, "embed", 1)
        hidden = round(self.embed * 7 / 3) if self.hidden is None else self.hidden
        return Config(vocab, self.embed, self.heads, self.layers, hidden, self.context)

    def check_parts(self, processes: int) -> None:
        """Raise ValueError if the batch can't be cut into equal parts for the processes."""
        parts = processes * self.accumulate
        if self.batch_size % parts:
            raise ValueError(
                f"Expected batch_size to be a multiple of {parts} (processes: {processes}, accumulate: "
                f"{self.accumulate}), got {self.batch_size}. Choose one that {parts} divides."
            )

    def check_memory(self, vocab: int, processes: int = 1, shards: int = 1) -> None:
        """Check that the device has enough memory to train the model.

        Args:
            vocab: The size of the tokenizer's vocabulary.
            processes: The number of processes, which share the memory if the device is the CPU.
            shards: The number of processes that the weights are sharded over.

        Raises:
            ValueError: If weights, gradients, optimizer and logits need more than the device has.
        """
        # Weights, gradients and the two moments of AdamW, and logits and their gradients, all in float32.
        rows = self.batch_size // (processes * self.accumulate)
        needed = 16 * self.config(vocab).parameter_count // shards + 8 * rows * self.context * vocab
        if torch.device(self.device).type != "cuda":
            needed *= min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if torch.device(self.device).type == "cuda":
            available = torch.cuda.get_device_properties(self.device).total_memory
        else:
            available = psutil.virtual_memory().total
        if needed > available:
            raise ValueError(
                f"Training needs more than {amount(needed)} of memory, but {self.device} has "
                f"{amount(available)}. Choose a smaller model, vocab_size, batch_size or context."
            )

    def parts_at(self, step: int) -> int:
        """Return the number of parts that sequences are cut into: 8, 4, 2, 1 in the quarters of the schedule.

        Training starts with short sequences (Li et al. 2022, arXiv:2108.06084), because heads learn sooner
        which tokens to attend to if there are fewer. A batch always has the same number of tokens. If parts
        would be shorter than 32 tokens or of different lengths, sequences aren't cut.
        """
        parts = (8, 4, 2, 1)[min(3, 4 * step // (self.schedule_steps or self.steps))]
        return parts if self.context % parts == 0 and self.context // parts >= 32 else 1

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then cosine decay to 5% of the maximum."""
        steps = self.schedule_steps or self.steps
        warm_up = max(1, min(100, steps // 10))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def check_device(name: str) -> None:
    """Raise ValueError if this machine doesn't have the device."""
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        devices += [accelerator.type, *(f"{accelerator.type}:{n}" for n in range(count))]
    if name not in devices:
        raise ValueError(f"Expected device to be one of this machine's, {', '.join(devices)}, got {name!r}.")


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return bfloat16 if the device has instructions for it (a GPU; AMX or AVX-512 BF16), else None.

    The dtype isn't chosen by timing, because then two runs with the same seed could differ. On a single core
    with AMX, the shipped model trains on sequences of 512 tokens at 6,900 tokens/s in bfloat16 and 5,200 in
    float32 (medians of five measurements of CPU time).
    """
    device_type, capabilities = torch.device(device).type, torch.cpu.get_capabilities()
    if device_type == "cuda":
        supported = torch.cuda.is_bf16_supported()
    else:
        instructions = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
        supported = device_type == "cpu" and instructions
    return torch.bfloat16 if supported else None


class Run:
    """A training run: its folder, options, tokenizer, model and optimizer.

    `facts` describe the text: checksums and the numbers of documents, bytes and tokens. With a `mesh`, the
    weights are sharded over the processes of `group`, else replicated.
    """

    def __init__(
        self,
        out: Path,
        options: Options,
        tokenizer: Tokenizer,
        facts: Mapping[str, Any],
        group: Group = ALONE,
        mesh: DeviceMesh | None = None,
    ):
        self.out, self.options, self.tokenizer, self.facts = out, options, tokenizer, facts
        self.group, self.mesh = group, mesh
        self.device = options.device if group.size == 1 else own_device(options.device)
        self.step = 0  # the number of finished steps
        self.seconds = 0.0  # the training time so far
        config = options.config(tokenizer.get_vocab_size())
        torch.manual_seed(options.seed)
        self.model = LanguageModel(config, options.dropout).to(self.device).train()
        self.dropouts = parallel.use_batch_dropout(self.model) if self.is_cut else []
        if mesh is not None:
            parallel.shard(self.model, mesh)
        self.module: nn.Module = self.model  # computes gradients, and adds those of other processes
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": options.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
        self.dtype = autocast_dtype(options.device)

    @classmethod
    def begin(cls, out: Path, options: Options, files: data.TextFiles | None) -> Run:
        """Prepare the text (Python's own documentation if `files` is None) and write the first checkpoint."""
        with checkpoint.writing(out) as staging:
            tokenizer, facts = _prepare_text(staging, options, files)
            run = cls(out, options, tokenizer, facts)
            run.write(staging)
        return run

    @classmethod
    def resume(
        cls,
        out: Path,
        changes: Mapping[str, Any],
        paths: Sequence[Path],
        group: Group = ALONE,
        *,
        shard: bool = False,
    ) -> Run:
        """Resume a run.

        `changes` are the given options, of which only `steps` and `accumulate` may differ from the run's.
        """
        group.first_does(lambda: checkpoint.finish_write(out))
        with group.together():
            checkpoint.check_complete(out)
            options, facts, step, seconds, digests = _read_state(out / "state.json")
            for name, value in changes.items():
                if name not in CHANGEABLE and getattr(options, name) != value:
                    raise ValueError(
                        f"Expected --{name.replace('_', '-')} {getattr(options, name)}, with which the run "
                        f"in {out} was started, got {value}. Leave the option out to resume, or choose a "
                        "different --out."
                    )
            options = _with_steps(out, options, step, changes.get("steps", options.steps))
            options = replace(options, accumulate=changes.get("accumulate", options.accumulate))
            options.check_parts(group.size)
        mesh = parallel.mesh_of(group, options.device) if shard else None
        if paths:
            group.first_does(lambda: _check_text(out, paths, facts["documents_sha256"]))
        with group.together():
            config, tokenizer = checkpoint.read_config(out)
            if config != options.config(config.vocab):
                raise ValueError(
                    f"{out / 'config.json'} and {out / 'state.json'} describe models of different sizes. "
                    f"{RESTORE}"
                )
            options.check_memory(config.vocab, group.size, 1 if mesh is None else group.size)
            run = cls(out, options, tokenizer, facts, group, mesh)
        run.step, run.seconds = step, seconds
        run.restore([name for name in digests if name.startswith(SHARDS)])
        # Last, because the errors of other checks are more specific.
        group.first_does(lambda: checkpoint.check_digests(out, digests))
        group.first_does(lambda: checkpoint.write(out / LOG, "".join(run.read_log()).encode()))
        run.replicate()
        if options.schedule_steps is not None and step < options.steps:
            _console(group).print(
                f"continuing to step {options.steps}: the learning rate follows its schedule up to step "
                f"{options.schedule_steps}, then stays at {options.rate_at(options.schedule_steps):.3g}"
            )
        return run

    def replicate(self) -> None:
        """Average the gradients of replicated weights over the processes from now on."""
        if self.group.size > 1 and self.mesh is None:
            self.module = parallel.replicate(self.model)

    @property
    def is_cut(self) -> bool:
        """Return True if a batch is cut into parts, for several processes or to accumulate gradients."""
        return self.group.size * self.options.accumulate > 1

    @cached_property
    def training(self) -> data.Tokens:
        """Return the ids `[n]` of the training text."""
        return data.read_tokens(self.out / TRAINING)

    @cached_property
    def held_out(self) -> data.Tokens:
        """Return the ids `[n]` of the held-out text."""
        return data.read_tokens(self.out / HELD_OUT)

    def save(self) -> None:
        """Write a checkpoint that replaces the last one."""
        with ExitStack() as stack:
            staging = self.out / checkpoint.WRITING
            with self.group.together():
                if self.group.is_first:
                    stack.enter_context(checkpoint.writing(self.out))
            self.write(staging)
            with self.group.together():
                stack.pop_all().close()

    def write(self, staging: Path) -> None:
        """Write the files of a checkpoint into `staging`, a temporary folder."""
        config, first = self.model.config, self.group.is_first
        moments = {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            if self.step  # before the first step there are no moments
            for key, value in self.optimizer.state[parameter].items()
        }
        state = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "options": asdict(self.options),
            "facts": self.facts,
        }
        weights = self.model.state_dict() if self.mesh is None else parallel.gathered(self.model)
        digests: dict[str, str] = {}
        if self.group.size > 1:
            # The steps of all parameters are equal, and in state.json.
            tensors = {name: value for name, value in moments.items() if not name.endswith("/step")}
            checkpoint.write_shards(staging, self.out, tensors)
            with self.group.together():
                names = sorted(path.name for path in (staging / SHARDS).iterdir())
                mine = checkpoint.shard_digests(staging, names[self.group.rank :: self.group.size])
            digests = {name: digest for each in self.group.gather(mine) for name, digest in each.items()}
        with self.group.together():
            if first:
                model = checkpoint.model_files(weights, config, self.tokenizer)
                optimizer = {} if digests else {OPTIMIZER: checkpoint.tensor_bytes(moments, config)}
                run = checkpoint.run_files(model, optimizer, dict(sorted(digests.items())), state)
                checkpoint.write_files(staging, self.out, model | run)

    def restore(self, shards: Sequence[str] = ()) -> None:
        """Read the weights and the moments of AdamW from the folder, the moments from `shards`, if any."""
        config, weights = self.model.config, self.model.state_dict()
        with self.group.together():
            weights = checkpoint.read_tensors(self.out / "model.safetensors", weights, config)
        if self.mesh is None:
            self.model.load_state_dict(weights)
        else:
            parallel.scatter(self.model, weights)
        # Before the first step there are no moments.
        parameters = dict(self.model.named_parameters()) if self.step else {}
        if shards:
            moments = {
                f"{name}/{key}": torch.zeros_like(parameter)
                for name, parameter in parameters.items()
                for key in MOMENTS
            }
            self.group.first_does(lambda: checkpoint.check_shards(self.out, shards, moments))
            checkpoint.read_shards(self.out, moments)
        else:
            with self.group.together():
                moments = self.read_moments(parameters)
        for name, parameter in parameters.items():
            state = {key: parallel.like(moments[f"{name}/{key}"], parameter) for key in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **state}

    def read_moments(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the moments of AdamW in `optimizer.safetensors`, the file of a run on one process."""
        path, step = self.out / OPTIMIZER, torch.zeros(())
        expected = {
            f"{name}/{key}": tensor
            for name, parameter in parameters.items()
            for key, tensor in (("step", step), *((key, parameter) for key in MOMENTS))
        }
        moments = checkpoint.read_tensors(path, expected, self.model.config)
        for name in parameters:
            if moments[f"{name}/step"] != self.step:
                raise ValueError(
                    f"Expected step {self.step} in {path}, as in state.json, got "
                    f"{moments[f'{name}/step']:g}: one of them belongs to a different checkpoint."
                )
        return moments

    def read_log(self) -> list[str]:
        """Return the lines of the log up to the checkpoint, without an incomplete last line.

        Returns:
            The lines.

        Raises:
            ValueError: If a line isn't valid.
        """
        log = self.out / LOG
        try:
            lines = log.read_text("utf-8").splitlines(keepends=True) if log.exists() else []
            complete = [line for line in lines if line.endswith("\n")]
            return [line for line in complete if whole(json.loads(line)["step"], "step") <= self.step]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(
                f"{log} is damaged. Restore it from a copy, or move it away to start a new one."
            ) from None

    def advance(self) -> tuple[float, float]:
        """Train for one step; return the loss in nats per token and the gradient norm before clipping."""
        options, parts = self.options, self.options.parts_at(self.step)
        ids, targets = data.batch(
            self.training,
            rows=options.batch_size * parts,
            context=options.context // parts,
            repeated=options.repeated * parts,
            vocab=self.model.config.vocab,
            seed=options.seed,
            step=self.step,
        )
        dropout_seed = np.random.SeedSequence([options.seed, self.step, 1]).generate_state(1, np.uint32)[0]
        torch.manual_seed(int(dropout_seed))
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate_at(self.step)
        self.optimizer.zero_grad()
        loss = self.differentiate_parts(ids, targets) if self.is_cut else self.differentiate(ids, targets)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.step += 1
        return loss, parallel.whole(norm).item()

    def differentiate(self, ids: data.Tokens, targets: data.Tokens) -> float:
        """Compute the gradient of a batch `[b, t]`; return its loss in nats per token."""
        with self.autocast():
            logits = self.model(torch.from_numpy(ids).to(self.device))  # [b, t, vocab]
        labels = torch.from_numpy(targets).to(self.device).flatten()  # [b·t]
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=data.IGNORE)
        loss.backward()
        return loss.item()

    def differentiate_parts(self, ids: data.Tokens, targets: data.Tokens) -> float:
        """Compute the gradient of a batch `[b, t]` in parts and processes; return the loss of all of them."""
        count = int((targets != data.IGNORE).sum())
        random, total = torch.get_rng_state(), 0.0
        on_device = torch.get_device_module(self.device).get_rng_state() if self.device != "cpu" else None
        for part in parallel.parts_of(len(ids), self.group, self.options.accumulate):
            torch.set_rng_state(random)  # each part draws the dropout masks of the whole batch
            if on_device is not None:
                torch.get_device_module(self.device).set_rng_state(on_device)
            for dropout in self.dropouts:
                dropout.part = part
            inputs = torch.from_numpy(ids[part.start : part.stop]).to(self.device)  # [rows, t]
            labels = torch.from_numpy(targets[part.start : part.stop]).to(self.device).flatten()  # [rows·t]
            with parallel.reducing(self.module, part):
                with self.autocast():
                    logits = self.module(inputs)  # [rows, t, vocab]
                logits = logits.float().flatten(0, 1)  # [rows·t, vocab]
                loss = F.cross_entropy(logits, labels, ignore_index=data.IGNORE, reduction="sum") / count
                (loss * self.group.size).backward()  # the gradients of processes are averaged
            total += loss.item()
        for dropout in self.dropouts:
            dropout.part = None
        return self.group.sum(total)[0]

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a step."""
        device_type = torch.device(self.device).type
        return torch.autocast(device_type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def bits_per_byte(self, loss: float) -> float:
        """Convert a loss in nats per held-out token to bits per byte of the held-out text."""
        facts = self.facts[HELD_OUT]
        return loss / math.log(2) * (facts["tokens"] - 1) / facts["bytes"]


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, ids: data.Tokens, max_windows: int | None = None, group: Group = ALONE
) -> float:
    """Return the mean loss in nats per token, evaluated in windows as long as the model's context.

    Args:
        model: The model.
        ids: The token ids of the text, `[n]`. Every token but the first is predicted from the earlier tokens
            in its window.
        max_windows: The largest number of windows, which are spread evenly over the text; None for all.
        group: The processes, each of which evaluates some of the windows. All of them call this.

    Returns:
        The loss.
    """
    was_training = model.training
    model.eval()
    context = model.config.context
    starts = list(range(0, len(ids) - 1, context))
    if max_windows is not None and len(starts) > max_windows:
        starts = [starts[round(i)] for i in np.linspace(0, len(starts) - 1, max_windows)]
    windows = [torch.from_numpy(ids[start : start + context + 1].astype(np.int64)) for start in starts]
    full = [window for window in windows if len(window) == context + 1]
    batches = [torch.stack(full[i : i + EVALUATION_ROWS]) for i in range(0, len(full), EVALUATION_ROWS)]
    batches += [window[None] for window in windows if len(window) <= context]
    total, count = 0.0, 0
    # Processes compute a model with sharded weights together, so all of them have as many turns.
    turns = math.ceil(len(batches) / group.size)
    for i in range(group.rank, turns * group.size, group.size):
        rows = batches[min(i, len(batches) - 1)].to(model.embedding.weight.device)  # [b, t + 1]
        logits = model(rows[:, :-1])  # [b, t, vocab]
        targets = rows[:, 1:].flatten()  # [b·t]
        if i < len(batches):
            total += float(F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"))
            count += targets.numel()
    model.train(was_training)
    parallel.reshard(model)
    total, tokens = group.sum(total, count)
    return total / tokens


def train(
    out: str | os.PathLike[str],
    given: Mapping[str, Any] | None = None,
    paths: Sequence[Path] = (),
    *,
    resume: bool = False,
    shard: bool = False,
    timeout: float = TIMEOUT,
) -> Run:
    """Train a language model in a folder, or resume a run.

    SIGINT and SIGTERM save a checkpoint and raise KeyboardInterrupt; SIGINT before the first step saves none.

    Under torchrun, all processes call this with the same arguments and train one model together. They share
    the folder.

    Args:
        out: The folder of the run.
        given: Options by name, as in `Options`.
        paths: Text files, or folders of them. By default, the text is Python's own documentation.
        resume: Whether to continue the run in `out`.
        shard: Whether weights, gradients and optimizer are sharded over the processes (FSDP2) instead of
            replicated (DistributedDataParallel).
        timeout: The seconds that a process waits for the others.

    Returns:
        The finished run.

    Raises:
        ValueError: If an option, the text or the run in the folder is invalid.
        TypeError: If an option has the wrong type.
        OSError: If the folder already has a run, a file can't be read or written, or another process is lost.
    """
    out, given = Path(out), _rename_options(given or {})
    arguments = {
        **given,
        "out": out.absolute(),
        "data": [str(path) for path in paths],
        "resume": resume,
        "shard": shard,
    }
    with (
        torch.random.fork_rng(),
        processes.join(timeout=timeout, arguments=arguments) as group,
        ExitStack() as stack,
    ):
        with _explained_interrupt(out, group):
            run = _set_up(out, given, paths, group, stack, resume=resume, shard=shard)
        _train_steps(run)
    return run


def _set_up(
    out: Path,
    given: Mapping[str, Any],
    paths: Sequence[Path],
    group: Group,
    stack: ExitStack,
    *,
    resume: bool,
    shard: bool,
) -> Run:
    """Start a run, or read one, and lock its folder until the stack is closed."""
    if shard and group.size == 1:
        raise ValueError(
            "Expected --shard with several processes, got one. Start more by --processes or torchrun, or "
            "leave --shard out."
        )
    if resume:
        with group.together():
            if group.is_first:
                if not (out / checkpoint.WRITTEN).is_dir():
                    checkpoint.check_complete(out)  # before the lock, which is a file in the folder
                stack.enter_context(checkpoint.locked(out))
    else:
        options = Options(**{"device": "cuda" if torch.cuda.is_available() else "cpu", **given})
        options.check_parts(group.size)
        if group.size > 1:
            own_device(options.device)
        with group.together():
            if group.is_first:
                files = _check_new(out, options, paths, group.size, group.size if shard else 1)
                stack.enter_context(checkpoint.created(out))
                # Again: a different process may have written a run before the lock.
                checkpoint.check_vacant(out)
    _check_shared(out, group)
    if not resume and group.size == 1:
        return Run.begin(out, options, files)
    if not resume:
        group.first_does(lambda: Run.begin(out, options, files))
        given, paths = {}, ()
    return Run.resume(out, given, paths, group, shard=shard)


@contextmanager
def _explained_interrupt(out: Path, group: Group) -> Iterator[None]:
    """Print what Ctrl-C before the first step leaves."""
    try:
        yield
    except KeyboardInterrupt:
        rest = "continue with --resume" if (out / "state.json").exists() else "nothing was saved"
        _console(group).print(f"stopped before the first step; {rest}")
        raise


def _check_new(
    out: Path, options: Options, paths: Sequence[Path], processes: int, shards: int
) -> data.TextFiles | None:
    """Check that a run can be started in a folder; return the text files, if there are any."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"Expected a folder for --out, got {out}, which is a file.")
    checkpoint.check_vacant(out)
    files = data.TextFiles(paths) if paths else None
    # A text has at most one token per byte and one END per document, and a document isn't empty.
    if files is not None and 2 * files.size <= options.context:
        raise ValueError(_describe_short_text(f"{2 * files.size:,} or fewer", TRAINING, options))
    size = files.size if files is not None else options.vocab_size
    options.check_memory(min(options.vocab_size, SMALLEST_VOCAB + size), processes, shards)
    return files


def _check_shared(out: Path, group: Group) -> None:
    """Raise FileNotFoundError if a process doesn't see the folder that rank 0 has locked."""
    with group.together():
        if group.size > 1 and not (out / checkpoint.LOCK).exists():
            raise FileNotFoundError(
                f"Rank {group.rank}, on {platform.node()}, doesn't see the folder {out} of rank 0. Choose "
                "an --out on a disk that all machines share."
            )


def _check_text(out: Path, paths: Sequence[Path], digest: str) -> None:
    """Raise ValueError if the text of a run was a different one."""
    if data.digest(data.TextFiles(paths)) != digest:
        raise ValueError(
            f"The run in {out} was started with a different text than --data. Leave --data out to resume, or "
            "choose a different --out."
        )


def _rename_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by the current names of options."""
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def _describe_short_text(tokens: str, name: str, options: Options) -> str:
    return (
        f"Expected more tokens than the context of {options.context}, got {tokens} in {name}. Use more "
        "--data or a smaller --context."
    )


def _read_state(path: Path) -> tuple[Options, dict[str, Any], int, float, dict[str, str]]:
    """Read the options, facts, step, seconds and checksums of the other files from a state file.

    State files of earlier versions have checksums of the token files only.
    """
    state = checkpoint.read_json(path)
    try:
        options = Options(**_rename_options(state["options"]))
        facts, step, seconds = state["facts"], state["step"], state["seconds"]
        whole(step, "step")
        real(seconds, "seconds", lambda x: 0 <= x < math.inf, "a number of at least 0")
        for name in (TRAINING, HELD_OUT):
            whole(facts[name]["tokens"], f"the tokens of {name}", 1)
            whole(facts[name]["bytes"], f"the bytes of {name}", 1)
        str.lower(facts["documents_sha256"])
        digests = {name: str.lower(facts[name]["sha256"]) for name in (TRAINING, HELD_OUT)}
        if checkpoint.CHECKSUM in state:
            given = state[checkpoint.CHECKSUM]
            shards = sorted(name for name in given if name.startswith(f"{SHARDS}/"))
            names = (*checkpoint.FILES[:3], *(shards or [OPTIMIZER]))
            digests |= {name: str.lower(given[name]) for name in names}
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}. {RESTORE}") from None
    except ValueError as error:
        raise ValueError(f"{path} can't be resumed from: {error} {RESTORE}") from None
    except (TypeError, AttributeError, OverflowError):  # a value has an unexpected type
        raise ValueError(f"{path} is damaged. {RESTORE}") from None
    return options, facts, step, seconds, digests


def _with_steps(out: Path, options: Options, step: int, steps: int) -> Options:
    """Return the options of a run at `step` that continues to step `steps` with the same schedules."""
    whole(steps, "steps", 1)
    if steps == options.steps:
        return options
    if steps < step:
        raise ValueError(
            f"Expected --steps to be at least {step}, which the run in {out} has finished, got {steps}. "
            f"Leave --steps out to continue to step {options.steps}."
        )
    return replace(options, steps=steps, schedule_steps=options.schedule_steps or options.steps)


def _prepare_text(
    staging: Path, options: Options, files: data.TextFiles | None
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train the tokenizer and write the token files into `staging`; return the tokenizer and the facts."""
    with _show_stages(files) as stage:
        stage("reading the text", 3)
        documents: Iterable[data.Document] = data.python_documents() if files is None else files
        facts: dict[str, Any] = {
            "text": "python" if files is None else "files",
            "documents_sha256": data.digest(documents),
        }
        held_out = data.held_out_positions([document.name for document in documents])
        stage("training the tokenizer")
        training = (document for i, document in enumerate(documents) if i not in held_out)
        stride = 1 if files is None else math.ceil(files.size / TOKENIZER_TEXT)
        tokenizer = data.train_tokenizer(islice(training, 0, None, stride), options.vocab_size)
        stage("encoding the text")
        with ExitStack() as stack:
            writers = {}
            for name in (TRAINING, HELD_OUT):
                file = data.token_file(staging / name, data.token_dtype(tokenizer))
                writers[name] = stack.enter_context(file)
                writers[name](np.array([data.END_ID]))
                facts[name] = {"documents": 0, "bytes": 0, "tokens": 1}
            for i, (document, ids) in enumerate(data.encode(tokenizer, documents)):
                name = HELD_OUT if i in held_out else TRAINING
                writers[name](ids)
                facts[name]["documents"] += 1
                facts[name]["bytes"] += len(document.text.encode())
                facts[name]["tokens"] += len(ids)
    for name, smallest in ((TRAINING, options.context + 2), (HELD_OUT, 2)):
        if facts[name]["tokens"] < smallest:
            raise ValueError(_describe_short_text(str(facts[name]["tokens"]), name, options))
        facts[name]["sha256"] = checkpoint.file_digest(staging / name)
    return tokenizer, facts


@contextmanager
def _show_stages(files: data.TextFiles | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar; yield a function that starts a stage, given its name and passes over the files."""
    from rich.progress import Progress

    console = _console(ALONE)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        if files is not None:
            files.on_read = lambda size: bar.advance(task, size)

        def stage(name: str, passes: int = 1) -> None:
            bar.reset(task, total=None if files is None else passes * files.size, description=name)
            if not console.is_terminal:
                console.print(name)

        yield stage


def _console(group: Group) -> Console:
    """Return a console for standard error that prints text without markup, in rank 0 only."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False, quiet=not group.is_first)


def _train_steps(run: Run) -> None:
    """Train until the last step; show progress, and write log and checkpoints."""
    from rich.progress import Progress

    options, group, first_step, earlier_seconds = run.options, run.group, run.step, run.seconds
    tokens_per_step = options.batch_size * options.context
    console = _console(group)
    # The suggested prompt is a single letter, which fits into any context.
    suggestion = f"try it with: manyheads generate A --model {shlex.quote(str(run.out))}"
    if run.step >= options.steps:
        console.print(
            f"all {options.steps} steps of {run.out} are finished; {suggestion}, or continue with --resume "
            f"--steps {2 * options.steps}"
        )
        return
    started = time.perf_counter() - earlier_seconds
    with (
        _stop_requests() as stop,
        _open_log(run) as write,
        Progress(console=console, disable=not group.is_first) as bar,
    ):
        task = bar.add_task("", total=options.steps, completed=run.step)
        while run.step < options.steps:
            loss, norm = run.advance()
            run.seconds = time.perf_counter() - started
            speed = tokens_per_step * (run.step - first_step) / (run.seconds - earlier_seconds)
            progress = f"step {run.step}/{options.steps}, loss {loss:.3f}, {speed:,.0f} tokens/s"
            bar.update(task, completed=run.step, description=progress)
            if not math.isfinite(loss):
                raise ValueError(
                    f"The loss became {loss} at step {run.step}. Start again in a different --out with a "
                    f"lower --learning-rate than {options.learning_rate:g}, or with different --data. The "
                    f"last checkpoint in {run.out} is unchanged."
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
                    nats = held_out_loss(run.model, run.held_out, 128, group)
                    line["held_out_loss"] = round(nats, 5)
                    line["held_out_bits_per_byte"] = round(run.bits_per_byte(nats), 4)
                write(line)
            # A signal may have reached some of the processes only.
            stopping = group.sum(stop.is_set() or processes.is_orphan())[0] > 0
            if stopping or last or run.step % options.save_every == 0:
                run.save()
            if stopping and not last:
                console.print(f"stopped and saved at step {run.step}; continue with --resume")
                raise KeyboardInterrupt
    console.print(f"the model is in {run.out}; {suggestion}")


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that the current step can finish.

    A second signal raises KeyboardInterrupt at once.
    """
    requested = threading.Event()

    def request(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    with ExitStack() as handlers:
        if threading.current_thread() is threading.main_thread():  # other threads can't set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, request))
        yield requested


@contextmanager
def _open_log(run: Run) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Yield a function that writes a line to the log, and to TensorBoard if it is installed, in rank 0."""
    if not run.group.is_first:
        yield lambda line: None
        return
    board = None
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(run.out / "tensorboard", purge_step=run.step + 1)
    with board or nullcontext(), checkpoint.opened(run.out / LOG, "ab") as append:

        def write(line: Mapping[str, float]) -> None:
            append(json.dumps(line).encode() + b"\n")
            for name, value in line.items():
                if board is not None and name != "step":
                    board.add_scalar(name, value, int(line["step"]))

        yield write
