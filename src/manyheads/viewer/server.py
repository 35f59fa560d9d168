"""The viewer over HTTP, for this machine alone.

It listens on the loopback address. A link carries a random token, which becomes a cookie; every other request
needs that. The Host header must name the loopback address, so that no page from elsewhere reads it by giving
that address a name of its own (DNS rebinding). Paths are looked up in a table and never on a disk.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.viewer import assets
from manyheads.viewer.api import Gallery, Gone

HOST = "127.0.0.1"
LEFT = 499  # nobody is there to read it
ALWAYS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets through who is on this machine and holds the token, and says to a browser what a page may do."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self.app, self.token, self.cookie = app, token, f"manyheads-{port}"
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ALWAYS)
            await send(message)

        answer = self.refusal(Request(scope))
        await (self.app if answer is None else answer)(scope, receive, with_headers)

    def refusal(self, request: Request) -> Response | None:
        """What to answer instead, or None."""
        hosts = Headers(scope=request.scope).getlist("host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return PlainTextResponse("this viewer answers on the loopback address alone.\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this viewer is only read: GET it.\n", 405, {"Allow": "GET, HEAD"})
        given = request.query_params.get("token")
        if (
            request.url.path == "/"
            and given is not None
            and secrets.compare_digest(given.encode(), self.token.encode())
        ):
            response = RedirectResponse("/", 303)
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return response
        held = request.cookies.get(self.cookie, "")
        if not secrets.compare_digest(held.encode(), self.token.encode()):
            return PlainTextResponse(
                "open the whole link that manyheads printed: it ends with a token.\n", 403
            )
        return None


def app(gallery: Gallery, port: int, token: str) -> Starlette:
    """The pages and the data of a gallery."""

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        found = assets.ASSETS.get(name)
        if found is None:
            return PlainTextResponse("there is no such page.\n", 404)
        return Response(assets.read(name), media_type=found)

    async def data(request: Request) -> Response:
        try:
            asked = gallery.ask(request.path_params["address"])
            answer = await _unless_left(request, asked)
        except LookupError as error:
            return PlainTextResponse(str(error.args[0] if error.args else error) + "\n", 404)
        except Gone as error:
            return PlainTextResponse(f"{error}\n", 410)
        except (RuntimeError, ValueError, MemoryError) as error:
            return PlainTextResponse(f"{error}\n", 500)
        if answer is None:
            return Response(status_code=LEFT)
        if isinstance(answer, str):
            return Response(answer, media_type="application/json")
        return Response(answer, media_type="application/octet-stream")

    routes = [Route("/", asset), Route("/data/{address:path}", data), Route("/{name}", asset)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, port=port, token=token)])


async def _unless_left(request: Request, asked: Future[Any]) -> Any:
    """The answer; None, and nothing is computed that wasn't begun, when the browser wants it no more."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.wrap_future(asked), asyncio.ensure_future(left())
    await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        answer.cancel()  # which cancels what was asked for
        return None
    gone.cancel()
    return None if answer.cancelled() else answer.result()


class Server:
    """A gallery on a port of this machine, 0 being any free one.

    Raises OSError where the port is taken, TypeError for what is no number.
    """

    def __init__(self, gallery: Gallery, port: int = 0) -> None:
        self.gallery, token = gallery, secrets.token_urlsafe(16)
        if isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"port must be a whole number from 0 to 65535, and {port!r} came.")
        try:
            if not 0 <= port <= 65535:  # which Python's own sockets leave half open
                raise OSError(None, "as they go from 0 to 65535")
            self._socket = socket.create_server((HOST, port))
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else error.strerror
            raise OSError(
                f"port {port} can't be had, {reason}: take another one, or 0 for any free one."
            ) from None
        self.port = self._socket.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/?token={token}"
        config = uvicorn.Config(
            app(gallery, self.port, token),
            log_level="critical",  # a request that is none of a browser's is nobody's business
            ws="none",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        self._server = uvicorn.Server(config)

    def start(self) -> None:
        """Serve in a thread of its own, until closed or the process ends; returns when it answers."""
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="manyheads server", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def wait(self) -> None:
        """Return when it is closed."""
        while self._thread.is_alive():
            self._thread.join(0.2)  # so that Ctrl-C is heard

    def close(self) -> None:
        """Answer no more."""
        self.gallery.close()  # first, so that nobody waits for an answer that won't come
        self._server.should_exit = True
        self._thread.join()
