"""scores.py and the measured bounds behind it."""

import csv
import sys

import numpy as np
import pytest

from envs import Actions
from suites.popgym import popgym_tasks
from suites.scores import RESULTS, add_attempts, format_table, load_bounds, mean_scores, mean_told, score_rows

sys.path.insert(0, str(RESULTS))
import popgym_bounds

TABLE = {row["task"]: row for row in csv.DictReader((RESULTS / "popgym_bounds.csv").open())}


def test_score_by_hand():
    rows = score_rows({"a": [1.0, 3.0], "b": [0.0]}, {"a": (0.0, 4.0), "b": (-1.0, 1.0)})
    assert [row["score"] for row in rows] == [0.5, 0.5]
    assert rows[0]["standard_error"] == pytest.approx(1.0) and np.isnan(rows[1]["standard_error"])
    assert mean_scores(rows) == (1.0, 0.5)
    assert "0.500" in format_table(rows).splitlines()[-1]


def test_a_return_of_two_attempts_is_scored_by_attempt():
    (row,) = score_rows({"a": [4.0, 8.0]}, {"a": (1.0, 5.0)}, counted=2)
    assert row["return"] == 6.0 and row["score"] == pytest.approx((3 - 1) / 4)


def test_columns_by_attempt():
    infos = [
        {"attempt_returns": np.array([1.0, 3.0, 5.0]), "attempt_success": np.array([0.0, 1.0, 1.0])},
        {"attempt_returns": np.array([2.0, 3.0, 7.0]), "attempt_success": np.array([0.0, 0.0, 1.0])},
    ]
    rows = add_attempts(score_rows({"a": [9.0, 12.0]}, {}, 3), {"a": infos}, free_attempts=0)
    assert [rows[0][f"try {a}"] for a in (1, 2, 3)] == [1.5, 3.0, 6.0]
    assert [rows[0][f"success {a}"] for a in (1, 2, 3)] == [0.0, 0.5, 1.0]
    assert rows[0]["solved"] == 0.5  # two of three attempts in the first rollout, one in the second
    table = format_table(rows).splitlines()
    assert table[0].split()[-1] == "solved" and table[1].split()[-1] == "0.500"
    single = add_attempts(score_rows({"a": [9.0]}, {}), {"a": [{"attempt_returns": np.array([9.0])}]}, 0)
    assert "try 1" not in single[0] and "solved" not in single[0]


def test_no_bounds_no_score():
    rows = score_rows({"a": [1.0], "new": [2.0]}, {"a": (0.0, 1.0)})
    assert rows[1]["score"] is None and mean_scores(rows) == (1.5, None)
    assert load_bounds("gym:CartPole-v1") == {}


def test_bounds_cover_all_tasks():
    assert list(TABLE) == list(popgym_tasks()) == list(load_bounds("popgym"))
    for low, high in load_bounds("popgym").values():
        assert -1 <= low < high <= 1


@pytest.mark.parametrize(
    "task", ["AutoencodeEasy", "CountRecallHard", "RepeatPreviousHard", "MineSweeperEasy"]
)
def test_exact_bounds_are_reached_again(task):
    returns = popgym_bounds.play(
        popgym_tasks()[task], popgym_bounds.ORACLES[popgym_bounds.task_family(task)], 3, 7
    )
    assert TABLE[task]["best_kind"] == "exact"
    np.testing.assert_allclose(returns, float(TABLE[task]["best_mean"]), atol=1e-5)


@pytest.mark.parametrize("task", ["HigherLowerEasy", "MultiarmedBanditEasy", "PositionOnlyCartPoleMedium"])
def test_estimates_agree_with_a_fresh_measurement(task):
    row, make, rng = TABLE[task], popgym_tasks()[task], np.random.default_rng(1)
    size = Actions(make().action_space).size
    low = popgym_bounds.play(make, lambda env: int(rng.integers(size)), 60, seed=5)
    assert abs(low.mean() - float(row["random_mean"])) < 5 * low.std() / 60**0.5
    high = popgym_bounds.play(make, popgym_bounds.ORACLES[popgym_bounds.task_family(task)], 20, seed=5)
    assert abs(high.mean() - float(row["best_mean"])) < 5 * high.std() / 20**0.5 + 1e-6


def test_tasks_of_which_only_some_tell_their_success():
    "All rows have all columns; means are over those that tell."
    rows = score_rows({"silent": [1.0], "telling": [2.0]}, {})
    rollouts = {
        "silent": [{"attempt_returns": [1.0]}],
        "telling": [{"attempt_returns": [2.0], "attempt_success": [1.0]}],
    }
    rows = add_attempts(rows, rollouts, 0)
    assert list(rows[0]) == list(rows[1]) and rows[0]["success 1"] is None and rows[1]["success 1"] == 1.0
    assert mean_told(rows, "success 1") == 1.0 and mean_told(rows[:1], "success 1") is None
    table = format_table(rows).splitlines()
    assert table[1].split()[-2:] == ["-", "-"] and table[-1].split()[-2:] == ["1.000", "1.000"]
