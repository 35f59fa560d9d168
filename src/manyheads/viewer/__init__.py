"""The viewer: a map you can fly over, in a browser, in a notebook, or as a file to send.

tiles     one head as numbers at any zoom
desk      one worker, the most urgent first
gallery   what is shown, and an answer for every address
page      what a browser gets
server    the same over HTTP, for this machine alone
export    the same as a file
notebook  the same over a notebook's own channel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.viewer.gallery import Gallery
    from manyheads.viewer.server import Server


def require_server() -> type[Server]:
    """Return the class of servers; ImportError where a package that it needs isn't installed."""
    try:
        from manyheads.viewer.server import Server
    except ImportError as error:
        raise ImportError(
            f"The viewer needs {error.name}, which isn't installed. "
            "Run pip install '.[view]' in a clone of manyheads."
        ) from None
    return Server


class View:
    """A viewer that is open: `url` is its link until `close()`; `wait()` serves until interrupted.

    It ends with the process.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.url = server.url

    @classmethod
    def served(cls, gallery: Gallery, port: int = 0) -> View:
        """A viewer on a port of this machine, 0 being any free one.

        OSError where that is taken, ImportError where what it needs isn't installed.
        """
        server = require_server()(gallery, port)
        server.start()
        return cls(server)

    def open(self) -> bool:
        """Open it in the browser of whoever sits here; False where there is none."""
        import webbrowser

        try:
            return webbrowser.open(self.url)
        except webbrowser.Error:
            return False

    def wait(self) -> None:
        """Serve until interrupted, as a script that would end otherwise needs it."""
        self._server.wait()

    def close(self) -> None:
        """Answer no more."""
        self._server.close()

    def __repr__(self) -> str:
        return f"View({self.url})"


def view(*shown: Any, port: int = 0, browser: bool = True) -> Any:
    """Show a run, a map or a file of either, or several to compare, in a browser or in this notebook.

    shown: each a Recording, AttentionMap or path of a file. port: of this machine, 0 being any free one;
    browser: open one? In a notebook neither matters, as there it needs no port. Raises TypeError for anything
    else, ValueError where there is nothing to see or a file is broken, OSError where it can't be read or the
    port is taken, ImportError where what the viewer needs isn't installed.
    """
    from manyheads.viewer import notebook
    from manyheads.viewer.gallery import Gallery

    gallery = Gallery(*shown)
    if notebook.here():
        return notebook.shown(gallery)
    served = View.served(gallery, port)
    if not (browser and served.open()):
        print(f"open this link in a browser: {served.url}")
    return served
