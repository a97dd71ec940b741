r"""The memory of a run: the replay that fits it, and an estimate of everything that it will take.

What     `make_replay` makes a run's replay and prints the memory that replay and learner will take
Why      a run that cannot fit should be refused before it begins
Paper    Table 1 (replay sizes)
Config   `config` is the trainer's (config.py)
"""

import math

import numpy as np
import torch

from envs import MultiTaskEnv
from replay import Replay
from runtime import distributed
from runtime.frame_store import FrameStore, check_room, expected_bytes
from runtime.logger import available_memory


def make_replay(config, env: MultiTaskEnv, folder, device: torch.device, seed: int = 0) -> Replay:
    """Make the replay of a run, with a store of frames under `folder` where there are pixels.

    Prints the memory that it and the learner will take. ValueError, naming what to lower, if that does not fit.
    """
    c, image_shape = config, env.image_shape
    # Each of several processes holds a part of the replay.
    steps, trajectories = (
        n and max(1, n // distributed.world_size()) for n in (c.replay_steps, c.replay_trajectories)
    )
    store = {
        "observation_dim": env.observation_size,
        "action_shape": () if env.discrete else (env.action_size,),
        "action_dtype": np.int64 if env.discrete else np.float32,
        "max_length": min(c.segment_length, env.max_rollout_length or c.segment_length),
        "capacity_steps": steps,
        # Segments of fewer than 10 steps on average would reach this bound first; none of the benchmarks does.
        "capacity_trajectories": trajectories if steps is None else max(1, steps // 10),
    }
    replay_bytes, frames = Replay.memory_bytes(**store), None
    if image_shape:
        ram_bytes = int(c.replay_ram * 1e9)
        number = (steps or trajectories * store["max_length"]) * 17 // 16  # and the last one of each segment
        in_memory, on_disk = check_room(expected_bytes(c.env, number, image_shape), ram_bytes, folder)
        print(
            f"frames: {number:,} at most, about {in_memory / 1e9:.2f} GB in memory and {on_disk / 1e9:.2f} GB on "
            f"disk (raw: {number * math.prod(image_shape) / 1e9:.0f} GB)"
        )
        replay_bytes += in_memory
        frames = FrameStore(image_shape, ram_bytes=ram_bytes, folder=folder)
    check_memory(config, replay_bytes, env.observation_size, device, image_shape)
    return Replay(**store, seed=seed, frames=frames)


def learner_bytes(config, observation_dim: int, image_shape=None) -> int:
    """Estimate the most memory that the acting cache and an update take. Weights and optimizer are less."""
    c, sequences, window = config, config.batch_size * (config.context + 1), config.context + 1
    one_pass = min(sequences, max(window, c.steps_per_pass))  # see update.groups
    cache = 2 * 2 * 4 * c.layers * c.d_model * c.context * c.num_envs  # collecting, and evaluating
    # Kept for backward, a timestep: about 12 widths and 3 feed-forward widths a block, and the encoder.
    together = one_pass if c.variant == "ind_ind" else sequences
    activations = (
        4 * together * (c.layers * (12 * c.d_model + 3 * c.d_ff) + 4 * c.encoder_hidden + observation_dim)
    )
    # A CNN keeps about ten maps of its first block's depth a frame; the frames themselves lie beside them.
    if image_shape:
        pixels = math.prod(image_shape[:2])
        activations += 4 * one_pass * pixels * 10 * c.encoder_depths[0] + sequences * 3 * pixels
    # A chunk's critics: K + 2 passes, each keeping its hidden layers and its logits.
    rows = c.critics * min(c.chunk, sequences) * len(c.gammas) * (c.action_samples + 2)
    chunk = 4 * rows * (2 * sum(c.hidden) + 3 * c.bins)
    return cache + activations + chunk


def check_memory(
    config, replay_bytes: int, observation_dim: int, device: torch.device, image_shape=None
) -> None:
    """Print the memory that a run will take. ValueError, naming what to lower, if it is not free."""
    c, learner, gigabyte = config, learner_bytes(config, observation_dim, image_shape), 1e9
    print(
        f"memory: replay at most {replay_bytes / gigabyte:.2f} GB, learner about {learner / gigabyte:.2f} GB"
    )
    free = available_memory() // distributed.local_world_size()
    free_on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free - replay_bytes
    if replay_bytes > free:
        raise ValueError(
            f"the replay would take {replay_bytes / gigabyte:.1f} GB and {free / gigabyte:.1f} GB are free: "
            f"lower --replay_trajectories (now {c.replay_trajectories}), --replay_steps ({c.replay_steps}), "
            f"--replay_ram ({c.replay_ram}) or --segment_length ({c.segment_length})"
        )
    if learner > free_on_device:
        raise ValueError(
            f"a context of {c.context} needs about {learner / gigabyte:.1f} GB beside the replay and "
            f"{max(free_on_device, 0) / gigabyte:.1f} GB are free: lower --context, --batch_size ({c.batch_size}) "
            f"or --d_model ({c.d_model})"
        )
