"""The programs in other places: another folder, a notebook's backend, another system, environments in a module."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import evaluate
import plot
import train
from config import parse, prepare_torch
from runtime import checkpoint, logger, run

ROOT = Path(__file__).resolve().parent.parent
MODULE = """
import gymnasium


class Echo(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t % 3, float(action == self.t % 3), self.t == 5, False, {}


gymnasium.register("Echo-v0", Echo, max_episode_steps=5)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    "Stand in a folder that is not the program's."
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_an_environment_in_a_module_is_trained_evaluated_and_drawn(runs, tmp_path):
    "Each program in a process of its own, as it is typed; without --env, a checkpoint imports nothing."
    (tmp_path / "my_envs.py").write_text(MODULE)
    for name in ("train.py", "evaluate.py", "plot.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())  # so that runs/ is the test's
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "module://a_notebook"}

    def typed(*command):
        command = [sys.executable, *command]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    env = ["--env", "gym:my_envs:Echo-v0"]
    trained = typed("train.py", *env, "--scale", "smoke", "--steps", "300", "--name", "echo")
    assert trained.returncode == 0 and "curves: runs/echo/curves.png" in trained.stdout
    assert "tensorboard --logdir runs\n" in trained.stdout
    refused = typed("evaluate.py", "echo")
    assert refused.returncode == 1 and "if you trust it, add --env gym:my_envs:Echo-v0" in refused.stderr
    played = typed("evaluate.py", "echo", *env, "--episodes", "2")
    assert played.returncode == 0 and "written: runs/echo/evaluation.csv" in played.stdout
    assert (
        typed("plot.py", "attention", "echo", *env)
        .stdout.strip()
        .endswith("written: runs/echo/attention.png")
    )
    with pytest.raises(
        ValueError, match="^--env gym:no_such:Echo-v0: the module no_such does not import: Module"
    ):
        evaluate.main(["echo", "--env", "gym:no_such:Echo-v0"])


def test_figures_are_drawn_whatever_backend_the_environment_names(tmp_path):
    backend = "module://matplotlib_inline.backend_inline"  # a notebook's, which is not installed here
    environment = os.environ | {"MPLBACKEND": backend, "PYTHONPATH": str(ROOT)}
    code = "from plots.runs import plot_run\nimport os\nprint(os.environ['MPLBACKEND'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == backend, done.stderr


def test_a_run_whose_curves_cannot_be_drawn_ends_well(trained_copy, monkeypatch, capsys):
    def fail(folder):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("plots.runs.plot_run", fail)
    rows = train.main(["--name", "a", "--resume", "--steps", "1600"])
    said = capsys.readouterr().out
    assert rows and "no curves (RuntimeError: no fonts); to draw them:  python " in said
    assert (trained_copy / "table.txt").exists()


def test_names_and_printed_paths_work_from_another_folder(trained_copy, elsewhere, capsys, monkeypatch):
    monkeypatch.setattr(config, "ROOT", trained_copy.parent.parent)
    (elsewhere / "a").mkdir()  # a folder of that name, which holds no run
    evaluate.main(["a", "--episodes", "1"])
    printed = capsys.readouterr().out
    assert f"written: {trained_copy / 'evaluation.csv'}" in printed
    assert plot.main(["run", "a"]) == trained_copy / "curves.png"
    assert train.load("a").config.name == "a"
    train.main(["--name", "a", "--resume", "--steps", "1600"])
    said = capsys.readouterr().out
    assert f"{trained_copy}: to watch it,  tensorboard --logdir {trained_copy.parent}\n" in said
    new = ["--name", "b", "--init", "a", "--steps", "100", "--env", "popgym", "--tasks", "RepeatFirstEasy"]
    train.main([*new, "--attempts", "1", "--scale", "smoke"])
    monkeypatch.chdir(trained_copy.parent)
    assert config.shown(trained_copy / "best.pt") == os.path.join("a", "best.pt")


def test_the_command_that_resumes_can_be_typed_where_one_stands(trained_copy, elsewhere, monkeypatch):
    one = run.Run(parse(["--name", "a", "--resume"], trained_copy.parent.parent), trained_copy.parent.parent)
    assert one.resume_command() == f"python {ROOT / 'train.py'} --name a --resume"
    monkeypatch.chdir(ROOT)
    assert one.resume_command() == "python train.py --name a --resume"


@pytest.mark.parametrize(
    "env", ["gym:ALE/Pong-v5", "gym:my_envs:Echo-v0", "gym:" + ",".join(["CartPole-v1"] * 25), "popgym"]
)
def test_default_names_are_folders(env, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "all_tasks", lambda env: {})
    names = set()
    for _ in range(3):  # within one second
        name = parse(["--env", env], tmp_path).name
        assert len(name) < 110 and set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
        )
        (tmp_path / "runs" / name).mkdir(parents=True)
        names.add(name)
    assert len(names) == 3


@pytest.mark.parametrize("flag", [["--seed", "5"], ["--scale", "laptop"], ["--init", "b"]])
def test_what_only_a_beginning_reads_is_refused_on_resume(trained_copy, flag):
    root = trained_copy.parent.parent
    with pytest.raises(
        ValueError, match=f"^{flag[0]} of a run cannot change on --resume: it was .*Leave it out$"
    ):
        parse(["--name", "a", "--resume", *flag], root)
    saved = json.loads((trained_copy / "config.json").read_text())
    same = ["--seed", str(saved["seed"]), "--scale", saved["scale"]]
    assert parse(["--name", "a", "--resume", *same], root).seed == saved["seed"]
    assert parse(["--name", "a", "--resume", "--scale", "auto"], root).scale == "smoke"


def test_threads_beyond_the_cores_are_not_started():
    before = torch.get_num_threads()
    try:
        prepare_torch(100_000)
        assert 1 <= torch.get_num_threads() <= os.cpu_count()
    finally:
        torch.set_num_threads(before)


def test_a_run_starts_without_what_windows_lacks(runs, monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.setattr(logger, "fcntl", None)
    opened = os.open

    def no_folders(path, *arguments):
        if Path(path).is_dir():
            raise PermissionError(path)
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", no_folders)
    flags = ["--env", "gym:CartPole-v1", "--scale", "smoke", "--steps", "400", "--name", "w"]
    assert train.main(flags)[0]["task"] == "CartPole-v1"
    assert checkpoint.load(runs / "w" / "checkpoint.pt")["counters"]["steps"] == 400


def test_a_dollar_in_a_name_begins_no_formula(tmp_path, trained_copy):
    from test_plot import write_seed

    names = ["$^$", "a$b", "$x_"]
    folders = [write_seed(tmp_path / name, layers=i) for i, name in enumerate(names)]
    assert plot.main(["compare", *folders, "--output", str(tmp_path / "c.png")]).stat().st_size > 1000
    shutil.copytree(trained_copy, tmp_path / "$^$run")
    for figure in ("run", "attention"):
        assert plot.main([figure, str(tmp_path / "$^$run")]).exists()


def test_a_damaged_table_of_bounds_is_told_before_anything_is_played(
    trained_copy, runs, monkeypatch, tmp_path
):
    with (tmp_path / "popgym_bounds.csv").open("w") as file:
        csv.writer(file).writerows([["task", "low", "high"], ["RepeatFirstEasy", 0, 1]])
    monkeypatch.setattr("suites.scores.RESULTS", tmp_path)
    with pytest.raises(ValueError, match="popgym_bounds.csv needs the columns task, random_mean, best_mean"):
        train.main(["--env", "popgym", "--scale", "smoke", "--name", "x"])
    assert not (runs / "x" / "checkpoint.pt").exists()
    with pytest.raises(ValueError, match="popgym_bounds.csv needs the columns"):
        evaluate.main([str(trained_copy), "--episodes", "1000000"])


@pytest.mark.parametrize(("level", "played"), [(np.int64(5), 5), (np.int32(5), 5), (True, None), (5.0, None)])
def test_a_procgen_level_of_another_type(level, played):
    procgen = pytest.importorskip("suites.procgen")
    try:
        game = procgen.procgen_class() and procgen.ProcgenGame("coinrun", "easy")
    except ImportError:
        pytest.skip("no Procgen here")
    if played is None:
        with pytest.raises(ValueError, match="a Procgen level is from 0 to"):
            game.reset(options={"level": level})
    else:
        frame = game.reset(options={"level": level})[0]
        assert np.array_equal(frame, game.reset(options={"level": played})[0])
    game.close()


def test_another_environment_than_the_trained_one_is_not_played(trained_copy):
    with pytest.raises(ValueError, match="was trained on popgym: --env gym:CartPole-v1 cannot be played"):
        evaluate.main([str(trained_copy), "--env", "gym:CartPole-v1"])


def test_weights_of_other_tasks_are_refused_with_the_flags_that_they_need(runs, trained_copy):
    with pytest.raises(
        checkpoint.CheckpointError, match="--env popgym --tasks RepeatFirstEasy --attempts 1"
    ) as caught:
        train.main(["--init", str(trained_copy), "--name", "tuned", "--scale", "smoke", "--steps", "100"])
    assert "\n" not in str(caught.value) and "size mismatch" not in str(caught.value)
