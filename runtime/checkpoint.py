r"""Checkpoints: everything a run is, written whole or not at all, checked when it is read.

What     `save` and `load` of nested dictionaries of tensors, numbers and strings; the state of all random
         generators; names of weights without wrappers; whether a checkpoint fits a configuration
Why      a crash, a full disk or a Ctrl-C in mid-write must leave the last checkpoint as it was, a damaged
         file must say so, and a file from someone else must not be able to run code
Paper    none: any run of many hours needs this
Format   what `torch.save` writes, then a trailer: SHA-256 of the former (32 bytes) and b"AMAGO2CK". Because
         a zip archive is found from its end and tolerates a few bytes behind it, the file can still be
         opened without this one: torch.load(path, weights_only=True)
Copy     this file alone; needs torch and numpy
Try      python checkpoint.py
"""

import hashlib
import os
import pickle
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAGIC = b"AMAGO2CK"
TRAILER = hashlib.sha256().digest_size + len(MAGIC)  # bytes


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged or of another configuration: one line, and what to do about it."""


class _HashedFile:
    "A file that is written front to back, and hashed on the way: nothing is held in memory, or read again."

    def __init__(self, file):
        self.file, self.hash, self.error = file, hashlib.sha256(), None

    def write(self, data) -> int:
        self.hash.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error  # torch.save goes on after it, and raises one of its own
            raise

    def flush(self) -> None:
        self.file.flush()


def save(path, state: dict, previous=None) -> str:
    """Write `state` to `path` so that at every moment the old file or the new one is there, whole.

    `state` holds tensors, numbers, strings and None, in dictionaries, lists and tuples. Makes the folder if
    it is missing. Returns the SHA-256 of what was written. With a path `previous`, the file that was at `path`
    is kept there, once the new one has been read back. Raises OSError where the disk is full or does not
    give back what was written; after that, as after a crash, the old file stands.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within a file system. The name is always the
    # same: what a killed run left behind is overwritten, and does not fill the disk.
    temporary = path.with_name(path.name + ".writing")
    try:
        with open(temporary, "wb") as file:
            hashed = _HashedFile(file)
            try:
                torch.save(state, hashed)
            except RuntimeError as error:
                raise hashed.error or error from error
            file.write(hashed.hash.digest() + MAGIC)
            file.flush()
            # The data before the name: otherwise a power cut after the rename could leave the new name
            # on data that never reached the disk, and the old data gone.
            os.fsync(file.fileno())
        with open(temporary, "rb") as file:
            if _digest(file, os.path.getsize(temporary) - TRAILER) != hashed.hash.digest():
                raise OSError(f"{temporary} reads back other than it was written: is the disk failing?")
        if previous is not None and path.exists():
            os.replace(path, previous)  # from here to the next line, the previous one is the only one
        os.replace(temporary, path)
    except BaseException:
        # Ctrl-C, too: no half-written file is left to take up the space that was missing.
        temporary.unlink(missing_ok=True)
        raise
    # The rename is an entry in the folder, and it lasts only when that is on the disk as well. Windows
    # opens no folders, and needs no such thing.
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return hashed.hash.hexdigest()


def load(path, sha256: str | None = None, keys: tuple[str, ...] = ()) -> dict:
    """Read what `save` wrote, all tensors on the CPU. Never runs code from the file.

    Raises CheckpointError, one line, where the file is missing, damaged, holds anything but plain data, or is
    another one than that with the checksum `sha256`, or lacks one of `keys`.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: give the path of a .pt file in a folder under runs/")
    with open(path, "rb") as file:
        # Checked before anything is parsed: what a reader makes of damaged data can be any error, or,
        # where a bit of a weight has changed, none at all.
        size = file.seek(0, os.SEEK_END) - TRAILER
        file.seek(max(size, 0))
        trailer = file.read()
        file.seek(0)
        if size < 0 or not trailer.endswith(MAGIC) or trailer[: -len(MAGIC)] != _digest(file, size):
            raise CheckpointError(
                f"{path} is damaged (cut short, or changed since it was written) or no checkpoint of this "
                "program: take another checkpoint of that run, or a backup of this one"
            )
        if sha256 not in (None, trailer[: -len(MAGIC)].hex()):
            raise CheckpointError(f"{path} is not the file that the checkpoint was saved with")
        file.seek(0)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            # A good checksum says that the file is as it was written, not who wrote it. What is not plain
            # data is refused unread.
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{path} is not plain data, and was not opened: take a checkpoint that this program wrote "
                f"({type(error).__name__}: {reason})"
            ) from error
    lacking = [key for key in keys if not isinstance(state, dict) or key not in state]
    if lacking:
        raise CheckpointError(
            f"{path} is not what is looked for: it has no {lacking[0]}. Take another checkpoint"
        )
    return state


def _digest(file, size: int) -> bytes:
    "SHA-256 of the next `size` bytes, read a piece at a time."
    sha = hashlib.sha256()
    while size and (piece := file.read(min(size, 1 << 20))):
        sha.update(piece)
        size -= len(piece)
    return sha.digest()


def save_part(folder, name: str, state: dict) -> dict:
    """Write a part of a checkpoint to a file of its own; returns what to put into the checkpoint for it.

    A checkpoint is written after its parts, and names them with their checksums: it never refers to anything
    newer than itself, and what has not changed since the last one is not written again. Raises as `save`.
    """
    return {"file": name, "sha256": save(Path(folder) / name, state)}


def load_part(folder, part: dict) -> dict:
    """Read the part that `save_part` described. CheckpointError where that file is missing, damaged or another."""
    path = Path(folder) / Path(part["file"]).name
    if not path.is_file():
        raise CheckpointError(f"a part of the checkpoint is gone: {path}")
    return load(path, part["sha256"])


def remove_others(folder, parts: list[dict]) -> None:
    """Delete the files of a folder that are none of `parts`, what a killed process left half-written included."""
    keep = {part["file"] for part in parts}
    for path in Path(folder).glob("*.pt*"):
        if path.name not in keep:
            path.unlink(missing_ok=True)


def fill(model, state_dict: dict[str, Tensor]) -> None:
    """`model.load_state_dict(state_dict)`; CheckpointError, one line, where names or sizes differ."""
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise CheckpointError(
            "the checkpoint's weights have other sizes than this configuration's (trained on other --tasks?): "
            + " ".join(str(error).split())[:200]
        ) from error


def rng_state() -> dict:
    """The state of Python's, NumPy's and PyTorch's global generators, and of every GPU's, as plain data."""
    legacy = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        # The key is an array, and arrays are not plain data to `torch.load`; a tensor is.
        "numpy": legacy | {"state": {**legacy["state"], "key": torch.from_numpy(legacy["state"]["key"])}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict) -> None:
    """Put all generators where `rng_state` found them.

    States of GPUs that are not there now are left out: a run may move to another machine, where its GPU
    draws could not be the same in any case.
    """
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    np.random.set_state(state["numpy"] | {"state": {**inner, "key": inner["key"].numpy()}})
    torch.set_rng_state(state["torch"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, device_state in enumerate(state["cuda"][:here]):
        torch.cuda.set_rng_state(device_state, device)


def clean_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of weights as the plain model has them, whatever wrapped it or a part of it.

    `torch.compile` puts "_orig_mod." before the names of what it compiled, `DistributedDataParallel`
    "module." before all. A checkpoint with such names would fit the wrapped model only.
    """
    clean = {re.sub(r"(^|(?<=\.))_orig_mod\.", "", name): value for name, value in state_dict.items()}
    # Only where every name has it is it a wrapper: a model may well have one part of that name.
    if clean and all(name.startswith("module.") for name in clean):
        clean = {name.removeprefix("module."): value for name, value in clean.items()}
    return clean


def check_compatible(saved_config: dict, config: dict, fields) -> None:
    """Raise CheckpointError, one line with both values, where the configurations differ in one of `fields`."""

    def plain(value):
        # JSON knows no tuples: a configuration that went through it comes back with lists.
        return tuple(plain(v) for v in value) if isinstance(value, (list, tuple)) else value

    differing = [
        f"{name} was {saved_config.get(name)!r} and is now {config.get(name)!r}"
        for name in fields
        if plain(saved_config.get(name)) != plain(config.get(name))
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint is from another configuration: {'; '.join(differing)}. "
            "Leave these as they were, or start a new run under another --name"
        )


def _example() -> None:
    "Save, load, draw again, and two files that are refused."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        state = {"weights": {"w": torch.arange(3.0)}, "counters": {"steps": 1200}, "rng": rng_state()}
        save(path, state)
        draws = random.random(), np.random.rand(), torch.rand(()).item()
        loaded = load(path)
        print(
            f"saved {path.stat().st_size} bytes; loaded {loaded['weights']['w'].tolist()}, {loaded['counters']}"
        )
        set_rng_state(loaded["rng"])
        again = random.random(), np.random.rand(), torch.rand(()).item()
        print("drawn after saving: ", [round(x, 6) for x in draws])
        print("drawn after loading:", [round(x, 6) for x in again])

        try:
            save(path, {"not data": lambda: None})
        except (pickle.PicklingError, AttributeError) as error:
            print("a save that fails:", error)
        print(f"the old file stands: {os.listdir(folder)}, {load(path)['counters']}")

        print("names:", list(clean_state_dict({"module._orig_mod.encoder.weight": torch.zeros(1)})))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        for attempt in (
            lambda: load(path),
            lambda: load(path.with_name("checkpiont.pt")),
            lambda: check_compatible(
                {"d_model": 64, "bins": 32}, {"d_model": 256, "bins": 32}, ["d_model", "bins"]
            ),
        ):
            try:
                attempt()
            except CheckpointError as error:
                print("refused:", str(error).replace(folder, "FOLDER"))


if __name__ == "__main__":
    _example()
