"""The command line. Each command calls functions that are also available in Python.

Exit codes: 0 success, 1 a check failed, 2 invalid use or input, 130 interrupted. A command imports its
modules when it runs, so that `manyheads --help` is fast.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads import __version__

if TYPE_CHECKING:
    from manyheads.viewer.api import Api
    from manyheads.viewer.export import Export

app = typer.Typer(
    name="manyheads",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich doubles the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse_path(text: str) -> Path:
    """Parse a path. An empty text is an error, because Path("") would be the current folder."""
    if not text:
        raise typer.BadParameter("Expected a path, got ''. Use . for the current folder.")
    return Path(text)


def option(metavar: str, help: str, default: str | bool = True, **more: Any) -> Any:
    """Return an option. If `default` is a text, the help shows it instead of the default."""
    return typer.Option(metavar=metavar, help=help, show_default=default, **more)


def file_option(metavar: str, help: str) -> Any:
    """Return an option whose value is a path."""
    return typer.Option(metavar=metavar, parser=parse_path, help=help)


def parse_utf8(text: str) -> str:
    """Decode an argument as UTF-8, because Python decodes it as ASCII in the C locale."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise typer.BadParameter("Expected UTF-8 text.") from None


def print_version(requested: bool) -> None:
    """Print the version and exit if --version is given."""
    if requested:
        print(f"manyheads {__version__}")
        raise typer.Exit


@app.callback()
def manyheads(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Multi-head attention you can see through."""


@app.command()
def show(
    text: Annotated[str | None, typer.Argument(help="Text to read.")] = None,
    text_file: Annotated[
        str | None, option("FILE", "Read the text from a file (- for standard input).")
    ] = None,
    out: Annotated[Path, file_option("DIR", "Folder for the pictures.")] = Path("manyheads-out"),
    layer: Annotated[int | None, option("N", "Layer to show in detail, counted from 0.")] = None,
    head: Annotated[int | None, option("N", "Head to show in detail, counted from 0.")] = None,
    model: Annotated[
        str | None,
        option(
            "NAME_OR_PATH",
            "Model: the folder of a checkpoint, or a Hugging Face model (its folder, or its name in the "
            "local cache). The default is the model that ships with manyheads.",
        ),
    ] = None,
    no_mask: Annotated[
        bool, typer.Option("--no-mask", help="Also show the head with the same q and k and no mask.")
    ] = False,
    format: Annotated[str, option("png|svg|pdf", "Format of the pictures.")] = "png",
    everything: Annotated[
        bool, typer.Option("--all", help="Also print the scores of every head and a heat map of one head.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON: findings and head scores.")] = False,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Keep the first tokens of a text that is longer than the context."),
    ] = False,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Read up to 32,768 tokens with a manyheads model. Beyond its context it extrapolates.",
        ),
    ] = False,
    save: Annotated[
        Path | None, file_option("FILE", "Save the maps for `manyheads view` and manyheads.open_run.")
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the maps in the interactive viewer.")] = False,
) -> None:
    """Show what each head of a language model attends to.

    Prints findings as sentences, and draws a picture of every head; with --layer or --head, of that head.
    """
    from manyheads.storage import file_for, folder_for
    from manyheads.text import report, terminal

    if browser and json:
        raise ValueError("Expected --json or --open, got both.")
    if browser:
        from manyheads import viewer

        viewer.require_server()
    report.check_format(format)
    content = report.read_text(text, text_file)
    run = None if save is None else file_for(save, "--save")
    with terminal.progress() as progress:
        reading = report.read(content, model, truncate=truncate, long=long, progress=progress)
    chosen = report.choose_head(reading, layer, head)
    folder = folder_for(out, "--out")
    if run is not None:
        report.save(reading, run)
    has_detail = everything or no_mask or layer is not None or head is not None
    with terminal.show_spinner("measuring"):
        _ = reading.patterns  # a cached property: computed while the spinner is shown
        if everything or json:
            _ = reading.uniform
    if not json:
        terminal.show(reading)
        if everything:
            terminal.show_scores(reading)
        if has_detail:
            terminal.show_head(reading, *chosen, masked=not no_mask)
    with terminal.show_spinner("drawing"):
        pictures: dict[str, Any] = {}
        if everything or json or not has_detail:
            pictures |= report.draw_overview(reading)
        if json or has_detail:
            pictures |= report.draw_head(reading, *chosen, masked=not no_mask)
        files = report.write(pictures, folder, format)
    files += [] if run is None else [run]
    if json:
        print(report.to_json(reading, *chosen, files, masked=not no_mask))
    else:
        terminal.list_files(files)
        if not has_detail:
            terminal.suggest_more(*chosen)
    if browser:
        from manyheads.viewer.api import Api

        serve(Api(reading.recording))


@app.command()
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            parser=parse_path,
            help="Saved maps (of Recording.save or show --save); several to compare.",
        ),
    ],
    port: Annotated[int, option("N", "Port to listen on (0 picks a free one).")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    export: Annotated[
        Path | None, file_option("PAGE.html", "Write a page to this file instead of serving.")
    ] = None,
    layer: Annotated[int | None, option("N", "Layer to export, counted from 0. The default is all.")] = None,
    head: Annotated[
        list[int] | None,
        option("N", "Head to export, counted from 0. Repeatable. The default is all."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Export single weights, also of heads that are large.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Export without a question, also more than 200 MB.")
    ] = False,
) -> None:
    """Open saved attention maps in the interactive viewer."""
    from manyheads import viewer
    from manyheads.viewer.api import Api

    if export is None and (layer is not None or head or full or yes):
        raise ValueError(
            "Expected --layer, --head, --full and --yes with --export only: the viewer shows every head."
        )
    if export is None:
        viewer.require_server()  # before files are read
        serve(Api(*runs), port, browser)
        return
    from manyheads.storage import file_for
    from manyheads.viewer.export import plan_export

    plan = plan_export(Api(*runs), export, layer, head, full=full)
    file_for(export, "--export")
    write_page(plan, yes)


def write_page(plan: Export, yes: bool) -> None:
    """Write an exported page with a progress bar. Large ones are confirmed in a terminal."""
    from manyheads.text import terminal
    from manyheads.viewer.export import CONFIRM_BYTES

    plan.check_space()
    print(plan.description, flush=True)
    if plan.size > CONFIRM_BYTES and not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ValueError("Expected --yes for an export of more than 200 MB without a terminal.")
        if not typer.confirm("write it?"):
            raise typer.Exit(1)
    with terminal.progress() as progress:
        task = progress.add_task("exporting", total=1.0)
        files = plan.write(lambda share: progress.update(task, completed=share))
    print(f"wrote {' and '.join(map(str, files))}")


def serve(api: Api, port: int = 0, browser: bool = True) -> None:
    """Open the viewer and serve it until interrupted."""
    from manyheads.viewer import require_server

    server = require_server()(api, port)
    opened = browser and server.open_browser()
    print(
        f"{'opened' if opened else 'open this link in a browser:'} {server.url}\nCtrl-C ends it", flush=True
    )
    try:
        server.wait()
    finally:
        server.close()


@app.command()
def train(
    command: typer.Context,
    out: Annotated[Path, file_option("DIR", "Folder of the run.")],
    data: Annotated[
        list[Path] | None, file_option("PATH", "Text file, or folder of text files. Repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    steps: Annotated[
        int | None, option("N", "Optimizer steps; with --resume, the step to continue to.", "3000")
    ] = None,
    context: Annotated[int | None, option("N", "Longest sequence, in tokens.", "512")] = None,
    layers: Annotated[int | None, option("N", "Transformer layers.", "4")] = None,
    heads: Annotated[int | None, option("N", "Attention heads per layer.", "6")] = None,
    embed: Annotated[
        int | None, option("N", "Model width (embedding size), a multiple of 4 * heads.", "192")
    ] = None,
    hidden: Annotated[int | None, option("N", "Width of the feed-forward layers.", "7/3 of --embed")] = None,
    vocab_size: Annotated[
        int | None, option("N", "Largest number of tokens, 257 to 1048576.", "3072")
    ] = None,
    batch_size: Annotated[int | None, option("N", "Sequences per step.", "8")] = None,
    learning_rate: Annotated[float | None, option("X", "Highest learning rate, at most 1.", "0.002")] = None,
    seed: Annotated[int | None, option("N", "Random seed of weights, batches and dropout.", "0")] = None,
    device: Annotated[
        str | None,
        option("NAME", "Device: cpu, cuda, cuda:1 or mps.", "cuda if it is available, else cpu"),
    ] = None,
) -> None:
    """Train a small language model on text. The default text is Python's own documentation."""
    from manyheads import lm

    options = {name: value for name, value in command.params.items() if value is not None}
    for name in ("out", "data", "resume"):
        options.pop(name, None)
    lm.train(out, options, data or (), resume=resume)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(parser=parse_utf8, help="Text to continue.")],
    model: Annotated[
        Path | None,
        file_option("DIR", "Folder of a checkpoint. The default is the model that ships with manyheads."),
    ] = None,
    tokens: Annotated[int, option("N", "Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[float, option("T", "Sampling temperature (0 is greedy).")] = 0.8,
    top_k: Annotated[int | None, option("K", "Sample from the K most likely tokens.")] = None,
    top_p: Annotated[
        float, option("P", "Sample from the most likely tokens whose probabilities sum to P.")
    ] = 1.0,
    stop: Annotated[str | None, option("TEXT", "Stop before this text.")] = None,
    seed: Annotated[int, option("N", "Random seed.")] = 0,
) -> None:
    """Continue a prompt with a language model."""
    from manyheads import lm

    sampling = lm.Sampling(temperature, top_k, top_p)
    pieces = lm.stream(*lm.load(model), prompt, tokens, sampling, stop=stop, seed=seed)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()
    if piece.end == "context":
        print(f"manyheads: stopped before {tokens} tokens, the model's context is full", file=sys.stderr)


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(help="Class, instance, function or factory, as module:name or path/to/file.py:name."),
    ],
    like: Annotated[
        str | None,
        option(
            "KIND",
            "Kind of attention: attention, self, cross, multihead, torch-mha, sdpa, hf, positional, rotary "
            "or classic.MODULE.CLASS. Guessed by default.",
        ),
    ] = None,
    init: Annotated[
        str | None, option("ARGS", "Constructor arguments, e.g. 'hidden=16, num_heads=4'.")
    ] = None,
    weights: Annotated[
        str | None, option("ROLES", "Names of the projection layers: q=a,k=b,v=c,o=d.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        option("NAME=ROLE", "Role of an argument of the call, e.g. segments=mask-of-keys. May be repeated."),
    ] = None,
    heads: Annotated[int | None, option("N", "Number of heads.")] = None,
    setup: Annotated[
        Path | None,
        file_option(
            "FILE", "TOML file with like, init, args, heads, weights and layout. Options replace its values."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        option("batch|sequence", "Layout of the inputs: batch is [b, t, e], sequence is [t, b, e]."),
    ] = None,
    strict: Annotated[
        list[str] | None,
        option("NAME", "Convention that counts as a failure, e.g. empty-rows, or all. Can be repeated."),
    ] = None,
    out: Annotated[Path | None, file_option("DIR", "Folder for a picture of the difference.")] = None,
    json: Annotated[Path | None, file_option("FILE", "Write the report as JSON.")] = None,
    junit: Annotated[Path | None, file_option("FILE", "Write the report as JUnit XML.")] = None,
    timeout: Annotated[float, option("SECONDS", "Time limit of each call.")] = 60.0,
    memory: Annotated[str, option("SIZE", "Memory limit of the process, e.g. 500M or 4G.")] = "4G",
) -> None:
    """Check an attention implementation, and name its bugs.

    The code runs in a separate process with limits on time and memory, but it is not sandboxed: it has your
    permissions and can use your files and network. Exit code 0: every check passed. 1: a check failed. 2: the
    code can't be imported, constructed or understood, or no check failed but a mask argument couldn't be
    judged.
    """
    from manyheads.checker import command

    options = {"like": like, "init": init, "heads": heads, "layout": layout, "setup": setup}
    report = command.run(target, arg or [], timeout, memory, weights=weights, strict=strict, **options)
    command.write_report(report, out, json, junit)
    raise typer.Exit(command.EXIT_CODES[report.verdict])


@app.command()
def lessons(
    out: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="Folder for the notebooks.")
    ] = Path("manyheads-lessons"),
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start JupyterLab in the folder.")] = True,
) -> None:
    """Copy the four lessons to a folder and open them in JupyterLab. Existing files are kept."""
    from manyheads.text import lessons

    copied = lessons.copy(out)
    print(f"{out}: {len(copied)} files copied" if copied else f"{out} has all files, which are kept")
    command = shlex.join(lessons.command(out))
    if not lessons.can_start():
        print(f"to run them: pip install jupyterlab transformers && {command}")
    elif not start:
        print(f"to run them: {command}")
    else:
        print(f"starting {command}", flush=True)
        raise typer.Exit(lessons.start(out))


@app.command()
def kernels() -> None:
    """Print the attention kernels, in order of preference."""
    from manyheads.kernels import machine

    print(machine())


@app.command()
def bench(
    kind: Annotated[
        list[str] | None,
        option(
            "forward|causal|training|statistics|decode|layer|choice",
            "What to measure. Repeatable, except choice: it runs every kernel on a grid of cases and on 200 "
            "random ones, and prints those in which kernel='auto' is slower than the fastest.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        option("float32|bfloat16", "Number format; float16 for choice. Repeatable."),
    ] = None,
    size: Annotated[list[int] | None, option("N", "Head size. Repeatable.")] = None,
    length: Annotated[list[int] | None, option("N", "Sequence length. Repeatable.")] = None,
    rounds: Annotated[int, option("N", "Measured runs of each, after a warm-up run.", min=1)] = 7,
    seed: Annotated[
        int | None,
        option("N", "Random seed of the cases of choice. By default, each run draws new cases.", min=0),
    ] = None,
    out: Annotated[Path, file_option("DIR", "Folder for the table and the plot.")] = Path("manyheads-bench"),
) -> None:
    """Measure the speed of attention on this machine.

    The kernels of manyheads are compared with PyTorch's attention and other libraries. With --kind choice,
    cases in which kernel='auto' seems slower than the fastest by more than 5 % and 15 µs are measured five
    more times after all others, and the smallest median of each kernel counts. Exit code 1: some stay slower.
    """
    from random import SystemRandom

    from rich.progress import Progress

    from manyheads import bench
    from manyheads.bench import choice
    from manyheads.storage import folder_for

    cases: Any  # problems, or cases of choice
    if kind == ["choice"]:
        seed = SystemRandom().randrange(1 << 32) if seed is None else seed
        cases = choice.cases(tuple(dtype or ()), tuple(size or ()), tuple(length or ()), seed)
    elif "choice" in (kind or ()):
        raise ValueError("Expected --kind choice alone, got other kinds too. Run them one after another.")
    elif seed is not None:
        raise ValueError("Expected --seed with --kind choice only, as other kinds draw no random cases.")
    else:
        cases = bench.problems(
            tuple(kind or bench.KINDS),
            tuple(dtype or bench.DTYPES),
            tuple(size or (64, 128)),
            tuple(length or bench.LENGTHS),
        )
    folder = folder_for(out, "--out")
    measured = 0
    report: bench.Report | choice.Report
    try:
        report = (
            bench.Report(bench.machine()) if seed is None else choice.Report(bench.describe_machine(), seed)
        )
        with Progress(transient=True) as progress:
            for case in progress.track(cases, description="measuring"):
                report.measure(case, rounds)
                measured += 1
                report.keep(folder)
            succeeded = report.finish(rounds, progress.track)
        files = report.save(folder)
    except KeyboardInterrupt:
        result = f"written to {list_names(report.save(folder))}" if measured else "nothing was measured"
        print(f"manyheads: interrupted after {measured:,} of {len(cases):,} cases, {result}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{report.text()}\nwritten to {list_names(files)}")
    if not succeeded:
        raise typer.Exit(1)


def list_names(files: list[Path]) -> str:
    """Return the folder and the names of files."""
    return f"{files[0].parent}: {', '.join(file.name for file in files)}"


def main() -> None:
    """Run a command. Invalid input gives one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"manyheads: {error}", file=sys.stderr)
        sys.exit(2)
