r"""Frames: images of a replay, stored once, compressed without loss, in memory first and then on disk.

What     a store of sequences of frames: `add` one, `read` any window of it, `drop` it
Why      18 million frames of 64 x 64 x 3 are 221 GB raw. Games draw the same few sprites over a still
         background, so a general compressor that sees many frames at once shrinks them 10 to 100 times
Paper    AMAGO-2 (arXiv 2411.11188), Table 1: 18 million (Procgen easy) to 80 million (memory-hard) timesteps

Layout. A sequence is cut into chunks of 32 frames, each compressed on its own by zstandard, and appended
to a segment: a piece of memory of some tens of MB. A segment that is full stays in memory or is written
to a file of its own and mapped from there, and is read in the same way in both places:

    segment    [ sequence | sequence | ... ]                  freed, or deleted, when all of it was dropped
    sequence   [ sizes of its chunks, uint32 | chunk | chunk | ... | chunk of the rest ]
    chunk      zstd( up to 32 frames (H, W, C) uint8 )        a window decompresses those that it touches

Once memory is full, the newest segment goes to disk and the older ones stay. A uniform draw reads all of
them equally often, so it does not matter to reading which ones those are; but as the oldest frames are
dropped, memory is free again for new ones, and only what never fitted is ever written. Spilling the oldest
would write every frame. In memory beside the segments: about 250 bytes a sequence, not in the budget.

Limits   The paper says nothing of storage: our choice. Frees whole segments: drop about in the order of adding, as a replay does. Not safe for threads.
Shapes   N frames of a sequence, H height, W width, C channels
Copy     this file alone; needs numpy, torch and zstandard
Try      python frames.py
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

# Compressed bytes a frame, means over games, for the costliest policy tried | measured, results/replay_frames.csv
BYTES_PER_FRAME = {"procgen-easy": 900, "procgen-memory-hard": 1010, "atari": 235}


class FramesFull(OSError):
    """Neither memory nor disk takes another frame: one line, and what to do about it."""


@dataclass(eq=False)
class _Segment:
    "Sequences one behind another: `data` is memory, or a file's mapping where there is a `path`."

    data: np.ndarray  # (bytes,) uint8
    used: int = 0  # bytes written
    live: int = 0  # sequences not dropped
    path: str | None = None

    def delete(self) -> None:
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


class FrameStore:
    """Sequences of frames, compressed; beyond `ram_bytes` they are kept in files under `folder`.

    Arguments: `frame_shape` (H, W, C) of uint8 frames; `chunk`, frames compressed together; `level` of
    zstandard; `ram_bytes`, the most memory that segments take; `folder`, made if missing, for this store
    alone: files that a killed process left in it are removed. None: memory only. `segment_bytes`, the
    size of a segment, at most an eighth of `ram_bytes`. Raises ValueError for a number below 1.
    """

    def __init__(
        self,
        frame_shape: tuple[int, ...],
        chunk: int = 32,
        level: int = 3,
        ram_bytes: int = 8 << 30,
        folder=None,
        segment_bytes: int = 64 << 20,
    ):
        if min(chunk, ram_bytes, segment_bytes, *frame_shape) < 1:
            raise ValueError(
                "frame_shape, chunk, ram_bytes and segment_bytes must be at least 1, got "
                f"{tuple(frame_shape)}, {chunk}, {ram_bytes} and {segment_bytes}"
            )
        self.frame_shape, self.chunk, self.ram_bytes = tuple(frame_shape), chunk, ram_bytes
        self.segment_bytes = min(segment_bytes, max(1, ram_bytes // 8))
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:  # made when there is something to put into it
            # Nothing in them is wanted: a checkpoint holds its frames itself. Should another process have
            # them mapped, it keeps what it maps until it ends, and new names never meet old ones.
            for left in self.folder.glob("frames-*.zst"):
                left.unlink(missing_ok=True)
        self._compress = zstandard.ZstdCompressor(level=level).compress
        self._zstd = zstandard.ZstdDecompressor()
        self._segments: list[_Segment] = []  # oldest first; the last one is being filled
        self._places: dict[int, tuple[_Segment, int, int]] = {}  # handle: segment, first byte in it, N
        self._next_handle = 0

    def __len__(self) -> int:
        "Sequences held."
        return len(self._places)

    @property
    def ram_used(self) -> int:
        """Bytes of segments in memory, dropped sequences in them included."""
        return sum(segment.used for segment in self._segments if segment.path is None)

    @property
    def disk_used(self) -> int:
        """Bytes of segments in files."""
        return sum(segment.used for segment in self._segments if segment.path is not None)

    # ------------------------------------------------------------------------------------------ in

    def add(self, frames: np.ndarray) -> int:
        """Compress one sequence, (N, H, W, C) uint8, and keep it; returns its handle.

        Raises ValueError for a wrong shape or type, FramesFull where memory (and disk) is used up; the
        store then holds what it held, though some of it may have moved to disk.
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

    def _append(self, record: np.ndarray, frames: int) -> int:
        "Keep a sequence as it is compressed, table of sizes included; returns its handle."
        segment = self._room(len(record))
        begin = segment.used
        segment.data[begin : begin + len(record)] = record
        segment.used += len(record)
        segment.live += 1
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._places[handle] = (segment, begin, frames)
        return handle

    def _room(self, need: int) -> _Segment:
        "A segment in memory with `need` bytes to spare: the last one, or a new one after it."
        last = self._segments[-1] if self._segments else None
        if last and last.path is None and last.used + need <= len(last.data):
            return last
        size = max(need, self.segment_bytes)
        if self.folder is None:  # up to the last byte of the budget: nothing can make room
            size = max(need, min(size, self.ram_bytes - self.ram_used))
        self._make_room(size)
        # Memory of this size comes from the system untouched: what is never written is never taken.
        self._segments.append(_Segment(np.empty(size, np.uint8)))
        return self._segments[-1]

    def _make_room(self, size: int) -> None:
        "Spill segments, the newest first, until `size` more bytes fit into the budget."
        while self.ram_used + size > self.ram_bytes:
            inside = [segment for segment in self._segments if segment.path is None and segment.used]
            if self.folder is None or not inside:
                raise FramesFull(
                    f"frames: {self.ram_used + size} bytes exceed the memory for them, {self.ram_bytes} bytes"
                    f"{' (there is no folder to spill to)' if self.folder is None else ''}: "
                    "raise --replay_ram or lower --replay_steps"
                )
            self._spill(inside[-1])

    def _spill(self, segment: _Segment) -> None:
        "Move a segment from memory to a file."
        path = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix="frames-", suffix=".zst", dir=self.folder)
            # Written, and only then mapped: on a full disk a write fails with an error, and a store to a
            # mapped page kills the process.
            with open(handle, "wb") as file:
                file.write(segment.data[: segment.used])
            # This mapping, unlike Python's own, keeps no file open: there may be more segments than a
            # process may have files.
            mapped = torch.from_file(path, shared=False, size=segment.used, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            if path is not None:
                Path(path).unlink(missing_ok=True)
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise FramesFull(
                f"frames: cannot write {segment.used} bytes to {self.folder}, {free} are free there "
                f"({error}): free some space, raise --replay_ram or lower --replay_steps"
            ) from error
        segment.data, segment.path = mapped.numpy(), path

    # ----------------------------------------------------------------------------------------- out

    def read(self, handle: int, first: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Frames [first, first + count) of a sequence: (count, H, W, C) uint8, written to `out` if given.

        Decompresses only the chunks in which they lie. Raises KeyError for a handle that is not held,
        ValueError for frames that the sequence does not have.
        """
        segment, begin, frames = self._places[handle]
        if first < 0 or count < 1 or first + count > frames:
            raise ValueError(f"frames {first} to {first + count} are not in a sequence of {frames}")
        if out is None:
            out = np.empty((count, *self.frame_shape), np.uint8)
        bounds = self._bounds(segment, begin, frames)
        for c in range(first // self.chunk, (first + count - 1) // self.chunk + 1):
            chunk = self._decompress(segment.data[bounds[c] : bounds[c + 1]])
            low, high = max(first, c * self.chunk), min(first + count, (c + 1) * self.chunk)
            out[low - first : high - first] = chunk[low - c * self.chunk : high - c * self.chunk]
        return out

    def _bounds(self, segment: _Segment, begin: int, frames: int) -> list[int]:
        "Where the chunks of a sequence lie: c in [bounds[c], bounds[c + 1]), behind the table of sizes."
        table = begin + 4 * math.ceil(frames / self.chunk)
        return np.cumsum([table, *segment.data[begin:table].view("<u4")]).tolist()

    def _decompress(self, data: np.ndarray) -> np.ndarray:
        "Frames of one chunk."
        return np.frombuffer(self._zstd.decompress(data), np.uint8).reshape(-1, *self.frame_shape)

    def drop(self, handle: int) -> None:
        """Forget a sequence, or raise KeyError. A segment of dropped ones gives back its memory, or file."""
        segment, _, _ = self._places.pop(handle)
        segment.live -= 1
        if not segment.live:
            self._segments.remove(segment)
            segment.delete()

    def close(self) -> None:
        """Forget everything: no memory, and no file in the folder, is left."""
        for segment in self._segments:
            segment.delete()
        self._segments, self._places = [], {}

    # --------------------------------------------------------------------------------- save and load

    def pack(self, handles: list[int]) -> dict:
        """Sequences as they are compressed, one behind another: tensors and numbers only, for a checkpoint.

        A copy: later drops do not reach it. Loads with `torch.load(..., weights_only=True)`. Raises KeyError
        for a handle that is not held.
        """
        places = [self._places[handle] for handle in handles]
        ends = [self._bounds(*place)[-1] for place in places]
        records = [segment.data[begin:end] for (segment, begin, _), end in zip(places, ends)]
        return {
            "frame_shape": list(self.frame_shape),
            "chunk": self.chunk,
            "frames": torch.tensor([frames for _, _, frames in places], dtype=torch.int64),
            "bytes": torch.tensor([len(record) for record in records], dtype=torch.int64),
            "data": torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *records])),
        }

    def unpack(self, packed: dict, first: int = 0) -> Iterator[int]:
        """Add what `pack` packed, from its sequence number `first` on: lazily, one for each handle that is asked for.

        Errors come then, too: ValueError for other frames or chunks, FramesFull as `add`. Budget and folder may differ.
        """
        theirs, ours = (tuple(packed["frame_shape"]), packed["chunk"]), (self.frame_shape, self.chunk)
        if theirs != ours:
            raise ValueError(
                f"the saved frames are {theirs[0]} in chunks of {theirs[1]}, not {ours[0]} in {ours[1]}"
            )
        data, end = packed["data"].numpy(), packed["bytes"][:first].sum().item()
        for size, frames in zip(packed["bytes"][first:].tolist(), packed["frames"][first:].tolist()):
            begin, end = end, end + size
            yield self._append(data[begin:end], frames)


def expected_bytes(benchmark: str, frames: int, frame_shape: tuple[int, ...]) -> int:
    """Compressed bytes that so many frames of a benchmark come to, as measured; uncompressed where it was not.

    A replay of S steps in M trajectories holds S + M frames.
    """
    return frames * BYTES_PER_FRAME.get(benchmark.removesuffix("-rescaled"), math.prod(frame_shape))


def check_room(expected: int, ram_bytes: int, folder) -> tuple[int, int]:
    """How many of `expected` bytes would lie in memory and how many on disk; before a run, and to print.

    Raises ValueError, one line, where they do not fit: the memory that is free is the caller's to check.
    """
    spilled, free = max(0, expected - ram_bytes), 0
    if folder is not None:  # it need not exist yet: the nearest folder above it does
        folder = Path(folder).absolute()
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
    if spilled > free:
        raise ValueError(
            f"frames come to about {expected / 1e9:.1f} GB, more than --replay_ram ({ram_bytes / 1e9:.1f} GB) "
            f"and {free / 1e9:.1f} GB free on disk: raise --replay_ram, free some space or lower --replay_steps"
        )
    return expected - spilled, spilled


def _example() -> None:
    "A square that wanders over a still background: in memory, on disk, a window of it, and dropped."
    background = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8).repeat(4, 0).repeat(4, 1)

    def rollout(n: int) -> np.ndarray:
        frames_NHWC = background[None].repeat(n, 0)
        for t, frame in enumerate(frames_NHWC):
            frame[t % 56 : t % 56 + 8, 20:28] = 255
        return frames_NHWC

    with tempfile.TemporaryDirectory() as folder:
        store = FrameStore((64, 64, 3), ram_bytes=24_000, folder=folder)
        first = store.add(rollout(100))
        print(f"100 frames of 64 x 64 x 3: {rollout(100).nbytes} bytes raw, {store.ram_used} compressed")
        window = store.read(first, 40, 50)
        print(f"frames 40 to 89, from chunks 1 and 2 of 4: exact {(window == rollout(100)[40:90]).all()}")

        def where() -> str:
            on_disk = f"{store.disk_used} on disk in {len(os.listdir(folder))} files"
            return f"{store.ram_used} bytes in memory, {on_disk}"

        handles = [first] + [store.add(rollout(100)) for _ in range(9)]
        print(f"10 sequences, 24000 bytes of memory: {where()}")
        print(f"read from disk: exact {(store.read(handles[-2], 0, 100) == rollout(100)).all()}")
        for handle in handles[:5]:
            store.drop(handle)
        print(f"the oldest 5 dropped:                {where()}")
        handles = handles[5:] + [store.add(rollout(100)) for _ in range(5)]
        print(f"5 new ones, in memory again:         {where()}")
        store.close()
        try:
            FrameStore((64, 64, 3), ram_bytes=1000).add(rollout(100))
        except FramesFull as error:
            print("refused:", error)


if __name__ == "__main__":
    _example()
