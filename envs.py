r"""Many tasks as one environment: five benchmarks, and any Gymnasium ids, in one padded space.

What     `MultiTaskEnv` draws a task at each reset and plays it for one rollout of one or more attempts;
         observations and actions of all tasks are padded to the largest. `make_env` builds it by name
Why      in-context meta-RL: the agent has to find out from what it sees which task it is in
Paper    AMAGO-2 section 4 and appendix B; POPGym's one-shot rewards as in E-RL2 (Stadie et al.)
Shapes   O features of an observation, A actions (discrete) or dimensions of one (continuous)
Copy     this file and simulators.py; need numpy and gymnasium, and a benchmark's package to play it
Try      python envs.py      and      python envs.py --list popgym

The observation is all that the agent sees, one flat float32 vector (`env.layout` names its slices):

    observation       the task's own features, one-hot where discrete, zeros up to the largest task;
                      where all tasks name the same parts (BabyAI), a slice for each of these instead
    previous_action   the last action: one-hot over A, or the continuous vector; zeros at a rollout's start
    previous_reward   the real one, before the learner's multiplier, in exploration attempts too
    attempt_start     1 where this is the first observation of an attempt
    attempt           index of the attempt, from 0
    valid             0 if the last action was invalid for this task (discrete actions only)

Tasks of images: {"image": (H, W, 3) uint8, "vector": the rest of the above, float32}.

Rollouts and attempts. Memory runs through a rollout, so nothing but these flags marks an attempt's end:
there is no dead step (OFFICIAL: the authors spend one ignored action, except in Meta-World). The
observation after an attempt's last action is the next attempt's first, a fresh variant of the same task
(`same_variant`: the same one again), and carries that action's reward; the last frame of the finished
attempt is dropped. The rollout terminates when its last attempt is over, for whatever reason; only a cap
of `max_steps` truncates it. Rewards of the first `free_attempts` are shown to the agent and not returned:
free exploration, then the plays that count. A rollout in progress is no more than a generator's state and the
actions since: `snapshot` and `restore`.

OFFICIAL  sizes come from the spaces as they are: 27 actions, where the paper's POPGym had 26.
DEVIATION `attempt`: the paper's agent sees no index of its attempt, and finds it out.
DEVIATION `store_executed`: an invalid action is replaced by a random valid one, and `previous_action`
          shows the one that was carried out instead of the one that was chosen.
"""

import difflib
import math
import re
import runpy
import sys
from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
from gymnasium import spaces

# -------------------------------------------------------------------------------- spaces as flat vectors


def nearest(name: str, names: Sequence[str]) -> str:
    "Up to three of `names` that a person who typed `name` may have meant."
    same = [n for n in names if re.sub(r"-v\d+$", "", n) == re.sub(r"-v\d+$", "", name)]
    if same:  # another version: nothing else was meant
        return ", ".join(same)
    inside = [n for n in names if name.lower() in n.lower()]
    return ", ".join((inside or difflib.get_close_matches(name, names, cutoff=0.4) or list(names))[:3])


def first_line(error: Exception) -> str:
    "The first sentence of an exception's text."
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def feature_count(space: spaces.Space) -> int:
    """Width of a space as a flat vector, one-hot where it is discrete. ValueError for other spaces."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(np.sum(space.nvec))
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    if isinstance(space, spaces.Tuple):
        return sum(feature_count(s) for s in space.spaces)
    if isinstance(space, spaces.Dict):
        return sum(feature_count(s) for s in space.values())
    raise ValueError(f"observations of type {type(space).__name__} cannot be made into a vector")


def flattener(space: spaces.Space, at: int = 0) -> Callable:
    """A function (value, out) that writes a value of `space` into the zeroed vector `out`, from `at` on.

    Built once, because this runs at every step and Gymnasium's own `flatten` costs as much as a task.
    The function raises ValueError for NaN and infinity, and for a value of another shape: with a single number
    NumPy would fill the whole slice, without a word.
    """
    if isinstance(space, spaces.Discrete):
        at -= int(space.start)

        def write(value, out):
            out[at + int(value)] = 1.0
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, shape = space.nvec.ravel(), space.shape
        first = (at + np.concatenate([[0], np.cumsum(nvec)[:-1]])).reshape(shape) - space.start

        def write(value, out):
            check_shape(value, shape)
            out[first + value] = 1.0
    elif isinstance(space, (spaces.Tuple, spaces.Dict)):
        named = list(space.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))
        starts = at + np.cumsum([0] + [feature_count(s) for _, s in named])
        parts = [(key, flattener(s, int(start))) for (key, s), start in zip(named, starts)]

        def write(value, out):
            for key, write_part in parts:
                write_part(value[key], out)
    else:
        end, shape = at + feature_count(space), space.shape

        def write(value, out):
            check_shape(value, shape)
            part = out[at:end]
            part.reshape(shape)[...] = value
            # NaN and infinity stay in a sum of squares; to look at each number takes five times as long.
            if not math.isfinite(part.dot(part)) and not np.isfinite(part).all():
                raise ValueError(f"one of its numbers is {part[np.isfinite(part).argmin()]}")

    return write


def check_shape(value, shape: tuple[int, ...]) -> None:
    "ValueError for a value of another shape. An array is asked first: `np.shape` takes longer."
    if getattr(value, "shape", None) != shape and np.shape(value) != shape:
        raise ValueError(f"shape {np.shape(value)} where {shape} was announced")


class Actions:
    """How one task's own actions are numbered (discrete) or scaled (continuous).

    `size` is the number of actions, or their dimension; `to_task` maps our action to the task's own.
    MultiDiscrete actions are numbered in row-major order. ValueError for other spaces.
    """

    def __init__(self, space: spaces.Space):
        self.discrete = not isinstance(space, spaces.Box)
        if isinstance(space, spaces.Discrete):
            self.size, first = int(space.n), int(space.start)
            self.to_task = lambda action: action + first
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.size, shape, first = int(np.prod(space.nvec)), tuple(space.nvec), space.start
            self.to_task = lambda action: np.array(np.unravel_index(action, shape)) + first
        elif isinstance(space, spaces.Box) and space.is_bounded():
            self.size, shape, dtype = int(np.prod(space.shape)), space.shape, space.dtype
            low, high = space.low, space.high
            # [-1, 1] -> the task's own bounds
            self.to_task = lambda action: (low + (high - low) * (action.reshape(shape) + 1) / 2).astype(dtype)
        else:
            raise ValueError(f"actions of type {space} are neither discrete nor bounded vectors")


# -------------------------------------------------------------------------------------- the environment


class MultiTaskEnv(gymnasium.Env):
    """One of several tasks in each rollout, drawn uniformly; see the file's docstring for what is seen.

    Arguments: `tasks` {name: constructor}; `attempts` plays in a rollout, the first `free_attempts` of
    them (default: all but the last) without returned reward; `store_executed` as above; `max_steps` of a
    rollout, after which it is truncated; `reward_factors` {name: factor} by which a task's rewards are
    multiplied before anybody sees them (missing: 1); `same_variant` of the task (goal, layout, level) in all
    attempts of a rollout; `mark_attempts` draws a black box in the top left corner of images in all attempts
    but the first, so that a policy without memory knows too; `clip_rewards` to [-1, 1] where they are seen
    and returned; `drawn` indices of the tasks that `reset` draws from (default: all). Everything random
    follows from `reset(seed=...)`: the task, its variants, and the replacement of invalid actions.
    `reset(options={"task": name})` asks for a task.

    A task is a Gymnasium environment whose `reset(seed=...)` decides its variant completely. It may say
    "success" in its steps' info.
    info: "task" and "task_id" always, for reports only; after a rollout's last step also "return" (the
    counted one), "length" (env steps) and "attempt_returns" (the real return of each attempt), both in the
    task's own scale, neither multiplied nor clipped; and, of a task that tells its success,
    "attempt_success" (attempts,): 1 where any step of that attempt succeeded.
    Attributes: `tasks` their names, `layout` {name: slice of the vector}, `max_rollout_length` in
    steps, or None where neither a task nor `max_steps` sets a limit.
    Raises ValueError for no tasks, fewer than one attempt, no attempt that counts, discrete and continuous
    actions or vectors and images together, an action outside `action_space`; `ResetNeeded` for a step
    outside a rollout. A task that raises anything, that returns NaN or infinity in an observation or a reward,
    or an observation of another shape than its space's, is a ValueError too: one line, with task and step.
    """

    def __init__(
        self,
        tasks: dict[str, Callable],
        attempts: int = 1,
        store_executed: bool = False,
        free_attempts: int | None = None,
        max_steps: int | None = None,
        reward_factors: dict[str, float] | None = None,
        same_variant: bool = False,
        mark_attempts: bool = False,
        clip_rewards: bool = False,
        drawn: Sequence[int] | None = None,
    ):
        if not tasks:
            raise ValueError("no tasks given")
        if attempts < 1:
            raise ValueError(f"--attempts must be at least 1, got {attempts}")
        self.free_attempts = attempts - 1 if free_attempts is None else free_attempts
        if not 0 <= self.free_attempts < attempts:
            raise ValueError(
                f"free_attempts must be from 0 to {attempts - 1}, so that an attempt counts, got {free_attempts}"
            )
        self.tasks, self.attempts, self.store_executed = list(tasks), attempts, store_executed
        self.max_steps, self.same_variant = max_steps, same_variant
        self.mark_attempts, self.clip_rewards = mark_attempts, clip_rewards
        self.drawn = range(len(tasks)) if drawn is None else drawn
        self._factor = [float((reward_factors or {}).get(name, 1.0)) for name in tasks]
        self._envs = [make() for make in tasks.values()]
        self._actions = [Actions(env.action_space) for env in self._envs]
        kinds = {actions.discrete for actions in self._actions}
        if len(kinds) > 1:
            named = {kind: [t for t, a in zip(tasks, self._actions) if a.discrete == kind] for kind in kinds}
            raise ValueError(
                f"mixed action kinds: {', '.join(named[True])} discrete, {', '.join(named[False])} continuous. "
                "Train them apart: one policy has one kind of action"
            )
        self.discrete = kinds.pop()
        seen = [env.observation_space for env in self._envs]
        images = {space.shape for space in seen if is_image(space)}
        if images and not (len(images) == 1 and all(is_image(space) for space in seen)):
            shown = ", ".join(f"{name} {space.shape}" for name, space in zip(tasks, seen))
            raise ValueError(f"images must all have one shape, and no vectors beside them, got {shown}")
        self.image_shape = images.pop() if images else None
        A = max(actions.size for actions in self._actions)
        flags = {"previous_action": A, "previous_reward": 1, "attempt_start": 1, "attempt": 1}
        flags |= {"valid": 1} if self.discrete else {}
        if self.image_shape:
            widths = {}
        elif isinstance(seen[0], spaces.Dict) and all(space == seen[0] for space in seen):
            widths = {name: feature_count(space) for name, space in seen[0].items()}
        else:
            widths = {"observation": max(feature_count(space) for space in seen)}
        self._write = [] if self.image_shape else [flattener(space) for space in seen]
        O = sum(widths.values())
        widths |= flags
        ends = np.cumsum([0, *widths.values()])
        self.layout = {name: slice(int(a), int(b)) for name, a, b in zip(widths, ends, ends[1:])}
        self._size, self._first_action, self._first_flag = int(ends[-1]), O, O + A
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)
        if self.image_shape:
            image = spaces.Box(0, 255, self.image_shape, np.uint8)
            self.observation_space = spaces.Dict({"image": image, "vector": self.observation_space})
        self.action_space = spaces.Discrete(A) if self.discrete else spaces.Box(-1, 1, (A,), np.float32)
        limits = [attempt_limit(env) for env in self._envs]
        longest = None if None in limits else attempts * max(limits)
        self.max_rollout_length = min((n for n in (longest, max_steps) if n is not None), default=None)
        self.observation_size, self.action_size = self._size, A
        self.parts = {"vector": ((self._size,), np.dtype(np.float32))}
        if self.image_shape:
            self.parts["image"] = (self.image_shape, np.dtype(np.uint8))
        self._info = [{"task": name, "task_id": i} for i, name in enumerate(self.tasks)]
        self._task = self._start = None

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start a rollout: draw a task (or take options["task"]) and a variant of it."""
        super().reset(seed=None if seed is None else int(seed))
        name = (options or {}).get("task")
        # With the actions since, all that `restore` needs: everything else follows.
        self._start, self._taken = {"generator": self.np_random.bit_generator.state, "task": name}, []
        if name is None:
            self._task = self.drawn[int(self.np_random.integers(len(self.drawn)))]
        elif name in self.tasks:
            self._task = self.tasks.index(name)
        else:
            near = nearest(name, self.tasks)
            raise ValueError(f"options ask for task '{name}', not one of these. Did you mean {near}?")
        self._attempt = self._length = 0
        self._return, self._attempt_returns = 0.0, [0.0] * self.attempts
        self._seed = self._success = None
        obs = self._see(self._new_attempt(), reward=0.0, attempt_start=True, valid=True)
        return obs, dict(self._info[self._task])

    def step(self, action):
        """One step of the task. Rewards of exploration attempts are shown, not returned."""
        task = self._task
        if task is None:
            raise gymnasium.error.ResetNeeded("the rollout is over, or none has begun: call reset() first")
        actions = self._actions[task]
        if self.discrete:
            chosen = int(action)
            # Out of range of all tasks, it would be written into a neighbouring slice of the observation.
            if not 0 <= chosen < self.action_space.n:
                raise ValueError(f"action {chosen} is not one of 0 to {self.action_space.n - 1}")
            valid = chosen < actions.size
            # An invalid action becomes a uniformly random valid one (appendix B).
            executed = chosen if valid else int(self.np_random.integers(actions.size))
        else:
            chosen = np.clip(np.asarray(action, dtype=np.float32), -1.0, 1.0)
            if chosen.shape != self.action_space.shape:
                raise ValueError(f"an action has shape {self.action_space.shape}, got {chosen.shape}")
            if not math.isfinite(chosen.dot(chosen)):  # or it would look like the task's fault
                raise ValueError(f"an action must be finite, got {chosen.tolist()}")
            valid, executed = True, chosen[: actions.size]
        self._taken.append(chosen)
        self._length += 1
        try:
            frame, reward, terminated, truncated, own_info = self._envs[task].step(actions.to_task(executed))
            own_reward, over, success = float(reward), bool(terminated or truncated), own_info.get("success")
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self._fault(f"raised {type(error).__name__}: {first_line(error)}") from error
        counts = self._attempt >= self.free_attempts
        reward = own_reward * self._factor[task]
        if not abs(reward) <= 3.4e38:  # nor is NaN; a float32 ends there
            raise self._fault(f"returned a reward of {own_reward}")
        if self.clip_rewards:
            reward = min(max(reward, -1.0), 1.0)
        returned = reward if counts else 0.0
        self._attempt_returns[self._attempt] += own_reward
        self._return += own_reward if counts else 0.0
        if success is not None:
            if self._success is None:
                self._success = np.zeros(self.attempts, dtype=np.float32)
            # Once is enough: a Meta-World success may be lost again before the attempt ends.
            self._success[self._attempt] = max(self._success[self._attempt], float(success))
        terminated = over and self._attempt == self.attempts - 1
        next_attempt = over and not terminated
        if next_attempt:
            self._attempt += 1
            frame = self._new_attempt()
        truncated = self._length == self.max_steps and not terminated
        shown = executed if self.store_executed else chosen
        obs = self._see(frame, reward, next_attempt, valid, shown)
        info = self._info[task].copy()
        if terminated or truncated:
            info["return"], info["length"] = self._return, self._length
            info["attempt_returns"] = np.array(self._attempt_returns, dtype=np.float32)
            if self._success is not None:
                info["attempt_success"] = self._success
            self._task = None
        return obs, returned, terminated, truncated, info

    def step_on(self, action) -> tuple:
        """What `step` returns, and None; or the next rollout's first observation and info, and the ended one's last."""
        obs, reward, terminated, truncated, info = self.step(action)
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, info, None
        last, (obs, info) = {"final_obs": obs, "final_info": info}, self.reset()
        return obs, reward, terminated, truncated, info, last

    def _new_attempt(self):
        "First frame of an attempt. Its variant's seed comes from our own generator, so one seed decides all."
        if self._seed is None or not self.same_variant:
            self._seed = int(self.np_random.integers(2**31 - 1))
        try:
            return self._envs[self._task].reset(seed=self._seed)[0]
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self._fault(f"raised {type(error).__name__}: {first_line(error)}") from error

    def _see(self, frame, reward: float, attempt_start: bool, valid: bool, action=None):
        "The observation, with the action that led to it. New arrays each time: nothing stored can alias."
        vector = np.zeros(self._size, dtype=np.float32)
        try:
            if self.image_shape:
                check_shape(frame, self.image_shape)
                image = np.asarray(frame).astype(np.uint8, casting="safe")  # a copy
            else:
                self._write[self._task](frame, vector)
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self._fault(f"returned an observation unlike its space: {first_line(error)}") from error
        at, flag = self._first_action, self._first_flag
        if action is None:
            pass
        elif self.discrete:
            vector[at + action] = 1.0
        else:
            vector[at : at + len(action)] = action
        # One number at a time: at this size, building an array from them would cost more than the rest.
        vector[flag], vector[flag + 1], vector[flag + 2] = reward, attempt_start, self._attempt
        if self.discrete:
            vector[flag + 3] = valid
        if not self.image_shape:
            return vector
        if self.mark_attempts and self._attempt > 0:
            side = image.shape[0] // 8  # the paper names no size; 8 of 64 pixels hide little of any game
            image[:side, :side] = 0
        return {"image": image, "vector": vector}

    def _fault(self, what: str) -> ValueError:
        "What the task that is played has done wrong, and when, in one line."
        return ValueError(
            f"task '{self.tasks[self._task]}' {what} (env step {self._length} of a rollout, attempt "
            f"{self._attempt + 1} of {self.attempts}). Mend it, or leave it out with --tasks"
        )

    def snapshot(self) -> dict:
        """The rollout so far as plain data, from which `restore` lives it again. `ResetNeeded` if there is none.

        {"generator": our generator's state before the task was drawn, "task": the one asked for, or None, "actions":
        those taken since}. A simulator's own state would need a pickle, and loading one runs code.
        """
        if self._start is None:
            raise gymnasium.error.ResetNeeded("no rollout has begun: call reset() first")
        # A float32 number survives as the same double, and comes back as the same float32.
        return self._start | {"actions": np.array(self._taken).tolist()}

    def restore(self, snapshot: dict) -> tuple:
        """Live a rollout again, up to where `snapshot` was taken: (observation, info) as they were then.

        What follows is what would have followed. Where seed and actions do not determine a simulator, the observation
        may be another: compare it. A rollout that ends too early gives a new one's first, which equals no later one.
        """
        self.np_random.bit_generator.state = snapshot["generator"]
        obs, info = self.reset(options={"task": snapshot["task"]})
        for action in snapshot["actions"]:
            if self._task is None:
                return self.reset()
            obs, _, _, _, info = self.step(action)
        return obs, info

    def render(self) -> np.ndarray | None:
        """A picture (H, W, 3) uint8 of the task that is played, as people see it; None where it has none."""
        try:
            return None if self._task is None else self._envs[self._task].render()
        except NotImplementedError:  # Gymnasium's default: POPGym's tasks draw nothing
            return None

    def close(self) -> None:
        """Close every task's environment."""
        for env in self._envs:
            env.close()


def is_image(space: spaces.Space) -> bool:
    "Whether a space holds RGB images, (H, W, 3) uint8."
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


def attempt_limit(env: gymnasium.Env) -> int | None:
    """The most steps that one attempt can take, or None if the task names no limit.

    A Gymnasium id has it in its spec. POPGym's classes have `max_episode_length`, or are card games in
    which each step but the first deals one card of the deck.
    """
    if env.spec is not None:
        return env.spec.max_episode_steps
    if getattr(env.unwrapped, "max_episode_length", None):
        return int(env.unwrapped.max_episode_length)
    deck = getattr(env.unwrapped, "deck", None)
    return None if deck is None else int(deck.num_cards) - 1


if __name__ == "__main__":
    if sys.argv[1:]:  # the benchmarks import this file, so they are asked, not imported
        runpy.run_module("suites", run_name="__main__")
