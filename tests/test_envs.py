"""envs.py: attempts and rollouts, what is shown and what is returned, seeds, padding, and clear errors."""

import ast
import builtins
import copy
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from config import Config
from envs import Actions, MultiTaskEnv, attempt_limit, flattener, observation_padder, shared_layout
from evaluate import evaluation_arguments
from runtime.vector_env import InProcess, InWorkers, make_vector_env, restore, step_on
from suites import BENCHMARKS, all_tasks, held_out_tasks, make_env, task_family
from suites.babyai import babyai_tokens
from suites.popgym import SCALES, popgym_tasks

ENVS_FILE = Path(__file__).resolve().parent.parent / "envs.py"


class Countdown(gymnasium.Env):
    "Shows which attempt this is and the steps so far; pays `pay` a step; ends after `length` steps."

    def __init__(self, length=3, actions=3, pay=1.0, truncates=False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self.length, self.pay, self.truncates = length, pay, truncates
        self.resets, self.seen = 0, []
        self.frame = np.zeros(2, dtype=np.float32)  # one and the same array each time

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.t = self.resets + 1, 0
        self.frame[:] = (self.resets, 0)
        return self.frame, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.seen.append(action)
        self.t += 1
        self.frame[:] = (self.resets, self.t)
        over = self.t >= self.length
        return self.frame, self.pay, over and not self.truncates, over and self.truncates, {}


def two_sizes(attempts=2, **kwargs):
    tasks = {
        "Short": lambda: Countdown(3, actions=2),
        "Long": lambda: Countdown(5, actions=4, truncates=True),
    }
    return MultiTaskEnv(tasks, attempts=attempts, **kwargs)


def view(env, obs):
    return {name: obs[s] if s.stop - s.start > 1 else float(obs[s][0]) for name, s in env.layout.items()}


def test_no_dead_step_between_attempts():
    "The observation after an attempt's last action is the next one's first, with that action's reward."
    env = two_sizes()
    obs, info = env.reset(seed=0, options={"task": "Short"})
    assert info == {"task": "Short", "task_id": 0}
    first = view(env, obs)
    assert first["attempt_start"] == 1 and first["attempt"] == 0 and first["previous_reward"] == 0
    assert first["valid"] == 1 and first["previous_action"].sum() == 0
    rows = [(view(env, r[0]), *r[1:]) for r in (env.step(t % 2) for t in range(6))]
    assert [tuple(v["observation"]) for v, *_ in rows] == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert [v["attempt_start"] for v, *_ in rows] == [0, 0, 1, 0, 0, 0]
    assert [v["attempt"] for v, *_ in rows] == [0, 0, 1, 1, 1, 1]
    assert [v["previous_reward"] for v, *_ in rows] == [1] * 6  # seen in the exploration attempt, too,
    assert [reward for _, reward, *_ in rows] == [0, 0, 0, 1, 1, 1]  # but not returned there
    assert [(bool(te), bool(tr)) for _, _, te, tr, _ in rows] == [(False, False)] * 5 + [(True, False)]
    assert [int(v["previous_action"].argmax()) for v, *_ in rows] == [0, 1, 0, 1, 0, 1]
    info = rows[-1][-1]
    assert info["return"] == 3 and info["length"] == 6 and info["attempt_returns"].tolist() == [3, 3]


def test_a_truncated_last_attempt_ends_the_rollout_terminated():
    env = two_sizes(attempts=1)
    env.reset(seed=0, options={"task": "Long"})
    results = [env.step(0) for _ in range(5)]
    assert [r[2:4] for r in results] == [(False, False)] * 4 + [(True, False)]


@pytest.mark.parametrize(
    ("env", "attempts", "ends"),
    [
        ("gym:Pendulum-v1", 1, (False, True)),  # its time limit
        ("gym:Pendulum-v1", 2, (True, False)),
        ("gym:CartPole-v1", 1, (True, False)),  # the pole has fallen
        ("popgym", 1, (True, False)),  # the task truncates; here a rollout is the horizon
    ],
)
def test_one_attempt_at_a_gym_task_ends_as_the_task_says(env, attempts, ends):
    "Truncated bootstraps, terminated does not. For the slower simulators see their own files, and the next test."
    tasks = None if env.startswith("gym") else "MultiarmedBanditEasy"
    env, done = make_env(env, tasks, attempts=attempts), False
    env.reset(seed=0)
    while not done:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        done = terminated or truncated
    assert (terminated, truncated) == ends


def test_no_benchmark_keeps_its_tasks_truncation():
    assert len(BENCHMARKS) == 8
    assert not any(benchmark.rules.task_truncates for benchmark in BENCHMARKS.values())


def test_attempts_may_all_count():
    env = two_sizes(attempts=3, free_attempts=1)
    env.reset(seed=0, options={"task": "Short"})
    results = [env.step(0) for _ in range(9)]
    assert [r[1] for r in results] == [0] * 3 + [1] * 6
    assert [r[2] for r in results] == [False] * 8 + [True]
    assert results[-1][-1]["return"] == 6 and results[-1][-1]["attempt_returns"].tolist() == [3, 3, 3]


def test_rescaled_rewards_are_seen_and_returned_but_reported_in_the_tasks_own_scale():
    env = two_sizes(attempts=2, reward_factors={"Short": 100.0})
    for task, factor in (("Short", 100.0), ("Long", 1.0)):
        obs, _ = env.reset(seed=0, options={"task": task})
        returned, seen, done = [], [], False
        while not done:
            obs, reward, done, _, info = env.step(0)
            returned.append(reward)
            seen.append(view(env, obs)["previous_reward"])
        half = len(returned) // 2
        assert seen == [factor] * 2 * half and returned == [0.0] * half + [factor] * half
        assert info["return"] == half and info["attempt_returns"].tolist() == [half, half]


def test_the_scales_benchmark_is_four_popgym_tasks_a_factor_of_a_thousand_apart():
    env, plain = make_env("scales"), make_env("popgym", ",".join(SCALES), attempts=1)
    assert env.tasks == plain.tasks and env.attempts == 1
    assert max(SCALES.values()) / min(SCALES.values()) == pytest.approx(1000) and 1.0 in SCALES.values()
    for task, factor in SCALES.items():
        rewards = []
        for one in (env, plain):
            one.reset(seed=3, options={"task": task})
            rewards.append(np.array([one.step(0)[1] for _ in range(5)]))
        np.testing.assert_allclose(rewards[0], factor * rewards[1])
        assert rewards[1].any()


def test_a_cap_on_the_rollout_truncates_it_unless_it_is_over_anyway():
    for cap, length, ends in ((4, 4, (False, True)), (6, 6, (True, False)), (7, 6, (True, False))):
        env = two_sizes(max_steps=cap)
        assert env.max_rollout_length == cap
        env.reset(seed=0, options={"task": "Short"})
        results = [env.step(0) for _ in range(length)]
        assert all(r[2:4] == (False, False) for r in results[:-1]) and results[-1][2:4] == ends
        assert results[-1][-1]["length"] == length
    assert results[-1][-1]["return"] == 3
    assert two_sizes().max_rollout_length is None  # these tasks name no limit
    cards = {"RepeatFirstEasy": popgym_tasks()["RepeatFirstEasy"]}
    limits = [MultiTaskEnv(cards, attempts=2, max_steps=cap).max_rollout_length for cap in (60, 200)]
    assert limits == [60, 102]


class Goals(gymnasium.Env):
    "Shows the variant that its seed drew; succeeds on action 1; four steps; pays 3 a step, or takes them."

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.t = self.np_random.integers(1000, size=1).astype(np.float32), 0
        return self.goal, {}

    def step(self, action):
        self.t += 1
        return self.goal, (3.0, -3.0)[action], False, self.t == 4, {"success": action == 1}


def test_attempts_at_the_same_variant_and_a_new_one_each_rollout():
    for same in (False, True):
        env, goals = MultiTaskEnv({"Goals": Goals}, attempts=3, same_variant=same), []
        obs, _ = env.reset(seed=0)
        for _ in range(20):
            attempts, done = [obs[0]], False
            while not done:
                obs, _, done, _, _ = env.step(0)
                if view(env, obs)["attempt_start"]:
                    attempts.append(obs[0])
            goals.append(attempts)
            obs, _ = env.reset()
        variants = [len(set(attempts)) for attempts in goals]
        assert variants == [1] * 20 if same else sum(variants) > 50
        assert len({attempts[0] for attempts in goals}) > 15


def test_an_attempt_succeeds_if_any_of_its_steps_does():
    def play(env, actions):
        env.reset(seed=0)
        return [env.step(action)[-1] for action in actions]

    env = MultiTaskEnv({"Goals": Goals}, attempts=3, free_attempts=0)
    infos = play(env, [0, 1, 0, 0] + [0, 0, 0, 0] + [0, 0, 0, 1])  # in the middle, never, on the last step
    assert infos[-1]["attempt_success"].tolist() == [1, 0, 1]
    assert infos[-1]["attempt_success"].dtype == np.float32
    assert not any("attempt_success" in info for info in infos[:-1])
    cut = MultiTaskEnv({"Goals": Goals}, attempts=3, max_steps=6)
    assert play(cut, [0, 0, 0, 0, 1, 0])[-1]["attempt_success"].tolist() == [0, 1, 0]
    silent = two_sizes(attempts=1)
    silent.reset(seed=0, options={"task": "Short"})
    assert "attempt_success" not in [silent.step(0) for _ in range(3)][-1][-1]


def test_clipped_rewards_are_seen_and_returned_and_reported_unclipped():
    for factor, paid in ((1.0, [1.0, -1.0, -1.0, 1.0]), (0.1, [0.3, -0.3, -0.3, 0.3])):
        env = MultiTaskEnv({"Goals": Goals}, reward_factors={"Goals": factor}, clip_rewards=True)
        env.reset(seed=0)
        results = [env.step(action) for action in (0, 1, 1, 0)]
        assert [reward for _, reward, *_ in results] == pytest.approx(paid)
        assert [view(env, obs)["previous_reward"] for obs, *_ in results] == pytest.approx(paid)
        assert results[-1][-1]["return"] == 0 and results[-1][-1]["attempt_returns"].tolist() == [0]
    env = MultiTaskEnv({"Goals": Goals}, clip_rewards=True)
    env.reset(seed=0)
    assert [env.step(0) for _ in range(4)][-1][-1]["return"] == 12


def test_an_evaluation_shows_rewards_as_training_did():
    "A policy that learned from clipped rewards sees clipped ones; reported returns are unclipped either way."
    config = Config(env="gym:CartPole-v1", clip_rewards=True, attempts=1)
    for split in ("train", "test"):
        assert make_env(**evaluation_arguments(config, split)).rules.clip_rewards


class Screen(gymnasium.Env):
    "A 16x16 picture, as bright as steps were taken, always one and the same array; five steps."

    observation_space, action_space = spaces.Box(0, 255, (16, 16, 3), np.uint8), spaces.Discrete(3)
    max_episode_length = 5

    def __init__(self):
        self.picture = np.zeros((16, 16, 3), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.picture[:] = 100
        return self.picture, {}

    def step(self, action):
        self.picture += 1
        assert self.picture.min() == self.picture.max()  # nobody drew into it
        return self.picture, 1.0, self.picture.max() == 105, False, {}


def screens(**kwargs):
    return MultiTaskEnv({"A": Screen, "B": Screen}, attempts=2, free_attempts=0, **kwargs)


@pytest.mark.parametrize("mark", [False, True])
def test_images_come_beside_a_vector_of_the_rest(mark):
    env = screens(mark_attempts=mark)
    check_env(env, skip_render_check=True)
    assert env.image_shape == (16, 16, 3) and env.max_rollout_length == 10
    assert {n: s.stop - s.start for n, s in env.layout.items()} == {
        "previous_action": 3,
        "previous_reward": 1,
        "attempt_start": 1,
        "attempt": 1,
        "valid": 1,
    }
    seen = [env.reset(seed=0)[0], *(env.step(t % 3)[0] for t in range(10))]
    assert [obs["image"].max() for obs in seen] == [100, 101, 102, 103, 104, 100, 101, 102, 103, 104, 105]
    assert [list(obs["vector"]) for obs in seen[:2]] == [[0, 0, 0, 0, 1, 0, 1], [1, 0, 0, 1, 0, 0, 1]]
    assert list(seen[5]["vector"]) == [0, 1, 0, 1, 1, 1, 1]
    for t, obs in enumerate(seen):
        box = np.zeros((16, 16, 3), dtype=bool)
        box[1:5, 1:5] = mark and t >= 5
        assert np.array_equal(obs["image"] == 0, box)


def test_images_of_one_shape_and_nothing_beside_them():
    class Wide(Screen):
        observation_space = spaces.Box(0, 255, (16, 32, 3), np.uint8)

    for other in (Wide, Goals):
        with pytest.raises(ValueError, match=r"one shape, and no vectors .* Screen \(16, 16, 3\), Other"):
            MultiTaskEnv({"Screen": Screen, "Other": other})


class Parts(Goals):
    "Its observation has named parts."

    observation_space = spaces.Dict(
        [("sun", spaces.Discrete(3)), ("moon", spaces.Box(0, 9, (2, 2), np.uint8))]
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"sun": 2, "moon": np.arange(4).reshape(2, 2)}, {}


class OtherOrder(Parts):
    observation_space = spaces.Dict(list(Parts.observation_space.items())[::-1])


class OurNames(Parts):
    "Parts with the names of what the environment adds."

    observation_space = spaces.Dict(
        {name: spaces.Discrete(3) for name in ("attempt", "previous_action", "tokens", "valid")}
    )

    def reset(self, *, seed=None, options=None):
        return {name: i % 3 for i, name in enumerate(self.observation_space)}, {}


def test_a_tasks_own_names_stay_apart_from_ours():
    env = MultiTaskEnv({"A": OurNames})
    seen = view(env, env.reset(seed=0)[0])
    own = {name.removeprefix("observation/"): list(v) for name, v in seen.items() if "/" in name}
    assert own == {
        "attempt": [1, 0, 0],
        "previous_action": [0, 1, 0],
        "tokens": [0, 0, 1],
        "valid": [1, 0, 0],
    }
    assert seen["attempt"] == 0 and seen["valid"] == 1 and len(seen) == 4 + 5


def test_parts_that_all_tasks_name_are_named_in_the_layout():
    "In order of their names, so that tasks with equal spaces are laid out alike in whatever order they wrote them."
    env = MultiTaskEnv({"A": Parts, "B": OtherOrder})
    assert list(env.layout)[:3] == ["observation/moon", "observation/sun", "previous_action"]
    for task in env.tasks:
        seen = view(env, env.reset(seed=0, options={"task": task})[0])
        assert seen["observation/sun"].tolist() == [0, 0, 1]
        assert seen["observation/moon"].tolist() == [0, 1, 2, 3]
    assert list(MultiTaskEnv({"A": Parts, "B": Goals}).layout)[:2] == ["observation", "previous_action"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_images_pass_through_vector_environments(asynchronous):
    "Both reset on the same step, and hand over the last observation of a rollout apart."
    envs = (InWorkers if asynchronous else InProcess)([screens] * 2)
    try:
        obs, _ = envs.reset(seed=0)
        assert obs["image"].shape == (2, 16, 16, 3) and obs["image"].dtype == np.uint8
        assert obs["vector"].shape == (2, 7) and (obs["image"] == 100).all()
        for t in range(10):
            obs, _, done, _, info = envs.step(np.array([t % 3, 1]))
            assert done.tolist() == [t == 9] * 2
        assert (obs["image"] == 100).all() and obs["vector"][:, :3].max() == 0
        for e, action in ((0, 0), (1, 1)):
            last = info["final_obs"][e]
            assert (last["image"] == 105).all() and last["vector"][action] == 1
        assert info["final_info"]["return"].tolist() == [10, 10]
    finally:
        envs.close()


def test_a_step_outside_a_rollout_is_refused():
    env = two_sizes(attempts=1)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(0)
    env.reset(seed=0, options={"task": "Short"})
    for _ in range(3):
        env.step(0)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(0)


@pytest.mark.parametrize("action", [-1, 4])
def test_an_action_of_no_task_is_refused(action):
    "It is not an invalid one of this task: written as a one-hot, it would land in a neighbouring slice."
    env = two_sizes()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=f"action {action} is not one of 0 to 3"):
        env.step(action)


def test_invalid_actions_become_uniformly_random_valid_ones_and_a_flag_says_so():
    for store_executed in (False, True):
        env = two_sizes(attempts=1, store_executed=store_executed)
        shown, flags = [], []
        for seed in range(200):
            env.reset(seed=seed, options={"task": "Short"})
            for action in (3, 1, 2):
                obs = env.step(action)[0]
                shown.append(int(view(env, obs)["previous_action"].argmax()))
                flags.append(view(env, obs)["valid"])
        executed = env._envs[0].seen
        assert flags == [0, 1, 0] * 200
        assert executed[1::3] == [1] * 200
        assert 150 < sum(executed[0::3] + executed[2::3]) < 250  # of 400 replaced, half of each
        assert shown == (executed if store_executed else [3, 1, 2] * 200)


def test_observations_do_not_alias():
    env = two_sizes()
    before, _ = env.reset(seed=0)
    kept = before.copy()
    after = env.step(0)[0]
    assert np.array_equal(before, kept) and not np.shares_memory(before, after)


def test_tasks_are_drawn_uniformly():
    env, counts = two_sizes(), np.zeros(2)
    env.reset(seed=0)
    for _ in range(2000):
        counts[env.reset()[1]["task_id"]] += 1
    assert 900 < counts[0] < 1100


def test_the_27_tasks_and_their_sizes():
    env = make_env("popgym", attempts=2)
    assert len(env.tasks) == 27 and "MineSweeperEasy" in env.tasks
    assert env.action_space.n == 27  # OFFICIAL: the paper says 26
    assert env.layout["observation"] == slice(0, 26)
    assert env.max_rollout_length == 2 * 831
    subset = make_env("popgym", "RepeatFirstEasy,HigherLowerEasy")
    assert subset.action_space.n == 4 and subset.layout["observation"] == slice(0, 13)
    assert subset.max_rollout_length == 2 * 51


def test_what_make_env_takes_for_granted():
    assert make_env("popgym", ["RepeatFirstEasy", "HigherLowerEasy"]).tasks == [
        "RepeatFirstEasy",
        "HigherLowerEasy",
    ]
    assert make_env("popgym", "RepeatFirstEasy").attempts == 2
    gym = make_env("gym:CartPole-v1, Acrobot-v1")
    assert gym.attempts == 1 and gym.tasks == ["CartPole-v1", "Acrobot-v1"]
    assert gym.max_rollout_length == 500
    assert make_env("gym:CartPole-v1,Acrobot-v1", "Acrobot-v1").tasks == ["Acrobot-v1"]
    assert list(all_tasks("popgym")) == list(all_tasks("popgym", "test")) == list(popgym_tasks())
    assert held_out_tasks("popgym") == []


def test_no_attempt_is_longer_than_its_limit_and_card_games_reach_it():
    for name, make in popgym_tasks().items():
        env, limit, t, done = make(), attempt_limit(make()), 0, False
        env.action_space.seed(0), env.reset(seed=0)
        while not done:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            t, done = t + 1, terminated or truncated
        assert t <= limit, name
        assert "CartPole" in name or "Mine" in name or t == limit, name


@pytest.mark.parametrize("env", ["popgym", "gym:CartPole-v1,Acrobot-v1", "gym:Pendulum-v1"])
def test_gymnasiums_own_checker_passes(env):
    check_env(make_env(env, attempts=2), skip_render_check=True)


@pytest.mark.parametrize("env", ["popgym", "gym:CartPole-v1,Acrobot-v1"])
def test_one_seed_decides_everything(env):
    def play(seed):
        np.random.seed(None)  # nothing may hang on the global generator
        e, rng = make_env(env, attempts=2), np.random.default_rng(0)
        obs, info = e.reset(seed=seed)
        rows = [(obs.tobytes(), 0.0, info["task"])]
        while len(rows) < 1000:
            obs, reward, done, _, info = e.step(int(rng.integers(e.action_space.n)))
            rows.append((obs.tobytes(), reward, info["task"]))
            if done:
                e.reset()
        return rows

    assert play(np.int64(5)) == play(5)
    assert play(5) != play(6)


def test_the_second_attempt_is_a_fresh_variant():
    env, fresh = make_env("popgym", "RepeatFirstEasy", attempts=2), 0
    for seed in range(40):
        obs, _ = env.reset(seed=seed)
        first = view(env, obs)["observation"].argmax()
        for _ in range(51):
            obs = env.step(0)[0]
        assert view(env, obs)["attempt_start"] == 1
        fresh += view(env, obs)["observation"].argmax() != first
    assert 20 < fresh < 40  # of four suits, three differ


def test_right_answers_earn_the_maximum():
    env = make_env("popgym", "RepeatFirstEasy", attempts=1)
    obs, _ = env.reset(seed=3)
    answer, done = int(view(env, obs)["observation"].argmax()), False
    while not done:
        _, _, done, _, info = env.step(answer)
    assert info["return"] == pytest.approx(1.0) and info["length"] == 51


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vector_environments_reset_on_the_same_step(asynchronous):
    envs = make_vector_env("popgym", 2, asynchronous, tasks="MineSweeperEasy,RepeatFirstEasy")
    singles = [make_env("popgym", "MineSweeperEasy,RepeatFirstEasy") for _ in range(2)]
    obs, _ = envs.reset(seed=3)
    for i, single in enumerate(singles):
        assert np.array_equal(obs[i], single.reset(seed=3 + i)[0])
    ends = 0
    for t in range(300):
        action = np.array([t % 16, (3 * t) % 16])
        obs, reward, terminated, _, info = envs.step(action)
        for i, single in enumerate(singles):
            expected, expected_reward, done, _, new = single.step(action[i])
            assert reward[i] == pytest.approx(expected_reward) and terminated[i] == done
            if done:
                ends, last = ends + 1, new
                assert np.array_equal(info["final_obs"][i], expected)
                assert info["final_info"]["_return"][i]
                assert info["final_info"]["return"][i] == pytest.approx(last["return"])
                assert np.array_equal(info["final_info"]["attempt_returns"][i], last["attempt_returns"])
                assert info["final_info"]["task"][i] == last["task"]
                expected, new = single.reset()
            assert np.array_equal(obs[i], expected) and info["task_id"][i] == new["task_id"]
    assert ends > 5
    envs.close()


PENDULUM = functools.partial(make_env, "gym:Pendulum-v1", max_steps=20)


@pytest.mark.parametrize("make", [screens, two_sizes, PENDULUM])
def test_in_process_hands_over_what_gymnasium_does(make):
    "For images, vectors and continuous actions; what it handed over before stays as it was."
    ours, theirs = (
        vector([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP) for vector in (InProcess, SyncVectorEnv)
    )
    ours.action_space.seed(0)
    kept, ends = [], 0
    ours.reset(seed=0), theirs.reset(seed=0)
    for t in range(60):
        # The third environment's rollouts are cut short now and then, so that they do not all end together.
        if t % 7 == 3:
            ours.envs[2].reset(seed=t), theirs.envs[2].reset(seed=t)
        action = ours.action_space.sample()
        mine, expected = ours.step(action), theirs.step(action)
        del expected[4]["_task"], expected[4]["_task_id"]  # that every environment has one
        assert mine[4].pop("lost").tolist() == [False] * 3
        assert equal(mine, expected)
        kept.append((mine, copy.deepcopy(mine)))
        ends += (mine[2] | mine[3]).sum()
    assert ends >= 3 and all(equal(before, after) for before, after in kept)
    ours.close(), theirs.close()


def equal(a, b) -> bool:
    "Whether what an environment handed over is the same, type and all."
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple) or (isinstance(a, np.ndarray) and a.dtype == object):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return np.array_equal(a, b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)


def through_a_file(data):
    "What a checkpoint makes of it: loaded without running any code."
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def actions_of(env, seed=0):
    "Random actions, a tenth of the continuous ones beyond their bounds."
    rng, space = np.random.default_rng(seed), env.action_space
    while True:
        yield int(rng.integers(space.n)) if env.discrete else rng.uniform(-1.1, 1.1, space.shape)


def attempt_of(env, obs):
    return int((obs if env.image_shape is None else obs["vector"])[env.layout["attempt"]][0])


def check_resume(make, attempts=(0, 1), tail=3000):
    """In the middle of each of these attempts of the second rollout, a fresh environment takes over.

    It shows what the old one did last; the rest of the rollout and the next one, or `tail` steps, are the same.
    """
    env = make()
    obs, info = env.reset(seed=3)
    actions, ended = actions_of(env), 0
    while not ended:
        obs, *_, info, last = step_on(env, next(actions))
        ended += last is not None
    for attempt in attempts:
        steps = 0
        while steps < 2:  # some way into the attempt
            obs, *_, info, _ = step_on(env, next(actions))
            steps = steps + 1 if attempt_of(env, obs) == attempt else 0
        fresh = make()
        assert equal((obs, info), restore(fresh, through_a_file(env.snapshot())))
        ended = 0
        for _ in range(tail):
            action = next(actions)
            mine, theirs = step_on(env, action), step_on(fresh, action)
            assert equal(mine, theirs)
            ended += mine[-1] is not None
            if ended == 2:
                break
        fresh.close()
    env.close()


@pytest.mark.parametrize("name", popgym_tasks())
def test_resuming_in_mid_rollout_popgym(name):
    "Of 27 actions most are invalid here, and replaced at random: these replacements come back too."
    check_resume(functools.partial(make_env, "popgym", name))


def play_on(names, **kwargs):
    return functools.partial(make_env, names, **kwargs)


@pytest.mark.parametrize(
    ("make", "attempts", "tail"),
    [
        (play_on("popgym", store_executed=True), (0, 1), 3000),
        (play_on("scales"), (0,), 3000),
        (play_on("gym:CartPole-v1,Acrobot-v1", attempts=2), (0, 1), 3000),
        (play_on("gym:Pendulum-v1", attempts=2), (0, 1), 3000),
        (play_on("babyai", tasks="BabyAI-GoToLocal-v0,BabyAI-KeyCorridor-v0", max_steps=700), (0, 1), 900),
        (play_on("procgen-easy", max_steps=600), (0, 1), 900),
        (play_on("procgen-memory-hard", max_steps=600), (0, 1), 900),
        (play_on("atari", tasks="Breakout,Qbert", max_steps=150), (0,), 350),
        (play_on("metaworld", tasks="reach-v3,door-open-v3", max_steps=520), (0, 1), 600),
    ],
    ids=lambda value: "-".join(value.args) if isinstance(value, functools.partial) else "",
)
def test_resuming_in_mid_rollout(make, attempts, tail):
    check_resume(make, attempts, tail)


def test_a_snapshot_is_small_and_plain():
    env = make_env("gym:Pendulum-v1")
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.snapshot()
    env.reset(seed=0)
    given = np.array([[0.1], [1 / 3], [-7.0]])
    for action in given:
        env.step(action)
    snapshot = env.snapshot()
    assert list(snapshot) == ["generator", "task", "actions"] and snapshot["task"] is None
    assert snapshot["actions"] == np.clip(given, -1, 1).astype(np.float32).tolist()
    env.step(given[0])
    assert len(snapshot["actions"]) == 3  # later steps do not change it
    env = two_sizes()
    env.reset(seed=0), env.reset(options={"task": "Long"}), env.step(np.int64(3))
    assert env.snapshot()["actions"] == [3] and type(env.snapshot()["actions"][0]) is int
    fresh = two_sizes()
    assert restore(fresh, through_a_file(env.snapshot()))[1]["task"] == "Long"
    env.reset(), fresh.reset()
    assert env.snapshot() == fresh.snapshot() and env.snapshot()["actions"] == []


def test_a_finished_rollout_is_restored_finished():
    env, fresh = two_sizes(attempts=1), two_sizes(attempts=1)
    env.reset(seed=0, options={"task": "Short"})
    obs, _, _, _, info = [env.step(0) for _ in range(3)][-1]
    seen, told = restore(fresh, env.snapshot())
    assert np.array_equal(view(fresh, seen)["observation"], view(env, obs)["observation"])
    assert equal(told, info) and info["return"] == 3
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        fresh.step(0)


def test_where_a_simulator_changes_its_mind_a_new_rollout_begins():
    env = MultiTaskEnv({"A": lambda: Countdown(5)})
    env.reset(seed=0)
    for _ in range(4):
        env.step(0)
    shorter = MultiTaskEnv({"A": lambda: Countdown(2)})
    obs, _ = restore(shorter, env.snapshot())
    seen = view(shorter, obs)
    assert seen["attempt_start"] == 1 and seen["attempt"] == 0 and not seen["previous_action"].any()
    assert [shorter.step(0)[2] for _ in range(2)] == [False, True]


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_vector_environments_are_restored_in_and_out_of_process(before, after):
    tasks = "RepeatFirstEasy,MineSweeperEasy,NoisyPositionOnlyCartPoleEasy"
    old, new = (make_vector_env("popgym", 3, asynchronous, tasks=tasks) for asynchronous in (before, after))
    actions = actions_of(make_env("popgym", tasks))
    obs, info = old.reset(seed=5)
    for _ in range(75):
        obs, *_, info = old.step([next(actions) for _ in range(3)])
    snapshots = through_a_file(old.snapshots())
    assert [len(s["actions"]) for s in snapshots] != [75] * 3  # some have begun another rollout
    del info["lost"]
    assert equal(new.restore(snapshots), (obs, {name: info[name] for name in ("task", "task_id")}))
    ends = 0
    for _ in range(150):
        action = [next(actions) for _ in range(3)]
        mine, theirs = old.step(action), new.step(action)
        assert equal(mine, theirs)
        ends += mine[2].sum()
    assert ends > 3
    # One of them alone, which the others do not notice.
    alone = make_env("popgym", tasks)
    restore(alone, new.snapshots()[1])
    assert equal(new.restart(1), alone.reset()) and new.snapshots()[1]["actions"] == []
    action = [next(actions) for _ in range(3)]
    mine, theirs = old.step(action), new.step(action)
    assert all(np.array_equal(mine[0][e], theirs[0][e]) for e in (0, 2))
    # None in place of a snapshot begins a new rollout, too.
    seen, _ = new.restore([snapshots[0], None, snapshots[2]])
    assert np.array_equal(seen[[0, 2]], obs[[0, 2]]) and seen[1, alone.layout["attempt_start"]] == 1
    assert [len(s["actions"]) for s in new.snapshots()] == [
        len(snapshots[e]["actions"]) * (e != 1) for e in range(3)
    ]
    old.close(), new.close()


class Worker(Countdown):
    "Shows this process's signal handlers and torch threads."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return np.array([ignored and default, torch.get_num_threads()], dtype=np.float32), {}


gymnasium.register("Worker-v0", Worker)


def test_workers_leave_signals_to_their_parent_and_take_one_thread():
    "The parent keeps its own handlers and threads, and workers outlive Ctrl-C and still close."
    before, threads = signal.signal(signal.SIGTERM, signal.SIG_IGN), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        envs = make_vector_env("gym:Worker-v0", 2, asynchronous=True)
        parents = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
        seen = envs.reset(seed=0)[0]
        for process in envs.processes:
            os.kill(process.pid, signal.SIGINT)
        reward = envs.step(np.array([0, 0]))[1]
        envs.close()
        assert parents == (signal.default_int_handler, signal.SIG_IGN, 2)
        assert seen[:, :2].tolist() == [[1, 1], [1, 1]] and reward.tolist() == [1, 1]
        assert not any(process.is_alive() for process in envs.processes)
    finally:
        signal.signal(signal.SIGTERM, before)
        torch.set_num_threads(threads)


def test_spaces_as_vectors():
    space = spaces.Dict(
        {"a": spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 3]))), "b": spaces.Box(0, 1, (2,))}
    )
    out = np.zeros(spaces.flatdim(space), dtype=np.float32)
    flattener(space)({"a": (1, np.array([1, 2])), "b": np.array([0.25, 0.5])}, out)
    assert out.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0.25, 0.5]
    out = np.zeros(3, dtype=np.float32)
    flattener(spaces.Discrete(3, start=4))(5, out)
    assert out.tolist() == [0, 1, 0]


def test_a_padded_observation_by_hand():
    "Two features of three, action 2 of four, reward 0.5, not an attempt's first, attempt 1, and valid."
    box = spaces.Box(-9, 9, (2,))
    layout = shared_layout({"two": box, "three": spaces.Discrete(3)}, spaces.Discrete(4))
    assert {name: (s.start, s.stop) for name, s in layout.items()} == {
        "observation": (0, 3),
        "previous_action": (3, 7),
        "previous_reward": (7, 8),
        "attempt_start": (8, 9),
        "attempt": (9, 10),
        "valid": (10, 11),
    }
    seen = observation_padder(box, layout)(np.array([5.0, -6.0]), 2, 0.5, False, 1, True)
    assert seen.dtype == np.float32 and seen.tolist() == [5, -6, 0, 0, 0, 1, 0, 0.5, 0, 1, 1]


def test_action_kinds():
    grid = Actions(spaces.MultiDiscrete([4, 4]))
    assert grid.size == 16 and grid.to_task(7).tolist() == [1, 3]
    assert Actions(spaces.Discrete(3, start=2)).to_task(0) == 2
    box = Actions(spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64))
    assert box.to_task(np.array([-1.0, 0.5], dtype=np.float32)).tolist() == [-2.0, 7.5]


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 2, int), (-1, 1, int), (-128, 127, np.int8), (0, 255, np.uint8), (-(10**9), 10**9, np.int64)]
    + [(-0.9, 0.1, np.float32), (-3e38, 3e38, np.float32), (0, 1e-30, np.float32), (1, 1, np.float64)],
)
def test_actions_stay_within_their_bounds_and_reach_all_of_them(low, high, dtype):
    space = spaces.Box(low, high, (1,), dtype)
    actions = Actions(space)
    unit = np.linspace(-1, 1, 3001, dtype=np.float32)
    mapped = np.array([actions.to_task(u[None]) for u in unit])
    assert all(space.contains(action) for action in mapped)
    assert mapped[0] == space.low and mapped[-1] == space.high
    if np.dtype(dtype).kind in "iu" and high - low < 3:
        counts = np.bincount(mapped[:, 0] - low)
        assert len(counts) == high - low + 1 and counts.min() >= 1000 - 2


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(0, np.inf, (1,)),
        spaces.Box(-(2**62), 2**62, (1,), np.int64),
    ]
    + [spaces.Box(-1.7e308, 1.7e308, (1,), np.float64)],
)
def test_infinite_action_bounds_are_refused(space):
    with pytest.raises(ValueError, match="infinite or too large bounds: wrap the environment in gymnasium"):
        Actions(space)


class Plane(gymnasium.Env):
    "Two-dimensional actions between -2 and 4; shows the one that it was given."

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, size=2):
        self.action_space = spaces.Box(-2.0, 4.0, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.resize(action, 2), 0.0, False, False, {}


@pytest.mark.parametrize("store_executed", [False, True])
def test_continuous_actions_are_scaled_padded_and_shown(store_executed):
    env = MultiTaskEnv({"Line": lambda: Plane(1), "Plane": Plane}, store_executed=store_executed)
    assert env.action_space.shape == (2,) and "valid" not in env.layout
    for task, given, scaled, executed in (
        ("Plane", [0.5, -3.0], [2.5, -2.0], [0.5, -1.0]),  # beyond the bounds is clipped
        ("Line", [1.0, 0.25], [4.0, 4.0], [1.0, 0.0]),  # the second number means nothing to this task
    ):
        env.reset(seed=0, options={"task": task})
        seen = view(env, env.step(np.array(given, dtype=np.float32))[0])
        assert seen["observation"].tolist() == scaled
        shown = executed if store_executed else [max(g, -1.0) for g in given]
        assert seen["previous_action"].tolist() == shown
    with pytest.raises(ValueError, match=r"a vector of 2 finite numbers, got \[0.0, 0.0, 0.0\]"):
        env.step(np.zeros(3, dtype=np.float32))


def test_families():
    names = {"RepeatFirstEasy": "RepeatFirst", "HigherLowerHard": "HigherLower", "CartPole-v1": "CartPole-v1"}
    names["HardwareMedium"] = "Hardware"
    assert {name: task_family(name) for name in names} == names


class Picture(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(2)


class Sequences(gymnasium.Env):
    observation_space, action_space = spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2)


gymnasium.register("Picture-v0", Picture)
gymnasium.register("Sequences-v0", Sequences)


class Spaces(gymnasium.Env):
    "Nothing but its spaces."

    def __init__(self, seen=None, played=None):
        self.observation_space, self.action_space = seen or spaces.Discrete(2), played or spaces.Discrete(2)


gymnasium.register("ManySeen-v0", lambda: Spaces(seen=spaces.Discrete(2**31)))
gymnasium.register("ManyActions-v0", lambda: Spaces(played=spaces.Discrete(2**31)))
gymnasium.register("ManyPairs-v0", lambda: Spaces(played=spaces.MultiDiscrete([2**31, 2**31])))
gymnasium.register("Exits-v0", lambda: sys.exit(3))
gymnasium.register("Mistaken-v0", lambda: (1).wrong)


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "BabyAI-GoToLocal-v0", "MiniGrid-FourRooms-v0"])
def test_minigrid_ids_are_seen_as_numbers(name, capsys):
    "Grid codes and words are one-hot: 49 cells of 11 objects, 6 colours and 4 states, 10 words of 31."
    env = make_env(f"gym:{name}")
    sizes = {part: s.stop - s.start for part, s in env.layout.items() if "/" in part}
    assert sizes == {"observation/direction": 4, "observation/grid": 49 * 21, "observation/tokens": 310}
    obs, real = env.reset(seed=0)[0], env._envs[0].unwrapped
    for action in (1, 2, 0):
        expected = real.gen_obs()
        grid = obs[env.layout["observation/grid"]].reshape(49, 21)
        codes = [part.argmax(1) for part in np.split(grid, [11, 17], axis=1)]
        assert np.array_equal(np.stack(codes, 1).reshape(7, 7, 3), expected["image"])
        tokens = obs[env.layout["observation/tokens"]].reshape(10, 31).argmax(1)
        assert tokens.tolist() == babyai_tokens(expected["mission"]).tolist()
        assert obs[env.layout["observation/direction"]].argmax() == expected["direction"]
        obs = env.step(action)[0]
    for seed in range(30):  # GoToLocal rejects some layouts, which MiniGrid would print
        env.reset(seed=seed)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"env": "popgym", "tasks": "RepeatFirst"},
            r"^unknown task 'RepeatFirst' .* RepeatFirstEasy, RepeatFirstMedium, RepeatFirstHard\?  \(python envs",
        ),
        ({"env": "popgym", "tasks": "HigherLowerEsy"}, r"HigherLowerEasy.*python envs.py --list popgym"),
        ({"env": "popgym", "tasks": ","}, "no task"),
        ({"env": "popgim"}, "popgym"),
        ({"env": "popgym", "attempts": 0}, "at least 1"),
        ({"env": "popgym", "split": "tset"}, "unknown split 'tset': --split is train or test"),
        ({"env": "gym:CartPole-v1", "split": "valid"}, "unknown split 'valid'"),
        ({"env": "gym:"}, "at least one id"),
        (
            {"env": "gym:CartPol-v1"},
            r"cannot make Gymnasium id 'CartPol-v1' a task: .*Did you mean: `CartPole`",
        ),
        (
            {"env": "gym:nowhere:Game-v0"},
            "'nowhere:Game-v0' a task: there is no module nowhere: place nowhere.py beside train.py, or set PYTHONPATH",
        ),
        ({"env": "gym:Picture-v0"}, "image observations"),
        ({"env": "gym:Sequences-v0"}, "Sequence"),
        (
            {"env": "gym:ManySeen-v0"},
            "its observation needs 2,147,483,648 numbers, and 1,048,576 are the most",
        ),
        ({"env": "gym:ManyActions-v0"}, "its action needs 2,147,483,648 numbers"),
        ({"env": "gym:ManyPairs-v0"}, "its action needs 4,611,686,018,427,387,904 numbers"),
        ({"env": "gym:Exits-v0"}, "cannot make Gymnasium id 'Exits-v0' a task: SystemExit: 3"),
        ({"env": "gym:Mistaken-v0"}, "cannot make Gymnasium id 'Mistaken-v0' a task: AttributeError: 'int'"),
        ({"env": "gym:CartPole-v1,Pendulum-v1"}, "mixed action kinds: CartPole-v1 discrete, Pendulum-v1"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_env(**arguments)
    assert "\n" not in str(caught.value)


def test_mistakes_of_the_constructor_and_of_reset():
    with pytest.raises(ValueError, match="no tasks"):
        MultiTaskEnv({})
    for free in (-1, 2):
        with pytest.raises(ValueError, match=f"from 0 to one less, got 2 and {free}"):
            two_sizes(attempts=2, free_attempts=free)
    with pytest.raises(ValueError, match="task 'Shot', not one of these. Did you mean Short"):
        two_sizes().reset(options={"task": "Shot"})


def test_a_missing_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_popgym(name, *args, **kwargs):
        if name.startswith("popgym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_popgym)
    popgym_tasks.cache_clear()
    with pytest.raises(ValueError, match="^--env popgym needs the package popgym: pip install"):
        make_env("popgym")


def run_python(*arguments, folder=ENVS_FILE.parent):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)


def test_envs_alone_shows_its_example(tmp_path):
    "Worked out by hand: sizes add up, action 3 is none of CartPole's, attempts of two steps follow each other."
    shutil.copy(ENVS_FILE, tmp_path)
    shown = run_python("envs.py", folder=tmp_path)
    assert shown.returncode == 0 and shown.stderr == "" and "500 + 6 + 4 = 510 numbers" in shown.stdout
    rows = [
        ast.literal_eval(line.split(":", 1)[1].strip()) for line in shown.stdout.splitlines() if "{" in line
    ]
    flags = [[int(row[name][0]) for name in ("attempt_start", "attempt", "valid")] for row in rows]
    assert flags == [[0, 0, 1], [1, 1, 0], [0, 1, 1], [0, 1, 1]]
    assert [row["previous_action"].index(1) for row in rows] == [0, 3, 0, 1]
    assert {row["previous_reward"][0] for row in rows} == {1}


@pytest.mark.parametrize("name", ["popgym", "gym:Pendulum-v1", "procgen-easy"])
def test_an_environment_tells_its_sizes(name):
    env = make_env(name)
    vector = env.observation_space["vector"] if env.image_shape else env.observation_space
    assert (env.observation_size,) == vector.shape and env.parts["vector"] == (vector.shape, np.float32)
    assert env.parts.get("image", (None,))[0] == env.image_shape
    assert list(env.parts) == (["vector", "image"] if env.image_shape else ["vector"])
    assert env.action_size == (env.action_space.n if env.discrete else env.action_space.shape[0])
    assert env.observation_size == max(part.stop for part in env.layout.values())


def test_envs_lists_benchmarks_and_names_a_mistake_in_one_line():
    listed = run_python("envs.py", "--list", "popgym").stdout.splitlines()
    assert ["RepeatFirstHard", "4", "4", "831"] in [line.split() for line in listed]
    mistake = run_python("envs.py", "--list", "popgim")
    assert mistake.returncode == 2 and mistake.stderr.count("\n") == 1 and "popgym" in mistake.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("popgym", ["t=51 observation", "real returns [1. 1.], counted 1.000"]),
        ("metaworld", ["'ML45': 50", "shown as [0. 0. 0.]"]),
        ("babyai", ["'train': 50", "[19 24 22  8  0  0  0  0  0  0]"]),
        ("procgen", ["coinrun, train, seed 0: level 1701"]),
        ("atari", ["two: [30 50]", "seed 0: 0 of 1270080 numbers differ", "seed 1: 288 of"]),
        ("gym", ["'observation': 6, 'previous_action': 3"]),
    ],
)
def test_each_suite_shows_its_example_and_no_warning(name, words):
    shown = run_python("-m", f"suites.{name}")
    assert shown.returncode == 0 and shown.stderr == ""
    assert all(word in shown.stdout for word in words), shown.stdout


def test_tasks_that_draw_nothing_render_none():
    env = make_env(env="popgym", tasks="RepeatFirstEasy")
    env.reset(seed=0)
    assert env.render() is None
