"""envs.py, Procgen: levels, attempts, caps, rescaled rewards, and mistakes that would kill the process."""

import builtins
import subprocess
import sys
import zlib
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from runtime.vector_env import make_vector_env
from suites import BENCHMARKS, PROCGEN, make_env
from suites.procgen import (
    PROCGEN_EASY,
    PROCGEN_LEVELS,
    PROCGEN_MEMORY_GAMES,
    PROCGEN_MEMORY_HARD,
    ProcgenGame,
    procgen_class,
)
from suites.scores import load_bounds

ROOT = Path(__file__).resolve().parent.parent
NOTHING, RIGHT, RIGHT_UP = 4, 7, 8  # of Procgen's 15 actions


def read(env, obs, name):
    "A slice of what is seen beside the image."
    values = obs["vector"][env.layout[name]]
    return values if len(values) > 1 else float(values[0])


def actions(seed=0):
    "Endless random actions that mostly go right."
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.choice([RIGHT, RIGHT_UP, int(rng.integers(15))]))


def test_the_three_benchmarks_and_their_sizes():
    easy, rescaled, hard = map(make_env, ("procgen-easy", "procgen-easy-rescaled", "procgen-memory-hard"))
    assert easy.tasks == rescaled.tasks == ["climber", "coinrun", "jumper", "leaper", "ninja"]
    assert len(hard.tasks) == 16 and all(g.mode == "easy" for g in easy._envs)
    assert {g.game for g in hard._envs if g.mode == "memory"} == set(PROCGEN_MEMORY_GAMES)
    assert {g.mode for g in hard._envs} == {"memory", "hard"}
    for env, cap in ((easy, 2500), (rescaled, 2500), (hard, 5000)):
        assert env.max_rollout_length == cap and env.attempts == 2 and env.free_attempts == 0
        assert env.observation_space["image"].shape == (64, 64, 3) and env.action_space.n == 15
        assert env.layout["previous_action"] == slice(0, 15) and env.observation_space["vector"].shape == (
            19,
        )


@pytest.mark.parametrize("name", ["procgen-easy", "procgen-memory-hard"])
def test_gymnasiums_own_checker_passes(name):
    check_env(make_env(name), skip_render_check=True)


def test_gymnasiums_own_checker_passes_for_a_game():
    check_env(ProcgenGame("maze", "memory"), skip_render_check=True)


@pytest.mark.parametrize("name", ["procgen-easy-rescaled", "procgen-memory-hard"])
def test_one_seed_decides_everything(name):
    def play(seed):
        env, steps = make_env(name), actions()
        obs, info = env.reset(seed=seed)
        rows, done = [(obs["image"].tobytes(), obs["vector"].tobytes(), 0.0, info["task"])], False
        while len(rows) < 1000:
            if done:
                obs, info = env.reset()
                reward, done = 0.0, False
            else:
                obs, reward, terminated, truncated, info = env.step(next(steps))
                done = terminated or truncated
            rows.append((obs["image"].tobytes(), obs["vector"].tobytes(), reward, info["task"]))
        return rows

    first = play(np.int64(8))
    assert first == play(8) and len({row[-1] for row in first}) > 1
    assert first != play(9)


@pytest.mark.parametrize(
    ("game", "mode"), [*PROCGEN_EASY.items(), ("maze", "memory"), ("caveflyer", "memory")]
)
def test_a_level_is_the_same_whenever_it_is_played(game, mode):
    def play(env, level):
        frames, steps, over = [env.reset(options={"level": level})[0]], actions(), False
        while not over and len(frames) < 100:
            frame, reward, over, _, _ = env.step(next(steps))
            frames += [frame, reward]
        return b"".join(np.asarray(f).tobytes() for f in frames)

    env = ProcgenGame(game, mode)
    first = play(env, 7)
    assert first != play(env, 8)
    assert first == play(env, 7)
    ProcgenGame("starpilot", "hard").reset(seed=0)  # another game in between
    assert first == play(ProcgenGame(game, mode), 7)


@pytest.mark.parametrize(
    ("game", "mode", "first", "later", "brightness"),
    [
        ("coinrun", "easy", 1670959167, 1091729185, 64.755),
        ("jumper", "easy", 197847228, 1672836276, 61.030),
        ("leaper", "easy", 3968153798, 3510301850, 143.305),
        ("maze", "memory", 2391555365, 3577656988, 135.692),
        ("bigfish", "hard", 3474788235, 2946595222, 148.961),
    ],
)
def test_both_procgen_packages_play_the_same_levels(game, mode, first, later, brightness):
    "The games' states, recorded with procgen-mirror; procgen-gym draws them with another Qt, hence no checksum."
    env = ProcgenGame(game, mode)
    env.reset(options={"level": 1999})
    assert zlib.crc32(env._env.get_state()[0]) == first
    for t in range(40):
        frame = env.step((RIGHT, RIGHT_UP, RIGHT, NOTHING, 1, 5)[t % 6])[0]
    assert zlib.crc32(env._env.get_state()[0]) == later
    assert frame.mean() == pytest.approx(brightness, abs=0.1)


def test_an_episodes_end_keeps_its_reward_and_shows_nothing_of_the_next():
    "Procgen is already at its next episode's first frame, where the last reward is told."
    env, level, steps, seen = ProcgenGame("coinrun", "easy"), 26, actions(1), []
    first, info = env.reset(options={"level": level})
    assert info == {"level": level}
    one_level = {"start_level": level, "num_levels": 1, "num_threads": 0}
    raw = procgen_class()(1, "coinrun", distribution_mode="easy", **one_level)
    frame, over = first, False
    while not over:
        before, action = frame, next(steps)
        frame, reward, over, truncated, _ = env.step(action)
        raw_frame, raw_reward, raw_first, _, _ = raw.step(np.array([action]))
        assert reward == raw_reward[0] and over == raw_first[0] and truncated is False
        if not over:
            assert np.array_equal(frame, raw_frame[0])
        seen.append(reward)
    assert seen[-1] == 10 and not any(seen[:-1])  # this level is won
    assert np.array_equal(raw_frame[0], first) and not np.array_equal(frame, first)
    assert np.array_equal(frame, before) and not np.shares_memory(frame, before)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(0)


@pytest.mark.parametrize("game", ["coinrun", "ninja"])
def test_the_same_level_is_played_twice_and_a_black_box_marks_the_second_attempt(game):
    env, levels = make_env("procgen-easy"), set()
    for seed in range(4):
        obs, _ = env.reset(seed=seed, options={"task": game})
        levels.add(int(np.sum(obs["image"])))
        first, images, steps, done = obs["image"], {0: [obs["image"]], 1: []}, actions(seed), False
        again = None
        while not done:
            obs, _, terminated, truncated, info = env.step(next(steps))
            done = terminated or truncated
            attempt = int(read(env, obs, "attempt"))
            images[attempt].append(obs["image"])
            if read(env, obs, "attempt_start"):
                again = obs["image"]
        inside = np.zeros((64, 64), dtype=bool)
        inside[1:5, 1:5] = True
        assert np.array_equal(first[~inside], again[~inside]) and first[inside].any()
        assert all(image[inside].any() for image in images[0])
        assert len(images[1]) > 1 and not any(image[inside].any() for image in images[1])
        assert info["attempt_returns"].shape == (2,)
    assert len(levels) == 4


def test_both_attempts_count_and_rescaled_rewards_are_reported_in_the_games_own_scale():
    for game, factor, seed in (("coinrun", 100.0, 1), ("climber", 0.1, 2), ("ninja", 1.0, 2)):
        rows = {}
        for name in ("procgen-easy", "procgen-easy-rescaled"):
            env, steps, done, rows[name] = make_env(name), actions(seed), False, []
            env.reset(seed=seed, options={"task": game})
            while not done:
                obs, reward, terminated, truncated, info = env.step(next(steps))
                done = terminated or truncated
                rows[name].append((reward, read(env, obs, "previous_reward")))
            assert info["return"] == pytest.approx(sum(info["attempt_returns"])) and info["return"] > 0
            rows[name + " return"] = info["return"]
        plain, rescaled = np.array(rows["procgen-easy"]), np.array(rows["procgen-easy-rescaled"])
        np.testing.assert_allclose(rescaled, factor * plain, rtol=1e-6)
        assert rows["procgen-easy return"] == rows["procgen-easy-rescaled return"] == sum(plain[:, 0])


def test_the_cap_of_5000_steps_holds_for_both_attempts_and_truncates():
    env = make_env("procgen-memory-hard", "bossfight")
    env._envs[0].levels = range(2, 3)  # where doing nothing lasts until the game's own limit of 4,000 steps
    env.reset(seed=0)
    results = [env.step(NOTHING)[1:] for _ in range(5000)]
    assert all(not (terminated or truncated) for _, terminated, truncated, _ in results[:-1])
    _, terminated, truncated, info = results[-1]
    assert (terminated, truncated, info["length"]) == (False, True, 5000)


def test_a_level_that_runs_into_the_games_own_limit_is_over_like_any_other():
    env = make_env("procgen-easy", "leaper")
    env.reset(seed=0)
    ends = [env.step(NOTHING)[2:4] for _ in range(1000)]
    assert ends == [(False, False)] * 999 + [(True, False)]


def test_training_and_test_levels_are_disjoint():
    train, test = PROCGEN_LEVELS["train"], PROCGEN_LEVELS["test"]
    assert len(train) == 2000 and train.stop <= test.start
    for split, levels in PROCGEN_LEVELS.items():
        env = make_env("procgen-easy", split=split)
        assert all(game.levels == levels for game in env._envs)
        drawn = [env._envs[0].reset(seed=seed)[1]["level"] for seed in range(200)]
        assert all(level in levels for level in drawn) and len(set(drawn)) > 180
        middle = (levels.start + levels.stop) // 2
        assert 70 < sum(level < middle for level in drawn) < 130


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vector_environments(asynchronous):
    both = make_vector_env("procgen-easy", 2, asynchronous, tasks="ninja,leaper")
    singles = [make_env("procgen-easy", "ninja,leaper") for _ in range(2)]
    obs, _ = both.reset(seed=3)
    news, steps, ends = [single.reset(seed=3 + i)[0] for i, single in enumerate(singles)], actions(), 0
    for _ in range(300):
        for i, new in enumerate(news):
            assert np.array_equal(obs["image"][i], new["image"])
            assert np.array_equal(obs["vector"][i], new["vector"])
        action = np.array([next(steps), next(steps)])
        obs, reward, terminated, _, info = both.step(action)
        for i, single in enumerate(singles):
            news[i], expected, done, _, last = single.step(action[i])
            assert reward[i] == expected and terminated[i] == done
            if done:
                ends += 1
                assert np.array_equal(info["final_obs"][i]["image"], news[i]["image"])
                assert info["final_info"]["return"][i] == last["return"]
                news[i] = single.reset()[0]
    assert ends > 1
    both.close()


def test_a_thousand_levels_leak_nothing():
    def megabytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    env = ProcgenGame("coinrun", "easy")
    for level in range(200):
        env.reset(options={"level": level})
    before = megabytes()
    for level in range(1000):
        env.reset(options={"level": level})
    assert megabytes() - before < 4  # 11 if gym3 opened its library for each


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ProcgenGame("coinrun", "memory"),
            "^coinrun has no memory mode; only caveflyer, .* Take hard$",
        ),
        (lambda: ProcgenGame("coinrum", "easy"), "^unknown Procgen game 'coinrum': it is one of .*coinrun"),
        (lambda: ProcgenGame("coinrun", "eazy"), "^unknown Procgen mode 'eazy': it is easy, hard or memory"),
        (
            lambda: ProcgenGame("coinrun", "easy", range(2**31, 2**31 + 1)),
            "from 0 to 2147483646, got 2147483648",
        ),
        (lambda: ProcgenGame("coinrun", "easy", range(-1, 5)), "from 0 to 2147483646, got -1"),
        (lambda: ProcgenGame("coinrun", "easy").reset(options={"level": 2**31}), "got 2147483648"),
        (lambda: ProcgenGame("coinrun", "easy").reset(options={"level": -1}), "got -1"),
        (lambda: make_env("procgen-easy", "coinrum"), "unknown task 'coinrum' .* Did you mean coinrun"),
        (lambda: make_env("procgen-easy", "maze"), "unknown task 'maze' for --env procgen-easy"),
        (lambda: make_env("procgen-easy", split="tests"), "unknown split 'tests'"),
        (lambda: make_env("procgen-memory"), "Did you mean procgen-memory-hard"),
    ],
)
def test_mistakes_get_one_clear_line(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("game", "mode", "level", "words"),
    [
        ("coinrun", "memory", 0, "no memory mode"),
        ("coinrum", "easy", 0, "coinrun"),
        ("coinrun", "easy", -1, "got -1"),
    ],
)
def test_what_kills_procgen_uncatchably_is_an_error_of_one_line(game, mode, level, words):
    "In a process of its own: the real thing would take this one with it."
    code = f"""
import functools, sys, suites
from suites.procgen import ProcgenGame
make = functools.partial(ProcgenGame, "{game}", "{mode}", range({level}, {level} + 1))
suites.BENCHMARKS["asked"] = suites.Benchmark(lambda split: {{"{game}": make}}, "procgen")
try:
    suites.make_env("asked").reset(seed=0)
except ValueError as error:
    sys.exit(f"error: {{error}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_package_says_what_to_install_and_an_installed_one_is_quiet(monkeypatch):
    code = "from suites.procgen import ProcgenGame; ProcgenGame('coinrun', 'easy').reset(seed=0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    real = builtins.__import__

    def without_procgen(name, *args, **kwargs):
        if name.startswith("procgen"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_procgen)
    procgen_class.cache_clear()
    with pytest.raises(
        ValueError,
        match=r"^--env procgen-easy needs the package procgen \(Linux on x86_64 only\): pip install",
    ):
        make_env("procgen-easy")


def test_the_ranges_by_which_scores_are_normalised():
    easy, hard = load_bounds("procgen-easy"), load_bounds("procgen-memory-hard")
    assert list(easy) == list(PROCGEN_EASY) and list(hard) == list(PROCGEN_MEMORY_HARD)
    assert easy["coinrun"] == (5.0, 10.0) and easy["climber"] == (2.0, 12.6)
    assert hard["jumper"] == (1.0, 10.0) and hard["fruitbot"] == (-0.5, 27.2)
    assert BENCHMARKS["procgen-easy-rescaled"].rules.reward_factors == {"coinrun": 100.0, "climber": 0.1}
    assert PROCGEN.max_steps == 2500


@pytest.mark.parametrize("level", [1.5, "7"])
def test_a_level_that_is_no_integer_is_refused_before_procgen_ends_the_process(level):
    with pytest.raises(ValueError, match="a Procgen level is from 0"):
        ProcgenGame("coinrun", "easy").reset(options={"level": level})
