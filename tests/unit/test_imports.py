"""Layers of the code: a module imports from lower layers only, and `import manyheads` loads nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import dedent

import pytest

import manyheads

ROOT = Path(manyheads.__file__).parent

# From the lowest layer up. A module may import from lower layers and from what is listed before it in its
# layer. An entry is a module, or a package with everything in it.
LAYERS = (
    ("startup", "shapes", "tokens", "trees", "extras"),
    ("layouts", "patches", "shards", "masks", "biases", "positions"),
    ("problem", "scores"),
    ("kernels",),
    ("storage", "statistics", "maps", "measures", "warping", "alignment", "highlights", "cache", "bridges"),
    ("functional", "layers", "policies", "classic", "figures", "onnx"),
    ("sdpa_hooks", "acceleration", "observe", "hf", "distributed", "lm"),
    ("viewer", "checker", "text", "bench", "atlas"),
    ("help_pages", "cli"),
    ("__main__",),
)
ORDER = [entry for layer in LAYERS for entry in layer]

# The only imports that point upward, inside functions: what needs them is installed by an extra.
OPTIONAL = {("extras", "viewer"): "view"}


def entry(module: str) -> str:
    """`manyheads.kernels.sdpa` → `kernels`."""
    return module.split(".")[1] if "." in module else ""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports(path: Path, module: str) -> list[tuple[str, int, bool]]:
    """Return what a module imports from manyheads, also inside functions: (name, line, inside a function).

    Imports for type checkers alone, under `if TYPE_CHECKING`, are left out.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                found.extend((name.name, child.lineno, inside) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = ".".join([*package.split(".")[: 1 - child.level or None], *filter(None, [base])])
                names = (f"{base}.{name.name}" for name in child.names)
                found.extend((name if name in MODULES else base, child.lineno, inside) for name in names)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                name = ast.unparse(child.args[0]).removeprefix("f").strip("'").partition("{")[0].rstrip(".")
                found.append((name, child.lineno, inside))
            walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(ast.parse(path.read_text(encoding="utf-8")), False)
    return [(name, line, inside) for name, line, inside in found if name.split(".")[0] == "manyheads"]


@pytest.mark.parametrize("module", [name for name in MODULES if "." in name])
def test_imports_point_downward(module: str) -> None:
    mine = entry(module)
    assert mine in ORDER, f"Add {mine} to LAYERS."
    for name, line, inside in imports(MODULES[module], module):
        where = f"{module}:{line} imports {name}"
        theirs = entry(name)
        if theirs == mine:
            continue
        if theirs == "":  # `import manyheads` makes layers 0 to 6 available
            assert ORDER.index(mine) > ORDER.index("observe"), where
        elif (mine, theirs) in OPTIONAL:
            assert inside, f"{where} outside of a function"
        else:
            assert ORDER.index(theirs) < ORDER.index(mine), where
            assert {mine, theirs} != {"viewer", "checker"}, where


def test_no_imports_form_a_circle() -> None:
    """Also those inside functions; the optional ones are left out."""
    graph = {
        module: {
            name
            for name, _, _ in imports(path, module)
            if name != module and (entry(module), entry(name)) not in OPTIONAL
        }
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_optional_imports_are_of_extras_and_exist() -> None:
    """The exemptions above are all needed, and name an extra of the package."""
    found = {
        (entry(module), entry(name)) for module in MODULES for name, _, _ in imports(MODULES[module], module)
    }
    assert set(OPTIONAL) <= found
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(OPTIONAL.values()) <= set(extras["optional-dependencies"])


def test_the_package_imports_layers_0_to_6_only() -> None:
    for module in {*manyheads._MODULES.values(), "measures"} - {""}:
        assert ORDER.index(module.partition(".")[0]) <= ORDER.index("observe"), module


def test_the_reader_of_imports_finds_all_kinds(tmp_path: Path) -> None:
    """The tests above can fail: a module with every kind of import."""
    path = tmp_path / "masks.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from manyheads import cli\n"
        "def f():\n    from manyheads import layers\n    import manyheads.cli as c\n"
        "from .scores import Problem\n"
        "import torch, manyheads.maps\nload = lambda: import_module(f'manyheads.viewer.{x}')\n"
    )
    assert imports(path, "manyheads.masks") == [
        ("manyheads.layers", 4, True),
        ("manyheads.cli", 5, True),
        ("manyheads.scores", 6, False),
        ("manyheads.maps", 7, False),
        ("manyheads.viewer", 8, True),
    ]
    nested = tmp_path / "__init__.py"
    nested.write_text("from . import sdpa\nfrom .. import masks\nfrom ..scores import Problem\n")
    assert [name for name, _, _ in imports(nested, "manyheads.kernels")] == [
        "manyheads.kernels.sdpa",
        "manyheads.masks",
        "manyheads.scores",
    ]


def test_kernels_are_imported_lazily() -> None:
    inside = {name: lazy for name, _, lazy in imports(ROOT / "kernels" / "__init__.py", "manyheads.kernels")}
    assert all(inside[f"manyheads.kernels.{name}"] for name in manyheads.kernels.ORDER)


def python(*options: str) -> tuple[int, str, str]:
    """Run a fresh interpreter; return its exit code and what it printed."""
    done = subprocess.run([sys.executable, *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


HEAVY = ("triton", "transformers", "matplotlib", "tokenizers", "starlette", "uvicorn", "hypothesis",
         "safetensors", "rich", "typer", "IPython", "pandas", "torchvision", "http.server")  # fmt: skip


def test_importing_manyheads_is_light() -> None:
    """In a fresh process; what torch loads by itself doesn't count."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from manyheads import *\n"
        "print(*set(sys.modules) - before)"
    )
    _, printed, _ = python("-c", code)
    loaded = set(printed.split())
    assert "manyheads.layers" in loaded
    for name in HEAVY:
        assert not any(module == name or module.startswith(name + ".") for module in loaded), name
    names = {entry(module) for module in loaded if module.startswith("manyheads.")}
    assert not names & set(ORDER[ORDER.index("observe") + 1 :])


COMMANDS_ONLY = ("rich", "typer", "tokenizers", "matplotlib", "psutil", "cachetools")

CORE = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises ImportError
import torch
from manyheads import *
x = torch.randn(1, 2, 40, 8)
out, amap = attention_with_map(x, x, x, mask=Causal() & Window(left=9), statistics={"entropy": ()})
torch.testing.assert_close(attention(x, x, x, mask=Causal() & Window(left=9)), out)
explain(x, x, x)
amap[0, 1, -1], amap.entropy(), amap.received(), amap.pooled(4, 4)
measures.previous_token(amap), measures.rollout([amap], rows=-1)
layer, tokens = MultiHeadAttention(16, 2, position=Rotary(8)), torch.randn(1, 5, 16)
layer(tokens, mask=Causal()).sum().backward()
with observe(layer) as recording:
    layer(tokens)
with torch.no_grad():
    layer(tokens, cache=Cache())
recording.save(sys.argv[0] + ".safetensors")
print(len(open_run(sys.argv[0] + ".safetensors")), recording[0][0, 0].sum().round())
"""


def test_the_core_needs_torch_numpy_and_safetensors_only(tmp_path: Path) -> None:
    """In a process in which the packages of the commands can't be imported."""
    script = tmp_path / "core.py"
    script.write_text(CORE)
    code, printed, errors = python(str(script), *COMMANDS_ONLY)
    assert (code, errors) == (0, "")
    assert printed.endswith("\n1 tensor(5.)\n")
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split("[>=]", name)[0] for name in extras["dependencies"]}
    assert needed == {"torch", "numpy", "safetensors", "filelock", *COMMANDS_ONLY}  # torch needs filelock


def test_importing_manyheads_imports_no_torch() -> None:
    _, printed, _ = python(
        "-c", "import sys, manyheads, manyheads.__main__, manyheads.cli; print(*sys.modules)"
    )
    assert "manyheads.cli" in printed.split()
    assert not {"torch", "numpy"} & set(printed.split())


def test_type_checkers_find_each_public_name_in_the_module_it_is_imported_from() -> None:
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
    "submodules, completion, pickling and a name that isn't there": """
        import pickle
        assert m.measures.rollout and m.kernels.ORDER and m.scores.tile
        assert {'attention', 'measures'} <= set(m.__all__) <= set(dir(m))
        assert pickle.loads(pickle.dumps(m.Window(left=2))).left == 2
        assert not hasattr(m, "nothing")
        try:
            from manyheads import nothing
        except ImportError as error:
            assert "nothing" in str(error)
    """,
    "inspection": """
        import doctest, inspect
        assert inspect.getmodule(m.attention).__name__ == "manyheads.functional"
        assert {name for name, _ in inspect.getmembers(m)} >= set(m.__all__)
        assert doctest.testmod(m).failed == 0
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
        with m.observe(layer) as recording:
            layer(x)
        assert len(recording) == 1
    """,
}


@pytest.mark.full
@pytest.mark.parametrize("code", LAZY.values(), ids=LAZY)
def test_names_that_are_imported_when_they_are_used(code: str) -> None:
    returned, _, errors = python("-c", "import manyheads as m\n" + dedent(code))
    assert (returned, errors) == (0, "")


def test_importing_manyheads_prints_nothing_and_changes_nothing() -> None:
    code = (
        "import torch; s = torch.random.get_rng_state(); n = torch.get_num_threads();"
        "g = torch.is_grad_enabled();"
        "from manyheads import *;"
        "assert torch.equal(s, torch.random.get_rng_state()) and n == torch.get_num_threads();"
        "assert g == torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32"
    )
    assert python("-W", "error", "-c", code) == (0, "", "")


PUBLIC = """
    attention attention_with_map AttentionMap explain Cache MultiHeadAttention SelfAttention CrossAttention
    Full Causal Window Prefix Documents Lengths Diagonal Keys SameToken AfterSameToken Keep Drop Rule Mask
    ALiBi Relative Dense Sinusoidal Rotary measures observe open_run TokenizedText from_onnx_attention
    Patches find_patches accelerate
"""


def test_every_public_name_exists() -> None:
    assert sorted(PUBLIC.split()) == sorted(manyheads.__all__)
    assert all(getattr(manyheads, name).__doc__ for name in manyheads.__all__)
