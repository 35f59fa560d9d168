"""The reference: every public name is on a page, and every error has its class, cause and fix."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import manyheads

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manyheads"
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (manyheads[\w.]*)", re.M)
MODULES = [
    *("manyheads", "manyheads.lm", "manyheads.viewer", "manyheads.checker", "manyheads.figures"),
    *("manyheads.measures", "manyheads.observe"),
    *("manyheads.bridges", "manyheads.distributed", "manyheads.hf", "manyheads.onnx", "manyheads.policies"),
    "manyheads.atlas",
    *(f"manyheads.classic.{path.stem}" for path in (SOURCE / "classic").glob("[a-z]*.py")),
]
INTERNAL = {"manyheads.classic.common"}  # shared by the four presentations


@pytest.fixture(scope="module")
def raise_statements() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module("raise_statements")
    finally:
        sys.path.remove(str(ROOT / "docs"))


# -- names -----------------------------------------------------------------------------------------


def resolve(name: str) -> Any:
    """Return the object of a dotted name: an attribute of a module, even if a submodule has its name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def public_names(module: str) -> dict[str, Any]:
    """Return the public objects of a module: those of `__all__`, or those that it defines."""
    content = import_module(module)
    if hasattr(content, "__all__"):
        return {name: getattr(content, name) for name in content.__all__}
    return {
        name: value
        for name, value in vars(content).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    }


def documented() -> list[Any]:
    """Return the objects of the pages' directives; of an automodule, what it defines with a docstring."""
    objects: list[Any] = []
    for page in PAGES:
        for kind, name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found = import_module(name) if kind == "module" else resolve(name)
            objects.append(found)
            if kind == "module":
                objects += [value for value in public_names(name).values() if getattr(value, "__doc__", None)]
    return objects


@pytest.mark.parametrize("module", sorted({*MODULES} - INTERNAL))
def test_every_public_name_is_on_a_page_of_the_reference(module: str) -> None:
    known = [id(value) for value in documented()]
    assert [name for name, value in public_names(module).items() if id(value) not in known] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    listed = index.partition("```{toctree}")[2].partition("```")[0].split()
    assert {page.stem for page in PAGES} - {"index"} <= {*listed}


@pytest.mark.parametrize("folder", ["guides", "explanation", "tutorials"])
def test_every_page_is_linked_where_the_index_is_read_as_markdown(folder: str) -> None:
    index = (ROOT / "docs" / folder / "index.md").read_text(encoding="utf-8")
    text, _, pages = index.partition("```{toctree}")
    named = [page for page in pages.partition("```")[0].split() if not page.startswith((":", "../reference"))]
    assert named
    assert {*named} <= {link.rpartition(".")[0] for link in re.findall(r"\]\((\S+)\)", text)}


# -- errors ----------------------------------------------------------------------------------------


def test_no_raise_statement_is_missing(raise_statements: Any) -> None:
    """Each is on the page, is internal for a stated reason, or raises a caught error again."""
    listed = {(error.module, error.line) for error in raise_statements.errors()}
    texts = {(error.cause, error.fix) for error in raise_statements.errors()}
    missing = []
    for source in raise_statements.sources():
        for node, functions in source.statements:
            found = list(raise_statements.texts_of(node, raise_statements.Scope(source, functions)))
            on_page = all(
                raise_statements.is_internal(source.module, error)
                or raise_statements.split(raise_statements.complete(source.module, text))[0]
                in {cause for cause, _ in texts}
                for error, text in found
            )
            if not (found and on_page) and (source.module, node.lineno) not in listed:
                missing.append(
                    f"{source.module}:{node.lineno}: {ast.unparse(node).removesuffix(' from None')}"
                )
    assert [each for each in missing if not AGAIN.search(each)] == []


# Raise statements without a text of their own.
AGAIN = re.compile(
    r": raise (error|raised|cause|reasons?)$"  # a caught error
    r"|raise (NotImplementedError|KeyboardInterrupt|TypeError|typer\.Exit)$"
    r"|raise (SystemExit|typer\.Exit|HTTPException)\("  # the end of a command or a response
    r"|\(str\(error\)\)$|\(packed\)$|\(report\.summary\(\)\)$"  # the text of another error, or a report
    r"|OSError\(errno\.|IsADirectoryError\(errno\."  # caught by the next lines
    r"|: raise ValueError\(f'a |: raise ValueError\('a tree"  # data between processes
)


def test_every_error_has_a_class_a_cause_and_a_fix(raise_statements: Any) -> None:
    classes = {
        name: value
        for source in raise_statements.sources()
        for name, value in vars(import_module(f"manyheads.{source.module}".rstrip("."))).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    for error in raise_statements.errors():
        where = f"{error.module}:{error.line}: {error.cause} {error.fix}"
        found = getattr(builtins, error.error, None) or classes.get(error.error)
        found = found or {"BadParameter": ValueError}.get(error.error)  # typer's
        assert isinstance(found, type), where
        assert issubclass(found, BaseException), where
        assert error.cause, where
        assert error.fix, where
        assert error.fix[-1] in ".?)", where
        assert error.cause[-1] in ".?)›", where


def test_no_error_is_a_fragment_or_leaks_code(raise_statements: Any) -> None:
    for error in raise_statements.errors():
        for text in (error.cause, error.fix):
            assert not re.search(r"\bself\.\w|__\w+__|‹[A-Z_]{2,}›|‹\w*[_.]\w*›|\{\w+\}", text), error
            assert ".." not in text.replace("...", ""), error
            assert text[0].isupper() or not re.match(r"(an?|it|its|in|there|the|whose|because) ", text), error


def test_the_page_of_errors_keeps_dashes_and_has_every_row(raise_statements: Any) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        page = import_module("generate").errors()
    finally:
        sys.path.remove(str(ROOT / "docs"))
    for error in raise_statements.errors():
        assert error.cause.replace("|", "\\|") in page
    outside = re.sub(r"``.*?``(?!`)|`[^`]*`", "", page.partition("## Why")[0])
    assert "--" not in re.sub(r"^\|---.*$", "", outside, flags=re.M)


def test_a_message_is_split_into_its_cause_and_its_fix(raise_statements: Any) -> None:
    split = raise_statements.split
    assert split("Expected x, got y. Do z.") == ("Expected x, got y.", "Do z.")
    assert split("q is here and k there: move them together.") == (
        "q is here and k there.",
        "Move them together.",
    )
    assert split("Expected x to be a Mask, got a list.")[1] == "Pass a Mask as x."
    assert split("Expected n to be at least 1, got 0.")[1] == "Set n to a value of at least 1."
    assert split("Expected g to divide h, got g = 2 and h = 3.")[1] == "Make g divide h."
    assert split("Nothing was recorded.")[1] == ""


def test_the_reasons_of_every_kernel_are_on_the_page(raise_statements: Any) -> None:
    kernels = {name for name, _ in raise_statements.kernel_reasons()}
    assert kernels == {*manyheads.kernels.ORDER} - {"reference"}  # type: ignore[attr-defined]
