r"""Several processes that train one agent as one, each with its own environments and replay.

What     how many there are and which one this is; means over them of gradients and statistics; what the first one
         decides, told to all; objects gathered from all
Why      a second GPU should be one more word on the command line: torchrun starts the program once for each
         process, and everything else stays as it is with one
Paper    none
Notes    PyTorch's DistributedDataParallel averages gradients as one backward makes them; here chunks of states
         have a backward each (train.py), so the finished gradients are averaged instead, in one bucket.
         With one process, nothing here does anything, and torch.distributed is not started.
Copy     this file alone; needs torch
Try      torchrun --nproc_per_node 2 ranks.py
"""

import datetime
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def start() -> None:
    """Join the processes that torchrun has started, if it has.

    All but the first one print nothing to stdout from now on.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Long, because the others wait while the first one evaluates. A process that has died is torchrun's to see.
    waiting = datetime.timedelta(hours=24)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=waiting)
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def stop() -> None:
    """Leave the other processes. All do so at the end of a run that went well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """How many processes train together; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_this_machine() -> int:
    """How many of them share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1


def mean(tensor: Tensor) -> Tensor:
    """The mean (...) of all processes' tensors (...), the same to the last bit in all of them."""
    if count() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor /= count()
    return tensor


def average_(tensors: list[Tensor]) -> None:
    """Put the mean over all processes in the place of each tensor: one message for all of them."""
    if count() > 1:
        _put(tensors, mean(torch.cat([tensor.flatten() for tensor in tensors])))


def copy_first_(tensors: list[Tensor]) -> None:
    """Put the first process's values in the place of each tensor: one message for all of them."""
    if count() > 1:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(flat, 0)
        _put(tensors, flat)


def _put(tensors: list[Tensor], flat: Tensor) -> None:
    "Cut `flat` (sum of all sizes,) into the shapes of `tensors`, and write it there."
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def largest(values: list[float]) -> list[float]:
    """The largest of each value over all processes. What only one of them decides is 0 in the others."""
    if count() > 1:
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        values = together.tolist()
    return values


def gathered(mine) -> list:
    """Every process's object, in order of ranks, in all of them."""
    if count() == 1:
        return [mine]
    everyones = [None] * count()
    dist.all_gather_object(everyones, mine)
    return everyones


def of_first(make: Callable):
    """What `make()` returns in the first process, in all; if it fails or exits there, the others exit silently."""
    if count() == 1:
        return make()
    outcome = [None, 1]
    try:
        if rank() == 0:
            outcome = [make(), None]
    except SystemExit as asked:
        outcome = [None, 1 if asked.code else 0]
        raise
    finally:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        sys.exit(outcome[1])
    return outcome[0]


if __name__ == "__main__":
    start()
    mine = torch.tensor([float(rank()), 10.0])
    average_([mine])
    print(f"{count()} processes; mean of (rank, 10) over them: {mine.tolist()}")
    print(f"gathered: {gathered(f'from {rank()}')}, the first one's: {of_first(lambda: 'first')!r}")
    print(f"largest of (rank, 1 in the first): {largest([float(rank()), float(rank() == 0)])}")
    stop()
