"""runtime/checkpoint.py, through the real program: a resumed run is the run that was interrupted."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from config import parse
from runtime import captured, checkpoint

ROOT = Path(__file__).resolve().parent.parent
TIMES = ("minutes", "steps_per_second", "updates_per_second")
# Evaluations and checkpoints come by the clock: here only at the end.
BY_STEPS = ["--device", "cpu", "--eval_every", "1000", "--checkpoint_every", "1000", "--final_episodes", "1"]
SMOKE = ["--scale", "smoke", *BY_STEPS]


pytestmark = pytest.mark.usefixtures("runs")


def training_rows(folder):
    "The log's rows about training, without what is measured by the clock."
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows if "loss/critic" in row]


def own_state(folder, rank=0):
    "What a process alone has, of the newest checkpoint."
    mine = checkpoint.load(folder / "checkpoint.pt")["processes"][rank]
    return checkpoint.load_part(folder / "parts", mine["state"])


def assert_same(a, b, at=""):
    "Nested dictionaries and lists of tensors and numbers, equal to the bit."
    assert type(a) is type(b), at
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for name in a:
            assert_same(a[name], b[name], f"{at}/{name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{at}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), at
    else:
        assert a == b, at


def assert_same_run(one, other):
    "Weights, optimizer, log rows, rollouts in progress and all random states."
    a, b = (checkpoint.load(folder / "checkpoint.pt") for folder in (one, other))
    for name in ("agent", "optimizer", "schedule"):
        assert_same(a[name], b[name], name)
    count = lambda state: {k: state["counters"][k] for k in ("steps", "updates", "rollouts", "updates_owed")}
    assert count(a) == count(b) and a["counters"]["updates"] >= 20
    assert_same(training_rows(one), training_rows(other))
    own_a, own_b = own_state(one), own_state(other)
    for own in (own_a, own_b):
        del own["rng"]["python"], own["rng"]["numpy"]  # drawn from by libraries that draw plots
    assert_same(own_a, own_b)


CASES = {
    "popgym": ["--tasks", "RepeatFirstEasy,MineSweeperEasy,VelocityOnlyCartPoleEasy", "--attempts", "2"],
    "all of popgym, dep_ind": ["--variant", "dep_ind"],
    "continuous": ["--env", "gym:Pendulum-v1", "--variant", "dep_dep", "--dropout", "0.1"],
    "babyai": ["--env", "babyai", "--tasks", "BabyAI-GoToLocal-v0,BabyAI-OpenDoor-v0"],
    "procgen": ["--env", "procgen-easy", "--tasks", "climber,coinrun", "--augment"],
    "worker processes": ["--tasks", "RepeatFirstEasy,MineSweeperEasy", "--workers", "processes"],
}


@pytest.mark.parametrize("case", CASES)
def test_n_updates_a_restart_and_n_more_are_2n_updates_to_the_bit(runs, case):
    flags = [*SMOKE, "--log_every", "15", *CASES[case]]
    if case == "popgym":
        flags += ["--segment_length", "40", "--context", "32"]  # with cuts in rollouts
    train.main(["--name", "whole", *flags, "--steps", "1600"])
    train.main(["--name", "parts", *flags, "--steps", "790"])
    train.main(["--name", "parts", "--resume", "--steps", "1600"])
    assert_same_run(runs / "whole", runs / "parts")


@pytest.mark.slow
def test_a_resumed_run_with_compiled_kernels_is_the_uninterrupted_run(runs, monkeypatch):
    "Windows of several lengths; the resumed process meets them in another order, and compiles for each anew."
    monkeypatch.setattr(captured, "TIME_STEPS", 8)
    monkeypatch.setattr(captured, "STATES", 64)
    flags = [*SMOKE, "--log_every", "15", "--compile", "--tasks", "RepeatFirstEasy,MineSweeperEasy"]
    train.main(["--name", "whole", *flags, "--steps", "1200"])
    torch._dynamo.reset()
    train.main(["--name", "parts", *flags, "--steps", "590"])
    torch._dynamo.reset()
    train.main(["--name", "parts", "--resume", "--steps", "1200"])
    assert_same_run(runs / "whole", runs / "parts")


def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(runs, tmp_path):
    "SIGTERM at a moment that is not chosen; the run that was not stopped has the same numbers."
    flags = [*SMOKE, "--tasks", "RepeatFirstEasy,MineSweeperEasy", "--log_every", "15", "--steps", "6000"]
    train.main(["--name", "whole", *flags])
    program = (
        f"import sys, pathlib, train; train.ROOT = pathlib.Path({str(tmp_path)!r}); train.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "--name", "parts", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = runs / "parts" / "metrics.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) > 4):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    stopped_at = checkpoint.load(runs / "parts" / "checkpoint.pt")["counters"]["steps"]
    assert 0 < stopped_at < 6000
    train.main(["--name", "parts", "--resume"])
    assert_same_run(runs / "whole", runs / "parts")


@pytest.fixture(scope="module")
def run_saved_twice(tmp_path_factory):
    "A run with a checkpoint and the one before it, made once."
    folder = tmp_path_factory.mktemp("saved")
    flags = [*SMOKE, "--tasks", "RepeatFirstEasy,MineSweeperEasy", "--attempts", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "ROOT", folder)
        train.main(["--name", "a", *flags, "--steps", "800"])
        train.main(["--name", "a", "--resume", "--steps", "1200"])
    return folder / "runs" / "a"


@pytest.fixture
def saved_twice(run_saved_twice, runs):
    "A copy of it for each test to damage."
    return Path(shutil.copytree(run_saved_twice, runs / "a"))


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["checkpoint.pt", "its own part", "cut short", "gone"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(saved_twice, what, capsys):
    newest = saved_twice / "checkpoint.pt"
    before = checkpoint.load(saved_twice / "previous.pt")["counters"]
    path = newest
    if what == "its own part":
        path = saved_twice / "parts" / checkpoint.load(newest)["processes"][0]["state"]["file"]
    if what == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "gone":
        newest.rename(saved_twice / "elsewhere")
    else:
        damage(path)
    capsys.readouterr()
    train.main(["--name", "a", "--resume", "--steps", "1600"])
    out = capsys.readouterr().out
    if what != "gone":
        (line,) = [line for line in out.splitlines() if "Resuming from the checkpoint before it" in line]
        assert "is damaged" in line and path.name in line and "previous.pt" in line
    assert f"resuming runs/a at env step {before['steps']:,}, update {before['updates']:,}" in out
    rows = [json.loads(line)["updates"] for line in (saved_twice / "metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(rows) and len(training_rows(saved_twice)) == len(
        {row["updates"] for row in training_rows(saved_twice)}
    )
    # What was damaged is not kept as the checkpoint before the next one.
    assert {
        checkpoint.load(saved_twice / name)["counters"]["steps"] for name in ("checkpoint.pt", "previous.pt")
    }


def test_what_was_damaged_does_not_take_the_place_of_the_checkpoint_before(saved_twice):
    "After the first save of a run that fell back, both files load: a crash right then costs no more."
    damage(saved_twice / "checkpoint.pt")
    steps = checkpoint.load(saved_twice / "previous.pt")["counters"]["steps"]
    root = saved_twice.parent.parent
    with train.Run(parse(["--name", "a", "--resume"], root), root) as run:
        train.set_up(run)
        run.save()
    for name in ("checkpoint.pt", "previous.pt"):
        assert checkpoint.load(saved_twice / name)["counters"]["steps"] == steps


def test_where_both_are_damaged_it_is_one_line(saved_twice):
    damage(saved_twice / "checkpoint.pt"), damage(saved_twice / "previous.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"previous\.pt is damaged"):
        train.main(["--name", "a", "--resume"])


def test_a_part_of_another_checkpoint_is_not_taken_for_its_own(saved_twice):
    "Whole, and with a good checksum of its own, but not the one that the checkpoint names."
    state = checkpoint.load(saved_twice / "checkpoint.pt")["processes"][0]["state"]
    path = saved_twice / "parts" / state["file"]
    other = checkpoint.load(path) | {"returns": {"RepeatFirstEasy": [1e9]}}
    checkpoint.save(path, other)
    with pytest.raises(checkpoint.CheckpointError, match="not the file that the checkpoint was saved with"):
        checkpoint.load_part(saved_twice / "parts", state)


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["init", "resume", "load"])
def test_a_checkpoint_from_a_stranger_cannot_run_code(saved_twice, tmp_path, how):
    "A pickle that touches a file when it is opened, with a good checksum, wherever a checkpoint is read."
    touched, path = tmp_path / "touched", saved_twice / "checkpoint.pt"
    pickle.loads(pickle.dumps(RunsCode(touched)))
    assert touched.exists()  # that it would, opened carelessly
    touched.unlink()
    (saved_twice / "previous.pt").unlink()
    checkpoint.save(path, {"config": RunsCode(touched), "agent": {}})
    with pytest.raises(checkpoint.CheckpointError, match="not plain data"):
        if how == "init":
            train.main(["--name", "b", "--init", str(path), *SMOKE, "--steps", "100"])
        elif how == "resume":
            train.main(["--name", "a", "--resume"])
        else:
            train.load(path)
    assert not touched.exists()


def test_a_checkpoint_writes_only_what_is_new_and_refers_to_nothing_newer(runs, monkeypatch):
    "Saved every 20 updates: each trajectory is written once, and each checkpoint loads as it was."
    monkeypatch.setattr(checkpoint, "PART", 7)
    written, original = [], checkpoint.save_part

    def note(folder, name, state):
        if name.startswith("replay"):
            first, count = state["first"], len(state["length"])
            written.extend(range(first, first + count))
            assert state["total_added"] >= first + count and 1 <= count <= 7
        return original(folder, name, state)

    monkeypatch.setattr(checkpoint, "save_part", note)
    save, count_update = train.Run.save, train.Run.count_update
    kept = []

    def count_and_save(run, metrics):
        count_update(run, metrics)
        if run.updates % 20 == 0:
            save(run)
            state = checkpoint.load(run.folder / "checkpoint.pt")
            replay = checkpoint.load_part(run.folder / "parts", state["processes"][0]["state"])["replay"]
            ends = [part["end"] for part in state["processes"][0]["replay"]]
            assert ends == sorted(ends) and ends[-1] == replay["total_added"] == run.replay.total_added
            kept.append(len(list((run.folder / "parts").iterdir())))

    monkeypatch.setattr(train.Run, "count_update", count_and_save)
    flags = [*SMOKE, "--tasks", "RepeatFirstEasy,MineSweeperEasy", "--attempts", "1", "--steps", "6000"]
    train.main(["--name", "a", *flags, "--replay_trajectories", "40"])
    assert len(kept) > 5 and len(written) == len(set(written)) > 80
    # Files of trajectories that are gone from the replay of both checkpoints are deleted.
    assert kept[-1] <= kept[len(kept) // 2] + 2


def test_another_learning_rate_counts_from_the_resume_on(saved_twice):
    "Loaded states bring the old one back; what the command line says holds."
    flags = ["--learning_rate", "0.002", "--weight_decay", "0.5", "--log_every", "1"]
    train.main(["--name", "a", "--resume", "--steps", "1600", *flags])
    state = checkpoint.load(saved_twice / "checkpoint.pt")
    (group,) = state["optimizer"]["param_groups"]
    assert (group["lr"].item(), group["weight_decay"]) == (pytest.approx(0.002), 0.5)
    assert training_rows(saved_twice)[-1]["learning_rate"] == pytest.approx(0.002)


def test_a_resume_that_fails_leaves_the_configuration_as_it_was(saved_twice):
    before = (saved_twice / "config.json").read_text()
    with pytest.raises(ValueError, match="--augment shifts images"):
        train.main(["--name", "a", "--resume", "--augment"])
    assert (saved_twice / "config.json").read_text() == before


def test_a_run_or_checkpoint_that_names_a_module_does_not_import_it(saved_twice, tmp_path, monkeypatch):
    "Gymnasium imports what stands before an id's colon: typed by the user that is wanted, from a file it is not."
    (tmp_path / "stranger.py").write_text("raise SystemExit('code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    state = checkpoint.load(saved_twice / "best.pt")
    state["config"] |= {"env": "gym:CartPole-v1,stranger:CartPole-v1", "tasks": None}
    checkpoint.save(saved_twice / "best.pt", state)
    with pytest.raises(
        ValueError, match="would import and run the module stranger: if you trust it, add --env"
    ):
        train.load(saved_twice)
    config = json.loads((saved_twice / "config.json").read_text()) | {"env": "gym:stranger:CartPole-v1"}
    (saved_twice / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="module stranger: if you trust it, add --env gym:stranger:CartPole-v1"
    ):
        train.main(["--name", "a", "--resume"])


def test_another_kind_of_file_in_its_place_is_told_and_the_checkpoint_before_taken(saved_twice, capsys):
    shutil.copy(saved_twice / "best.pt", saved_twice / "checkpoint.pt")
    capsys.readouterr()
    train.main(["--name", "a", "--resume", "--steps", "1300"])
    assert "it has no optimizer" in capsys.readouterr().out
    part = next((saved_twice / "parts").glob("rank-*.pt"))
    with pytest.raises(checkpoint.CheckpointError, match="it has no config"):
        train.load(part)


def test_another_number_of_environments_begins_rollouts_anew(runs, capsys):
    flags = [*SMOKE, "--tasks", "RepeatFirstEasy", "--attempts", "1"]
    train.main(["--name", "a", *flags, "--steps", "600"])
    capsys.readouterr()
    train.main(["--name", "a", "--resume", "--steps", "900", "--num_envs", "3"])
    assert "--num_envs changed: episodes in progress restart" in capsys.readouterr().out
    assert checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]["steps"] == 900


def test_a_simulator_that_does_not_repeat_itself_begins_its_rollout_anew(runs, capsys, monkeypatch):
    "Its observations come from a generator that no seed reaches; the other rollouts go on as they were."
    import gymnasium

    class Unseeded(gymnasium.Wrapper):
        def step(self, action):
            obs, *rest = self.env.step(action)
            return obs + np.float32(1e-3 * np.random.default_rng().random()), *rest

    make = lambda: Unseeded(gymnasium.make("CartPole-v1").unwrapped)
    gymnasium.register("Unseeded-v0", make, max_episode_steps=200)
    try:
        flags = [*SMOKE, "--env", "gym:Unseeded-v0,CartPole-v1", "--steps", "600"]
        train.main(["--name", "a", *flags])
        capsys.readouterr()
        with train.Run(parse(["--name", "a", "--resume"], runs.parent), runs.parent) as run:
            train.set_up(run)
        found = re.search(r"(\d+) of (\d+) rollouts restart", capsys.readouterr().out)
        anew, buffer = int(found[1]), run.buffer
        assert 0 < anew < int(found[2]) and run.lost == anew
        fresh_E = (buffer.count_E == 0) & (buffer.time_E == 0) & (run.policy.time_B == 0).numpy()
        assert fresh_E.sum() >= anew
        start = run.env.layout["attempt_start"]
        assert (buffer.newest()["vector"][fresh_E][:, start] == 1).all()  # as at the start of a rollout
    finally:
        del gymnasium.registry["Unseeded-v0"]


def test_a_run_killed_before_its_first_checkpoint_starts_from_its_beginning(runs, capsys):
    flags = [*SMOKE, "--tasks", "RepeatFirstEasy", "--attempts", "1", "--steps", "600"]
    train.main(["--name", "a", *flags])
    for name in ("checkpoint.pt", "previous.pt"):
        os.unlink(runs / "a" / name)
    rows = training_rows(runs / "a")
    capsys.readouterr()
    train.main(["--name", "a", "--resume"])
    assert "no checkpoint yet: starting from its beginning" in capsys.readouterr().out
    assert training_rows(runs / "a") == rows


def test_killed_at_random_moments_no_row_is_lost_or_doubled():
    "Two kills of the script that does twenty."
    command = [sys.executable, "benchmarks/kills.py", "--kills", "2", "--steps", "8000", "--longest", "1.2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills, 2 resumes, 0 rows lost, 0 rows doubled" in done.stdout
