"""Attention over a sequence that is sharded over two processes: `python examples/long_context.py`.

Or on any number of processes: `torchrun --nproc-per-node 4 examples/long_context.py`.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import manyheads
from manyheads import Causal
from manyheads.distributed import attention, balanced_positions, count_traffic

if "RANK" not in os.environ:  # start this script on two processes
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sys.exit(subprocess.run([*launcher, __file__], check=False).returncode)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

# Each rank has its part of the sequence: an early and a late chunk, so that a causal mask gives all ranks
# the same work.
tokens = 1024
positions = balanced_positions(tokens, mesh)  # [n]
torch.manual_seed(0)
whole = [torch.randn(1, 4, tokens, 32) for _ in range(3)]  # [b, h, s, d]; a model has only its own tokens
q, k, v = (x[:, :, positions].requires_grad_() for x in whole)  # [b, h, n, d]

with count_traffic() as traffic:
    out = attention(q, k, v, mesh=mesh, mask=Causal(), positions=positions)  # [b, h, n, d]
    out.square().sum().backward()

# One process gives the same output.
expected = manyheads.attention(*whole, mask=Causal())
torch.testing.assert_close(out, expected[:, :, positions])
sent, least = traffic.bytes / 1e6, traffic.minimum / 1e6
print(f"rank {dist.get_rank()} of {mesh.size()}: {len(positions)} of {tokens} tokens, {sent:.1f} MB sent")
if dist.get_rank() == 0:
    print(f"at least {least:.1f} MB are necessary, in the mean over ranks")
dist.destroy_process_group()
