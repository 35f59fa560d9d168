"""`chunked` in O(L) memory: the peak of a child process, beyond inputs, output and input gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import resource, sys, torch
import manyheads as mh

length, backward, kernel, heads = int(sys.argv[1]), sys.argv[2] == "backward", sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)

def run(n):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 64, requires_grad=backward) for _ in range(3))
    out = mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel)
    if backward:
        out.backward(out.detach())
    held = [q, k, v, out] + ([q.grad, k.grad, v.grad] if backward else [])
    return sum(x.numel() * x.element_size() for x in held)

def peak():
    # Not ru_maxrss on Linux: it begins with the peak of the process that started this one.
    if sys.platform == "linux":
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small = run(512)
before = peak()
held = run(length)
print((peak() - before - held + small) / 1e6)
"""


def beyond(length: int, what: str, kernel: str = "chunked", heads: int = 8) -> float:
    """Return the MB of peak resident memory beyond inputs, outputs and gradients."""
    command = [sys.executable, "-c", CHILD, str(length), what, kernel, str(heads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


# At 8,192 tokens the weights would take 2.1 GB; a working set that doesn't grow with the square of the
# length stays below a quarter of the limits at 32,768, plus the blocks, which don't grow at all.
@pytest.mark.sampled(what="forward")
@pytest.mark.parametrize(("what", "limit"), [("forward", 40), ("backward", 70)])
def test_8k_tokens(what: str, limit: float) -> None:
    assert beyond(8192, what) < limit


@pytest.mark.parametrize(
    "heads", [pytest.param(1, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("what", "limit"), [("forward", 100), ("backward", 200)])
def test_32k_tokens(what: str, limit: float, heads: int) -> None:
    """Where building the weights would take 4.3 GB for each head."""
    assert beyond(32768, what, heads=heads) < limit


@pytest.mark.full
def test_the_measure_detects_a_matrix() -> None:
    """The reference kernel at 2,048 tokens builds weights of 134 MB, and more than once."""
    assert beyond(2048, "forward", "reference") > 134
