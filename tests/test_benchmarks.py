"""The real program on the real simulators, shrunk: every benchmark of the paper, and what a user does with it."""

import json
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

import evaluate
import train
from runtime import checkpoint
from suites import make_env

ROOT = Path(__file__).resolve().parent.parent
# Fewer steps than the smoke scale has: each benchmark takes its turn here.
# Fewer and shorter rollouts than the smoke scale has: each benchmark takes its turn here.
SMOKE = ["--scale", "smoke", "--steps", "1200", "--max_steps", "80", "--device", "cpu", "--log_every", "5"]
BENCHMARKS = {"metaworld": 45, "babyai": 50, "procgen-easy": 5, "procgen-easy-rescaled": 5}
BENCHMARKS |= {"procgen-memory-hard": 16, "atari": 10}


pytestmark = pytest.mark.usefixtures("runs")


def run_of(runs, *flags):
    "A run of the real program, named a; its table, its log's rows of training."
    table = train.main([*SMOKE, "--name", "a", *flags])
    log = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in log if "loss/critic" in row]
    assert rows and all(np.isfinite(row["loss/critic"]) and row["skipped"] == 0 for row in rows)
    state = checkpoint.load(runs / "a" / "checkpoint.pt")
    assert state["counters"]["updates"] >= rows[-1]["updates"] > 0
    return table, rows


@pytest.mark.parametrize("env", BENCHMARKS)
def test_every_benchmark_collects_learns_evaluates_and_saves(runs, env, capsys):
    table, _ = run_of(runs, "--env", env, "--variant", "ind_ind")
    assert len(table) == BENCHMARKS[env] and all(np.isfinite(row["return"]) for row in table)
    if env in ("metaworld", "babyai"):
        assert all(0 <= row["success 1"] <= 1 and 0 <= row["solved"] <= 1 for row in table)
    else:
        assert all(np.isfinite(row["score"]) for row in table)
    attempts = {"metaworld": 3, "atari": 0}.get(env, 2)
    assert sum(name.startswith("try ") for name in table[0]) == attempts
    assert not list((runs / "a").glob("frames/*"))  # what spilled is gone when the run is over
    if env == "babyai":
        check_held_out_tasks(runs / "a", capsys)


def check_held_out_tasks(run, capsys):
    "Held-out tasks are told apart from those that the run, on BabyAI, was trained on."
    capsys.readouterr()
    rows = evaluate.main([str(run), "--split", "test", "--episodes", "1"])
    assert len(rows) == 68
    groups = capsys.readouterr().out
    assert "mean of 50 trained, unseen variants" in groups and "mean of 18 held-out" in groups
    assert (run / "evaluation_test.csv").exists() and not (run / "evaluation.csv").exists()
    with pytest.raises(ValueError, match="held out: add --split test"):
        evaluate.main([str(run), "--episodes", "1", "--tasks", "BabyAI-GoToObj-v0"])


@pytest.mark.parametrize(
    "flags", [("--env", "procgen-easy"), ("--env", "metaworld", "--tasks", "reach-v3,push-v3")]
)
def test_the_dependent_variant_runs_on_pixels_and_on_continuous_actions(runs, flags):
    _, rows = run_of(runs, *flags, "--variant", "dep_dep")
    assert "policy_value" in rows[-1] and "filter" not in rows[-1]


def test_a_pixel_run_spills_resumes_plays_unseen_levels_and_films_them(runs, tmp_path, capsys):
    # So little memory that frames go to disk.
    run_of(runs, "--env", "procgen-easy", "--tasks", "coinrun,leaper", "--replay_ram", "0.0004")
    stored = lambda: checkpoint.load(runs / "a" / "checkpoint.pt")["processes"][0]["replay"][-1]["end"]
    before = stored()
    assert list((runs / "a" / "frames").iterdir()) == []  # what had spilled is in the checkpoint's parts
    train.main(["--name", "a", "--resume", "--steps", "1800"])
    assert stored() > before > 0
    assert "GB in memory" in capsys.readouterr().out
    video = tmp_path / "v.gif"
    rows = evaluate.main(
        [str(runs / "a"), "--split", "test", "--episodes", "2", "--tasks", "leaper", "--video", str(video)]
    )
    assert [row["task"] for row in rows] == ["leaper"] and rows[0]["score"] is not None
    frames = imageio.imread(video, index=None)
    assert len(frames) > 1 and frames[0].shape[:2] == (256, 256)
    film, policy = tmp_path / "v.mp4", train.load(runs / "a")
    evaluate.record(policy, policy.make_env(), ["leaper", "coinrun"], film)
    assert imageio.imread(film, plugin="pyav").shape[1:] == (256, 256, 3)
    with pytest.raises(ValueError, match=r"writes \.mp4 or \.gif"):
        evaluate.main([str(runs / "a"), "--episodes", "1", "--tasks", "leaper", "--video", "v.avi"])


def test_a_run_on_ml10_is_tested_on_what_ml10_holds_out(runs):
    run_of(runs, "--env", "metaworld", "--tasks", "ML10")
    rows = evaluate.main([str(runs / "a"), "--split", "test", "--episodes", "1"])
    assert len(rows) == 15 and "door-close-v3" in {row["task"] for row in rows}


def test_the_readmes_table_of_sizes_is_true():
    lines = (ROOT / "docs" / "running.md").read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| `--env` | tasks")))
    table = {}
    for line in lines[start + 2 :]:
        if not line.startswith("| `"):
            break
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        table[name] = cells
    assert set(table) == {"popgym", *BENCHMARKS}
    for name, (tasks, held_out, observation, actions, attempts, longest, *_) in table.items():
        env, test = make_env(name), make_env(name, split="test")
        space = env.observation_space
        if space.shape is None:
            image = "x".join(map(str, space["image"].shape))
            assert observation == f"{image} and {space['vector'].shape[0]}"
        else:
            assert observation == str(space.shape[0])
        assert int(tasks) == len(env.tasks)
        assert int(held_out) == len(set(test.tasks) - set(env.tasks))
        kind = f"{env.action_space.n}" if env.discrete else f"{env.action_space.shape[0]} continuous"
        assert (actions, int(attempts)) == (kind, env.attempts)
        assert int(longest.replace(",", "")) == env.max_rollout_length


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "procgen-easy", "--tasks", "coinrum"], "Did you mean coinrun"),
        (["--env", "metaworld", "--tasks", "reach-v2"], "Did you mean reach-v3"),
        (["--env", "babyai", "--encoder", "impala"], "--encoder impala does not fit --env babyai"),
        (["--env", "atari", "--encoder", "ff"], "say impala or nature"),
        (["--env", "procgen"], "Did you mean procgen-easy"),
        (
            ["--env", "procgen-easy", "--scale", "paper", "--replay_steps", "100000000000"],
            "lower --replay_steps",
        ),
    ],
)
def test_mistakes_get_one_line(flags, words, runs):
    with pytest.raises(ValueError, match=words) as caught:
        train.main(["--scale", "smoke", "--name", "x", *flags])
    assert "\n" not in str(caught.value) and not (runs / "x" / "metrics.jsonl").exists()


def test_a_value_that_a_flag_does_not_take_is_told_with_those_it_takes(capsys):
    with pytest.raises(SystemExit):
        train.main(["--scale", "smoke", "--name", "x", "--env", "metaworld", "--workers", "some"])
    told = capsys.readouterr().err
    assert "--workers" in told and "processes" in told and "Traceback" not in told


def test_a_worker_that_dies_again_and_again_ends_the_run_with_one_line(tmp_path):
    "Not in silence, and not for ever; the other workers end too."
    code = (
        "import os, signal, time, train\n"
        "from runtime.vector_env import make_vector_env\n"
        "envs = make_vector_env(num_envs=2, asynchronous=True, env='babyai', tasks='BabyAI-GoToObj-v0')\n"
        "envs.reset(seed=0)\n"
        "workers = set(envs.processes)\n"
        "try:\n"
        "    for _ in range(3):\n"
        "        os.kill(envs.processes[1].pid, signal.SIGKILL)\n"
        "        print('lost', envs.step([0, 0])[4]['lost'].tolist())\n"
        "        workers |= set(envs.processes)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "envs.close()\n"
        "time.sleep(0.5)\n"
        "print('alive', sum(process.is_alive() for process in workers))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.count("lost [False, True]") == 2, done.stdout + done.stderr
    assert "a worker process died" in done.stdout and "alive 0" in done.stdout, done.stdout + done.stderr
