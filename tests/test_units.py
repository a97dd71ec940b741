"""Observations and rewards in any unit: what is learned, the multiplier that --reward_scale auto finds, warnings."""

import dataclasses
import json
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import train
from config import Config, parse
from evaluate import load
from plots.runs import read_groups
from runtime.run import Run


class Bandit(gymnasium.Env):
    "Ten steps; the action that equals the observation, in the observation's unit, pays a reward in the reward's unit."

    observation_space, action_space = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(2)

    def __init__(self, seen, unit, pay):
        self.seen, self.unit, self.pay = seen, unit, pay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def show(self):
        self.right = int(self.np_random.integers(2))
        return np.array([self.seen + self.unit * self.right], np.float32)

    def step(self, action):
        reward, self.t = self.pay * float(action == self.right), self.t + 1
        return self.show(), reward, self.t == 10, False, {}


gymnasium.register("Cents-v0", lambda: Bandit(100.0, 0.001, 0.001))
gymnasium.register("Fortunes-v0", lambda: Bandit(0.0, 0.001, 1e5))


@pytest.mark.parametrize(("task", "pay"), [("Cents-v0", 0.001), ("Fortunes-v0", 1e5)])
def test_a_bandit_in_other_units_is_learned(runs, capsys, task, pay):
    "Guessing earns 5 of 10. Before, an absolute floor hid 0.001, and one multiplier for all hid the rewards."
    flags = ["--scale", "smoke", "--num_envs", "16", "--steps", "30000", "--env_steps_per_update", "64"]
    flags += ["--learning_rate", "3e-3", "--batch_size", "16", "--epsilon_steps", "10000", "--tau", "0.02"]
    flags += ["--final_episodes", "20", "--name", task]
    rows = train.main(["--env", f"gym:{task}", *flags])
    assert rows[0]["return"] > 8 * pay
    assert (
        f"--reward_scale auto: {10 / pay:g}, because the first rewards have a size of"
        in capsys.readouterr().out
    )
    saved = json.loads((runs / task / "config.json").read_text())
    assert saved["reward_scale"] == load(runs / task).config.reward_scale == pytest.approx(10 / pay)


def run_with(rewards=(), **config):
    "A run's parts that its scale and its warnings need."
    config = Config(**{"env": "gym:X", "reward_scale": "auto"} | config)
    said = []
    log = SimpleNamespace(say=said.append, unsaved={}, save_files=lambda: said.append("saved"))
    replay = SimpleNamespace(rewards=lambda: np.array(rewards, np.float32))
    run = SimpleNamespace(config=config, replay=replay, log=log, range_of={}, warned=False, found=[])
    run.settings = lambda: Run.settings(run)
    return run, said


@pytest.mark.parametrize(
    ("rewards", "scale"),
    [
        ([1.0] * 9, 10.0),  # CartPole
        ([-1.0] * 9 + [0.0], 10.0),  # Acrobot
        ([0.0] * 99 + [1.0], 10.0),  # FrozenLake: seldom paid is not paid more
        ([0.0] * 9, 10.0),
        ([0.001, 0.0], 1e4),
        ([1e5, 0.0], 1e-4),
        ([1e-38, 0.0], 1e30),  # 1e39 would be infinite in float32
        ([-3.0, 4.0], 2.8),  # 10 / sqrt(12.5) = 2.83
    ],
)
def test_the_multiplier_gives_rewards_a_size_of_10(rewards, scale):
    run, said = run_with(rewards)
    Run.fix_reward_scale(run)
    assert run.config.reward_scale == scale == run.log.unsaved["config"]["reward_scale"]
    # The file is written at once: a figure of a run in progress reads it.
    assert said[0] == "saved" and f"--reward_scale auto: {scale:g}, because the first rewards" in said[1]


def test_it_is_fixed_once_before_learning_and_a_number_wins(tmp_path):
    run, said = run_with([5.0] * 4)
    run.fix_reward_scale = lambda: Run.fix_reward_scale(run)
    run.replay = type(
        "Replay", (), {"rewards": lambda self: np.full(4, 5.0), "__len__": lambda self: self.n}
    )()
    run.replay.n = run.config.batch_size - 1
    assert not Run.can_learn(run) and run.config.reward_scale == "auto"
    run.replay.n += 1
    assert Run.can_learn(run) and run.config.reward_scale == 2.0
    run.replay.rewards = lambda: np.full(4, 500.0)
    assert Run.can_learn(run) and run.config.reward_scale == 2.0 and len(said) == 2
    assert parse(["--env", "gym:CartPole-v1", "--name", "x"], tmp_path).reward_scale == "auto"
    typed = ["--env", "gym:CartPole-v1", "--name", "x", "--reward_scale", "7"]
    assert parse(typed, tmp_path).reward_scale == 7.0


BEYOND, FIFTIETH = (
    "beyond the critic's bins (-100000 to 100000)",
    "within a fiftieth of one of the critic's bins",
)


@pytest.mark.parametrize(
    ("returns", "length", "settings", "words"),
    [
        ([1e4 + i % 11 for i in range(60)], 10, {"reward_scale": 0.01}, FIFTIETH),  # 1 on a base of 1,000
        ([1e4 + i % 11 for i in range(60)], 10, {"reward_scale": 20.0}, BEYOND),
        ([-1e6], 10, {"reward_scale": 10.0}, BEYOND),
        ([500.0], 500, {"reward_scale": 10.0}, None),  # CartPole
        ([1e6], 10**5, {"reward_scale": 10.0, "gammas": (0.9,)}, None),  # little of it within the horizon
        ([0.0] * 60 + [1.0], 50, {"reward_scale": 10.0}, None),  # FrozenLake
        ([-200.0] * 60, 200, {"reward_scale": 10.0}, None),  # MountainCar before its first success
        ([-1500.0 + i for i in range(60)], 200, {"reward_scale": 1.0}, None),  # Pendulum
        ([1e4 + i % 11 for i in range(60)], 10, {"reward_scale": 0.01, "variant": "ind_dep"}, None),
        ([1e4 + i % 11 for i in range(60)], 10, {}, None),  # not fixed yet
    ],
)
def test_returns_that_the_bins_do_not_fit_are_told_once(returns, length, settings, words):
    run, said = run_with(**settings)
    run.env = SimpleNamespace(tasks=["X"])
    run.rollouts, run.returns, run.last_returns = 0, {"X": []}, {"X": []}
    run.check_bins = lambda *arguments: Run.check_bins(run, *arguments)
    for value in returns:
        info = {
            "task_id": torch.tensor([0]),
            "return": torch.tensor([value]),
            "length": torch.tensor([length]),
        }
        Run.count_rollout(run, info, 0)
    assert len(said) == (0 if words is None else 1)
    if words:
        assert (
            said[0].startswith("warning: task X, --reward_scale ")
            and words in said[0]
            and "\n" not in said[0]
        )


def test_a_resumed_run_keeps_the_multiplier(runs, capsys):
    flags = ["--env", "gym:Cents-v0", "--scale", "smoke", "--name", "kept", "--steps", "1500"]
    train.main(flags)
    before = load(runs / "kept" / "checkpoint.pt").config
    assert before.reward_scale == 1e4
    capsys.readouterr()
    # Also where "auto" is typed again.
    train.main(["--name", "kept", "--resume", "--steps", "2500", "--reward_scale", "auto"])
    assert "--reward_scale auto" not in capsys.readouterr().out
    after = load(runs / "kept" / "checkpoint.pt").config
    assert dataclasses.replace(after, steps=1500, resume=False) == before


def test_a_resumed_run_does_not_warn_again(runs, capsys):
    flags = ["--env", "gym:Cents-v0", "--scale", "smoke", "--name", "warned", "--reward_scale", "1e12"]
    for more, times in (
        ([*flags, "--steps", "600"], 1),
        (["--name", "warned", "--resume", "--steps", "900"], 0),
    ):
        train.main(more)
        assert capsys.readouterr().out.count("warning: task Cents-v0") == times


def test_seeds_that_found_their_own_multiplier_are_seeds_of_one_configuration(runs):
    "A typed one is a choice, a found one is not; config.json of a resumed run still says so."
    flags = ["--env", "gym:Pendulum-v1", "--scale", "smoke", "--steps", "2400", "--device", "cpu"]
    for seed in (0, 1):
        train.main([*flags, "--name", f"p_{seed}", "--seed", str(seed)])
        train.main(["--name", f"p_{seed}", "--resume", "--steps", "2600"])
    train.main([*flags, "--name", "typed", "--reward_scale", "7"])
    found = [json.loads((runs / f"p_{seed}" / "config.json").read_text()) for seed in (0, 1)]
    assert all(config["found"] == ["reward_scale"] for config in found)
    found[1]["reward_scale"] = found[0]["reward_scale"] * 1.1  # as other seeds find
    (runs / "p_1" / "config.json").write_text(json.dumps(found[1]))
    assert len(read_groups([runs / "p_0", runs / "p_1"])) == 1
    assert len(read_groups([runs / "p_0", runs / "typed"])) == 2
