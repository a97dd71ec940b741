"""frame_store.py: byte for byte, only the chunks that a window touches, memory and disk accounted for."""

import csv
import gc
import io
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import frame_store
from runtime.frame_store import FramesFull, FrameStore, check_room, expected_bytes

SHAPE = (12, 10, 3)
NOISE_BYTES = 12 * 10 * 3  # noise does not compress: about so many bytes a frame


def noise(n, rng):
    return rng.integers(0, 256, (n, *SHAPE), np.uint8)


def scene(n, rng, shape=(64, 64, 3)):
    "Like a game: coarse tiles that scroll now and then, and two sprites that move."
    tiles = rng.integers(0, 256, (8, 16, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    frames = np.empty((n, *shape), np.uint8)
    for t in range(n):
        frames[t] = np.roll(tiles, -(t // 3), 1)[: shape[0], : shape[1]]
        frames[t, 40:48, (2 * t) % 56 : (2 * t) % 56 + 8] = rng.integers(0, 256, 3)
    return frames


def files(folder):
    return sorted(path.name for path in folder.glob("*"))


def check_all(store, held):
    "Everything in `held`, {handle: frames}, comes back byte for byte."
    assert len(store) == len(held)
    for handle, frames in held.items():
        np.testing.assert_array_equal(store.read(handle, 0, len(frames)), frames)


@pytest.mark.parametrize("make", [noise, scene])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
def test_every_window_is_byte_for_byte(make, n):
    "Windows from the start, the middle and the end, at, before and behind a chunk's edge; a short last chunk."
    rng = np.random.default_rng(n)
    frames = make(n, rng)
    store = FrameStore(frames.shape[1:])
    store.add(make(5, rng))
    handle = store.add(frames.copy())
    store.add(make(40, rng))
    edges = sorted({x for x in (0, 1, 31, 32, 33, 50, 63, 64, 65, n - 1, n) if 0 <= x <= n})
    for first in edges:
        for last in edges:
            if last > first:
                window = store.read(handle, first, last - first)
                assert window.dtype == np.uint8
                np.testing.assert_array_equal(window, frames[first:last])


def test_only_the_chunks_that_a_window_touches_are_decompressed():
    store = FrameStore(SHAPE, chunk=8)
    handle = store.add(noise(100, np.random.default_rng(0)))
    calls, decompress = [], store._decompress
    store._decompress = lambda data: (calls.append(len(data)), decompress(data))[1]
    for first, count, chunks in [
        (0, 8, 1),
        (0, 9, 2),
        (7, 2, 2),
        (8, 8, 1),
        (96, 4, 1),
        (15, 18, 4),
        (0, 100, 13),
    ]:
        calls.clear()
        store.read(handle, first, count)
        assert len(calls) == chunks, (first, count)


def test_reads_into_an_array_that_is_given_and_adds_a_copy():
    rng = np.random.default_rng(0)
    frames = noise(40, rng)
    kept, out = frames.copy(), np.zeros((3, 12, *SHAPE), np.uint8)
    store = FrameStore(SHAPE)
    handle = store.add(frames)
    frames[:] = 7  # a collector writes its next rollout into the same buffer
    store.read(handle, 25, 10, out=out[1, :10])
    np.testing.assert_array_equal(out[1, :10], kept[25:35])
    assert not out[0].any() and not out[2].any() and not out[1, 10:].any()
    out[:] = 9
    np.testing.assert_array_equal(store.read(handle, 0, 40), kept)
    every_other = store.add(kept[::2])  # not contiguous
    np.testing.assert_array_equal(store.read(every_other, 0, 20), kept[::2])


def test_compresses_what_looks_like_a_game():
    rng = np.random.default_rng(0)
    store = FrameStore((64, 64, 3))
    for _ in range(5):
        store.add(scene(320, rng))
    assert store.ram_used < 5 * 320 * 64 * 64 * 3 / 20
    one_by_one = FrameStore((64, 64, 3), chunk=1)
    one_by_one.add(scene(320, rng))
    assert one_by_one.ram_used > 2 * store.ram_used / 5  # that many at once is what makes it small


def test_spills_reads_back_and_deletes(tmp_path):
    "A replay's life on a small budget: content, budget, files and sums at every step, oldest dropped first."
    rng = np.random.default_rng(0)
    budget = 60_000
    store = FrameStore(SHAPE, chunk=8, ram_bytes=budget, folder=tmp_path, block_bytes=7_000)
    held, most_files = {}, 0
    for number in range(300):
        frames = noise(int(rng.integers(1, 30)), rng)
        held[store.add(frames)] = frames
        limit = 6 if number < 100 or number > 200 else 60
        while len(held) > limit:
            oldest = next(iter(held))
            store.drop(oldest)
            del held[oldest]
        assert store.ram_used <= budget
        on_disk = [path.stat().st_size for path in tmp_path.iterdir()]
        assert store.disk_used == sum(on_disk)
        most_files = max(most_files, len(on_disk))
        live = sum(len(f) for f in held.values()) * NOISE_BYTES
        # Little is held that was dropped: the rest of the oldest block, and tables and headers.
        assert live < store.ram_used + store.disk_used < 1.1 * live + 2 * 7_000 + 29 * NOISE_BYTES
        if number % 20 == 0:
            check_all(store, held)
    assert most_files > 10
    assert store.disk_used == 0, "what fits into memory again is not on disk"
    check_all(store, held)
    for handle in list(held):
        store.drop(handle)
    assert len(store) == store.ram_used == store.disk_used == 0 and not files(tmp_path)


def test_the_newest_spill_and_no_frame_is_written_that_fits(tmp_path):
    rng = np.random.default_rng(0)
    store = FrameStore(
        SHAPE, ram_bytes=8 * 32 * NOISE_BYTES + 2000, folder=tmp_path, block_bytes=32 * NOISE_BYTES
    )
    handles, written, spill = [], [], store._spill
    store._spill = lambda block: (written.append(block.used), spill(block))
    for _ in range(12):
        handles.append(store.add(noise(30, rng)))
    assert [store._places[h][0].path is None for h in handles] == [True] * 7 + [False] * 4 + [True]
    for _ in range(40):  # as many dropped as added: of seven blocks in eleven nothing is written
        store.drop(handles.pop(0))
        handles.append(store.add(noise(30, rng)))
    assert 4 + 40 * 3 / 12 < len(written) < 4 + 40 * 6 / 12


def test_memory_is_given_back():
    "Whole blocks are freed once all in them is dropped, in whatever order; the accounting says so."
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, block_bytes=4 * 33 * NOISE_BYTES)
    handles = [store.add(noise(32, rng)) for _ in range(12)]
    assert [len(store._blocks), len({id(p[0]) for p in store._places.values()})] == [3, 3]
    full = store.ram_used
    memory = [weakref.ref(block.data) for block in store._blocks]
    for handle in handles[4:7]:
        store.drop(handle)
    assert store.ram_used == full  # one sequence keeps its block
    store.drop(handles[7])
    gc.collect()
    assert store.ram_used == pytest.approx(full * 2 / 3, rel=0.01)
    assert [array() is None for array in memory] == [False, True, False]
    assert len(store) == 8


def test_memory_only_is_used_to_the_last_byte_and_then_refused():
    rng = np.random.default_rng(0)
    store, held = FrameStore(SHAPE, ram_bytes=100_000), {}
    with pytest.raises(FramesFull) as caught:
        for _ in range(1000):
            frames = noise(int(rng.integers(1, 9)), rng)
            held[store.add(frames)] = frames
    message = str(caught.value)
    assert "raise --replay_ram or lower --replay_steps" in message and "\n" not in message
    assert "no folder to spill to" in message and "exceed" in message
    assert 100_000 - 9 * NOISE_BYTES < store.ram_used <= 100_000
    check_all(store, held)  # as it was
    for handle in list(held)[: len(held) // 2]:
        store.drop(handle)
        del held[handle]
    frames = noise(4, rng)
    held[store.add(frames)] = frames
    check_all(store, held)


def test_a_sequence_beyond_the_whole_budget_is_refused(tmp_path):
    store = FrameStore(SHAPE, ram_bytes=5000, folder=tmp_path)
    small = noise(2, np.random.default_rng(0))
    handle = store.add(small)
    with pytest.raises(FramesFull, match="raise --replay_ram"):
        store.add(noise(40, np.random.default_rng(0)))
    check_all(store, {handle: small})


def test_a_full_disk_is_one_line_and_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    "On Linux a real one: /dev/full takes every byte and says there is no space."
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, ram_bytes=30_000, folder=tmp_path)
    make = frame_store.tempfile.mkstemp

    def full(**arguments):
        handle, path = make(**arguments)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), path

    monkeypatch.setattr(frame_store.tempfile, "mkstemp", full)
    held = {}
    with pytest.raises(
        FramesFull, match="No space left.*raise --replay_ram or lower --replay_steps"
    ) as caught:
        for _ in range(100):
            frames = noise(8, rng)
            held[store.add(frames)] = frames
    assert isinstance(caught.value, OSError) and "\n" not in str(caught.value)
    assert not files(tmp_path) and store.disk_used == 0 and len(held) >= 5
    check_all(store, held)
    monkeypatch.undo()  # somebody freed some space
    for _ in range(10):
        frames = noise(8, rng)
        held[store.add(frames)] = frames
    assert files(tmp_path)
    check_all(store, held)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    store = FrameStore(SHAPE, ram_bytes=30_000, folder=tmp_path / "frames")
    assert not (tmp_path / "frames").exists()  # until there is something to put into it
    (tmp_path / "frames").write_text("a file in its place")
    with pytest.raises(FramesFull, match="cannot write .* bytes to .*frames"):
        for _ in range(100):
            store.add(noise(8, np.random.default_rng(0)))


def test_what_a_killed_process_left_is_removed(tmp_path):
    script = (
        "import os, numpy as np; from runtime.frame_store import FrameStore\n"
        f"store = FrameStore((12, 10, 3), ram_bytes=20_000, folder={str(tmp_path)!r})\n"
        "for i in range(20): store.add(np.random.default_rng(i).integers(0, 256, (8, 12, 10, 3), np.uint8))\n"
        "os._exit(9)"
    )
    root = Path(frame_store.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert done.returncode == 9 and len(files(tmp_path)) > 5
    (tmp_path / "notes.txt").write_text("somebody else's")
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, ram_bytes=20_000, folder=tmp_path)
    assert files(tmp_path) == ["notes.txt"]
    held = {store.add(f): f for f in [noise(8, rng) for _ in range(20)]}
    # A second store in the same folder, by mistake: the first one loses its names, and no frame.
    FrameStore(SHAPE, folder=tmp_path)
    assert files(tmp_path) == ["notes.txt"]
    check_all(store, held)
    store.close()
    assert files(tmp_path) == ["notes.txt"] and len(store) == store.ram_used == 0


def test_many_blocks_keep_no_files_open(tmp_path):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("only Linux counts them there")
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, ram_bytes=20_000, folder=tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        store.add(noise(8, rng))
    assert len(files(tmp_path)) > 40 and len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("ram_then", [15_000, 1 << 30])
def test_packed_sequences_round_trip(tmp_path, ram_then):
    "Through a file of plain data, into another budget and folder; life goes on."
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, chunk=8, ram_bytes=30_000, folder=tmp_path / "old")
    held = {}
    for _ in range(60):
        frames = noise(int(rng.integers(1, 20)), rng)
        held[store.add(frames)] = frames
    for handle in list(held)[:31]:
        store.drop(handle)
        del held[handle]
    assert store.disk_used and store.ram_used
    file = io.BytesIO()
    torch.save(store.pack(list(held)), file)
    live = sum(len(f) for f in held.values()) * NOISE_BYTES
    assert file.tell() < 1.1 * live + 4000  # what is live, not what is reserved or was dropped
    store.close()

    file.seek(0)
    other = FrameStore(SHAPE, chunk=8, ram_bytes=ram_then, folder=tmp_path / "new")
    others = [noise(3, rng)]
    now = {other.add(others[0]): others[0]}
    handles = list(other.unpack(torch.load(file, weights_only=True), first=4))
    now |= dict(zip(handles, list(held.values())[4:], strict=True))
    check_all(other, now)
    assert other.ram_used <= ram_then and bool(files(tmp_path / "new")) == (ram_then == 15_000)
    for _ in range(30):
        frames = noise(9, rng)
        now[other.add(frames)] = frames
        oldest = next(iter(now))
        other.drop(oldest)
        del now[oldest]
        assert other.ram_used <= ram_then
        check_all(other, now)
    assert other.ram_used + other.disk_used == sum(block.used for block in other._blocks)
    assert all(block.live > 0 for block in other._blocks)
    assert sum(block.live for block in other._blocks) == len(other)


def test_what_is_packed_is_a_copy(tmp_path):
    "Memory and files that it came from are written on, dropped and deleted behind it."
    rng = np.random.default_rng(0)
    store = FrameStore(SHAPE, ram_bytes=30_000, folder=tmp_path / "old")
    held = {store.add(f): f for f in [noise(8, rng) for _ in range(20)]}
    packed = store.pack(list(held))
    for _ in range(10):
        store.add(noise(8, rng))
    store.close()
    assert not files(tmp_path / "old")
    other = FrameStore(SHAPE)
    check_all(other, dict(zip(other.unpack(packed), held.values(), strict=True)))
    assert list(other.unpack(other.pack([]))) == [] and len(other) == 20
    with pytest.raises(KeyError):
        other.pack([99])


def test_packed_sequences_of_other_frames_are_refused():
    packed = FrameStore(SHAPE).pack([])
    with pytest.raises(
        ValueError, match=r"saved frames are \(12, 10, 3\) in chunks of 32, not \(4, 4, 3\) in 32"
    ):
        list(FrameStore((4, 4, 3)).unpack(packed))
    with pytest.raises(ValueError, match="in chunks of 32, not .* in 16"):
        list(FrameStore(SHAPE, chunk=16).unpack(packed))


def test_mistakes_raise():
    store = FrameStore(SHAPE)
    handle = store.add(np.zeros((5, *SHAPE), np.uint8))
    for wrong in (
        np.zeros((5, 12, 10, 4), np.uint8),
        np.zeros((5, *SHAPE), np.float32),
        np.zeros(SHAPE, np.uint8),
    ):
        with pytest.raises(ValueError, match=r"frames must be \(N, 12, 10, 3\) uint8"):
            store.add(wrong)
    with pytest.raises(ValueError, match="N at least 1"):
        store.add(np.zeros((0, *SHAPE), np.uint8))
    for first, count in [(-1, 2), (0, 6), (5, 1), (2, 0)]:
        with pytest.raises(ValueError, match="are not in a sequence of 5"):
            store.read(handle, first, count)
    store.drop(handle)
    with pytest.raises(KeyError):
        store.drop(handle)
    with pytest.raises(KeyError):
        store.read(handle, 0, 1)
    with pytest.raises(ValueError, match="must be at least 1, got"):
        FrameStore(SHAPE, ram_bytes=0)


def test_the_estimate_before_a_run(tmp_path, monkeypatch):
    "What fits into memory and disk is said, what does not is refused in one line."
    per_frame = frame_store.BYTES_PER_FRAME["procgen-easy"]
    assert expected_bytes("procgen-easy", 1000, (64, 64, 3)) == 1000 * per_frame
    assert expected_bytes("procgen-easy-rescaled", 1000, (64, 64, 3)) == 1000 * per_frame
    assert expected_bytes("something new", 1000, (64, 64, 3)) == 1000 * 12_288
    monkeypatch.setattr(frame_store.shutil, "disk_usage", lambda folder: _Usage(free=500))
    assert check_room(800, 1000, None) == (800, 0)
    assert check_room(1400, 1000, tmp_path / "not" / "yet" / "made") == (1000, 400)
    for folder in (tmp_path, None):
        with pytest.raises(
            ValueError, match="raise --replay_ram, free some space or lower --replay_steps"
        ) as caught:
            check_room(1600, 1000, folder)
        assert "\n" not in str(caught.value)


def test_the_estimate_is_the_one_measured():
    "The dearest policy's mean over the games of each benchmark, within a tenth."
    root = Path(frame_store.__file__).parent.parent
    with open(root / "results" / "replay_frames.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["game"] == "all"]
    for benchmark in ("procgen-easy", "procgen-memory-hard", "atari"):
        measured = max(int(row["bytes_per_frame"]) for row in rows if row["benchmark"] == benchmark)
        assert frame_store.BYTES_PER_FRAME[benchmark] == pytest.approx(measured, rel=0.1)


class _Usage:
    def __init__(self, free):
        self.free = free
