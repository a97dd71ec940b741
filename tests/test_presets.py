"""presets.py: the paper's columns, typed again from the page, and what scales may do to them."""

import subprocess
import sys
from pathlib import Path

import pytest

import presets
from config import Config
from presets import PRESETS, preset

# The two tables as printed, columns apart by "|".
TABLE_1 = """
 | Meta-World | POPGym | Procgen Easy | Procgen Memory-Hard | Atari | BabyAI
Learning Rate | 5e-4 | 1e-4 | 1e-4 | 1e-4 | 1e-4 | 1e-4
Batch Size (In Sequences) | 24 | 24 | 24 | 16 | 32 | 24
Replay Buffer Size (in Timesteps) | 8M | 15,000 Full Trajectories | 18M | 80M | 8M | 10M
L2 Penalty | 1e-4 | 1e-4 | 5e-3 | 5e-3 | 5e-3 | 1e-3
Grad Clip (Norm) | 2 | 1 | 1 | 1 | 1 | 1
Learning Update gamma | [0.1,.9,.95,.97,.99,.995,.999]
Rollout gamma | .999
Critic Ensemble Size | 4
Target Network Update tau | .003
"""
TABLE_2 = """
 | Meta-World | POPGym | Procgen Easy | Procgen Memory-Hard | Atari | BabyAI
Timestep Encoder | FF (512, 256) | FF (512, 200) | IMPALA CNN [16, 32, 32] | IMPALA CNN [20, 36, 64] | IMPALA CNN [16, 32, 32] | Multi-Modal
Transformer Dim. | 320 | 256 | 512 | 512 | 256 | 256
Transformer FF Dim. | 1280 | 1024 | 2048 | 2048 | 1024 | 1024
Transformer Layers | 3 | 3 | 3 | 6 | 3 | 4
Transformer Heads | 8 | 8 | 8 | 8 | 8 | 8
Context Length (Timesteps) | 256 | 600 | 128 | 768 | 64 | 512
Actor and Critic MLPs | (256, 256) | (256, 256) | (256, 256) | (256, 256) | (256, 256) | (256, 256)
Critic Output Bins (Ind.) | 128 | 64 | 128 | 128 | 128 | 32
"""
COLUMN = {
    "metaworld": "Meta-World",
    "popgym": "POPGym",
    "scales": "POPGym",
    "gym": "POPGym",
    "procgen-easy": "Procgen Easy",
    "procgen-easy-rescaled": "Procgen Easy",
    "procgen-memory-hard": "Procgen Memory-Hard",
    "atari": "Atari",
    "babyai": "BabyAI",
}


def rows(table, name):
    "One column of a table; a row with one value has it in all columns."
    header, *lines = (line.split("|") for line in table.strip("\n").splitlines())
    at = [cell.strip() for cell in header].index(COLUMN[name])
    return {line[0].strip(): line[at if len(line) > 2 else 1].strip() for line in lines}


@pytest.mark.parametrize("name", PRESETS)
def test_equals_table_1(name):
    paper, table = preset(name, "paper"), rows(TABLE_1, name)
    assert paper["learning_rate"] == float(table["Learning Rate"])
    assert paper["batch_size"] == int(table["Batch Size (In Sequences)"])
    if paper["replay_steps"] is None:
        size = f"{paper['replay_trajectories']:,} Full Trajectories"
    else:
        size = f"{paper['replay_steps'] / 1e6:g}M"
        assert paper["replay_trajectories"] is None
    assert size == table["Replay Buffer Size (in Timesteps)"]
    assert paper["weight_decay"] == float(table["L2 Penalty"])
    assert paper["grad_clip"] == float(table["Grad Clip (Norm)"])
    assert paper["gammas"] == tuple(float(g) for g in table["Learning Update gamma"].strip("[]").split(","))
    assert paper["gammas"][-1] == float(table["Rollout gamma"])
    assert paper["critics"] == int(table["Critic Ensemble Size"])
    assert paper["tau"] == float(table["Target Network Update tau"])


@pytest.mark.parametrize("name", PRESETS)
def test_equals_table_2(name):
    paper, table = preset(name, "paper"), rows(TABLE_2, name)
    encoder = {
        "ff": f"FF ({paper['encoder_hidden']}, {paper['encoder_dim']})",
        "impala": f"IMPALA CNN {list(paper['encoder_depths'])}",
        "grid_language": "Multi-Modal",
    }
    assert encoder[paper["encoder"]] == table["Timestep Encoder"]
    assert paper["d_model"] == int(table["Transformer Dim."])
    assert paper["d_ff"] == int(table["Transformer FF Dim."])
    assert paper["layers"] == int(table["Transformer Layers"])
    assert paper["heads"] == int(table["Transformer Heads"])
    assert paper["context"] == int(table["Context Length (Timesteps)"])
    assert str(paper["hidden"]) == table["Actor and Critic MLPs"]
    assert paper["bins"] == int(table["Critic Output Bins (Ind.)"])


def test_every_column_of_the_tables_is_a_preset():
    assert set(PRESETS) == set(COLUMN)


def test_what_the_tables_do_not_print():
    "Appendix A's limits; the authors' script; a clip that leaves a sharp policy over 27 actions sharp."
    for name in PRESETS:
        paper = vars(Config(**preset(name, "paper")))
        assert (paper["bin_low"], paper["bin_high"], paper["symlog"]) == (-1e5, 1e5, True)
        assert (paper["dropout"], paper["critic_weight"], paper["action_samples"]) == (0.05, 10, 3)
        assert (paper["env_steps_per_update"], paper["n_step"], paper["clip_rewards"]) == (12, 1, False)
        assert (paper["epsilon_start"], paper["epsilon_end"]) == (1.0, 0.05)
        pixels = paper["encoder"] == "impala"
        assert paper["augment"] == pixels
        popgym = COLUMN[name] == "POPGym"
        assert (paper["prob_low"], paper["prob_high"]) == ((1e-6, 1) if popgym else (0.001, 0.99))
        assert paper["warmup_updates"] == (2000 if popgym else 500)
    scale = {"popgym": 200, "metaworld": 1, "procgen-easy": 10, "atari": 10, "babyai": 1000, "gym": "auto"}
    assert {name: preset(name)["reward_scale"] for name in scale} == scale
    assert (
        preset("atari", variant="dep_dep")["reward_scale"]
        == 0.25
        == preset("atari", "laptop", "ind_dep")["reward_scale"]
    )
    assert preset("atari", variant="dep_ind")["reward_scale"] == 10
    attempts = {"popgym": 2, "metaworld": 3, "procgen-memory-hard": 2, "atari": 1, "babyai": 2, "gym": 1}
    assert {name: preset(name)["attempts"] for name in attempts} == attempts
    steps = {"popgym": 12 * 10**6, "babyai": 6 * 10**6, "metaworld": 24 * 10**6, "atari": 12 * 10**6}
    assert {name: preset(name)["epsilon_steps"] for name in steps} == steps
    late = (preset("metaworld")["epsilon_late_start"], preset("metaworld")["epsilon_late_end"])
    assert late == (0.8, 0.01) and preset("atari")["epsilon_late_start"] is None
    assert preset("popgym")["store_executed"] is False
    steps = {"popgym": 1e8, "metaworld": 1e8, "procgen-easy": 2.75e8, "procgen-memory-hard": 2.7e9}
    assert {name: preset(name)["steps"] for name in steps} == steps


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


def test_fields_are_those_of_the_trainer_that_a_preset_changes():
    "All the others are in config.py alone: no value is written in both files without need."
    for field in preset("popgym", "paper"):
        assert field in Config.__dataclass_fields__
        assert len({repr(values[field]) for scales in PRESETS.values() for values in scales.values()}) > 1


def test_a_preset_is_a_copy():
    preset("popgym", "laptop")["layers"] = 99
    assert preset("popgym", "laptop")["layers"] != 99


def test_unknown_names_say_what_there_is():
    with pytest.raises(
        ValueError, match="unknown preset 'popgyn': choose from metaworld, popgym, procgen-easy"
    ):
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
