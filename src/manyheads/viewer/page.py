"""An exported page: one HTML file with its scripts, styles and the responses to its requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

from manyheads.viewer import assets


def encode(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode()


def encoded_size(size: int) -> int:
    """Return the length of base64 of a number of bytes."""
    return -(-size // 3) * 4


def build_page(responses: dict[str, str], folder: str | None = None, picture: bytes | None = None) -> str:
    """Return a page that contains the responses to its requests.

    Args:
        responses: The responses as base64, by address. Equal ones are stored once.
        folder: The folder of tiles beside the page.
        picture: A PNG that is displayed if scripts don't run.

    Returns:
        The page as HTML.
    """
    first: dict[str, str] = {}  # the first address of each response
    stored = {
        address: f"={first[response]}" if first.setdefault(response, address) != address else response
        for address, response in responses.items()
    }
    script = assets.script() + (
        "const responses = JSON.parse(document.getElementById('answers').textContent);\n"
        f"const client = new PageClient(responses, {json.dumps(folder)});\n"
        "const app = show(document.body, client, location.protocol !== 'about:');\n"
        "addEventListener('message', ({ source, data }) => source === parent && app.adaptTo(data?.color));\n"
    )
    style = assets.read("viewer.css")
    script_hash, style_hash = (
        f"'sha256-{encode(hashlib.sha256(text.encode()).digest())}'" for text in (script, style)
    )
    assert not re.search("</script|<!--", script, re.IGNORECASE)  # either would end the script
    fallback = "This page needs JavaScript."
    if picture is not None:
        fallback = f'<img alt="every head" src="data:image/png;base64,{encode(picture)}">'
    tile_sources = " 'self' file:" if folder else ""
    policy = (
        f"default-src 'none'; script-src {script_hash}{tile_sources}; style-src {style_hash}; "
        "img-src data: blob:"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>manyheads</title>\n'
        f"<style>{style}</style>\n<body><noscript>{fallback}</noscript>\n"
        f'<script type="application/json" id="answers">{json.dumps(stored)}</script>\n'
        f'<script type="module">{script}</script>\n</html>\n'
    )
