r"""Frame store: images of a replay, compressed without loss, in memory first and then on disk.

What     a store of sequences of frames: `add` one, `read` any window of it, `drop` it
Why      18 million frames of 64 x 64 x 3 are 221 GB raw. Games draw the same few sprites over a still background,
         so a general compressor that sees many frames at once shrinks them 10 to 100 times
Paper    AMAGO-2 (arXiv 2411.11188), Table 1: 18 to 80 million timesteps of Procgen. The storage is our choice

Layout. A sequence is cut into chunks of 32 frames. zstandard compresses each chunk on its own. Sequences are
appended to a block: some tens of MB of memory, or a file that is mapped into memory. Both are read in the same way:

    block      [ sequence | sequence | ... ]                  freed, or deleted, when all its sequences are dropped
    sequence   [ sizes of its chunks, uint32 | chunk | chunk | ... | a shorter chunk ]
    chunk      zstd( up to 32 frames (H, W, C) uint8 )        a window decompresses only the chunks that it touches

When memory is full, the newest block goes to disk and the older ones stay. A replay draws old and new frames
equally often, so reading costs the same either way. Writing does not: as the oldest frames are dropped, memory
becomes free for new ones, and only the excess is ever written. If the oldest went to disk, every frame would be
written. In memory, a sequence costs about 250 bytes more, which the budget does not count.

Limits   Only whole blocks are freed: drop about in the order of adding, as a replay does. Not safe for threads
Shapes   N frames of a sequence, H height, W width, C channels
Copy     this file alone; needs numpy, torch and zstandard
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

# Compressed bytes a frame, means over games, of the policy whose frames take most | results/replay_frames.csv
BYTES_PER_FRAME = {"procgen-easy": 900, "procgen-memory-hard": 1010, "atari": 235}


class FramesFull(OSError):
    """Neither memory nor disk has room for another frame: one line that also says what to do."""


@dataclass(eq=False)
class _Block:
    "Sequences, one behind another. `data` is memory, or the mapping of a file if there is a `path`."

    data: np.ndarray  # (bytes,) uint8
    used: int = 0  # bytes written
    live: int = 0  # sequences that are not dropped
    path: str | None = None


class FrameStore:
    """Compressed sequences of frames; those beyond `ram_bytes` are kept in files under `folder`.

    Arguments: `frame_shape` (H, W, C) of uint8 frames; `chunk`, frames compressed together; `ram_bytes`, the most
    memory that blocks take; `folder`, for this store alone, made when it is needed: leftover files of a killed
    process are removed. None: memory only. `block_bytes`, the size of a block, at most an eighth of `ram_bytes`.
    Raises ValueError for a number below 1.
    """

    def __init__(self, frame_shape, chunk=32, ram_bytes=8 << 30, folder=None, block_bytes=64 << 20):
        if min(chunk, ram_bytes, block_bytes, *frame_shape) < 1:
            given = f"{tuple(frame_shape)}, {chunk}, {ram_bytes} and {block_bytes}"
            raise ValueError(f"frame_shape, chunk, ram_bytes and block_bytes must be at least 1, got {given}")
        self.frame_shape, self.chunk, self.ram_bytes = tuple(frame_shape), chunk, ram_bytes
        self.block_bytes = min(block_bytes, max(1, ram_bytes // 8))
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            # Leftovers are not needed: a checkpoint holds its frames itself. A process that has mapped such a file
            # can still read it, and new names never meet old ones.
            for left in self.folder.glob("frames-*.zst"):
                left.unlink(missing_ok=True)
        self._compress = zstandard.ZstdCompressor(level=3).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._blocks: list[_Block] = []  # oldest first; the last one is being filled
        self._places: dict[int, tuple[_Block, int, int]] = {}  # handle: block, first byte in it, N
        self._next_handle = 0

    def __len__(self) -> int:
        "Sequences held."
        return len(self._places)

    @property
    def ram_used(self) -> int:
        """Bytes in memory, including dropped sequences whose block is still needed."""
        return sum(block.used for block in self._blocks if block.path is None)

    @property
    def disk_used(self) -> int:
        """Bytes in files, likewise."""
        return sum(block.used for block in self._blocks if block.path is not None)

    # ------------------------------------------------------------------------------------- adding

    def add(self, frames: np.ndarray) -> int:
        """Compress and keep one sequence, (N, H, W, C) uint8; returns its handle.

        Raises ValueError for a wrong shape or type, FramesFull if memory (and disk) is full. Nothing is lost then.
        """
        frames = np.ascontiguousarray(frames)
        if frames.dtype != np.uint8 or frames.shape[1:] != self.frame_shape or not len(frames):
            raise ValueError(
                f"frames must be (N, {', '.join(map(str, self.frame_shape))}) uint8, N at least 1, "
                f"got {frames.shape} {frames.dtype}"
            )
        chunks = [self._compress(frames[i : i + self.chunk]) for i in range(0, len(frames), self.chunk)]
        sizes = np.array([len(data) for data in chunks], "<u4").tobytes()
        return self._append(np.frombuffer(b"".join([sizes, *chunks]), np.uint8), len(frames))

    def _append(self, sequence: np.ndarray, frames: int) -> int:
        "Keep a compressed sequence of so many frames; returns its handle."
        block, need = self._blocks[-1] if self._blocks else None, len(sequence)
        if block is None or block.path is not None or block.used + need > len(block.data):
            block = self._new_block(need)
        block.data[block.used : block.used + need] = sequence
        self._places[self._next_handle] = (block, block.used, frames)
        block.used += need
        block.live += 1
        self._next_handle += 1
        return self._next_handle - 1

    def _new_block(self, need: int) -> _Block:
        "A block with at least `need` bytes in memory; the newest ones go to disk until it fits the budget."
        size = max(need, self.block_bytes)
        if self.folder is None:  # nothing can go to disk, so use the budget up to its last byte
            size = max(need, min(size, self.ram_bytes - self.ram_used))
        while self.ram_used + size > self.ram_bytes:
            in_memory = [block for block in self._blocks if block.path is None]
            if self.folder is None or not in_memory:
                nowhere = "" if self.folder else " (there is no folder to spill to)"
                raise FramesFull(
                    f"frames: {self.ram_used + size} bytes exceed the memory for them, {self.ram_bytes} bytes"
                    f"{nowhere}: raise --replay_ram or lower --replay_steps"
                )
            self._spill(in_memory[-1])
        # The system assigns memory only when it is written to: an unfilled block takes no more than it holds.
        self._blocks.append(_Block(np.empty(size, np.uint8)))
        return self._blocks[-1]

    def _spill(self, block: _Block) -> None:
        "Move a block from memory to a file."
        path = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix="frames-", suffix=".zst", dir=self.folder)
            # First written, then mapped: on a full disk, a write raises an error, but a store to a mapped page
            # kills the process.
            with open(descriptor, "wb") as file:
                file.write(block.data[: block.used])
            # Unlike Python's own mapping, this one keeps no file open. There may be more blocks than a process
            # may have open files.
            mapped = torch.from_file(path, shared=False, size=block.used, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            if path is not None:
                Path(path).unlink(missing_ok=True)
            raise FramesFull(
                f"frames: cannot write {block.used} bytes to {self.folder} ({error}): free some space, raise "
                "--replay_ram or lower --replay_steps"
            ) from error
        block.data, block.path = mapped.numpy(), path

    # ---------------------------------------------------------------------------- reading, dropping

    def read(self, handle: int, first: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Frames [first, first + count) of a sequence: (count, H, W, C) uint8, written to `out` if given.

        Raises KeyError for an unknown handle, ValueError for frames that the sequence does not have.
        """
        block, begin, frames = self._places[handle]
        if first < 0 or count < 1 or first + count > frames:
            raise ValueError(f"frames {first} to {first + count} are not in a sequence of {frames}")
        if out is None:
            out = np.empty((count, *self.frame_shape), np.uint8)
        bounds = self._bounds(block, begin, frames)
        for c in range(first // self.chunk, (first + count - 1) // self.chunk + 1):
            data = self._decompress(block.data[bounds[c] : bounds[c + 1]])
            chunk = np.frombuffer(data, np.uint8).reshape(-1, *self.frame_shape)
            low, high = max(first, c * self.chunk), min(first + count, (c + 1) * self.chunk)
            out[low - first : high - first] = chunk[low - c * self.chunk : high - c * self.chunk]
        return out

    def _bounds(self, block: _Block, begin: int, frames: int) -> list[int]:
        "Where the chunks of a sequence lie in its block: chunk c at [bounds[c], bounds[c + 1])."
        table = begin + 4 * math.ceil(frames / self.chunk)
        return np.cumsum([table, *block.data[begin:table].view("<u4")]).tolist()

    def drop(self, handle: int) -> None:
        """Forget a sequence; KeyError for an unknown handle. The last one dropped frees its block."""
        block, _, _ = self._places.pop(handle)
        block.live -= 1
        if not block.live:
            self._delete(block)

    def close(self) -> None:
        """Forget everything: free all memory and delete all files."""
        for block in list(self._blocks):
            self._delete(block)
        self._places = {}

    def _delete(self, block: _Block) -> None:
        self._blocks.remove(block)
        if block.path is not None:
            Path(block.path).unlink(missing_ok=True)

    # --------------------------------------------------------------------------- saving and loading

    def pack(self, handles: list[int]) -> dict:
        """Sequences for a checkpoint, still compressed, one behind another: tensors (copies) and numbers.

        Loads with `torch.load(..., weights_only=True)`. Raises KeyError for an unknown handle.
        """
        places = [self._places[handle] for handle in handles]
        sequences = [place[0].data[place[1] : self._bounds(*place)[-1]] for place in places]
        return {
            "frame_shape": list(self.frame_shape),
            "chunk": self.chunk,
            "frames": torch.tensor([frames for _, _, frames in places], dtype=torch.int64),
            "bytes": torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64),
            "data": torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *sequences])),
        }

    def unpack(self, packed: dict, first: int = 0) -> Iterator[int]:
        """Add the sequences from `pack`, beginning with number `first`; yields each handle as it is added.

        Raises ValueError for another frame shape or chunk, FramesFull as `add`. Budget and folder may differ.
        """
        shape, chunk = tuple(packed["frame_shape"]), packed["chunk"]
        if (shape, chunk) != (self.frame_shape, self.chunk):
            ours = f"{self.frame_shape} in {self.chunk}"
            raise ValueError(f"the saved frames are {shape} in chunks of {chunk}, not {ours}")
        sequences = packed["data"].split(packed["bytes"].tolist())
        for sequence, frames in zip(sequences[first:], packed["frames"][first:].tolist()):
            yield self._append(sequence.numpy(), frames)


def expected_bytes(benchmark: str, frames: int, frame_shape: tuple[int, ...]) -> int:
    """Expected compressed bytes of so many frames of a benchmark; uncompressed if it was not measured.

    A replay of S steps in M segments holds S + M frames.
    """
    return frames * BYTES_PER_FRAME.get(benchmark.removesuffix("-rescaled"), math.prod(frame_shape))


def check_room(expected: int, ram_bytes: int, folder) -> tuple[int, int]:
    """Split `expected` bytes into (in memory, on disk), before a run.

    Raises ValueError, one line, if they do not fit. The caller checks that so much memory is free.
    """
    spilled, free = max(0, expected - ram_bytes), 0
    if folder is not None:  # it may not exist yet: take the nearest folder above it that does
        folder = Path(folder).absolute()
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
    if spilled > free:
        raise ValueError(
            f"frames come to about {expected / 1e9:.1f} GB, more than --replay_ram ({ram_bytes / 1e9:.1f} GB) "
            f"and {free / 1e9:.1f} GB free on disk: raise --replay_ram, free some space or lower --replay_steps"
        )
    return expected - spilled, spilled
