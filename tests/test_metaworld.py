"""Meta-World: goals that are hidden, shared by attempts and disjoint between splits; simulators that are reused."""

import builtins
import contextlib
import pickle

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from runtime.vector_env import make_vector_env
from suites import all_tasks, held_out_tasks, make_env
from suites import metaworld as suite
from suites.__main__ import print_list
from suites.metaworld import MetaWorldTask, metaworld_goals

metaworld = pytest.importorskip("metaworld")


def view(env, obs):
    return {name: obs[s] if s.stop - s.start > 1 else float(obs[s][0]) for name, s in env.layout.items()}


def test_sizes_and_sets():
    env = make_env("metaworld")
    assert len(env.tasks) == 45 and env.attempts == 3 and env.free_attempts == 0
    assert env.observation_space.shape == (46,) and env.observation_space.dtype == np.float32
    assert env.action_space.shape == (4,) and env.action_space.low.tolist() == [-1] * 4
    assert env.max_rollout_length == 1500 and "valid" not in env.layout
    assert len(make_env("metaworld", "ML10").tasks) == 10
    assert make_env("metaworld", "reach-v3,ML10").tasks[0] == "reach-v3"
    assert make_env("metaworld", "bin-picking-v3").tasks == ["bin-picking-v3"]  # held out of ML45 only
    five = ["bin-picking-v3", "box-close-v3", "door-lock-v3", "door-unlock-v3", "hand-insert-v3"]
    assert sorted(held_out_tasks("metaworld")) == five
    assert list(all_tasks("metaworld", "test")) == list(all_tasks("metaworld")) + held_out_tasks("metaworld")
    assert len(held_out_tasks("metaworld", "ML10")) == 5 and held_out_tasks("metaworld", "reach-v3") == []


@pytest.mark.parametrize("task", ["reach-v3", "handle-press-v3", "lever-pull-v3"])
def test_goals_are_the_benchmarks_own_and_those_of_the_test_split_are_others(task):
    "The benchmark simulates the way to each goal's start; ours does not, and draws the same."
    before = np.random.get_state()[1].copy()
    goals = metaworld_goals.__wrapped__(task)
    assert np.array_equal(before, np.random.get_state()[1])
    for split, seed in (("train", 0), ("test", 1)):
        task_class = {task: metaworld.ALL_V3_ENVIRONMENTS[task]}
        arguments = {task: metaworld.env_dict.ML1_ARGS_KWARGS[task]}
        own = metaworld._make_tasks(task_class, arguments, metaworld._ML_OVERRIDE, seed=seed)
        own = np.array([pickle.loads(one.data)["rand_vec"] for one in own])
        assert goals[split].shape[0] == 50 and np.array_equal(goals[split], own)
    assert len(np.unique(np.concatenate([goals["train"], goals["test"]]), axis=0)) == 100


def test_a_goal_in_both_splits_is_refused(monkeypatch):
    monkeypatch.setattr(
        np.random, "seed", lambda seed: np.random.set_state(np.random.RandomState(0).get_state())
    )
    with pytest.raises(ValueError, match="reach-v3: a goal of the test split is also a training goal"):
        metaworld_goals.__wrapped__("reach-v3")


def target(env):
    "The goal that the task being played hides."
    return tuple(env._envs[env._task]._simulator._target_pos)


@pytest.mark.parametrize("split", ["train", "test"])
def test_three_attempts_at_one_hidden_goal_and_another_goal_each_rollout(split):
    env, goals = make_env("metaworld", "reach-v3", split=split), set()
    own = {tuple(goal[-3:]) for goal in metaworld_goals("reach-v3")[split]}
    obs, _ = env.reset(seed=0)
    for rollout in range(2):
        first, done, t, here = obs, False, 0, {target(env)}
        rng = np.random.default_rng(rollout)
        while not done:
            obs, _, done, truncated, info = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
            t += 1
            assert np.all(obs[36:39] == 0) and np.isfinite(obs).all() and not truncated
            if t % 500 == 0 and not done:
                assert view(env, obs)["attempt_start"] == 1 and view(env, obs)["attempt"] == t // 500
                assert np.array_equal(obs[:39], first[:39])
                here.add(target(env))
        assert t == 1500 and len(here) == 1 and here <= own
        assert info["attempt_returns"].shape == info["attempt_success"].shape == (3,)
        assert info["return"] == pytest.approx(info["attempt_returns"].sum(), rel=1e-4)  # all count
        goals |= here
        obs, _ = env.reset()
    assert len(goals) == 2


def test_success_at_any_step_is_an_attempts_success():
    "The arm goes to where the goal is, then away from it."
    env = make_env("metaworld", "reach-v3", attempts=2)
    env.reset(seed=0)
    done, t = False, 0
    while not done:
        hand, goal = env._envs[0]._simulator.get_endeff_pos(), np.array(target(env))
        towards = t < 250 or t >= 500 + 499  # in the first attempt, and too late in the second
        action = np.append(np.clip(10 * (goal - hand) * (1 if towards else -1), -1, 1), 0)
        _, _, done, _, info = env.step(action.astype(np.float32))
        t += 1
    assert info["attempt_success"].tolist() == [1, 0]


def test_gymnasiums_own_checker_passes():
    check_env(make_env("metaworld"), skip_render_check=True)
    check_env(MetaWorldTask("reach-v3", "train"), skip_render_check=True)  # float32, too


def test_a_used_simulator_plays_as_a_new_one():
    "Bit by bit: seeds would decide nothing if what was played before did."
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (60, 4)).astype(np.float32) + np.array([0, 0.3, -0.4, 0.2], dtype=np.float32)

    def play(task, seed):
        rows = [task.reset(seed=seed)[0].tobytes()]
        for action in actions:
            obs, reward, *_ = task.step(action)
            rows.append((obs.tobytes(), reward))
        return rows

    for name in ("push-v3", "drawer-open-v3", "door-unlock-v3"):
        used = MetaWorldTask(name, "train")
        for seed in (1, 2):
            play(used, seed)
        suite.IDLE_SIMULATORS.clear()
        assert play(used, 3) == play(MetaWorldTask(name, "train"), 3) != play(used, 4)


def test_one_seed_decides_everything():
    def play(seed):
        np.random.seed(None)
        env, rng = make_env("metaworld", "reach-v3,door-open-v3"), np.random.default_rng(0)
        rows = []
        for rollout, steps in enumerate((70, 70, 70, 520)):  # the last one past its first attempt's end
            obs, info = env.reset(seed=seed if rollout == 0 else None)
            rows.append((obs.tobytes(), 0.0, info["task"]))
            for _ in range(steps):
                obs, reward, *_, info = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
                rows.append((obs.tobytes(), reward, info["task"]))
        return rows

    first = play(5)
    assert first == play(5) and {task for *_, task in first} == {"reach-v3", "door-open-v3"}
    assert first[0] != play(6)[0]


def test_idle_simulators_are_shared_and_not_too_many(monkeypatch):
    monkeypatch.setattr(suite, "IDLE_SIMULATORS", [])
    one, other = MetaWorldTask("reach-v3", "train"), MetaWorldTask("reach-v3", "test")
    one.reset(seed=0)
    kept = one._simulator
    other.reset(seed=0)  # at the same time: one of its own
    assert other._simulator is not kept
    one.close(), one.close()
    assert [name for name, _ in suite.IDLE_SIMULATORS] == ["reach-v3"]
    third = MetaWorldTask("reach-v3", "train")
    third.reset(seed=0)
    assert third._simulator is kept and suite.IDLE_SIMULATORS == []

    class Closed:
        closed = 0

        def close(self):
            Closed.closed += 1

    for i in range(60):
        suite.leave_simulator(f"task {i}", Closed())
    assert len(suite.IDLE_SIMULATORS) == 50 and Closed.closed == 10
    assert suite.IDLE_SIMULATORS[0][0] == "task 10"  # the oldest go


def test_a_picture_or_one_line_that_says_why_not(monkeypatch):
    env = make_env("metaworld", "reach-v3")
    assert env.render() is None  # nothing is played yet
    env.reset(seed=0)
    simulator = env._envs[0]._simulator
    picture = np.arange(240 * 240 * 3, dtype=np.uint8).reshape(240, 240, 3)
    monkeypatch.setattr(simulator, "render", lambda: picture)
    assert np.array_equal(env.render(), np.rot90(picture, 2))
    # EGL draws where there is no display, unless something else was asked for.
    for given, library, chosen in (
        ({}, "libEGL.so.1", "egl"),
        ({}, None, None),
        ({"DISPLAY": ":0"}, "libEGL.so.1", None),
        ({"MUJOCO_GL": "osmesa"}, "libEGL.so.1", "osmesa"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("os.environ", given)
            patch.setattr("ctypes.util.find_library", lambda name, library=library: library)
            env.render()
        assert given.get("MUJOCO_GL") == chosen

    def no_display():
        raise RuntimeError("gladLoadGL error\nand more")

    monkeypatch.setattr(simulator, "render", no_display)
    with pytest.raises(ValueError, match="^cannot draw Meta-World: no display.*: gladLoadGL error$"):
        env.render()


def test_worker_processes_play_it():
    with contextlib.closing(make_vector_env("metaworld", 2, asynchronous=True, tasks="reach-v3")) as vector:
        obs, _ = vector.reset(seed=0)
        single = make_env("metaworld", "reach-v3")
        assert np.array_equal(obs[1], single.reset(seed=1)[0])
        action = np.full((2, 4), 0.5, dtype=np.float32)
        for _ in range(20):
            assert np.array_equal(vector.step(action)[0][1], single.step(action[1])[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": "reach-v2"}, r"^unknown task 'reach-v2' for --env metaworld. Did you mean reach-v3\?  "),
        ({"tasks": "reach"}, r"unknown task 'reach' .*reach-v3"),
        ({"tasks": "ML1"}, "unknown task 'ML1' .*ML10"),
        ({"split": "valid"}, "unknown split 'valid'"),
        ({"tasks": "reach-v3", "attempts": 0}, "at least 1"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_env("metaworld", **arguments)
    assert "\n" not in str(caught.value)


def test_a_missing_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("metaworld"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="^--env metaworld needs the package metaworld: pip install"):
        make_env("metaworld")


def test_the_list_names_every_task(capsys):
    print_list("metaworld")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reach-v3", "39", "4", "500"] in lines and len(lines) >= 47
