"""envs.py, Atari: the v5 settings, exact shrinking of images, games spread over environments, limits."""

import builtins
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from runtime.vector_env import make_vector_env
from suites import BENCHMARKS, make_env
from suites.atari import ATARI_GAMES, AtariGame, area_resizer
from suites.scores import load_bounds

ROOT = Path(__file__).resolve().parent.parent
GAMES = ATARI_GAMES.split()


def test_sizes():
    env = make_env("atari")
    assert env.tasks == GAMES and len(GAMES) == 10 and env.attempts == 1
    assert env.observation_space["image"].shape == (84, 84, 3) and env.action_space.n == 18
    assert env.observation_space["vector"].shape == (22,)  # 18 + reward, start, attempt, valid
    assert env.max_rollout_length == 27_000
    assert make_env("atari", split="test").tasks == GAMES


@pytest.mark.parametrize("game", GAMES)
def test_each_game_has_the_settings_of_v5_with_all_actions(game):
    "OFFICIAL: frame skip 4, where the authors' script has 5. Nothing else skips or repeats on top."
    env = AtariGame(game)
    frame, _ = env.reset(seed=0)
    inner, spec = env._env, gymnasium.spec(f"ALE/{game}-v5").kwargs
    assert inner._frameskip == spec["frameskip"] == 4
    assert inner.ale.getFloat("repeat_action_probability") == spec["repeat_action_probability"] == 0.25
    assert BENCHMARKS["atari"].rules.max_steps * 4 == spec["max_num_frames_per_episode"]
    assert inner.ale.getInt("max_num_frames_per_episode") == 0  # none of its own: the rollout's cap truncates
    assert inner.action_space.n == 18 and frame.shape == (84, 84, 3) and frame.dtype == np.uint8
    before = inner.ale.getEpisodeFrameNumber()
    env.step(0)
    assert inner.ale.getEpisodeFrameNumber() - before == 4
    env.close()


def test_gymnasiums_own_checker_passes():
    check_env(make_env("atari", "Breakout,Pong"), skip_render_check=True)
    check_env(AtariGame("Qbert"), skip_render_check=True)


def test_one_seed_decides_everything():
    def play(seed, steps=1000):
        env, rng = make_env("atari", "Breakout,Qbert,MsPacman"), np.random.default_rng(0)
        obs, info = env.reset(seed=seed)
        rows, done = [(obs["image"].tobytes(), obs["vector"].tobytes(), 0.0, info["task"])], False
        while len(rows) < steps:
            if done:
                obs, info = env.reset()
                reward, done = 0.0, False
            else:
                obs, reward, terminated, truncated, info = env.step(int(rng.integers(18)))
                done = terminated or truncated
            rows.append((obs["image"].tobytes(), obs["vector"].tobytes(), reward, info["task"]))
        return rows

    first = play(np.int64(1))
    assert first == play(1) and len({row[-1] for row in first}) > 1
    assert first[:100] != play(2, steps=100)


def test_a_games_seed_decides_its_sticky_actions():
    "Not the first frame, which is the same in all: actions are repeated elsewhere."
    env, plays = AtariGame("Breakout"), {}
    for seed in (0, 1, 0):
        rng, frames = np.random.default_rng(0), [env.reset(seed=seed)[0].tobytes()]
        frames += [env.step(int(rng.integers(18)))[0].tobytes() for _ in range(60)]
        assert plays.setdefault(seed, frames) == frames
    assert plays[0] != plays[1] and plays[0][0] == plays[1][0]


@pytest.mark.parametrize("shape", [(210, 160, 3), (250, 160, 3), (16, 14, 3)])
def test_shrinking_takes_means_over_areas_exactly(shape):
    "Judged by fractions, pixel by pixel."
    image = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    small, (H, W, _) = 84 if shape[0] > 84 else 7, shape
    shrunk = area_resizer(shape, small, small)(image)
    assert shrunk.shape == (small, small, 3) and shrunk.dtype == np.uint8

    def overlaps(size, i):
        "{pixel: share} of the pixels that make up pixel i."
        start, end = Fraction(size * i, small), Fraction(size * (i + 1), small)
        return {p: min(end, p + 1) - max(start, p) for p in range(int(start), -int(-end // 1))}

    for y in {0, 1, small // 2, small - 1}:
        for x in {0, 1, 2, small // 3, small - 1}:
            total = sum(
                h * w * image[i, j].astype(object)
                for i, h in overlaps(H, y).items()
                for j, w in overlaps(W, x).items()
            )
            mean = total * Fraction(small * small, H * W)
            assert shrunk[y, x].tolist() == [int(m + Fraction(1, 2)) for m in mean]
    assert (area_resizer(shape, small, small)(np.full(shape, 255, np.uint8)) == 255).all()
    assert np.array_equal(area_resizer(shape, *shape[:2])(image), image)


def test_what_is_shown_is_the_screen_in_colour():
    env = AtariGame("Pong")
    env.reset(seed=0)
    for _ in range(20):
        frame = env.step(2)[0]
    screen = env._env.ale.getScreenRGB()
    assert np.array_equal(frame, area_resizer((210, 160, 3), 84, 84)(screen))
    assert not np.array_equal(frame[..., 0], frame[..., 1])


def test_rewards_are_raw_and_clipped_on_request_but_reported_raw():
    for clip in (False, True):
        env, rng, done, rewards = make_env("atari", "Breakout,MsPacman", clip_rewards=clip), None, False, []
        rng = np.random.default_rng(0)
        env.reset(seed=0, options={"task": "MsPacman"})
        while not done:
            obs, reward, done, _, info = env.step(int(rng.integers(18)))
            assert obs["vector"][env.layout["previous_reward"]][0] == reward
            rewards.append(reward)
        assert max(rewards) == (1.0 if clip else max(rewards)) and (clip or max(rewards) >= 10.0)
        assert info["return"] >= 100 and info["attempt_returns"].tolist() == [info["return"]]
        assert (sum(rewards) == info["return"]) is not clip


def test_the_frame_limit_truncates_and_does_not_terminate(monkeypatch):
    atari = BENCHMARKS["atari"]
    monkeypatch.setitem(BENCHMARKS, "atari", atari._replace(rules=atari.rules._replace(max_steps=25)))
    env = make_env("atari", "Pong")
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(25)]
    assert ends == [(False, False)] * 24 + [(False, True)]


def test_games_are_spread_evenly_over_environments():
    "Of 24, environment i plays game i mod 10; of fewer than ten, each has a share of the games."
    for total, most in ((24, 3), (10, 1), (4, 1)):
        envs = [make_env("atari", index=(i, total)) for i in range(total)]
        plays = [list(env.drawn) for env in envs]
        counts = np.bincount(np.concatenate(plays), minlength=10)
        assert counts.min() >= max(1, total // 10) and counts.max() == most
        assert all(len(tasks) == 1 for tasks in plays) or total < 10
        assert all(
            set(env.tasks) == set(GAMES) for env in envs
        )  # indices and sizes stay the whole benchmark's
        if total >= 10:
            assert [tasks[0] for tasks in plays] == [i % 10 for i in range(total)]
    assert plays == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert list(make_env("procgen-easy", index=(1, 3)).drawn) == [
        0,
        1,
        2,
        3,
        4,
    ]  # not spread: drawn at random


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vector_environments_keep_to_their_games(asynchronous):
    both = make_vector_env("atari", 3, asynchronous, tasks="Breakout,Qbert,Pong", attempts=1)
    single = make_env("atari", "Breakout,Qbert,Pong", index=(1, 3))
    for seed in (0, 7):
        obs, info = both.reset(seed=seed)
        assert list(info["task"]) == ["Breakout", "Qbert", "Pong"] and info["task_id"].tolist() == [0, 1, 2]
        expected = single.reset(seed=seed + 1)[0]
        for t in range(20):
            assert np.array_equal(obs["image"][1], expected["image"])
            obs = both.step(np.array([t % 18] * 3))[0]
            expected = single.step(t % 18)[0]
    both.close()


def test_a_spawned_worker_finds_the_games_and_prints_nothing():
    "Nothing is registered there before, as in a process that gets only the constructor."
    code = "from suites.atari import AtariGame; print(AtariGame('Pong').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(84, 84, 3)\n", "")


def test_mistakes_get_one_clear_line(monkeypatch):
    with pytest.raises(ValueError, match="unknown task 'MsPackman' for --env atari. Did you mean MsPacman"):
        make_env("atari", "MsPackman")
    real = builtins.__import__

    def without_ale(name, *args, **kwargs):
        if name.startswith("ale_py"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ale)
    with pytest.raises(ValueError, match="^--env atari needs the package ale-py: pip install"):
        make_env("atari")


def test_scores_of_random_and_human_play():
    bounds = load_bounds("atari")
    assert list(bounds) == GAMES and bounds["Pong"] == (-20.7, 14.6) and bounds["Seaquest"] == (68.4, 42054.7)
