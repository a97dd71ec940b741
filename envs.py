r"""Many tasks as one environment: padded observations, one action space, and attempts at a task in a row.

What     `MultiTaskEnv` draws a task at each reset and plays it for one rollout of one or more attempts
Why      in-context meta-RL: one policy plays all tasks, and must find out from what it sees which one this is
Paper    AMAGO-2 section 4 and appendix B; POPGym's one-shot rewards as in E-RL2 (Stadie et al.)
Shapes   O numbers of an observation, A actions (discrete) or dimensions of one (continuous)
Copy     this file alone; needs numpy and gymnasium
Try      python envs.py      and, with the benchmarks of suites/ beside it,      python envs.py --list popgym

The agent sees one flat float32 vector (O,), whose slices `env.layout` names:

    observation       the task's own features, one-hot where discrete, zeros up to the largest task; where all
                      tasks have the same named parts (BabyAI), a slice for each instead: observation/grid
    previous_action   the last action: one-hot over A, or the continuous vector; zeros at a rollout's start
    previous_reward   the real one, before the learner's multiplier, in exploration attempts too
    attempt_start     1 where this is the first observation of an attempt
    attempt           index of the attempt, from 0
    valid             0 if the last action was invalid for this task (discrete actions only)

Tasks with images give {"image": (H, W, 3) uint8, "vector": the rest, float32}. Memory runs through a rollout;
only these flags mark the end of an attempt. No dead step lies between attempts (OFFICIAL: the authors spend
one ignored action, except in Meta-World): the observation after an attempt's last action is the next
attempt's first, with that action's reward. The rollout terminates when its last attempt is over; the cap
`max_steps` truncates it, and with `task_truncates` so does the task of a single attempt.

OFFICIAL  sizes come from the spaces as they are: 27 actions, where the paper's POPGym had 26.
DEVIATION `attempt`: seen in all benchmarks; the authors' agents do not see it in Meta-World.
DEVIATION `store_executed`: `previous_action` shows the valid action that replaced an invalid one.
"""

import difflib
import math
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

# -------------------------------------------------------------------------- one observation for all tasks


def flattener(space: spaces.Space, at: int = 0) -> Callable:
    """A function (value, out) that writes a value of `space` into the zeroed vector `out`, from `at` on.

    Built once, because it runs at every step, and Gymnasium's own `flatten` takes as long as a task. ValueError for
    NaN and infinity, another shape, and discrete values outside their space: they would change a neighbour's slice.
    """
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)

        def write(value, out):
            index = int(value) - start
            if not 0 <= index < n or index + start != value:
                raise ValueError(f"{value} is not in {space}")
            out[at + index] = 1.0
    elif isinstance(space, spaces.MultiDiscrete):
        counts, shape, start = space.nvec, space.shape, space.start
        first = at + (np.cumsum(counts) - counts.ravel()).reshape(shape)

        def write(value, out):
            check_shape(value, shape)
            index = value - start
            if not ((0 <= index) & (index < counts)).all() or index.dtype.kind not in "iu":
                raise ValueError(f"{np.asarray(value).tolist()} is not in {space}")
            out[first + index] = 1.0
    elif isinstance(space, (spaces.Tuple, spaces.Dict)):
        parts = []
        for key, part in parts_of(space):
            parts.append((key, flattener(part, at)))
            at += spaces.flatdim(part)

        def write(value, out):
            for key, write_part in parts:
                write_part(value[key], out)
    elif space.shape is None:
        raise ValueError(f"observations of type {type(space).__name__} cannot be made into a vector")
    else:
        end, shape, binary = at + spaces.flatdim(space), space.shape, isinstance(space, spaces.MultiBinary)
        is_good = (lambda x: (x == 0) | (x == 1)) if binary else np.isfinite

        def write(value, out):
            check_shape(value, shape)
            part = out[at:end]
            part.reshape(shape)[...] = value
            # NaN and infinity survive in a sum of squares; looking at each number takes five times as long.
            if (binary or not math.isfinite(part.dot(part))) and not is_good(part).all():
                raise ValueError(f"one of its numbers is {part[is_good(part).argmin()]}")

    return write


def parts_of(space: spaces.Tuple | spaces.Dict) -> list:
    "(key, part) in order of the keys: equal spaces have one layout, in whatever order they were written."
    return list(enumerate(space)) if isinstance(space, spaces.Tuple) else sorted(space.items(), key=str)


def check_shape(value, shape: tuple[int, ...]) -> None:
    "ValueError for a value of another shape."
    if getattr(value, "shape", None) != shape and np.shape(value) != shape:
        raise ValueError(f"shape {np.shape(value)} where {shape} was announced")


def is_image(space: spaces.Space) -> bool:
    """Whether a space holds RGB images, (H, W, 3) uint8."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


def shared_layout(named: dict[str, spaces.Space], action_space: spaces.Space) -> dict[str, slice]:
    """{name: slice of the vector} for tasks {name: observation space}: features, then what the agent did and earned.

    Images lie beside the vector. ValueError for images of several shapes, and for images and vectors together.
    """
    first, *others = named.values()
    if is_image(first) and all(is_image(space) and space.shape == first.shape for space in others):
        widths = {}
    elif any(map(is_image, named.values())):
        shown = ", ".join(f"{name} {space.shape}" for name, space in named.items())
        raise ValueError(f"images must all have one shape, and no vectors beside them, got {shown}")
    elif isinstance(first, spaces.Dict) and all(space == first for space in others):
        # The prefix keeps a task's own names, such as `attempt`, apart from ours.
        widths = {f"observation/{name}": spaces.flatdim(part) for name, part in parts_of(first)}
    else:
        widths = {"observation": max(map(spaces.flatdim, named.values()))}
    widths["previous_action"] = spaces.flatdim(action_space)
    widths |= dict.fromkeys(("previous_reward", "attempt_start", "attempt"), 1)
    widths |= {"valid": 1} if isinstance(action_space, spaces.Discrete) else {}
    ends = np.cumsum([0, *widths.values()]).tolist()
    return {name: slice(start, end) for name, start, end in zip(widths, ends, ends[1:])}


def observation_padder(space: spaces.Space, layout: dict[str, slice]) -> Callable:
    """`pad_observation` for a task with this space, which makes the agent's view of the task's own `frame`.

    The view is a vector, or {"image", "vector"} where the frame is an image. `action` led to this frame: a number, a
    vector, or None at a rollout's start. Arrays are new each time, so what was stored earlier never changes.
    """
    write, discrete = None if is_image(space) else flattener(space), "valid" in layout
    at, flag = layout["previous_action"].start, layout["previous_reward"].start
    size = max(part.stop for part in layout.values())

    def pad_observation(frame, action, reward, attempt_start, attempt, valid):
        vector = np.zeros(size, dtype=np.float32)
        if write is not None:
            write(frame, vector)  # behind a smaller task's features stay zeros: the padding
        if action is not None and discrete:
            vector[at + action] = 1.0
        elif action is not None:
            vector[at : at + len(action)] = action
        # One number at a time: for so few, building an array from them would cost more than all the rest.
        vector[flag], vector[flag + 1], vector[flag + 2] = reward, attempt_start, attempt
        if discrete:
            vector[flag + 3] = valid
        if write is not None:
            return vector
        check_shape(frame, space.shape)
        return {"image": np.asarray(frame).astype(np.uint8, casting="safe"), "vector": vector}  # a copy

    return pad_observation


# ------------------------------------------------------------------------- one action space for all tasks


class Actions:
    """How one task's own actions are numbered (discrete) or scaled from [-1, 1] to a Box's bounds (continuous).

    `size` is the number of actions, or their dimension; `to_task` maps our action to the task's own. MultiDiscrete
    actions are numbered in row-major order. ValueError for other spaces, and for infinite bounds.
    """

    def __init__(self, space: spaces.Space):
        self.discrete = not isinstance(space, spaces.Box)
        if isinstance(space, spaces.Discrete):
            self.size, first = int(space.n), int(space.start)
            self.to_task = lambda action: action + first
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.size, shape, first = math.prod(space.nvec.tolist()), tuple(space.nvec), space.start
            self.to_task = lambda action: np.array(np.unravel_index(action, shape)) + first
        elif isinstance(space, spaces.Box):
            self.size, shape, dtype = spaces.flatdim(space), space.shape, space.dtype
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            whole = dtype.kind in "iub"
            margin = 0.5 if whole else 0.0  # every whole number has an interval of length 1
            if not (np.maximum(abs(low), abs(high)) < (2**53 if whole else 1e300)).all():
                hint = "wrap the environment in gymnasium.wrappers.TransformAction with a bounded Box"
                raise ValueError(f"its actions {space} have infinite or too large bounds: {hint}")

            def to_task(action):  # in float64: float32 may leave the bounds by a rounding, int8 overflows
                unit = (action.astype(np.float64).reshape(shape) + 1) / 2
                value = low - margin + (high - low + 2 * margin) * unit
                return np.clip(np.rint(value) if whole else value, low, high).astype(dtype)

            self.to_task = to_task
        else:
            raise ValueError(f"actions of type {space} are neither discrete nor bounded vectors")


def shared_action_space(named: dict[str, Actions]) -> spaces.Space:
    """A actions, or A dimensions from -1 to 1: those of the largest task. ValueError for both kinds together."""
    discrete = [name for name, actions in named.items() if actions.discrete]
    continuous = [name for name, actions in named.items() if not actions.discrete]
    if discrete and continuous:
        mixed = f"mixed action kinds: {', '.join(discrete)} discrete, {', '.join(continuous)} continuous"
        raise ValueError(f"{mixed}. Train them apart: one policy has one kind of action")
    A = max(actions.size for actions in named.values())
    return spaces.Discrete(A) if discrete else spaces.Box(-1, 1, (A,), np.float32)


def choose_discrete(action, size: int, A: int, rng: np.random.Generator) -> tuple[int, int, bool]:
    """(chosen, executed, valid) for a task with the first `size` of A actions. ValueError for none of the A."""
    chosen = int(action)
    if not 0 <= chosen < A:  # it would be written into a neighbouring slice of the observation
        raise ValueError(f"action {chosen} is not one of 0 to {A - 1}")
    valid = chosen < size  # or else a uniformly random valid one is executed (appendix B)
    return chosen, chosen if valid else int(rng.integers(size)), valid


def choose_continuous(action, size: int, A: int, rng: np.random.Generator) -> tuple:
    """(chosen (A,), executed (size,), True): clipped to [-1, 1], the first `size` dimensions are the task's."""
    chosen = np.clip(np.asarray(action, dtype=np.float32), -1.0, 1.0)
    if chosen.shape != (A,) or not math.isfinite(chosen.dot(chosen)):  # the task would be blamed for it
        raise ValueError(f"an action is a vector of {A} finite numbers, got {chosen.tolist()}")
    return chosen, chosen[:size], True


# -------------------------------------------------------------------------------- attempts and rollouts


class Rules(NamedTuple):
    """How a rollout is played."""

    attempts: int = 1  # plays of the task
    free_attempts: int | None = None  # of them, the first, which return no reward; None: all but the last
    same_variant: bool = False  # the same goal, layout or level in all attempts; else a fresh one in each
    mark_attempts: bool = False  # a black box in images after the first attempt, for policies without memory
    max_steps: int | None = None  # of the rollout, after which it is truncated
    task_truncates: bool = False  # one attempt that its task truncates is truncated, not terminated
    reward_factors: dict[str, float] | None = None  # {task: factor} on its rewards, as seen and as returned
    clip_rewards: bool = False  # to [-1, 1], as seen and as returned
    store_executed: bool = False  # `previous_action` is the executed action, not the chosen one
    drawn: Sequence[int] | None = None  # indices of the tasks that `reset` draws from; None: all


class Attempts:
    """The attempts of one rollout: which one is played, and each one's return and success, in the task's own scale."""

    def __init__(self, count: int, free: int):
        self.count, self.free, self.index, self.steps = count, free, 0, 0
        self.returns, self.counted, self.success = [0.0] * count, 0.0, {}

    def add(self, reward: float, success: float | None) -> bool:
        """Add a step's reward, and its success where the task reports one (else None). True if the attempt counts."""
        counts = self.index >= self.free
        self.returns[self.index] += reward
        self.counted += reward if counts else 0.0
        # Once is enough: a Meta-World success may be lost again before the attempt ends.
        if success is not None:
            self.success[self.index] = max(self.success.get(self.index, 0.0), float(success))
        return counts

    def report(self) -> dict:
        """The info of a rollout's last step; returns and successes are (count,)."""
        report = {"return": self.counted, "length": self.steps, "attempt_returns": np.float32(self.returns)}
        success = [self.success.get(attempt, 0.0) for attempt in range(self.count)]
        return report | ({"attempt_success": np.float32(success)} if self.success else {})


# A task's own exceptions. SystemExit is among them, so that no task ends the program; Ctrl-C is not.
FAULTS, NUMBERS = (Exception, SystemExit, GeneratorExit), (bool, int, float, np.bool_, np.number)
KEPT_ACTIONS = 100_000  # of a rollout, for a snapshot of it


def first_line(error: Exception) -> str:
    "The first line of an exception's text."
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def raised(error: Exception) -> str:
    "What a task raised, and the line of code that did."
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {first_line(error)}, at {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"


def attempt_limit(env: gymnasium.Env) -> int | None:
    """The most steps of an attempt: from a Gymnasium id's spec, or the task's `max_episode_length`. None: unknown."""
    return env.spec.max_episode_steps if env.spec else getattr(env.unwrapped, "max_episode_length", None)


class MultiTaskEnv(gymnasium.Env):
    """One of several tasks in each rollout, drawn uniformly; see the file's docstring for what is seen.

    Arguments: `tasks` {name: constructor} of Gymnasium environments whose `reset(seed=...)` decides the variant
    completely; `rules`, or single ones by name (`attempts=2`). `reset(seed=...)` decides everything random, and
    `reset(options={"task": name})` asks for a task.
    info: "task" and "task_id", for reports only; after a rollout's last step also "return" (of the attempts that
    count), "length" in env steps, "attempt_returns" and, if the task's info says "success", "attempt_success", 1
    where any step of an attempt succeeded. Returns are the task's own, neither multiplied nor clipped.
    Attributes: `tasks` names, `layout`, `observation_size` O, `action_size` A, `discrete`, `image_shape` (or None),
    `parts` {"vector" and perhaps "image": (shape, dtype)}, `max_rollout_length` in steps, None if unlimited.
    Raises ValueError, one line, for faults of tasks, rules and actions; `ResetNeeded` after a rollout's end.
    """

    def __init__(self, tasks: dict[str, Callable], rules: Rules | None = None, **changed):
        self.rules = rules = (rules or Rules())._replace(**changed)
        if not tasks:
            raise ValueError("no tasks given")
        free = max(0, rules.attempts - 1) if rules.free_attempts is None else rules.free_attempts
        if not 0 <= free < rules.attempts:
            words = "--attempts must be at least 1, free_attempts from 0 to one less"
            raise ValueError(f"{words}, got {rules.attempts} and {free}")
        self.tasks, self.attempts, self.free_attempts = list(tasks), rules.attempts, free
        self.drawn = range(len(tasks)) if rules.drawn is None else rules.drawn
        self._factor = [float((rules.reward_factors or {}).get(name, 1.0)) for name in tasks]
        self._envs = [make() for make in tasks.values()]
        self._actions = [Actions(env.action_space) for env in self._envs]
        self.action_space = shared_action_space(dict(zip(tasks, self._actions)))
        self.action_size, self.discrete = spaces.flatdim(self.action_space), self._actions[0].discrete
        self._task_truncates = rules.task_truncates and rules.attempts == 1
        self._choose = choose_discrete if self.discrete else choose_continuous
        seen = [env.observation_space for env in self._envs]
        self.layout = shared_layout(dict(zip(tasks, seen)), self.action_space)
        self.image_shape = seen[0].shape if is_image(seen[0]) else None
        self._pad = [observation_padder(space, self.layout) for space in seen]
        self.observation_size = max(part.stop for part in self.layout.values())
        parts = {"vector": spaces.Box(-np.inf, np.inf, (self.observation_size,), np.float32)}
        parts |= {"image": spaces.Box(0, 255, self.image_shape, np.uint8)} if self.image_shape else {}
        self.observation_space = spaces.Dict(parts) if self.image_shape else parts["vector"]
        self.parts = {name: (part.shape, part.dtype) for name, part in parts.items()}
        longest = [attempt_limit(env) for env in self._envs]
        limits = [rules.max_steps, None if None in longest else rules.attempts * max(longest)]
        self.max_rollout_length = min((n for n in limits if n is not None), default=None)
        self._task = self._rollout = self._start = None

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start a rollout: draw a task (or take options["task"]) and a variant of it."""
        super().reset(seed=None if seed is None else int(seed))
        name = (options or {}).get("task")
        self._start, self._taken = {"generator": self.np_random.bit_generator.state, "task": name}, []
        if name is None:
            self._task = self.drawn[int(self.np_random.integers(len(self.drawn)))]
        elif name in self.tasks:
            self._task = self.tasks.index(name)
        else:
            near = ", ".join(difflib.get_close_matches(name, self.tasks, cutoff=0.0))
            raise ValueError(f"options ask for task '{name}', not one of these. Did you mean {near}?")
        self._rollout, self._seed = Attempts(self.attempts, self.free_attempts), None
        obs = self._observe(self._new_attempt(), reward=0.0, attempt_start=True, valid=True)
        return obs, {"task": self.tasks[self._task], "task_id": self._task}

    def step(self, action):
        """One step of the task. Rewards of free attempts are shown, not returned."""
        task, rollout, rules = self._task, self._rollout, self.rules
        if task is None:
            raise gymnasium.error.ResetNeeded("the rollout is over, or none has begun: call reset() first")
        actions = self._actions[task]
        # `_np_random` is what the property `np_random` returns, without the time of a call.
        chosen, executed, valid = self._choose(action, actions.size, self.action_size, self._np_random)
        rollout.steps += 1
        if rollout.steps <= KEPT_ACTIONS:
            self._taken.append(chosen)
        try:
            frame, own_reward, ended, cut, own_info = self._envs[task].step(actions.to_task(executed))
            own_reward, over, success = float(own_reward), bool(ended or cut), own_info.get("success")
        except FAULTS as error:
            raise self._fault(raised(error)) from error
        reward = own_reward * self._factor[task]
        if not abs(reward) <= 3.4e38:  # the largest float32; not true of NaN either
            raise self._fault(f"returned a reward of {own_reward}")
        if success is not None and not (isinstance(success, NUMBERS) and math.isfinite(success)):
            raise self._fault(f"reported info['success'] = {success!r}, which is no number")
        reward = min(max(reward, -1.0), 1.0) if rules.clip_rewards else reward
        counts = rollout.add(own_reward, success)
        last = over and rollout.index == self.attempts - 1
        next_attempt = over and not last
        if next_attempt:  # no dead step: the old attempt's last frame gives way to the new one's first
            rollout.index += 1
            frame = self._new_attempt()
        terminated = last and bool(ended or not self._task_truncates)
        truncated = (last or rollout.steps == rules.max_steps) and not terminated
        obs = self._observe(frame, reward, next_attempt, valid, executed if rules.store_executed else chosen)
        info = {"task": self.tasks[task], "task_id": task}
        if terminated or truncated:
            info |= rollout.report()
            self._task = None
        return obs, reward if counts else 0.0, terminated, truncated, info

    def _new_attempt(self):
        "First frame of an attempt. Its variant's seed comes from our own generator, so that one seed decides all."
        if self._seed is None or not self.rules.same_variant:
            self._seed = int(self.np_random.integers(2**31 - 1))
        try:
            return self._envs[self._task].reset(seed=self._seed)[0]
        except FAULTS as error:
            raise self._fault(raised(error)) from error

    def _observe(self, frame, reward: float, attempt_start: bool, valid: bool, action=None):
        try:
            obs = self._pad[self._task](frame, action, reward, attempt_start, self._rollout.index, valid)
        except FAULTS as error:
            raise self._fault(f"returned an observation unlike its space: {first_line(error)}") from error
        if self.image_shape and self._rollout.index > 0 and self.rules.mark_attempts:
            obs["image"][1:5, 1:5] = 0  # OFFICIAL: as in the authors' code
        return obs

    def _fault(self, deed: str) -> ValueError:
        when = f"env step {self._rollout.steps} of a rollout, attempt {self._rollout.index + 1} of {self.attempts}"
        return ValueError(
            f"task '{self.tasks[self._task]}' {deed} ({when}). Mend it, or leave it out with --tasks"
        )

    def snapshot(self) -> dict | None:
        """What a rollout follows from: generator's state at its start, task asked for, actions; None if too long to keep."""
        if self._start is None:
            raise gymnasium.error.ResetNeeded("no rollout has begun: call reset() first")
        taken = np.array(self._taken).tolist()  # a float32 survives as a double
        return self._start | {"actions": taken} if self._rollout.steps <= KEPT_ACTIONS else None

    def render(self) -> np.ndarray | None:
        """A picture (H, W, 3) uint8 of the task that is played, as people see it; None where it has none."""
        try:
            return None if self._task is None else self._envs[self._task].render()
        except NotImplementedError:  # Gymnasium's default: POPGym's tasks draw nothing
            return None

    def close(self) -> None:
        """Close every task's environment, and say where one cannot be closed."""
        for task, env in zip(self.tasks, self._envs):
            try:
                env.close()
            except FAULTS as error:
                print(f"warning: task '{task}' {raised(error)}, on closing")


if __name__ == "__main__":
    if sys.argv[1:]:  # the benchmarks import this file, so they are run, not imported
        runpy.run_module("suites", run_name="__main__")
        sys.exit()

    names = ("CartPole-v1", "Taxi-v3")
    env = MultiTaskEnv({n: lambda n=n: gymnasium.make(n, max_episode_steps=2) for n in names}, attempts=2)
    print(f"4 features and 500 places, 2 and 6 actions: 500 + 6 + 4 = {env.observation_size} numbers")
    env.reset(seed=0, options={"task": "CartPole-v1"})
    for action in (0, 3, 0, 1):
        obs, *_, info = env.step(action)
        print(f"CartPole, action {action}:", {n: obs[s].tolist() for n, s in [*env.layout.items()][1:]})
    print(f"attempts earned {info['attempt_returns']}, the second counts: {info['return']}")
