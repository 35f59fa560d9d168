"""The viewer below a notebook's cell: an embedded page for small runs, and a widget for larger ones.

The widget uses the notebook's connection to its kernel and opens no port, so it works wherever the notebook
does: JupyterLab, VS Code, Colab, a remote hub.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from manyheads import extras
from manyheads.viewer import assets
from manyheads.viewer.api import Api, Response, describe_error
from manyheads.viewer.export import plan_export
from manyheads.viewer.runs import ViewedRun

EMBEDDED_BYTES = 6e6  # the largest size of an embedded page; a widget is used for more
HEIGHT = 640  # pixels
PICTURE_WEIGHTS = 2**26  # no picture is drawn of more weights, because it would take long
# A page in a frame can't read the notebook's theme. It is sent the colour of the text around the frame when
# the frame becomes visible, and when attributes of the document change, as they do if the theme changes.
SEND_THEME = (
    "const send = () => this.isConnected ? "
    "this.contentWindow.postMessage({ color: getComputedStyle(this).color }, '*') : changes.disconnect(), "
    "changes = new MutationObserver(send); "
    "for (const x of [document.documentElement, document.body]) changes.observe(x, { attributes: true }); "
    "new IntersectionObserver(send).observe(this)"
)


def in_notebook() -> bool:
    """Return True if this code runs in a notebook's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def display(api: Api) -> Any:
    """Close an API, and return its runs as a page, or as a widget if they are large."""
    api.close()  # a page doesn't need it, and a widget creates one while it is visible
    plan = plan_export(api, Path("page.html"), full=True)
    try:
        if plan.size > EMBEDDED_BYTES:
            return _widget_class()(api.runs)
        picture = draw_heads(api.runs[0])
        return EmbeddedPage(plan.page(picture), picture, describe(api.runs))
    finally:
        plan.api.close()


def describe(runs: Sequence[ViewedRun]) -> str:
    """Return a description of a viewer, for displays of plain text."""
    return f"a viewer of {', '.join(run.title for run in runs)}"


class EmbeddedPage:
    """A whole page in a frame. It also works without a kernel."""

    def __init__(self, page: str, picture: bytes | None, description: str) -> None:
        self.page, self.picture, self.description = page, picture, description

    def __repr__(self) -> str:
        return self.description

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        frame = (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts allow-downloads" '
            f'title="{html.escape(self.description)}" onload="{html.escape(SEND_THEME)}" style="position: '
            'absolute; inset: 0; width: 100%; height: 100%; border: 0"></iframe>'
        )
        picture = ""  # shown behind the frame, because notebooks that aren't trusted remove frames
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode()
            picture = f'<img alt="{html.escape(self.description)}" src="data:image/png;base64,{data}">'
        text = (
            f'<div style="position: relative; height: {HEIGHT}px; border: 1px solid #8888; '
            f'box-sizing: border-box; overflow: hidden; resize: vertical">{picture}{frame}</div>'
        )
        return {"text/html": text, "text/plain": self.description} | _png(self.picture)


def _png(picture: bytes | None) -> dict[str, bytes]:
    return {} if picture is None else {"image/png": picture}


def draw_heads(run: ViewedRun) -> bytes | None:
    """Draw every head of a run as a PNG, which is shown if scripts can't run; None if it would take long."""
    from manyheads import figures

    maps = {f"{layer.number}: {layer.name}": layer.map for layer in run.layers if layer.has_weights}
    weights = sum(h * t * s for _, h, t, s in (amap.shape for amap in maps.values()))
    if not maps or weights > PICTURE_WEIGHTS:
        return None
    file = BytesIO()
    figures.grid(maps).savefig(file, format="png", bbox_inches="tight", dpi=80)
    return file.getvalue()


@cache
def _widget_class() -> Any:
    """Return the class of widgets, which needs anywidget."""
    try:
        import anywidget
    except ImportError:
        raise extras.missing("Showing a map this large in a notebook", "anywidget", "view") from None

    class Widget(anywidget.AnyWidget):
        """A viewer whose data is sent over the notebook's connection to its kernel.

        It has an API, and thus a worker, only while it is displayed.
        """

        _esm = assets.script() + (
            f"{assets.read('widget.js')}const style = {json.dumps(assets.read('viewer.css'))};\n"
            f"export default {{ render: ({{ model, el }}) => showBelow(model, el, style, {HEIGHT}) }};\n"
        )

        def __init__(self, runs: Sequence[ViewedRun]) -> None:
            super().__init__()
            self._runs = runs
            self._api: Api | None = None
            self._pending: dict[str, dict[int, Future[Response]]] = {}  # by view, then by number
            self.on_msg(self._receive)

        def close(self) -> None:
            """Close the widget."""
            super().close()
            self._close_api()

        def __repr__(self) -> str:
            return describe(self._runs)

        def _receive(self, _: Any, message: dict[str, Any], __: Any) -> None:
            """Handle a message of a view: a request, a cancellation, or the closing of the view."""
            view = message["view"]
            if message.get("closed"):
                for future in self._pending.pop(view, {}).values():
                    future.cancel()
                if not self._pending:
                    self._close_api()
            elif message.get("cancelled"):
                self._pending.get(view, {}).pop(message["number"], Future()).cancel()
            else:
                self._request(view, message["number"], message["address"])

        def _request(self, view: str, number: int, address: str) -> None:
            if self._api is None:
                self._api = Api(*self._runs)
            future = self._api.request(address)
            self._pending.setdefault(view, {})[number] = future
            future.add_done_callback(lambda future: self._send_response(view, number, future))

        def _send_response(self, view: str, number: int, future: Future[Response]) -> None:
            """Send a response, from the worker's thread: a kernel's messages may be sent from any thread."""
            self._pending.get(view, {}).pop(number, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self.send({"view": view, "number": number, "error": describe_error(error)})
                return
            response = future.result()
            data = response.encode() if isinstance(response, str) else response
            self.send({"view": view, "number": number}, [data])

        def _close_api(self) -> None:
            """Close the API: end its worker and free its caches."""
            api, self._api = self._api, None
            if api is not None:
                api.close()

        def _repr_mimebundle_(self, **kwargs: Any) -> Any:
            bundle = super()._repr_mimebundle_(**kwargs)
            picture = _png(draw_heads(self._runs[0]))
            if isinstance(bundle, tuple):
                return {**bundle[0], **picture}, bundle[1]
            return None if bundle is None else {**bundle, **picture}

    return Widget
