"""envs.py when something breaks: tasks that raise, or return nonsense, and worker processes that die or hang."""

import contextlib
import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

import train
from envs import MultiTaskEnv, flattener
from runtime.episode_buffer import EpisodeBuffer, parts
from runtime.vector_env import InProcess, InWorkers, make_vector_env, seed_globals
from suites import endless, make_env
from suites.gym import check_spaces

ROOT = Path(__file__).resolve().parent.parent
INF, NAN = float("inf"), float("nan")
UNLIKE = "returned an observation unlike its space: "


class Spoilt(gymnasium.Env):
    """Three steps an attempt; shows attempt and step in one and the same array; pays 1.

    What it returns at `when`, (attempt, step), goes through `spoil(frame, reward)` first.
    """

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3)

    def __init__(self, spoil=None, when=(2, 1)):
        self.spoil, self.when, self.attempt = spoil, when, 0
        self.frame = np.zeros(self.observation_space.shape or 2, self.observation_space.dtype or np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.attempt, self.t = self.attempt + 1, 0
        return self.show(0.0)[0], {}

    def step(self, action):
        self.t += 1
        return *self.show(1.0), self.t == 3, False, {}

    def draw(self):
        self.frame[:] = self.attempt, self.t

    def show(self, reward):
        self.draw()
        if self.spoil is not None and (self.attempt, self.t) == self.when:
            return self.spoil(self.frame, reward)
        return self.frame, reward


class SpoiltImage(Spoilt):
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def draw(self):
        self.frame[:] = 10 * self.attempt + self.t


class SpoiltCards(Spoilt):
    "Two cards of four, or named parts, made of the frame's two numbers."

    observation_space = spaces.MultiDiscrete([4, 4])


class SpoiltParts(Spoilt):
    observation_space = spaces.Dict([("sun", Spoilt.observation_space), ("moon", Spoilt.observation_space)])

    def show(self, reward):
        seen, reward = super().show(reward)
        return seen if isinstance(seen, dict) else {"sun": seen, "moon": seen}, reward


def bad(spoil, when=(2, 1), task=Spoilt, **kwargs):
    return MultiTaskEnv({"Bad": lambda: task(spoil, when)}, attempts=2, **kwargs)


def play(env, steps=6):
    env.reset(seed=0)
    for _ in range(steps):
        env.step(0)


def raising(error):
    def spoil(frame, reward):
        raise error

    return spoil


HERE = f"test_env_faults.py:{raising.__code__.co_firstlineno + 2}"


def fault_of(env) -> str:
    "The one line with which a rollout fails, under the same words about when and what to do as all others."
    with pytest.raises(ValueError) as caught:
        play(env)
    line, ending = str(caught.value), ", attempt 2 of 2). Mend it, or leave it out with --tasks"
    assert "\n" not in line and line.startswith("task 'Bad' ") and line.endswith(ending)
    return line.removeprefix("task 'Bad' ").removesuffix(ending)


@pytest.mark.parametrize(
    "error", [RuntimeError("no fuel\nand more"), ValueError("no fuel"), OSError("no fuel")]
)
def test_what_a_task_raises_is_one_line_with_task_and_step(error):
    for step in (0, 1, 2):
        env = bad(raising(error), (2, step))
        assert (
            fault_of(env)
            == f"raised {type(error).__name__}: no fuel, at {HERE} (env step {3 + step} of a rollout"
        )
        with pytest.raises(ValueError) as caught:
            play(bad(raising(error), (1, step)))
        assert f"(env step {step} of a rollout, attempt 1 of 2)" in str(caught.value)
        assert caught.value.__cause__ is error


def test_interrupts_pass_through_and_a_task_that_exits_does_not_end_the_program():
    for step in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            play(bad(raising(KeyboardInterrupt()), (2, step)))
        with pytest.raises(ValueError, match="raised SystemExit"):
            play(bad(raising(SystemExit(0)), (2, step)))


@pytest.mark.parametrize("task", [Spoilt, SpoiltImage, SpoiltCards])
@pytest.mark.parametrize("reward", [NAN, INF, -INF])
def test_rewards_that_are_no_numbers(task, reward):
    "Clipped, infinity would pass for 1."
    for clip in (False, True):
        env = bad(lambda frame, _: (frame, reward), task=task, clip_rewards=clip)
        assert fault_of(env) == f"returned a reward of {reward} (env step 4 of a rollout"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_observations_that_are_no_numbers(value):
    for step in (0, 1):
        env = bad(lambda frame, reward: (np.array([1.0, value]), reward), (2, step))
        assert fault_of(env) == f"{UNLIKE}one of its numbers is {value} (env step {3 + step} of a rollout"
    env = bad(lambda frame, reward: ({"sun": frame, "moon": frame * value}, reward), task=SpoiltParts)
    assert fault_of(env) == f"{UNLIKE}one of its numbers is {value} (env step 4 of a rollout"


class SpoiltNumber(Spoilt):
    observation_space = spaces.Discrete(4, start=1)

    def show(self, reward):
        seen, reward = super().show(reward)
        return 1 if isinstance(seen, np.ndarray) else seen, reward


class SpoiltNumberParts(SpoiltNumber):
    observation_space = spaces.Dict({"sun": SpoiltNumber.observation_space, "moon": spaces.Discrete(2)})

    def show(self, reward):
        seen, reward = super().show(reward)
        return {"sun": seen, "moon": 0}, reward


@pytest.mark.parametrize("value", [0, 5, -1, 2.7])
@pytest.mark.parametrize("task", [SpoiltNumber, SpoiltNumberParts])
def test_discrete_observations_outside_their_space(value, task):
    "They would be written into a neighbouring slice: the stored action would become another one."
    fault = fault_of(bad(lambda frame, reward: (value, reward), task=task))
    assert fault == f"{UNLIKE}{value} is not in Discrete(4, start=1) (env step 4 of a rollout"


@pytest.mark.parametrize("value", [[0, 4], [-1, 0], [0.0, 1.0]])
def test_cards_outside_their_space(value):
    env = bad(lambda frame, reward: (np.array(value), reward), task=SpoiltCards)
    assert fault_of(env) == f"{UNLIKE}{value} is not in MultiDiscrete([4 4]) (env step 4 of a rollout"


@pytest.mark.parametrize("success", ["yes", NAN, np.ones(1), []])
def test_a_success_that_is_no_number(success):
    class Successful(Spoilt):
        def step(self, action):
            *result, _ = super().step(action)
            return *result, {"success": success if self.attempt == 2 else True}

    env = MultiTaskEnv({"Bad": Successful}, attempts=2)
    assert (
        fault_of(env)
        == f"reported info['success'] = {success!r}, which is no number (env step 4 of a rollout"
    )


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_numbers_are_numbers_as_long_as_they_fit():
    "Their squares do not; the number that is not a float32 is no number any more."
    play(bad(lambda frame, reward: (np.array([1e30, -1e30]), 1e25)))
    env = bad(lambda frame, reward: (np.array([1e30, 1e300]), 0.0))
    assert fault_of(env) == f"{UNLIKE}one of its numbers is inf (env step 4 of a rollout"
    assert (
        fault_of(bad(lambda frame, _: (frame, 1e300)))
        == "returned a reward of 1e+300 (env step 4 of a rollout"
    )


@pytest.mark.parametrize(
    ("task", "seen", "words"),
    [
        (Spoilt, np.zeros(1), "shape (1,) where (2,) was announced"),  # NumPy would fill both numbers with it
        (Spoilt, 0.5, "shape () where (2,) was announced"),
        (Spoilt, np.zeros((1, 2)), "shape (1, 2) where (2,) was announced"),
        (Spoilt, [1.0, 2.0, 3.0], "shape (3,) where (2,) was announced"),
        (SpoiltCards, np.array([3]), "shape (1,) where (2,) was announced"),
        (SpoiltParts, {"sun": np.zeros(2), "moon": np.zeros(1)}, "shape (1,) where (2,) was announced"),
        (SpoiltParts, {"sun": np.zeros(2)}, "'moon'"),
        (SpoiltImage, np.zeros((8, 8, 1), np.uint8), "shape (8, 8, 1) where (8, 8, 3) was announced"),
        (SpoiltImage, np.zeros((1, 1, 3), np.uint8), "shape (1, 1, 3) where (8, 8, 3) was announced"),
        (
            SpoiltImage,
            np.full((8, 8, 3), NAN),
            "Cannot cast array data from dtype('float64') to dtype('uint8') according to the rule 'safe'",
        ),
    ],
)
def test_observations_of_another_shape(task, seen, words):
    for step in (0, 1):
        fault = fault_of(bad(lambda frame, reward: (seen, reward), (2, step), task))
        assert fault == f"{UNLIKE}{words} (env step {3 + step} of a rollout"


def test_a_list_of_the_right_length_will_do():
    play(bad(lambda frame, reward: ([1.0, 2.0], np.float32(reward))))


def test_steps_of_the_old_interface():
    class Old(Spoilt):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(
        ValueError, match=r"^task 'Old' raised ValueError: not enough values .* \(env step 1 of"
    ):
        play(MultiTaskEnv({"Old": Old}))


def test_an_action_that_is_no_number_is_the_policys_fault():
    env = make_env("gym:Pendulum-v1")
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"^an action is a vector of 1 finite numbers, got \[nan\]$"):
        env.step(np.array([NAN]))


@pytest.mark.parametrize("task", [Spoilt, SpoiltImage])
@pytest.mark.parametrize("kind", [None, InProcess, InWorkers])
def test_one_and_the_same_array_each_time_is_copied(task, kind):
    "What is stored of it differs, from step to step, from the environment to the episode buffer."
    make = functools.partial(MultiTaskEnv, {"Same": task}, attempts=2)
    own = (1 if task is Spoilt else 10) * np.array([1, 1, 1, 2, 2, 2, 2]) + np.array([0, 1, 2, 0, 1, 2, 3])
    if kind is None:
        env = make()
        seen = [parts(env.reset(seed=0)[0]), *(parts(env.step(0)[0]) for _ in range(6))]
        seen = {name: np.array([obs[name] for obs in seen]) for name in seen[0]}
    else:
        envs = kind([make] * 2)
        obs = parts(envs.reset(seed=0)[0])
        buffer = EpisodeBuffer(
            2, 6, {name: (value.shape[1:], value.dtype) for name, value in obs.items()}, rng=None
        )
        buffer.start(1, obs, time=0)
        for _ in range(6):
            obs, reward_E, _, _, info = envs.step(np.zeros(2, dtype=int))
            buffer.append(parts(obs), reward_E)
        buffer.end(1, parts(info["final_obs"][1]))
        seen, _, _ = buffer.segment(1)
        envs.close()
    picture = seen["image"][:, 0, 0, 0] if task is SpoiltImage else seen["vector"][:, :2].sum(1)
    assert picture.tolist() == own.tolist()


# ---------------------------------------------------------------------------------- worker processes


def children() -> list:
    "Those that still run; finished ones are collected."
    return multiprocessing.active_children()


@pytest.fixture(autouse=True)
def no_children_left():
    yield
    left = children()
    for process in left:
        process.kill()
    assert not left


TASKS = "RepeatFirstEasy,MineSweeperEasy,NoisyPositionOnlyCartPoleEasy"


def workers(count=4, timeout=2.0, **kwargs):
    return make_vector_env("popgym", count, True, timeout, tasks=kwargs.pop("tasks", TASKS), **kwargs)


def kill(envs, e, number=signal.SIGKILL):
    os.kill(envs.processes[e].pid, number)


@pytest.mark.parametrize("good", [0, 1])
def test_a_faulty_task_ends_the_workers_with_the_same_line(good, capfd):
    make = functools.partial(bad, raising(RuntimeError("no fuel\nand more")), (1, 2))
    makes = [make, make]
    makes[good] = functools.partial(bad, None)
    envs = InWorkers(makes)
    envs.reset(seed=0)
    envs.step([0, 0])
    with pytest.raises(ValueError) as caught:
        envs.step([0, 0])
    assert str(caught.value) == (
        f"task 'Bad' raised RuntimeError: no fuel, at {HERE} (env step 2 of a rollout, attempt 1 of 2). "
        "Mend it, or leave it out with --tasks"
    )
    assert not children() and envs.closed and capfd.readouterr() == ("", "")
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        envs.step([0, 0])
    envs.close()


def test_an_error_in_a_worker_comes_with_its_traceback():
    def make():
        if os.getpid() != parent:
            raise KeyError("ours")
        return bad(None)

    parent, envs = os.getpid(), None
    envs = InWorkers([make])
    with pytest.raises(ValueError, match="(?s)^Traceback .*KeyError: 'ours'"):
        envs.reset(seed=0)


def rows(envs, steps, disturb=lambda envs, t: None):
    "The results of that many steps, with `disturb(envs, t)` before each."
    rng = np.random.default_rng(0)
    obs, info = envs.reset(seed=7)
    seen = [(obs, info)]
    for t in range(steps):
        disturb(envs, t)
        obs, reward_E, terminated_E, truncated_E, info = envs.step(rng.integers(16, size=envs.num_envs))
        seen.append((obs, reward_E, terminated_E, truncated_E, info))
    return seen


def test_a_worker_that_dies_and_one_that_hangs_are_replaced_and_the_others_notice_nothing():
    before, threads, handles = children(), torch.get_num_threads(), len(os.listdir("/proc/self/fd"))

    def disturb(envs, t):
        if t in (30, 60):
            kill(envs, 1)
        if t == 60:  # hangs, while the other one's death is noticed at once
            kill(envs, 2, signal.SIGSTOP)

    torch.set_num_threads(2)  # a trainer has used its threads before it starts a replacement
    try:
        weights = torch.randn(200, 200, requires_grad=True)
        (weights @ weights).sum().backward()
        calm = rows(make_vector_env("popgym", 4, tasks=TASKS), 200)
        envs = workers(timeout=1.0)
        pids = [process.pid for process in envs.processes]
        start = time.monotonic()
        seen = rows(envs, 200, disturb)
        assert time.monotonic() - start > 1.0
    finally:
        torch.set_num_threads(threads)
    assert [p.pid == pid for p, pid in zip(envs.processes, pids)] == [True, False, False, True]
    lost = np.array([info["lost"] for *_, info in seen[1:]])
    assert np.argwhere(lost).tolist() == [[30, 1], [60, 1], [60, 2]]
    assert not any(info["lost"].any() for *_, info in calm[1:])
    ends = 0
    for t, (mine, theirs) in enumerate(zip(seen, calm)):
        for e in range(4):
            if e in (0, 3) or t < (None, 31, 61)[e]:
                assert np.array_equal(mine[0][e], theirs[0][e])
                assert mine[-1]["task"][e] == theirs[-1]["task"][e]
                if t:
                    assert [column[e] for column in mine[1:4]] == [column[e] for column in theirs[1:4]]
                    if mine[2][e]:
                        ends += 1
                        assert np.array_equal(mine[4]["final_obs"][e], theirs[4]["final_obs"][e])
    assert ends > 4
    layout = make_env("popgym", TASKS).layout
    for t, e in ((31, 1), (61, 1), (61, 2)):
        obs, reward_E, terminated_E, truncated_E, info = seen[t]
        assert obs[e, layout["attempt_start"]] == 1 and obs[e, layout["attempt"]] == 0
        assert not obs[e, layout["previous_action"]].any() and "final_obs" not in info
        assert reward_E[e] == 0 and not terminated_E[e] and not truncated_E[e]
        assert info["task_id"][e] == TASKS.split(",").index(info["task"][e])
        assert obs[e, layout["observation"]].any() or info["task"][e] == "MineSweeperEasy"
    envs.close()
    del envs
    assert (
        children() == before and len(os.listdir("/proc/self/fd")) <= handles + 1
    )  # torch may open one of its own


def test_a_replacements_rollouts_follow_from_the_first_seed_and_differ_from_all_others():
    def disturb(envs, t):
        if t in (5, 11):
            kill(envs, 0)

    seeds, seen = [], []
    for seed in (7, 7, 8):
        envs = workers(2, tasks="NoisyPositionOnlyCartPoleEasy")
        envs.reset(seed=seed)
        trace = [disturb(envs, t) or envs.step([0, 0])[0] for t in range(14)]
        seeds.append(envs.snapshots()[0]["generator"]["state"]["state"])
        seen.append(np.array(trace))
        envs.close()
    assert np.array_equal(seen[0], seen[1]) and seeds[0] == seeds[1] != seeds[2]
    first = seen[0][[5, 11], 0, 0]  # noise that the seed decides
    assert first[0] != first[1] and first[0] not in seen[0][:5, :, 0]


def test_lost_three_times_in_a_row_is_an_error_and_not_if_rollouts_are_finished_in_between():
    make = functools.partial(MultiTaskEnv, {"Three": Spoilt})
    envs = InWorkers([make] * 2, timeout=2.0)
    envs.reset(seed=0)
    for _ in range(4):
        kill(envs, 1)
        assert envs.step([0, 0])[-1]["lost"].tolist() == [False, True]
        assert [envs.step([0, 0])[2][1] for _ in range(3)] == [False, False, True]
    with pytest.raises(ValueError) as caught:
        for _ in range(3):
            kill(envs, 1)
            envs.step([0, 0])
    line = str(caught.value)
    assert line.startswith("a worker process died or was silent for 2 seconds three times in a row, ")
    assert "--resume" in line and "--workers none" in line and "\n" not in line
    assert not children()


def test_a_worker_that_cannot_start_again_is_an_error():
    def make():
        if os.getpid() != parent and next(made) > 0:
            os._exit(1)
        return bad(None)

    # Each process inherits the counter as it stands in the parent.
    parent, made = os.getpid(), iter(range(10))
    envs = InWorkers([make])
    next(made)
    envs.reset(seed=0)
    kill(envs, 0)
    with pytest.raises(ValueError, match="three times in a row"):
        envs.step([0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_as_rollouts_begin_is_an_error(number, monkeypatch):
    monkeypatch.setattr(InWorkers, "start_seconds", 0.5)
    for begin in (
        lambda envs: envs.reset(seed=0),
        lambda envs: envs.restore([None] * 2),
        lambda envs: envs.restart(1),
    ):
        envs = workers(2, timeout=0.5)
        envs.reset(seed=0)
        kill(envs, 1, number)
        with pytest.raises(ValueError, match="^a worker process died or was silent for 0.5 seconds, "):
            begin(envs)
        assert not children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_snapshots_leave_out_a_lost_worker_which_the_next_step_replaces(number):
    envs = workers(3, timeout=0.5)
    envs.reset(seed=0)
    envs.step([0] * 3)
    kill(envs, 1, number)
    snapshots = envs.snapshots()
    assert [s and s["actions"] for s in snapshots] == [[0], None, [0]]
    assert envs.snapshots() == snapshots
    assert envs.step([0] * 3)[-1]["lost"].tolist() == [False, True, False]
    assert [s["actions"] for s in envs.snapshots()] == [[0, 0], [], [0, 0]]
    envs.close()


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSTOP])
def test_closing_does_not_wait_for_a_lost_worker(number):
    envs = workers(2, timeout=300.0)
    envs.reset(seed=0)
    if number is not None:
        kill(envs, 0, number)
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < 3 and not children()
    envs.close()


def test_an_interrupt_within_a_step_leaves_no_worker():
    envs = workers(2, timeout=300.0)
    envs.reset(seed=0)
    kill(envs, 1, signal.SIGSTOP)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert not children()
    envs.close()


def test_workers_end_with_a_parent_that_is_killed():
    "The replacement, too. Each worker inherits copies of the pipes on which the others wait."
    code = (
        "import os, signal\n"
        "from runtime.vector_env import make_vector_env\n"
        "envs = make_vector_env('popgym', 3, True, tasks='RepeatFirstEasy')\n"
        "envs.reset(seed=0)\n"
        "os.kill(envs.processes[0].pid, signal.SIGKILL)\n"
        # As an evaluation's, beside those of training: each kind inherits the pipes of the other.
        "more = make_vector_env('popgym', 2, True, tasks='RepeatFirstEasy')\n"
        "assert envs.step([0] * 3)[-1]['lost'].any()\n"
        "print(*(process.pid for process in envs.processes + more.processes), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]

    def alive(pid):  # a zombie is dead
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 5 and not any(map(alive, pids)), done.stderr


def test_the_memory_of_a_rollout_without_an_end_is_bounded(monkeypatch):
    "Past its bound a rollout is not repeated after a resume: a new one begins, in every kind of vector environment."
    monkeypatch.setattr("envs.KEPT_ACTIONS", 5)
    env = MultiTaskEnv({"CliffWalking-v1": functools.partial(gymnasium.make, "CliffWalking-v1")})
    env.reset(seed=0)
    for t in range(8):
        assert (env.snapshot() is None) == (t > 5)
        env.step(0)
    assert len(env._taken) == 5
    envs = InProcess([lambda: env])
    assert envs.snapshots() == [None]
    obs, _ = envs.restore([None])
    assert obs[0, env.layout["attempt_start"]] == 1 and len(envs.snapshots()[0]["actions"]) == 0


class Chance(gymnasium.Env):
    "Shows numbers of the global generators, which `reset(seed=...)` does not seed."

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.draw(), {}

    def step(self, action):
        return self.draw(), 0.0, False, False, {}

    def draw(self):
        return np.array([np.random.random(), random.random(), torch.rand(())], np.float32)


gymnasium.register("Chance-v0", Chance)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_global_generators_follow_the_seed_and_differ_between_workers(asynchronous):
    def drawn(seed, lose=False):
        torch.manual_seed(seed_globals(seed, 0))  # the program's own
        with contextlib.closing(make_vector_env("gym:Chance-v0", 4, asynchronous, seed=seed)) as envs:
            rows = [envs.reset(seed=0)[0][:, :3]]
            if lose:
                kill(envs, 0)
            return np.concatenate([*rows, envs.step([0] * 4)[0][:, :3]])

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert np.array_equal(first, again) and not np.isin(first, other).any()
    assert len(np.unique(first)) == first.size  # no two environments, steps or generators draw the same
    if asynchronous:
        replaced = drawn(1, lose=True)
        assert len(np.unique(replaced)) == replaced.size and np.array_equal(replaced[5:], first[5:])


def test_a_task_that_cannot_be_closed_ends_nothing_and_is_named(runs, capsys, monkeypatch):
    "In an evaluation in this process, and at the run's end; the tasks beside it are closed."
    closed, close = [], CartPoleEnv.close

    def fails(env):
        closed.append(close(env))
        if env.state is not None:
            raise RuntimeError("viewer gone")

    monkeypatch.setattr(CartPoleEnv, "close", fails)
    flags = ["--env", "gym:CartPole-v1,Acrobot-v1", "--scale", "smoke", "--steps", "400", "--device", "cpu"]
    rows = train.main([*flags, "--name", "x", "--max_steps", "20"])
    assert len(rows) == 2 and len(closed) > 3
    assert (
        "warning: task 'CartPole-v1' raised RuntimeError: viewer gone, at test_env_faults.py"
        in capsys.readouterr().out
    )


def test_parts_whose_names_look_alike_are_refused():
    "The layout would give both one slice, and one would lie over the next part."
    observation_space = spaces.Dict({1: spaces.Box(-1, 1, (2,)), "1": spaces.Box(-1, 1, (3,))})
    env = SimpleNamespace(observation_space=observation_space, action_space=spaces.Discrete(2))
    with pytest.raises(ValueError, match="two parts of its observation look alike: 1, '1': rename one"):
        check_spaces(env)


@pytest.mark.parametrize("value", [[7, 0], [0.5, 0], [-1, 1], [256, 1]])
def test_binary_observations_outside_their_space(value):
    out = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="one of its numbers is"):
        flattener(spaces.MultiBinary(2))(np.array(value), out)
    flattener(spaces.MultiBinary(2))(np.array([0, 1], np.int8), out)
    assert out.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("limit", "typed", "far"), [(10**9, None, True), (10**9, 200_000, False), (500, None, False)]
)
def test_a_limit_that_is_far_away_is_none_for_evaluations(limit, typed, far):
    gymnasium.register("Far-v0", CartPoleEnv, max_episode_steps=limit)
    try:
        env = make_env("gym:Far-v0", max_steps=typed, longest=5000)
    finally:
        gymnasium.registry.pop("Far-v0")
    assert endless(env, typed) == far
    assert env.rules.max_steps == (5000 if far else typed)
