"""The page itself: what a browser gets, as text. Its scripts are plain files, put one after the other."""

from __future__ import annotations

from functools import cache
from importlib import resources

D3 = ("color", "dispatch", "timer", "interpolate", "selection", "ease", "drag", "transition", "zoom")
SCRIPTS = ("numbers", "sources", "tiles", "head", "overview", "text", "app")
ASSETS = {  # what may be asked for, and what it is
    "index.html": "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@cache
def read(name: str) -> str:
    """The text of an asset."""
    return script() + "show(document.body, new Served('data/'));\n" if name == "viewer.js" else _text(name)


@cache
def script() -> str:
    """All scripts as one module: d3's zoom, and ours, which define `show(root, source)`."""
    d3 = "\n".join(_text(f"vendor/d3-{name}.min.js") for name in D3)
    # Each of d3's files hands out functions as a module of Node's does; here all put them into one object.
    vendored = f"const d3 = {{}};\n((exports, module, require) => {{\n{d3}\n}})(d3, {{}}, () => d3);\n"
    return vendored + "\n".join(_text(f"{name}.js") for name in SCRIPTS)


def _text(name: str) -> str:
    return (
        resources.files("manyheads.viewer").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
    )
