r"""Several processes that train one agent together, each with its own environments and replay.

What     the group of processes; the mean of a tensor over it; results of the first process for all others;
         objects collected from all
Why      a second GPU costs one word on the command line: torchrun starts the program once for each process
Paper    none
Notes    DistributedDataParallel averages gradients during one backward pass. Our update makes one backward pass for
         each chunk of states, so it averages the finished gradients, in one message.
         With one process, every function here returns at once, and torch.distributed is not started.
Copy     this file alone; needs torch
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

# The defaults of this module's functions keep the process group that exists when it is first imported, and
# torch.optim imports it. Import it before there is a group: a group that is kept is never destroyed, and its
# threads then abort the process at exit, now and then ("terminate called without an active exception").
import torch.distributed.nn.functional
from torch import Tensor


@contextlib.contextmanager
def process_group():
    """Join the processes that torchrun has started, if any, for as long as the block lasts.

    A block that ends well waits for all other processes, so that they leave together. A block that raises does
    not wait: the closed connections raise RuntimeError in the other processes, which therefore end, too.
    Inside the block, only the first process prints to stdout.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Long, because the others wait while the first process evaluates. torchrun notices a process that dies.
    timeout = datetime.timedelta(hours=24)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=timeout)
    ended_well = False
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if rank() else sys.stdout):
            yield
        try:
            maximum(0)  # waits for all, on the CPU; dist.barrier would use the GPU
        except RuntimeError:  # another process has failed, and has printed why
            sys.exit(1)
        ended_well = True
    finally:
        # NCCL would wait for the operations in flight, which after a failure may never end: the process's
        # exit ends them. Gloo has none in flight here.
        if ended_well or not on_gpus:
            dist.destroy_process_group()


def world_size() -> int:
    """The number of processes that train together; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_world_size() -> int:
    """The number of processes on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1


def mean(tensor: Tensor) -> Tensor:
    """The mean (...) of all processes' tensors (...), equal to the last bit in all of them."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor /= world_size()
    return tensor


def broadcast_(tensors: list[Tensor]) -> None:
    """Replace each tensor (any shape) by the first process's."""
    if world_size() > 1:
        # As one vector: one message is faster than hundreds.
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(flat, 0)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))


def maximum(number: int) -> int:
    """The greatest of all processes' numbers. For a decision of one process, the others pass 0."""
    if world_size() > 1:
        greatest = torch.tensor(int(number))
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        number = greatest.item()
    return number


def all_gather(own) -> list:
    """Every process's object, in order of rank; all processes get the list."""
    if world_size() == 1:
        return [own]
    objects = [None] * world_size()
    dist.all_gather_object(objects, own)
    return objects


def run_on_first(function: Callable):
    """Run `function()` in the first process and return its result in all.

    If it raises or exits there, the other processes exit silently.
    """
    if world_size() == 1:
        return function()
    message = [None, 1]  # the result, and the others' exit status
    try:
        if rank() == 0:
            message = [function(), None]
    except SystemExit as ended:
        message[1] = 1 if ended.code else 0
        raise
    finally:
        dist.broadcast_object_list(message)
    if message[1] is not None:
        sys.exit(message[1])
    return message[0]
