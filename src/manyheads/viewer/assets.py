"""The page that a browser loads, as text.

Its scripts are plain files that are joined into one module, its style sheets are joined into one.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

D3 = ("color", "dispatch", "timer", "interpolate", "selection", "ease", "drag", "transition", "zoom")
BASICS = ("numbers", "colorbar", "clients", "themes", "tiles", "tokens", "pages", "state", "linked", "heads")
MATRIX = ("geometry", "gestures", "rulers", "strips", "minimap", "difference", "exact")
HEAD = (*MATRIX, "panel", "picture", "explain", "headpane", "saving", "headpage")
OVERVIEW = ("thumbnails", "groups", "scores", "preview", "overview")
SCRIPTS = (*BASICS, *HEAD, *OVERVIEW, "text", "lines", "search", "drawer", "app")
STYLES = ("base", "overview", "head", "text", "lines", "drawer")
MEDIA_TYPES = {  # by the names of the files that a browser may request
    "index.html": "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@cache
def read(name: str) -> str:
    """Return the text of a file."""
    if name == "viewer.js":
        return f"{script()}show(document.body, new HttpClient('data/'));\n"
    if name == "viewer.css":
        return "\n".join(read(f"{style}.css") for style in STYLES)
    path = resources.files("manyheads.viewer").joinpath("static", *name.split("/"))
    return path.read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return all scripts as one module: parts of d3, and our scripts, which define `show(root, client)`."""
    d3 = "\n".join(read(f"vendor/d3-{name}.min.js") for name in D3)
    # Each of d3's files exports functions like a Node.js module. Here, all export into one object, `d3`.
    vendored = f"const d3 = {{}};\n((exports, module, require) => {{\n{d3}\n}})(d3, {{}}, () => d3);\n"
    return vendored + "\n".join(read(f"{name}.js") for name in SCRIPTS)
