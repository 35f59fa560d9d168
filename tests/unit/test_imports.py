"""The house: a module imports lower floors only, and `import manyheads` loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import manyheads

ROOT = Path(manyheads.__file__).parent

# From the ground up; within a floor, a module may import what is listed before it. An entry is a module
# or a package with all that is in it; the members of a package may import each other in any order that
# Python itself can load.
FLOORS = (
    ("startup", "shapes", "trees"),
    ("layouts", "masks", "biases", "positions"),
    ("problem", "scores"),
    ("kernels",),
    ("storage", "statistics", "maps", "measures", "cache"),
    ("functional", "layers", "classic", "figures"),
    ("observe", "lm"),
    # Leaves that don't import each other, but for what a page or a command puts together.
    (
        "viewer",
        "checker",
        "text",
        "bench",
    ),
    ("cli",),
    ("__main__",),
)

# Calls that point upward, or from a leaf to a leaf: inside a function, and only these.
UPWARD = {
    ("observe", "viewer"),
    ("maps", "viewer"),
}

LEAVES = {"viewer", "checker"}
ORDER = [entry for floor in FLOORS for entry in floor]


def entry(module: str) -> str:
    """`manyheads.kernels.sdpa` → `kernels`."""
    return module.split(".")[1] if "." in module else ""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT.parent).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, module: str) -> list[tuple[str, int, bool]]:
    """What a module imports of manyheads, those inside functions too: (name, line, inside a function)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                found.extend((name.name, child.lineno, inside) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = package.split(".")
                    base = ".".join([*parts[: len(parts) - child.level + 1], *filter(None, [base])])
                for name in child.names:
                    full = f"{base}.{name.name}"
                    found.append((full if full in modules() else base, child.lineno, inside))
            elif (
                isinstance(child, ast.Call)
                and (getattr(child.func, "id", None) or getattr(child.func, "attr", None)) == "import_module"
                and child.args
            ):
                name = child.args[0]
                text = name.value if isinstance(name, ast.Constant) else ""
                if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
                    text = str(name.values[0].value).rstrip(".")
                found.append((str(text), child.lineno, inside))
            walk(child, deeper)

    walk(tree, False)
    return [(name, line, inside) for name, line, inside in found if name.split(".")[0] == "manyheads"]


MODULES = modules()


@pytest.mark.parametrize("module", [name for name in MODULES if "." in name])
def test_imports_point_downward(module: str) -> None:
    mine = entry(module)
    assert mine in ORDER, f"{mine} stands on no floor: say where in FLOORS"
    for name, line, inside in imports(MODULES[module], module):
        where = f"{module}:{line} imports {name}"
        theirs = entry(name)
        if theirs == mine:
            continue
        if theirs == "":  # the package's face, which loads floors 0 to 6
            assert ORDER.index(mine) > ORDER.index("observe"), where
            continue
        if (mine, theirs) in UPWARD:
            assert inside, f"{where} upward, and not inside a function"
            continue
        assert not {mine, theirs} <= LEAVES, f"{where}, a leaf another leaf"
        assert ORDER.index(theirs) < ORDER.index(mine), where


def test_the_face_takes_floors_0_to_6_only() -> None:
    for name, line, _ in imports(ROOT / "__init__.py", "manyheads"):
        assert ORDER.index(entry(name)) <= ORDER.index("observe"), (name, line)


def test_the_reader_of_imports_sees_all_kinds(tmp_path: Path) -> None:
    """The test above can fail: a module with every kind of import."""
    path = tmp_path / "masks.py"
    path.write_text(
        "def f():\n    from manyheads import layers\n    import manyheads.cli as c\n"
        "from .scores import Problem\n"
        "import torch, manyheads.maps\nload = lambda: import_module(f'manyheads.viewer.{x}')\n"
    )
    assert imports(path, "manyheads.masks") == [
        ("manyheads.layers", 2, True),
        ("manyheads.cli", 3, True),
        ("manyheads.scores", 4, False),
        ("manyheads.maps", 5, False),
        ("manyheads.viewer", 6, True),
    ]


def test_the_kernels_list_loads_its_members_lazily() -> None:
    inside = {name: lazy for name, _, lazy in imports(ROOT / "kernels" / "__init__.py", "manyheads.kernels")}
    assert all(inside[f"manyheads.kernels.{name}"] for name in manyheads.kernels.ORDER)


HEAVY = ("triton", "transformers", "matplotlib", "tokenizers", "starlette", "uvicorn", "hypothesis",
         "safetensors", "rich", "typer", "IPython", "pandas", "torchvision", "http.server")  # fmt: skip


def test_importing_manyheads_is_light() -> None:
    """In a fresh process; what torch loads by itself doesn't count."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from manyheads import *\n"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "manyheads.layers" in loaded
    for name in HEAVY:
        assert not any(module == name or module.startswith(name + ".") for module in loaded), name
    names = {entry(module) for module in loaded if module.startswith("manyheads.")}
    assert not names & set(ORDER[ORDER.index("observe") + 1 :])


def test_importing_manyheads_imports_no_torch() -> None:
    code = "import sys, manyheads, manyheads.__main__, manyheads.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & set(done.stdout.split())


def test_the_face_names_each_module_once_for_people_and_once_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    checked = {
        name.name: (node.module or "").removeprefix("manyheads").lstrip(".")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyheads")
        for name in node.names
    }
    assert checked.pop("measures") == ""
    assert checked == manyheads._MODULES
    assert sorted([*checked, "measures"]) == sorted(manyheads.__all__)


LAZY = {
    "the subpackage observe doesn't take the function's place": """
        from manyheads.observe import Recording
        import manyheads.observe as bound
        from manyheads import observe
        assert m.observe is bound is observe and callable(observe)
    """,
    "submodules": "assert m.measures.rollout and m.kernels.ORDER and m.problem.Problem",
    "completion": "assert {'attention', 'measures'} <= set(m.__all__) <= set(dir(m))",
    "pickling": """
        import pickle
        assert pickle.loads(pickle.dumps(m.Window(left=2))).left == 2
    """,
    "inspection": """
        import doctest, inspect
        assert inspect.getmodule(m.attention).__name__ == "manyheads.functional"
        assert {name for name, _ in inspect.getmembers(m)} >= set(m.__all__)
        assert doctest.testmod(m).failed == 0
    """,
    "a name that isn't there": """
        assert not hasattr(m, "nothing")
        try:
            from manyheads import nothing
        except ImportError as error:
            assert "nothing" in str(error)
    """,
    "a name that is first used while Dynamo traces": """
        import torch
        x = torch.randn(1, 2, 3, 4)
        causal = lambda x: m.attention(x, x, x, mask=m.Causal())
        compiled = torch.compile(causal, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), causal(x))
    """,
    "observe is imported after what it observes": """
        import torch
        from manyheads.functional import attention
        class Layer(torch.nn.Module):
            def forward(self, x):
                return attention(x, x, x)
        layer, x = Layer(), torch.randn(1, 2, 3, 4)
        layer(x)
        with m.observe(layer) as seen:
            layer(x)
        assert len(seen) == 1
    """,
}


@pytest.mark.parametrize("code", LAZY.values(), ids=LAZY)
def test_names_that_are_imported_when_they_are_used(code: str) -> None:
    code = "import manyheads as m\n" + dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_manyheads_prints_nothing_and_changes_nothing() -> None:
    code = (
        "import torch; s = torch.random.get_rng_state(); n = torch.get_num_threads();"
        "g = torch.is_grad_enabled();"
        "from manyheads import *;"
        "assert torch.equal(s, torch.random.get_rng_state()) and n == torch.get_num_threads();"
        "assert g == torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_there_and_documented() -> None:
    wanted = [
        "attention",
        "attention_with_map",
        "AttentionMap",
        "explain",
        "Cache",
        "MultiHeadAttention",
        "SelfAttention",
        "CrossAttention",
        "Full",
        "Causal",
        "Window",
        "Prefix",
        "Documents",
        "Lengths",
        "Diagonal",
        "Keys",
        "SameToken",
        "AfterSameToken",
        "Keep",
        "Drop",
        "Rule",
        "ALiBi",
        "Relative",
        "Dense",
        "Sinusoidal",
        "Rotary",
    ]
    assert set(wanted) <= set(manyheads.__all__)
    for name in manyheads.__all__:
        assert getattr(manyheads, name).__doc__, name
