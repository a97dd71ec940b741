"""The real program, shrunk: train, resume, interrupt, evaluate, plot, load, and what a mistake prints."""

import csv
import dataclasses
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TRAINED

import evaluate
import plot
import train
import update
from agent import Policy
from replay import Replay
from runtime import checkpoint, logger
from runtime.episode_buffer import EpisodeBuffer
from runtime.run import Run
from suites import make_env

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ["--scale", "smoke", "--steps", "1500", "--device", "cpu"]
TWO = ["--tasks", "RepeatFirstEasy,MineSweeperEasy", "--attempts", "1"]
ONE = ["--tasks", "RepeatFirstEasy", "--attempts", "1"]  # of the fixture `trained`


pytestmark = pytest.mark.usefixtures("runs")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_main_job_collects_learns_evaluates_saves_and_draws(draws, runs, capsys):
    table = train.main(["--env", "popgym", "--variant", "ind_ind", "--name", "a", *SMOKE])
    assert len(table) == 27 and all(np.isfinite(row["score"]) for row in table)
    folder = runs / "a"
    for name in ("best.pt", "checkpoint.pt", "config.json", "versions.json", "table.txt", "curves.png"):
        assert (folder / name).stat().st_size > 100
    assert list((folder / "tensorboard").iterdir())
    config = json.loads((folder / "config.json").read_text())
    assert config["env"] == "popgym" and config["d_model"] == 16 and config["precision"] == "float32"
    assert {"torch", "popgym", "python", "commit"} <= json.loads(
        (folder / "versions.json").read_text()
    ).keys()
    rows = rows_of(folder)
    trained = [row for row in rows if "loss/critic" in row]
    assert trained and all(np.isfinite(row["loss/critic"]) and row["skipped"] == 0 for row in trained)
    assert any("eval/score_mean" in row for row in rows)
    text = capsys.readouterr().out
    assert "memory: replay at most" in text and "mean of 27 tasks" in text


@pytest.mark.parametrize("env", ["scales", "gym:Pendulum-v1"])
@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep", "dep_ind", "dep_dep"])
def test_every_variant_trains_and_logs_what_it_sees(runs, variant, env, capsys):
    "Discrete and continuous actions; shares of the losses by task, the filter, the likeliest bins."
    train.main(["--env", env, "--variant", variant, "--name", "a", *SMOKE])
    state = checkpoint.load(runs / "a" / "checkpoint.pt")["agent"]
    assert state["popart.t"].min() > 2
    rows = [row for row in rows_of(runs / "a") if "loss/critic" in row]
    assert rows and all(row["skipped"] == 0 and np.isfinite(row["loss/actor"]) for row in rows)
    for what in ("states", "critic", "actor", "gradient"):
        share = sum(value for name, value in rows[-1].items() if name.startswith(f"share/{what}/"))
        assert share == pytest.approx(1, abs=1e-4)
    assert ("filter/0.99" in rows[-1]) == variant.startswith("ind") and (
        "bins/0.99" in rows[-1]
    ) == variant.endswith("ind")
    if variant.endswith("ind"):
        assert len(rows[-1]["bins/0.99"]) == 16 and sum(rows[-1]["bins/0.99"]) == pytest.approx(1, abs=1e-4)


def test_labels_limits_and_n_step_targets_from_the_command_line(runs, monkeypatch):
    seen = {}
    original = update.n_step_target
    record = lambda *args: seen.setdefault("n", args[-1]) and original(*args)
    monkeypatch.setattr(update, "n_step_target", record)
    flags = [
        "--value_label",
        "hlgauss",
        "--no-symlog",
        "--bin_low",
        "-100",
        "--bin_high",
        "100",
        "--n_step",
        "5",
    ]
    train.main(["--name", "a", *SMOKE, *TWO, *flags])
    policy = train.load(runs / "a")
    support = policy.agent.value.support
    assert support.bins_N[[0, -1]].tolist() == [-100.0, 100.0] and not support.use_symlog
    assert policy.agent.value.hlgauss and seen["n"] == 5


def copy_of_the_project(folder):
    "The program and its rooms, without tests, runs and pictures: its runs go to the copy."
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for room in ("suites", "runtime", "plots", "results"):
        shutil.copytree(ROOT / room, folder / room)


def test_the_experiment_with_rescaled_rewards_is_resumable(runs, tmp_path, monkeypatch):
    """The sweep in a copy of the project, one seed, shrunk; then once more with one run unfinished and one gone.

    The first time its runs take place in this process, the second time in processes of their own, as they do.
    """
    copy_of_the_project(tmp_path)
    for table in (tmp_path / "results").glob("scales*.*"):
        if table.suffix != ".py":
            table.unlink()
    place = importlib.util.spec_from_file_location("scales", tmp_path / "results" / "scales.py")
    scales = importlib.util.module_from_spec(place)
    place.loader.exec_module(scales)
    flags = ["--seeds", "1", "--steps", "600", "--jobs", "2", "--scale", "smoke", "--final_episodes", "1"]

    def sweep():
        scales.main(flags)
        return {
            name: (tmp_path / "results" / name).read_text() for name in ("scales.csv", "scales_shares.csv")
        }

    def here(command, **kwargs):
        assert command[:2] == [sys.executable, "train.py"] and kwargs["cwd"] == tmp_path
        train.main(command[2:])
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    with monkeypatch.context() as patch:
        patch.setattr(scales, "subprocess", SimpleNamespace(Popen=here))
        patch.setattr(scales, "time", SimpleNamespace(sleep=lambda seconds: None))
        first = sweep()
    rows = list(csv.DictReader(first["scales.csv"].splitlines()))
    assert len(rows) == 6 * 4 and {row["variant"] for row in rows if row["scaled"] == "0"} == {
        "ind_ind",
        "dep_dep",
    }
    assert sorted({float(row["factor"]) for row in rows if row["scaled"] == "1"}) == [0.1, 1.0, 100.0]
    assert all(np.isfinite(float(row["normalised"])) for row in rows)
    shares = list(csv.DictReader(first["scales_shares.csv"].splitlines()))
    assert sum(float(row["critic"]) for row in shares) == pytest.approx(6, abs=0.01)
    (runs / "scales_dep_ind_scaled_0" / "table.txt").unlink()
    shutil.rmtree(runs / "scales_ind_ind_control_0")
    again = sweep()
    assert "resuming runs/scales_dep_ind_scaled_0" in (runs / "scales_dep_ind_scaled_0.log").read_text()
    assert (runs / "scales_ind_ind_control_0" / "table.txt").exists()
    assert again["scales.csv"].count("\n") == first["scales.csv"].count("\n")
    assert plot.plot_scales(tmp_path / "results" / "scales.csv", tmp_path / "scales.png").exists()


def agent_of(folder):
    "The weights in a run's checkpoint."
    return checkpoint.load(folder / "checkpoint.pt")["agent"]


def test_weights_move_and_targets_follow_slowly(runs):
    train.main(["--name", "start", *SMOKE, *ONE, "--tau", "0.1", "--seed", "3", "--steps", "4"])
    train.main(["--name", "a", *SMOKE, *ONE, "--tau", "0.1", "--seed", "3"])
    fresh, state = agent_of(runs / "start"), agent_of(runs / "a")
    pairs = {"actor.layers.0.weight": "target_actor.layers.0.weight"}
    pairs["value.critics.weight.0"] = "value.target_critics.weight.0"
    for name, target_name in pairs.items():
        start, online, target = fresh[name], state[name], state[target_name]
        assert torch.equal(start, fresh[target_name])
        assert 0 < (target - start).norm() < (online - start).norm()


def test_resume_continues_and_doubles_no_row(trained_copy, capsys):
    before = rows_of(trained_copy)
    table = train.main(["--name", "a", "--resume", "--steps", "2400"])
    assert "resuming runs/a at env step 1,500" in capsys.readouterr().out
    after = rows_of(trained_copy)
    assert table is not None and after[: len(before)] == before
    assert after[-1]["step"] >= 2400 > before[-1]["step"]
    assert after[-1]["minutes"] > before[-1]["minutes"]
    steps = [(row["step"], row["updates"], len(row)) for row in after]
    assert len(set(steps)) == len(steps)


def test_evaluations_and_checkpoints_that_are_due_together_both_come_and_training_goes_on(runs, monkeypatch):
    """By a clock that the test moves: a step takes two minutes, an evaluation thirty, and both are due every five.

    Their intervals begin when they are done: else another one would be due at once, for ever.
    """
    now = itertools.count()
    clock = SimpleNamespace(moved=0, monotonic=lambda: next(now) + 60 * clock.moved)

    def moves(owner, name, minutes):
        original = getattr(owner, name)

        def moved(*args, **kwargs):
            clock.moved += minutes
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, moved)

    monkeypatch.setattr(logger, "time", clock)
    moves(EpisodeBuffer, "newest", 2)  # a step
    moves(Policy, "__init__", 30)  # an evaluation, which has a policy of its own; and the run's beginning
    every = ["--eval_every", "5", "--checkpoint_every", "5", "--minutes", "1000"]
    train.main(["--name", "a", *SMOKE, *ONE, *every, "--steps", "40"])
    evaluated = [row["step"] for row in rows_of(runs / "a") if "eval/return_mean" in row]
    assert evaluated == [0, 12, 24, 36, 40]
    # At the beginning, after the step that follows each evaluation but the last two, and twice at the end.
    assert checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]["saves"] == 1 + 3 + 2


def test_a_run_that_began_from_weights_keeps_its_own_when_it_is_resumed(trained_copy, runs):
    init = ["--init", str(trained_copy / "best.pt")]
    train.main(["--name", "second", *SMOKE, *ONE, *init])
    own = agent_of(runs / "second")
    shutil.rmtree(trained_copy)  # not needed any more
    train.main(["--name", "second", "--resume"])  # with no steps left: loaded, evaluated and saved
    assert all(torch.equal(value, own[name]) for name, value in agent_of(runs / "second").items())


def test_weights_of_other_sizes_are_refused_in_one_line(trained_copy):
    flags = ["--tasks", "MineSweeperEasy", "--attempts", "1", "--init", str(trained_copy / "best.pt")]
    with pytest.raises(checkpoint.CheckpointError, match=r"other sizes. --init needs .* --tasks") as caught:
        train.main(["--name", "b", *SMOKE, *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("trained_copy")
def test_a_replay_of_longer_trajectories_is_refused_in_one_line():
    with pytest.raises(
        ValueError, match="--segment_length was 200 and is now 20: the saved replay holds longer"
    ):
        train.main(["--name", "a", "--resume", "--segment_length", "20"])


@pytest.mark.usefixtures("trained_copy")
def test_a_name_in_use_is_refused():
    with pytest.raises(ValueError, match=r"runs/a exists: .* --resume"):
        train.main(["--name", "a", *SMOKE, *ONE])


def test_fine_tuning_starts_from_the_weights(trained_copy, runs):
    init = ["--init", str(trained_copy / "checkpoint.pt")]
    still = ["--learning_rate", "0", "--tau", "0", "--weight_decay", "0"]
    # No step is taken: what is saved are the weights that the run started from.
    train.main(["--name", "b", *SMOKE, *ONE, *init, *still, "--steps", "600"])
    a, b = (agent_of(runs / name)["actor.layers.0.weight"] for name in "ab")
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="d_model was 16 and is now 32"):
        train.main(["--name", "c", *SMOKE, *ONE, *init, "--d_model", "32"])


@pytest.mark.usefixtures("trained_copy")
def test_resume_refuses_another_configuration():
    with pytest.raises(ValueError, match="bins was 16 and is now 8"):
        train.main(["--name", "a", "--resume", "--bins", "8", "--steps", "3000"])


def test_two_runs_with_one_seed_log_the_same(trained_copy, runs):
    train.main(["--name", "b", *TRAINED])
    timed = ("minutes", "steps_per_second", "updates_per_second")
    a, b = ([{k: v for k, v in r.items() if k not in timed} for r in rows_of(runs / n)] for n in "ab")
    assert a == b and len(a) > 2


def test_any_gymnasium_ids_discrete_and_continuous(runs):
    for ids, steps in (("gym:CartPole-v1,Acrobot-v1", "1500"), ("gym:Pendulum-v1", "2500")):
        table = train.main(["--env", ids, "--name", ids[4:8], *SMOKE, "--steps", steps])
        assert [row["task"] for row in table] == ids[4:].split(",")
        assert table[0]["score"] is None and np.isfinite(table[0]["return"])
        assert any("loss/critic" in row for row in rows_of(runs / ids[4:8]))


def test_a_policy_in_a_plain_gymnasium_loop(trained):
    folder, name = trained
    policy = train.load(folder / name)
    env = policy.make_env()
    obs, info = env.reset(seed=0)
    policy.reset()
    done = False
    while not done:
        obs, _, terminated, truncated, info = env.step(policy(obs))
        done = terminated or truncated
    assert info["length"] >= 1 and np.isfinite(info["return"])


def test_a_checkpoint_of_another_version_is_one_line(tmp_path):
    checkpoint.save(tmp_path / "best.pt", {"config": {"no_longer_there": 1}, "agent": {}})
    with pytest.raises(checkpoint.CheckpointError, match="another version of this program.*no_longer_there"):
        train.load(tmp_path)


def test_a_runs_name_is_enough_to_evaluate_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "checkpoint.pt").touch()
    assert evaluate.find_checkpoint("a") == evaluate.find_checkpoint("runs/a") == Path("runs/a/checkpoint.pt")
    with pytest.raises(ValueError, match="no checkpoint at b .there are: runs/a"):
        evaluate.find_checkpoint("b")


def test_evaluate_prints_a_table_and_writes_it(trained_copy, capsys):
    with pytest.raises(ValueError, match="^--seed must be 0 or more, got -1$"):
        evaluate.main([str(trained_copy), "--seed", "-1"])
    rows = evaluate.main([str(trained_copy), "--episodes", "3", "--tasks", "RepeatFirstEasy"])
    assert [row["task"] for row in rows] == ["RepeatFirstEasy"] and rows[0]["episodes"] == 3
    written = (trained_copy / "evaluation.csv").read_text().splitlines()
    columns = ["task", "episodes", "return", "standard_error", "random", "best", "score"]
    assert written[0].split(",") == columns
    assert "RepeatFirstEasy" in capsys.readouterr().out
    again = evaluate.main([str(trained_copy), "--episodes", "3"])
    assert again == rows  # the same variants and draws each time
    with pytest.raises(ValueError, match="was not trained on HigherLowerEasy"):
        evaluate.main([str(trained_copy), "--tasks", "HigherLowerEasy"])
    with pytest.raises(ValueError, match="no checkpoint at .*there are: .*runs/a"):
        evaluate.main([str(trained_copy.parent / "none")])


def test_evaluate_closes_its_environments_when_a_task_raises(trained, monkeypatch):
    opened, closed = [], []

    def make(*args, **kwargs):
        opened.append(make_env(*args, **kwargs))
        opened[-1].close = lambda: closed.append(1)
        opened[-1].step = lambda action: 1 / 0
        return opened[-1]

    folder, name = trained
    policy = evaluate.load(folder / name)
    monkeypatch.setattr("runtime.vector_env.make_env", make)
    with pytest.raises(ZeroDivisionError):
        evaluate.evaluate(policy.agent, policy.config, 3)
    assert len(opened) == len(closed) > 1


def test_a_video_of_a_task_without_pictures_is_one_line_and_leaves_no_file(trained_copy, tmp_path):
    "Before anything is played."
    for name in ("a.mp4", "a.gif"):
        with pytest.raises(ValueError, match="^--video: RepeatFirstEasy draws nothing; videos are of pixels"):
            evaluate.main([str(trained_copy), "--episodes", "1000000", "--video", str(tmp_path / name)])
        assert not (tmp_path / name).exists()
    tasks = ["RepeatFirstEasy", "HigherLowerEasy"]  # the one without pictures is named, not the first
    env = make_env("popgym", tasks)
    env.render = lambda: np.zeros((2, 2, 3)) if env.tasks[env._task] == tasks[0] else None
    with pytest.raises(ValueError, match="^--video: HigherLowerEasy draws nothing"):
        evaluate.check_draws(env, tasks)


def test_exploration_schedule():
    "From 1 to .2 over 400 env steps of all environments; each rollout takes its own fraction of it."
    buffer = SimpleNamespace(
        fraction_E=np.array([0.0, 0.5, 1.0]), time_E=np.array([0, 10, 0]), count_E=np.array([0, 5, 40])
    )
    env = SimpleNamespace(max_rollout_length=30)
    config = train.Config(num_envs=4, epsilon_steps=400, epsilon_start=1.0, epsilon_end=0.2)
    for steps, value in ((0, 1.0), (200, 0.6), (400, 0.2), (4000, 0.2)):
        run = SimpleNamespace(steps=steps, config=config, buffer=buffer, env=env)
        np.testing.assert_allclose(Run.epsilon(run), [0, value / 2, value])
    # Within a rollout of 30 steps, too: its start, its middle, past its end; late in the run.
    config = dataclasses.replace(config, epsilon_late_start=0.8, epsilon_late_end=0.0)
    buffer.fraction_E = np.ones(3)
    for steps, values in ((0, [1.0, 0.9, 0.8]), (400, [0.2, 0.1, 0.0])):
        run = SimpleNamespace(steps=steps, config=config, buffer=buffer, env=env)
        np.testing.assert_allclose(Run.epsilon(run), values, atol=1e-12)


def test_exploration_noise():
    class Kind:
        discrete, action_dim = True, 5

    rng, action_E = np.random.default_rng(0), np.zeros(4000, dtype=int)
    noisy = train.explore(action_E, np.full(4000, 0.5), Kind, rng)
    assert 0.37 < (noisy != 0).mean() < 0.43  # half of them random, of which a fifth are 0 again
    assert (train.explore(action_E, np.zeros(4000), Kind, rng) == 0).all()
    Kind.discrete = False
    noisy = train.explore(np.zeros((4000, 1), dtype=np.float32), np.full(4000, 0.5), Kind, rng)
    assert 0.45 < noisy.std() < 0.5 and np.abs(noisy).max() <= 1


@pytest.fixture
def stored(monkeypatch):
    "Arguments of every call of Replay.add, by name, copied: the list grows while a run trains."
    calls, add, names = [], Replay.add, inspect.signature(Replay.add)

    def note(*args, **kwargs):
        given = names.bind(*args, **kwargs).arguments
        calls.append(
            SimpleNamespace(**{k: np.copy(v) for k, v in given.items() if k not in ("self", "image")})
        )
        return add(*args, **kwargs)

    monkeypatch.setattr(Replay, "add", note)
    return calls


def layout_of(tasks):
    "Where the parts of an observation lie in its vector: {name: slice}."
    return make_env("popgym", tasks, attempts=1).layout


def test_long_rollouts_enter_the_replay_in_segments(runs, stored, monkeypatch):
    "A cut has no end, its clock runs on, and the next segment's first observation is the last one's last."
    clocks, act = [], Policy.__call__

    def watch(policy, observation):
        clocks.append((policy, policy.time_B.tolist()))
        return act(policy, observation)

    monkeypatch.setattr(Policy, "__call__", watch)
    lived, newest = [], EpisodeBuffer.newest
    remember = lambda buffer: lived.append((buffer.time_E + buffer.count_E).tolist()) or newest(buffer)
    monkeypatch.setattr(EpisodeBuffer, "newest", remember)
    train.main(["--name", "a", *SMOKE, *TWO, "--segment_length", "10", "--num_envs", "2", "--steps", "300"])
    # The policy's clock is the rollout's: it runs on over cuts, and starts anew with a new rollout.
    assert [clock for policy, clock in clocks if policy is clocks[0][0]] == lived and len(lived) == 150
    assert {len(each.reward) for each in stored} <= set(range(1, 11)) and len(stored) > 20
    layout, tails, joined = layout_of("RepeatFirstEasy,MineSweeperEasy"), [], 0
    for each in stored:
        assert np.array_equal(each.obs[1:, layout["previous_action"]].argmax(-1), each.action)
        shown = each.obs[1:, layout["previous_reward"]][:, 0]
        assert np.allclose(shown, each.reward)  # one attempt: all rewards count
        if each.start > 0:
            match = [
                i for i, (o, end) in enumerate(tails) if end == each.start and np.array_equal(o, each.obs[0])
            ]
            assert match
            joined += 1
            tails.pop(match[0])
        if not each.terminated:
            tails.append((each.obs[-1], each.start + len(each.reward)))
    assert joined > 5


def test_a_truncated_rollout_is_not_stored_as_terminated_and_keeps_its_last_observation(runs, stored):
    "With a cap of 20 steps: RepeatFirstEasy takes 51 and is always truncated."
    train.main(["--name", "a", *SMOKE, *ONE, "--num_envs", "2", "--max_steps", "20", "--steps", "90"])
    layout = layout_of("RepeatFirstEasy")
    assert [len(each.action) for each in stored] == [20] * 4
    assert not any(each.terminated for each in stored)
    for each in stored:  # the last observation shows the last action: it is not the next rollout's
        shown = each.obs[-1, layout["previous_action"]]
        assert shown.argmax() == each.action[-1] and shown.sum() == 1
        assert each.obs[-1, layout["attempt_start"]] == 0


def test_rollouts_that_fit_are_never_cut(runs, stored):
    train.main(["--name", "a", *SMOKE, *TWO, "--num_envs", "2", "--segment_length", "51", "--steps", "600"])
    lengths = {(len(each.reward), int(each.start)) for each in stored}
    assert all(start == 0 for _, start in lengths) and (51, 0) in lengths


def test_explicit_flag_beats_scale_which_beats_preset(runs):
    config = train.parse(
        ["--scale", "laptop", "--name", "a", "--d_model", "32", "--tasks", "RepeatFirstEasy"]
    )
    assert config.d_model == 32  # flag
    assert config.d_ff == 256 and config.store_executed  # scale
    assert config.grad_clip == 1.0 and config.attempts == 2  # preset


def test_the_scale_is_chosen_by_the_device_and_said(runs, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.parse(["--name", "a"]).scale == "laptop"
    assert "scale: laptop, because there is no GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = train.parse(["--name", "a"])
    assert config.scale == "paper" and config.precision == "bf16" and config.device == "cuda"
    assert "scale: paper, because a GPU is there" in capsys.readouterr().out


def test_bf16_trains_too(runs):
    assert train.main(["--name", "a", *SMOKE, *TWO, "--precision", "bf16"]) is not None
    assert all(row["skipped"] == 0 for row in rows_of(runs / "a") if "skipped" in row)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "RepeatFrist"], r"unknown task 'RepeatFrist' .*RepeatFirst"),
        (["--env", "popgimm"], "unknown --env 'popgimm'"),
        (["--context", "100000000"], r"a context of 100000000 needs about .* GB .*lower --context"),
        (["--replay_trajectories", "1000000000"], "the replay would take .* lower --replay_trajectories"),
        (["--resume", "--name", "nothing"], "no run runs/nothing to resume"),
        (["--resume"], "needs the run's name"),
        (["--heads", "3"], "multiple of --heads"),
        (["--batch_size", "0"], "--batch_size must be at least 1"),
        (["--env_steps_per_update", "0"], "--env_steps_per_update must be above 0"),
        (["--replay_steps", "100000"], "exactly one of"),
        (["--device", "cuda"], "no GPU is there"),
        (["--device", "tpu"], "--device tpu is not known"),
        (["--gammas", "0.9", "1.5"], "discounts"),
        (["--gammas"], "one or more discounts"),
        (["--minutes", "-1"], "--minutes must be above 0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--tau", "5"], "--tau must lie between 0 and 1"),
        (["--n_step", "0"], "--n_step must be at least 1"),
        (["--popart_beta", "0"], "--popart_beta must be above 0"),
        (["--bin_low", "5", "--bin_high", "1"], "--bin_low 5.0 must lie below --bin_high 1.0"),
        (["--epsilon_late_start", "0.5"], "give both or neither"),
        (["--replay_ram", "0"], "--replay_ram must be above 0"),
        (["--max_steps", "0"], "--max_steps must be at least 1"),
        (["--replay_trajectories", "2"], "hold no more than 2 segments"),
        (["--dropout", "1"], "--dropout must lie in"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--threads", "-1"], "--threads must be at least 1"),
        (["--device", "cpu:7x"], "is not known here"),
        (["--env", "procgen-easy", "--encoder_depths", "5"], "divisible by 4|multiple"),
        (["--name", "../a"], "without slashes"),
        (["--scale", "huge"], "unknown scale 'huge'"),
        (["--init", "nowhere.pt"], "no checkpoint at nowhere.pt"),
    ],
)
def test_mistakes_print_one_clear_line_and_no_traceback(runs, flags, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=words) as caught:
        train.main([*SMOKE, *flags])
    assert "\n" not in str(caught.value)
    assert not runs.exists() or not list(runs.glob("*/metrics.jsonl"))


def program(folder, *arguments):
    "Start train.py as a user would, in a copy of the project."
    copy_of_the_project(folder)
    command = [sys.executable, "train.py", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_mistake_on_the_command_line(tmp_path):
    process = program(tmp_path, "--scale", "smoke", "--tasks", "RepeatFirst")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: unknown task 'RepeatFirst'") and len(errors.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_first_and_the_run_can_be_resumed(tmp_path, number, capsys):
    flags = ["--name", "a", "--scale", "smoke", "--device", "cpu", *TWO]
    process = program(tmp_path, *flags, "--steps", "100000000")
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    deadline = time.time() + 60
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "python train.py --name a --resume" in output
    steps = checkpoint.load(tmp_path / "runs" / "a" / "checkpoint.pt")["counters"]["steps"]
    train.main(["--name", "a", "--resume", "--steps", str(steps + 200)])
    assert f"resuming runs/a at env step {steps:,}" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "runs" / "a" / "checkpoint.pt")["counters"]["steps"] >= steps + 200


@pytest.mark.usefixtures("draws")
def test_plot_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="no log at"):
        plot.main(["run", str(tmp_path)])
    with pytest.raises(ValueError, match="python plot.py run runs/<name>"):
        plot.main(["walk", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ind_ind", "dep_dep"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_two_tasks_in_four_minutes(runs, seed, variant):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    flags = [
        "--tasks",
        "RepeatFirstEasy,HigherLowerEasy",
        "--attempts",
        "1",
        "--scale",
        "laptop",
        "--variant",
        variant,
    ]
    table = train.main([*flags, "--minutes", "4", "--name", "learn", "--seed", str(seed), "--device", "cpu"])
    returns = {row["task"]: row["return"] for row in table}
    assert returns["RepeatFirstEasy"] >= 0.8 and returns["HigherLowerEasy"] >= 0.4, returns


def test_a_run_says_what_it_does_and_how_long_it_will_take(runs, capsys):
    flags = ["--scale", "smoke", "--device", "cpu", "--tasks", "RepeatFirstEasy", "--log_every", "5"]
    train.main([*flags, "--name", "steps", "--steps", "1500"])
    out = capsys.readouterr().out
    assert "one policy for 1 task of popgym, with the losses ind_ind; ends after 1,500 env steps" in out
    assert re.search(r"estimate: at [\d,]+ env steps and [\d.]+ updates a second, the 1,500 env steps", out)
    train.main([*flags, "--name", "minutes", "--minutes", "0.1", "--steps", "1000000"])
    out = capsys.readouterr().out
    assert re.search(r"estimate: at .* a second, 0.1 minutes make [\d,]+ env steps, [\d,]+ updates", out)


def test_graphs_are_for_gpus(runs):
    with pytest.raises(ValueError, match="--capture records CUDA graphs: leave it out"):
        train.main(["--scale", "smoke", "--device", "cpu", "--name", "x", "--capture"])


def test_owed_updates_do_not_outlast_the_time_limit(runs):
    "A thousand updates for each env step: they stop with the run, and a resumed run goes on with them."
    flags = [
        "--scale",
        "smoke",
        "--device",
        "cpu",
        "--tasks",
        "RepeatFirstEasy",
        "--env_steps_per_update",
        "0.001",
    ]
    start = time.monotonic()
    train.main([*flags, "--name", "owes", "--minutes", "0.05", "--steps", "1000000"])
    assert time.monotonic() - start < 30
    counters = checkpoint.load(runs / "owes" / "checkpoint.pt")["counters"]
    assert counters["updates_owed"] > 100 and counters["updates"] > 5
    train.main(["--name", "owes", "--resume", "--minutes", "0.1"])
    assert checkpoint.load(runs / "owes" / "checkpoint.pt")["counters"]["steps"] == counters["steps"]


def test_the_resume_command_can_be_pasted(runs):
    run = SimpleNamespace(config=SimpleNamespace(name="my run; x"))
    assert Run.resume_command(run).endswith("train.py --name 'my run; x' --resume")
