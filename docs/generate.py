"""Pages that are generated from the code: the commands' help, every error, and the scripts in examples/."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

import raise_statements
from typer.main import get_command
from typer.testing import CliRunner

from manyheads import cli

EXAMPLES = Path(__file__).parents[1] / "examples"
ABOUT_ERRORS = """# Errors

Every error that the library raises with a message of its own, by module: its class, its cause and how to fix
it. ‹…› stands for your values. A command prints the message in one line and exits with code 2.

Most messages contain the fix. Where a message says only what was expected and what it got, the fix here says
what to pass. The errors of `manyheads.checker` become part of its report, unless you call `assert_attention`,
whose `AssertionError` has the report as its message.
"""
ABOUT_REASONS = """## Why a kernel doesn't support a problem

`attention(..., kernel="…")` raises ValueError with these reasons, and `explain` lists them. `kernel="auto"`
uses the fastest kernel that supports the problem. `kernel="reference"` supports every problem. The native
kernel can't be used if its library is missing or can't be loaded; `manyheads kernels` says why.

| kernel | reason |
|---|---|
"""


def write(folder: Path) -> None:
    """Write the generated pages into a folder."""
    folder.mkdir(exist_ok=True)
    for name, page in (("commands", commands()), ("errors", errors()), ("examples", examples())):
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != page:  # else Sphinx would read it again
            path.write_text(page, encoding="utf-8")


def commands() -> str:
    """Return a section for each command, with its help."""
    runner = CliRunner(env={"COLUMNS": "88", "TERM": "dumb"})
    sections = []
    for name in ("", *get_command(cli.app).commands):  # type: ignore[attr-defined]
        words = [name, "--help"] if name else ["--help"]
        text = runner.invoke(cli.app, words, prog_name="manyheads").stdout.strip()
        title = f"`manyheads {name}`" if name else "`manyheads`"
        sections.append(f"## {title}\n\n```text\n{text}\n```\n")
    return "# Commands\n\nEvery command and its options.\n\n" + "\n".join(sections)


def examples() -> str:
    """Return a section for each script in examples/, with its code."""
    sections = []
    for path in sorted(EXAMPLES.glob("*.py")):
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        title = re.split(r"[:;.]", description)[0]
        code = f"```{{literalinclude}} ../../../examples/{path.name}\n:language: python\n```"
        sections.append(f"## {title}\n\n`examples/{path.name}`\n\n{code}\n")
    return "# Examples\n\nScripts to copy. Each runs alone, in less than a minute.\n\n" + "\n".join(sections)


def errors() -> str:
    """Return a table of errors for each module, and the reasons of the kernels."""
    sections = [ABOUT_ERRORS]
    for module, found in groupby(raise_statements.errors(), key=lambda error: error.module):
        rows = dict.fromkeys(f"| `{x.error}` | {code(x.cause)} | {code(x.fix)} |" for x in found)
        title = f"manyheads.{module}" if module else "manyheads"
        sections.append("\n".join([f"## {title}\n", "| error | cause | fix |", "|---|---|---|", *rows, ""]))
    reasons = dict.fromkeys(raise_statements.kernel_reasons())
    sections.append(ABOUT_REASONS + "\n".join(f"| {name} | {code(text)} |" for name, text in reasons) + "\n")
    return "\n".join(sections)


def code(text: str) -> str:
    """Return a text as code in a cell of a table, in which Markdown changes no character."""
    fence = "``" if "`" in text else "`"
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text.replace('|', chr(92) + '|')}{padding}{fence}"
