"""Other names of a class and of its arguments change no verdict; the checker may ask for a role."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from manyheads import checker
from manyheads.checker.isolation.target import find
from tests.corpus.planted import matrix

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


def rename(text: str, target: str) -> tuple[str, str]:
    """Return a style with names that say nothing, and the new name of its target."""
    nodes = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    node = nodes[target]
    methods = node.body if isinstance(node, ast.ClassDef) else [node]
    called = [x for x in methods if isinstance(x, ast.FunctionDef) and x.name in ("forward", target)]
    arguments = [arg.arg for x in called for arg in (*x.args.args, *x.args.kwonlyargs) if arg.arg != "self"]
    names = {old: f"n{n}" for n, old in enumerate(dict.fromkeys([target, *arguments]))}
    for old, new in names.items():
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    return text, names[target]


@pytest.mark.every(20)
@pytest.mark.parametrize(
    "style",
    [pytest.param(x, marks=() if n % 10 == 0 else pytest.mark.full) for n, x in enumerate(matrix.TABLES)],
)
def test_a_correct_style_with_other_names_does_not_fail(style: str, tmp_path: Path) -> None:
    text, name = rename(matrix.source(style), matrix.TABLES[style]["target"])
    file = tmp_path / f"renamed_{style}.py"
    file.write_text(text, encoding="utf-8")
    asked, verdict, bugs = "", "", []
    try:
        found = checker.check(find(f"{file}:{name}"), like=matrix.TABLES[style].get("like"))
        verdict, bugs = found.verdict, found.diagnosis
    except checker.Unclear as error:
        asked = str(error)
    assert verdict in ("passed", "not judged") or re.search(r"--(arg|like|weights|init|heads)", asked)
    assert not bugs
