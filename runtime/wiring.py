r"""From a configuration to the parts of a run: its environments, its replay, and the memory they take.

What     which arguments of a configuration describe its environments, for training and for evaluation; what
         the networks have to know of an environment; the replay that fits it; what all of it will take
Why      the trainer and the evaluation have to agree on these, and a run that cannot fit is refused before
         it has begun
Paper    Table 1 (replay sizes)
Config   `config` is the trainer's (config.py)
"""

import math
import os

import numpy as np
import torch

from replay import Replay
from runtime import distributed
from runtime.frame_store import FrameStore, check_room, expected_bytes
from runtime.logger import available_memory
from suites import BENCHMARKS


def env_arguments(config) -> dict:
    "What of a configuration describes its environment."
    return {
        "env": config.env,
        "tasks": config.tasks,
        "attempts": config.attempts,
        "store_executed": config.store_executed,
        "clip_rewards": config.clip_rewards,
        "max_steps": config.max_steps,
    }


def evaluation_arguments(config, split: str) -> dict:
    "The same for an evaluation on a split of its tasks: rewards as the tasks give them, unclipped."
    return env_arguments(config) | {"split": split, "clip_rewards": False}


def in_processes(config) -> bool:
    "Whether environments are stepped in worker processes: --workers, or slow simulators and cores enough."
    slow = BENCHMARKS[config.env].slow if config.env in BENCHMARKS else False
    return config.workers == "processes" or (config.workers == "auto" and slow and (os.cpu_count() or 1) >= 4)


def observation_parts(env) -> dict[str, tuple[tuple, type]]:
    "Shape and type of the parts of an observation: the vector, and the image where there is one."
    space = env.observation_space
    spaces = {"vector": space} if space.shape else {name: space[name] for name in ("vector", "image")}
    return {name: (part.shape, part.dtype) for name, part in spaces.items()}


def sizes(env) -> tuple:
    "What `Agent` has to know: vector width O, action width A, whether actions are discrete, image shape, layout."
    discrete, spaces = hasattr(env.action_space, "n"), observation_parts(env)
    actions = int(env.action_space.n if discrete else env.action_space.shape[0])
    return spaces["vector"][0][0], actions, discrete, spaces.get("image", (None,))[0], env.layout


def make_replay(config, env, folder, device: torch.device, seed: int = 0) -> Replay:
    """The replay of a run, with a store of frames under `folder` where there are pixels.

    Prints what it and the learner will take; ValueError, naming what to lower, if that does not fit.
    """
    c, (observation_dim, action_dim, discrete, image_shape, _) = config, sizes(env)
    # Several processes hold a part of the replay each.
    steps, trajectories = (
        n and max(1, n // distributed.world_size()) for n in (c.replay_steps, c.replay_trajectories)
    )
    store = {
        "observation_dim": observation_dim,
        "action_shape": () if discrete else (action_dim,),
        "action_dtype": np.int64 if discrete else np.float32,
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
    check_memory(config, replay_bytes, observation_dim, device, image_shape)
    return Replay(**store, seed=seed, frames=frames)


def learner_bytes(config, observation_dim: int, image_shape=None) -> int:
    """What the policy's memory and an update take at their most, estimated; weights and optimizer are less."""
    c, sequences, window = config, config.batch_size * (config.context + 1), config.context + 1
    one_pass = min(sequences, max(window, c.steps_per_pass))  # see train.passes
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
    """Print what the run will take, and refuse what does not fit, naming what to lower."""
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
