r"""Checkpoints: files that survive crashes, and a run saved to them and resumed from them.

What     files first: `save` and `load` of nested dictionaries of tensors, numbers and strings, and the state of
         random generators; then whole runs: `save_run`, `restore_run` and `continue_run`
Why      a run takes days. A crash, a full disk or Ctrl-C must leave the last checkpoint as it was, damage must be
         noticed, a stranger's file must not run code, and on a CPU a resumed run must be exactly the run that was
         interrupted
Paper    none
Format   the output of `torch.save`, then a trailer: its SHA-256 (32 bytes) and b"AMAGO2CK". Zip archives tolerate
         bytes at their end, so it can be opened without this file: torch.load(path, weights_only=True)
Folder   runs/<name>/checkpoint.pt names the files that belong to it, with their checksums, and is written last:
           parts/replay-RANK-FIRST.pt   segments from number FIRST on, written once, when they are new
           parts/rank-RANK-SAVE.pt      state of one process: episodes in progress, policy, environments, generators
         previous.pt is the checkpoint before; a resume falls back to it. Files that neither names are deleted.
Notes    A simulator cannot be saved as plain data. Instead, its rollout's seeds and the actions since are saved and
         stepped again; if that does not lead to the same observation, the rollout restarts (Run.lost counts it).
         Processes on several machines share the folder.
"""

import dataclasses
import hashlib
import io
import os
import pickle
import random
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime import distributed
from runtime.episode_buffer import parts

MAGIC = b"AMAGO2CK"
TRAILER = hashlib.sha256().digest_size + len(MAGIC)  # bytes


class CheckpointError(Exception):
    """A checkpoint is missing or damaged, or its weights do not fit: one line that also says what to do."""


# --------------------------------------------------------------------------------------------- files


class _HashedFile(io.BufferedWriter):
    "A file that hashes everything that is written to it, so that it need not be held in memory."

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self.hash, self.error = hashlib.sha256(), None

    def write(self, data) -> int:
        self.hash.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error  # torch.save raises an error of its own afterwards
            raise


def save(path, state: dict, previous=None) -> str:
    """Write `state` to `path`; at every moment the old file or the new one is there, whole.

    `state` holds tensors, numbers, strings and None, in dictionaries, lists and tuples. A missing folder is
    made. Returns the SHA-256 of the new file's content. If a path `previous` is given, the old file moves there
    once the new one has been read back. Raises OSError if the disk is full or does not return the data that was
    written; after that, as after a crash, the old file is still there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system. The name is always the
    # same, so the next save overwrites the leftover of a killed process.
    temporary = path.with_name(path.name + ".writing")
    try:
        with _HashedFile(temporary) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                raise file.error or error from error
            digest = file.hash.digest()
            file.write(digest + MAGIC)
            file.flush()
            # The data must be on the disk before the name is: otherwise a power cut after the rename could
            # leave the new name without its data, and the old data gone.
            os.fsync(file.fileno())
        with open(temporary, "rb") as file:
            if _digest(file) != digest:
                raise OSError(f"{temporary} does not read back as it was written: is the disk failing?")
        if previous is not None and path.exists():
            os.replace(path, previous)  # until the next line, `previous` is the only checkpoint
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too: a half-written file would only take up space
        temporary.unlink(missing_ok=True)
        raise
    # A rename changes the folder, which has to reach the disk as well. (Windows opens no folders.)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return digest.hex()


def load(path, sha256: str | None = None, keys: tuple[str, ...] = ()) -> dict:
    """Read a file that `save` wrote, all tensors on the CPU. Never runs code from the file.

    Raises CheckpointError, one line, if the file is missing or damaged, holds anything but plain data, has
    another checksum than `sha256`, or lacks one of `keys`.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: give the path of a .pt file in a folder under runs/")
    with open(path, "rb") as file:
        # The checksum comes before any parsing: damaged data could cause any error, or, if only a bit of a
        # weight has changed, none at all.
        digest = _digest(file)
        if file.read() != digest + MAGIC:
            raise CheckpointError(
                f"{path} is damaged (cut short, or changed since it was written) or no checkpoint of this "
                "program: take another checkpoint of that run, or a backup of this one"
            )
        if sha256 not in (None, digest.hex()):
            raise CheckpointError(f"{path} is not the file that the checkpoint was saved with")
        file.seek(0)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            # A good checksum shows that the file is unchanged, not who wrote it.
            raise CheckpointError(
                f"{path} is not plain data, and was not opened: take a checkpoint that this program wrote "
                f"({type(error).__name__}: {_one_line(error)})"
            ) from error
    for key in keys:
        if not isinstance(state, dict) or key not in state:
            raise CheckpointError(f"{path} is another kind of file: it has no {key}. Take another checkpoint")
    return state


def _digest(file) -> bytes:
    "SHA-256 of a file's content, read a piece at a time as far as the trailer."
    sha, left = hashlib.sha256(), max(0, os.fstat(file.fileno()).st_size - TRAILER)
    while piece := file.read(min(left, 1 << 20)):
        sha.update(piece)
        left -= len(piece)
    return sha.digest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def save_part(folder, name: str, state: dict) -> dict:
    """Write one part of a checkpoint to a file of its own; returns the entry for it in the checkpoint.

    A checkpoint is written after its parts and names them with their checksums, so it never refers to newer
    data than its own, and a part that has not changed is not written again. Raises as `save`.
    """
    return {"file": name, "sha256": save(Path(folder) / name, state)}


def load_part(folder, part: dict) -> dict:
    """Read the part for which `save_part` returned `part`; CheckpointError if it is missing, damaged or another."""
    path = Path(folder) / Path(part["file"]).name
    if not path.is_file():
        raise CheckpointError(f"a part of the checkpoint is gone: {path}")
    return load(path, part["sha256"])


def fill(model, state_dict: dict[str, Tensor]) -> None:
    """Call `model.load_state_dict(state_dict)`; CheckpointError, one line, if names or sizes differ."""
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise CheckpointError(
            "the checkpoint's weights have other sizes than this configuration's (trained on other --tasks?): "
            + _one_line(error)
        ) from error


def rng_state() -> dict:
    """State of the global generators of Python, NumPy, PyTorch and every GPU, as plain data."""
    name, key, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        # `torch.load` accepts tensors as plain data, but no arrays.
        "numpy": (name, torch.from_numpy(key), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_rng_state(state: dict) -> None:
    """Set all global generators to a state from `rng_state`. States of GPUs that are missing now are ignored."""
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


def clean_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names that they have in the plain model, without wrappers.

    `torch.compile` puts "_orig_mod." before the names of the module it compiled, `DistributedDataParallel`
    "module." before all. A checkpoint with such names would only fit the wrapped model.
    """
    clean = {re.sub(r"(^|(?<=\.))_orig_mod\.", "", name): value for name, value in state_dict.items()}
    # A wrapper's prefix is on every name; a plain model may have a single part that is called "module".
    if clean and all(name.startswith("module.") for name in clean):
        clean = {name.removeprefix("module."): value for name, value in clean.items()}
    return clean


ADVICE = "Leave these as they were, or start a new run under another --name"


def check_compatible(saved_config: dict, config: dict, fields, advice: str = ADVICE) -> None:
    """Raise ValueError, one line with both values and `advice`, if the configurations differ in one of `fields`."""
    was, now = ({name: values.get(name) for name in fields} for values in (saved_config, config))
    differing = "; ".join(f"{n} was {was[n]!r} and is now {now[n]!r}" for n in fields if was[n] != now[n])
    if differing:
        raise ValueError(f"the checkpoint is from another configuration: {differing}. {advice}")


# ------------------------------------------------------------------------------------- saving a run

KEYS = ("config", "agent", "optimizer", "schedule", "counters", "log", "processes")  # of checkpoint.pt
PART = 500  # the most segments in one file of the replay: their content is copied in memory to be written
# Fields that decide the shapes of weights or their meaning: a checkpoint fits only where they agree.
MODEL_FIELDS = (
    *("env", "tasks", "attempts", "store_executed", "clip_rewards", "variant", "gammas"),
    *("encoder", "encoder_hidden", "encoder_dim", "encoder_depths"),
    *("d_model", "d_ff", "layers", "heads", "hidden", "critics", "bins", "bin_low", "bin_high", "symlog"),
)
# If these change, episodes in progress restart.
ROLLOUT_FIELDS = ("num_envs", "context", "segment_length", "max_steps")


def save_run(run) -> None:
    """Write checkpoint.pt and its parts, all that a resume needs. The checkpoint before becomes previous.pt."""
    run.saves += 1
    processes = distributed.all_gather(_save_own(run))
    if not distributed.rank():
        log = {"bytes": run.log.sync(), "minutes": run.log.minutes}
        state = run.weights() | {"log": log, "processes": processes}
        state |= {"optimizer": run.optimizer.state_dict(), "schedule": run.schedule.state_dict()}
        save(run.folder / "checkpoint.pt", state, previous=run.folder / "previous.pt")
        files = _files_of(processes)
        for path in (run.folder / "parts").glob("*.pt*"):  # among them leftovers of killed processes
            if path.name not in files | run.files_before:
                path.unlink(missing_ok=True)
        run.files_before = files


def _files_of(processes: list[dict]) -> set[str]:
    "Names of all files that a checkpoint refers to."
    return {part["file"] for own in processes for part in (own["state"], *own["replay"])}


def _save_own(run) -> dict:
    "Write this process's own state to files: the segments that are new in its replay, and all the rest."
    folder, replay, rank = run.folder / "parts", run.replay, distributed.rank()
    end = run.replay_parts[-1]["end"] if run.replay_parts else 0
    run.replay_parts = [part for part in run.replay_parts if part["end"] > replay.oldest]
    for first in range(max(end, replay.oldest), replay.total_added, PART):
        new = save_part(folder, f"replay-{rank}-{first}.pt", replay.state_dict(first, PART))
        run.replay_parts.append(new | {"end": min(first + PART, replay.total_added)})
    state = {
        "replay": replay.state_dict(replay.total_added),  # no segments, but the generator's state
        "episodes": run.buffer.state_dict(),
        "policy": run.policy.state_dict(),
        "action": None if run.action_E is None else torch.from_numpy(run.action_E),
        "batch": run.batches.state_dict(),
        "envs": run.envs.snapshots(),
        "recent": run.recent,
        "returns": dict(run.returns),
        "last_returns": {task: list(last) for task, last in run.last_returns.items()},
        "rng": rng_state(),
        "run_rng": run.rng.bit_generator.state,
    }
    return {"state": save_part(folder, f"rank-{rank}-{run.saves}.pt", state), "replay": run.replay_parts}


# ----------------------------------------------------------------------------------- resuming a run


def restore_run(run) -> tuple[dict | None, dict]:
    """Restore weights, optimizer, counters and replay, before the run has a log and environments.

    Returns this process's own state for `continue_run` (None: episodes in progress restart), and the log's
    arguments. Raises CheckpointError if no checkpoint can be read, ValueError if it is of another configuration or
    another number of processes.
    """
    newest, previous = run.folder / "checkpoint.pt", run.folder / "previous.pt"
    paths = [path for path in (newest, previous) if path.exists()]
    if not paths:
        print(f"runs/{run.config.name} has no checkpoint yet: starting from its beginning")
        return None, {"resume": (0, -1)}
    for path in paths:
        error = None
        try:
            state, own = _read(run, path)
        except CheckpointError as caught:
            error = caught
        # All processes resume from the same checkpoint: where one cannot read it, no other takes it.
        error = next(filter(None, distributed.all_gather(error)), None)
        if not error:
            break
        if path == paths[-1]:
            raise error
        print(f"{error}. Resuming from the checkpoint before it, {previous}")
    if path == previous and not distributed.rank():
        os.replace(previous, newest)  # the damaged file must not become the next previous.pt
    fill(run.agent, state["agent"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])  # sets the learning rate of this command line
    for group in run.optimizer.param_groups:  # the loaded state has brought the old one back
        group["weight_decay"] = run.config.weight_decay
    for name, value in state["counters"].items():
        setattr(run, name, value)
    if run.config.reward_scale == "auto":  # fixed once, for the whole run
        run.config = dataclasses.replace(run.config, reward_scale=state["config"]["reward_scale"])
    print(f"resuming runs/{run.config.name} at env step {run.steps:,}, update {run.updates:,}")
    changed = [f"--{name}" for name in ROLLOUT_FIELDS if state["config"][name] != getattr(run.config, name)]
    if changed:
        print(f"{', '.join(changed)} changed: episodes in progress restart")
    log = {"resume": (state["log"]["bytes"], run.steps), "earlier_minutes": state["log"]["minutes"]}
    return None if changed else own, log


def _check_run(run, state: dict, path) -> None:
    "Raise if a checkpoint is of another configuration or another number of processes."
    check_compatible(state["config"], dataclasses.asdict(run.config), MODEL_FIELDS)
    for name in ("segment_length", "max_steps"):
        was, now = state["config"][name], getattr(run.config, name)
        if now is not None and (was is None or now < was):
            raise ValueError(
                f"--{name} was {was} and is now {now}: the saved replay holds longer segments. Leave it, or raise it"
            )
    saved, now = len(state["processes"]), distributed.world_size()
    if saved != now:
        raise ValueError(
            f"runs/{run.config.name} was saved by {saved} process(es) and is resumed by {now}: resume it with "
            f"torchrun --nproc_per_node {saved}, or start a new run from its weights with --init {path}"
        )


def _read(run, path: Path) -> tuple[dict, dict]:
    "A checkpoint, and this process's own state in it. Its segments go into the replay, one file at a time."
    state = load(path, keys=KEYS)
    _check_run(run, state, path)
    folder, mine = run.folder / "parts", state["processes"][distributed.rank()]
    own = load_part(folder, mine["state"])
    run.replay.load_state_dict(own["replay"], (load_part(folder, part) for part in mine["replay"]))
    run.replay_parts, run.files_before = mine["replay"], _files_of(state["processes"])
    return state, own


def continue_run(run, own: dict) -> None:
    """Restore this process's own state: environments step again through the seeds and actions of their rollouts."""
    run.buffer.load_state_dict(own["episodes"])
    run.policy.load_state_dict(own["policy"])
    run.action_E = None if own["action"] is None else own["action"].numpy()
    run.batches.load_state_dict(own["batch"])
    on_device = lambda metrics: {name: value.to(run.device) for name, value in metrics.items()}
    run.recent, run.returns = list(map(on_device, own["recent"])), defaultdict(list, own["returns"])
    for task, returns in own["last_returns"].items():
        run.last_returns[task].extend(returns)
    run.rng.bit_generator.state = own["run_rng"]
    obs_E, expected_E = parts(run.envs.restore(own["envs"])[0]), run.buffer.newest()
    same_E = np.all([[np.array_equal(a, b) for a, b in zip(obs_E[n], expected_E[n])] for n in obs_E], axis=0)
    for e in np.flatnonzero(~same_E):  # its simulator draws from a generator that no seed reaches
        for name, value in parts(run.envs.restart(e)[0]).items():
            obs_E[name][e] = value
        run.begin(e, obs_E)
    if not same_E.all():
        run.policy.reset(~same_E)
        run.lost += int((~same_E).sum())
        print(f"{(~same_E).sum()} of {len(same_E)} rollouts restart: their simulators did not repeat them")
    set_rng_state(own["rng"])
