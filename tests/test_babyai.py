"""BabyAI: 50 tasks and 18 held out, attempts at one layout, instructions in a fixed vocabulary."""

import builtins

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from runtime.vector_env import make_vector_env
from suites import BENCHMARKS, all_tasks, held_out_tasks, make_env
from suites.__main__ import print_list
from suites.babyai import BABYAI_LENGTH, BABYAI_TOKENS, BabyAITask, babyai_tokens

minigrid = pytest.importorskip("minigrid")

# What the paper's 68 leave out of Minigrid's 96, by a part of the name.
LEFT_OUT = ("GoToSeq", "OpenRedBlueDoorsDebug", "OpenTwoDoors", "OpenDoorsOrder", "PutNext", "BossLevel")
LEFT_OUT += ("Synth", "MoveTwoAcross")


def view(env, obs):
    return {name: obs[s] if s.stop - s.start > 1 else float(obs[s][0]) for name, s in env.layout.items()}


def play(task, seed, steps=30):
    "A task's frames under the same actions, as bytes."
    rng, rows = np.random.default_rng(0), []
    frame, done = task.reset(seed=seed)[0], False
    while not done and len(rows) < steps:
        rows.append((frame["grid"].tobytes(), frame["tokens"].tobytes(), int(frame["direction"])))
        frame, _, terminated, truncated, _ = task.step(int(rng.integers(7)))
        done = terminated or truncated
    return rows


def test_50_tasks_18_held_out_and_no_others():
    train, test = list(all_tasks("babyai")), list(all_tasks("babyai", "test"))
    held_out = held_out_tasks("babyai")
    assert len(train) == 50 and len(held_out) == 18 and test == train + held_out
    every = {name for name in gymnasium.registry if name.startswith("BabyAI-")}
    assert set(test) == {name for name in every if not any(part in name for part in LEFT_OUT)}
    assert "BabyAI-GoToObjS6-v1" in train and "BabyAI-GoToObjMazeS7-v0" in held_out
    assert make_env("babyai", "BabyAI-FindObjS5-v0").tasks == ["BabyAI-FindObjS5-v0"]  # may be asked for
    assert held_out_tasks("babyai", "BabyAI-GoTo-v0") == []


def test_sizes():
    env = make_env("babyai")
    sizes = {name: s.stop - s.start for name, s in env.layout.items()}
    assert sizes == {
        "observation/direction": 4,
        "observation/grid": 147,
        "observation/tokens": 10,
        "previous_action": 7,
        "previous_reward": 1,
        "attempt_start": 1,
        "attempt": 1,
        "valid": 1,
    }
    assert env.observation_space.shape == (172,) and env.action_space.n == 7
    env.reset(seed=0, options={"task": "BabyAI-GoToLocal-v0"})
    assert env.render().shape == (128, 128, 3) and env.render().dtype == np.uint8
    assert env.attempts == 2 and env.free_attempts == 0 and env.max_rollout_length == 2 * 1080
    assert make_env("babyai", "BabyAI-GoToLocal-v0").max_rollout_length == 2 * 64


def test_the_vocabulary_is_fixed_and_complete():
    "Every instruction of the 68 tasks in its 29 tokens, none unknown; the longest fills the vector."
    used, longest = set(), 0
    for name in list(all_tasks("babyai", "test")):
        task = BabyAITask(name, "train")
        for seed in range(12):
            tokens = task.reset(seed=seed)[0]["tokens"]
            length = np.count_nonzero(tokens)
            assert tokens[:length].all() and not tokens[length:].any()
            used |= set(tokens[:length].tolist())
            longest = max(longest, length)
            assert task.game.max_steps == task.max_episode_length, name
    assert 1 not in used and used <= set(range(2, 31)) and longest == BABYAI_LENGTH == 10
    assert len(used) >= 28 and len(BABYAI_TOKENS) == 29 and BENCHMARKS["babyai"].vocabulary == 31
    # Worked out by hand; a checkpoint depends on these numbers.
    assert babyai_tokens("open the red door, then open the blue door").tolist() == [
        *(19, 24, 22, 8, 2, 25, 19, 24, 6, 8)
    ]
    assert babyai_tokens("go to the zebra").tolist() == [10, 26, 24, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="more than 10 tokens: 'go go"):
        babyai_tokens("go " * 11)


def test_what_is_seen_is_minigrids_own():
    "The view, the direction and the instruction, at a layout's seed, step by step."
    env, game = make_env("babyai", "BabyAI-GoToLocal-v0"), gymnasium.make("BabyAI-GoToLocal-v0").unwrapped
    obs, _ = env.reset(seed=2)
    inner = env._envs[0]
    expected, _ = game.reset(seed=2 * int(np.random.default_rng(env._seed).integers(5000)))
    for action in (2, 1, 2, 0, 2, 2):
        seen = view(env, obs)
        assert np.array_equal(seen["observation/grid"].reshape(7, 7, 3), expected["image"])
        assert seen["observation/direction"].tolist() == np.eye(4)[expected["direction"]].tolist()
        assert np.array_equal(seen["observation/tokens"], babyai_tokens(expected["mission"]))
        assert inner.game.mission == expected["mission"]
        obs, expected = env.step(action)[0], game.step(action)[0]


def test_two_attempts_at_one_layout_and_another_each_rollout():
    env = make_env("babyai", "BabyAI-GoToLocal-v0")
    assert env.rules.same_variant
    layouts, (obs, _) = set(), env.reset(seed=0)
    for _ in range(10):
        first, done, seconds = obs, False, []
        layouts.add(first[:161].tobytes())
        while not done:
            obs, _, done, truncated, info = env.step(0)  # turns on the spot until the time is up
            if view(env, obs)["attempt_start"]:
                seconds.append(obs)
        assert len(seconds) == 1 and np.array_equal(seconds[0][:161], first[:161]) and not truncated
        assert info["length"] == 128 and info["attempt_success"].tolist() == [0, 0]
        obs, _ = env.reset()
    assert len(layouts) == 10


def test_success_is_a_reward_at_the_end_and_both_attempts_count():
    "In GoToRedBallNoDists: random walks, as good a player as is needed."
    env, rng, rollouts = make_env("babyai", "BabyAI-GoToRedBallNoDists-v0"), np.random.default_rng(0), []
    env.reset(seed=0)
    for _ in range(60):
        done, total = False, 0.0
        while not done:
            _, reward, done, _, info = env.step(int(rng.integers(3)))
            total += reward
        rollouts.append(info)
        assert (info["attempt_returns"] > 0).tolist() == (info["attempt_success"] == 1).tolist()
        assert total == pytest.approx(info["return"]) == pytest.approx(info["attempt_returns"].sum())
        env.reset()
    success = np.array([info["attempt_success"] for info in rollouts])
    assert 0.05 < success[:, 0].mean() < 0.95 and 0.05 < success[:, 1].mean() < 0.95


def test_layouts_of_the_splits_have_disjoint_seeds(monkeypatch):
    seeds = {}
    for split in ("train", "test"):
        task, seeds[split] = BabyAITask("BabyAI-GoTo-v0", split), set()
        real = task.game.reset

        def note(seed, real=real, seeds=seeds[split]):
            seeds.add(seed)
            return real(seed=seed)

        monkeypatch.setattr(task.game, "reset", note)
        frames = [task.reset(seed=s)[0]["grid"].tobytes() for s in range(100)]
        assert len(set(frames)) > 50
    assert len(seeds["train"]) > 90 and len(seeds["test"]) == 100
    assert max(seeds["train"]) < 2 * 5000 < max(seeds["test"])  # the authors' number of layouts
    assert {s % 2 for s in seeds["train"]} == {0} and {s % 2 for s in seeds["test"]} == {1}


def test_a_seed_decides_a_layout_whatever_was_played_before():
    for name in list(all_tasks("babyai", "test")):
        used = BabyAITask(name, "test")
        play(used, seed=1)
        assert play(used, seed=2) == play(BabyAITask(name, "test"), seed=2), name


def test_gymnasiums_own_checker_passes():
    check_env(make_env("babyai"), skip_render_check=True)
    check_env(BabyAITask("BabyAI-GoTo-v0", "train"), skip_render_check=True)


def test_one_seed_decides_everything():
    def rows(seed):
        np.random.seed(None)
        env, rng, out = make_env("babyai"), np.random.default_rng(0), []
        obs, info = env.reset(seed=seed)
        while len(out) < 1000:
            obs, reward, done, _, info = env.step(int(rng.integers(7)))
            out.append((obs.tobytes(), reward, info["task"]))
            if done or len(out) % 100 == 0:
                env.reset()
        return out

    first = rows(5)
    assert first == rows(5) and len({task for *_, task in first}) > 8
    assert first != rows(6)


def test_nothing_is_printed_and_errors_are_not_hidden(capsys, monkeypatch):
    task = BabyAITask("BabyAI-PickupAbove-v0", "train")
    for name in ("BabyAI-GoTo-v0", "BabyAI-UnblockPickup-v0", "BabyAI-GoToImpUnlock-v0"):
        noisy = BabyAITask(name, "train")
        for seed in range(10):
            noisy.reset(seed=seed)
    assert capsys.readouterr().out == ""
    print("heard again")
    assert capsys.readouterr().out == "heard again\n"

    def broken(seed):
        print("Sampling rejected")
        raise RuntimeError("broken layout")

    monkeypatch.setattr(task.game, "reset", broken)
    with pytest.raises(RuntimeError, match="broken layout"):
        task.reset(seed=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vector_environments_play_it(asynchronous):
    vector = make_vector_env("babyai", 2, asynchronous, tasks="BabyAI-GoToLocal-v0")
    single = make_env("babyai", "BabyAI-GoToLocal-v0")
    try:
        assert np.array_equal(vector.reset(seed=0)[0][1], single.reset(seed=1)[0])
        for _ in range(128):
            obs, _, done, _, info = vector.step(np.array([1, 0]))
            expected, *_, new = single.step(0)
        assert done.tolist() == [True, True] and np.array_equal(info["final_obs"][1], expected)
        assert info["final_info"]["attempt_success"].tolist() == [[0, 0], [0, 0]]
        assert np.array_equal(obs[1], single.reset()[0]) and new["length"] == 128
    finally:
        vector.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"tasks": "BabyAI-GoToObjS6-v0"},
            r"^unknown task 'BabyAI-GoToObjS6-v0' .* Did you mean BabyAI-GoToObjS6-v1\?  ",
        ),
        ({"tasks": "GoToLocal"}, "unknown task 'GoToLocal' .*BabyAI-GoToLocal-v0"),
        ({"tasks": "BabyAI-BossLevel-v0"}, "unknown task 'BabyAI-BossLevel-v0' for --env babyai"),
        ({"split": "valid"}, "unknown split 'valid'"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_env("babyai", **arguments)
    assert "\n" not in str(caught.value)


def test_a_missing_or_another_package_says_what_to_install(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(gymnasium.registry, "BabyAI-GoTo-v0")
        with pytest.raises(ValueError, match="^this minigrid has no BabyAI-GoTo-v0: pip install"):
            make_env("babyai")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("minigrid"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="^--env babyai needs the package minigrid: pip install"):
        make_env("babyai")


def test_the_list_names_every_task(capsys):
    print_list("babyai")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["BabyAI-GoToLocal-v0", "161", "7", "64"] in lines and len(lines) >= 52
