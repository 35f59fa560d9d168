"""Training on several processes: the rows of each process, and weights that are replicated or sharded.

A step of N processes has the same batch as that of one. Every process draws the whole batch, which is a pure
function of the seed and the step, and computes the gradient of its own rows. The loss of a part is divided by
the number of targets in the whole batch, so that the sum of the gradients is the gradient of one process, and
only the order of additions differs. Dropout uses the masks that one process would draw for the whole batch.

Weights are replicated by DistributedDataParallel (Li et al. 2020, arXiv:2006.15704), or sharded, with
gradients and the optimizer's state, by `fully_shard` (Zhao et al. 2023, arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.distributed.processes import Group
from manyheads.lm.model import LanguageModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Part(NamedTuple):
    """A part of a batch, of which a process computes the gradient at once.

    Attributes:
        start: Its first row.
        stop: The row after its last one.
        rows: The number of rows in the batch of all processes.
        is_last: Whether the process has no further part in this step.
    """

    start: int
    stop: int
    rows: int
    is_last: bool


def parts_of(rows: int, group: Group, accumulate: int) -> Iterator[Part]:
    """Yield the parts of a process: consecutive rows, none of which another process has.

    Args:
        rows: The rows of the batch of all processes, a multiple of their number times `accumulate`.
        group: The processes.
        accumulate: The number of parts of each process.

    Yields:
        The parts.
    """
    size = rows // (group.size * accumulate)
    for i in range(accumulate):
        start = (group.rank * accumulate + i) * size
        yield Part(start, start + size, rows, i == accumulate - 1)


class BatchDropout(nn.Dropout):
    """Dropout of a part of a batch, with the masks that the whole batch has in one process.

    It draws the mask of the whole batch, because PyTorch's generators can't skip rows.
    """

    part: Part | None = None  # None: the input is the whole batch

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[b, …]` for x `[b, …]`."""
        if self.part is None or not self.training or self.p == 0:
            return super().forward(x)
        # The mask has entries 0 and 1 / (1 − p), in the dtype of x, which decides what the generator draws.
        mask = F.dropout(x.new_ones(self.part.rows, *x.shape[1:]), self.p)  # [rows, …]
        return x * mask[self.part.start : self.part.stop]


def use_batch_dropout(model: LanguageModel) -> list[BatchDropout]:
    """Replace the dropout modules of a model, and return the new ones."""
    replaced = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                dropout = BatchDropout(child.p)
                setattr(module, name, dropout)
                replaced.append(dropout)
    return replaced


def mesh_of(group: Group, device: str) -> DeviceMesh:
    """Return the mesh of all processes on a kind of device, "cpu" or "cuda". All processes call it."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (group.size,))


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard the parameters of a model over the processes of a mesh: each block, and the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replicate(model: LanguageModel) -> nn.Module:
    """Return a module that averages the gradients of all processes."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def reducing(module: nn.Module, part: Part) -> AbstractContextManager[None]:
    """Return the context of a part's backward. Processes average their gradients after the last part."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(part.is_last)
    elif isinstance(module, DistributedDataParallel) and not part.is_last:
        return module.no_sync()
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward without a backward leaves in a sharded model."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def gathered(model: LanguageModel) -> dict[str, Tensor]:
    """Return the weights on the CPU of rank 0, and nothing elsewhere. All processes call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Tensor] = get_model_state_dict(model, options=options)  # type: ignore[assignment]
    return weights


def scatter(model: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Load weights, which every process has, into a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. All processes call it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor on the device of a parameter, and sharded like it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
        mesh = parameter.device_mesh
        # Every process has the whole tensor, so that none is sent (`src_data_rank=None`).
        return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements, src_data_rank=None)
    return tensor.to(parameter.device)
