r"""Scores: returns on a scale from a random policy (0) to the best known return (1), as a table.

What     score = (return - random) / (best - random), task by task, and the table at the end of a run
Why      raw returns of different tasks cannot be averaged: a random cart-pole earns .1, a random card -.9
Paper    AMAGO-2 section 4 normalises between a random policy and single-task experts. DEVIATION: ours takes
         scripted oracles that see the hidden state (results/popgym_bounds.py), an upper bound; scores here
         are therefore lower than the paper's for the same return
Shapes   R rollouts, A attempts of each; a row of the table is a dictionary
Use      rows = score_rows({"task": [0.2, 0.3]}, {"task": (-0.5, 1.0)})      # returns; random and best
         print(format_table(rows))
Copy     this file alone, and for `load_bounds` a CSV, results/NAME_bounds.csv, with the columns
         task, random_mean, best_mean; needs numpy
Try      python -m suites.scores
"""

import csv
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent.parent / "results"
RESCALED = {"scales": "popgym", "procgen-easy-rescaled": "procgen-easy"}


def load_bounds(env: str) -> dict[str, tuple[float, float]]:
    """Measured (random, best) return of each task of a benchmark; {} where none were measured."""
    # Rescaled tasks are another benchmark's tasks, and returns are reported in the tasks' own scale.
    path = RESULTS / f"{RESCALED.get(env, env)}_bounds.csv"
    if not path.exists():
        return {}
    with open(path) as file:
        try:
            return {r["task"]: (float(r["random_mean"]), float(r["best_mean"])) for r in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} needs the columns task, random_mean, best_mean ({error!r})") from error


def score_rows(
    returns: dict[str, list[float]], bounds: dict[str, tuple[float, float]], counted: int = 1
) -> list[dict]:
    """One row for each task: mean return, standard error, bounds, score. None where no bounds are known.

    A return is the sum of `counted` attempts; bounds and score are those of one attempt.
    """
    rows = []
    for task, values in returns.items():
        mean = float(np.mean(values))
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        low, high = bounds.get(task, (None, None))
        # score = (return - random) / (best - random): 0 is a random policy, 1 the best known or provable
        score = None if low is None else (mean / counted - low) / (high - low)
        rows.append(
            {"task": task, "episodes": len(values), "return": mean, "standard_error": error}
            | {"random": low, "best": high, "score": score}
        )
    return rows


def add_attempts(rows: list[dict], rollouts: dict[str, list[dict]], free_attempts: int) -> list[dict]:
    """The same rows with columns for each attempt: its real return, and its success where the task reports one.

    `rollouts` {task: [info of the last step]} as the environment reports them, with "attempt_returns" and, if the
    task reports it, "attempt_success". A single attempt gets no column of its own for its return.
    """
    for row in rows:
        infos = rollouts[row["task"]]
        returns_RA = np.array([info["attempt_returns"] for info in infos])
        if returns_RA.shape[1] > 1:
            row |= {f"try {a + 1}": float(mean) for a, mean in enumerate(returns_RA.mean(0))}
        if all("attempt_success" in info for info in infos):
            success_RA = np.array([info["attempt_success"] for info in infos])
            row |= {f"success {a + 1}": float(mean) for a, mean in enumerate(success_RA.mean(0))}
            # DEVIATION: success in two of three attempts, for a rollout; Figure 4 counts tasks with that rate.
            row["solved"] = float((success_RA[:, free_attempts:].mean(1) >= 2 / 3 - 1e-6).mean())
    # All rows get all columns, with None where a task reports nothing.
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def mean_scores(rows: list[dict]) -> tuple[float, float | None]:
    """Mean return and mean score over tasks; the score is None unless every task has bounds."""
    scores = [row["score"] for row in rows]
    return float(np.mean([row["return"] for row in rows])), None if None in scores else float(np.mean(scores))


def mean_told(rows: list[dict], column: str) -> float | None:
    """Mean of a column over the tasks that have it; None if none has."""
    told = [row[column] for row in rows if row[column] is not None]
    return float(np.mean(told)) if told else None


# The table averages these columns in its own way, or not at all.
FIXED = ("return", "standard_error", "random", "best", "score")


def format_table(rows: list[dict], groups: dict[str, list[str]] | None = None) -> str:
    """The rows of `score_rows` as text; below them the means over each group {label: tasks} and over all tasks."""
    columns = [name for name in rows[0] if name not in ("task", "episodes")]
    width = max(32, *(len(row["task"]) + 1 for row in rows))

    def line(label: str, cells: dict) -> str:
        shown = (
            "" if c not in cells else "-" if cells[c] is None or np.isnan(cells[c]) else f"{cells[c]:.3f}"
            for c in columns
        )
        return f"{label:<{width}}" + "".join(f"{cell:>11}" for cell in shown)

    def means(label: str, rows: list[dict]) -> str:
        mean, score = mean_scores(rows)
        extra = {c: mean_told(rows, c) for c in columns if c not in FIXED}
        return line(label, {"return": mean, "score": score} | extra).rstrip()

    header = f"{'task':<{width}}" + "".join(f"{c.replace('standard_error', '+-'):>11}" for c in columns)
    body = [line(row["task"], row) for row in rows]
    parts = {label: [row for row in rows if row["task"] in tasks] for label, tasks in (groups or {}).items()}
    below = [means(f"mean of {len(part)} {label}", part) for label, part in parts.items() if part]
    tasks = "1 task" if len(rows) == 1 else f"{len(rows)} tasks"
    return "\n".join([header, *body, *below, means(f"mean of {tasks}", rows)])


if __name__ == "__main__":
    bounds = {"RepeatFirstEasy": (-0.5, 1.0), "HigherLowerEasy": (0.0, 0.5)}
    returns = {"RepeatFirstEasy": [0.2, 0.3, 0.1], "HigherLowerEasy": [0.5, 0.4, 0.3]}
    print(format_table(score_rows(returns, bounds)))
    print("by hand: (0.2 + 0.5) / 1.5 = 0.467 and 0.4 / 0.5 = 0.8, their mean 0.633")
