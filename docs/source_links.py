"""Links from the pages of source code to the reference.

sphinx.ext.viewcode gives all names of a module one prefix, that of the first name that it meets. Here, some
names of a module are documented as `manyheads.X`, others as `manyheads.module.Y`.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath as Path
from posixpath import normpath
from typing import Any

from sphinx.application import Sphinx

LINK = re.compile(r'(id="([^"]+)">\s*<a class="viewcode-back" href="([^"#]+)\.html#)[^"]+(?=")')


def correct(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give each link of a page of source code the anchor that the reference has."""
    if not page.startswith("_modules/") or "body" not in context:
        return
    objects = app.env.domains.python_domain.objects
    parts = page.split("/")[1:]
    packages = [
        ".".join(parts[:n]) for n in range(len(parts), 0, -1)
    ]  # of a name: its module, or one around it

    def replace(found: re.Match[str]) -> str:
        link, name, path = found.groups()
        document = normpath(Path(page).parent / path)
        entries = (objects.get(f"{package}.{name}") for package in packages)
        return link + next(entry.node_id for entry in entries if entry and entry.docname == document)

    context["body"] = LINK.sub(replace, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the correction."""
    app.connect("html-page-context", correct)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
