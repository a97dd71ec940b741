r"""Replay: whole trajectories in, uniformly drawn windows with masks out; memory bounded and known beforehand.

What     a preallocated store of trajectories of different lengths, from which a batch of windows is cut
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

Truncated is not done: the last step has d = 0, and o_T stands for the future that was cut off. Long
rollouts come in segments: at a cut d = 0 and the next segment's first observation is this one's last.

Images, T+1 a trajectory as observations are, go to a store that is passed in, and are compressed there.

Shapes   B batch, T time, O observation, H W C image; rows R: one per observation, T+1 a trajectory;
         M trajectories
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


class Batch(NamedTuple):
    """Windows, padded with zeros on the right. T is the length of the longest of them.

    `action_BT` is (B, T) + action_shape. `mask_BT` is True on real steps, exactly as many as a window is
    long: the last observation is no step. A window of L steps has L+1 real observations and times.
    """

    obs_BTO: Tensor  # (B, T+1, O) float32
    action_BT: Tensor  # (B, T) + action_shape
    reward_BT: Tensor  # (B, T) float32, as it was added
    done_BT: Tensor  # (B, T) bool: the rollout terminated with this step
    mask_BT: Tensor  # (B, T) bool
    time_BT: Tensor  # (B, T+1) int64: index of each observation in its rollout
    task_B: Tensor  # (B,) int64, for reports only: learning never sees it
    image_BT: Tensor | None = None  # (B, T+1, H, W, C) uint8, if the replay holds images


class Replay:
    """Trajectories, or segments of long rollouts; the oldest make room for the newest.

    Arguments: `observation_dim` O; `action_shape` and `action_dtype` of one action (() and an integer type
    where discrete); `max_length`, the most steps in one trajectory; `capacity_steps` (env steps) and
    `capacity_trajectories`, exact bounds on what is held: either, or both, which takes less memory than
    steps alone, for which every trajectory might be one step long; `seed` of the sampling; `frames`, for images, a
    `FrameStore` or what has its `add`, `read`, `drop`, `pack`, `unpack`, `close` and `frame_shape`.
    Raises ValueError unless a capacity is given and a trajectory of `max_length` fits into it.
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
        layout = self._layout(
            observation_dim, action_shape, action_dtype, max_length, capacity_steps, capacity_trajectories
        )
        self.max_length = max_length
        self.capacity_steps, self.capacity_trajectories = capacity_steps, capacity_trajectories
        # Zeroed memory comes from the system untouched: pages count only once something is written there.
        self._store = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self._rows = {name: self._store[name] for name in ("obs", "action", "reward")}
        self._first_M, self._length_M = self._store["first"], self._store["length"]
        self.frames = frames
        self._oldest = self._count = self._steps = self._added = 0
        # Rows in use: [first of the oldest, _top) if one block, else that one and [0, _tail), the newer.
        self._tail = self._top = 0
        self._rng = np.random.default_rng(seed)

    @staticmethod
    def _layout(
        observation_dim,
        action_shape,
        action_dtype,
        max_length,
        capacity_steps=None,
        capacity_trajectories=None,
    ):
        "Name -> (shape, dtype) of every array that a replay allocates, for the worst case of its capacity."
        if capacity_steps is None and capacity_trajectories is None:
            raise ValueError("give capacity_steps, capacity_trajectories or both")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1 step, got {max_length}")
        if capacity_trajectories is not None and capacity_trajectories < 1:
            raise ValueError(f"capacity_trajectories must be at least 1, got {capacity_trajectories}")
        if capacity_steps is not None and capacity_steps < max_length:
            raise ValueError(
                f"capacity_steps {capacity_steps} cannot hold one trajectory of max_length {max_length}: "
                f"raise it to at least {max_length}"
            )
        # The worst case: as many trajectories as there may be (none is shorter than a step), and in them as
        # many steps as there may be. A trajectory takes a row more than it has steps.
        M = min(x for x in (capacity_steps, capacity_trajectories) if x is not None)
        R = M + min(x for x in (capacity_steps, M * max_length) if x is not None)
        return {
            "obs": ((R, observation_dim), np.float32),
            # One row a step would do, but with one an observation all three share the same row numbers.
            "action": ((R, *action_shape), np.dtype(action_dtype)),
            "reward": ((R,), np.float32),
            "first": ((M,), np.int64),
            "length": ((M,), np.int64),
            "start": ((M,), np.int64),
            "terminated": ((M,), np.bool_),
            "task": ((M,), np.int64),
            "handle": ((M,), np.int64),  # of its images in the frame store
        }

    @classmethod
    def memory_bytes(cls, *arguments, **more) -> int:
        """Bytes that a replay takes at most, before it is made; its arguments but for `seed` and `frames`.

        That many are reserved, for the longest trajectories (by `capacity_trajectories`), the most of them
        (by `capacity_steps`), or full use of both. Those touched are about 9/8 of what is live. Images come on
        top. Raises as `Replay` does.
        """
        layout = cls._layout(*arguments, **more)
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())

    @property
    def num_steps(self) -> int:
        """Env steps held now."""
        return self._steps

    @property
    def oldest(self) -> int:
        """Number of the oldest trajectory held, of all that were ever added."""
        return self._added - self._count

    @property
    def total_added(self) -> int:
        """Trajectories ever added, those evicted included."""
        return self._added

    def __len__(self) -> int:
        "Trajectories held now."
        return self._count

    # ------------------------------------------------------------------------------------------ in

    def add(self, obs, action, reward, terminated: bool, start: int, task: int, image=None) -> None:
        """Copy one trajectory of T steps in, and evict the oldest ones until it fits.

        `obs` (T+1, O), the last observation included; `action` (T,) + action_shape; `reward` (T,);
        `terminated`, whether nothing follows the last step (False for a truncation or a cut); `start`, the
        time index of the first step in its rollout; `task`, a number for reports; `image` (T+1, H, W, C)
        uint8, exactly if there is a frame store.
        Raises ValueError for a wrong shape or type, a T outside 1..max_length, a NaN or an infinity, and
        what the frame store raises when it is full.
        """
        obs, action, reward = self._checked(obs, action, reward)
        self._check_image(image, len(reward))
        self._evict_for(len(reward))
        # First of all: where the store is full, no half of a trajectory is left here.
        handle = 0 if image is None else self.frames.add(image)
        self._put(obs, action, reward, terminated, start, task, handle)

    def _put(self, obs, action, reward, terminated, start, task, handle) -> None:
        "Write a trajectory for which there is room."
        steps = len(reward)
        first = self._find_rows(steps + 1)
        self._rows["obs"][first : first + steps + 1] = obs
        self._rows["action"][first : first + steps] = action
        self._rows["reward"][first : first + steps] = reward
        slot = (self._oldest + self._count) % len(self._first_M)
        fields = {"first": first, "length": steps, "start": start, "terminated": terminated, "task": task}
        for name, value in (fields | {"handle": handle}).items():
            self._store[name][slot] = value
        self._count += 1
        self._steps += steps
        self._added += 1

    def _checked(self, obs, action, reward):
        "The three arrays of a trajectory in the store's types, or a ValueError that names what is wrong."
        obs, action, reward = np.asarray(obs), np.asarray(action), np.asarray(reward)
        if reward.ndim != 1 or not 1 <= len(reward) <= self.max_length:
            raise ValueError(
                f"reward must be (T,) with T from 1 to max_length {self.max_length}, got shape {reward.shape}: "
                "cut longer rollouts into segments"
            )
        steps = len(reward)
        given = {"obs": obs, "action": action, "reward": reward}
        expected_steps = {"obs": steps + 1, "action": steps, "reward": steps}
        for name, array in given.items():
            rows = self._rows[name]
            expected = (expected_steps[name], *rows.shape[1:])
            if array.shape != expected:
                hint = " (T+1 observations, the last one included)" if name == "obs" else ""
                raise ValueError(
                    f"{name} of a trajectory of {steps} steps must be {expected}{hint}, got {array.shape}"
                )
            if not np.can_cast(array.dtype, rows.dtype, "same_kind"):
                raise ValueError(
                    f"{name} must be {rows.dtype}, got {array.dtype}, which does not convert safely"
                )
            # A number too large for float32 becomes an infinity here, and is caught as one.
            with np.errstate(over="ignore"):
                given[name] = array = array.astype(rows.dtype, copy=False)
            # One NaN in the replay would poison the weights many updates later, out of sight of its cause:
            # it is stopped here, where the step that made it can still be named.
            finite = np.isfinite(array)
            if not finite.all():
                place = tuple(int(i) for i in np.argwhere(~finite)[0])
                raise ValueError(
                    f"{name} of step {place[0]} (of {steps}) is {array[place]}"
                    + (f" at index {list(place[1:])}" if place[1:] else "")
                    + ": the replay takes finite numbers only; look at the environment that made it"
                )
        return given.values()

    def _check_image(self, image, steps: int) -> None:
        if (image is None) != (self.frames is None):
            raise ValueError(
                "this replay has no frame store, and takes no image: Replay(..., frames=FrameStore(...))"
                if self.frames is None
                else "this replay has a frame store: every trajectory needs an image, (T+1, H, W, C) uint8"
            )
        if image is None:
            return
        expected = (steps + 1, *self.frames.frame_shape)
        if image.shape != expected or image.dtype != np.uint8:
            raise ValueError(
                f"image of a trajectory of {steps} steps must be {expected} uint8, "
                f"got {image.shape} {image.dtype}"
            )

    def _evict_for(self, steps: int) -> None:
        "Evict the oldest until one more trajectory of `steps` steps is not too much."
        while self._count and (
            (self.capacity_trajectories is not None and self._count + 1 > self.capacity_trajectories)
            or (self.capacity_steps is not None and self._steps + steps > self.capacity_steps)
        ):
            self._evict()

    def _evict(self) -> None:
        "Forget the oldest trajectory."
        if self.frames is not None:
            self.frames.drop(int(self._store["handle"][self._oldest]))
        self._steps -= int(self._length_M[self._oldest])
        previous = self._first_M[self._oldest]
        self._oldest = (self._oldest + 1) % len(self._first_M)
        self._count -= 1
        if not self._count:
            self._tail = self._top = 0
        elif self._first_M[self._oldest] < previous:
            self._top = self._tail  # the older block is gone, the newer one is now the only one

    def _find_rows(self, need: int) -> int:
        """Reserve `need` contiguous rows; returns the first of them.

            one block:   [ free | oldest ... newest | free ]     append; else start over at the front, if
                                                                 there is room; else slide it down to row 0
            two blocks:  [ newer | free | older | free ]         append to the newer; move the older up if
                                                                 they would meet
        The rows hold all that the capacity allows, so nothing is ever evicted for want of contiguous ones.
        """
        R = len(self._rows["obs"])
        bottom = int(self._first_M[self._oldest]) if self._count else 0
        wrapped = self._tail <= bottom and self._tail < self._top
        # Slack, so that moves are rare: lengths vary, and the newer block may grow faster than the older
        # one shrinks. An eighth of what is live is far beyond the spread of a sum of many lengths.
        slack = (self._steps + self._count) // 8
        if not wrapped:
            if bottom >= need + slack or (bottom >= need and self._tail + need > R):
                self._tail = 0
                wrapped = True
            elif self._tail + need > R:
                self._move(bottom, self._top, -bottom)
                self._tail = self._top
        elif self._tail + need > bottom:
            shift = min(need + slack, R - self._top)
            self._move(bottom, self._top, shift)
        first = self._tail
        self._tail += need
        if not wrapped:
            self._top = self._tail
        return first

    def _move(self, low: int, high: int, shift: int) -> None:
        "Move the block of rows [low, high), which holds the oldest trajectories, by `shift` rows."
        # Piece by piece, from the end that the block moves towards: a piece is read before it is written
        # over, and numpy, which copies what overlaps, never has to copy more than one piece.
        piece = max(abs(shift), 4096)
        starts = range(low, high, piece)
        for begin in reversed(starts) if shift > 0 else starts:
            end = min(begin + piece, high)
            for rows in self._rows.values():
                rows[begin + shift : end + shift] = rows[begin:end]
        slots = self._slots()
        inside = slots[(self._first_M[slots] >= low) & (self._first_M[slots] < high)]
        self._first_M[inside] += shift
        self._top = high + shift

    def _slots(self) -> np.ndarray:
        "Slots of all trajectories held, oldest first."
        return (self._oldest + np.arange(self._count)) % len(self._first_M)

    # ----------------------------------------------------------------------------------------- out

    def sample(self, batch: int, context: int) -> Batch:
        """Draw `batch` windows of at most `context` steps; returns a `Batch`.

        Uniform over trajectories, with replacement. One of at most `context` steps comes whole, of a longer
        one a window whose start is uniform over all that leave `context` steps. Raises ValueError if the
        replay is empty or a number is below 1.
        """
        if not self._count:
            raise ValueError("the replay is empty: add at least one trajectory before sampling")
        if batch < 1 or context < 1:
            raise ValueError(f"batch and context must be at least 1, got {batch} and {context}")
        slot_B = (self._oldest + self._rng.integers(self._count, size=batch)) % len(self._first_M)
        length_B = self._length_M[slot_B]
        window_B = np.minimum(length_B, context)
        offset_B = self._rng.integers(length_B - window_B + 1)
        return self._gather(slot_B, offset_B, window_B)

    def _gather(self, slot_B: np.ndarray, offset_B: np.ndarray, window_B: np.ndarray) -> Batch:
        "Cut windows of `window_B` steps, `offset_B` steps into the trajectories in `slot_B`."
        B, T = len(slot_B), int(window_B.max())
        out = {
            name: np.zeros((B, T + 1 if name == "obs" else T, *rows.shape[1:]), rows.dtype)
            for name, rows in self._rows.items()
        }
        # A window is contiguous, so a slice copies it at the speed of memory. Plain: rows[index_BT], with an
        # index for each row and padding set to zero after, takes twice as long at 24 windows of 600 steps.
        for b, (row, window) in enumerate(zip(self._first_M[slot_B] + offset_B, window_B)):
            out["obs"][b, : window + 1] = self._rows["obs"][row : row + window + 1]
            out["action"][b, :window] = self._rows["action"][row : row + window]
            out["reward"][b, :window] = self._rows["reward"][row : row + window]

        image_BT = None
        if self.frames is not None:
            image_BT = np.zeros((B, T + 1, *self.frames.frame_shape), np.uint8)
            for b, handle in enumerate(self._store["handle"][slot_B].tolist()):
                count = int(window_B[b]) + 1
                self.frames.read(handle, int(offset_B[b]), count, out=image_BT[b, :count])

        step_T = np.arange(T + 1)
        mask_BT = step_T[:-1] < window_B[:, None]
        # Only the last step of a trajectory can be terminal: done where the window reaches that far.
        to_end_B = self._length_M[slot_B] - offset_B
        done_BT = (step_T[:-1] == to_end_B[:, None] - 1) & self._store["terminated"][slot_B][:, None]
        # One more real observation than steps; times in padding are 0, like everything else there.
        time_BT = (self._store["start"][slot_B] + offset_B)[:, None] + step_T
        time_BT *= step_T <= window_B[:, None]
        arrays = (
            out["obs"],
            out["action"],
            out["reward"],
            done_BT,
            mask_BT,
            time_BT,
            self._store["task"][slot_B],
        )
        image_BT = None if image_BT is None else torch.from_numpy(image_BT)
        return Batch(*(torch.from_numpy(array) for array in arrays), image_BT)

    # --------------------------------------------------------------------------------- save and load

    def state_dict(self, first: int = 0, count: int | None = None) -> dict:
        """What is held from trajectory number `first` on (at most `count`), oldest first, and the generator's state.

        Numbers count all that were ever added, from 0: what is new since an earlier state begins at its
        `total_added`. Copies: tensors, numbers and strings only, which load with
        `torch.load(..., weights_only=True)`.
        """
        oldest = self.oldest
        first = min(max(first, oldest), self._added)
        slots, fields = self._slots()[first - oldest :][:count], ("length", "start", "terminated", "task")
        state = {name: torch.from_numpy(self._store[name][slots]) for name in fields}
        places = zip(self._first_M[slots].tolist(), self._length_M[slots].tolist())
        rows = np.concatenate([np.arange(0), *(np.arange(row, row + T + 1) for row, T in places)])
        state |= {name: torch.from_numpy(store[rows]) for name, store in self._rows.items()}
        if self.frames is not None:
            state["frames"] = self.frames.pack(self._store["handle"][slots].tolist())
        numbers = {"first": first, "oldest": oldest, "total_added": self._added}
        return state | numbers | {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict, earlier: Iterable[dict] = ()) -> None:
        """Hold what was held when `state` was made, and nothing else; the next samples are those it would draw.

        Of trajectories that `state` leaves out, `earlier` states bring the rest, oldest first; they may
        overlap, and are taken one at a time. The capacity may differ: a smaller one keeps the newest. Raises,
        with a part of it held, ValueError if shapes do not fit, trajectories are missing, or only one of the two has images, and
        what a frame store raises when it is full.
        """
        if self.frames is not None:
            self.frames.close()
        self._oldest = self._count = self._steps = self._tail = self._top = 0
        self._added = state["oldest"]
        for part in itertools.chain(earlier, [state]):
            self._take_in(part)
        if self._added != state["total_added"]:
            raise ValueError(
                f"trajectories {self._added} to {state['total_added']} of the saved replay are missing"
            )
        self._rng.bit_generator.state = state["rng"]

    def _take_in(self, state: dict) -> None:
        "Add those trajectories of a state that come next."
        if ("frames" in state) != (self.frames is not None):
            raise ValueError("the saved replay and this one differ in whether they hold images")
        skip, lengths = self._added - state["first"], state["length"].tolist()
        if not 0 <= skip < len(lengths):
            return  # nothing new; or a gap, which is told at the end
        arrays, row = {name: state[name].numpy() for name in self._rows}, sum(lengths[:skip]) + skip
        handles = itertools.repeat(0) if self.frames is None else self.frames.unpack(state["frames"], skip)
        fields = (state[name][skip:].tolist() for name in ("length", "terminated", "start", "task"))
        for steps, *fields_of_one in zip(*fields):
            part = slice(row, row + steps)
            obs = arrays["obs"][row : row + steps + 1]
            checked = self._checked(obs, arrays["action"][part], arrays["reward"][part])
            self._evict_for(steps)
            self._put(*checked, *fields_of_one, next(handles))
            row += steps + 1


def _example() -> None:
    "A rollout of five steps, small enough to follow by eye, and a window from its middle."
    action_T, reward_T = np.array([2, 0, 1, 1, 2]), np.array([0, 0, 0.5, 0, 1], np.float32)
    # Features of an observation: its own number, previous action, previous reward.
    obs_TO = np.zeros((6, 3), np.float32)
    obs_TO[:, 0], obs_TO[1:, 1], obs_TO[1:, 2] = np.arange(6), action_T, reward_T
    arguments = {"observation_dim": 3, "action_shape": (), "action_dtype": np.int64, "max_length": 5}
    replay = Replay(**arguments, capacity_trajectories=100, seed=1)
    replay.add(obs_TO, action_T, reward_T, terminated=True, start=0, task=7)
    bytes_ = Replay.memory_bytes(**arguments, capacity_trajectories=100)
    print(f"100 trajectories x (5 + 1) rows x (3 x 4 + 8 + 4) bytes + 100 x 41 = {bytes_} bytes at most")

    def show(batch: Batch, b: int) -> None:
        names = ("time", "o (number, a_t-1, r_t-1)", "a_t", "r_t", "done", "mask")
        print("".join(f"{name:>6}" if len(name) < 6 else f"{name:>26}" for name in names))
        for t in range(batch.time_BT.shape[1]):
            line = f"{batch.time_BT[b, t].item():>6}{batch.obs_BTO[b, t].tolist()!s:>26}"
            if t < batch.mask_BT.shape[1]:
                line += f"{batch.action_BT[b, t].item():>6}{batch.reward_BT[b, t].item():>6}"
                line += f"{int(batch.done_BT[b, t]):>6}{int(batch.mask_BT[b, t]):>6}"
            print(line)

    print("\nthe rollout, whole: 5 steps, 6 observations; o_t+1 shows a_t and r_t; done on the last step")
    show(replay.sample(1, context=5), 0)
    print("\na window of 3 steps from its middle: no done, and its first previous action is the true one")
    batch = next(
        batch for batch in iter(lambda: replay.sample(1, context=3), None) if batch.time_BT[0, 0] == 1
    )
    show(batch, 0)
    replay.add(obs_TO[:3] + 100, action_T[:2], reward_T[:2], terminated=False, start=400, task=8)
    batch = replay.sample(8, context=5)
    b = batch.task_B.tolist().index(8)
    print("\na segment of 2 steps, cut at time 402 of a long rollout, beside the first: zeros are padding")
    show(batch, b)
    print(f"steps in the mask of each window: {batch.mask_BT.sum(1).tolist()}, tasks {batch.task_B.tolist()}")


if __name__ == "__main__":
    _example()
