"""Start, join and leave a group of processes, on PyTorch's launcher and process groups.

A command runs on several processes in two ways:

    torchrun --nproc-per-node 2 -m manyheads train …   PyTorch's launcher, also on several machines
    manyheads train --processes 2 …                    `launch`: the same launcher, on this machine

In both, each process reads from its environment which one it is (RANK) and how many there are (WORLD_SIZE),
and `join`s the others. A failure of any of them ends all, with one sentence: the first process that fails
prints it (`report`), or the launcher, if a process was killed.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import psutil
import torch
import torch.distributed as dist

from manyheads import __version__
from manyheads.distributed.communication import describe_loss, explained
from manyheads.shapes import real, whole

TIMEOUT = 600.0  # seconds that a process waits for the others
LOST = 75  # the exit code of a process of `launch` that lost the connection to the others (EX_TEMPFAIL)
MOST = 8  # processes that `launch` starts for each core
LAUNCHED = "MANYHEADS_LAUNCHED"  # the environment variable that `launch` sets for its processes
SHUTDOWN = 120  # seconds that processes have for a last checkpoint after Ctrl-C
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_joined: list[dist.Store] = []  # the store of the group that this process has joined
_parent = os.getppid()
_turns = count()  # numbers for keys of the store, the same in all processes


@dataclass(frozen=True)
class Group:
    """The group of processes that this process belongs to. A process alone is a group of one.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        device: The device of this process, as PyTorch names it.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        """Return True for the process of rank 0, which alone prints and writes what isn't sharded."""
        return self.rank == 0

    def check_agreement(self, values: Mapping[str, object]) -> None:
        """Check that all processes have the same values. All processes call it.

        Args:
            values: Values by name, which JSON or `str` can represent.

        Raises:
            ValueError: If a value differs between two processes; in every process.
        """
        if self.size > 1:
            _compare(self.gather(_plain(values)))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of ranks. All processes call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier()

    def sum(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all processes, in float64. All processes call it."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)  # [n]
        dist.all_reduce(total)
        return [float(x) for x in total]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of the block in all processes. All enter the block, which has no communication."""
        error: Exception | None = None
        try:
            yield
        except (ValueError, TypeError, OSError) as its_error:
            if self.size == 1 or isinstance(its_error, ConnectionError):
                raise
            error = its_error
        for raised in self.gather(error):
            if raised is not None:
                raise raised

    def first_does(self, function: Callable[[], object]) -> None:
        """Call a function in rank 0 while the others wait, for as long as it takes. All processes call this.

        Args:
            function: The function. Its errors are raised in all processes.
        """
        turn = f"turn/{next(_turns)}"
        with self.together():
            if self.is_first:
                try:
                    function()
                finally:
                    if self.size > 1 and _joined:
                        _joined[-1].set(turn, "done")
            elif _joined:
                # Not a collective, which has a time-out, and in which Python doesn't handle signals.
                while not _joined[-1].check([turn]):
                    time.sleep(0.05)


def is_launched() -> bool:
    """Return True in a process that torchrun, or `launch`, has started, of several or of one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_orphan() -> bool:
    """Return True if torchrun, or `launch`, has ended without ending this process, as after `kill -9`."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _parent


@contextmanager
def join(
    device: str = "cpu", timeout: float = TIMEOUT, arguments: Mapping[str, object] | None = None
) -> Iterator[Group]:
    """Join the other processes that torchrun has started; leave them at the end.

    Without torchrun the group has one process, and nothing is started. A process group that the caller has
    initialized is used and kept.

    Args:
        device: The device: "cpu", or "cuda", of which each process takes its own.
        timeout: Seconds to wait for the other processes, both here and in each collective.
        arguments: Values that must be the same in all processes, by name.

    Yields:
        The group.

    Raises:
        ValueError: If the versions of manyheads or PyTorch, or `arguments`, differ between processes, or the
            environment isn't torchrun's.
        TimeoutError: If a process doesn't join in time.
        ConnectionError: If the connection to another process is lost, in the block too.
        OSError: If the port of the processes is taken.
    """
    real(timeout, "timeout", lambda x: 0 < x < 1e7, "a positive number of seconds")
    if dist.is_available() and dist.is_initialized():
        group = Group(dist.get_rank(), dist.get_world_size(), own_device(device))
        with explained(timeout):
            group.check_agreement(_facts(arguments))
            yield group
        return
    rank, size = _read_environment()
    if size == 1:
        yield Group(device=device)
        return
    device = own_device(device)
    store = _meet(rank, size, timeout, _facts(arguments))
    _joined.append(store)
    if os.environ["MASTER_ADDR"] in LOOPBACK and os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size):
        # Else gloo looks up the name of this machine, which may fail or take seconds.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")
    # gloo for tensors on the CPU, also beside NCCL, which starts when the first tensor on a GPU is sent.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with explained(timeout):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"group/{next(_turns)}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            yield Group(rank, size, device)
            dist.barrier()  # a process that leaves early would look like a lost one
        finally:
            dist.destroy_process_group()
            _joined.remove(store)


def _read_environment() -> tuple[int, int]:
    """Return rank and number of processes from the environment, (0, 1) without torchrun."""
    if not is_launched():
        return 0, 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, size = 0, 0
    if not 0 <= rank < size:
        raise ValueError(
            f"Expected RANK and WORLD_SIZE as torchrun sets them, got {os.environ['RANK']!r} and "
            f"{os.environ['WORLD_SIZE']!r}. Start the processes by torchrun, or unset both."
        )
    port = os.environ.get("MASTER_PORT", "")
    is_port = port.isdecimal() and 0 < int(port) < 65536  # PyTorch raises a TypeError for others
    if size > 1 and not (os.environ.get("MASTER_ADDR") and is_port):
        raise ValueError(
            "Expected MASTER_ADDR and MASTER_PORT as torchrun sets them, got "
            f"{os.environ.get('MASTER_ADDR')!r} and {os.environ.get('MASTER_PORT')!r}. Start the processes "
            "by torchrun, or set both."
        )
    return rank, size


def own_device(device: str) -> str:
    """Return the device of one of several processes.

    Args:
        device: "cpu" or "cuda".

    Returns:
        "cpu", or the GPU of the process's number on this machine.

    Raises:
        ValueError: If the device is a different one, or there are fewer GPUs than processes.
    """
    if device == "cpu":
        return device
    if device != "cuda":
        raise ValueError(
            f"Expected device cpu or cuda with several processes, got {device!r}. With cuda, each process "
            "uses a GPU of its own."
        )
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"Expected a GPU for each process of a machine, got {count} for {number + 1} or more. Start at "
            f"most {count} processes, or choose --device cpu."
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _facts(arguments: Mapping[str, object] | None) -> dict[str, Any]:
    """Return what must be the same in all processes."""
    versions = {"the version of manyheads": __version__, "the version of PyTorch": torch.__version__}
    return versions | _plain(arguments or {})


def _plain(values: Mapping[str, object]) -> dict[str, Any]:
    """Return values as JSON represents them, so that equal values of two processes are equal here."""
    content: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return content


def _compare(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if processes differ in a value."""
    for rank, theirs in enumerate(facts):
        for name in {**facts[0], **theirs}:
            values = [each.get(name) for each in (facts[0], theirs)]
            if values[0] != values[1]:
                raise ValueError(
                    f"Expected {name} to be the same in all processes, got {values[0]!r} in rank 0 and "
                    f"{values[1]!r} in rank {rank}. Start all processes with the same installation "
                    "and options."
                )


# -- meeting -----------------------------------------------------------------------------------------


def _meet(rank: int, size: int, timeout: float, facts: dict[str, Any]) -> dist.Store:
    """Return the store of the processes after all of them have come, with the same facts."""
    end, turn = time.monotonic() + timeout, next(_turns)
    store = _connect(rank, timeout)
    try:
        store.set(f"facts/{turn}/{rank}", json.dumps({**facts, "WORLD_SIZE": size}))
        names = [f"facts/{turn}/{other}" for other in range(size)]
        while not store.check(names):
            if time.monotonic() > end:
                missing = [str(other) for other, name in enumerate(names) if not store.check([name])]
                raise _missing(missing, size, timeout)
            time.sleep(0.02)  # in Python rather than in `store.wait`, so that signals are handled
        _compare([json.loads(store.get(name)) for name in names])
    except dist.DistError:
        raise ConnectionError(describe_loss()) from None
    return store


def _missing(ranks: Sequence[str], size: int, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"Expected {size} processes within {timeout:g} s, but rank {', '.join(ranks[:8])} didn't come. Start "
        "every process with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise the time-out."
    )


def _connect(rank: int, timeout: float) -> dist.Store:
    """Return the store at MASTER_ADDR: torchrun's, or that of rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + timeout
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not (is_host or _answers(address, port)):
        if time.monotonic() > end:
            raise _no_answer(address, port, timeout)
        time.sleep(0.05)
    results: list[dist.Store | dist.DistError] = []

    def connect() -> None:
        seconds = timedelta(seconds=timeout)
        try:
            results.append(
                dist.TCPStore(address, port, is_master=is_host, timeout=seconds, wait_for_workers=False)
            )
        except dist.DistError as error:
            results.append(error)

    # In a thread, because PyTorch waits without end for a program at this port that isn't a store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.05)
    if not results:
        raise _no_answer(address, port, timeout)
    if isinstance(results[0], dist.DistError):
        if is_host and "EADDRINUSE" in str(results[0]):
            raise OSError(
                f"Port {port} of {address} is taken by another program. Choose a different MASTER_PORT "
                "(--master-port of torchrun), or leave it out."
            )
        raise _no_answer(address, port, timeout)
    # A restart by torchrun (--max-restarts) uses the same store.
    return dist.PrefixStore(f"manyheads/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", results[0])


def _answers(address: str, port: int) -> bool:
    """Return True if a program listens on a port."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def _no_answer(address: str, port: int, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"No process of manyheads answers at {address}, port {port}, within {timeout:g} s. Start rank 0 "
        "there, or correct MASTER_ADDR and MASTER_PORT."
    )


# -- failures ----------------------------------------------------------------------------------------


def report(error: BaseException) -> int:
    """Print an error that ends this process, if no other process has; return the exit code.

    If `launch` started the processes, it prints that a process was lost, because it knows which one.

    Args:
        error: The error.

    Returns:
        The exit code.
    """
    if is_launched() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which would change the exit code
    if isinstance(error, ConnectionError) and os.environ.get(LAUNCHED):
        return LOST
    if is_first_report():
        print(f"manyheads: {error}", file=sys.stderr, flush=True)
    return 2


def is_first_report() -> bool:
    """Return True in the first process that calls this, and in any process without a store."""
    try:
        rank, size = _read_environment()
        if size == 1:
            return True
        if not _joined and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return True
        store = _joined[-1] if _joined else _connect(rank, 10)
        return store.add("reports", 1) == 1
    except (OSError, ValueError, RuntimeError):  # the store is gone
        return True


def check_processes(processes: int) -> None:
    """Check that `launch` can start a number of processes.

    Args:
        processes: The number.

    Raises:
        TypeError: If it isn't an integer.
        ValueError: If it is less than 1 or more than 8 for each core, or torchrun has started this process.
    """
    whole(processes, "processes", 1)
    if processes > MOST * _cores():
        raise ValueError(
            f"Expected at most {MOST * _cores()} processes, {MOST} for each core of this machine, got "
            f"{processes}. Start one for each core, or use torchrun on several machines."
        )
    if is_launched():
        raise ValueError(
            "Expected --processes without torchrun, got both. Leave --processes out: torchrun has started "
            f"{os.environ['WORLD_SIZE']} processes."
        )


def _cores() -> int:
    """Return the number of cores that this process may use."""
    available = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    return len(available) if available else os.cpu_count() or 1


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `manyheads` with some arguments in several processes on this machine, by torchrun's launcher.

    The processes inherit standard output and standard error. After a failure of one of them the others are
    ended. Ctrl-C and SIGTERM are passed on to all.

    Args:
        processes: The number of processes.
        arguments: The arguments of `manyheads`, such as `sys.argv[1:]`.

    Returns:
        The exit code: 0, or that of the first process that failed.

    Raises:
        ValueError: If the number is too small or too large, or torchrun has started this process.
        KeyboardInterrupt: After Ctrl-C.
        SystemExit: After SIGTERM.
        ConnectionError: If a process was killed, or lost the connection to the others.
    """
    check_processes(processes)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its messages are said in a sentence below
    print(f"starting {processes} processes", file=sys.stderr, flush=True)
    changes = {
        LAUNCHED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes))),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN),
    }
    os.environ.update(changes)
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"manyheads-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "manyheads", *arguments)
        except ChildFailedError as error:
            return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            for child in psutil.Process().children():  # after a second Ctrl-C
                child.kill()
    return 0


def _exit_code(codes: Mapping[int, int]) -> int:
    """Return the exit code of failed processes, or raise ConnectionError if none has said why it failed."""
    # The launcher sends SIGTERM to the processes that are still running.
    killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, number = next(iter(killed.items()))
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        raise ConnectionError(
            f"The process of rank {rank} was killed ({name}), and the others were ended. Start again: an "
            "atlas continues by itself, training with --resume from its last checkpoint."
        )
    said = [code for code in codes.values() if code not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)]
    if not said:
        raise ConnectionError(describe_loss())
    return abs(said[0])
