"""presets.py: the paper's columns, typed again from the page, and what scales may do to them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import presets
from presets import PRESETS, preset

# Rows of the two tables as printed, POPGym column.
TABLE_1 = """
Learning Rate | 1e-4
Batch Size (In Sequences) | 24
Replay Buffer Size (in Timesteps) | 15,000 Full Trajectories
L2 Penalty | 1e-4
Grad Clip (Norm) | 1
Learning Update gamma | [0.1,.9,.95,.97,.99,.995,.999]
Rollout gamma | .999
Critic Ensemble Size | 4
Target Network Update tau | .003
"""
TABLE_2 = """
Timestep Encoder | FF (512, 200)
Transformer Dim. | 256
Transformer FF Dim. | 1024
Transformer Layers | 3
Transformer Heads | 8
Context Length (Timesteps) | 600
Actor and Critic MLPs | (256, 256)
Critic Output Bins (Ind.) | 64
"""


def rows(table):
    return dict(line.split(" | ") for line in table.strip().splitlines())


@pytest.mark.parametrize("name", ["popgym", "gym"])
def test_equals_table_1(name):
    paper, table = preset(name, "paper"), rows(TABLE_1)
    assert paper["learning_rate"] == float(table["Learning Rate"])
    assert paper["batch_size"] == int(table["Batch Size (In Sequences)"])
    assert f"{paper['replay_trajectories']:,} Full Trajectories" == table["Replay Buffer Size (in Timesteps)"]
    assert paper["replay_steps"] is None
    assert paper["weight_decay"] == float(table["L2 Penalty"])
    assert paper["grad_clip"] == float(table["Grad Clip (Norm)"])
    assert paper["gammas"] == tuple(float(g) for g in table["Learning Update gamma"].strip("[]").split(","))
    assert paper["gammas"][-1] == float(table["Rollout gamma"])
    assert paper["critics"] == int(table["Critic Ensemble Size"])
    assert paper["tau"] == float(table["Target Network Update tau"])


@pytest.mark.parametrize("name", ["popgym", "gym"])
def test_equals_table_2(name):
    paper, table = preset(name, "paper"), rows(TABLE_2)
    assert f"FF ({paper['encoder_hidden']}, {paper['encoder_dim']})" == table["Timestep Encoder"]
    assert paper["d_model"] == int(table["Transformer Dim."])
    assert paper["d_ff"] == int(table["Transformer FF Dim."])
    assert paper["layers"] == int(table["Transformer Layers"])
    assert paper["heads"] == int(table["Transformer Heads"])
    assert paper["context"] == int(table["Context Length (Timesteps)"])
    assert str(paper["hidden"]) == table["Actor and Critic MLPs"]
    assert paper["bins"] == int(table["Critic Output Bins (Ind.)"])


def test_what_the_tables_do_not_print():
    "Appendix A's limits; the authors' script; a clip that leaves a sharp policy over 27 actions sharp."
    paper = preset("popgym", "paper")
    assert (paper["bin_low"], paper["bin_high"], paper["symlog"]) == (-1e5, 1e5, True)
    assert (paper["reward_scale"], paper["env_steps_per_update"], paper["warmup_updates"]) == (200, 12, 2000)
    assert (paper["epsilon_start"], paper["epsilon_end"], paper["epsilon_steps"]) == (1.0, 0.05, 10**6)
    assert (paper["dropout"], paper["critic_weight"], paper["action_samples"]) == (0.05, 10, 3)
    assert (paper["prob_low"], paper["prob_high"]) == (1e-6, 1)
    assert (paper["attempts"], paper["store_executed"], paper["steps"]) == (2, False, 10**8)
    assert preset("gym", "paper")["attempts"] == preset("gym", "laptop")["attempts"] == 1


ALL = [(name, scale) for name, scales in PRESETS.items() for scale in scales]


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_a_scale_overrides_known_fields_only(name, scale):
    paper, values = preset(name, "paper"), preset(name, scale)
    assert values.keys() == paper.keys()
    assert values == {**PRESETS[name]["paper"], **PRESETS[name][scale]}
    for field, value in values.items():
        if None not in (value, paper[field]):
            assert type(value) is type(paper[field]), field
    assert values["d_model"] % values["heads"] == 0
    assert (values["replay_steps"] is None) != (values["replay_trajectories"] is None)
    assert list(values["gammas"]) == sorted(values["gammas"])  # the last one acts, and sees furthest


def test_all_scales_are_there():
    assert {tuple(scales) for scales in PRESETS.values()} == {("paper", "laptop", "smoke")}


def test_fields_are_those_of_the_trainer():
    "Read from the source, so that the table can be checked where the trainer's packages are not installed."
    tree = ast.parse((Path(presets.__file__).parent / "train.py").read_text())
    (config,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config"]
    fields = {n.target.id for n in config.body if isinstance(n, ast.AnnAssign)}
    assert preset("popgym", "paper").keys() - fields == set()


def test_a_preset_is_a_copy():
    preset("popgym", "laptop")["layers"] = 99
    assert preset("popgym", "laptop")["layers"] != 99


def test_unknown_names_say_what_there_is():
    with pytest.raises(ValueError, match="unknown preset 'popgyn': choose from popgym, scales, gym"):
        preset("popgyn", "paper")
    with pytest.raises(ValueError, match="unknown scale 'big' of preset 'popgym': choose from paper, laptop"):
        preset("popgym", "big")


def test_the_printed_table_runs_alone(tmp_path):
    (tmp_path / "presets.py").write_text(Path(presets.__file__).read_text())
    done = subprocess.run(
        [sys.executable, "presets.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["tau", "0.003", "0.01", "0.01"] in lines
    assert len(lines) == 1 + len(preset("popgym", "paper"))
