"""The documentation site: `sphinx-build -W docs build/site` builds it, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate

import manyheads

project = "manyheads"
author = "the authors of manyheads"
release = manyheads.__version__
copyright = author

extensions = [
    "myst_nb",  # pages in Markdown; the lessons, which are run
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google's style
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "live",  # pages of the viewer: docs/live.py
    "mathml",  # formulas: docs/mathml.py
    "source_links",  # from source code to the reference: docs/source_links.py
]
exclude_patterns = ["lessons/exercises", "lessons/solutions"]
nitpicky = False  # docstrings name types of PyTorch, whose inventory isn't read: a build needs no network

nb_execution_mode = "cache"
nb_execution_timeout = 600  # seconds; the last lesson trains a small model
nb_execution_raise_on_error = True

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else attributes would be listed twice
default_role = "code"  # `x` in a docstring
add_module_names = False
python_use_unqualified_type_names = True

html_math_renderer = "mathml"
html_theme = "furo"
pygments_dark_style = "github-dark"  # Furo's own underlines imported names as if they were links
html_title = "manyheads"
html_favicon = "../src/manyheads/viewer/static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}


def setup(app: Any) -> None:
    """Write the pages that are generated from the code before Sphinx reads the pages."""
    app.connect("builder-inited", lambda app: generate.write(Path(app.srcdir) / "reference" / "generated"))
