"""Groups of processes: how they meet, and a sentence for each failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
import torch.distributed as dist

from manyheads.distributed import processes
from manyheads.distributed.communication import explained
from manyheads.distributed.processes import LAUNCHED, LOST, Group

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", LAUNCHED)


@pytest.fixture(autouse=True)
def _without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program listens on, which never answers."""
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


# Reads its own rank and number of processes, joins the others, does something, and prints the group.
RANK = """
import sys, os
from manyheads.distributed import processes
try:
    with processes.join(timeout=float(sys.argv[1]), arguments={"seed": int(sys.argv[2])}) as group:
        exec(sys.argv[3])
        print(group.rank, group.size, flush=True)
except (ValueError, OSError) as error:
    sys.exit(processes.report(error))
"""


def start(rank: int, size: int, port: int, code: str = "", **changes: object) -> subprocess.Popen[str]:
    """Start one of several processes, as torchrun would."""
    options: dict[str, object] = {"timeout": 60, "seed": 0, **changes}
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(options["timeout"]), str(options["seed"]), code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(*started: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Wait for processes; return the exit code and the output of each."""
    results = []
    for process in started:
        out, errors = process.communicate(timeout=300)
        results.append((process.returncode, out, errors))
    return results


def free_port() -> int:
    with closing(socket.socket()) as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def test_a_process_alone_is_a_group_of_one() -> None:
    with processes.join(arguments={"x": 1}) as group:
        assert group == Group(0, 1, "cpu")
        assert not dist.is_initialized()
        assert group.sum(1, 2.5) == [1, 2.5]
        assert group.gather("a") == ["a"]
        group.check_agreement({"x": 2})
        group.wait()
        done: list[int] = []
        group.first_does(lambda: done.append(1))
        assert done == [1]
        with pytest.raises(OSError, match="full"), group.together():
            raise OSError("full")


def test_torchrun_with_one_process_is_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with processes.join() as group:
        assert group.size == 1
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "Expected RANK and WORLD_SIZE as torchrun sets them, got '2' and"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "got 'a' and '2'. Start the processes by torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "Expected MASTER_ADDR and MASTER_PORT as torchrun sets them"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"},
            "got 'localhost' and 'http'",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
            "got 'localhost' and '99999'",
        ),
    ],
)
def test_an_environment_that_is_not_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), processes.join():
        pass


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_the_time_out_is_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"), processes.join(timeout=timeout):
        pass


def test_the_device_of_one_of_several_processes() -> None:
    assert processes.own_device("cpu") == "cpu"
    for device in ("cuda:1", "mps", "meta"):
        with pytest.raises(ValueError, match="Expected device cpu or cuda with several processes"):
            processes.own_device(device)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", taken)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OSError, match=f"Port {taken} of 127.0.0.1 is taken"), processes.join(timeout=60):
        pass
    monkeypatch.setenv("RANK", "1")  # which waits for the answer of a store
    message = f"No process of manyheads answers at 127.0.0.1, port {taken}"
    with pytest.raises(TimeoutError, match=message), processes.join(timeout=0.5):
        pass


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (("RANK", 0), ("WORLD_SIZE", 3), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    message = "Expected 3 processes within 0.5 s, but rank 1, 2 didn't come"
    with pytest.raises(TimeoutError, match=message), processes.join(timeout=0.5):
        pass
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError, match=r"within 0.3 s"), processes.join(timeout=0.3):
        pass


def test_facts_that_differ() -> None:
    facts = [processes._facts({"seed": 1, "data": ["a"]}), processes._facts({"seed": 1, "data": ["a"]})]
    processes._compare(facts)
    facts[1]["the version of PyTorch"] = "2.0"
    with pytest.raises(ValueError, match=r"version of PyTorch to be the same .* '2.0' in rank 1"):
        processes._compare(facts)
    facts = [processes._facts({"seed": 1}), processes._facts({"seed": 1}), processes._facts({})]
    with pytest.raises(
        ValueError, match=r"Expected seed to be the same .* got 1 in rank 0 and None in rank 2"
    ):
        processes._compare(facts)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({1: -signal.SIGKILL, 0: LOST}, r"rank 1 was killed \(SIGKILL\)"),
        ({0: LOST, 2: -signal.SIGSEGV, 1: -signal.SIGTERM}, r"rank 2 was killed \(SIGSEGV\)"),
        ({0: LOST, 1: LOST}, "connection to another process was lost"),
        ({0: -signal.SIGTERM, 1: LOST}, "connection to another process was lost"),
    ],
)
def test_what_the_launcher_says_of_processes_that_said_nothing(codes: dict[int, int], message: str) -> None:
    with pytest.raises(ConnectionError, match=message):
        processes._exit_code(codes)


@pytest.mark.parametrize(
    ("codes", "code"), [({1: 2, 0: LOST}, 2), ({0: 143, 1: 1}, 1), ({0: 130, 1: 130}, 130)]
)
def test_the_launcher_is_silent_after_a_process_that_said_why(codes: dict[int, int], code: int) -> None:
    assert processes._exit_code(codes) == code


def test_processes_that_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_cores", lambda: 2)
    processes.check_processes(16)
    for number, message in (
        (0, "Expected processes to be at least 1, got 0"),
        (17, "Expected at most 16 processes, 8 for each core of this machine, got 17. Start one for each"),
    ):
        with pytest.raises(ValueError, match=message):
            processes.check_processes(number)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="torchrun has started 4 processes"):
        processes.check_processes(2)


def test_an_error_of_a_process_alone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert processes.report(ValueError("Expected a, got b.")) == 2
    assert capsys.readouterr().err == "manyheads: Expected a, got b.\n"


def test_a_lost_connection_is_left_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    assert processes.report(ConnectionError("lost")) == LOST
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["[gloo/transport] Connection closed by peer", "gloo: Timed out waiting"])
def test_errors_of_backends_are_connection_errors(text: str) -> None:
    message = "didn't respond within 5 s" if "Timed" in text else "connection to another process was lost"
    with pytest.raises(ConnectionError, match=message), explained(5):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shapes"), explained(5):
        raise RuntimeError("shapes differ")


@pytest.mark.full
def test_processes_that_join_and_agree() -> None:
    code = """
assert group.sum(group.rank, 1) == [1.0, 2.0]
assert group.gather(group.rank) == [0, 1]
group.check_agreement({"x": [1, "a"]})
done = []
group.first_does(lambda: done.append(1))
assert len(done) == (group.rank == 0)
for failing in (0, 1):
    try:
        with group.together():
            if group.rank == failing:
                raise OSError("the disk of one")
    except OSError as error:
        assert str(error) == "the disk of one"
    else:
        raise AssertionError
try:
    group.check_agreement({"x": group.rank})
except ValueError as error:
    assert "Expected x to be the same" in str(error)
with processes.join() as again:  # in the same process group, which it keeps
    assert (again.rank, again.size) == (group.rank, 2)
"""
    port = free_port()
    assert ends(start(0, 2, port, code), start(1, 2, port, code)) == [(0, "0 2\n", ""), (0, "1 2\n", "")]


@pytest.mark.full
def test_processes_with_different_arguments_end_with_one_sentence_each() -> None:
    port = free_port()
    message = "manyheads: Expected seed to be the same in all processes, got 0 in rank 0 and 1 in rank 1."
    for code, out, errors in ends(start(0, 2, port), start(1, 2, port, seed=1)):
        assert (code, out) == (2, "")
        assert errors.startswith(message)
        assert errors.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "manyheads: The connection to another process was lost"),
        (signal.SIGSTOP, "manyheads: Another process didn't respond within 3 s."),
    ],
)
def test_a_process_that_is_killed_or_stopped_ends_the_other(number: int, message: str) -> None:
    code = f"if group.rank: os.kill(os.getpid(), {int(number)})\nwhile True: group.sum(1)"
    port = free_port()
    lost = start(1, 2, port, code, timeout=60)
    survivor = start(0, 2, port, code, timeout=60 if number == signal.SIGKILL else 3)
    try:
        [(returned, _, errors)] = ends(survivor)
    finally:
        lost.kill()
        lost.communicate()
    assert returned == 2
    assert errors.startswith(message)
    assert errors.count("\n") == 1
