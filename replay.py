r"""Replay: trajectories in, random windows with masks out; memory is bounded, and the bound is known before a run.

What     a queue of immutable segments, from which batches of windows are cut
Why      a policy with memory learns from sequences: a window has to be contiguous, must say where it lies
         in its rollout, and must tell real steps from padding
Paper    AMAGO-2 (arXiv 2411.11188), Table 1: replay size in timesteps or in full trajectories

Time alignment, for every file. An observation o_t already holds a_{t-1}, r_{t-1} and flags (the
environment puts them there). A window of T steps has T+1 observations:

    index           0      1      2     ...   T-1     T
    observation     o_0    o_1    o_2   ...   o_T-1   o_T     T+1: the last is only bootstrapped from
    time index      s      s+1    s+2   ...   s+T-1   s+T     T+1: steps since the rollout began
    action          a_0    a_1    a_2   ...   a_T-1           T:   a_t is chosen on seeing o_t
    reward          r_0    r_1    r_2   ...   r_T-1           T:   r_t is paid for a_t, seen in o_t+1
    done            d_0    d_1    d_2   ...   d_T-1           T:   o_t+1 is terminal: nothing follows
    mask            1      1      1     ...   1               T:   0 where the step is padding

    target:  y_t = r_t + gamma (1 - d_t) V(o_t+1)             reads columns t and t+1, for all t < T

Truncated is not done: the last step has d = 0, and o_T stands for the future that was cut off. A long
rollout comes in segments: at a cut d = 0, and the next segment's first observation is this one's last.

Images, one for each observation, go to a store that is passed in, and are compressed there.

Shapes   B batch, T time, S real steps of a batch, O observation, H W C image
Use      replay = Replay(O, (), np.int64, max_length=L, capacity_steps=1_000_000)
         replay.add(obs, action, reward, terminated=True, start=0, task=0)     # (T+1, O), (T,), (T,)
         batch = replay.sample(batch=24, context=100)                          # a Batch, see there
Copy     this file alone; needs numpy and torch
Try      python replay.py
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Memory that a segment takes beside its numbers: three arrays (their objects and the allocator's headers), a tuple,
# three integers and a place in the dictionary. Measured with tracemalloc: 640 to 760 bytes.
SEGMENT_BYTES = 800


class Segment(NamedTuple):
    """A whole rollout, or a piece of a long one. Its arrays are read-only."""

    obs: np.ndarray  # (T+1, O) float32
    action: np.ndarray  # (T,) + action_shape
    reward: np.ndarray  # (T,) float32
    terminated: bool  # nothing follows the last step
    start: int  # time index of the first step in its rollout
    task: int  # for reports only
    handle: int | None  # of its images in the frame store


class Batch(NamedTuple):
    """Windows, longest first, padded with zeros on the right. T is the length of the longest.

    A window of L steps has L ones in the mask and L+1 real observations: the last observation is no step.
    """

    obs_BTO: Tensor  # (B, T+1, O) float32
    action_BT: Tensor  # (B, T) + action_shape
    reward_BT: Tensor  # (B, T) float32, as it was added
    done_BT: Tensor  # (B, T) bool: the rollout terminated with this step
    mask_BT: Tensor  # (B, T) bool
    real_S: Tensor  # (S,) int64: where the mask is True, as indices into a flat (B * T,), in ascending order
    weight_S: Tensor  # (S,) float32 share of each step in a mean over the whole batch: 1 / S
    lengths: tuple[int, ...]  # (B,) real steps in each window, known to the host
    time_BT: Tensor  # (B, T+1) int64: index of each observation in its rollout
    task_B: Tensor  # (B,) int64, for reports only: learning never sees it
    image_BT: Tensor | None = None  # (B, T+1, H, W, C) uint8, if the replay holds images

    def windows(self, first: int, last: int) -> "Batch":
        """The windows `first` to `last` (exclusive), trimmed to the longest of them: views, but for `real_S`."""
        if last - first == len(self.lengths):
            return self
        lengths, rows = self.lengths[first:last], slice(first, last)
        old, new, begin = self.mask_BT.shape[1], max(lengths), sum(self.lengths[:first])
        real_S, weight_S = (x[begin : begin + sum(lengths)] for x in (self.real_S, self.weight_S))
        # A step in column t of row b is number (b - first) * new + t now; it was b * old + t.
        real_S = real_S - real_S.div(old, rounding_mode="floor") * (old - new) - first * new
        steps = (x[rows, :new] for x in (self.action_BT, self.reward_BT, self.done_BT, self.mask_BT))
        obs_BTO, time_BT = self.obs_BTO[rows, : new + 1], self.time_BT[rows, : new + 1]
        image_BT = None if self.image_BT is None else self.image_BT[rows, : new + 1]
        return Batch(obs_BTO, *steps, real_S, weight_S, lengths, time_BT, self.task_B[rows], image_BT)

    def to(self, device) -> "Batch":
        """The batch with its tensors on `device`; `lengths` stay with the host."""
        return Batch(*(x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self))


class Replay:
    """A queue of segments: the oldest leave to make room for the newest.

    Arguments: `observation_dim` O; `action_shape` and `action_dtype` of one action (() and an integer type
    for discrete actions); `max_length`, the most steps in one segment; `capacity_steps` (env steps) and
    `capacity_trajectories` (segments), exact bounds on what is held, of which at least one is needed; `seed` of
    the sampling; `frames`, for images, a `FrameStore` or an object with its `add`, `read`, `drop`, `pack`,
    `unpack`, `close` and `frame_shape`.
    Raises ValueError unless a capacity is given and a segment of `max_length` steps fits into it.
    """

    def __init__(
        self,
        observation_dim: int,
        action_shape: tuple[int, ...],
        action_dtype,
        max_length: int,
        capacity_steps: int | None = None,
        capacity_trajectories: int | None = None,
        seed: int = 0,
        frames=None,
    ):
        if capacity_steps is None and capacity_trajectories is None:
            raise ValueError("give capacity_steps, capacity_trajectories or both")
        if max_length < 1 or (capacity_trajectories is not None and capacity_trajectories < 1):
            raise ValueError(
                f"max_length and capacity_trajectories must be at least 1, got {max_length} and {capacity_trajectories}"
            )
        if capacity_steps is not None and capacity_steps < max_length:
            raise ValueError(
                f"capacity_steps {capacity_steps} cannot hold one segment of max_length {max_length}: "
                f"raise it to at least {max_length}"
            )
        self.max_length, self.frames = max_length, frames
        # The most of each. A segment has at least one step and at most max_length.
        self._most_segments = min(n for n in (capacity_trajectories, capacity_steps) if n is not None)
        self._most_steps = min(n for n in (capacity_steps, self._most_segments * max_length) if n is not None)
        self._kinds = {
            "obs": ((observation_dim,), np.dtype(np.float32)),
            "action": (tuple(action_shape), np.dtype(action_dtype)),
            "reward": ((), np.dtype(np.float32)),
        }
        # Segments by their numbers. Sampling looks up random ones: a dictionary finds each in constant time,
        # where collections.deque would walk to it from the nearer end.
        self._segments: dict[int, Segment] = {}
        self.num_steps = self.total_added = 0
        self._rng = np.random.default_rng(seed)

    @classmethod
    def memory_bytes(cls, *arguments, **more) -> int:
        """The most bytes that a replay with these arguments takes (`seed` and `frames` do not matter).

        This is the worst case: as many segments as there may be, with as many steps as there may be. Images come
        on top, and gaps in the heap: where lengths change abruptly, these were up to 40% more. Raises as `Replay`.
        """
        replay = cls(*arguments, **more)  # holds nothing yet, and so takes nothing
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in replay._kinds.items()}
        # One more segment counts: a new one is copied before the oldest leave.
        steps, segments = replay._most_steps + replay.max_length, replay._most_segments + 1
        return steps * sum(sizes.values()) + segments * (sizes["obs"] + SEGMENT_BYTES)

    @property
    def oldest(self) -> int:
        """Number of the oldest segment held; segments are numbered from 0 in the order of adding."""
        return self.total_added - len(self._segments)

    def __len__(self) -> int:
        "Segments held now."
        return len(self._segments)

    def rewards(self) -> np.ndarray:
        """The rewards of all steps held now, (num_steps,)."""
        return np.concatenate([segment.reward for segment in self._segments.values()])

    # -------------------------------------------------------------------------------------- adding

    def add(self, obs, action, reward, terminated: bool, start: int, task: int, image=None) -> None:
        """Add a copy of one segment of T steps; the oldest segments leave until it fits.

        `obs` (T+1, O), the last observation included; `action` (T,) + action_shape; `reward` (T,);
        `terminated`, whether nothing follows the last step (False for a truncation or a cut); `start`, the
        time index of the first step in its rollout; `task`, a number for reports; `image` (T+1, H, W, C)
        uint8, exactly if there is a frame store.
        Raises ValueError for a wrong shape or type, a T outside 1..max_length, a NaN or an infinity, and
        the frame store's own error when that is full. The replay then holds only whole segments, as before.
        """
        segment = self._segment(obs, action, reward, terminated, start, task)
        self._check_image(image, len(segment.reward))
        self._make_room(len(segment.reward))
        # The images come first: if their store is full, nothing of this segment is left here.
        self._append(segment, None if image is None else self.frames.add(image))

    def _segment(self, obs, action, reward, terminated, start, task) -> Segment:
        "A segment of read-only copies, without its images; ValueError names the array that is wrong."
        shape = np.shape(reward)
        if len(shape) != 1 or not 1 <= shape[0] <= self.max_length:
            raise ValueError(
                f"reward must be (T,) with T from 1 to max_length {self.max_length}, got shape {shape}: "
                "cut longer rollouts into segments"
            )
        arrays = {"obs": obs, "action": action, "reward": reward}
        copies = [self._copy(name, array, steps=shape[0]) for name, array in arrays.items()]
        return Segment(*copies, bool(terminated), int(start), int(task), handle=None)

    def _copy(self, name: str, array, steps: int) -> np.ndarray:
        "A read-only copy of one array of a segment, in the type that it is stored in."
        (shape, dtype), array = self._kinds[name], np.asarray(array)
        shape = (steps + 1 if name == "obs" else steps, *shape)
        if array.shape != shape:
            hint = " (T+1 observations, the last one included)" if name == "obs" else ""
            raise ValueError(f"{name} of a segment of {steps} steps must be {shape}{hint}, got {array.shape}")
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ValueError(f"{name} must be {dtype}, got {array.dtype}, which does not convert safely")
        # A number too large for float32 becomes an infinity here, and is found below.
        with np.errstate(over="ignore"):
            array = array.astype(dtype, order="C")
        # One NaN in the replay would ruin the weights many updates later, when its cause is out of sight.
        # Here the step that made it can still be named.
        finite = np.isfinite(array)
        if not finite.all():
            step, *index = (int(i) for i in np.argwhere(~finite)[0])
            raise ValueError(
                f"{name} of step {step} (of {steps}) is {array[(step, *index)]}"
                + (f" at index {index}" if index else "")
                + ": the replay takes finite numbers only; look at the environment that made it"
            )
        array.flags.writeable = False
        return array

    def _check_image(self, image, steps: int) -> None:
        expected = None if self.frames is None else (steps + 1, *self.frames.frame_shape)
        if (None if image is None else image.shape) != expected or (
            image is not None and image.dtype != np.uint8
        ):
            wants = "no image, for it has no frame store: Replay(..., frames=FrameStore(...))"
            if expected is not None:
                wants = f"an image with each segment, of {steps} steps {expected} uint8"
            given = "none" if image is None else f"{image.shape} {image.dtype}"
            raise ValueError(f"this replay takes {wants}; got {given}")

    def _make_room(self, steps: int) -> None:
        "Let the oldest segments leave until one more of `steps` steps fits."
        while len(self) >= self._most_segments or self.num_steps + steps > self._most_steps:
            segment = self._segments.pop(self.oldest)
            self.num_steps -= len(segment.reward)
            if self.frames is not None:
                self.frames.drop(segment.handle)

    def _append(self, segment: Segment, handle: int | None) -> None:
        self._segments[self.total_added] = segment._replace(handle=handle)
        self.num_steps += len(segment.reward)
        self.total_added += 1

    # ------------------------------------------------------------------------------------ sampling

    def sample(self, batch: int, context: int) -> Batch:
        """Draw `batch` windows of at most `context` steps; returns a `Batch`, longest windows first. Raises as `draw`."""
        return self.gather(self.draw(batch, context))

    def draw(self, batch: int, context: int) -> list[tuple[Segment, int, int]]:
        """Draw `batch` windows of at most `context` steps: (segment, first step, number of steps), longest first.

        Segments are drawn uniformly, with replacement. One of at most `context` steps comes whole; of a longer
        one comes a window whose start is uniform over all that leave `context` steps. Raises ValueError if
        the replay is empty or a number is below 1.
        """
        if not self._segments:
            raise ValueError("the replay is empty: add at least one segment before sampling")
        if batch < 1 or context < 1:
            raise ValueError(f"batch and context must be at least 1, got {batch} and {context}")
        number_B = self.oldest + self._rng.integers(len(self), size=batch)
        segments = [self._segments[number] for number in number_B.tolist()]
        length_B = np.array([len(segment.reward) for segment in segments])
        window_B = np.minimum(length_B, context)
        first_B = self._rng.integers(length_B - window_B + 1)
        # Longest first, because the update trims each group of windows to its longest. A stable sort, so that a
        # seed gives the same batch everywhere.
        order_B = np.argsort(-window_B, kind="stable")
        return [(segments[b], int(first_B[b]), int(window_B[b])) for b in order_B]

    def gather(self, windows: list[tuple[Segment, int, int]]) -> Batch:
        """Copy windows that `draw` has drawn into a `Batch`.

        Another thread may do this: segments never change. Their images must still be in the frame store.
        """
        B, T = len(windows), max(steps for _, _, steps in windows)
        obs_BTO, action_BT, reward_BT = (
            np.zeros((B, T + 1 if name == "obs" else T, *shape), dtype)
            for name, (shape, dtype) in self._kinds.items()
        )
        done_BT, mask_BT = np.zeros((B, T), bool), np.zeros((B, T), bool)
        time_BT, task_B = np.zeros((B, T + 1), np.int64), np.zeros(B, np.int64)
        image_BT = None if self.frames is None else np.zeros((B, T + 1, *self.frames.frame_shape), np.uint8)
        # A window is contiguous, so slices copy it at the speed of memory.
        for b, (segment, first, steps) in enumerate(windows):
            end = first + steps
            obs_BTO[b, : steps + 1] = segment.obs[first : end + 1]
            action_BT[b, :steps] = segment.action[first:end]
            reward_BT[b, :steps] = segment.reward[first:end]
            # Only the last step of a segment can be terminal.
            done_BT[b, steps - 1] = segment.terminated and end == len(segment.reward)
            mask_BT[b, :steps] = True
            time_BT[b, : steps + 1] = np.arange(segment.start + first, segment.start + end + 1)
            task_B[b] = segment.task
            if image_BT is not None:
                self.frames.read(segment.handle, first, steps + 1, out=image_BT[b, : steps + 1])
        real_S = np.flatnonzero(mask_BT)
        weight_S = np.full(len(real_S), 1 / len(real_S), np.float32)
        lengths = tuple(steps for _, _, steps in windows)
        fields = (obs_BTO, action_BT, reward_BT, done_BT, mask_BT, real_S, weight_S, lengths)
        fields += (time_BT, task_B, image_BT)
        return Batch(*(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in fields))

    # --------------------------------------------------------------------------- saving and loading

    def state_dict(self, first: int = 0, count: int | None = None) -> dict:
        """Segments from number `first` on (at most `count`), one behind another, and the generator's state.

        Segments never change, so each has to be saved only once: those that are new since an earlier state begin
        at its `total_added`. Tensors (copies), numbers and strings only, which load with
        `torch.load(..., weights_only=True)`.
        """
        first = min(max(first, self.oldest), self.total_added)
        end = self.total_added if count is None else min(first + count, self.total_added)
        segments = [self._segments[number] for number in range(first, end)]
        state = {"first": first, "oldest": self.oldest, "total_added": self.total_added}
        state["rng"] = self._rng.bit_generator.state
        state["length"] = torch.tensor([len(segment.reward) for segment in segments])
        for name in ("terminated", "start", "task"):
            state[name] = torch.tensor([getattr(segment, name) for segment in segments])
        for name, (shape, dtype) in self._kinds.items():
            arrays = [np.empty((0, *shape), dtype), *(getattr(segment, name) for segment in segments)]
            state[name] = torch.from_numpy(np.concatenate(arrays))
        if self.frames is not None:
            state["frames"] = self.frames.pack([segment.handle for segment in segments])
        return state

    def load_state_dict(self, state: dict, earlier: Iterable[dict] = ()) -> None:
        """Hold what was held when `state` was made, and nothing else; then sampling goes on with the same draws.

        Segments that `state` leaves out come from `earlier` states, oldest first, which may overlap and are
        taken one at a time. The capacity may differ: a smaller one keeps the newest. Raises ValueError if shapes
        do not fit, segments are missing, or only one of the two replays has images, and the frame store's own
        error when that is full; what was loaded until then stays.
        """
        if self.frames is not None:
            self.frames.close()
        self._segments, self.num_steps, self.total_added = {}, 0, state["oldest"]
        for part in itertools.chain(earlier, [state]):
            self._load_part(part)
        if self.total_added != state["total_added"]:
            raise ValueError(
                f"segments {self.total_added} to {state['total_added']} of the saved replay are missing"
            )
        self._rng.bit_generator.state = state["rng"]

    def _load_part(self, state: dict) -> None:
        "Add those segments of a state that come next."
        if ("frames" in state) != (self.frames is not None):
            raise ValueError("the saved replay and this one differ in whether they hold images")
        lengths, known = state["length"].tolist(), self.total_added - state["first"]
        if not 0 <= known < len(lengths):
            return  # nothing new, or a gap, which `load_state_dict` reports
        obs = state["obs"].split([steps + 1 for steps in lengths])
        action, reward = (state[name].split(lengths) for name in ("action", "reward"))
        terminated, start, task = (state[name].tolist() for name in ("terminated", "start", "task"))
        handles = None if self.frames is None else self.frames.unpack(state["frames"], known)
        for i in range(known, len(lengths)):
            segment = self._segment(obs[i], action[i], reward[i], terminated[i], start[i], task[i])
            self._make_room(lengths[i])
            self._append(segment, None if handles is None else next(handles))


def _example() -> None:
    "A rollout of five steps, a piece of a longer one, and a window; small enough to check by eye."
    action_T, reward_T = np.array([2, 0, 1, 1, 2]), np.array([0, 0, 0.5, 0, 1], np.float32)
    # Features of an observation: its own number, previous action, previous reward.
    obs_TO = np.zeros((6, 3), np.float32)
    obs_TO[:, 0], obs_TO[1:, 1], obs_TO[1:, 2] = np.arange(6), action_T, reward_T
    arguments = {"observation_dim": 3, "action_shape": (), "action_dtype": np.int64, "max_length": 5}
    most = Replay.memory_bytes(**arguments, capacity_trajectories=100)
    print(f"101 segments x (5 x (3 x 4 + 8 + 4) + 3 x 4 + {SEGMENT_BYTES}) = {most} bytes at most")
    replay = Replay(**arguments, capacity_trajectories=100, seed=1)
    replay.add(obs_TO, action_T, reward_T, terminated=True, start=0, task=7)
    replay.add(obs_TO[:3] + 100, action_T[:2], reward_T[:2], terminated=False, start=400, task=8)

    def show(title: str, batch: Batch, b: int) -> None:
        print(f"\n{title}\n  time  o (number, a_t-1, r_t-1)   a_t   r_t  done  mask")
        for t, (time, obs) in enumerate(zip(batch.time_BT[b].tolist(), batch.obs_BTO[b].tolist())):
            steps = (batch.action_BT, batch.reward_BT, batch.done_BT.int(), batch.mask_BT.int())
            line = [x[b, t].item() for x in steps] if t < batch.mask_BT.shape[1] else []
            print(f"{time:>6}{obs!s:>26}" + "".join(f"{x:>6}" for x in line))

    batch = replay.sample(4, context=5)
    show("the rollout, whole: o_t+1 shows a_t and r_t; done on the last step", batch, 0)
    show("a piece of 2 steps, cut at time 402: no done; the zeros are padding", batch, 3)
    while (window := replay.sample(1, context=3)).time_BT[0, 0] != 1:
        pass
    show(
        "a window of 3 steps from the rollout's middle: its first a_t-1 and r_t-1 are the true ones",
        window,
        0,
    )
    print(f"\nlengths, longest first: {batch.lengths}; tasks {batch.task_B.tolist()}")
    print(f"real steps as flat indices: {batch.real_S.tolist()}")


if __name__ == "__main__":
    _example()
