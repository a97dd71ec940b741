r"""Everything that a run is, to files and back: a resumed run is the run that was interrupted.

What     `save` writes a run (train.Run) to runs/<name>/; `restore` and `go_on` put it back: weights, optimizer,
         counters, all random states, the replay, and the rollouts in progress, to the bit on a CPU
Why      runs take days; a power cut should cost the minutes since the last checkpoint, and nothing else
Paper    none
Folder   checkpoint.pt names the files that belong to it, with their checksums, and is written last:
           parts/replay-RANK-FIRST.pt   trajectories from number FIRST on: written once, when they are new
           parts/rank-RANK-SAVE.pt      what one process has: lanes, the policy's memory, environments, generators
         previous.pt is the checkpoint before; `restore` falls back to it. What neither names is deleted.
Notes    A simulator cannot be saved as plain data. Saved are the state from which its rollout's seeds were drawn
         and the actions since, which are stepped again; where that does not lead to the same observation, the
         rollout begins anew (Run.lost counts it). Processes on several machines share the folder.
"""

import dataclasses
import functools
import os
from collections import defaultdict

import numpy as np

from runtime import checkpoint, distributed
from runtime.episode_buffer import parts

KEYS = ("config", "agent", "optimizer", "schedule", "counters", "log", "processes")  # of checkpoint.pt
PART = 500  # trajectories in one file of the replay, at most: what is copied at a time stays small
# Fields that decide the shapes of weights, or what they mean: a checkpoint only fits where they agree.
MODEL_FIELDS = (
    *("env", "tasks", "attempts", "store_executed", "clip_rewards", "variant", "gammas"),
    *("encoder", "encoder_hidden", "encoder_dim", "encoder_depths"),
    *("d_model", "d_ff", "layers", "heads", "hidden", "critics", "bins", "bin_low", "bin_high", "symlog"),
)
# What the rollouts in progress hang on as well: with others, they begin anew.
ROLLOUT_FIELDS = ("num_envs", "context", "segment_length", "max_steps")


def save(run) -> None:
    "checkpoint.pt and its parts: all that a resume needs. The one before it becomes previous.pt."
    run.saves += 1
    everyones = distributed.all_gather(save_own(run))
    if not distributed.rank():
        log = {"bytes": run.log.sync(), "minutes": run.log.minutes}
        state = run.weights() | {"log": log, "processes": everyones}
        state |= {"optimizer": run.optimizer.state_dict(), "schedule": run.schedule.state_dict()}
        checkpoint.save(run.folder / "checkpoint.pt", state, previous=run.folder / "previous.pt")
        now = [part for own in everyones for part in (own["state"], *own["replay"])]
        checkpoint.remove_others(run.folder / "parts", now + run.parts_before)
        run.parts_before = now


def save_own(run) -> dict:
    "Write what this process alone has to files: what is new in the replay, and everything else."
    folder, replay, rank = run.folder / "parts", run.replay, distributed.rank()
    end = run.replay_parts[-1]["end"] if run.replay_parts else 0
    run.replay_parts = [part for part in run.replay_parts if part["end"] > replay.oldest]
    for first in range(max(end, replay.oldest), replay.total_added, PART):
        new = checkpoint.save_part(folder, f"replay-{rank}-{first}.pt", replay.state_dict(first, PART))
        run.replay_parts.append(new | {"end": min(first + PART, replay.total_added)})
    state = {
        "replay": replay.state_dict(replay.total_added),
        "lanes": run.buffer.state_dict(),
        "policy": run.policy.state_dict(),
        "envs": run.envs.snapshots(),
        "recent": run.recent,
        "returns": dict(run.returns),
        "last_returns": {task: list(last) for task, last in run.last_returns.items()},
        "rng": checkpoint.rng_state(),
        "run_rng": run.rng.bit_generator.state,
    }
    part = checkpoint.save_part(folder, f"rank-{rank}-{run.saves}.pt", state)
    return {"state": part, "replay": run.replay_parts}


def restore(run) -> tuple[dict | None, dict]:
    """Put back weights, optimizer, counters and replay.

    Returns what else this process had, for `go_on` (None: its rollouts begin anew), and what the log needs to
    know. Raises CheckpointError where no checkpoint can be read, or it is of another configuration; ValueError
    for another number of processes.
    """
    newest, before = run.folder / "checkpoint.pt", run.folder / "previous.pt"
    paths, error = [path for path in (newest, before) if path.exists()], None
    if not paths:
        print(f"runs/{run.config.name} has no checkpoint yet: starting from its beginning")
        return None, {"resume": (0, -1)}
    for path in paths:
        if error:
            print(f"{error}. Going on from the checkpoint before it, {before}")
        state, error = in_all(functools.partial(checkpoint.load, keys=KEYS), path)
        if not error:
            check(run, state, path)
            own, error = in_all(load_own, run, state)
        if not error:
            break
    if error:
        raise error
    if path == before and not distributed.rank():
        os.replace(before, newest)  # what is damaged must not become the one before the next
    checkpoint.fill(run.agent, state["agent"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])  # sets the learning rate of this command line
    for group in run.optimizer.param_groups:  # the loaded state has brought the old one back
        group["weight_decay"] = run.config.weight_decay
    for name, value in state["counters"].items():
        setattr(run, name, value)
    print(f"resuming runs/{run.config.name} at env step {run.steps:,}, update {run.updates:,}")
    log = {"resume": (state["log"]["bytes"], run.steps), "earlier_minutes": state["log"]["minutes"]}
    now = dataclasses.asdict(run.config)
    changed = [f"--{name}" for name in ROLLOUT_FIELDS if state["config"][name] != now[name]]
    if changed:
        print(f"{', '.join(changed)} changed: rollouts begin anew")
    return None if changed else own, log


def in_all(read, *arguments):
    "(what `read` returns, None), or (None, the error): a CheckpointError in one process is one in all."
    result = error = None
    try:
        result = read(*arguments)
    except checkpoint.CheckpointError as damaged:
        error = damaged
    return result, next((e for e in distributed.all_gather(error) if e is not None), None)


def check(run, state: dict, path) -> None:
    "Raise where a checkpoint is not one of this configuration, or of another number of processes."
    checkpoint.check_compatible(state["config"], dataclasses.asdict(run.config), MODEL_FIELDS)
    for name in ("segment_length", "max_steps"):
        was, now = state["config"][name], getattr(run.config, name)
        if now is not None and (was is None or now < was):
            raise ValueError(
                f"--{name} was {was} and is now {now}: the saved replay holds longer trajectories. Leave it, or raise it"
            )
    saved, now = len(state["processes"]), distributed.world_size()
    if saved != now:
        raise ValueError(
            f"runs/{run.config.name} was saved by {saved} process(es) and is resumed by {now}: resume it with "
            f"torchrun --nproc_per_node {saved}, or begin a new run from its weights with --init {path}"
        )


def load_own(run, state: dict) -> dict:
    "What this process had, its replay filled again, and the files noted in which that lies."
    folder, mine = run.folder / "parts", state["processes"][distributed.rank()]
    own = checkpoint.load_part(folder, mine["state"])
    run.replay.load_state_dict(own["replay"], (checkpoint.load_part(folder, part) for part in mine["replay"]))
    run.replay_parts = mine["replay"]
    run.parts_before = [part for each in state["processes"] for part in (each["state"], *each["replay"])]
    return own


def go_on(run, own: dict) -> None:
    "Put back what this process had: rollouts in progress are stepped again, from their seeds and actions."
    run.buffer.load_state_dict(own["lanes"])
    run.policy.load_state_dict(own["policy"])
    on_device = lambda metrics: {name: value.to(run.device) for name, value in metrics.items()}
    run.recent, run.returns = list(map(on_device, own["recent"])), defaultdict(list, own["returns"])
    for task, returns in own["last_returns"].items():
        run.last_returns[task].extend(returns)
    run.rng.bit_generator.state = own["run_rng"]
    obs_E, expected_E = parts(run.envs.restore(own["envs"])[0]), run.buffer.newest()
    same_E = np.all([[np.array_equal(a, b) for a, b in zip(obs_E[n], expected_E[n])] for n in obs_E], axis=0)
    for e in np.flatnonzero(~same_E):  # a simulator that is not determined by its seed: these begin anew
        for name, value in parts(run.envs.restart(e)[0]).items():
            obs_E[name][e] = value
        run.begin(e, obs_E)
    if not same_E.all():
        run.policy.reset(~same_E)
        run.lost += int((~same_E).sum())
        print(f"{(~same_E).sum()} of {len(same_E)} rollouts begin anew: their simulators did not repeat them")
    checkpoint.set_rng_state(own["rng"])
