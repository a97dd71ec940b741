"""benchmarks/replay.py: the plain list draws the same windows as the replay, and the table compares both.

Speeds are tested only where the difference is large, measured within one run.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

# By its path: the project has a replay.py of its own.
PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "replay.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_replay", PATH)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)

FIELDS = ["benchmark", "case", "what", "value", "unit", "plain", "ratio"]


@pytest.mark.parametrize("case", ["vectors-laptop", "frames-laptop"])
def test_the_plain_list_draws_the_same_windows(case):
    "Two rounds of adding: the oldest have made room."
    trajectories = bench.make_trajectories(case, count=6, longest=40)
    replay, plain = bench.make_replay(trajectories), bench.PlainList(6)
    for store in (replay, plain):
        bench.fill(store, trajectories)
        bench.fill(store, trajectories[:4])
    ends = 0
    for context in (5, 30, 40):
        ours, theirs = replay.sample(8, context), plain.sample(8, context)
        for field, a, b in zip(ours._fields, ours, theirs):
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field
            else:
                assert a == b, field
        assert (ours.image_BT is None) == (case == "vectors-laptop")
        ends += int(ours.done_BT.sum())
    assert ends > 0


def test_the_table_of_vectors_and_frames():
    "Windows come faster than out of the plain list, but for frames, which are smaller by far."
    table = bench.rows(["vectors-laptop", "frames-laptop"], seconds=0.2, repeats=1, count=8, longest=120)
    assert all(list(line) == FIELDS and line["benchmark"] == "replay" for line in table)
    values = {(line["case"], line["what"]): line for line in table}
    assert list(values) == [
        *(("vectors-laptop", what) for what in ("windows", "steps added")),
        *(("frames-laptop", what) for what in ("windows", "steps added", "bytes a frame")),
    ]
    assert all(line["value"] > 0 and line["plain"] > 0 for line in table)
    assert values["vectors-laptop", "windows"]["ratio"] > 1
    assert values["frames-laptop", "bytes a frame"]["ratio"] > 2


def test_the_command_prints_its_table(capsys):
    flags = ["--seconds", "0.05", "--repeats", "1", "--count", "4", "--longest", "20"]
    bench.main(["--cases", "vectors-paper", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["vectors-paper"] * 2
    assert "windows" in lines[0] and "1/s" in lines[0] and "x of plain" in lines[0]


def test_an_unknown_case_is_named():
    with pytest.raises(ValueError, match="unknown case 'vectors': choose from vectors-laptop"):
        bench.rows(["vectors"])
