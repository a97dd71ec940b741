"""Figures: the scale lesson against numbers worked out by hand; pictures from small logs and tables."""

import csv
import json
import math

import numpy as np
import pytest
import torch

import plot

torch.set_num_threads(1)
WIDE = "two-hot, wide limits, symlog, 128 bins"
TASKS = ("Bandit", "Copy", "Maze")


def is_picture(path):
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5_000


def write_run(folder, bins=16, tasks=TASKS, variant="ind_ind"):
    "A log whose critic walks up the bins; with `bins` None as older runs wrote it."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(30):
        row = {"step": 1000 * (i + 1), "loss/critic": 1 / (i + 1), "loss/actor": 1.0, "return_mean": i / 30}
        row |= {f"return/{task}": i / 30 for task in tasks}
        if bins:
            for gamma in (0.9, 0.99, 0.999):
                peak = bins / 2 + gamma * i / 16
                share_N = np.exp(-0.5 * (np.arange(bins) - peak) ** 2).round(3)
                row[f"bins/{gamma}"] = list(share_N / share_N.sum())
                row[f"filter/{gamma}"] = 0.4
            for kind in ("states", "critic", "actor", "gradient"):
                shares = rng.dirichlet(20 * np.arange(1, len(tasks) + 1))
                row |= {f"share/{kind}/{task}": share for task, share in zip(tasks, shares)}
        rows.append(row)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    if bins:
        config = {"bins": bins, "bin_low": -1e5, "bin_high": 1e5, "symlog": True, "reward_scale": 200.0}
        (folder / "config.json").write_text(json.dumps(config | {"variant": variant}))
    return folder


def write_scales(path, shares=True):
    rng = np.random.default_rng(0)
    keys = [(v, s, seed, t) for v in plot.VARIANTS for s in "10" for seed in (0, 1, 2) for t in TASKS]
    names = ["variant", "scaled", "seed", "task"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "factor", "return", "normalised"])
        for key in keys:
            factor = (100, 1, 0.1)[TASKS.index(key[3])]
            table.writerow([*key, factor, 3.0, rng.uniform(0.4, 0.6) + 0.3 * (key[0] == "ind_ind")])
    if shares:
        with path.with_name(f"{path.stem}_shares.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*names, "states", "critic", "actor", "gradient"])
            for key in keys:
                table.writerow([*key, 1 / 3, *rng.uniform(0.2, 0.5, 3)])
    return path


@pytest.fixture
def drawn(monkeypatch):
    "The figures that are written, kept so that a test can look into them."
    figures = []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, out: (figures.append(figure), save(figure, out))[1])
    return figures


def panels(figure):
    return {axis.get_title(): axis for axis in figure.axes if axis.get_visible()}


def test_squared_error_grows_with_the_square_of_the_target():
    loss_YE = plot.scale_losses([1.0, 10_000.0], [-0.5, 0.0, 1.0])["squared error"]
    np.testing.assert_array_equal(loss_YE, [[0.25, 0, 1], [0.25e8, 0, 1e8]])


def test_twohot_loss_hardly_depends_on_the_target():
    losses = plot.scale_losses([100.0, 10_000.0], [-0.5, -0.25, 0.25, 1.0])
    for name in ("two-hot, wide limits, symlog, 64 bins", WIDE, "HL-Gauss, wide limits, symlog, 128 bins"):
        ratio_E = losses[name][1] / losses[name][0]
        assert (ratio_E < 2).all() and (ratio_E > 0.5).all(), name


def test_twohot_loss_by_hand():
    "Linear bins: the prediction's Gaussian and the label's two bins, written out with math.erf."
    width = 15_100 / 63
    target, prediction = 10_000.0, 9_000.0
    position, center = (target + 100) / width, (prediction + 100) / width

    def log_mass(i):
        low, high = (math.erf((i + half - center) / 0.75 / math.sqrt(2)) for half in (-0.5, 0.5))
        return math.log((high - low) / 2)

    below = int(position)
    above = position - below
    expected = -(1 - above) * log_mass(below) - above * log_mass(below + 1)
    loss = plot.scale_losses([target], [-0.1])["two-hot, tuned limits, no symlog, 64 bins"]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_losses_are_finite_and_grow_with_the_error():
    error_E = np.concatenate([-1 + np.geomspace(1e-3, 1, 100), np.geomspace(1e-3, 1e6, 100)])
    losses = plot.scale_losses(plot.TARGETS, error_E)
    assert len(losses) == 6
    for name, loss_YE in losses.items():
        assert loss_YE.shape == (5, 200) and np.isfinite(loss_YE).all(), name
        if "tuned" not in name:  # there, small targets share a bin with the limit
            at_zero = plot.scale_losses(plot.TARGETS, [0.0])[name]
            # A two-hot label's best Gaussian lies within a hundredth of a bin of its value.
            assert (loss_YE >= at_zero - 1e-3).all(), name
            grows_YE = np.diff(loss_YE[:, 100:], axis=1)
            assert (grows_YE > -1e-3).all(), name


def test_scale_picture(tmp_path, capsys):
    assert is_picture(plot.main(["scale", str(tmp_path / "new" / "scale.png")]))
    assert "squared error: loss of target 10,000 / loss of target 1 = 1e+08" in capsys.readouterr().out


def test_a_log_with_bins_and_shares(tmp_path, drawn):
    path = plot.main(["run", str(write_run(tmp_path / "a"))])
    assert path == tmp_path / "a" / "curves.png" and is_picture(path)
    axes = panels(drawn[0])
    assert {"most likely bin, discount 0.999", "most likely bin, discount 0.9"} <= set(axes)
    assert "most likely bin, discount 0.99" not in axes
    assert len([title for title in axes if title.startswith("tasks' shares")]) == 4
    assert axes["critic loss"].get_ylabel() == axes["actor loss"].get_ylabel() == "nats"
    # 16 bins between -ln(100001) and ln(100001), 2 ln(100001) / 15 apart; returns are divided by 200.
    axis = axes["most likely bin, discount 0.9"]
    assert axis.get_ylabel() == "return" and len(axis.get_yticks()) >= 4
    for i, label in zip(axis.get_yticks(), axis.get_yticklabels()):
        b = (i - 7.5) * 2 * math.log(100_001) / 15
        expected = math.copysign(math.expm1(abs(b)), b) / 200
        assert float(label.get_text()) == pytest.approx(expected, rel=0.06)
    # The peak walks from 8 to 9.6 and reaches 3.9 bins to either side: others were never used.
    assert axis.get_ylim() == (4.5, 13.5)


def test_an_old_log_without_bins_shares_and_config(tmp_path, drawn):
    assert is_picture(plot.plot_run(write_run(tmp_path / "a", bins=None)))
    assert len(panels(drawn[0])) == len(TASKS) + 4
    assert panels(drawn[0])["critic loss"].get_ylabel() == "nats"


def test_success_by_attempt_is_drawn_and_the_shares_of_a_single_task_are_not(tmp_path, drawn):
    folder = write_run(tmp_path / "a", tasks=["reach-v3"])
    row = {"step": 31_000, "eval/success 1_mean": 0.25, "eval/success 2_mean": 0.5, "eval/return_mean": 9.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row))
    plot.plot_run(folder)
    axes = panels(drawn[0])
    lines = axes["success by attempt, evaluations"].get_lines()
    assert [(line.get_label(), *line.get_ydata()) for line in lines] == [("1", 0.25), ("2", 0.5)]
    assert not [title for title in axes if title.startswith("tasks' shares")]


def test_losses_of_dependent_updates_are_not_in_nats(tmp_path, drawn):
    plot.plot_run(write_run(tmp_path / "a", variant="dep_dep"))
    plot.plot_run(write_run(tmp_path / "b", variant="ind_dep"))
    both, critic = panels(drawn[0]), panels(drawn[1])
    assert both["critic loss"].get_ylabel() == "squared error (normalised)"
    assert both["actor loss"].get_ylabel() == "-value (normalised)"
    assert critic["critic loss"].get_ylabel() == "squared error (normalised)"
    assert critic["actor loss"].get_ylabel() == "nats"


def test_bins_of_another_config_keep_their_numbers(tmp_path, drawn):
    folder = write_run(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bins": 32}))
    plot.plot_run(folder)
    assert panels(drawn[0])["most likely bin, discount 0.9"].get_ylabel() == "bin"


def test_shares_of_many_tasks_are_added_up():
    steps = np.array([1.0, 2.0])
    names = [f"T{i}{d}" for i in range(3) for d in ("Easy", "Medium", "Hard")]
    log = {f"share/critic/{name}": (steps, np.full(2, 1 / 9)) for name in names}
    log["share/critic/T0Hard"] = (steps[1:], np.full(1, 1 / 9))  # missing from the first row
    lines = plot.task_shares(log, "critic")
    assert list(lines) == ["T0", "T1", "T2"]
    np.testing.assert_allclose(lines["T0"][1], [2 / 9, 3 / 9])
    log = {f"share/critic/{chr(65 + i)}": (steps, np.full(2, 0.1)) for i in range(10)}
    lines = plot.task_shares(log, "critic")
    assert list(lines) == [*"ABCDEFG", "all others"]
    np.testing.assert_allclose(lines["all others"][1], 0.3)


@pytest.mark.parametrize("shares", [True, False])
def test_scales_picture(tmp_path, monkeypatch, drawn, shares):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    write_scales(tmp_path / "results" / "scales.csv", shares)
    path = plot.main(["scales"])
    assert str(path) == "figures/scales.png" and is_picture(path)
    axes = panels(drawn[0])
    assert {"Bandit\nrewards × 100", "Copy\nrewards × 1", "Maze\nrewards × 0.1"} <= set(axes)
    assert len(axes) == 4 + 4 * shares


def test_mean_and_range_are_over_seeds():
    rows = [{"seed": s, "x": x} for s, x in (("0", 0.0), ("0", 1.0), ("1", 1.0), ("1", 2.0))]
    assert plot.mean_and_range(rows, "x") == (1.0, 0.5, 1.5)
    assert plot.mean_and_range([], "x") is None


def test_mistakes_are_answered_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def says(message, *argv):
        with pytest.raises(ValueError, match=message) as error:
            plot.main(list(argv))
        assert "\n" not in str(error.value)

    says("python plot.py run runs/<name>", "walk")
    says("python plot.py run runs/<name>", "run")
    says("no log at", "run", "nowhere")
    says("results/scales.csv.*make scales", "scales")
    (tmp_path / "a.csv").write_text("variant,scaled,seed,task,factor,return\nind_ind,1,0,Copy,1,2\n")
    says("a.csv has no rows with normalised.*make scales", "scales", "a.csv")
    (tmp_path / "a.csv").write_text("variant,scaled,seed,task,factor,return,normalised\n")
    says("a.csv has no rows.*make scales", "scales", "a.csv")
    (tmp_path / "a.csv").write_text(
        "variant,scaled,seed,task,factor,return,normalised\nind_ind,1,0,C,1,?,1\n"
    )
    says("must be numbers.*make scales", "scales", "a.csv")
