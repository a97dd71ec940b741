r"""The memory of a run: the replay that fits it, and an estimate of everything that it will take.

What     `with_sizes` chooses how much of an update is in memory at once; `make_replay` makes a run's replay and
         prints the memory that replay and learner will take; `explained` says what to do where it was not enough
Why      a run that cannot fit should be refused before it begins
Paper    Table 1 (replay sizes)
Config   `config` is the trainer's (config.py)
"""

import dataclasses
import errno
import math
import re

import numpy as np
import torch

from envs import MultiTaskEnv
from replay import Replay
from runtime import distributed
from runtime.frame_store import FrameStore, check_room, expected_bytes
from runtime.logger import available_memory

GB = 1e9  # bytes


def make_replay(config, env: MultiTaskEnv, folder, device: torch.device, seed: int = 0) -> Replay:
    """Make the replay of a run; where there are pixels, with a store of frames under the run's `folder`.

    Prints the memory that it and the learner will take. ValueError, naming what to lower, if that does not fit.
    """
    c, rank = config, distributed.rank()
    # Each of several processes holds a part of the replay.
    capacities = (c.replay_steps, c.replay_trajectories)
    steps, trajectories = (n and max(1, n // distributed.world_size()) for n in capacities)
    arguments = {
        "observation_dim": env.observation_size,
        "action_shape": () if env.discrete else (env.action_size,),
        "action_dtype": np.int64 if env.discrete else np.float32,
        "max_length": min(c.segment_length, env.max_rollout_length or c.segment_length),
        "capacity_steps": steps,
        # Segments of fewer than 10 steps on average would reach this bound first; none of the benchmarks does.
        "capacity_trajectories": trajectories if steps is None else max(1, steps // 10),
    }
    replay_bytes, frames = Replay.memory_bytes(**arguments), None
    if shape := env.image_shape:
        ram_bytes, folder = int(c.replay_ram * GB), folder / (f"frames-{rank}" if rank else "frames")
        # One frame for each step, and the last one of each segment.
        number = (steps or trajectories * arguments["max_length"]) * 17 // 16
        in_memory, on_disk = check_room(expected_bytes(c.env, number, shape), ram_bytes, folder)
        places = f"{in_memory / GB:.2f} GB in memory and {on_disk / GB:.2f} GB on disk"
        print(f"frames: {number:,} at most, about {places} (raw: {number * math.prod(shape) / GB:.0f} GB)")
        replay_bytes += in_memory
        frames = FrameStore(shape, ram_bytes=ram_bytes, folder=folder)
    check_memory(c, replay_bytes, learner_bytes(c, env.observation_size, env.image_shape), device)
    return Replay(**arguments, seed=seed, frames=frames)


def with_sizes(config, observation_dim: int, image_shape, device: torch.device):
    """`config` with numbers in place of --chunk auto and --steps_per_pass auto; on a GPU they are printed.

    A CPU computes fastest what its cache holds, a GPU as much at once as its memory holds.
    """
    auto = [name for name in ("chunk", "steps_per_pass") if getattr(config, name) == "auto"]
    whole = config.batch_size * (config.context + 1)
    if device.type != "cuda":  # measured: benchmarks/README.md
        steps = whole if config.compile else 1024 if image_shape else 2048
        sizes = {"chunk": max(1, 65_536 // max(config.hidden)), "steps_per_pass": steps}
        return dataclasses.replace(config, **{name: sizes[name] for name in auto})
    config = dataclasses.replace(config, **dict.fromkeys(auto, whole))
    size = lambda config: learner_bytes(config, observation_dim, image_shape)
    # A fifth stays for weights, optimizer and what the estimate leaves out.
    free = torch.cuda.mem_get_info(device)[0] * 4 // 5
    while auto and size(config) > free:
        halves = [dataclasses.replace(config, **{name: getattr(config, name) // 2}) for name in auto]
        smaller = min(halves, key=size)
        if size(smaller) >= size(config) or max(getattr(smaller, name) for name in auto) < 256:
            break  # too large in any case, which `check_memory` explains
        config = smaller
    if config.capture and not in_one_pass(config):
        print("no CUDA graphs: a batch does not fit in one pass, and graphs have no other")
    config = dataclasses.replace(config, capture=config.capture and in_one_pass(config))
    if auto:
        sizes = ", ".join(f"--{name} {getattr(config, name)}" for name in auto)
        print(
            f"sizes: {sizes}, about {size(config) / GB:.1f} of the {free / GB:.1f} GB that an update may take"
        )
    return config


def in_one_pass(config) -> bool:
    """Whether any batch is computed in one pass; batches in several are not padded (captured.pad)."""
    return config.steps_per_pass >= config.batch_size * (config.context + 1)


def learner_bytes(config, observation_dim: int, image_shape=None) -> int:
    """Estimate the most memory that the acting cache and an update take. Weights and optimizer are less."""
    c, sequences, window = config, config.batch_size * (config.context + 1), config.context + 1
    one_pass = min(sequences, max(window, c.steps_per_pass))  # see update.groups
    cache = 2 * 2 * 4 * c.layers * c.d_model * c.context * c.num_envs  # collecting, and evaluating
    # Kept for backward, a timestep: about 12 widths and 3 feed-forward widths a block, and the encoder.
    together = one_pass if c.variant == "ind_ind" else sequences
    timestep = c.layers * (12 * c.d_model + 3 * c.d_ff) + 4 * c.encoder_hidden + observation_dim
    wide = 2 if c.precision == "bf16" else 4  # bytes of a number
    activations = wide * together * timestep
    # A CNN keeps about ten maps of its first block's depth a frame; the frames themselves lie beside them.
    if image_shape:
        pixels = math.prod(image_shape[:2])
        activations += wide * one_pass * pixels * 10 * c.encoder_depths[0] + sequences * 3 * pixels
    # A chunk's critics: K + 2 passes, each keeping its hidden layers and its logits.
    rows = c.critics * min(c.chunk, sequences) * len(c.gammas) * (c.action_samples + 2)
    return cache + activations + wide * rows * (2 * sum(c.hidden) + 3 * c.bins)


def check_memory(config, replay_bytes: int, learner: int, device: torch.device) -> None:
    """Print the bytes that replay and learner will take. ValueError, naming what to lower, if they are not free."""
    c = config
    print(f"memory: replay at most {replay_bytes / GB:.2f} GB, learner about {learner / GB:.2f} GB")
    # The processes on a machine share its memory.
    free = available_memory() // distributed.local_world_size()
    if replay_bytes > free:
        raise ValueError(
            f"the replay would take {replay_bytes / GB:.1f} GB and {free / GB:.1f} GB are free: lower "
            f"--replay_trajectories (now {c.replay_trajectories}), --replay_steps ({c.replay_steps}), --replay_ram "
            f"({c.replay_ram}) or --segment_length ({c.segment_length})"
        )
    # On a CPU, the learner gets the memory that the replay leaves.
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free - replay_bytes
    if learner > free:
        raise ValueError(
            f"a context of {c.context} needs about {learner / GB:.1f} GB beside the replay and {free / GB:.1f} GB are "
            f"free: lower --context, --batch_size ({c.batch_size}) or --d_model ({c.d_model})"
        )


def explained(error: Exception, run) -> Exception | None:
    """An error of disk or memory as one line that says what to do; None for any other error."""
    c, full = run.config, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if isinstance(error, OSError) and error.errno in full:
        line = f"a file of {run.folder} could not be written ({error}): free some space there."
        if not (run.folder / "checkpoint.pt").exists():
            return OSError(f"{line} There is no checkpoint yet")
        return OSError(f"{line} The last checkpoint is intact:  {run.resume_command()}")
    # PyTorch raises RuntimeErrors, and the system an OSError "Cannot allocate memory".
    if isinstance(error, MemoryError) or re.search("(out of|allocate) memory", str(error)):
        return ValueError(
            f"out of memory: lower --batch_size (now {c.batch_size}), --context ({c.context}), --steps_per_pass "
            f"({c.steps_per_pass}), --chunk ({c.chunk}) or --num_envs ({c.num_envs}), or the replay's capacity"
        )
    return None
