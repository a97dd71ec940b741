"""benchmarks/rollout.py: its plain loop plays what the real one plays, and what its table says of the rollout.

Of speed only what holds with room to spare, measured within one run.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

# By its path: beside it lies a replay.py, which must not hide the project's own.
PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "rollout.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_rollout", PATH)
rollout = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rollout)

FIELDS = ["benchmark", "case", "what", "value", "unit", "plain", "ratio"]


def test_the_plain_loop_fills_the_replay_with_the_same_rollouts():
    "Greedy, and without exploration; 51 steps a rollout, so that all memories start anew, and wrap around."
    flags = ("--scale", "smoke", "--tasks", "RepeatFirstEasy,HigherLowerEasy,MineSweeperEasy")
    flags += ("--attempts", "1", "--epsilon_start", "0", "--epsilon_end", "0")
    replays = []
    for plain in (True, False):
        with rollout.fresh_run("popgym-8", *flags) as run:
            run.policy.greedy = True
            loop = rollout.PlainLoop(run)
            for _ in range(150):
                loop.step() if plain else rollout.step_of(run)
            replays.append(run.replay.state_dict())
    ours, theirs = replays
    assert len(ours["length"]) > 20 and ours["action"].unique().numel() > 3
    for name in ("obs", "action", "reward", "length", "start", "terminated", "task"):
        assert torch.equal(ours[name], theirs[name]), name


def test_the_rollout_beats_the_plain_loop_and_costs_less_than_ten_times_the_environments():
    table = rollout.rows(["popgym-8", "popgym-64"], seconds=0.5, repeats=1, warmup=3)
    assert all(list(line) == FIELDS and line["benchmark"] == "rollout" for line in table)
    values = {(line["case"], line["what"]): line for line in table}
    for case in ("popgym-8", "popgym-64"):
        assert values[case, "env steps"]["ratio"] > 2
        shares = [values[case, part]["value"] for part in ("policy", "environments", "bookkeeping")]
        assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert 1 / values["popgym-64", "environments"]["value"] - 1 < 10


def test_the_command_prints_its_table(capsys):
    "One without a plain loop; what is measured is gone afterwards."
    root = rollout.train.ROOT
    rollout.CASES["cartpole"] = ("gym:CartPole-v1", None, False)
    try:
        flags = ["--scale", "smoke", "--seconds", "0.05", "--repeats", "1", "--warmup", "1"]
        table = rollout.main(["--cases", "cartpole", *flags])
    finally:
        del rollout.CASES["cartpole"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cartpole")]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["cartpole", part] for part in ("policy", "environments", "bookkeeping")
    ]
    assert lines[0].startswith("cartpole") and "1/s" in lines[0] and "plain" not in lines[0]
    assert table[0]["value"] > 0 and table[0]["plain"] is None and rollout.train.ROOT == root


def test_an_unknown_case_is_named():
    with pytest.raises(ValueError, match="unknown case 'popgym': choose from popgym-8"):
        rollout.rows(["popgym"])
