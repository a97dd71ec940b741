"""The real program, shrunk: train, resume, interrupt, evaluate, plot, load, and what a mistake prints."""

import csv
import dataclasses
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

import envs
import evaluate
import plot
import train
from config import parse, saved_config
from runtime import checkpoint, vector_env

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ["--scale", "smoke", "--steps", "1500", "--device", "cpu"]
TWO = ["--tasks", "RepeatFirstEasy,MineSweeperEasy", "--attempts", "1"]


pytestmark = pytest.mark.usefixtures("runs")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_main_job_collects_learns_evaluates_saves_and_draws(runs, capsys):
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
    original = train.n_step_target
    record = lambda *args: seen.setdefault("n", args[-1]) and original(*args)
    monkeypatch.setattr(train, "n_step_target", record)
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


def test_the_experiment_with_rescaled_rewards_is_resumable(tmp_path):
    "The real sweep in a copy of the project, one seed, shrunk; then once more with one run unfinished."
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    for table in (tmp_path / "results").glob("scales*.*"):
        if table.suffix != ".py":
            table.unlink()
    command = [sys.executable, "results/scales.py", "--seeds", "1", "--steps", "800", "--jobs", "2"]
    command += ["--scale", "smoke", "--final_episodes", "1"]

    def sweep():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return {
            name: (tmp_path / "results" / name).read_text() for name in ("scales.csv", "scales_shares.csv")
        }

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
    (tmp_path / "runs" / "scales_dep_ind_scaled_0" / "table.txt").unlink()
    shutil.rmtree(tmp_path / "runs" / "scales_ind_ind_control_0")
    again = sweep()
    log = (tmp_path / "runs" / "scales_dep_ind_scaled_0.log").read_text()
    assert "resuming runs/scales_dep_ind_scaled_0" in log
    assert again["scales.csv"].count("\n") == first["scales.csv"].count("\n")
    assert plot.plot_scales(tmp_path / "results" / "scales.csv", tmp_path / "scales.png").exists()


def test_weights_move_and_targets_follow_slowly(runs):
    train.main(["--name", "a", *SMOKE, *TWO, "--tau", "0.1", "--seed", "3"])
    state = checkpoint.load(runs / "a" / "checkpoint.pt")["agent"]
    torch.manual_seed(3)
    config = saved_config("a", train.ROOT)
    fresh = train.Agent(config, *train.sizes(train.make_env(**train.env_arguments(config)))).state_dict()
    pairs = {"actor.layers.0.weight": "target_actor.layers.0.weight"}
    pairs["value.critics.weight.0"] = "value.target_critics.weight.0"
    for name, target_name in pairs.items():
        start, online, target = fresh[name], state[name], state[target_name]
        assert 0 < (target - start).norm() < (online - start).norm()


def test_resume_continues_and_doubles_no_row(runs, capsys):
    train.main(["--name", "a", *SMOKE, *TWO])
    before = rows_of(runs / "a")
    table = train.main(["--name", "a", "--resume", "--steps", "3000"])
    assert re.search(r"resuming runs/a at env step 1,5\d\d", capsys.readouterr().out)
    after = rows_of(runs / "a")
    assert table is not None and after[: len(before)] == before
    assert after[-1]["step"] >= 3000 > before[-1]["step"]
    assert after[-1]["minutes"] > before[-1]["minutes"]
    steps = [(row["step"], row["updates"], len(row)) for row in after]
    assert len(set(steps)) == len(steps)


def test_evaluations_and_checkpoints_that_are_due_together_both_come_and_training_goes_on(runs):
    "By a clock that is moved: both are due, and the evaluation takes so long that another save is; then training."
    run = train.Run(parse(["--name", "a", *SMOKE, *TWO], runs.parent))
    try:
        steps = []
        for _ in range(3):
            run.log.started -= 60 * 6  # six minutes later; both are due every five
            for _ in range(4):
                steps.append(run.next_step())
                if steps[-1] == "evaluate":
                    run.log.started -= 60 * 30  # one that takes far longer than its interval
                run.log.done(steps[-1])
        assert steps == ["save", "evaluate", "save", "collect"] * 3
    finally:
        run.close()


def test_a_run_that_began_from_weights_keeps_its_own_when_it_is_resumed(runs):
    flags = [*SMOKE, *TWO, "--final_episodes", "1"]
    train.main(["--name", "first", *flags])
    train.main(["--name", "second", *flags, "--init", str(runs / "first" / "best.pt")])
    own = checkpoint.load(runs / "second" / "checkpoint.pt")["agent"]
    shutil.rmtree(runs / "first")  # not needed any more
    run = train.Run(parse(["--name", "second", "--resume"], runs.parent))
    run.close()
    assert all(torch.equal(value, run.agent.state_dict()[name]) for name, value in own.items())


def test_weights_of_other_sizes_are_refused_in_one_line(runs):
    train.main(["--name", "a", *SMOKE, *TWO, "--final_episodes", "1"])
    init = ["--init", str(runs / "a" / "best.pt")]
    with pytest.raises(checkpoint.CheckpointError, match=r"other sizes .*other --tasks") as caught:
        train.main(["--name", "b", *SMOKE, "--tasks", "RepeatFirstEasy", "--attempts", "1", *init])
    assert "\n" not in str(caught.value)


def test_a_replay_of_longer_trajectories_is_refused_in_one_line(runs):
    train.main(["--name", "a", *SMOKE, *TWO, "--final_episodes", "1"])
    with pytest.raises(
        ValueError, match="--segment_length was 200 and is now 20: the saved replay holds longer"
    ):
        train.main(["--name", "a", "--resume", "--segment_length", "20"])


def test_a_name_in_use_is_refused(runs):
    train.main(["--name", "a", *SMOKE, *TWO])
    with pytest.raises(ValueError, match=r"runs/a exists: .* --resume"):
        train.main(["--name", "a", *SMOKE, *TWO])


def test_fine_tuning_starts_from_the_weights(runs):
    train.main(["--name", "a", *SMOKE, *TWO])
    init = ["--init", str(runs / "a" / "checkpoint.pt")]
    # No step is taken: what is saved are the weights that the run started from.
    train.main(
        ["--name", "b", *SMOKE, *TWO, *init, "--learning_rate", "0", "--tau", "0", "--weight_decay", "0"]
    )
    a, b = (checkpoint.load(runs / n / "checkpoint.pt")["agent"]["actor.layers.0.weight"] for n in "ab")
    assert torch.equal(a, b)
    with pytest.raises(checkpoint.CheckpointError, match="d_model was 16 and is now 32"):
        train.main(["--name", "c", *SMOKE, *TWO, *init, "--d_model", "32"])


def test_resume_refuses_another_configuration(runs):
    train.main(["--name", "a", *SMOKE, *TWO])
    with pytest.raises(checkpoint.CheckpointError, match="bins was 16 and is now 8"):
        train.main(["--name", "a", "--resume", "--bins", "8", "--steps", "3000"])


def test_two_runs_with_one_seed_log_the_same(runs):
    for name in "ab":
        train.main(["--name", name, *SMOKE, *TWO])
    timed = ("minutes", "steps_per_second", "updates_per_second")
    a, b = ([{k: v for k, v in r.items() if k not in timed} for r in rows_of(runs / n)] for n in "ab")
    assert a == b and len(a) > 2


def test_any_gymnasium_ids_discrete_and_continuous(runs):
    for ids in ("gym:CartPole-v1,Acrobot-v1", "gym:Pendulum-v1"):
        table = train.main(["--env", ids, "--name", ids[4:8], *SMOKE, "--steps", "2500"])
        assert [row["task"] for row in table] == ids[4:].split(",")
        assert table[0]["score"] is None and np.isfinite(table[0]["return"])
        assert any("loss/critic" in row for row in rows_of(runs / ids[4:8]))


def test_a_policy_in_a_plain_gymnasium_loop(runs):
    train.main(["--name", "a", *SMOKE, *TWO])
    policy = train.load(runs / "a")
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


def test_evaluate_prints_a_table_and_writes_it(runs, capsys):
    train.main(["--name", "a", *SMOKE, *TWO])
    rows = evaluate.main([str(runs / "a"), "--episodes", "3", "--tasks", "MineSweeperEasy"])
    assert [row["task"] for row in rows] == ["MineSweeperEasy"] and rows[0]["episodes"] == 3
    written = (runs / "a" / "evaluation.csv").read_text().splitlines()
    assert written[0].split(",") == [
        "task",
        "episodes",
        "return",
        "standard_error",
        "random",
        "best",
        "score",
    ]
    assert "MineSweeperEasy" in capsys.readouterr().out
    again = evaluate.main([str(runs / "a"), "--episodes", "3", "--tasks", "MineSweeperEasy"])
    assert again == rows  # the same variants and draws each time
    with pytest.raises(ValueError, match="was not trained on HigherLowerEasy"):
        evaluate.main([str(runs / "a"), "--tasks", "HigherLowerEasy"])
    with pytest.raises(ValueError, match="no checkpoint at .*there are: .*runs/a"):
        evaluate.main([str(runs / "none")])


def test_exploration_schedule():
    "From 1 to .2 over 100 steps of each environment; each rollout takes its own fraction of it."
    lanes = SimpleNamespace(
        fraction_E=np.array([0.0, 0.5, 1.0]), time_E=np.array([0, 10, 0]), count_E=np.array([0, 5, 40])
    )
    env = SimpleNamespace(max_rollout_length=30)
    config = train.Config(num_envs=4, epsilon_steps=100, epsilon_start=1.0, epsilon_end=0.2)
    for steps, value in ((0, 1.0), (200, 0.6), (400, 0.2), (4000, 0.2)):
        run = SimpleNamespace(steps=steps, config=config, lanes=lanes, env=env)
        np.testing.assert_allclose(train.Run.epsilon(run), [0, value / 2, value])
    # Within a rollout of 30 steps, too: its start, its middle, past its end; late in the run.
    config = dataclasses.replace(config, epsilon_late_start=0.8, epsilon_late_end=0.0)
    lanes.fraction_E = np.ones(3)
    for steps, values in ((0, [1.0, 0.9, 0.8]), (400, [0.2, 0.1, 0.0])):
        run = SimpleNamespace(steps=steps, config=config, lanes=lanes, env=env)
        np.testing.assert_allclose(train.Run.epsilon(run), values, atol=1e-12)


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


def test_long_rollouts_enter_the_replay_in_segments(runs):
    "A cut has no end, its clock runs on, and the next segment's first observation is the last one's last."
    config = train.parse(["--name", "a", *SMOKE, *TWO, "--segment_length", "10", "--num_envs", "2"])
    run = train.Run(config)
    added = []
    real_add = run.replay.add
    run.replay.add = lambda *a, image: (added.append([np.copy(x) for x in a]), real_add(*a))
    for _ in range(150):
        train.collect(run)
        # The policy's clock is the rollout's: it runs on over cuts, and starts anew with a new rollout.
        assert run.policy.time_B.tolist() == (run.lanes.time_E + run.lanes.count_E).tolist()
    run.close()
    assert {len(reward) for _, _, reward, *_ in added} <= set(range(1, 11)) and len(added) > 20
    tails, joined = [], 0
    for obs, action, reward, terminated, start, _ in added:
        assert np.array_equal(obs[1:, run.previous_action].argmax(-1), action)
        assert np.allclose(obs[1:, run.env.layout["previous_reward"]][:, 0], reward)  # one attempt: all count
        if start > 0:
            match = [i for i, (o, end) in enumerate(tails) if end == start and np.array_equal(o, obs[0])]
            assert match
            joined += 1
            tails.pop(match[0])
        if not terminated:
            tails.append((obs[-1], start + len(reward)))
    assert joined > 5


def test_a_truncated_rollout_is_not_stored_as_terminated_and_keeps_its_last_observation(runs, monkeypatch):
    "With a cap of 20 steps: RepeatFirstEasy takes 51 and is always truncated."
    make = lambda *a, **kwargs: envs.MultiTaskEnv(
        envs.choose_tasks("popgym", "RepeatFirstEasy"), attempts=1, max_steps=20
    )
    monkeypatch.setattr(train, "make_env", make)
    monkeypatch.setattr(vector_env, "make_env", make)
    run = train.Run(train.parse(["--name", "a", *SMOKE, *TWO, "--num_envs", "2"]))
    added = []
    run.replay.add = lambda obs, action, reward, terminated, *rest, image: added.append(
        (np.copy(obs), action, terminated)
    )
    for _ in range(45):
        train.collect(run)
    run.close()
    assert [len(action) for _, action, _ in added] == [20] * 4
    assert not any(terminated for *_, terminated in added)
    for obs, action, _ in added:  # the last observation shows the last action: it is not the next rollout's
        assert obs[-1, run.previous_action].argmax() == action[-1] and obs[-1, run.previous_action].sum() == 1
        assert obs[-1, run.env.layout["attempt_start"]] == 0


def test_rollouts_that_fit_are_never_cut(runs):
    run = train.Run(train.parse(["--name", "a", *SMOKE, *TWO, "--num_envs", "2", "--segment_length", "51"]))
    lengths = []
    run.replay.add = lambda obs, action, reward, *rest, image: lengths.append((len(reward), rest[1]))
    for _ in range(300):
        train.collect(run)
    run.close()
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
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "results", folder / "results", dirs_exist_ok=True)
    command = [sys.executable, "train.py", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_mistake_on_the_command_line(tmp_path):
    process = program(tmp_path, "--scale", "smoke", "--tasks", "RepeatFirst")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: unknown task 'RepeatFirst'") and len(errors.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_first_and_the_run_can_be_resumed(tmp_path, number):
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
    process = program(tmp_path, "--name", "a", "--resume", "--steps", str(steps + 500))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"resuming runs/a at env step {steps:,}" in output


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
