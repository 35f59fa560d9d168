"""Live pages of the viewer in the documentation, exported from the shipped model when the site is built.

    ```{viewer} sentence page=head&layer=2&head=4
    ---
    caption: Head 4 of layer 2.
    ---
    ```

The first word names a page of `PAGES`, the rest is the state that the viewer opens with.
"""

from __future__ import annotations

import pydoc
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import torch
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import manyheads
from manyheads import lm
from manyheads.text import report
from manyheads.viewer.api import Api
from manyheads.viewer.export import Export, plan_export
from manyheads.viewer.widget import SEND_THEME

FOLDER = "live"  # of the site
LARGEST = 3_000_000  # bytes of a page


def sentence(path: Path) -> Export:
    """Plan a page of every head of the README's sentence."""
    text = "the file you want to read is not the file you need to read"
    return plan_export(Api(report.read(text).recording), path)


def text(path: Path) -> Export:
    """Plan a page of an induction head over 512 tokens of Python's documentation."""
    words = pydoc.plain(pydoc.render_doc("textwrap"))
    return plan_export(Api(report.read(words, truncate=True).recording), path, layer=2, heads=[5])


def repeated(path: Path) -> Export:
    """Plan a page of layer 2 over random tokens that are repeated, as in the guide to induction heads."""
    model, tokenizer = lm.load()
    words = torch.randint(300, 2000, (64,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([words, words])
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(ids[None])
    recording.label(manyheads.TokenizedText.from_ids(ids.tolist(), tokenizer))
    return plan_export(Api(recording), path, layer=2)


PAGES = {"sentence": sentence, "text": text, "repeated": repeated}


class Viewer(SphinxDirective):
    """A page of the viewer in a frame."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"caption": directives.unchanged_required, "height": directives.nonnegative_int}

    def run(self) -> list[nodes.Node]:
        """Return the frame, and under it the caption with a link to the page alone."""
        name, _, state = self.arguments[0].partition(" ")
        if name not in PAGES:
            raise self.error(f"Expected the name of a page ({', '.join(PAGES)}), got {name!r}.")
        caption, height = self.options["caption"], self.options.get("height", 640)
        address = escape(f"{'../' * self.env.docname.count('/')}{FOLDER}/{name}.html#{state}")
        return [
            nodes.raw(
                "",
                f'<figure class="viewer"><iframe src="{address}" title="{escape(caption)}" loading="lazy" '
                f'style="height: {height}px" onload="{escape(SEND_THEME)}"></iframe>'
                f'<figcaption>{escape(caption)} <a href="{address}">Open it alone</a></figcaption></figure>',
                format="html",
            )
        ]


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the pages into the site after it was built."""
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir) / FOLDER
    folder.mkdir(exist_ok=True)
    for name, plan in PAGES.items():
        export = plan(folder / f"{name}.html")
        assert export.size < LARGEST, f"{name}: {export.description}"
        export.write()
        export.api.close()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and the pages."""
    app.add_directive("viewer", Viewer)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
