"""How a candidate is to be understood: the options that Python, the command and a file share."""

from __future__ import annotations

import tomllib
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from manyheads.checker.candidates.construct import parse_arguments
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.checks.registry import CONVENTIONS
from manyheads.trees import fits


@dataclass(frozen=True)
class Setup:
    """The options of `check` that a file may also give; None is an option that isn't given.

    Attributes:
        like: The kind.
        init: The constructor arguments, or their text.
        args: The roles of arguments of the call.
        heads: The number of heads.
        weights: The names of the projection layers, or their text, such as "q=a,k=b,v=c,o=d".
        layout: "batch" or "sequence".
        strict: The conventions that count as failures.

    Raises:
        Unclear: If a value isn't valid.
    """

    like: str | None = None
    init: dict[str, Any] | str | None = None
    args: dict[str, str] | None = None
    heads: int | None = None
    weights: dict[str, str] | str | None = None
    layout: str | None = None
    strict: list[str] | str | None = None

    def __post_init__(self) -> None:
        if self.layout not in (None, "batch", "sequence"):
            raise Unclear(
                "Expected --layout batch for [b, t, e] or --layout sequence for [t, b, e], "
                f"got {self.layout!r}."
            )
        if self.heads is not None and self.heads < 1:
            raise Unclear(f"Expected at least one head for --heads, got {self.heads}.")
        for name in self.conventions:
            if name not in (*CONVENTIONS, "all"):
                raise Unclear(f"Expected --strict all, {', '.join(CONVENTIONS)}, got {name!r}.")

    @property
    def projections(self) -> dict[str, str]:
        """The names in `weights`."""
        if isinstance(self.weights, str):
            return parse_pairs(self.weights.split(","), "--weights q=a,k=b,v=c,o=d")
        return dict(self.weights or {})

    @property
    def conventions(self) -> list[str]:
        """The names in `strict`."""
        return [self.strict] if isinstance(self.strict, str) else [*(self.strict or ())]

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor arguments."""
        return parse_arguments(self.init) if isinstance(self.init, str) else dict(self.init or {})

    def over(self, other: Setup) -> Setup:
        """Return these options, and those of another setup that aren't given here; tables are merged."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in given.items():
            if isinstance(value, dict) and isinstance(table := getattr(other, name), dict):
                given[name] = table | value
        return replace(other, **given)


def parse_pairs(texts: list[str], expected: str) -> dict[str, str]:
    """Parse names and values, each pair written as `NAME=VALUE`.

    Args:
        texts: The pairs.
        expected: What is expected, for the error.

    Returns:
        The values by name.

    Raises:
        Unclear: If a text has another form.
    """
    pairs = [[part.strip() for part in text.partition("=")] for text in texts if text.strip()]
    if not pairs or not all(name and value for name, _, value in pairs):
        raise Unclear(f"Expected {expected}, got {','.join(texts)!r}.")
    names = [name for name, *_ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise Unclear(f"Expected {twice} once, got it {names.count(twice)} times.")
    return {name: value for name, _, value in pairs}


def read_setup(path: Path | str) -> Setup:
    """Read a TOML file of options of `check`.

    Args:
        path: The file.

    Returns:
        The options.

    Raises:
        Unclear: If the file can't be read, or an option doesn't exist or has another type.
    """
    try:
        options = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unclear(f"Expected a TOML file for the setup, got {path}: {error}.") from None
    hints, types = typing.get_type_hints(Setup), {field.name: str(field.type) for field in fields(Setup)}
    for name, value in options.items():
        if name not in hints:
            raise Unclear(f"Expected {', '.join(hints)} in {path}, got {name!r}.")
        if not fits(value, hints[name]):
            expected = types[name].removesuffix(" | None")
            raise Unclear(f"Expected {name} in {path} to be of type {expected}, got {value!r}.")
    return Setup(**options)
