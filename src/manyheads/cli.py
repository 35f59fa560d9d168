"""The commands. Each is a thin layer over functions that can be called from Python.

Exit codes of every command: 0 done, 1 a check failed, 2 wrong use or input, 130 interrupted.
A command imports what it needs when it runs, so that `manyheads --help` is quick.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads import __version__

if TYPE_CHECKING:
    from manyheads.viewer.gallery import Gallery

app = typer.Typer(
    name="manyheads",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich doubles the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def path(text: str) -> Path:
    """Return the path that an option names; Path("") would be the current folder."""
    if not text:
        raise typer.BadParameter("Expected a path, got ''. Use . for the current folder.")
    return Path(text)


def utf8(text: str) -> str:
    """Return an argument as text, which Python decodes as ASCII in the C locale."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise typer.BadParameter("Expected UTF-8 text.") from None


def print_version(wanted: bool) -> None:
    """Print the version and end, if --version is given."""
    if wanted:
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
        str | None, typer.Option(metavar="FILE", help="Read the text from a file (- for standard input).")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=path, help="Folder for the pictures.")] = Path(
        "manyheads-out"
    ),
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="Layer to show in detail, counted from 0.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(metavar="N", help="Head to show in detail, counted from 0.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="Model: the folder of a checkpoint, or a Hugging Face model (its folder, or its name in the "
            "local cache). The default is the model that ships with manyheads.",
        ),
    ] = None,
    no_mask: Annotated[
        bool, typer.Option("--no-mask", help="Also show the head with the same q and k and no mask.")
    ] = False,
    format: Annotated[str, typer.Option(metavar="png|svg|pdf", help="Format of the pictures.")] = "png",
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
        Path | None,
        typer.Option(
            metavar="FILE", parser=path, help="Save the maps for `manyheads view` and manyheads.open_run."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the maps in the interactive viewer.")] = False,
) -> None:
    """Show what each head of a language model attends to.

    Prints findings as sentences, a table of head scores and a heat map, and draws pictures.
    """
    from manyheads import show
    from manyheads.files import file_for, folder_for

    if browser and json:
        raise ValueError("--json prints and ends, and --open serves a page until it is interrupted: use one.")
    if browser:
        from manyheads import viewer

        viewer.require_server()
    show.format_of(format)
    given = show.text_of(text, text_file)
    run = None if save is None else file_for(save, "--save")
    with show.progress() as bar:
        reading = show.read(given, model, truncate=truncate, long=long, bar=bar)
    chosen = show.pick(reading, layer, head)
    folder = folder_for(out, "--out")
    if run is not None:
        show.save(reading, run)
    with show.busy("measuring"):
        show.measure(reading)
    if not json:
        show.words(reading, *chosen, masked=not no_mask)
    with show.busy("drawing"):
        files = show.write(show.pictures(reading, *chosen, masked=not no_mask), folder, format)
    files += [] if run is None else [run]
    if json:
        show.machine(reading, *chosen, files, masked=not no_mask)
    else:
        show.named(files)
    if browser:
        from manyheads.viewer.gallery import Gallery

        serve(Gallery(reading.seen))


@app.command()
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            parser=path,
            help="Saved maps (of Recording.save or show --save); several to compare.",
        ),
    ],
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on (0 picks a free one).")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    export: Annotated[
        Path | None,
        typer.Option(metavar="PAGE.html", parser=path, help="Write a page to this file instead of serving."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="Layer to export, counted from 0. The default is all.")
    ] = None,
    head: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Head to export, counted from 0. Repeatable. The default is all."),
    ] = None,
) -> None:
    """Open saved attention maps in the interactive viewer."""
    from rich.progress import Progress

    from manyheads.viewer.gallery import Gallery

    if export is None and (layer is not None or head):
        raise ValueError("--layer and --head say what to --export: the page shows every head.")
    if export is None:
        from manyheads import viewer

        viewer.require_server()
        serve(Gallery(*runs), port, browser)
        return
    from manyheads.files import file_for
    from manyheads.viewer.export import planned

    plan = planned(Gallery(*runs), export, layer, head)
    file_for(export, "--export")
    print(plan.told, flush=True)
    with Progress(transient=True) as progress:
        task = progress.add_task("exporting", total=1.0)
        files = plan.write(lambda share: progress.update(task, completed=share))
    print(f"wrote {' and '.join(map(str, files))}")


def serve(gallery: Gallery, port: int = 0, browser: bool = True) -> None:
    """Show a gallery until interrupted."""
    from manyheads.viewer import View

    shown = View.served(gallery, port)
    opened = browser and shown.open()
    print(f"{'opened' if opened else 'open this link in a browser:'} {shown.url}\nCtrl-C ends it", flush=True)
    try:
        shown.wait()
    finally:
        shown.close()


@app.command()
def train(
    out: Annotated[Path, typer.Option(metavar="DIR", parser=path, help="Folder of the run.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", parser=path, help="Text file, or folder of text files. Repeatable."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default="3000",
            help="Optimizer steps; with --resume, the step to continue to.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", show_default="512", help="Longest sequence, in tokens.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", show_default="4", help="Transformer layers.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(metavar="N", show_default="6", help="Attention heads per layer.")
    ] = None,
    embed: Annotated[
        int | None,
        typer.Option(
            metavar="N", show_default="192", help="Model width (embedding size), a multiple of 4 * heads."
        ),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="7/3 of --embed", help="Width of the feed-forward layers."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="3072", help="Largest number of tokens, 257 to 1048576."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", show_default="8", help="Sequences per step.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(metavar="X", show_default="0.002", help="Highest learning rate, at most 1."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="0", help="Random seed of weights, batches and dropout."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="cuda if there is one, else cpu",
            help="Device: cpu, cuda, cuda:1 or mps.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
) -> None:
    """Train a small language model on text. The default text is Python's own documentation."""
    from manyheads import lm

    given = {
        "steps": steps,
        "context": context,
        "layers": layers,
        "heads": heads,
        "embed": embed,
        "hidden": hidden,
        "vocab_size": vocab_size,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "device": device,
    }
    given = {name: value for name, value in given.items() if value is not None}
    lm.train(out, given, data or (), resume=resume)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(parser=utf8, help="Text to continue.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path,
            help="Folder of a checkpoint. The default is the model that ships with manyheads.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature (0 is greedy).")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens.")
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(metavar="P", help="Sample from the most likely tokens whose probabilities sum to P."),
    ] = 1.0,
    stop: Annotated[str | None, typer.Option(metavar="TEXT", help="Stop before this text.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
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
        typer.Option(
            metavar="KIND",
            help="Kind of attention: attention, self, cross, multihead, torch-mha, sdpa, hf, positional, "
            "rotary or classic.MODULE.CLASS. Guessed by default.",
        ),
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="ARGS", help="Constructor arguments, e.g. 'hidden=16, num_heads=4'.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="ROLES", help="Names of the projection layers: q=a,k=b,v=c,o=d.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="batch|sequence", help="Layout of the inputs: batch is [b, t, e], sequence is [t, b, e]."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=path, help="Folder for a picture of the difference.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", parser=path, help="Write the report as JSON.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=path, help="Write the report as JUnit XML.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of each call.")] = 60.0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory limit of the process, e.g. 500M or 4G.")
    ] = "4G",
) -> None:
    """Check an attention implementation, and name its bugs.

    The code is run in a separate process with limits on time and memory, but with your files, your network
    and your permissions: it is not sandboxed. Exit code 0: every check passed. 1: a check failed. 2: the code
    can't be imported, constructed or understood, or no check failed but a mask argument couldn't be judged.
    """
    from manyheads.checker import command

    report = command.run(target, like, init, weights, layout, timeout, memory)
    command.deliver(report, out, json, junit)
    raise typer.Exit(command.EXIT_CODES[report.verdict])


@app.command()
def lessons(
    out: Annotated[Path, typer.Argument(metavar="DIR", parser=path, help="Folder for the notebooks.")] = Path(
        "manyheads-lessons"
    ),
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start JupyterLab in the folder.")] = True,
) -> None:
    """Copy the four lessons to a folder and open them in JupyterLab. Existing files are kept."""
    from manyheads import lessons

    made = lessons.copy(out)
    print(f"{out}: {len(made)} files copied" if made else f"{out}: all files are there, and stay as they are")
    words = shlex.join(lessons.command(out))
    if not lessons.startable():
        print(f"to run them: pip install jupyterlab transformers && {words}")
    elif not start:
        print(f"to run them: {words}")
    else:
        print(f"starting {words}", flush=True)
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
        typer.Option(
            metavar="forward|causal|training|look|decode|layer|choice",
            help="What to measure. Repeatable, except choice: it runs every kernel on a grid of cases and on "
            "200 random ones, and prints those in which kernel='auto' is slower than the fastest.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="float32|bfloat16", help="Number format; float16 for choice. Repeatable."),
    ] = None,
    size: Annotated[list[int] | None, typer.Option(metavar="N", help="Head size. Repeatable.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Sequence length. Repeatable.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measured runs of each, after a warm-up run.")
    ] = 7,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Random seed of the cases of choice. The default is another in each run."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", parser=path, help="Folder for the table and the plot.")
    ] = Path("manyheads-bench"),
) -> None:
    """Measure the speed of attention on this machine.

    The kernels of manyheads run beside PyTorch's attention and other libraries. With --kind choice, cases in
    which kernel='auto' looks slower than the fastest by more than 5 % and 15 µs are measured five times more
    after all others, and the smallest median of each kernel counts. Exit code 1: some stay slower.
    """
    from rich.progress import Progress

    from manyheads import bench
    from manyheads.files import folder_for

    if "choice" in (kind or ()):
        if len(kind or ()) > 1:
            raise ValueError("Expected --kind choice alone, got other kinds beside it. Run them one by one.")
        bench_choice(tuple(dtype or ()), tuple(size or ()), tuple(length or ()), rounds, seed, out)
        return
    if seed is not None:
        raise ValueError("Expected --seed with --kind choice only: other kinds draw no cases.")
    todo = bench.problems(
        tuple(kind or bench.KINDS),
        tuple(dtype or bench.DTYPES),
        tuple(size or (64, 128)),
        tuple(length or bench.LENGTHS),
    )
    folder = folder_for(out, "--out")
    results: list[bench.Result] = []
    try:
        report = bench.Report(bench.machine(), results)
        with Progress(transient=True) as progress:
            for problem in progress.track(todo, description="measuring"):
                results.append(bench.measure(problem, rounds))
                report.keep(folder)  # so that nothing is lost where it is killed
        report.settle()
        files = report.save(folder)
    except KeyboardInterrupt:
        where = "nothing was measured"
        if results:
            where = f"written to {folder}: {', '.join(file.name for file in report.save(folder))}"
        after = f"after {len(results)} of {len(todo)} problems"
        print(f"manyheads: interrupted {after}, {where}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(report.markdown(), end="")
    print(f"\nwritten to {folder}: {', '.join(file.name for file in files)}")


def bench_choice(
    dtypes: tuple[str, ...],
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    rounds: int,
    seed: int | None,
    out: Path,
) -> None:
    """Print the cases in which `auto` doesn't choose the fastest kernel; exit code 1 if there are some."""
    from random import SystemRandom

    from rich.progress import Progress

    from manyheads.bench import choice, describe_machine
    from manyheads.files import folder_for

    seed = SystemRandom().randrange(1 << 32) if seed is None else seed
    todo = choice.cases(dtypes, sizes, lengths, seed)
    folder = folder_for(out, "--out")
    report = choice.Report(describe_machine(), seed)
    try:
        with Progress(transient=True) as progress:
            for case in progress.track(todo, description="measuring"):
                report.keep(choice.measure(case, rounds), folder)
            for _ in range(choice.AGAIN):
                for outcome in progress.track(report.slower, description="measuring slower ones again"):
                    outcome.improve(choice.measure(outcome.case, rounds * choice.THOROUGH))
    except KeyboardInterrupt:
        where = "nothing was measured"
        if report.outcomes:
            where = f"written to {folder}: {', '.join(file.name for file in report.save(folder))}"
        after = f"after {len(report.outcomes):,} of {len(todo):,} cases"
        print(f"manyheads: interrupted {after}, {where}", file=sys.stderr)
        raise typer.Exit(130) from None
    files = report.save(folder)
    print(report.text(), end="")
    print(f"\nwritten to {folder}: {', '.join(file.name for file in files)}")
    raise typer.Exit(1 if report.slower else 0)


def main() -> None:
    """Run a command. Wrong input is one sentence on standard error and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"manyheads: {error}", file=sys.stderr)
        sys.exit(2)
