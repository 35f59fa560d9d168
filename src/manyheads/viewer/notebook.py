"""The viewer below a cell: small runs as a page of their own, larger ones over the kernel's own channel.

No port is opened, so that it works wherever the notebook does: JupyterLab, VS Code, Colab, a remote hub.
"""

from __future__ import annotations

import asyncio
import html
from concurrent.futures import Future
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from manyheads.maps import AttentionMap
from manyheads.viewer import page
from manyheads.viewer.export import planned
from manyheads.viewer.gallery import Answer, Gallery

SMALL = 6e6  # bytes of weights in the notebook itself
HIGH = 640  # pixels
DRAWN = 2**26  # weights that a still picture is drawn of


def here() -> bool:
    """Does this code run in a notebook?"""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def shown(gallery: Gallery) -> Any:
    """What a notebook shows of a gallery; ImportError where it is large and anywidget isn't installed."""
    try:
        plan = planned(gallery, Path("page.html"))
    except ValueError:
        return _widget()(gallery)
    if plan.weights > SMALL:
        return _widget()(gallery)
    picture = still(gallery)
    return Page(plan.page(picture), picture)


class Page:
    """A whole page in a frame of its own, which keeps working where the notebook is read without a kernel."""

    def __init__(self, text: str, picture: bytes | None) -> None:
        self.text, self.picture = text, picture

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        frame = (
            f'<iframe srcdoc="{html.escape(self.text)}" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {HIGH}px; border: 1px solid #8888"></iframe>'
        )
        return {"text/html": frame, "text/plain": repr(self)} | _png(self.picture)


def _png(picture: bytes | None) -> dict[str, bytes]:
    return {} if picture is None else {"image/png": picture}


def still(gallery: Gallery) -> bytes | None:
    """Every head of the first run as a PNG, for where scripts can't run; None where that takes long."""
    from manyheads import figures

    maps = {
        f"{layer.number}: {layer.name}": layer.call
        for layer in gallery.runs[0].layers
        if isinstance(layer.call, AttentionMap)
    }
    if not maps or sum(amap.shape[1] * amap.shape[2] * amap.shape[3] for amap in maps.values()) > DRAWN:
        return None
    drawn = BytesIO()
    figures.grid(maps).savefig(drawn, format="png", bbox_inches="tight", dpi=60)
    return drawn.getvalue()


@cache
def _widget() -> Any:
    """The widget's class, which needs anywidget."""
    try:
        import anywidget
    except ImportError:
        raise ImportError(
            "a map as large as this one talks to its notebook through anywidget, which isn't installed: "
            "pip install 'manyheads[view]'."
        ) from None

    class Widget(anywidget.AnyWidget):
        """A viewer whose answers come over the notebook's own channel."""

        _esm = page.script() + (
            "export default { render({ model, el }) {\n"
            f"  const root = make('div'); root.style.height = '{HIGH}px'; el.append(root);\n"
            "  const app = show(root, new Channel(model), false);\n"
            "  return () => app.root.replaceChildren();\n} };\n"
        )
        _css = page.read("viewer.css")

        def __init__(self, gallery: Gallery) -> None:
            super().__init__()
            self._gallery, self._asked = gallery, dict[int, Future[Answer]]()
            self.on_msg(self._heard)

        def _heard(self, _: Any, message: dict[str, Any], __: Any) -> None:
            number = message["number"]
            if message.get("dropped"):
                asked = self._asked.pop(number, None)
                if asked is not None:
                    asked.cancel()
                return
            loop = asyncio.get_running_loop()
            try:
                asked = self._gallery.ask(message["address"])
            except LookupError as error:
                self.send({"number": number, "error": str(error.args[0])})
                return
            self._asked[number] = asked
            asked.add_done_callback(lambda done: loop.call_soon_threadsafe(self._tell, number, done))

        def _tell(self, number: int, done: Future[Answer]) -> None:
            self._asked.pop(number, None)
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                self.send({"number": number, "error": str(error.args[0] if error.args else error)})
                return
            answer = done.result()
            self.send({"number": number}, [answer.encode() if isinstance(answer, str) else answer])

        def _repr_mimebundle_(self, **kwargs: Any) -> Any:
            bundle = super()._repr_mimebundle_(**kwargs)
            picture = _png(still(self._gallery))
            if isinstance(bundle, tuple):
                return {**bundle[0], **picture}, bundle[1]
            return None if bundle is None else {**bundle, **picture}

    return Widget
