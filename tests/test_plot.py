"""Figures: their numbers against numbers worked out by hand and slow loops, and what is drawn of them."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import plot
from agent import Agent, Policy
from config import Config, parse
from evaluate import load, make_agent
from plots import attention, scale
from plots import runs as curves
from runtime import checkpoint
from suites import make_env
from suites.scores import load_bounds
from transformer import CausalTransformer
from twohot import BinSupport

TASKS = ("Bandit", "Copy", "Maze")


def is_picture(path):
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5_000


@pytest.fixture
def drawn(monkeypatch):
    "Figures are kept, so that a test can look into them, instead of written, which takes longer."
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: figures.append(figure))
    return figures


def panels(figure):
    return {axis.get_title(): axis for axis in figure.axes}


def write_run(folder, bins=16, tasks=TASKS, variant="ind_ind"):
    "A log whose critic walks up the bins."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(30):
        row = {"step": 1000 * (i + 1), "loss/critic": 1 / (i + 1), "loss/actor": 1.0, "return_mean": i / 30}
        row |= {f"return/{task}": i / 30 for task in tasks}
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
    config = {"bins": bins, "bin_low": -1e5, "bin_high": 1e5, "symlog": True, "reward_scale": 200.0}
    (folder / "config.json").write_text(json.dumps(config | {"variant": variant}))
    return folder


def write_scales(path, shares=True):
    rng = np.random.default_rng(0)
    keys = [(v, s, seed, t) for v in scale.VARIANTS for s in "10" for seed in (0, 1, 2) for t in TASKS]
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


def test_squared_error_grows_with_the_square_of_the_target():
    loss_YE = scale.scale_losses([1.0, 10_000.0], [-0.5, 0.0, 1.0])["squared error"]
    np.testing.assert_array_equal(loss_YE, [[0.25, 0, 1], [0.25e8, 0, 1e8]])


def test_twohot_loss_hardly_depends_on_the_target():
    losses = scale.scale_losses([100.0, 10_000.0], [-0.5, -0.25, 0.25, 1.0])
    for name in ("two-hot, wide limits, symlog, 64 bins", "HL-Gauss, wide limits, symlog, 128 bins"):
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
    loss = scale.scale_losses([target], [-0.1])["two-hot, tuned limits, no symlog, 64 bins"]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_losses_are_finite_and_grow_with_the_error():
    error_E = np.concatenate([-1 + np.geomspace(1e-3, 1, 100), np.geomspace(1e-3, 1e6, 100)])
    losses = scale.scale_losses(scale.TARGETS, error_E)
    assert len(losses) == 6
    for name, loss_YE in losses.items():
        assert loss_YE.shape == (5, 200) and np.isfinite(loss_YE).all(), name
        if "tuned" not in name:  # there, small targets share a bin with the limit
            at_zero = scale.scale_losses(scale.TARGETS, [0.0])[name]
            # A two-hot label's best Gaussian lies within a hundredth of a bin of its value.
            assert (loss_YE >= at_zero - 1e-3).all(), name
            grows_YE = np.diff(loss_YE[:, 100:], axis=1)
            assert (grows_YE > -1e-3).all(), name


def test_the_figure_of_the_scale(tmp_path, capsys):
    path = plot.main(["scale", str(tmp_path / "new" / "scale.png")])
    assert path == tmp_path / "new" / "scale.png" and is_picture(path)
    assert "squared error: loss of target 10,000 / loss of target 1 = 1e+08" in capsys.readouterr().out


def test_a_log_with_bins_and_shares(tmp_path, drawn):
    assert plot.main(["run", str(write_run(tmp_path / "a"))]) == tmp_path / "a" / "curves.png"
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


def test_shares_of_many_tasks_are_added_up():
    steps = np.array([1.0, 2.0])
    names = [f"T{i}{d}" for i in range(3) for d in ("Easy", "Medium", "Hard")]
    log = {f"share/critic/{name}": (steps, np.full(2, 1 / 9)) for name in names}
    log["share/critic/T0Hard"] = (steps[1:], np.full(1, 1 / 9))  # missing from the first row
    lines = curves.task_shares(log, "critic")
    assert list(lines) == ["T0", "T1", "T2"]
    np.testing.assert_allclose(lines["T0"][1], [2 / 9, 3 / 9])
    log = {f"share/critic/{chr(65 + i)}": (steps, np.full(2, 0.1)) for i in range(10)}
    lines = curves.task_shares(log, "critic")
    assert list(lines) == [*"ABCDEFGH"]
    np.testing.assert_allclose(lines["H"][1], 0.1)


@pytest.mark.parametrize("shares", [True, False])
def test_the_figure_of_rescaled_rewards(tmp_path, monkeypatch, drawn, shares):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    write_scales(tmp_path / "results" / "scales.csv", shares)
    assert str(plot.main(["scales"])) == "figures/scales.png"
    axes = panels(drawn[0])
    assert {"Bandit\nrewards × 100", "Copy\nrewards × 1", "Maze\nrewards × 0.1"} <= set(axes)
    assert len(axes) == 4 + 4 * shares
    with open("results/scales.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "Maze" and row["scaled"] == "1"]
    by_hand = [np.mean([float(r["normalised"]) for r in rows if r["variant"] == v]) for v in scale.VARIANTS]
    (rescaled,) = (line for line in axes["Maze\nrewards × 0.1"].get_lines() if line.get_label() == "rescaled")
    np.testing.assert_allclose(rescaled.get_ydata(), by_hand)


def test_mean_and_range_are_over_seeds():
    rows = [{"seed": s, "x": x, "y": s} for s, x in (("0", 0.0), ("0", 1.0), ("1", 1.0), ("1", 2.0))]
    assert scale.over_seeds(rows, "x") == (1.0, 0.5, 1.5)
    assert scale.over_seeds(rows, "x", y="1") == (1.5, 1.5, 1.5)
    assert np.isnan(scale.over_seeds(rows, "x", y="2")).all()


# --------------------------------------------------------------------------------- several runs, compared


def write_seed(folder, seed=0, level=0.0, tasks=("RepeatFirstEasy", "HigherLowerEasy"), every=1000, **config):
    "A run whose returns rise by 0.1 a row from `level` on, three rows, and by as much from one evaluation to the next."
    folder.mkdir(parents=True)
    rows = []
    for i in range(3):
        step = every * (i + 1)
        rows.append({"step": step} | {f"return/{task}": level + 0.1 * i for task in tasks})
        rows.append({"step": step} | {f"eval/return/{task}": level + 0.1 * i + 0.3 for task in tasks})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"step": 4')
    common = {"env": "popgym", "attempts": 1, "variant": "ind_ind"}
    (folder / "config.json").write_text(json.dumps(common | config | {"name": folder.name, "seed": seed}))
    return str(folder)


def test_seeds_of_one_thing_are_a_band(tmp_path, drawn, capsys):
    folders = [write_seed(tmp_path / f"a_{i}", seed=i, level=i / 10) for i in range(3)]
    assert plot.main(["run", *folders]) == tmp_path / "a.png"
    axes = panels(drawn[0])
    assert list(axes) == ["interquartile mean, tasks: 2", "HigherLowerEasy", "RepeatFirstEasy"]
    (line, dots), (band, bars) = axes["RepeatFirstEasy"].get_lines(), axes["RepeatFirstEasy"].collections
    # Returns 0, 0.1, 0.2 of the first run, as running means 0.05, 0.1, 0.15; those of the others 0.1 and 0.2 higher.
    np.testing.assert_allclose(line.get_ydata()[[0, -1]], [0.15, 0.25])
    assert line.get_xdata()[[0, -1]].tolist() == [1000, 3000]
    np.testing.assert_allclose(band.get_paths()[0].vertices[:, 1].min(), 0.05)
    np.testing.assert_allclose(band.get_paths()[0].vertices[:, 1].max(), 0.35)
    np.testing.assert_allclose(dots.get_ydata(), [0.4, 0.5, 0.6])
    np.testing.assert_allclose(bars.get_segments()[0][:, 1], [0.3, 0.5])
    printed = capsys.readouterr().out
    assert "a (3 runs): interquartile mean" in printed and "evaluated at 3,000 steps" in printed


def test_scores_and_interquartile_mean_by_hand():
    "Random and best: -0.501 and 1 (RepeatFirst), 0.005 and 0.530 (HigherLower), measured (results/)."
    tasks = ["HigherLowerEasy", "RepeatFirstEasy"]
    (low_a, high_a), (low_b, high_b) = (load_bounds("popgym")[task] for task in tasks)
    value_RKn = np.array([[[0.4], [0.5]], [[0.2], [-0.5]]])
    score_RKn = curves.normalised(value_RKn, tasks, {"env": "popgym", "attempts": 2})  # the last one counts
    by_hand = [(0.4 - low_a) / (high_a - low_a), (0.5 - low_b) / (high_b - low_b)]
    by_hand += [(0.2 - low_a) / (high_a - low_a), (-0.5 - low_b) / (high_b - low_b)]
    np.testing.assert_allclose(score_RKn[..., 0].ravel(), by_hand)
    # Of four numbers, the lowest and the highest are cut off.
    iqm_n, low_n, high_n = curves.interquartile(score_RKn)
    np.testing.assert_allclose(iqm_n, np.mean(sorted(by_hand)[1:3]))
    assert low_n < iqm_n < high_n
    # Where all attempts count, their sum is divided by how many they are.
    bounds = load_bounds("procgen-easy")["coinrun"]
    score = curves.normalised(
        np.full((1, 1, 1), 2 * bounds[1]), ["coinrun"], {"env": "procgen-easy", "attempts": 2}
    )
    np.testing.assert_allclose(score, 1)


def test_intervals_are_over_runs_and_of_a_single_run_over_tasks():
    score_RKn = np.random.default_rng(0).normal(size=(5, 4, 3))
    iqm_n, low_n, high_n = curves.interquartile(score_RKn)
    # The slow judge: each task's runs drawn with replacement, the mean of the middle half of all, 4,000 times.
    rng, found = np.random.default_rng(1), []
    for _ in range(4000):
        pick_RK = rng.integers(5, size=(5, 4))
        drawn_Mn = np.sort(score_RKn[pick_RK, np.arange(4)].reshape(20, 3), axis=0)
        found.append(drawn_Mn[5:15].mean(0))
    np.testing.assert_allclose(low_n, np.quantile(found, 0.025, axis=0), atol=0.05)
    np.testing.assert_allclose(high_n, np.quantile(found, 0.975, axis=0), atol=0.05)
    # Tasks that differ, and seeds that do not: seeds alone move nothing, tasks do.
    score_RKn = np.broadcast_to(np.arange(4.0)[:, None], (3, 4, 1))
    assert [float(x[0]) for x in curves.interquartile(score_RKn)] == [1.5, 1.5, 1.5]
    iqm_n, low_n, high_n = curves.interquartile(score_RKn[:1])
    # Of four draws, three or four are the lowest in 5% of all resamples: the middle two are then 0.
    assert (iqm_n, low_n, high_n) == (1.5, 0, 3)
    assert np.isnan(curves.interquartile(score_RKn[:1, :1])[1:]).all()


def test_the_curves_of_one_run_have_its_interval_over_tasks(tmp_path, drawn):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (10_000, 30_000):
            row = {f"eval/score/{task}": score for task, score in zip("ABCD", (0, 0.2, 0.4, 1))}
            file.write("\n" + json.dumps({"step": step, "eval/score_mean": 0.4} | row))
    plot.plot_run(folder)
    axis = panels(drawn[0])["all tasks"]
    line = next(line for line in axis.get_lines() if "95% interval over tasks" in line.get_label())
    np.testing.assert_allclose(line.get_xydata(), [[10_000, 0.3], [30_000, 0.3]])
    (bars,) = axis.collections
    for (x, low), (_, high) in bars.get_segments():
        assert x in (10_000, 30_000) and 0 <= low < 0.2 and 0.4 < high <= 1


def test_the_figure_of_several_runs_is_written(tmp_path):
    folders = [write_seed(tmp_path / f"a_{i}", seed=i) for i in range(2)]
    assert is_picture(plot.main(["run", *folders]))


def test_compare_draws_groups_apart(tmp_path, drawn, capsys):
    folders = [write_seed(tmp_path / f"a_{i}", seed=i) for i in range(2)]
    folders += [write_seed(tmp_path / "b_0", variant="dep_dep", level=0.2, every=500)]
    path = tmp_path / "x.png"
    assert plot.main(["compare", *folders, "--output", str(path)]) == path
    (figure,) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (2 runs)", "b_0"]
    assert "variant (ind_ind, dep_dep)" in figure.get_suptitle()
    axis = panels(figure)["HigherLowerEasy"]
    lines = [line for line in axis.get_lines() if line.get_linestyle() != "None"]
    assert len({line.get_linestyle() for line in lines}) == len({line.get_color() for line in lines}) == 2
    assert len({line.get_marker() for line in axis.get_lines()}) == 3  # one is none
    assert [line.get_xdata()[-1] for line in lines] == [3000, 1500]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_names_that_tell_nothing_give_way_to_folders(tmp_path):
    folders = [write_seed(tmp_path / f"x_{i}", seed=i, layers=i // 2) for i in range(4)]
    first, second = curves.read_groups(folders)
    assert first.label == f"{folders[0]}, {folders[1]} (2 runs)" and folders[3] in second.label
    folders = [write_seed(tmp_path / name, seed=i) for i, name in enumerate(("one", "two"))]
    assert curves.read_groups([*folders, folders[0]])[0].label == f"{folders[0]}, {folders[1]} (2 runs)"


def test_runs_of_unlike_length_meet_where_the_shorter_one_ends(tmp_path):
    "The longer run is interpolated at the evaluations of the shorter one."
    folders = [write_seed(tmp_path / "a", every=1000), write_seed(tmp_path / "b", seed=1, every=1500)]
    (group,) = curves.read_groups(folders)
    tasks = curves.tasks_of(group.logs)
    steps_n, values_RKn = curves.evaluated_returns(group.logs, tasks)
    assert steps_n.tolist() == [1000, 2000, 3000]
    np.testing.assert_allclose(values_RKn[1, 0], [0.3, 0.3 + 0.1 / 3, 0.4])
    steps_n, _ = curves.training_returns(group.logs, tasks)
    assert steps_n[[0, -1]].tolist() == [1500, 3000]


def test_tasks_are_in_order_of_difficulty_and_common_to_all(tmp_path):
    names = ["RepeatPreviousHard", "AutoencodeEasy", "RepeatPreviousEasy", "RepeatPreviousMedium"]
    folders = [
        write_seed(tmp_path / "a", tasks=names),
        write_seed(tmp_path / "b", tasks=names[:1] + names[2:]),
    ]
    groups = curves.read_groups(folders)
    assert curves.tasks_of(groups[0].logs) == [f"RepeatPrevious{d}" for d in ("Easy", "Medium", "Hard")]


# ------------------------------------------------------------------------------------------ a policy at work


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two policies with random weights: RepeatPrevious, two attempts, two-hot critic; Pendulum,
    continuous, scalar critic."""
    root = tmp_path_factory.mktemp("attention")
    common = ["--scale", "smoke", "--device", "cpu", "--layers", "2"]
    for name, *flags in (
        ("cards", "--tasks", "RepeatPreviousEasy,RepeatFirstEasy", "--attempts", "2"),
        ("swing", "--env", "gym:Pendulum-v1", "--variant", "dep_dep"),
    ):
        config = parse(["--name", name, *flags, *common], root)
        torch.manual_seed(0)
        agent = make_agent(config, make_env(config.env, config.tasks, config.attempts))
        for parameter in agent.parameters():  # new critics would say 0 to everything
            parameter.data += 0.1 * torch.randn_like(parameter)
        state = {"config": dataclasses.asdict(config), "agent": agent.state_dict()}
        checkpoint.save(root / "runs" / name / "best.pt", state)
    return root / "runs"


def small_agent(variant="ind_ind", discrete=True, **changes):
    torch.manual_seed(0)
    sizes = {"encoder_hidden": 16, "encoder_dim": 12, "d_model": 16, "d_ff": 32, "layers": 2, "heads": 2}
    sizes |= {"hidden": (16, 16), "bins": 16, "gammas": (0.5, 0.9), "dropout": 0.0}
    agent = Agent(Config(**{**sizes, "variant": variant, **changes}), 7, 3, discrete).eval()
    agent.popart.update(torch.tensor([[2.0, 30.0], [4.0, 50.0]]))  # or denormalised would be the same as raw
    return agent


def test_attention_is_what_the_blocks_compute(monkeypatch):
    "Weights times values are what the Transformer's own pass puts out, layer by layer, and so are the states."
    torch.manual_seed(0)
    model = CausalTransformer(6, d_model=16, d_ff=32, layers=3, heads=4).eval()
    x_TI, own, values = torch.randn(20, 6), [], []
    original = F.scaled_dot_product_attention

    def record(q, k, v, **kwargs):
        own.append(original(q, k, v, **kwargs)[0])
        values.append(v[0])
        return own[-1][None]

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    states_TD = model(x_TI[None], torch.arange(20)[None])[0]
    weights, found_TD = attention.attend(model, x_TI, context=20)
    assert len(weights) == len(own) == 3
    for weight_HTT, attended_HTE, value_HTE in zip(weights, own, values):
        torch.testing.assert_close(weight_HTT @ value_HTE, attended_HTE)
        torch.testing.assert_close(weight_HTT.sum(-1), torch.ones(4, 20))
        assert (weight_HTT.triu(1) == 0).all()
    torch.testing.assert_close(found_TD, states_TD)


def test_past_the_context_attention_is_that_of_the_acting_policy():
    "Step by step with a cache of 5, and all 20 at once: the same states, though each layer forgets by itself."
    torch.manual_seed(0)
    model = CausalTransformer(6, d_model=16, d_ff=32, layers=3, heads=4).eval()
    x_TI, cache = torch.randn(20, 6), model.init_cache(1, context=5)
    acting_TD = torch.cat([model.step(x_TI[t : t + 1], torch.tensor([t]), cache) for t in range(20)])
    weights, states_TD = attention.attend(model, x_TI, context=5)
    torch.testing.assert_close(states_TD, acting_TD)
    assert all((weight_HTT.tril(-5) == 0).all() for weight_HTT in weights)


def test_weight_by_age_sees_a_diagonal():
    weight_HTT = torch.zeros(2, 10, 10)
    weight_HTT[0, range(3, 10), range(7)] = 0.8
    weight_HTT[1, :, 0] = 1
    share_HT = attention.weight_by_age(weight_HTT)
    assert share_HT[0].tolist() == pytest.approx([0, 0, 0, 0.8, 0])
    # Step 0 is 9 steps back for one step in one, 8 steps back for one in two, ...
    assert share_HT[1].tolist() == pytest.approx([1 / (10 - age) for age in range(5)])


@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep"])
def test_advantages_of_discrete_actions_are_exact(variant):
    "The slow judge: every action of every state asked for by itself, weighted by its probability."
    agent, h_TD = small_agent(variant), torch.randn(9, 16)
    action = torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 0])
    judged = attention.judge(agent, h_TD, action)
    policy = agent.policy(agent.actor(h_TD))
    for t in range(9):
        q_A = []
        for a in range(3):
            one_hot = agent.action_vectors(torch.tensor([[a]]))
            if variant == "ind_ind":
                logits_CGN = agent.value.critics(h_TD[t : t + 1], one_hot)[:, 0]
                q_A.append(agent.value.support.decode(logits_CGN)[:, 1].mean())
                if a == action[t]:
                    p_GN = logits_CGN.softmax(-1).mean(0)
                    torch.testing.assert_close(judged.bins_TGN[t], p_GN)
            else:
                raw_CG = agent.value.critics(h_TD[t : t + 1])[:, 0, :, a]
                q_A.append(agent.popart.denormalised(raw_CG)[:, 1].mean())
        expected = q_A[action[t]] - sum(p * q for p, q in zip(policy.probs[t, 1], q_A))
        torch.testing.assert_close(judged.advantage_T[t], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(judged.value_TG[t, 1], q_A[action[t]], atol=1e-4, rtol=1e-4)
    assert (judged.bins_TGN is None) == (variant == "ind_dep")


@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep"])
def test_a_certain_policy_has_advantage_exactly_zero(variant):
    agent, h_TD = small_agent(variant, prob_low=0.0, prob_high=1.0), torch.randn(50, 16)
    with torch.no_grad():
        agent.actor.layers[-1].weight.zero_()
        agent.actor.layers[-1].bias.copy_(torch.tensor([0.0, 1000.0, 0.0] * 2))
    assert (attention.judge(agent, h_TD, torch.full((50,), 1)).advantage_T == 0).all()


@pytest.mark.parametrize("variant", ["ind_ind", "dep_dep"])
def test_advantages_of_continuous_actions_are_over_samples(variant):
    agent, h_TD = small_agent(variant, discrete=False), torch.randn(9, 16)
    action_TA = torch.rand(9, 3) * 2 - 1
    judged = attention.judge(agent, h_TD, action_TA)
    policy = agent.policy(agent.actor(h_TD))
    sampled_KTGA = policy.sample(4000)

    def q(action):
        outputs = agent.value.critics(h_TD, action)
        if variant == "ind_ind":
            return agent.value.support.decode(outputs).mean(0)[..., 1]
        return agent.popart.denormalised(outputs.squeeze(-1)).mean(0)[..., 1]

    q_T, sampled_KT = q(action_TA[:, None]), q(sampled_KTGA)
    torch.testing.assert_close(judged.value_TG[:, 1], q_T)
    error_T = sampled_KT.std(0) / math.sqrt(attention.SAMPLES)
    assert ((judged.advantage_T - (q_T - sampled_KT.mean(0))).abs() < 4 * error_T).all()
    assert error_T.max() < q_T.abs().max()


def test_the_rollout_is_what_the_policy_lived(saved):
    policy = load(saved / "cards", seed=3)
    env = policy.make_env()
    rollout = attention.play(policy, env, "RepeatPreviousEasy", seed=3)
    assert len(rollout.reward_T) == 102 and rollout.terminated
    assert rollout.start_T.nonzero().flatten().tolist() == [0, 51]
    assert (rollout.reward_T[:51] == 0).all()  # exploration does not count
    assert rollout.reward_T.sum().item() == pytest.approx(rollout.total, abs=1e-5)
    # Once more by hand: the same draws, so the same actions, and a step's action is seen in the next one.
    again = Policy(policy.agent, policy.config, seed=3)
    for t in range(102):
        chosen = again(rollout.obs["vector"][t].numpy())
        seen = rollout.obs["vector"][t + 1 : t + 2, env.layout["previous_action"]]
        assert all(rollout.action[t] == row.argmax() for row in seen)
        assert policy.config.store_executed or rollout.action[t] == chosen
    short = attention.play(policy, env, "RepeatPreviousEasy", seed=3, most=60)
    assert len(short.action) == 60 and short.total is None and not short.terminated
    assert policy.time_B.tolist() == [60]  # begun anew, not 102 steps later
    other = attention.play(policy, env, "RepeatPreviousEasy", seed=4, most=60)
    cards = env.layout["observation"]
    assert (short.obs["vector"][:51, cards] == rollout.obs["vector"][:51, cards]).all()
    assert not (other.obs["vector"][:51, cards] == short.obs["vector"][:51, cards]).all()


def test_the_figure_of_a_rollout(saved, drawn, capsys):
    path = plot.main(["attention", str(saved / "cards"), "--seed", "2"])
    assert path == saved / "cards" / "attention.png"
    assert "RepeatPreviousEasy, 102 steps (others: --task RepeatFirstEasy)" in capsys.readouterr().out
    (figure,) = drawn
    policy = load(saved / "cards", seed=2)
    config, agent = policy.config, policy.agent
    rollout = attention.play(policy, policy.make_env(), "RepeatPreviousEasy", seed=2)
    assert f"return {rollout.total:.3f}; dashed: a new attempt begins" in figure.get_suptitle()
    weights, h_TD = attention.attend(agent.transformer, agent.embed(rollout.obs["vector"]), config.context)
    axes = {axis.get_title(): axis for axis in figure.axes}
    for layer, weight_HTT in enumerate(weights, 1):
        axis = axes[f"layer {layer}, mean of its heads"]
        drawn_TT = axis.collections[0].get_array().reshape(102, 102)
        np.testing.assert_allclose(drawn_TT, weight_HTT.mean(0).detach(), atol=1e-6)
        assert [
            line.get_xdata()[0] for line in axis.get_lines() if line.get_xdata()[0] == line.get_xdata()[1]
        ] == [51]
        lines = axes[f"layer {layer}, head by head"].get_lines()
        assert len(lines) == config.heads
        np.testing.assert_allclose(
            lines[1].get_ydata()[2], weight_HTT[1].diagonal(-2).mean().item(), rtol=1e-4
        )
    # The critic's bins, each labelled with the return it stands for, in the environment's own scale.
    judged = attention.judge(agent, h_TD, rollout.action, seed=2)
    for g, gamma in enumerate(config.gammas):
        (axis,) = (axis for axis in figure.axes if axis.get_ylabel() == f"return,\ndiscount {gamma:g}")
        p_TN = judged.bins_TGN[:, g].numpy()
        used = np.flatnonzero(p_TN.max(0) > 0.01)  # the lines lie among these
        assert axis.get_ylim() == (used[0] - 0.5, used[-1] + 0.5)
        np.testing.assert_allclose(
            axis.collections[0].get_array().reshape(-1, 102), p_TN[:, used[0] : used[-1] + 1].T, atol=1e-6
        )
        for i, label in zip(axis.get_yticks(), axis.get_yticklabels()):
            b = (i - (config.bins - 1) / 2) * 2 * math.log(100_001) / (config.bins - 1)
            expected = math.copysign(math.expm1(abs(b)), b) / config.reward_scale
            assert float(label.get_text()) == pytest.approx(expected, rel=0.06)
        value, followed = axis.get_lines()[:2]
        q = judged.value_TG[5, g].item()
        at = math.copysign(math.log1p(abs(q)), q) / (2 * math.log(100_001)) * (config.bins - 1)
        assert value.get_ydata()[5] == pytest.approx(at + (config.bins - 1) / 2, abs=1e-3)
        r = rollout.reward_T[-1].item() * config.reward_scale  # all that follows the last step
        at = math.copysign(math.log1p(abs(r)), r) / (2 * math.log(100_001)) * (config.bins - 1)
        assert followed.get_ydata()[-1] == pytest.approx(at + (config.bins - 1) / 2, abs=1e-3)
        assert axis.get_lines()[2].get_xdata()[0] == 51
    # Actions, filled where the filter lets them through, and their advantages in units of reward.
    passed_T = (judged.advantage_T > 0).numpy()
    lower = figure.axes[[axis.get_ylabel() for axis in figure.axes].index("advantage,\nreturn")]
    points = axes["action taken"].collections[0]
    np.testing.assert_array_equal(points.get_offsets()[:, 1], rollout.action)
    np.testing.assert_array_equal((points.get_facecolors()[:, 0] < 1), passed_T)
    np.testing.assert_allclose(
        lower.collections[-1].get_offsets()[:, 1], judged.advantage_T / config.reward_scale, atol=1e-6
    )
    assert (
        f"({passed_T.sum()} of 102)" in lower.get_title() and lower.get_xlabel() == "env step of the rollout"
    )


def test_bins_that_are_likely_or_that_a_line_passes_are_drawn():
    "Of 16 bins, 6 is likely and 8 now and then, 7 never: from 6 to 8. What followed, 1e5 in scaled returns, is bin 15."
    config, p_TGN = Config(gammas=(0.9,), bins=16, reward_scale=10.0), torch.full((4, 1, 16), 0.001)
    p_TGN[:, 0, 6], p_TGN[2, 0, 8] = 0.9, 0.02
    support = BinSupport(16)
    value_TG = support.decode(F.one_hot(torch.full((4, 1), 7), 16) * 1000.0)
    judged = attention.Judgement(value_TG, p_TGN, None)
    for reward, terminated, last in ((0.0, False, 8), (1e4, True, 15)):
        axis = Figure().subplots()
        reward_T = torch.tensor([0.0, 0.0, 0.0, reward])
        rollout = attention.Rollout("x", {}, None, reward_T, None, terminated, None)
        attention.draw_bins(axis, rollout, judged, 0, support, config)
        assert axis.get_ylim() == (5.5, last + 0.5) and len(axis.get_lines()) == 1 + terminated
        np.testing.assert_allclose(axis.get_lines()[0].get_ydata(), 7, atol=1e-4)


def test_the_figure_of_continuous_actions_and_a_scalar_critic(saved, drawn, tmp_path):
    out = tmp_path / "swing.png"
    assert plot.main(["attention", str(saved / "swing" / "best.pt"), "--output", str(out)]) == out
    axes = {axis.get_title(): axis for axis in drawn[0].axes}
    policy = load(saved / "swing")
    rollout = attention.play(policy, policy.make_env(), "Pendulum-v1")
    steps = len(rollout.reward_T)
    x_TI = policy.agent.embed(rollout.obs["vector"])
    judged = attention.judge(
        policy.agent,
        attention.attend(policy.agent.transformer, x_TI, policy.config.context)[1],
        rollout.action,
    )
    lines = axes["value of the action taken, by discount"].get_lines()
    assert [line.get_label() for line in lines] == [f"{gamma:g}" for gamma in policy.config.gammas]
    expected_TG = judged.value_TG / policy.config.reward_scale
    np.testing.assert_allclose(lines[1].get_ydata(), expected_TG[:, 1], rtol=1e-3, atol=1e-5)
    (line,) = axes["action taken"].get_lines()
    assert len(line.get_ydata()) == steps and np.abs(line.get_ydata()).max() <= 1


def test_the_pictures_of_a_trained_run(trained, tmp_path):
    folder, name = trained
    assert is_picture(folder / name / "curves.png")
    assert is_picture(plot.main(["attention", str(folder / name), "--output", str(tmp_path / "x.png")]))


def test_what_followed_is_discounted():
    "1 + 0.5 (0 + 0.5 x 4) = 2, then 2, then 4."
    assert attention.discounted(torch.tensor([1.0, 0.0, 4.0]), 0.5).tolist() == [2, 2, 4]


def test_mistakes_are_answered_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def says(message, *argv):
        with pytest.raises(ValueError, match=message) as error:
            plot.main(list(argv))
        assert "\n" not in str(error.value)

    for wrong in ("walk", "run", "compare", "attention a b", "scale a b", "scales a b"):
        says(f"cannot draw '{wrong}'. Type one of: python plot.py run runs/<name>", *wrong.split())
    says("no log at nowhere .*runs/my_run", "run", "nowhere")
    says("compare takes two runs or more; for one type: python plot.py run nowhere", "compare", "nowhere")
    says("no log at nowhere", "compare", "nowhere", "elsewhere")
    first = write_seed(tmp_path / "first")
    says("differ in layers .not given, 5.. .*compare", "run", first, write_seed(tmp_path / "b", layers=5))
    pong = write_seed(tmp_path / "c", env="atari", tasks=["Pong"])
    says("no task in common: compare runs of one --env and --tasks", "compare", first, pong)
    says("no task in common", "compare", first, write_seed(tmp_path / "d", tasks=["Copy"]))
    (tmp_path / "b" / "config.json").unlink()
    says("no log at .*b .*config.json", "compare", first, str(tmp_path / "b"))
    says("results/scales.csv.*make scales", "scales")
    (tmp_path / "a.csv").write_text("variant,scaled,seed,task,factor,return\nind_ind,1,0,Copy,1,2\n")
    says("a.csv must be a table with the columns .*normalised: .*make scales", "scales", "a.csv")
    for row in ("", "ind_ind,1,0,C,1,?,1\n"):
        (tmp_path / "a.csv").write_text("variant,scaled,seed,task,factor,return,normalised\n" + row)
        says("a.csv must be .*numbers in scaled.*make scales", "scales", "a.csv")


def test_mistakes_about_attention_are_answered_in_one_line(saved, tmp_path, monkeypatch):
    def says(message, *argv):
        with pytest.raises((ValueError, plot.CheckpointError), match=message) as error:
            plot.main(["attention", *argv])
        assert "\n" not in str(error.value)

    cards = str(saved / "cards")
    says(r"no checkpoint at .*nowhere \(there are: .*cards", str(saved / "nowhere"))
    says(
        "not trained on task 'RepeatPrevios'. Did you mean RepeatPreviousEasy",
        cards,
        "--task",
        "RepeatPrevios",
    )
    says("--seed must be 0 or more, got -1", cards, "--seed", "-1")
    (tmp_path / "best.pt").write_bytes(b"nothing")
    says("best.pt", str(tmp_path))
