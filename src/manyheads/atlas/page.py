"""The atlas as a page: served to a browser, where its examples open in the viewer, or as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from manyheads.atlas.plans import load_model
from manyheads.atlas.summaries import MEASURES, SHARES
from manyheads.measures import UNITS
from manyheads.tokens import TokenizedText

if TYPE_CHECKING:
    from manyheads.atlas.tables import Atlas
    from manyheads.viewer.server import Server

BEFORE, AFTER = 14, 4  # tokens of an excerpt around the query
AROUND = 5  # tokens of an excerpt on each side of a key
FAINT = 0.05  # keys of smaller weights aren't part of an excerpt
MOST_ALIKE = 5  # heads that are listed as alike
OPEN = 4  # passages that are open in the viewer at the same time


@cache
def read(name: str) -> str:
    """Return the text of a file of the page."""
    return resources.files("manyheads.atlas").joinpath("static", name).read_text(encoding="utf-8")


def build(atlas: Atlas) -> str:
    """Return the page as one HTML file, without links to the viewer."""
    style, script = read("atlas.css"), read("atlas.js")
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    policy = "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:".format(
        *hashes
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    return _document(
        content(atlas, links=False),
        f"{meta}\n<style>{style}</style>",
        f'<script type="module">{script}</script>',
    )


def _document(data: Mapping[str, Any], head: str, script: str) -> str:
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Atlas of heads: {html.escape(data['facts']['model'])}</title>\n{head}\n"
        '<body><noscript>This page needs JavaScript.</noscript><div id="atlas"></div>\n'
        f'<script type="application/json" id="data">{plain}</script>\n{script}\n</html>\n'
    )


# -- the data of the page --------------------------------------------------------------------------


def content(atlas: Atlas, links: bool) -> dict[str, Any]:
    """Return the data of the page as JSON data.

    Args:
        atlas: The atlas.
        links: Whether examples have links that open them in the viewer.

    Returns:
        The facts, a list of heads with all that the page shows of each, and the passages of their examples.
    """
    heads = [_rounded(row) for row in atlas.rows("heads")]
    index = {(row["layer"], row["head"]): row for row in heads}
    for row in heads:
        row |= {"scores": {}, "positions": [], "examples": [], "sinks": [], "alike": [], "cost": None}
    for row in map(_rounded, atlas.rows("scores")):
        if row["queries"]:
            values = [row[name] for name in ("mean", "std", *SHARES)]
            index[row["layer"], row["head"]]["scores"][row["score"]] = values
    for row in map(_rounded, atlas.rows("positions")):
        values = [row[name] for name in ("first", "last", "entropy", "distance")]
        index[row["layer"], row["head"]]["positions"].append(values)
    for row in map(_rounded, atlas.rows("sinks")):
        values = [row[name] for name in ("token", "position", "received")]
        index[row["layer"], row["head"]]["sinks"].append(values)
    files = {row["passage"]: row["file"] for row in atlas.rows("passages")}
    passages = {number: atlas.passage(number) for number in files}
    for row in atlas.rows("examples"):
        tokens = passages[row["passage"]]
        example = {
            "surprise": round(row["surprise"], 3),
            "file": files[row["passage"]],
            "query": row["query"],
            "token": row["query_token"],
            "passage": row["passage"],
            "spans": [find_characters(tokens, n) for n in (row["query"], *row["keys"])],
            "parts": excerpt(tokens, row["query"], row["keys"], row["weights"]),
            "keys": [
                [label, key, round(weight, 4)]
                for label, key, weight in zip(row["key_tokens"], row["keys"], row["weights"], strict=True)
            ],
        }
        if links:
            example["link"] = f"open/{row['layer']}/{row['head']}/{row['rank']}"
        index[row["layer"], row["head"]]["examples"].append(example)
    for row in map(_rounded, atlas.rows("similarity")):
        here, there = (row["layer"], row["head"]), (row["other_layer"], row["other_head"])
        for one, other in ((here, there), (there, here)):
            index[one]["alike"].append([*other, row["overlap"]])
    for row in heads:
        row["alike"] = sorted(row["alike"], key=lambda each: -each[2])[:MOST_ALIKE]
    if "ablation" in atlas.facts["tables"]:
        for row in map(_rounded, atlas.rows("ablation")):
            index[row["layer"], row["head"]]["cost"] = [row["cost"], row["error"]]
    return {
        "facts": {name: value for name, value in atlas.facts.items() if name != "tables"},
        "measures": [[name, UNITS.get(name, "")] for name in MEASURES],
        "shares": list(SHARES),
        "heads": heads,
        "passages": ["".join(passages[number].pieces) for number in sorted(passages)],
    }


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with numbers of five digits, which keeps the page small."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for name, value in row.items()
    }


def find_characters(tokens: TokenizedText, n: int) -> tuple[int, int]:
    """Return the first character of a token in the joined pieces, and the one after its last.

    A token that is a part of a character has the whole character.
    """
    unit = tokens.units[n]
    start = sum(map(len, tokens.pieces[: unit[0]]))
    return start, start + sum(len(tokens.pieces[m]) for m in unit)


def excerpt(tokens: TokenizedText, query: int, keys: list[int], weights: list[float]) -> list[list[Any]]:
    """Return the parts of a passage around a query and its keys.

    Args:
        tokens: The passage.
        query: The position of the query.
        keys: The positions of its keys, the largest weight first.
        weights: Their weights.

    Returns:
        Parts [text, weight, is the query]; the weight is None for text that is no key. A part [None, None,
        False] is text that was left out.
    """
    shown = set(range(query - BEFORE, query + AFTER + 1))
    strong = {key: weight for key, weight in zip(keys, weights, strict=True) if weight >= FAINT}
    for key in strong:
        shown |= set(range(key - AROUND, key + AROUND + 1))
    parts: list[list[Any]] = []
    last = -1
    for n in sorted(shown & set(range(len(tokens)))):
        if n > last + 1:
            parts.append([None, None, False])
        text = tokens.pieces[n]
        is_marked = n == query or n in strong
        if not is_marked and parts and parts[-1][0] is not None and parts[-1][1:] == [None, False]:
            parts[-1][0] += text
        else:
            weight = round(strong[n], 3) if n in strong else None
            parts.append([text if text or not is_marked else tokens.labels[n], weight, n == query])
        last = n
    if last < len(tokens) - 1:
        parts.append([None, None, False])
    return parts


# -- the server ------------------------------------------------------------------------------------


class Pages:
    """The page of an atlas, and the passages that are open in the viewer.

    Args:
        atlas: The atlas.
    """

    def __init__(self, atlas: Atlas) -> None:
        self.atlas, self._lock = atlas, threading.Lock()
        self._servers: OrderedDict[int, Server] = OrderedDict()  # by the number of the passage
        self._model: Any = None

    @property
    def html(self) -> str:
        """The page, which loads its script and style sheet from the server."""
        # Without an icon, the browser would request /favicon.ico.
        head = '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="atlas.css">'
        return _document(
            content(self.atlas, links=True), head, '<script type="module" src="atlas.js"></script>'
        )

    def open_example(self, layer: int, head: int, rank: int) -> str:
        """Open an example in the viewer, and return its address.

        Args:
            layer: The layer.
            head: The head.
            rank: The rank of the example.

        Returns:
            The address.

        Raises:
            LookupError: If there is no such example.
            FileNotFoundError: If the model is missing.
            ValueError: If the model isn't that of the atlas.
        """
        from manyheads.viewer.api import Api
        from manyheads.viewer.server import Server

        wanted = {"layer": layer, "head": head, "rank": rank}
        found = next((row for row in self.atlas.rows("examples") if wanted.items() <= row.items()), None)
        if found is None:
            raise LookupError(
                f"There is no example {rank} of layer {layer}, head {head}. Load the page again."
            )
        with self._lock:
            number = found["passage"]
            if number not in self._servers:
                self._model = self._model or load_model(self.atlas.plan)
                recording = self.atlas.read_passage(number, self._model)
                self._servers[number] = Server(Api(recording))
                if len(self._servers) > OPEN:
                    self._servers.popitem(last=False)[1].close()
            self._servers.move_to_end(number)
            pin = f"{found['query']},{found['keys'][0]}"
            return f"{self._servers[number].url}#page=head&layer={layer}&head={head}&pin={pin}"

    def close(self) -> None:
        """Close the viewers."""
        while self._servers:
            self._servers.popitem()[1].close()


def serve(atlas: Atlas, port: int = 0) -> Server:
    """Serve an atlas on this machine.

    Args:
        atlas: The atlas.
        port: Port to listen on (0 picks a free one).

    Returns:
        The server.

    Raises:
        ImportError: If a package that the viewer needs isn't installed.
        OSError: If the port is in use.
    """
    from manyheads.viewer import require_server

    return require_server()(Pages(atlas), port, _create_app)


def _create_app(pages: Pages, port: int, token: str) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route

    from manyheads.viewer.server import protected

    text = pages.html

    def serve_page(request: Request) -> Response:
        return HTMLResponse(text)

    def serve_file(request: Request) -> Response:
        name = request.path_params["name"]
        kinds = {"atlas.css": "text/css", "atlas.js": "text/javascript"}
        if name not in kinds:
            return PlainTextResponse("There is no such page.\n", 404)
        return Response(read(name), media_type=kinds[name])

    async def open_example(request: Request) -> Response:
        place = (request.path_params[name] for name in ("layer", "head", "rank"))
        try:
            return RedirectResponse(await run_in_threadpool(pages.open_example, *place), 303)
        except LookupError as error:
            return PlainTextResponse(f"{error.args[0]}\n", 404)
        except (ValueError, OSError, ImportError) as error:
            return PlainTextResponse(f"{error}\n", 500)

    routes = [
        Route("/", serve_page),
        Route("/open/{layer:int}/{head:int}/{rank:int}", open_example),
        Route("/{name}", serve_file),
    ]
    return protected(routes, port, token)
