"""One process or many: the group that torchrun started, and tensors that may be sharded over it."""

import inspect
import json
import os
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LAST_TENSORS = 0.2
"""Seconds that gloo's threads get to free the tensors of the last collective."""


class Group:
    """The processes that train together. A single process is a group of one and needs no network."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all processes, which must have the same names."""
        if self.world_size == 1:
            return dict(sums)
        names = sorted(sums)
        total = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=_collective_device())
        torch.distributed.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a small tensor over the processes."""
        if self.world_size > 1:
            values = values.clone()
            torch.distributed.all_reduce(values)
            values /= self.world_size
        return values

    def largest(self, value: int) -> int:
        """The largest of the processes' values."""
        if self.world_size == 1:
            return value
        largest = torch.tensor([value], device=_collective_device())
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def from_main(self, value: Any) -> Any:
        """A JSON-like value of the main process, given to all."""
        if self.world_size == 1:
            return value
        # The values travel as JSON text in a byte tensor: the object collectives of torch would pickle them.
        device = _collective_device()
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        length = torch.tensor([len(content)], device=device)
        torch.distributed.broadcast(length, src=0)
        if not self.is_main:
            content = torch.empty(int(length), dtype=torch.uint8, device=device)
        torch.distributed.broadcast(content, src=0)
        return json.loads(bytes(content.cpu().tolist()).decode())

    def wait(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()


class AsyncScalar:
    """A number on its way from a GPU to the host: only `item` waits for it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def item(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this process is the one that prints; known before the group is joined."""
    return int(os.environ.get("RANK", "0")) == 0


def join_group(device: torch.device) -> Group:
    """The group that torchrun's environment describes; nccl between GPUs, gloo otherwise."""
    if not started_by_torchrun():
        return Group()
    if not torch.distributed.is_initialized():
        from torch.distributed.rendezvous import rendezvous

        backend = "nccl" if device.type == "cuda" else "gloo"
        store, rank, world_size = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        # A group that torchrun restarted may find the addresses of its dead predecessor in a static store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.PrefixStore(f"attempt-{attempt}", store)
        torch.distributed.init_process_group(
            backend, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=world_size
        )
    return Group(torch.distributed.get_rank(), torch.distributed.get_world_size())


def leave_group() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # torch destroys a group with the GIL held and waits for gloo's threads, one of which may still need the GIL to
        # free the tensors of the last collective: a deadlock. While we sleep, that thread gets the GIL.
        time.sleep(LAST_TENSORS)
        torch.distributed.destroy_process_group()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP: every process has all weights, gradients are averaged while backward runs."""
    ddp = nn.parallel.DistributedDataParallel
    # The buffers are constants. The option that says so has two names, the older one deprecated.
    names = inspect.signature(ddp.__init__).parameters
    constant_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {constant_buffers: False}
    device_ids = [device.index] if device.type == "cuda" else None
    return ddp(model, device_ids=device_ids, gradient_as_bucket_view=True, **options)


def shard(model: nn.Module, blocks: list[nn.Module], device: torch.device) -> None:
    """FSDP2, in place: parameters, gradients and optimiser state are divided over the processes, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The outputs are only read: the danger that this warning names does not arise.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def full_tensor(tensor: Tensor) -> Tensor:
    """A detached tensor, gathered from all its shards, on the CPU; every process must take part."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().contiguous()


def reshard_like(tensor: Tensor, template: Tensor) -> Tensor:
    """`tensor`, of which every process has all, with the device, dtype and sharding of `template`."""
    tensor = tensor.to(template.device, template.dtype)
    if not hasattr(template, "full_tensor"):
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, template.device_mesh, template.placements)  # type: ignore[attr-defined]


def _collective_device() -> torch.device:
    """nccl moves only GPU memory."""
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
