"""The interactive viewer: attention maps of any length in a browser, in a notebook, or as an HTML file.

pyramid  tiles of a head at any zoom level
worker   a background thread with a priority queue
api      the data: the response to every address that a page requests
assets   the page and its scripts
server   the viewer over HTTP, accessible from this machine only
export   the viewer as a file
looking  the picture beside the matrix
widget   the viewer in a notebook, over the notebook's connection to its kernel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyheads import extras

if TYPE_CHECKING:
    from manyheads.viewer.server import Server

__all__ = ["view"]


def require_server() -> type[Server]:
    """Return the class of servers; raise ImportError if a package that it needs isn't installed."""
    try:
        from manyheads.viewer.server import Server
    except ImportError as error:
        raise extras.missing("The viewer", error.name, "view") from None
    return Server


def view(*sources: Any, picture: Any = None, port: int = 0, browser: bool = True) -> Any:
    """Show recorded attention or maps in a browser, or below the cell in a notebook.

    Args:
        *sources: Recordings, AttentionMaps or paths of files of either; several to compare.
        picture: The picture that the model read, as in `figures.overlay`, or the path of its file; a list has
            one for each batch entry. It is shown beside the maps of layers whose patches are known.
        port: Port to listen on (0 picks a free one). Not used in notebooks.
        browser: Whether to open a browser. If not, the link is printed.

    Returns:
        A server with `url`, `wait()` and `close()`; in a notebook, an object that the notebook displays.

    Raises:
        TypeError: If a source has the wrong type.
        ValueError: If there is nothing to show, or a file is damaged.
        OSError: If a file can't be read, or the port is in use.
        ImportError: If a package that the viewer needs isn't installed.
    """
    from manyheads.viewer import widget
    from manyheads.viewer.api import Api

    api = Api(*sources, picture=picture)
    if widget.in_notebook():
        return widget.display(api)
    server = require_server()(api, port)
    if not (browser and server.open_browser()):
        print(f"open this link in a browser: {server.url}")
    return server
