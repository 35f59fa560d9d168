"""The commands. Each is a thin face on a function that can be called from Python.

Exit codes of every command: 0 done, 1 a check failed, 2 wrong use or input, 130 interrupted.
A command imports what it needs when it runs, so that `manyheads --help` stays quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
        Path | None, typer.Option(metavar="DIR", help="A checkpoint's folder, not the shipped model.")
    ] = None,
    no_mask: Annotated[
        bool, typer.Option("--no-mask", help="Beside it the same q and k without the mask: a what-if.")
    ] = False,
    format: Annotated[str, typer.Option(metavar="png|svg|pdf", help="Format of the pictures.")] = "png",
    json: Annotated[bool, typer.Option("--json", help="Print findings and measures as JSON only.")] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Keep the first tokens of a text that is too long.")
    ] = False,
) -> None:
    """Show what each head of a language model attends to: in words, a table and pictures."""
    from manyheads import show

    show.format_of(format)
    given = show.text_of(text, text_file)
    with show.busy("reading"):
        reading = show.read(given, model, truncate=truncate)
    chosen = show.pick(reading, layer, head)
    folder = show.folder_for(out)
    if not json:
        show.words(reading, *chosen, masked=not no_mask)
    with show.busy("drawing"):
        files = show.write(show.pictures(reading, *chosen, masked=not no_mask), folder, format)
    if json:
        show.machine(reading, *chosen, files, masked=not no_mask)
    else:
        show.named(files)


@app.command()
def kernels() -> None:
    """Print the kernels that this machine has, in the order in which they are asked."""
    from manyheads.kernels import machine

    print(machine())


def main() -> None:
    """Run a command; bad input is one sentence on standard error and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        print(f"manyheads: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("manyheads: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
