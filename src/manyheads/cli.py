"""The commands. Each is a thin face on a function that can be called from Python.

Exit codes of every command: 0 done, 1 a check failed, 2 wrong use or input, 130 interrupted.
A command imports what it needs when it runs, so that `manyheads --help` stays quick.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manyheads.viewer.gallery import Gallery

app = typer.Typer(
    name="manyheads",
    help="Multi-head attention you can see through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """Multi-head attention you can see through."""


@app.command()
def show(
    text: Annotated[str | None, typer.Argument(help="The text to look at.")] = None,
    text_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the text from a file; - is standard input.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pictures, created.")] = Path(
        "manyheads-out"
    ),
    layer: Annotated[int | None, typer.Option(metavar="N", help="Layer to show in full, from 0.")] = None,
    head: Annotated[int | None, typer.Option(metavar="N", help="Head to show in full, from 0.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="A checkpoint's folder, or a Hugging Face model: its folder, or a name in the local cache.",
        ),
    ] = None,
    no_mask: Annotated[
        bool, typer.Option("--no-mask", help="Beside it the same q and k without the mask: a what-if.")
    ] = False,
    format: Annotated[str, typer.Option(metavar="png|svg|pdf", help="Format of the pictures.")] = "png",
    json: Annotated[bool, typer.Option("--json", help="Print findings and measures as JSON only.")] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Keep the first tokens of a text that is too long.")
    ] = False,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Read up to 32,768 tokens with a model of ours, beyond its context: there it extrapolates.",
        ),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the maps too, for view and manyheads.open_run.")
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Fly over them in a browser then.")] = False,
) -> None:
    """Show what each head of a language model attends to: in words, a table and pictures."""
    from manyheads import show
    from manyheads.files import file_for, folder_for

    if browser and json:
        raise ValueError("--json prints and ends, and --open serves a page until it is interrupted: use one.")
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
        list[Path], typer.Argument(metavar="FILE…", help="What observe or show --save wrote; two to compare.")
    ],
    port: Annotated[int, typer.Option(metavar="N", help="Of this machine; 0 is any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    export: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page to send, and don't serve.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="Layer to export, from 0; all if not given.")
    ] = None,
    head: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Head to export, from 0; may be repeated.")
    ] = None,
) -> None:
    """Fly over attention in a browser: from all of a head, at any length, down to single weights."""
    from rich.progress import Progress

    from manyheads.viewer.gallery import Gallery

    if export is None and (layer is not None or head):
        raise ValueError("--layer and --head say what to --export: the page shows every head.")
    gallery = Gallery(*runs)
    if export is None:
        serve(gallery, port, browser)
        return
    from manyheads.files import file_for
    from manyheads.viewer.export import planned

    plan = planned(gallery, export, layer, head)
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run, created.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Text files or folders of them; repeat for more."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Optimizer steps.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Longest sequence, tokens.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of weights and batches.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a small language model on text; without --data, on Python's own documentation."""
    from manyheads import lm

    given = {"steps": steps, "context": context, "seed": seed, "device": device}
    given = {name: value for name, value in given.items() if value is not None}
    lm.train(out, given, data or (), resume=resume)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint's folder, not the shipped model.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="At most this many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Of the K likeliest only.")] = None,
    top_p: Annotated[float, typer.Option(metavar="P", help="Of the likeliest that sum to P.")] = 1.0,
    stop: Annotated[str | None, typer.Option(metavar="TEXT", help="End before this text.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the drawing.")] = 0,
) -> None:
    """Continue a prompt with a language model; a full context ends the text, and says so."""
    from manyheads import lm

    sampling = lm.Sampling(temperature, top_k, top_p)
    made = lm.complete(*lm.load(model), prompt, tokens, sampling, stop=stop, seed=seed)
    print(prompt + made.text)
    if made.end == "context":
        print(f"manyheads: stopped before {tokens} tokens, the model's context is full", file=sys.stderr)


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            help="module:name or path/to/file.py:name: a class, an instance, a function or a factory."
        ),
    ],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="attention, self, cross, multihead, torch-mha, sdpa, hf, positional, rotary, or "
            "classic.MODULE.CLASS; guessed if not given.",
        ),
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="ARGS", help="Constructor arguments: 'hidden=16, num_heads=4'.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="ROLES", help="Whose each layer is: q=a,k=b,v=c,o=d.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="batch|sequence", help="[b, t, e] or [t, b, e].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for a picture of what differs.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="The report as JUnit's XML.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="That a call may take.")] = 60.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="That its process may hold: 500M, 4G.")] = "4G",
) -> None:
    """Check somebody's attention, and name what is wrong with it.

    The code under check is run, in a process of its own with limits of time and memory, as you: with your
    files, your network and your rights. This is no sandbox. Exit code 0: all held; 1: something failed; 2: it
    couldn't be imported, built or understood.
    """
    from manyheads.checker import command

    report = command.run(target, like, init, weights, layout, timeout, memory)
    command.deliver(report, out, json, junit)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def lessons(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the notebooks, created.")] = Path(
        "manyheads-lessons"
    ),
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start JupyterLab there.")] = True,
) -> None:
    """Copy the four lessons to a folder and open them in JupyterLab; what is there already stays."""
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
    """Print the kernels that this machine has, in the order in which they are asked."""
    from manyheads.kernels import machine

    print(machine())


@app.command()
def bench(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="forward|causal|training|look|decode|layer", help="What to compute; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="float32|bfloat16", help="Number format; may be repeated.")
    ] = None,
    size: Annotated[list[int] | None, typer.Option(metavar="N", help="Head size; may be repeated.")] = None,
    length: Annotated[list[int] | None, typer.Option(metavar="N", help="Tokens; may be repeated.")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs of each, after one that warms up.")
    ] = 7,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the table and the plot, created.")
    ] = Path("manyheads-bench"),
) -> None:
    """Measure attention on this machine: ours beside others', and what the machine can do."""
    from rich.progress import Progress

    from manyheads import bench
    from manyheads.files import folder_for

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


def main() -> None:
    """Run a command; bad input is one sentence on standard error and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"manyheads: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("manyheads: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
