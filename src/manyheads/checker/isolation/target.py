"""Import the object that a target names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from manyheads.checker.isolation.errors import CandidateError, CodeError, describe_exception


def find(target: str) -> Any:
    """Import the object that a target names.

    Args:
        target: `module:name` or `path/to/file.py:name`; the name may be dotted. A file in a package is
            imported as a module of that package. The folder of any other file is added to sys.path and
            remains there, because the file may import its neighbours later.

    Returns:
        The object.

    Raises:
        CandidateError: Of kind "import", if the target has another form or doesn't exist, or the import
            raises.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise CodeError(
            "import",
            f"Expected a target module:name or path/to/file.py:name, got {target!r}. "
            "Name the object too, as in attention.py:MyAttention.",
        )
    try:
        value: Any = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except CandidateError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise CodeError(
                "import",
                f"No module {error.name!r} is found for {target!r}. "
                "Run where it can be imported, or name its file, as in path/to/file.py:name.",
            ) from None
        raise describe_exception("import", f"importing {place}", error) from None
    path = f"{place}:"
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            names = [other for other in dir(value) if not other.startswith("_")]
            similar = difflib.get_close_matches(part, names, 3, 0.5) or defined_names(value)[:5]
            hint = f"Did you mean {' or '.join(similar)}?" if similar else "It defines nothing."
            raise CodeError("import", f"{path.rstrip(':.')} has no name {part!r}. {hint}") from None
        except Exception as error:
            raise describe_exception("import", f"reading {part!r} of {path.rstrip(':.')}", error) from None
        path += f"{part}."
    return value


def defined_names(module: Any) -> list[str]:
    """Return the public names that a module or class defines; without any, all its public names."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own_name = getattr(module, "__name__", "")
    defined = [name for name, value in public.items() if getattr(value, "__module__", "") == own_name]
    return defined or list(public)


def import_file(path: Path) -> types.ModuleType:
    """Import a file; if it is in a package, as a module of that package."""
    path = path.absolute()
    if not path.is_file():
        similar = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.py")], 3, 0.5)
        hint = f"Did you mean {' or '.join(similar)}?" if similar else "Check the folder."
        raise CodeError("import", f"There is no file {path}. {hint}")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    # A file may have the name of a module that is imported already, such as random.py.
    is_taken = getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path)
    spec = importlib.util.spec_from_file_location(path.stem + "_under_check" * is_taken, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
