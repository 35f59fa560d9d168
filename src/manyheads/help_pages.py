"""Help pages of the commands: a description, options in groups, examples.

typer prints options in groups with rich, whose import takes longer than everything else that `--help` does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MAX_COLUMN = 24  # width of the left column; the description of a longer entry starts on the next line

Groups = dict[str, list[tuple[str, str]]]  # by title: names of commands, arguments or options; descriptions


class HelpCommand(TyperCommand):
    """A command whose help is a page of this module."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Its errors name options as they are typed, not as Python names them."""
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError) as error:
            names = [option.name for option in self.params if is_option(option) and "_" in option.name]
            if names and len(error.args) == 1:
                found = rf"(?<![\w/.-])({'|'.join(names)})(?![\w/-]|\.\w)"  # not in paths
                error.args = (re.sub(found, lambda match: f"--{match[0].replace('_', '-')}", str(error)),)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name in the usage line."""
        options = [name_of(option) for option in self.params if is_option(option) and option.required]
        arguments = [
            name_of(argument) if argument.required else f"[{name_of(argument)}]"
            for argument in self.params
            if not is_option(argument)
        ]
        return [*options, "[OPTIONS]", *arguments]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(format_page(self, ctx, formatter.width))


class HelpGroup(TyperGroup):
    """A group of commands whose help is a page of this module."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the program's name in the usage line."""
        return ["COMMAND", "[OPTIONS]"]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(format_page(self, ctx, formatter.width))


def format_page(command: Any, ctx: Any, width: int) -> str:
    """Return the help page of a command.

    Args:
        command: The command. The lines of its `epilog` are kept as they are, but headings and comments are
            styled.
        ctx: The context of the call.
        width: The width of the page in characters.

    Returns:
        The page, with ANSI escapes.
    """
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    parts = ["\n".join(wrap(paragraph, width)) for paragraph in paragraphs(command)]
    parts.append(f"{heading('Usage:')} {usage}")
    for groups in (group_commands(command), group_parameters(command, ctx)):
        lefts = [left for rows in groups.values() for left, _ in rows]
        column = max((len(left) for left in lefts if len(left) <= MAX_COLUMN), default=0)
        for title, rows in groups.items():
            lines = (line for row in rows for line in format_row(*row, column, width))
            parts.append("\n".join([heading(f"{title}:"), *lines]))
    if command.epilog:
        parts.append("\n".join(map(style, inspect.cleandoc(command.epilog).splitlines())))
    return "\n\n".join(parts) + "\n"


def paragraphs(command: Any) -> list[str]:
    """Return the paragraphs of a command's docstring."""
    return inspect.cleandoc(command.help).split("\n\n")


def group_commands(command: Any) -> Groups:
    """Return the commands of a group of commands."""
    groups: Groups = {}
    for name, sub in getattr(command, "commands", {}).items():
        groups.setdefault(sub.rich_help_panel, []).append((name, paragraphs(sub)[0]))
    return groups


def group_parameters(command: Any, ctx: Any) -> Groups:
    """Return the arguments of a command, its options without a group, its groups of options, and --help."""
    groups: Groups = {"Arguments": [], "Options": []}
    *parameters, last = command.get_params(ctx)  # the last is --help
    for parameter in parameters:
        default = "Options" if is_option(parameter) else "Arguments"
        title = getattr(parameter, "rich_help_panel", None) or default
        groups.setdefault(title, []).append((name_of(parameter), describe(parameter)))
    title = "Help" if len(groups) > 2 else "Options"
    groups.setdefault(title, []).append((name_of(last), describe(last)))
    return {title: rows for title, rows in groups.items() if rows}


def is_option(parameter: Any) -> bool:
    """Return True for an option, False for an argument."""
    return bool(parameter.param_type_name == "option")


def name_of(parameter: Any) -> str:
    """Return the name of an argument, or the names of an option and of its value.

    Of two names such as `--open/--no-open`, this is the one that changes the default.
    """
    if not is_option(parameter):
        return str(parameter.metavar)
    names = parameter.secondary_opts if parameter.default is True else parameter.opts
    joined = ", ".join(sorted(names, key=len))
    return joined if parameter.is_flag else f"{joined} {parameter.metavar}"


def describe(parameter: Any) -> str:
    """Return the help of a parameter, followed by `[required]` or its default."""
    if is_option(parameter) and parameter.required:
        return f"{parameter.help} [required]"
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    match default:
        case float():
            return f"{parameter.help} [default: {default:g}]"
        case str() | int() | Path() if not isinstance(default, bool):
            return f"{parameter.help} [default: {default}]"
    return str(parameter.help)


def format_row(left: str, text: str, column: int, width: int) -> Iterator[str]:
    """Yield the lines of an entry: its name on the left, its description on the right."""
    lines = wrap(text, width - column - 4, break_on_hyphens=False)
    name = "  " + typer.style(left, fg="cyan")
    if len(left) <= column:
        yield f"{name}{'':{column - len(left)}}  {lines.pop(0)}"
    else:
        yield name
    yield from (f"{'':{column + 4}}{line}" for line in lines)


def style(line: str) -> str:
    """Return a line of an epilog with its style, if it is a heading or a comment."""
    if line.startswith("  #"):
        return typer.style(line, dim=True)
    return heading(line) if line.endswith(":") and not line.startswith(" ") else line


def heading(text: str) -> str:
    """Return a heading in bold."""
    return typer.style(text, bold=True)
