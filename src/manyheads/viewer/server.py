"""The viewer over HTTP, accessible from this machine only.

It listens on the loopback address. The link has a random token, which becomes a cookie; every other request
needs that cookie. The Host header must name the loopback address, to prevent a page of a different site from
reading responses by DNS rebinding. Paths are looked up in a table, never on the disk.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.viewer import assets
from manyheads.viewer.api import Api, describe_error
from manyheads.viewer.runs import FileChanged

HOST = "127.0.0.1"
CLIENT_CLOSED = 499  # the status if the browser has disconnected
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class TokenMiddleware:
    """Respond with 403 to requests without the token's cookie, and add security headers to all responses."""

    def __init__(self, app: ASGIApp, cookie: str, token: str) -> None:
        self.app, self.cookie, self.token = app, cookie, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        response = self._response(Request(scope)) or self.app
        await response(scope, receive, send_with_headers)

    def _response(self, request: Request) -> Response | None:
        """Return the response to a new token or a missing cookie; None if the app may respond."""
        if request.url.path == "/" and self._matches(request.query_params.get("token", "")):
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return redirect
        if self._matches(request.cookies.get(self.cookie, "")):
            return None
        return PlainTextResponse("Open the whole link that manyheads printed; it ends with a token.\n", 403)

    def _matches(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


class Closable(Protocol):
    """What a server serves."""

    def close(self) -> None:
        """End what is still running."""


def protected(routes: Sequence[Route], port: int, token: str) -> Starlette:
    """Return an application that responds only to this machine, with the token."""
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False),
            Middleware(TokenMiddleware, cookie=f"manyheads-{port}", token=token),
        ],
    )


def create_app(api: Api, port: int, token: str) -> Starlette:
    """Return the application that serves the page and the data of an API."""

    async def serve_asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets.MEDIA_TYPES:
            raise HTTPException(404)
        return Response(assets.read(name), media_type=assets.MEDIA_TYPES[name])

    async def serve_data(request: Request) -> Response:
        try:
            data = await _unless_disconnected(request, api.request(request.path_params["address"]))
        except Exception as error:
            statuses = {LookupError: 404, FileChanged: 410}
            status = next((code for kind, code in statuses.items() if isinstance(error, kind)), 500)
            return PlainTextResponse(f"{describe_error(error)}\n", status)
        if data is None:
            return Response(status_code=CLIENT_CLOSED)
        media_type = "application/json" if isinstance(data, str) else "application/octet-stream"
        return Response(data, media_type=media_type)

    routes = [
        Route("/", serve_asset),
        Route("/data/{address:path}", serve_data),
        Route("/{name}", serve_asset),
    ]
    return protected(routes, port, token)


async def _unless_disconnected(request: Request, future: Future[Any]) -> Any:
    """Return the result of a future. If the browser disconnects first, cancel the future and return None."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    response, disconnected = asyncio.wrap_future(future), asyncio.ensure_future(wait_for_disconnect())
    await asyncio.wait({response, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    if not response.done():
        response.cancel()  # this cancels the future too
        return None
    disconnected.cancel()
    return None if response.cancelled() else response.result()


class Server:
    """A running viewer. It serves `url` in a background thread until `close()` or the process ends.

    Args:
        api: The API to serve; closing the server closes it.
        port: Port to listen on (0 picks a free one).
        make_app: A function of the API, the port and a token that returns the application.

    Raises:
        OSError: If the port is in use or out of range.
        TypeError: If the port isn't an int.
    """

    def __init__(
        self, api: Closable, port: int = 0, make_app: Callable[[Any, int, str], ASGIApp] = create_app
    ) -> None:
        self.api, token = api, secrets.token_urlsafe(16)
        if isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"Expected port to be an int between 0 and 65535, got {port!r}.")
        try:
            if not 0 <= port <= 65535:  # Python's sockets would raise OverflowError
                raise OSError(None, "it must be between 0 and 65535")
            listener = socket.create_server((HOST, port))
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else error.strerror
            raise OSError(
                f"Can't listen on port {port}: {reason}. Pass a different port, or 0 for any free one."
            ) from None
        self.port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/?token={token}"
        config = uvicorn.Config(
            make_app(api, self.port, token),
            log_level="critical",  # warnings about malformed requests wouldn't help the user
            ws="none",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="manyheads server", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def open_browser(self) -> bool:
        """Open the link in the user's browser and return True, or False if there is none."""
        try:
            return webbrowser.open(self.url)
        except webbrowser.Error:
            return False

    def wait(self) -> None:
        """Wait until the server is closed or interrupted. A script that ends would stop it."""
        while self._thread.is_alive():
            self._thread.join(0.2)  # Ctrl-C interrupts short waits

    def close(self) -> None:
        """Stop serving."""
        self.api.close()  # before the server stops, because this cancels all pending responses
        self._server.should_exit = True
        self._thread.join()

    def __repr__(self) -> str:
        return f"Server({self.url})"
