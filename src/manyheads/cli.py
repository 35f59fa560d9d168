"""The command line. Each command calls functions that are also available in Python.

A command imports its modules when it runs, so that `manyheads --help` is fast.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads import __version__
from manyheads.help_pages import HelpCommand, HelpGroup

if TYPE_CHECKING:
    from manyheads.viewer.api import Api
    from manyheads.viewer.export import Export
    from manyheads.viewer.server import Server

SHIPPED = "the model that ships with manyheads"
EXAMPLES = """
Examples:
  # What do the heads of a small language model attend to in a sentence?
  manyheads show "the file is open and the file is read"

  # Is this attention correct, and if not, what is wrong?
  manyheads check torch.nn:MultiheadAttention

  # Learn how attention works, in four notebooks
  manyheads lessons

Exit codes:
  0    Success.
  1    A check failed (check, bench --kind choice), or an export was declined.
  2    An option or an input is invalid.
  130  Interrupted by Ctrl-C.

Run manyheads COMMAND --help for the options and examples of a command.
"""

app = typer.Typer(
    name="manyheads",
    cls=HelpGroup,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich doubles the time of --help
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "color": False if os.environ.get("NO_COLOR") else None,  # None: colors in a terminal only
    },
)
command = partial(app.command, cls=HelpCommand)


def parse_path(text: str) -> Path:
    """Parse a path. An empty text is an error, because Path("") would be the current folder."""
    if not text:
        raise typer.BadParameter("Expected a path, got ''. Use . for the current folder.")
    return Path(text)


def option(metavar: str, help: str, group: str | None = None, default: str | bool = True, **more: Any) -> Any:
    """Return an option with a value.

    Args:
        metavar: The value's name in the help. If it lists choices (`png|svg|pdf`), a shell completes them.
        help: A sentence.
        group: The title of the group in which the help lists the option.
        default: A text that the help shows as the default, or True for the default itself.
        **more: Other arguments of `typer.Option`.

    Returns:
        The annotation of a parameter.
    """
    if "|" in metavar:
        more["autocompletion"] = lambda: metavar.split("|")
    return typer.Option(metavar=metavar, help=help, rich_help_panel=group, show_default=default, **more)


def file_option(metavar: str, help: str, group: str | None = None, default: str | bool = True) -> Any:
    """Return an option whose value is a path."""
    return option(metavar, help, group, default, parser=parse_path)


def flag(name: str, help: str, group: str | None = None) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=help, rich_help_panel=group)


def parse_utf8(text: str) -> str:
    """Decode an argument as UTF-8, because Python decodes it as ASCII in the C locale."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise typer.BadParameter(
            "Expected UTF-8 text, got other bytes. Use a terminal in UTF-8, or pass a file."
        ) from None


def print_version(requested: bool) -> None:
    """Print the version and exit if --version is given."""
    if requested:
        print(f"manyheads {__version__}")
        raise typer.Exit


@app.callback(epilog=EXAMPLES)
def manyheads(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Show what attention heads attend to, check attention code, and measure its speed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), color=context.color)


@command(
    rich_help_panel="Attention maps",
    epilog="""
    Examples:
      # Findings as sentences, and a picture of every head
      manyheads show "the file is open and the file is read"

      # One head in detail
      manyheads show "the file is open and the file is read" --layer 2 --head 5

      # Save the maps of a long text, to open them with manyheads view
      manyheads show --text-file book.txt --long --save book.safetensors

      # Scores of every head, for a script
      manyheads show "the file is open and the file is read" --json
    """,
)
def show(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to read.")] = None,
    text_file: Annotated[
        str | None, option("FILE", "Read the text from a file (- for standard input).", "Input")
    ] = None,
    model: Annotated[
        str | None,
        option(
            "NAME_OR_PATH",
            "Folder of a checkpoint or of a Hugging Face model, or the name of one in the local cache.",
            "Input",
            SHIPPED,
        ),
    ] = None,
    truncate: Annotated[
        bool,
        flag("--truncate", "Keep the first tokens of a text that is longer than the context.", "Input"),
    ] = False,
    long: Annotated[
        bool,
        flag(
            "--long",
            "Read up to 32,768 tokens with a manyheads model, which extrapolates beyond its context.",
            "Input",
        ),
    ] = False,
    layer: Annotated[int | None, option("N", "Layer to show in detail, counted from 0.", "Detail")] = None,
    head: Annotated[int | None, option("N", "Head to show in detail, counted from 0.", "Detail")] = None,
    no_mask: Annotated[
        bool, flag("--no-mask", "Also show the head with the same queries and keys and no mask.", "Detail")
    ] = False,
    everything: Annotated[
        bool, flag("--all", "Also print the scores of every head and a heat map of one head.", "Detail")
    ] = False,
    out: Annotated[Path, file_option("DIR", "Folder for the pictures.", "Output")] = Path("manyheads-out"),
    format: Annotated[str, option("png|svg|pdf", "Format of the pictures.", "Output")] = "png",
    json: Annotated[
        bool, flag("--json", "Print only JSON: findings and scores of every head.", "Output")
    ] = False,
    save: Annotated[
        Path | None,
        file_option("FILE", "Save the maps for manyheads view and manyheads.open_run.", "Output"),
    ] = None,
    browser: Annotated[bool, flag("--open", "Open the maps in the interactive viewer.", "Output")] = False,
) -> None:
    """Show what each head of a language model attends to.

    Prints findings as sentences and draws a picture of every head; with --layer or --head, of that head.
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


@command(
    rich_help_panel="Attention maps",
    epilog="""
    Examples:
      # Record the heads of the shipped model, and open the atlas
      manyheads atlas shipped --text books --out my-atlas
      manyheads view my-atlas

      # On four processes; on several machines, start it by torchrun
      manyheads atlas shipped --text books --out my-atlas --processes 4
      torchrun --nproc-per-node 4 -m manyheads atlas shipped --text books \\
        --out my-atlas
    """,
)
def atlas(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model: shipped, or a folder of a checkpoint or of a Hugging Face model, or the name of one "
            "in the local cache.",
        ),
    ],
    text: Annotated[
        list[Path],
        file_option("FILE", "Text files, or folders of text files.", "Input"),
    ],
    out: Annotated[
        Path,
        file_option("DIR", "Folder of the atlas. An atlas that isn't complete is continued.", "Output"),
    ],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="FILES", parser=parse_path, help="More text files.")
    ] = None,
    length: Annotated[
        int | None,
        option("N", "Tokens that are read at once.", "Input", "the model's context, at most 1,024"),
    ] = None,
    batch_size: Annotated[
        int | None, option("N", "Passages that are read at once.", "Input", "4,096 tokens")
    ] = None,
    ablate: Annotated[
        bool,
        flag("--ablate", "Measure what the removal of each head adds to the loss. Takes a pass per head."),
    ] = False,
    threads: Annotated[int, option("N", "Threads of each process.", "Processes")] = 1,
    processes: Annotated[
        int | None, option("N", "Start N processes on this machine, by torchrun.", "Processes", "1")
    ] = None,
    timeout: Annotated[
        float, option("SECONDS", "Time to wait for a process that doesn't respond.", "Processes")
    ] = 600.0,
) -> None:
    """Record what each head of a language model does over a corpus.

    Writes an atlas: scores of every head with their distributions, entropy and distance by position, sinks,
    examples, and which heads are alike. Killed at any time, it continues when it is started again; its tables
    are the same, bit for bit, on any number of processes.
    """
    if processes is not None:
        launch(processes)
    from manyheads import atlas
    from manyheads.text import terminal

    with terminal.progress() as progress:
        recorded = atlas.record(
            model,
            [*text, *(more or ())],
            out,
            length=length,
            batch_size=batch_size,
            threads=threads,
            ablate=ablate,
            timeout=timeout,
            progress=progress,
        )
    if os.environ.get("RANK", "0") == "0":
        facts = recorded.facts
        heads = sum(count for _, count in facts["layers"])
        print(f"{out}: {heads} heads over {facts['tokens']:,} tokens")
        print(f"open it with: manyheads view {shlex.quote(str(out))}")


@command(
    rich_help_panel="Attention maps",
    epilog="""
    Examples:
      # Save the maps of a text, and open them
      manyheads show "the file is open and the file is read" --save run.safetensors
      manyheads view run.safetensors

      # Compare two recordings
      manyheads view run.safetensors other.safetensors

      # Write one head to a page that opens without manyheads
      manyheads view run.safetensors --export page.html --layer 2 --head 5

      # Open an atlas of manyheads atlas, or write it to a page
      manyheads view my-atlas
      manyheads view my-atlas --export atlas.html
    """,
)
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            parser=parse_path,
            help="Saved maps, of manyheads show --save or Recording.save, several to compare; or the folder "
            "of an atlas.",
        ),
    ],
    picture: Annotated[
        Path | None, option("PICTURE", "The picture that a vision transformer read, to show beside its maps.")
    ] = None,
    port: Annotated[int, option("N", "Port to listen on (0 picks a free one).")] = 0,
    browser: Annotated[bool, flag("--open/--no-open", "Print the link instead of opening a browser.")] = True,
    export: Annotated[
        Path | None, file_option("PAGE.html", "Write a page to this file instead of serving it.", "Export")
    ] = None,
    layer: Annotated[
        int | None, option("N", "Layer to export, counted from 0.", "Export", "all layers")
    ] = None,
    head: Annotated[
        list[int] | None,
        option("N", "Head to export, counted from 0. Repeatable.", "Export", "all heads"),
    ] = None,
    full: Annotated[
        bool, flag("--full", "Export single weights of large heads too, instead of pooled ones.", "Export")
    ] = False,
    yes: Annotated[bool, flag("--yes", "Export more than 200 MB without a question.", "Export")] = False,
) -> None:
    """Open saved attention maps, or an atlas, in the interactive viewer."""
    if len(runs) == 1 and (runs[0] / "manifest.json").is_file():
        if picture is not None or layer is not None or head or full or yes:
            raise ValueError(
                "Expected an atlas without --picture, --layer, --head, --full and --yes, got one of them. "
                "Leave it out."
            )
        view_atlas(runs[0], port, browser, export)
        return
    for path in runs:
        if path.is_dir():
            raise ValueError(
                f"Expected files of saved maps, or the folder of one atlas, got the folder {path}. Save maps "
                "by manyheads show --save, or make an atlas by manyheads atlas."
            )
    from manyheads import viewer
    from manyheads.viewer.api import Api

    if export is None and (layer is not None or head or full or yes):
        raise ValueError(
            "Expected --layer, --head, --full and --yes with --export only, got no --export. Leave them out: "
            "the viewer shows every head."
        )
    if export is None:
        viewer.require_server()  # before files are read
        serve(Api(*runs, picture=picture), port, browser)
        return
    from manyheads.storage import file_for
    from manyheads.viewer.export import plan_export

    plan = plan_export(Api(*runs, picture=picture), export, layer, head, full=full)
    file_for(export, "--export")
    write_page(plan, yes)


def view_atlas(folder: Path, port: int, browser: bool, export: Path | None) -> None:
    """Open an atlas in the browser, or write it to a page."""
    from manyheads import atlas

    opened = atlas.open(folder)
    if export is not None:
        print(f"wrote {opened.export(export)}")
        return
    from manyheads.atlas import page

    wait_for(page.serve(opened, port), browser)


def write_page(plan: Export, yes: bool) -> None:
    """Write an exported page with a progress bar. Large ones are confirmed in a terminal."""
    from manyheads.text import terminal
    from manyheads.viewer.export import CONFIRM_BYTES

    plan.check_space()
    print(plan.description, flush=True)
    if plan.size > CONFIRM_BYTES and not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ValueError(
                "Expected --yes for an export of more than 200 MB without a terminal, got none. Add it."
            )
        if not typer.confirm("write it?"):
            raise typer.Exit(1)
    with terminal.progress() as progress:
        task = progress.add_task("exporting", total=1.0)
        files = plan.write(lambda share: progress.update(task, completed=share))
    print(f"wrote {' and '.join(map(str, files))}")


def serve(api: Api, port: int = 0, browser: bool = True) -> None:
    """Open the viewer and serve it until interrupted."""
    from manyheads.viewer import require_server

    wait_for(require_server()(api, port), browser)


def wait_for(server: Server, browser: bool) -> None:
    """Open the address of a server in a browser, and wait until it is interrupted."""
    opened = browser and server.open_browser()
    print(
        f"{'opened' if opened else 'open this link in a browser:'} {server.url}\nCtrl-C ends it", flush=True
    )
    try:
        server.wait()
    finally:
        server.close()


@command(
    rich_help_panel="Attention code",
    epilog="""
    Examples:
      # A class, a function or an instance in a file
      manyheads check attention.py:MyAttention

      # With constructor arguments
      manyheads check torch.nn:MultiheadAttention --init "embed_dim=24, num_heads=4"

      # With the role of an argument whose name doesn't tell it, and a report for CI
      manyheads check attention.py:Masked --arg segments=keep --junit report.xml

    Exit codes:
      0  Every check passed.
      1  A check failed.
      2  The code can't be imported, constructed or understood, or something
         couldn't be judged.
    """,
)
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Class, instance, function or factory, as module:name or path/to/file.py:name.",
        ),
    ],
    like: Annotated[
        str | None,
        option(
            "KIND",
            "Kind of attention: attention, self, cross, multihead, torch-mha, sdpa, hf, positional, rotary "
            "or classic.MODULE.CLASS.",
            "Code",
            "guessed",
        ),
    ] = None,
    init: Annotated[
        str | None, option("ARGS", "Constructor arguments, e.g. 'hidden=16, num_heads=4'.", "Code")
    ] = None,
    heads: Annotated[int | None, option("N", "Number of heads.", "Code")] = None,
    layout: Annotated[
        str | None,
        option("batch|sequence", "Layout of the inputs: [b, t, e] or [t, b, e].", "Code"),
    ] = None,
    weights: Annotated[
        str | None, option("ROLES", "Names of the projection layers: q=a,k=b,v=c,o=d.", "Code")
    ] = None,
    arg: Annotated[
        list[str] | None,
        option(
            "NAME=ROLE", "Role of an argument of the call, e.g. segments=mask-of-keys. Repeatable.", "Code"
        ),
    ] = None,
    setup: Annotated[
        Path | None,
        file_option(
            "FILE",
            "TOML file with like, init, args, heads, weights and layout. Options replace its values.",
            "Code",
        ),
    ] = None,
    strict: Annotated[
        list[str] | None,
        option("NAME", "Convention that counts as a failure, e.g. empty-rows, or all. Repeatable.", "Checks"),
    ] = None,
    timeout: Annotated[float, option("SECONDS", "Time limit of each call.", "Checks")] = 60.0,
    memory: Annotated[str, option("SIZE", "Memory limit of the process, e.g. 500M.", "Checks")] = "4G",
    out: Annotated[
        Path | None, file_option("DIR", "Write a picture of the difference to this folder.", "Reports")
    ] = None,
    json: Annotated[Path | None, file_option("FILE", "Write the report as JSON.", "Reports")] = None,
    junit: Annotated[Path | None, file_option("FILE", "Write the report as JUnit XML.", "Reports")] = None,
) -> None:
    """Check an attention implementation, and name its bugs.

    Compares its output with attention in float64, and changes inputs that must not matter. The code runs in a
    separate process with limits on time and memory, but it is not sandboxed: it has your permissions, and can
    use your files and network.
    """
    from manyheads.checker import command

    options = {"like": like, "init": init, "heads": heads, "layout": layout, "setup": setup}
    report = command.run(target, arg or [], timeout, memory, weights=weights, strict=strict, **options)
    command.write_report(report, out, json, junit)
    raise typer.Exit(command.EXIT_CODES[report.verdict])


@command(
    rich_help_panel="Learning",
    epilog="""
    Examples:
      manyheads lessons

      # Copy the notebooks only
      manyheads lessons my-lessons --no-start
    """,
)
def lessons(
    out: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="Folder for the notebooks.")
    ] = Path("manyheads-lessons"),
    start: Annotated[bool, flag("--start/--no-start", "Copy the files without starting JupyterLab.")] = True,
) -> None:
    """Copy the four lessons to a folder and open them in JupyterLab.

    Files that the folder already has are kept. The exercises are graded by manyheads check. JupyterLab is
    part of the extra lessons.
    """
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


@command(
    rich_help_panel="Attention code",
    epilog="""
    Examples:
      manyheads kernels
    """,
)
def kernels() -> None:
    """List the attention kernels, in order of preference."""
    from manyheads.kernels import machine

    print(machine())


@command(
    rich_help_panel="Attention code",
    epilog="""
    Examples:
      # Causal attention of 1,024 tokens
      manyheads bench --kind causal --size 64 --length 1024

      # One token that attends to a cache
      manyheads bench --kind decode --size 64 --length 4096

    Exit codes:
      0  Success.
      1  With --kind choice: kernel='auto' is slower than the fastest in some cases.
    """,
)
def bench(
    kind: Annotated[
        list[str] | None,
        option(
            "forward|causal|training|statistics|decode|layer|choice",
            "What to measure. Repeatable, except choice.",
            "Cases",
            "all but choice",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        option(
            "float32|bfloat16",
            "Number format; for choice, also float16. Repeatable.",
            "Cases",
            "float32 and bfloat16",
        ),
    ] = None,
    size: Annotated[
        list[int] | None, option("N", "Head size. Repeatable.", "Cases", "64 and 128; choice: more")
    ] = None,
    length: Annotated[
        list[int] | None,
        option("N", "Sequence length. Repeatable.", "Cases", "64 to 16,384; choice: 1 to 8,192"),
    ] = None,
    seed: Annotated[
        int | None,
        option("N", "Random seed of choice.", "Cases", "new cases in each run", min=0),
    ] = None,
    rounds: Annotated[
        int, option("N", "Measured runs of each case, after a warm-up run.", "Measurement", min=1)
    ] = 7,
    out: Annotated[Path, file_option("DIR", "Folder for the table and the plot.", "Measurement")] = Path(
        "manyheads-bench"
    ),
) -> None:
    """Measure the speed of attention on this machine.

    Compares the kernels of manyheads with PyTorch's attention, with other libraries and with the limits of
    the hardware.

    --kind choice runs every kernel on a grid of cases and on 200 random ones, and prints those in which
    kernel='auto' is slower than the fastest by more than 5% and 15 µs. These cases are measured again at
    the end, up to five times, and the smallest median of each kernel counts. kernel='auto' isn't compared
    with the kernel that it chose, which is the same code.
    """
    # With workers that compile, the process can take five minutes to end (pytorch/pytorch#162199).
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
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
        raise ValueError("Expected --seed with --kind choice only, got another kind. Leave it out.")
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


@command(
    rich_help_panel="Language models",
    epilog="""
    Examples:
      # Train on the text files of a folder, and read a sentence with the model
      manyheads train --data books --out my-model
      manyheads show "the file is open and the file is read" --model my-model

      # Continue an interrupted run
      manyheads train --out my-model --resume

      # Train on two processes; with torchrun, also on several machines
      manyheads train --data books --out other-model --processes 2
      torchrun --nproc-per-node 2 -m manyheads train --out other-model --resume
    """,
)
def train(
    command: typer.Context,
    out: Annotated[Path, file_option("DIR", "Folder of the run: checkpoints, tokenizer and log.")],
    data: Annotated[
        list[Path] | None,
        file_option(
            "PATH",
            "Text file, or folder of text files. Repeatable.",
            default="Python's own documentation",
        ),
    ] = None,
    resume: Annotated[bool, flag("--resume", "Continue the run in --out.")] = False,
    device: Annotated[
        str | None,
        option("NAME", "Device: cpu, cuda, cuda:1 or mps.", default="cuda if available, else cpu"),
    ] = None,
    layers: Annotated[int | None, option("N", "Transformer layers.", "Model", "4")] = None,
    heads: Annotated[int | None, option("N", "Attention heads per layer.", "Model", "6")] = None,
    embed: Annotated[
        int | None, option("N", "Model width (embedding size), a multiple of 4 * heads.", "Model", "192")
    ] = None,
    hidden: Annotated[
        int | None, option("N", "Width of the feed-forward layers.", "Model", "7/3 of --embed")
    ] = None,
    context: Annotated[int | None, option("N", "Longest sequence, in tokens.", "Model", "512")] = None,
    vocab_size: Annotated[
        int | None, option("N", "Largest number of tokens, 257 to 1,048,576.", "Model", "3072")
    ] = None,
    steps: Annotated[
        int | None,
        option("N", "Optimizer steps; with --resume, the step to continue to.", "Training", "3000"),
    ] = None,
    batch_size: Annotated[
        int | None, option("N", "Sequences per step, of all processes together.", "Training", "8")
    ] = None,
    accumulate: Annotated[
        int | None,
        option("N", "Parts of a process's batch; more parts use less memory.", "Training", "1"),
    ] = None,
    learning_rate: Annotated[
        float | None, option("X", "Highest learning rate, at most 1.", "Training", "0.002")
    ] = None,
    seed: Annotated[
        int | None, option("N", "Random seed of weights, batches and dropout.", "Training", "0")
    ] = None,
    processes: Annotated[
        int | None, option("N", "Start N processes on this machine, by torchrun.", "Processes", "1")
    ] = None,
    shard: Annotated[
        bool,
        flag("--shard", "Shard weights, gradients and optimizer over the processes (FSDP2).", "Processes"),
    ] = False,
    timeout: Annotated[
        float, option("SECONDS", "Time to wait for a process that doesn't respond.", "Processes")
    ] = 600.0,
) -> None:
    """Train a small language model on text.

    Several processes train one model together, each on its part of every batch. The loss is that of one
    process, except for rounding, and a run can be resumed by any number of processes.
    """
    if processes is not None:
        launch(processes)
    from manyheads import lm

    options = {name: value for name, value in command.params.items() if value is not None}
    for name in ("out", "data", "resume", "processes", "shard", "timeout"):
        options.pop(name, None)
    lm.train(out, options, data or (), resume=resume, shard=shard, timeout=timeout)


@command(
    rich_help_panel="Language models",
    epilog="""
    Examples:
      manyheads generate "Return the value of" --tokens 20

      # The most likely token at every step
      manyheads generate "Return the value of" --temperature 0 --stop .
    """,
)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", parser=parse_utf8, help="Text to continue.")],
    model: Annotated[Path | None, file_option("DIR", "Folder of a checkpoint.", default=SHIPPED)] = None,
    tokens: Annotated[int, option("N", "Maximum number of tokens to generate.")] = 100,
    stop: Annotated[str | None, option("TEXT", "Stop before this text.")] = None,
    temperature: Annotated[float, option("T", "Sampling temperature (0 is greedy).", "Sampling")] = 0.8,
    top_k: Annotated[
        int | None, option("K", "Sample from the K most likely tokens.", "Sampling", "all tokens")
    ] = None,
    top_p: Annotated[
        float,
        option("P", "Sample from the most likely tokens whose probabilities sum to P.", "Sampling"),
    ] = 1.0,
    seed: Annotated[int, option("N", "Random seed.", "Sampling")] = 0,
) -> None:
    """Continue a text with a language model."""
    from manyheads import lm

    sampling = lm.Sampling(temperature, top_k, top_p)
    pieces = lm.stream(*lm.load(model), prompt, tokens, sampling, stop=stop, seed=seed)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()
    if piece.end == "context":
        print(f"manyheads: stopped before {tokens} tokens, the model's context is full", file=sys.stderr)


def launch(processes: int) -> None:
    """Run this command in several processes and exit, unless this is one of them or the number is 1."""
    if os.environ.get("MANYHEADS_LAUNCHED"):
        return
    from manyheads.distributed import processes as launcher

    launcher.check_processes(processes)
    if processes > 1:
        raise typer.Exit(launcher.launch(processes, sys.argv[1:]))


def main() -> None:
    """Run a command. Invalid input gives one line on standard error and exit code 2."""
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # one of several processes, of torchrun
    try:
        app() if not is_rank else sys.exit(app(standalone_mode=False) or 0)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if is_rank:
            from manyheads.distributed.processes import report

            sys.exit(report(error))
        print(f"manyheads: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        show = getattr(error, "show", None)  # typer's, for an invalid option, which all processes have
        if not (is_rank and show):
            raise
        from manyheads.distributed.processes import is_first_report

        if is_first_report():
            show()
        sys.exit(2)
