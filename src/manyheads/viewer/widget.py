"""The viewer below a cell: small runs as a page of their own, larger ones over the kernel's own channel.

No port is opened, so that it works wherever the notebook does: JupyterLab, VS Code, Colab, a remote hub.
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

from manyheads.maps import AttentionMap
from manyheads.viewer import assets
from manyheads.viewer.api import Answer, Gallery, Run
from manyheads.viewer.export import planned

SMALL = 6e6  # bytes of weights in the notebook itself
HIGH = 640  # pixels
DRAWN = 2**26  # weights that a still picture is drawn of
# A page in a frame knows no theme: it is told the colour of the ink around it when it comes into sight and
# when a notebook changes what its document is marked with, as all do with their theme.
TELLS = (
    "const tell = () => this.isConnected ? "
    "this.contentWindow.postMessage({ ink: getComputedStyle(this).color }, '*') : marks.disconnect(), "
    "marks = new MutationObserver(tell); "
    "for (const one of [document.documentElement, document.body]) marks.observe(one, { attributes: true }); "
    "new IntersectionObserver(tell).observe(this)"
)


def here() -> bool:
    """Does this code run in a notebook?"""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def shown(gallery: Gallery) -> Any:
    """What a notebook shows of a gallery; ImportError where it is large and anywidget isn't installed.

    The gallery is closed: a page needs none, and a widget opens one while somebody looks at it.
    """
    gallery.close()
    try:
        plan = planned(gallery, Path("page.html"))
    except ValueError:  # all of it is too much for a page
        return _widget()(gallery.runs)
    try:
        if plan.weights > SMALL:
            return _widget()(gallery.runs)
        picture = still(gallery.runs[0])
        return Page(plan.page(picture), picture, told(gallery.runs))
    finally:
        plan.gallery.close()


def told(runs: Sequence[Run]) -> str:
    """What is shown, in words, for where nothing else can be."""
    return f"a viewer of {', '.join(run.title for run in runs)}"


class Page:
    """A whole page in a frame of its own, which keeps working where the notebook is read without a kernel."""

    def __init__(self, text: str, picture: bytes | None, words: str) -> None:
        self.text, self.picture, self.words = text, picture, words

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        frame = (
            f'<iframe srcdoc="{html.escape(self.text)}" sandbox="allow-scripts allow-downloads" '
            f'title="{html.escape(self.words)}" onload="{html.escape(TELLS)}" style="position: absolute; '
            'inset: 0; width: 100%; height: 100%; border: 0"></iframe>'
        )
        behind = ""  # what a notebook that isn't trusted, and so loses its frames, still shows
        if self.picture is not None:
            drawn = base64.b64encode(self.picture).decode()
            behind = f'<img alt="{html.escape(self.words)}" src="data:image/png;base64,{drawn}">'
        around = f"height: {HIGH}px; border: 1px solid #8888; box-sizing: border-box"
        text = (
            f'<div style="position: relative; {around}; overflow: hidden; resize: vertical">'
            f"{behind}{frame}</div>"
        )
        return {"text/html": text, "text/plain": self.words} | _png(self.picture)


def _png(picture: bytes | None) -> dict[str, bytes]:
    return {} if picture is None else {"image/png": picture}


def still(run: Run) -> bytes | None:
    """Every head of a run as a PNG, for where scripts can't run; None where that takes long."""
    from manyheads import figures

    maps = {
        f"{layer.number}: {layer.name}": layer.call
        for layer in run.layers
        if isinstance(layer.call, AttentionMap)
    }
    if not maps or sum(amap.shape[1] * amap.shape[2] * amap.shape[3] for amap in maps.values()) > DRAWN:
        return None
    drawn = BytesIO()
    figures.grid(maps).savefig(drawn, format="png", bbox_inches="tight", dpi=80)
    return drawn.getvalue()


@cache
def _widget() -> Any:
    """The widget's class, which needs anywidget."""
    try:
        import anywidget
    except ImportError:
        raise ImportError(
            "Showing a map this large in a notebook needs anywidget, which isn't installed. "
            "Run pip install '.[view]' in a clone of manyheads."
        ) from None

    class Widget(anywidget.AnyWidget):
        """A viewer whose answers come over the notebook's own channel.

        A gallery, and with it its worker, is there while somebody looks: a cell that runs again leaves none.
        """

        _esm = assets.script() + (
            f"{assets.read('widget.js')}const style = {json.dumps(assets.read('viewer.css'))};\n"
            f"export default {{ render: ({{ model, el }}) => below(model, el, style, {HIGH}) }};\n"
        )

        def __init__(self, runs: Sequence[Run]) -> None:
            super().__init__()
            self._runs = runs
            self._gallery: Gallery | None = None
            self._asked: dict[str, dict[int, Future[Answer]]] = {}  # by view, then by number
            self.on_msg(self._heard)

        def close(self) -> None:
            """Show nothing more."""
            super().close()
            self._rest()

        def __repr__(self) -> str:
            return told(self._runs)

        def _heard(self, _: Any, message: dict[str, Any], __: Any) -> None:
            view = message["view"]
            if message.get("left"):
                for asked in self._asked.pop(view, {}).values():
                    asked.cancel()
                if not self._asked:
                    self._rest()
            elif message.get("dropped"):
                self._asked.get(view, {}).pop(message["number"], Future()).cancel()
            else:
                self._ask(view, message["number"], message["address"])

        def _ask(self, view: str, number: int, address: str) -> None:
            if self._gallery is None:
                self._gallery = Gallery(*self._runs)
            waiting = self._asked.setdefault(view, {})
            try:
                asked = self._gallery.ask(address)
            except LookupError as error:
                self._fail(view, number, error)
                return
            waiting[number] = asked
            asked.add_done_callback(lambda done: self._tell(view, number, done))

        def _tell(self, view: str, number: int, done: Future[Answer]) -> None:
            """Send an answer, from the worker itself: a kernel's messages may come from any thread."""
            self._asked.get(view, {}).pop(number, None)
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                self._fail(view, number, error)
                return
            answer = done.result()
            found = answer.encode() if isinstance(answer, str) else answer
            self.send({"view": view, "number": number}, [found])

        def _fail(self, view: str, number: int, error: BaseException) -> None:
            words = str(error.args[0] if error.args else error)
            self.send({"view": view, "number": number, "error": words or type(error).__name__})

        def _rest(self) -> None:
            """Let the worker go, and what it kept."""
            gallery, self._gallery = self._gallery, None
            if gallery is not None:
                gallery.close()

        def _repr_mimebundle_(self, **kwargs: Any) -> Any:
            bundle = super()._repr_mimebundle_(**kwargs)
            picture = _png(still(self._runs[0]))
            if isinstance(bundle, tuple):
                return {**bundle[0], **picture}, bundle[1]
            return None if bundle is None else {**bundle, **picture}

    return Widget
