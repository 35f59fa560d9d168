"""The commands. Each is a thin face on a function that can be called from Python.

Exit codes of every command: 0 done, 1 a check failed, 2 wrong use or input, 130 interrupted.
A command imports what it needs when it runs, so that `manyheads --help` stays quick.
"""

from __future__ import annotations

import sys

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
