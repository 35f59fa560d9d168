"""Pages of the reference that are generated from the code: the commands' help, and every error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from manyheads import cli

SOURCE = Path(cli.__file__).parent
ABOUT_ERRORS = """# Errors

Every error that the library raises with a message of its own, by module. A message says what was expected,
what was given, and how to fix it. ‹…› stands for your values.
"""


def write(folder: Path) -> None:
    """Write the generated pages into a folder."""
    folder.mkdir(exist_ok=True)
    for name, page in (("commands", commands()), ("errors", errors())):
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


def errors() -> str:
    """Return a table of errors for each module."""
    sections = [ABOUT_ERRORS]
    for path in sorted(SOURCE.rglob("*.py")):
        rows = sorted(set(raised(ast.parse(path.read_text(encoding="utf-8")))))
        if rows:
            names = path.relative_to(SOURCE.parent).with_suffix("").parts
            module = ".".join(names).removesuffix(".__init__")
            lines = [f"| `{name}` | {cell(message)} |" for name, message in rows]
            sections.append("\n".join([f"## {module}\n", "| error | message |", "|---|---|", *lines, ""]))
    return "\n".join(sections)


def raised(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the class and the message of every error that a module raises with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            for argument in node.exc.args:
                text = template(argument)
                if text and " " in text:
                    yield ast.unparse(node.exc.func).rpartition(".")[2], text


def template(node: ast.expr) -> str:
    """Return the text of a string, with names in place of its values; empty for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"‹{label(part.value)}›"  # type: ignore[attr-defined]
                for part in parts
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return ""


def label(node: ast.expr) -> str:
    """Return a short name of a value."""
    text = ast.unparse(node)
    return text if len(text) < 30 and text.replace(".", "").replace("_", "").isalnum() else "…"


def cell(text: str) -> str:
    """Return a text for a cell of a table, without characters that Markdown would interpret."""
    for character in "\\`*_|[]<$":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
