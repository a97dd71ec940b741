"""What goes wrong while a run lasts, injected through the real program: one clear line, and nothing lost."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import evaluate
import train
from runtime import checkpoint, frame_store
from runtime.logger import Logger
from update import update

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ["--scale", "smoke", "--device", "cpu", "--eval_every", "1000", "--checkpoint_every", "1000"]
SMOKE += ["--final_episodes", "1"]
TWO = ["--tasks", "RepeatFirstEasy,MineSweeperEasy", "--attempts", "1"]


pytestmark = pytest.mark.usefixtures("runs")


def children(pid: int) -> list[int]:
    "Processes that a process has started, and those that they have, as Linux tells."
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *children(child)]
    return found


def none_left(pids: list[int]) -> bool:
    "Whether all of them have ended, a second later at most."
    until = time.monotonic() + 1
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


# --------------------------------------------------------------------------------------- a disk that is full


@pytest.fixture
def no_file_may_grow():
    "A function after whose call the system refuses to make any file larger than it is told."
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def resumes_from(runs, steps, no_file_may_grow):
    "The checkpoint loads, and the run goes on."
    no_file_may_grow(resource.RLIM_INFINITY)
    assert checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]["steps"] == steps
    train.main(["--name", "a", "--resume", "--steps", str(steps + 200)])
    assert checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]["steps"] == steps + 200


LINE = r"^a file of .*/runs/a could not be written \(.*\): free some space there\. The last checkpoint .* --resume$"


def test_a_full_disk_under_the_log(runs, monkeypatch, no_file_may_grow):
    train.main(["--name", "a", *SMOKE, *TWO, "--steps", "600"])
    original = Logger.write

    def write(log, *row):
        no_file_may_grow((runs / "a" / "metrics.jsonl").stat().st_size + 100)  # a row takes some thousand
        original(log, *row)

    monkeypatch.setattr(Logger, "write", write)
    with pytest.raises(OSError, match=LINE):
        train.main(["--name", "a", "--resume", "--steps", "3000"])
    monkeypatch.setattr(Logger, "write", original)
    resumes_from(runs, 600, no_file_may_grow)


@pytest.mark.parametrize("file", ["checkpoint.pt", "rank", "replay"])
def test_a_full_disk_under_a_checkpoint(runs, monkeypatch, no_file_may_grow, file):
    "While the checkpoint itself is written, or one of its parts."
    train.main(["--name", "a", *SMOKE, *TWO, "--steps", "600"])
    original = checkpoint.save

    def save(path, *arguments, **more):
        if path.name.startswith(file):
            no_file_may_grow(10_000)  # more than pytest has caught of what was printed
        return original(path, *arguments, **more)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(OSError, match=LINE):
        train.main(["--name", "a", "--resume", "--steps", "1000"])
    monkeypatch.setattr(checkpoint, "save", original)
    assert not list((runs / "a").rglob("*.writing"))  # what was half-written does not fill the disk further
    resumes_from(runs, 600, no_file_may_grow)


def test_a_full_disk_under_the_frames_that_spill(runs, monkeypatch, no_file_may_grow):
    flags = ["--env", "procgen-easy", "--tasks", "climber", "--replay_ram", "0.0004", *SMOKE]
    train.main(["--name", "a", *flags, "--steps", "600"])
    original = frame_store.FrameStore._spill

    def spill(store, segment):
        no_file_may_grow(10_000)  # more than pytest has caught of what was printed
        original(store, segment)

    monkeypatch.setattr(frame_store.FrameStore, "_spill", spill)
    with pytest.raises(
        frame_store.FramesFull, match="cannot write .* free some space, raise --replay_ram or lower"
    ):
        train.main(["--name", "a", "--resume", "--steps", "30000"])
    monkeypatch.setattr(frame_store.FrameStore, "_spill", original)
    resumes_from(runs, 600, no_file_may_grow)


# ------------------------------------------------------------------------------- environments that misbehave


class Misbehaves(gymnasium.Env):
    "An environment that does `fault` at step 7, and nothing else in particular."

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault):
        self.fault, self.obs = fault, np.zeros(3, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.obs, {}

    def step(self, action):
        self.t += 1
        self.obs[:] = self.t / 100  # the same array each time
        obs, reward = self.obs, 1.0
        if self.t == 7:
            if self.fault == "raises":
                raise KeyError("no such goal")
            if self.fault == "exits":
                raise SystemExit(0)
            reward = {"NaN reward": np.nan, "huge reward": 1e38}.get(self.fault, reward)
            obs = {"infinite observation": obs / np.float32(0), "NaN observation": obs * np.nan}.get(
                self.fault, obs
            )
            obs = {"another shape": np.zeros(4), "one number": np.zeros(1)}.get(self.fault, obs)
        return obs, reward, self.t == 20, False, {}


@pytest.fixture
def misbehaving():
    "A function that registers an environment with a fault, and returns its id."
    names = []

    def register(fault):
        names.append("Misbehaves-v0")
        gymnasium.register(
            names[-1], lambda: Misbehaves(fault), max_episode_steps=50, disable_env_checker=True
        )
        return "gym:" + names[-1]

    yield register
    for name in names:
        del gymnasium.registry[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", ["none", "processes"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "KeyError.*no such goal"),
        ("NaN reward", "nan"),
        ("NaN observation", "nan"),
        ("infinite observation", "inf"),
        ("another shape", r"\(4,\)"),
        ("one number", r"\(1,\)"),
    ],
)
def test_an_environment_that_misbehaves_is_named_with_the_step(runs, misbehaving, fault, words, workers):
    env = misbehaving(fault)
    if workers == "processes" and fault != "raises":
        pytest.skip("the check is the environment's own, in process or not: one fault is enough")
    before = set(children(os.getpid()))
    with pytest.raises(ValueError, match=rf"(?s)Misbehaves-v0.*{words}.*step 7") as caught:
        train.main(["--name", "a", "--env", env, "--workers", workers, *SMOKE, "--steps", "600"])
    assert "\n" not in str(caught.value)
    assert set(children(os.getpid())) <= before


def test_an_environment_that_returns_the_same_array_is_copied(runs, misbehaving):
    train.main(["--name", "a", "--env", misbehaving("none"), *SMOKE, "--steps", "600"])
    state = checkpoint.load(runs / "a" / "checkpoint.pt")["processes"][0]["replay"][0]
    stored = checkpoint.load_part(runs / "a" / "parts", state)
    first = stored["obs"][: stored["length"][0] + 1, 0]
    torch.testing.assert_close(first, torch.arange(21) / 100)


# ----------------------------------------------------------------------------- losses that are not finite


@pytest.mark.filterwarnings("ignore")
def test_ten_updates_that_are_not_finite_stop_the_run_and_weights_stay(runs, misbehaving, monkeypatch):
    "Rewards of 1e38, which learning multiplies by 10: every batch that holds one is left out."
    skipped, kept = [], []

    def watch(agent, *arguments):
        metrics = update(agent, *arguments)
        skipped.append(metrics["skipped"].item())
        if not skipped[-1]:
            kept.clear()
        weights = [p.detach().clone() for p in agent.parameters()]
        assert not kept or all(map(torch.equal, kept, weights))
        kept[:] = weights
        return metrics

    monkeypatch.setattr(train, "update", watch)
    flags = ["--variant", "dep_dep", "--reward_scale", "10", *SMOKE, "--steps", "60000", "--log_every", "4"]
    with pytest.raises(ValueError, match="updates in a row were (left out|skipped)") as caught:
        train.main(["--name", "a", "--env", misbehaving("huge reward"), *flags])
    assert "losses loss/critic" in str(caught.value) and "gradients" in str(caught.value)
    assert "weights " not in str(caught.value).partition("first of them")[2].partition(".")[0]
    assert "\n" not in str(caught.value)
    assert all(skipped[-10:]) and all(torch.isfinite(weight).all() for weight in kept)
    rows = (runs / "a" / "metrics.jsonl").read_text()
    assert '"skipped": 1.0' in rows  # counted in the log as well


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_finite_is_named_in_the_order_of_the_forward_pass(runs, monkeypatch):
    def spoil(agent, *arguments):
        with torch.no_grad():
            agent.transformer.inp.weight[0, 0] = np.nan
        return update(agent, *arguments)

    monkeypatch.setattr(train, "update", spoil)
    names = r"weights transformer\.inp\.weight; losses .*; gradients .* and \d+ more"
    with pytest.raises(ValueError, match=names):
        train.main(["--name", "a", *SMOKE, *TWO, "--steps", "3000"])


# ------------------------------------------------------------------------------------------ out of memory


def test_out_of_memory_says_what_to_lower():
    "The system refuses what an update needs; found by the real allocator, in a process of its own."
    code = """
import pathlib, re, resource, sys, tempfile, train
train.ROOT = pathlib.Path(tempfile.mkdtemp())
original = train.update
def update(*arguments):
    now = int(re.search(r"VmSize:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + 20_000_000, resource.RLIM_INFINITY))
    return original(*arguments)
train.update = update
try:
    train.main(sys.argv[1:])
except ValueError as error:
    sys.exit(f"error: {error}")
"""
    flags = ["--scale", "smoke", "--device", "cpu", "--tasks", "RepeatFirstEasy", "--d_model", "512"]
    flags += ["--d_ff", "2048", "--steps", "10000", "--threads", "1"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert (
        line.startswith("error: out of memory: lower --batch_size (now ") and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to ..."), MemoryError()])
def test_out_of_memory_on_a_gpu_says_the_same(runs, monkeypatch, error):
    def update(*arguments):
        raise error

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(ValueError, match=r"out of memory: lower --batch_size \(now \d+\), --context"):
        train.main(["--name", "a", *SMOKE, *TWO, "--steps", "3000"])


def test_any_other_error_stays_what_it_is(runs, monkeypatch):
    def update(*arguments):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train.main(["--name", "a", *SMOKE, *TWO, "--steps", "3000"])


# ---------------------------------------------------------------------------------- signals and dead workers


def started(tmp_path, flags):
    "The program in a process of its own, once it has written a row of its log."
    code = f"""
import pathlib, signal, sys, train
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests themselves were started by
train.ROOT = pathlib.Path({str(tmp_path)!r})
try:
    train.main(sys.argv[1:])
except KeyboardInterrupt:
    sys.exit(130)
"""
    command = [sys.executable, "-c", code, "--name", "a", *SMOKE, *TWO, "--log_every", "5", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, until = tmp_path / "runs" / "a" / "metrics.jsonl", time.monotonic() + 60
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_its_workers_within_ten_seconds(tmp_path, number):
    process = started(tmp_path, ["--workers", "processes", "--steps", "10000000"])
    workers = children(process.pid)
    assert workers
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert none_left(workers)
    assert checkpoint.load(tmp_path / "runs" / "a" / "checkpoint.pt")["counters"]["updates"] > 0


def test_a_second_interrupt_ends_it_at_once(tmp_path):
    "While the first one is being answered: here by a save that would take a minute."
    process = started(tmp_path, ["--workers", "processes", "--steps", "10000000", "--num_envs", "3"])
    workers = children(process.pid)
    process.send_signal(signal.SIGSTOP)  # so that both are there when it wakes up
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert none_left(workers)


def test_a_worker_that_dies_or_hangs_is_replaced_and_its_rollout_counted(tmp_path):
    flags = ["--workers", "processes", "--num_envs", "3", "--worker_timeout", "2", "--steps", "10000000"]
    process = started(tmp_path, flags)
    folder = tmp_path / "runs" / "a"

    def lost():
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        return max(
            (int(row.split('"lost_rollouts": ')[1].split(",")[0]) for row in rows if row.endswith("}")),
            default=0,
        )

    try:
        for expected, fault in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            os.kill(children(process.pid)[expected], fault)
            until = time.monotonic() + 60
            while lost() < expected:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert checkpoint.load(folder / "checkpoint.pt")["counters"]["lost"] == 2


def test_two_processes_do_not_train_one_run(runs, tmp_path):
    "The second, this one, is refused in one line with the first one's number; the first goes on."
    process = started(tmp_path, ["--steps", "10000000"])
    try:
        with pytest.raises(
            ValueError, match=rf"is being trained by another process \(number {process.pid}\)"
        ):
            train.main(["--name", "a", "--resume"])
        assert process.poll() is None
        process.send_signal(signal.SIGHUP)  # as when a connection breaks off: saved, like the others
        assert process.wait(10) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]["updates"] > 0


def test_an_environment_that_ends_the_program_is_named_too(runs, misbehaving):
    with pytest.raises(ValueError, match="Misbehaves-v0.*SystemExit"):
        train.main(["--name", "a", "--env", misbehaving("exits"), *SMOKE, "--steps", "600"])


class Fragile(gymnasium.Env):
    "Pays 1 in each of five steps. In an evaluation's workers, its process dies or hangs in the third."

    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)
    fault = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 3 and Fragile.fault == "dies":
            os._exit(1)
        if self.t == 3 and Fragile.fault == "hangs":
            time.sleep(1000)
        return np.array([self.t], np.float32), 1.0, self.t == 5, False, {}


gymnasium.register("Fragile-v0", Fragile, max_episode_steps=5)
CHAIN = [*SMOKE, "--workers", "processes", "--num_envs", "2", "--worker_timeout", "1", "--name", "a"]


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("others", ["", ",CliffWalking-v1"])
def test_a_simulator_that_fails_in_evaluations_does_not_end_the_run(runs, monkeypatch, capsys, fault, others):
    "Its rollouts are left out and counted. CliffWalking has no limit: an evaluation ends it after so many steps."
    monkeypatch.setattr(evaluate, "LONGEST", 20)
    made = []

    def envs(*arguments, **more):
        monkeypatch.setattr(
            Fragile, "fault", fault
        )  # workers inherit it; those of training are there already
        made.append(evaluate.evaluation_envs(*arguments, **more))
        return made[-1]

    def due(run, work, minutes):  # where it hangs, the last evaluation is enough
        return work == "evaluate" and run.steps == 100 and fault == "dies"

    monkeypatch.setattr("runtime.run.evaluation_envs", envs)
    monkeypatch.setattr(train.Run, "is_due", due)
    flags = ["--steps", "300", "--eval_episodes", "2", "--final_episodes", "2", "--segment_length", "20"]
    rows = train.main(["--env", f"gym:Fragile-v0{others}", *CHAIN, *flags])
    said = capsys.readouterr().out
    assert len(made) == 1 and made[0].closed  # kept between evaluations
    evaluations = 1 + (fault == "dies")
    line = f"2 of {2 * (1 + bool(others))} rollouts of the evaluation were lost with"
    assert said.count(line) == evaluations
    limited = "evaluations end rollouts after 5,000 env steps and count their returns up to there"
    assert said.count(limited) == bool(others)
    if others:
        assert [row["task"] for row in rows] == ["CliffWalking-v1"] and rows[0]["episodes"] == 2
        assert rows[0]["return"] <= -20
    else:
        assert rows is None
    counters = checkpoint.load(runs / "a" / "checkpoint.pt")["counters"]
    assert counters["lost"] == 2 * evaluations and counters["steps"] == 300
    if fault == "dies":  # the command says the same
        no_table = pytest.raises(ValueError, match="^all rollouts were lost: there is no table")
        with contextlib.nullcontext() if others else no_table:
            evaluate.main([str(runs / "a"), "--episodes", "2"])
        assert f"2 of {2 * (1 + bool(others))} rollouts were lost: their processes" in capsys.readouterr().out
    assert not (runs / "a" / "best.pt").exists()  # no evaluation saw all tasks


class Dice(gymnasium.Env):
    "Shows and pays numbers of the global generators, for ten steps."

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
    drawn = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.draw(), {}

    def step(self, action):
        self.t += 1
        return self.draw(), np.random.random(), self.t == 10, False, {}

    def draw(self):
        Dice.drawn.append(random.random())
        return np.array(Dice.drawn[-1:], np.float32)


gymnasium.register("Dice-v0", Dice, max_episode_steps=10)


def test_global_generators_of_a_run_in_one_process(runs, monkeypatch, capsys):
    "Evaluations all draw the same, and change nothing for training; a resumed run does not begin again."
    flags = ["--env", "gym:Dice-v0", *SMOKE, "--eval_episodes", "1", "--num_envs", "2"]
    evaluations, original = [], train.Run.evaluate

    def trained(name, evaluated_at, *more):
        due = lambda run, work, minutes: work == "evaluate" and run.steps in evaluated_at
        monkeypatch.setattr(train.Run, "is_due", due)
        Dice.drawn = []
        train.main(["--name", name, *flags, "--steps", "100", *more])
        return Dice.drawn

    def noted(run, episodes):
        before = len(Dice.drawn)
        rows = original(run, episodes)
        evaluations.append((Dice.drawn[before:], rows[0]["return"]))
        del Dice.drawn[before:]
        return rows

    monkeypatch.setattr(train.Run, "evaluate", noted)
    without, with_three = trained("a", ()), trained("b", (20, 60))
    assert without == with_three and len(set(without)) == len(without) >= 110
    assert all(evaluation == evaluations[0] for evaluation in evaluations[1:])
    assert not set(evaluations[1][0]) & set(without)
    resumed = trained("a", (), "--resume", "--num_envs", "3", "--steps", "160")  # all rollouts begin anew
    assert not set(resumed) & set(without)
    assert "has ended before" not in capsys.readouterr().out
    trained("a", (), "--resume", "--num_envs", "3", "--steps", "160")
    said = capsys.readouterr().out
    assert "this run has ended before, at --steps 160: to train on, give more. It is evaluated again" in said


def test_each_process_has_generators_of_its_own(runs, monkeypatch):
    config, drawn = train.parse(["--name", "a", *SMOKE, *TWO], train.ROOT), []
    for rank in (0, 0, 1):
        monkeypatch.setattr("runtime.distributed.rank", lambda rank=rank: rank)
        seeds = train.Run(config, train.ROOT).seeds
        drawn.append([seeds["workers"], seeds["evaluation"], random.random(), np.random.random()])
    assert drawn[0] == drawn[1] and len({*drawn[1], *drawn[2]}) == 8
