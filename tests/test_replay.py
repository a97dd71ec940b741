"""replay.py: against a list of trajectories, and the traps of masks, cuts, capacity and NaN."""

import gc
import io
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import replay as replay_module
from replay import Replay
from runtime.frame_store import FrameStore

DISCRETE = {"observation_dim": 2, "action_shape": (), "action_dtype": np.int64}


def trajectory(steps, rng, number=0, action_shape=(), start=None, terminated=None):
    "Random content; arguments of `Replay.add`, by name."
    shape = (steps, *action_shape)
    return {
        "obs": rng.standard_normal((steps + 1, 2)).astype(np.float32),
        "action": rng.standard_normal(shape).astype(np.float32)
        if action_shape
        else rng.integers(9, size=shape),
        "reward": rng.standard_normal(steps).astype(np.float32),
        "terminated": bool(rng.integers(2)) if terminated is None else terminated,
        "start": int(rng.integers(100)) if start is None else start,
        "task": number,
    }


class SlowReplay:
    "The judge: a list, from which the oldest are dropped until the next one fits."

    def __init__(self, capacity_steps=None, capacity_trajectories=None):
        self.capacity_steps, self.capacity_trajectories = capacity_steps, capacity_trajectories
        self.held = []

    def add(self, new):
        if self.capacity_steps is not None:
            while sum(len(t["reward"]) for t in self.held) + len(new["reward"]) > self.capacity_steps:
                self.held.pop(0)
        if self.capacity_trajectories is not None:
            self.held = self.held[max(0, len(self.held) + 1 - self.capacity_trajectories) :]
        self.held.append(new)


def slow_window(held, task, time, context):
    "The window of one trajectory that begins at time index `time`, built step by step, without padding."
    (one,) = [t for t in held if t["task"] == task]
    length, offset = len(one["reward"]), time - one["start"]
    steps = range(offset, min(offset + context, length))
    return {
        "obs": [one["obs"][t] for t in [*steps, steps[-1] + 1]],
        "time": [one["start"] + t for t in [*steps, steps[-1] + 1]],
        "action": [one["action"][t] for t in steps],
        "reward": [one["reward"][t] for t in steps],
        "done": [one["terminated"] and t == length - 1 for t in steps],
    }


def check_window(batch, b, held, context):
    "Row b of a batch is exactly what the slow loop cuts, and zeros behind it."
    want = slow_window(held, batch.task_B[b].item(), batch.time_BT[b, 0].item(), context)
    steps = len(want["reward"])
    assert batch.mask_BT[b].tolist() == [True] * steps + [False] * (batch.mask_BT.shape[1] - steps)
    for name, padded, count in (
        ("obs", batch.obs_BTO[b], steps + 1),
        ("time", batch.time_BT[b], steps + 1),
        ("action", batch.action_BT[b], steps),
        ("reward", batch.reward_BT[b], steps),
        ("done", batch.done_BT[b], steps),
    ):
        np.testing.assert_array_equal(padded[:count].numpy(), np.array(want[name]), err_msg=name)
        assert not padded[count:].any(), f"{name} is not zero in padding"


@pytest.mark.parametrize("by", [("capacity_steps",), ("capacity_trajectories",), ("both", "capacities")])
def test_equals_a_list_of_trajectories(by):
    "Many sizes, lengths that drift, and evictions: the content is always that of the list."
    for seed in range(60):
        rng = np.random.default_rng(seed)
        longest = int(rng.integers(1, 13))
        capacity = {
            "capacity_steps": int(rng.integers(longest, 70)),
            "capacity_trajectories": int(rng.integers(1, 15)),
        }
        capacity = {name: x for name, x in capacity.items() if name in by or len(by) == 2}
        action_shape = [(), (3,)][seed % 2]
        replay = Replay(2, action_shape, [np.int64, np.float32][seed % 2], longest, **capacity, seed=seed)
        slow, low, high = SlowReplay(**capacity), 1, longest
        for number in range(60):
            if number % 20 == 0:
                low = int(rng.integers(1, longest + 1))
                high = int(rng.integers(low, longest + 1))
            new = trajectory(int(rng.integers(low, high + 1)), rng, number, action_shape)
            slow.add(new)
            replay.add(**new)
            assert len(replay) == len(slow.held)
            assert replay.num_steps == sum(len(t["reward"]) for t in slow.held)
            assert replay.total_added == number + 1 and replay.oldest == slow.held[0]["task"]
            state = replay.state_dict()
            for name in ("obs", "action", "reward"):
                np.testing.assert_array_equal(state[name], np.concatenate([t[name] for t in slow.held]))
            assert state["task"].tolist() == [t["task"] for t in slow.held]
            if number % 10 == 9:
                context = int(rng.integers(1, longest + 3))
                batch = replay.sample(6, context)
                assert batch.mask_BT.shape[1] == batch.mask_BT.sum(1).max()  # trimmed to the longest
                assert torch.equal(batch.real_S, batch.mask_BT.flatten().nonzero().flatten())
                for b in range(6):
                    check_window(batch, b, slow.held, context)


def test_a_seed_draws_the_same_windows_sorted_by_length_stably():
    "The judge draws from a list in the same way, then sorts (window, place): equal lengths keep their order."
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=9, capacity_trajectories=12, seed=4)
    held, draws, ties = [], np.random.default_rng(4), 0
    for number in range(40):
        held = [*held[-11:], trajectory(int(rng.integers(1, 10)), rng, number)]
        replay.add(**held[-1])
        batch = replay.sample(10, context=6)
        drawn = [held[i] for i in draws.integers(len(held), size=10)]
        lengths = np.array([len(t["reward"]) for t in drawn])
        windows = np.minimum(lengths, 6)
        firsts = draws.integers(lengths - windows + 1)
        order = sorted(range(10), key=lambda b: (-windows[b], b))
        assert batch.mask_BT.sum(1).tolist() == [windows[b] for b in order]
        assert batch.task_B.tolist() == [drawn[b]["task"] for b in order]
        assert batch.time_BT[:, 0].tolist() == [drawn[b]["start"] + firsts[b] for b in order]
        ties += len(set(windows)) < 10
    assert ties > 20


def test_segments_cannot_be_written_to():
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=5, capacity_steps=50)
    replay.add(**trajectory(5, rng))
    again = Replay(**DISCRETE, max_length=5, capacity_steps=50)
    again.load_state_dict(replay.state_dict())
    for one in (replay, again):
        (segment,) = one._segments.values()
        for array in (segment.obs, segment.action, segment.reward):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
            assert array.base is None  # memory of its own: no larger array is kept alive
        with pytest.raises(AttributeError):
            segment.reward = np.zeros(5)


def assert_same(a, b):
    "Two batches are equal, field by field."
    for name, one, other in zip(a._fields, a, b, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name


def test_groups_of_windows_are_trimmed_to_their_longest():
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=9, capacity_trajectories=12)
    for number in range(12):
        replay.add(**trajectory(int(rng.integers(1, 10)), rng, number))
    batch = replay.sample(10, context=7)
    assert batch.lengths == tuple(batch.mask_BT.sum(1).tolist())
    for first, last in ((0, 10), (0, 3), (3, 4), (4, 10)):
        part, steps = batch.windows(first, last), batch.lengths[first]
        assert part.lengths == batch.lengths[first:last] and part.mask_BT.shape == (last - first, steps)
        assert torch.equal(part.real_S, part.mask_BT.flatten().nonzero().flatten())
        for name in ("action_BT", "reward_BT", "done_BT", "mask_BT"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[first:last, :steps])
        for name in ("obs_BTO", "time_BT"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[first:last, : steps + 1])


def test_shapes_and_types():
    replay = Replay(5, (3,), np.float32, 10, capacity_trajectories=4)
    for steps in (4, 10):
        replay.add(np.ones((steps + 1, 5)), np.ones((steps, 3)), np.ones(steps), True, 0, 1)
    batch = replay.sample(64, context=7)
    assert batch.image_BT is None
    assert {
        name: (tuple(x.shape), x.dtype) for name, x in batch._asdict().items() if isinstance(x, torch.Tensor)
    } == {
        "obs_BTO": ((64, 8, 5), torch.float32),
        "action_BT": ((64, 7, 3), torch.float32),
        "reward_BT": ((64, 7), torch.float32),
        "done_BT": ((64, 7), torch.bool),
        "mask_BT": ((64, 7), torch.bool),
        "real_S": ((int(batch.mask_BT.sum()),), torch.int64),
        "weight_S": ((int(batch.mask_BT.sum()),), torch.float32),
        "time_BT": ((64, 8), torch.int64),
        "task_B": ((64,), torch.int64),
    }
    assert set(batch.mask_BT.sum(1).tolist()) == {4, 7}


def test_time_alignment_by_hand():
    "o_t+1 shows a_t and r_t, also in a window from the middle; done is the terminal step's, and no other's."
    replay = Replay(**DISCRETE, max_length=6, capacity_steps=50)
    action, reward = np.arange(10, 16), np.arange(20, 26).astype(np.float32)
    obs = np.zeros((7, 2), np.float32)
    obs[1:, 0], obs[1:, 1] = action, reward
    replay.add(obs, action, reward, terminated=True, start=40, task=0)
    seen = set()
    for _ in range(60):
        batch = replay.sample(1, context=4)
        np.testing.assert_array_equal(batch.obs_BTO[0, 1:, 0], batch.action_BT[0])
        np.testing.assert_array_equal(batch.obs_BTO[0, 1:, 1], batch.reward_BT[0])
        start = batch.time_BT[0, 0].item()
        assert batch.time_BT[0].tolist() == list(range(start, start + 5))
        assert batch.action_BT[0, 0] == 10 + start - 40
        assert batch.done_BT[0].tolist() == [False, False, False, start == 42]
        if start > 40:  # the true ones before the window, not zeros
            assert batch.obs_BTO[0, 0].tolist() == [9 + start - 40, 19 + start - 40]
        seen.add(start)
    assert seen == {40, 41, 42}


def test_truncated_rollouts_and_cut_segments_have_no_done():
    rng = np.random.default_rng(0)
    rollout = trajectory(9, rng)
    replay = Replay(**DISCRETE, max_length=4, capacity_trajectories=10)
    for number, (first, last) in enumerate([(0, 4), (4, 8), (8, 9)]):
        replay.add(
            rollout["obs"][first : last + 1],
            rollout["action"][first:last],
            rollout["reward"][first:last],
            terminated=last == 9,
            start=first,
            task=number,
        )
    batch = replay.sample(200, context=100)
    for b in range(200):
        first, last = [(0, 4), (4, 8), (8, 9)][batch.task_B[b]]
        steps = last - first
        assert batch.mask_BT[b].sum() == steps  # exactly L ones: the last observation is no step
        assert batch.done_BT[b].nonzero().flatten().tolist() == ([0] if last == 9 else [])
        np.testing.assert_array_equal(batch.obs_BTO[b, : steps + 1], rollout["obs"][first : last + 1])
        assert batch.time_BT[b, : steps + 1].tolist() == list(range(first, last + 1))


def test_uniform_over_trajectories_and_over_starts():
    "A long trajectory is drawn as often as a short one; in it every start that leaves a full window is."
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=13, capacity_trajectories=8, seed=3)
    lengths = [1, 2, 3, 4, 5, 13, 13, 13]
    for number in range(12):  # the first four are evicted
        replay.add(**trajectory(lengths[number % 8], rng, number, start=0))
    batch = replay.sample(16_000, context=4)
    counts = np.bincount(batch.task_B, minlength=12)
    assert counts[:4].sum() == 0
    # Chi-square with 7 and 9 degrees of freedom: above 24.3 and 27.9 with a chance of 1 in 1000.
    assert ((counts[4:] - 2000) ** 2 / 2000).sum() < 24.3
    starts = np.bincount(batch.time_BT[:, 0][batch.task_B == 6], minlength=10)
    assert len(starts) == 10
    expected = starts.sum() / 10
    assert ((starts - expected) ** 2 / expected).sum() < 27.9


def test_capacity_is_exact_both_ways():
    rng = np.random.default_rng(0)
    by_steps = Replay(**DISCRETE, max_length=10, capacity_steps=100)
    by_count = Replay(**DISCRETE, max_length=10, capacity_trajectories=10)
    for number in range(10):
        by_steps.add(**trajectory(10, rng, number))
        by_count.add(**trajectory(10, rng, number))
    assert (by_steps.num_steps, len(by_steps)) == (100, 10)
    assert (by_count.num_steps, len(by_count)) == (100, 10)
    by_steps.add(**trajectory(1, rng, 10))  # one step too many costs one trajectory
    by_count.add(**trajectory(1, rng, 10))
    assert (by_steps.num_steps, len(by_steps)) == (91, 10)
    assert (by_count.num_steps, len(by_count)) == (91, 10)
    by_steps.add(**trajectory(9, rng, 11))  # fills it up, and evicts nothing
    assert (by_steps.num_steps, len(by_steps)) == (100, 11)
    for number in range(250):  # the worst case: as many trajectories as steps
        by_steps.add(**trajectory(1, rng, number))
    assert (by_steps.num_steps, len(by_steps)) == (100, 100)
    both = Replay(**DISCRETE, max_length=10, capacity_steps=100, capacity_trajectories=20)
    for number in range(50):
        both.add(**trajectory(10, rng, number))
    assert (both.num_steps, len(both)) == (100, 10)
    for number in range(50):
        both.add(**trajectory(2, rng, number))
    assert (both.num_steps, len(both)) == (40, 20)
    for number in range(50):
        both.add(**trajectory(5, rng, number))
    assert (both.num_steps, len(both)) == (100, 20)  # both full


@pytest.mark.parametrize(
    "capacity",
    [
        {"capacity_steps": 3000},
        {"capacity_trajectories": 3000},
        {"capacity_steps": 30_000, "capacity_trajectories": 3000},
    ],
)
@pytest.mark.parametrize("lengths", [(1, 1), (10, 10), (1, 20), (20, 20)])
def test_memory_stays_within_the_bound(capacity, lengths):
    "As tracemalloc measures it at its highest, with short and long segments, until all have left once."
    arguments = {"observation_dim": 7, "action_shape": (4,), "action_dtype": np.float32, "max_length": 20}
    obs, action, reward = np.ones((21, 7), np.float32), np.ones((20, 4), np.float32), np.ones(20, np.float32)
    rng = np.random.default_rng(0)
    count = 2 * min(capacity.values())
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    replay = Replay(**arguments, **capacity)
    for number in range(count):
        T = int(rng.integers(lengths[0], lengths[1] + 1))
        replay.add(obs[: T + 1], action[:T], reward[:T], True, 1000 + number, 1000 + number)
    now, most = (size - before for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    assert replay.oldest > 0
    bound = Replay.memory_bytes(**arguments, **capacity)
    assert most < bound + 250_000  # Python itself keeps up to 2,000 freed tuples for later
    if (replay.num_steps, len(replay)) == (replay._most_steps, replay._most_segments):
        assert now > 0.75 * bound  # where it is full both ways, the bound is near


def test_the_bound_counts_observations_actions_rewards_and_overhead():
    "By hand; and the memory-hard replay, 80 million steps with 20 numbers beside each image, whose data are 7.4 GB."
    arguments = {"observation_dim": 20, "action_shape": (), "action_dtype": np.int64, "max_length": 3000}
    observation, each = 20 * 4, replay_module.SEGMENT_BYTES
    row = observation + 8 + 4
    steps, segments = 80_000_000, 8_000_000
    both = Replay.memory_bytes(**arguments, capacity_steps=steps, capacity_trajectories=segments)
    assert both == (steps + 3000) * row + (segments + 1) * (observation + each) < 15e9
    alone = Replay.memory_bytes(**arguments, capacity_steps=steps)  # each segment might be one step long
    assert alone == (steps + 3000) * row + (steps + 1) * (observation + each)
    # Where the segments that may be held cannot have so many steps, they decide alone.
    few = Replay.memory_bytes(**arguments, capacity_trajectories=100)
    assert few == Replay.memory_bytes(**arguments, capacity_steps=steps, capacity_trajectories=100)
    assert few == 101 * (3000 * row + observation + each)


def test_state_dict_round_trip():
    "Through a file that holds plain data only; the next samples and evictions are the same."
    rng = np.random.default_rng(0)
    make = {**DISCRETE, "max_length": 9, "capacity_trajectories": 8}
    replay = Replay(**make, seed=5)
    for number in range(27):
        replay.add(**trajectory(int(rng.integers(1, 10)), rng, number))
    replay.sample(4, 3)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    rows = replay.num_steps + 8
    assert file.tell() < rows * 20 + 8 * 33 + 8000
    file.seek(0)
    other = Replay(**make, seed=99)
    other.add(**trajectory(3, rng))
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state)
    assert (other.num_steps, len(other), other.total_added) == (replay.num_steps, 8, 27)
    for number in range(20):
        assert_same(replay.sample(5, 4), other.sample(5, 4))
        new = trajectory(int(rng.integers(1, 10)), rng, number)
        replay.add(**new)
        other.add(**new)
    # A copy, not a reference: what is added later does not reach into a state taken before.
    again = Replay(**make)
    again.load_state_dict(state)
    assert again.state_dict()["task"].tolist() == list(range(19, 27))


def test_a_state_loads_into_another_capacity():
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=9, capacity_trajectories=8)
    for number in range(8):
        replay.add(**trajectory(5, rng, number))
    smaller = Replay(**DISCRETE, max_length=9, capacity_steps=16)
    smaller.load_state_dict(replay.state_dict())
    assert smaller.state_dict()["task"].tolist() == [5, 6, 7]
    empty = Replay(**DISCRETE, max_length=9, capacity_trajectories=8)
    smaller.load_state_dict(empty.state_dict())
    assert len(smaller) == smaller.num_steps == 0
    with pytest.raises(ValueError, match=r"obs of a segment of 5 steps must be \(6, 3\)"):
        Replay(3, (), np.int64, 9, capacity_steps=9).load_state_dict(replay.state_dict())


def test_the_seed_decides():
    rng = np.random.default_rng(0)
    replays = [Replay(**DISCRETE, max_length=9, capacity_steps=90, seed=seed) for seed in (1, 1, 2)]
    for number in range(9):
        new = trajectory(9, rng, number)
        for one in replays:
            one.add(**new)
    tasks = [one.sample(30, 4).task_B.tolist() for one in replays]
    assert tasks[0] == tasks[1] != tasks[2]


def test_what_is_added_and_what_is_drawn_are_copies():
    rng = np.random.default_rng(0)
    replay = Replay(**DISCRETE, max_length=5, capacity_steps=5)
    new = trajectory(5, rng)
    kept = new["obs"].copy()
    replay.add(**new)
    new["obs"][:] = 7.0  # a collector writes its next rollout into the same buffer
    replay.sample(1, 5).obs_BTO.zero_()
    np.testing.assert_array_equal(replay.sample(1, 5).obs_BTO[0], kept)


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("obs", (3, 1), np.nan, r"obs of step 3 \(of 4\) is nan at index \[1\]"),
        ("obs", (4, 0), np.inf, r"obs of step 4 \(of 4\) is inf at index \[0\]"),
        ("reward", (2,), -np.inf, r"reward of step 2 \(of 4\) is -inf:"),
        ("action", (0, 2), np.nan, r"action of step 0 \(of 4\) is nan at index \[2\]"),
        ("obs", (1, 0), 1e300, r"obs of step 1 \(of 4\) is inf"),  # too large for float32
    ],
)
def test_not_finite_raises_and_changes_nothing(field, place, value, message):
    rng = np.random.default_rng(0)
    replay = Replay(2, (3,), np.float32, max_length=4, capacity_trajectories=1)
    replay.add(**trajectory(4, rng, number=1, action_shape=(3,)))
    bad = trajectory(4, rng, number=2, action_shape=(3,))
    bad[field] = bad[field].astype(np.float64)
    bad[field][place] = value
    with pytest.raises(ValueError, match=message):
        replay.add(**bad)
    assert replay.sample(1, 4).task_B.tolist() == [1] and replay.total_added == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((4, 2))}, r"obs of a segment of 4 steps must be \(5, 2\) \(T\+1 observations"),
        ({"obs": np.zeros((5, 3))}, r"must be \(5, 2\)"),
        ({"action": np.zeros(5, int)}, r"action of a segment of 4 steps must be \(4,\), got \(5,\)"),
        ({"action": np.zeros((4, 1), int)}, r"must be \(4,\), got \(4, 1\)"),
        ({"action": np.zeros(4)}, "action must be int64, got float64"),
        ({"reward": np.zeros((4, 1))}, r"reward must be \(T,\)"),
        ({"reward": np.zeros(0)}, "T from 1 to max_length 4"),
        ({"reward": np.zeros(5), "obs": np.zeros((6, 2)), "action": np.zeros(5, int)}, "cut longer rollouts"),
    ],
)
def test_wrong_shapes_and_types_raise(change, message):
    replay = Replay(**DISCRETE, max_length=4, capacity_steps=8)
    with pytest.raises(ValueError, match=message):
        replay.add(**{**trajectory(4, np.random.default_rng(0)), **change})
    assert len(replay) == 0


def test_other_mistakes_raise():
    with pytest.raises(ValueError, match="give capacity_steps, capacity_trajectories or both"):
        Replay(**DISCRETE, max_length=4)
    with pytest.raises(ValueError, match="give capacity_steps"):
        Replay.memory_bytes(**DISCRETE, max_length=4)
    with pytest.raises(ValueError, match="cannot hold one segment of max_length 4"):
        Replay(**DISCRETE, max_length=4, capacity_steps=3)
    with pytest.raises(ValueError, match="capacity_trajectories must be at least 1, got 4 and 0"):
        Replay(**DISCRETE, max_length=4, capacity_trajectories=0)
    with pytest.raises(
        ValueError, match="max_length and capacity_trajectories must be at least 1, got 0 and 1"
    ):
        Replay(**DISCRETE, max_length=0, capacity_trajectories=1)
    replay = Replay(**DISCRETE, max_length=4, capacity_steps=8)
    with pytest.raises(ValueError, match="the replay is empty"):
        replay.sample(1, 1)
    replay.add(**trajectory(4, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="batch and context must be at least 1, got 0 and 5"):
        replay.sample(0, 5)


# --------------------------------------------------------------------------------------------- images


def with_image(steps, rng, number=0, **fields):
    "A trajectory whose images hold noise: any mix-up of frames, rollouts or times shows."
    return trajectory(steps, rng, number, **fields) | {
        "image": rng.integers(0, 256, (steps + 1, 6, 5, 3), np.uint8)
    }


def check_images(batch, held):
    "Byte for byte what went in, aligned with the observations, zeros in padding."
    for b in range(len(batch.task_B)):
        (one,) = [t for t in held if t["task"] == batch.task_B[b]]
        steps, offset = int(batch.mask_BT[b].sum()), int(batch.time_BT[b, 0]) - one["start"]
        np.testing.assert_array_equal(
            batch.image_BT[b, : steps + 1], one["image"][offset : offset + steps + 1]
        )
        np.testing.assert_array_equal(batch.obs_BTO[b, : steps + 1], one["obs"][offset : offset + steps + 1])
        assert not batch.image_BT[b, steps + 1 :].any()


def test_images_come_back_byte_for_byte_and_are_evicted(tmp_path):
    rng = np.random.default_rng(0)
    store = FrameStore((6, 5, 3), chunk=4, ram_bytes=6000, folder=tmp_path)
    replay = Replay(**DISCRETE, max_length=13, capacity_steps=150, frames=store)
    slow, spilled = SlowReplay(capacity_steps=150), 0
    for number in range(120):
        new = with_image(int(rng.integers(1, 14)), rng, number)
        slow.add(new)
        replay.add(**new)
        spilled += store.disk_used > 0
        assert len(store) == len(replay)  # what is evicted is dropped
        if number % 10 == 9:
            for context in (1, 5, 20):
                batch = replay.sample(8, context)
                assert batch.image_BT.dtype == torch.uint8
                assert batch.image_BT.shape == (8, batch.mask_BT.shape[1] + 1, 6, 5, 3)
                check_images(batch, slow.held)
    assert spilled > 50


def test_images_survive_a_state_dict(tmp_path):
    "The next samples and evictions are the same, also with another budget."
    rng = np.random.default_rng(0)
    make = {**DISCRETE, "max_length": 9, "capacity_trajectories": 8}
    replay = Replay(**make, seed=5, frames=FrameStore((6, 5, 3), chunk=4))
    for number in range(27):
        replay.add(**with_image(int(rng.integers(1, 10)), rng, number))
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    store = FrameStore((6, 5, 3), chunk=4, ram_bytes=2000, folder=tmp_path)
    other = Replay(**make, seed=99, frames=store)
    other.add(**with_image(3, rng))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert len(store) == 8 and store.disk_used
    for number in range(20):
        assert_same(replay.sample(5, 4), other.sample(5, 4))
        new = with_image(int(rng.integers(1, 10)), rng, number)
        replay.add(**new)
        other.add(**new)
    smaller = Replay(**make | {"capacity_trajectories": 3}, frames=FrameStore((6, 5, 3), chunk=4))
    smaller.load_state_dict(replay.state_dict())
    assert len(smaller.frames) == 3 and smaller.sample(9, 9).task_B.min() == 17
    plain = Replay(**make)
    with pytest.raises(ValueError, match="differ in whether they hold images"):
        plain.load_state_dict(replay.state_dict())
    with pytest.raises(ValueError, match="differ in whether they hold images"):
        replay.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("images", [False, True])
def test_what_is_new_since_earlier_states_completes_them(images):
    "Parts that overlap, or hold what was evicted since, or are empty; and one that is missing."
    rng = np.random.default_rng(0)

    def make(seed=0):
        frames = {"frames": FrameStore((6, 5, 3), chunk=4)} if images else {}
        return Replay(**DISCRETE, max_length=9, capacity_trajectories=20, seed=seed, **frames)

    replay, parts, seen = make(), [], 0
    for number in range(70):
        steps = int(rng.integers(1, 10))
        replay.add(**(with_image if images else trajectory)(steps, rng, number))
        if number in (4, 17, 18, 40, 55, 63):
            parts.append(replay.state_dict(seen - 2))
            assert parts[-1]["first"] == max(0, seen - 2, number - 19)
            seen = replay.total_added
    new = replay.state_dict(seen)
    assert len(new["length"]) == 6 and len(new["obs"]) == new["length"].sum() + 6
    assert len(replay.state_dict(70)["reward"]) == 0
    other = make(seed=9)
    other.load_state_dict(new, iter(parts))
    whole, again = replay.state_dict(), other.state_dict()
    assert whole["task"].tolist() == list(range(50, 70)) and whole["rng"] == again["rng"]
    assert all(torch.equal(whole[name], again[name]) for name in ("obs", "length", "start", "terminated"))
    assert_same(replay.sample(5, 4), other.sample(5, 4))
    with pytest.raises(ValueError, match="segments 56 to 70 of the saved replay are missing"):
        other.load_state_dict(new, parts[:-1])


def test_wrong_images_raise_and_change_nothing():
    rng = np.random.default_rng(0)
    plain = Replay(**DISCRETE, max_length=4, capacity_trajectories=1)
    with pytest.raises(ValueError, match="takes no image, for it has no frame store"):
        plain.add(**with_image(4, rng))
    replay = Replay(**DISCRETE, max_length=4, capacity_trajectories=1, frames=FrameStore((6, 5, 3)))
    replay.add(**with_image(4, rng, 1))
    with pytest.raises(ValueError, match="an image with each segment.* got none"):
        replay.add(**trajectory(4, rng))
    for wrong in (np.zeros((4, 6, 5, 3), np.uint8), np.zeros((5, 6, 5, 1), np.uint8), np.zeros((5, 6, 5, 3))):
        with pytest.raises(
            ValueError, match=r"of 4 steps \(5, 6, 5, 3\) uint8; got \(\d, 6, 5, \d\) (uint8|float64)"
        ):
            replay.add(**with_image(4, rng, 2) | {"image": wrong})
    assert replay.sample(1, 4).task_B.tolist() == [1] and len(replay.frames) == 1
    # A store that is full: its own error passes, and what is left is whole.
    replay = Replay(**DISCRETE, max_length=4, capacity_steps=40, frames=FrameStore((6, 5, 3), ram_bytes=2500))
    held = []
    with pytest.raises(OSError, match="raise --replay_ram or lower --replay_steps"):
        for number in range(9):
            new = with_image(4, rng, number)
            replay.add(**new)
            held.append(new)
    assert len(replay) == len(replay.frames) == len(held) >= 4
    check_images(replay.sample(20, 3), held)


def test_faster_than_a_loop_over_steps():
    "Against the same windows, copied a step at a time; ten times leaves room for a busy machine."
    rng = np.random.default_rng(0)
    replay = Replay(60, (), np.int64, 900, capacity_trajectories=20)
    for number in range(20):
        steps = int(rng.integers(500, 901))
        obs = rng.standard_normal((steps + 1, 60), dtype=np.float32)
        replay.add(obs, rng.integers(9, size=steps), np.ones(steps), True, 0, number)

    def loop(batch, context):
        segments = [replay._segments[number] for number in rng.integers(len(replay), size=batch)]
        obs, action = np.zeros((batch, context + 1, 60), np.float32), np.zeros((batch, context), int)
        reward = np.zeros((batch, context), np.float32)
        for b, segment in enumerate(segments):
            for t in range(min(context, len(segment.reward))):
                obs[b, t] = segment.obs[t]
                action[b, t] = segment.action[t]
                reward[b, t] = segment.reward[t]

    def seconds(function):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            function(24, 600)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(loop) > 10 * seconds(replay.sample)


def test_the_worked_example_runs_alone(tmp_path):
    (tmp_path / "replay.py").write_text(Path(replay_module.__file__).read_text())
    done = subprocess.run(
        [sys.executable, "replay.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "= 94132 bytes at most" in done.stdout
