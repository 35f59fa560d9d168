"""Record the atlas of the shipped model over the documentation's text: the page and the picture in the docs.

    python scripts/make_atlas.py [--processes N]

It takes half a minute, and needs Chromium (see CONTRIBUTING.md) for the picture.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from manyheads import atlas

ROOT = Path(__file__).parents[1]
TEXT = ("README.md", "CONTRIBUTING.md", "docs")
PAGE, PICTURE = ROOT / "docs" / "_static" / "atlas.html", ROOT / "docs" / "atlas.png"
HEAD = "2.5"  # layer and head that the picture shows


def main() -> None:
    """Record the atlas, write the page and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1")
    processes = parser.parse_args().processes
    listed = subprocess.run(["git", "ls-files", *TEXT], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split() if name.endswith(".md")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "atlas"
        command = [sys.executable, "-m", "manyheads", "atlas", "shipped", "--out", str(out), "--text", *files]
        subprocess.run([*command, "--processes", processes], cwd=ROOT, check=True)
        atlas.open(out).export(PAGE)
    chromium = os.environ.get("MANYHEADS_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1180}, color_scheme="light")
        page.goto(f"{PAGE.as_uri()}#{HEAD}")
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
