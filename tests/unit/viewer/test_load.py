"""Many requests at once: every response is right, failures are sentences, and closing ends all threads."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import manyheads as mh
from manyheads.viewer import api as api_module
from manyheads.viewer.api import Api, describe_error
from manyheads.viewer.server import Server
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")
REQUESTS = 200


def an_api(t: int = 3_000) -> Api:
    q, k = (torch.randn(1, 2, t, 8) for _ in range(2))
    return Api(mh.attention_with_map(q, k, k, mask=mh.Causal())[1])


def tiles() -> list[str]:
    """Return the addresses of different tiles of two heads."""
    places = [(level, x, y) for level in (0, 1, 2) for y in range(12 >> level) for x in range(12 >> level)]
    return [f"tiles/0/0/{n % 2}/{level}/{x}/{y}/0" for n, (level, x, y) in enumerate(places * 2)][:REQUESTS]


def together(server: Server, addresses: list[str], started: Callable[[], None]) -> list[tuple[int, bytes]]:
    """Request all addresses at once, each over a connection of its own; return statuses and bodies.

    The status is 0 if the server closed the connection.
    """
    token = server.url.partition("token=")[2]
    ready = threading.Barrier(len(addresses) + 1)

    def get(address: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
        connection.connect()
        ready.wait()
        try:
            cookie = f"manyheads-{server.port}={token}"
            connection.request("GET", f"/data/{address}", headers={"Cookie": cookie})
            response = connection.getresponse()
            return response.status, response.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    with ThreadPoolExecutor(len(addresses)) as pool:
        pending = [pool.submit(get, address) for address in addresses]
        ready.wait()
        started()
        return [response.result() for response in pending]


def test_two_hundred_tiles_at_once() -> None:
    addresses = tiles()
    assert len(set(addresses)) == len(addresses) == REQUESTS
    api = an_api()
    wanted = [api.request(address).result() for address in addresses]
    api._tiles.clear(), api._pyramids.clear()
    server = Server(api)
    found = together(server, addresses, lambda: None)
    server.close()
    assert [status for status, _ in found] == [200] * REQUESTS
    assert [body for _, body in found] == wanted


def test_closing_cancels_two_hundred_pending_requests() -> None:
    before = set(threading.enumerate())
    server, go, working = Server(an_api(500)), threading.Event(), threading.Event()
    server.api.worker.submit(lambda: (working.set(), go.wait()), -1)  # nothing else is computed before it
    working.wait()
    addresses = ["runs"] * REQUESTS
    worker = server.api.worker

    def close() -> None:
        wait_until(lambda: worker._queue.qsize() == REQUESTS)
        closing = threading.Thread(target=server.close)
        closing.start()
        wait_until(lambda: not worker._is_open)
        go.set()
        closing.join()

    found = together(server, addresses, close)
    assert {status for status, _ in found} <= {499, 0}
    assert worker._queue.empty()
    assert set(threading.enumerate()) <= before
    assert server.api.request("runs").cancelled()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (
            LookupError("Expected head between 0 and 1, got '7'."),
            404,
            "Expected head between 0 and 1, got '7'.",
        ),
        (KeyError("a name"), 404, "a name"),
        (MemoryError(), 500, "Not enough memory for this response. Free some memory and try again."),
        (ValueError("Expected a map."), 500, "Expected a map."),
        (OSError(5, "Input/output error"), 500, "couldn't compute this response: OSError, [Errno 5] Input"),
        (AssertionError(), 500, "The viewer couldn't compute this response: AssertionError."),
    ],
)
def test_a_failed_request_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, text: str
) -> None:
    def fail(self: Api) -> str:
        raise error

    monkeypatch.setattr(api_module.Api, "_runs", fail)
    server = Server(an_api(9))
    (found,) = together(server, ["runs"], lambda: None)
    server.close()
    assert found[0] == status
    assert text in found[1].decode()
    assert text in describe_error(error)
    assert found[1].count(b"\n") == 1
