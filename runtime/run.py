r"""A run: its parts, its counters, and how it is logged, saved, resumed and ended.

What     `Run` holds everything that the training loop (train.py) works with, and does everything that is not
         learning: it decides what is due, writes the log, saves checkpoints, and explains errors
Why      the loop should read like the algorithm; a run of days also needs signals, disks that fill and processes
         that agree on what comes next
Paper    none
Shapes   E environments
Notes    Several processes make the same decisions: what one of them decides, the others learn through
         `distributed`. With one process those calls return their argument
"""

import contextlib
import dataclasses
import os
import shlex
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from config import ROOT, Config, prepare_torch, shown
from evaluate import LIMITED, evaluate, evaluation_envs, find_checkpoint, table_of
from runtime import checkpoint, distributed, reward_scale
from runtime.episode_buffer import parts
from runtime.logger import Logger, describe_versions, lock_folder
from runtime.memory import explained
from runtime.vector_env import in_processes, seed_globals
from suites import endless, task_family
from suites.scores import format_table, load_bounds, mean_scores, mean_told

BAD_IN_A_ROW = 10  # updates that are not finite, after which a run stops


class Run:
    """A run in progress. Use it as a context, and make its parts inside (train.set_up).

    `root` is the folder that holds runs/. Attributes: `config`, `folder`, `device`, `seeds`, `rng`; counters
    `steps` (env steps over all environments and processes), `updates`, `rollouts`, `lost` rollouts, `updates_owed`;
    and the parts `env`, `replay`, `batches`, `agent`, `optimizer`, `schedule`, `envs`, `buffer`, `policy`, `log`.
    `action_E` are actions that are chosen and not yet taken, or None.
    """

    # Attributes that a checkpoint stores, beside the state of the parts.
    COUNTERS = ("steps", "updates", "rollouts", "lost", "saves", "updates_owed", "best")
    COUNTERS += ("skipped", "first_bad", "warned", "found")

    def __init__(self, config: Config, root: Path):
        self.config, self.folder, self.parent = config, root / "runs" / config.name, os.getppid()
        torch.manual_seed(config.seed)
        prepare_torch(config.threads)
        # All processes start from the same weights. Everything else, each of them draws for itself.
        sequence = np.random.SeedSequence([config.seed, distributed.rank()])
        self.rng = np.random.default_rng(sequence)
        names = ("replay", "policy", "environments", "workers", "evaluation")
        self.seeds = dict(zip(names, sequence.generate_state(len(names)).tolist()))
        seed_globals(config.seed, distributed.rank())  # the program's own, which a resume restores
        # With several processes, "cuda" is each one's own GPU: see distributed.process_group.
        self.device = torch.device(config.device)
        self.steps = self.updates = self.rollouts = self.lost = self.saves = 0
        self.updates_owed, self.best, self.interrupted = 0.0, -float("inf"), 0
        # Skipped updates in a row up to the last row of the log, and the tensors that were not finite in the first.
        self.skipped, self.first_bad = 0, ""
        self.recent, self.returns = [], defaultdict(list)  # since the last row of the log
        self.last_returns = defaultdict(lambda: deque(maxlen=20))
        self.range_of, self.warned = {}, False  # of a task's returns: (lowest, highest, number)
        # Files that hold this process's replay so far, and names of all files of the last checkpoint.
        self.replay_parts, self.files_before = [], set()
        self.action_E, self.rows, self.found = None, 0, []
        self.evaluation_envs = None  # worker processes that are kept between evaluations
        self.closing = contextlib.ExitStack()

    # ------------------------------------------------------------------------------- begin and end

    def open(self) -> dict | None:
        """Lock the folder, load the checkpoint or the initial weights, open the log.

        Returns what the checkpoint holds of this process's episodes in progress, for `start`.
        """
        config, rank = self.config, distributed.rank()
        load_bounds(config.env)  # a damaged table is told now, not at the end
        if config.augment and self.env.image_shape is None:
            raise ValueError(f"--augment shifts images, and --env {config.env} has none: leave it out")
        if self.replay.frames is not None:
            self.closing.callback(self.replay.frames.close)
        if rank:  # its dropout differs from the first process's
            torch.manual_seed(self.seeds["replay"])
        else:
            self.closing.enter_context(lock_folder(self.folder))
        saved, resumed = checkpoint.restore_run(self) if config.resume else (None, {})
        if config.init and not config.resume:
            load_weights(self.agent, config)
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "none"
        used = {"processes": distributed.world_size(), "gpu": gpu, "threads": torch.get_num_threads()}
        files = {"config": self.settings()}
        files["versions"] = describe_versions() | used
        self.log = Logger(self.folder, files, config.steps, config.minutes, **resumed, silent=rank > 0)
        self.closing.callback(self.log.close)
        return saved

    def start(self, saved: dict | None) -> None:
        """Begin a rollout in every environment, or continue those that `open` returned."""
        self.closing.callback(self.envs.close)
        self.closing.callback(self.batches.close)
        if saved is None:
            # A resumed run does not draw again what it has drawn.
            seed_globals(self.config.seed, distributed.rank(), self.steps)
            obs_E = parts(self.envs.reset(seed=(self.seeds["environments"] + self.steps) % 10**9)[0])
            for e in range(self.config.num_envs):
                self.begin(e, obs_E)
        else:
            checkpoint.continue_run(self, saved)
        self.logged = (time.monotonic(), self.steps, self.updates)
        if self.steps and self.log.progress(self.steps) >= 1:
            limits = f"--steps {self.config.steps:,}"
            limits += f" or --minutes {self.config.minutes:g}" if self.config.minutes else ""
            self.log.say(
                f"this run has ended before, at {limits}: to train on, give more. It is evaluated again"
            )
        if endless(self.env, self.config.max_steps):
            self.log.say(LIMITED)
        c, tasks = self.config, len(self.env.tasks)
        limit = f"{c.steps:,} env steps" + (f" or {c.minutes:g} minutes" if c.minutes else "")
        self.log.say(
            f"one policy for {tasks} task{'s' * (tasks > 1)} of {c.env}, with the losses {c.variant}; ends after {limit} "
            "with a table and curves"
        )
        self.log.say(f"{shown(self.folder)}: to watch it,  tensorboard --logdir {shown(self.folder.parent)}")

    def begin(self, e: int, obs_E) -> None:
        """Begin a new rollout in environment `e`, whose first observation is in `obs_E`."""
        self.buffer.start(e, obs_E, time=0)
        self.buffer.fraction_E[e] = self.rng.random()

    def finish(self) -> list[dict] | None:
        """Save; at the end of the run also evaluate, print the table and draw the curves. Returns the rows."""
        rows = None
        self.save()
        if not self.signal():
            self.log.say(f"done: evaluating {self.config.final_episodes} rollouts of each task")
            rows = self.evaluate(self.config.final_episodes)
            self.save()  # once more: the log has grown
        if self.signal():
            self.log.say(f"saved at env step {self.steps:,}. Continue with:  {self.resume_command()}")
        elif rows:
            table = format_table(rows)
            (self.folder / "table.txt").write_text(table + "\n")
            self.log.say(table)
            try:  # the run is complete, whatever happens to its picture
                # Here, because matplotlib is slow to import and not needed before.
                from plots.runs import plot_run

                self.log.say(f"curves: {shown(plot_run(self.folder))}")
            except Exception as error:  # noqa: BLE001
                again = f"{shown(ROOT / 'plot.py')} run {shown(self.folder)}"
                self.log.say(f"no curves ({type(error).__name__}: {error}); to draw them:  python {again}")
        return rows

    def resume_command(self) -> str:
        """The command that resumes this run."""
        several = f"torchrun --nproc_per_node {distributed.local_world_size()}"
        start = "python" if distributed.world_size() == 1 else several
        return (
            f"{start} {shlex.quote(shown(ROOT / 'train.py'))} --name {shlex.quote(self.config.name)} --resume"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Close every part, even if another one fails; explain an error of disk or memory."""
        self.closing.close()
        if isinstance(error, OSError | MemoryError | RuntimeError) and (line := explained(error, self)):
            raise line from error

    # -------------------------------------------------------------------------------- what comes next

    def signal(self) -> int:
        """The number of the signal that asks this run to stop, in any process; 0 if there is none."""
        # Another process's signal is not noted in the log: this one's own comes a moment later, and would look like a
        # second request, which stops at once.
        self.interrupted = distributed.maximum(self.log.stop_signal or self.interrupted)
        return self.interrupted

    def epsilon(self) -> np.ndarray:
        """Exploration (E,) in each environment: a rollout takes its own random fraction of the schedule.

        Source: authors' scripts.
        """
        c, buffer = self.config, self.buffer
        done = min(1.0, self.steps / c.epsilon_steps)
        level = c.epsilon_start + done * (c.epsilon_end - c.epsilon_start)
        if c.epsilon_late_start is not None:  # it also moves from a rollout's start to its end
            late = c.epsilon_late_start + done * (c.epsilon_late_end - c.epsilon_late_start)
            part_E = (buffer.time_E + buffer.count_E) / (self.env.max_rollout_length or c.segment_length)
            level = level + np.minimum(part_E, 1.0) * (late - level)
        return buffer.fraction_E * level

    def owes_update(self) -> bool:
        """Whether an update has to be made now. A signal postpones it, and so does the run's end."""
        return self.updates_owed >= 1 and not self.must_stop()

    def must_stop(self) -> bool:
        """Whether a signal has come or the run's time is over: the first process's clock decides for all."""
        over = distributed.maximum(not distributed.rank() and self.log.progress(self.steps) >= 1)
        return bool(over or self.signal())

    def is_over(self) -> bool:
        """Whether the run has reached its last step or minute, or was asked to stop."""
        if distributed.world_size() > 1 and os.getppid() != self.parent:
            raise ValueError("torchrun has ended: this process ends, too, so that the run can be resumed")
        self.log.show(self.steps, self.standing)
        return self.must_stop()

    def is_due(self, work: str, every_minutes: float) -> bool:
        """Whether `work` is due: the first process's clock decides for all."""
        return bool(distributed.maximum(not distributed.rank() and self.log.due(work, every_minutes)))

    def can_learn(self) -> bool:
        """Whether every process's replay holds a batch of segments."""
        ready = not distributed.maximum(len(self.replay) < self.config.batch_size)
        if ready and self.config.reward_scale == "auto":
            self.fix_reward_scale()
        return ready

    def fix_reward_scale(self) -> None:
        """Choose --reward_scale auto from the rewards in the replay, before anything is learned from them."""
        scale, found = reward_scale.choose(self.replay.rewards())
        self.config, self.found = dataclasses.replace(self.config, reward_scale=scale), ["reward_scale"]
        self.log.unsaved["config"] = self.settings()
        self.log.save_files()  # at once: figures of a run in progress divide by it
        self.log.say(f"--reward_scale auto: {scale:g}, because {found}")

    def settings(self) -> dict:
        """What config.json holds: the configuration, and which of its values were not chosen but found."""
        return dataclasses.asdict(self.config) | {"resume": False, "found": self.found}

    # ------------------------------------------------------------------------------ counting, logging

    def count_update(self, metrics: dict[str, Tensor]) -> None:
        """Count an update; write a row of the log every `log_every` of them."""
        self.recent.append(metrics)
        self.updates += 1
        self.updates_owed -= 1
        share_buffers(self.agent)
        if self.updates % self.config.log_every == 0:
            self.log_training()

    def count_rollout(self, info: dict, e: int) -> None:
        """A rollout has ended in environment `e`: note its counted return under its task, for the log only."""
        task = self.env.tasks[info["task_id"][e]]
        value, self.rollouts = float(info["return"][e]), self.rollouts + 1
        self.returns[task].append(value)
        self.last_returns[task].append(value)
        if not self.warned and self.config.variant.endswith("_ind") and self.config.reward_scale != "auto":
            self.check_bins(task, value, int(info["length"][e]))

    def check_bins(self, task: str, value: float, length: int) -> None:
        """Say once that a task's returns leave the bins of a two-hot critic, or are too close for it to tell apart."""
        low, high, count = self.range_of.get(task, (value, value, 0))
        self.range_of[task] = seen = min(low, value), max(high, value), count + 1
        if fault := reward_scale.misfit(self.config, *seen, value, length):
            self.warned = True
            self.log.say(f"warning: task {task}, --reward_scale {self.config.reward_scale:g}: {fault}")

    def standing(self) -> str:
        """The text beside the progress bar."""
        families = defaultdict(list)
        for task, values in self.last_returns.items():
            families[task_family(task)].append(np.mean(values))
        means = " ".join(f"{name[:11]} {np.mean(v):.2f}" for name, v in sorted(families.items()))
        return f"{self.steps:,} steps, {self.updates:,} updates | {means}"

    def log_training(self) -> None:
        """Write means over the updates and rollouts since the last row. ValueError after ten bad updates in a row.

        Metrics have stayed on the device until here: reading each one would make a GPU wait for Python.
        """
        now, (then, steps, updates) = time.monotonic(), self.logged
        self.logged = now, self.steps, self.updates
        self.check_skipped()
        row = {}
        # In their own order, so that equal runs write equal lines.
        for name in [name for name in self.recent[0] if name != "not_finite"]:
            mean = torch.stack([metrics[name].float() for metrics in self.recent]).mean(0).tolist()
            if name.endswith("<discount>"):
                stem = name.removesuffix("<discount>")
                row |= {f"{stem}{gamma:g}": value for gamma, value in zip(self.config.gammas, mean)}
            elif name.startswith("share/"):
                row |= {f"{name}/{task}": share for task, share in zip(self.env.tasks, mean)}
            else:
                row[name] = mean
        row |= {f"return/{task}": float(np.mean(v)) for task, v in sorted(self.returns.items())}
        if self.last_returns:
            row["return_mean"] = float(np.mean([np.mean(v) for v in self.last_returns.values()]))
        row |= {
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "epsilon": float(self.epsilon().mean()),
            "replay_steps": self.replay.num_steps,
            "rollouts": self.rollouts,
            "lost_rollouts": self.lost,
            "steps_per_second": (self.steps - steps) / (now - then),
            "updates_per_second": (self.updates - updates) / (now - then),
        }
        self.recent, self.returns = [], defaultdict(list)
        self.log.write(self.steps, self.updates, row)
        moved = self.steps > steps  # many updates for each step may fill a row
        self.rows += moved
        if self.rows == 2 and moved:  # the first one includes what happens once
            self.estimate(row["steps_per_second"], row["updates_per_second"])

    def estimate(self, steps_per_second: float, updates_per_second: float) -> None:
        """Say how far the run will come, or how long it will take, at the speed of the last row."""
        c, left = self.config, (self.config.steps - self.steps) / steps_per_second / 60
        speed = f"{steps_per_second:,.0f} env steps and {updates_per_second:.3g} updates a second"
        if c.minutes and c.minutes - self.log.minutes < left:
            seconds = 60 * (c.minutes - self.log.minutes)
            end = self.steps + seconds * steps_per_second, self.updates + seconds * updates_per_second
            self.log.say(
                f"estimate: at {speed}, {c.minutes:g} minutes make {end[0]:,.0f} env steps, {end[1]:,.0f} updates"
            )
        else:
            long = f"{left / 60:,.1f} hours" if left >= 90 else f"{left:,.2g} minutes"
            self.log.say(f"estimate: at {speed}, the {c.steps:,} env steps will be done in {long}")

    def check_skipped(self) -> None:
        """Count the skipped updates in a row, among those since the last row. ValueError if there were ten."""
        skipped = torch.stack([metrics["skipped"] for metrics in self.recent]).tolist()
        for metrics, bad in zip(self.recent, skipped):
            if bad and not self.skipped:
                self.first_bad = not_finite(self.agent, metrics)
            self.skipped = self.skipped + 1 if bad else 0
            if self.skipped == BAD_IN_A_ROW:
                kept = "" if "weights" in self.first_bad else "The weights are those from before. "
                raise ValueError(
                    f"{BAD_IN_A_ROW} updates in a row were skipped, because a loss or gradient was not finite. In the "
                    f"first of them: {self.first_bad}. {kept}Look at the tasks' rewards and --reward_scale, "
                    "or resume with a lower --learning_rate"
                )

    # ------------------------------------------------------------------------------- evaluate and save

    def evaluate(self, episodes: int) -> list[dict] | None:
        """Play without exploration, log it, keep the best weights. Returns the table's rows.

        Returns None in all processes but the first, and if a signal came.
        """
        if distributed.rank():
            return None
        c, tasks = self.config, len(self.env.tasks)
        if in_processes(c) and self.evaluation_envs is None:
            most = tasks * max(c.eval_episodes, c.final_episodes)
            self.evaluation_envs = evaluation_envs(c, most, seed=self.seeds["evaluation"] + self.steps)
            self.closing.callback(self.evaluation_envs.close)
        stop = lambda: self.log.stop_signal
        # In this process, tasks may draw from its global generators: the same in every evaluation, which comes by the
        # clock and must not change what training draws.
        generators = checkpoint.rng_state()
        seed_globals(self.seeds["evaluation"])
        rollouts = evaluate(self.agent, c, episodes, stop=stop, envs=self.evaluation_envs)
        checkpoint.set_rng_state(generators)
        if self.log.stop_signal:
            return None
        if lost := tasks * episodes - sum(map(len, rollouts.values())):
            self.lost += lost
            self.log.say(
                f"{lost} of {tasks * episodes} rollouts of the evaluation were lost with their processes"
            )
        rows = table_of(rollouts, self.env, c)
        if not rows:
            self.log.done("evaluate")
            return None
        mean, score = mean_scores(rows)
        means = {"return": mean} if score is None else {"return": mean, "score": score}
        text = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        after = f"{self.steps:,} steps, {self.updates:,} updates, {self.log.minutes:.1f} min"
        self.log.say(f"evaluation at {after}: mean {text}")
        means |= {c: mean_told(rows, c) for c in rows[0] if c.startswith(("try", "success", "solved"))}
        row = {f"eval/{name}_mean": value for name, value in means.items()}
        row |= {f"eval/{c}/{r['task']}": r[c] for c in means for r in rows if r[c] is not None}
        self.log.write(self.steps, self.updates, row)
        # A mean without some of the tasks is no measure of the weights.
        if (better := mean if score is None else score) > self.best and len(rows) == tasks:
            self.best = better
            checkpoint.save(self.folder / "best.pt", self.weights())
        self.log.done("evaluate")
        return rows

    def weights(self) -> dict:
        """Configuration, weights and counters: what best.pt holds."""
        return {
            "config": dataclasses.asdict(self.config),
            "agent": checkpoint.clean_state_dict(self.agent.state_dict()),
            "counters": {name: getattr(self, name) for name in self.COUNTERS},
        }

    def save(self) -> None:
        """Write a checkpoint of everything."""
        checkpoint.save_run(self)
        self.log.done("save")


def share_buffers(agent: torch.nn.Module) -> None:
    """Give all processes the first one's buffers.

    The power iterations of sigma-reparam count passes, which may be more in one process than in another.
    """
    distributed.broadcast_([b for b in agent.buffers() if b.dtype == torch.float32])


def not_finite(agent: torch.nn.Module, metrics: dict[str, Tensor]) -> str:
    """Which weights, losses and gradients were not finite in an update: the first three of each kind.

    `metrics` is what `update` returned; its "not_finite" (2, P) covers the P parameters that learn, in order.
    """
    learning = [name for name, p in agent.named_parameters() if p.grad is not None]
    named = lambda flags: [name for name, flag in zip(learning, flags) if flag]
    weights, gradients = map(named, metrics["not_finite"].tolist())
    losses = [n for n, value in metrics.items() if n != "gradient_norm" and not value.isfinite().all()]
    kinds = {"weights": weights, "losses": losses, "gradients": gradients}
    more = lambda names: f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(f"{kind} {', '.join(bad[:3])}{more(bad)}" for kind, bad in kinds.items() if bad)


def load_weights(agent: torch.nn.Module, config: Config) -> None:
    """Load the weights of another run's checkpoint, --init. CheckpointError or ValueError, one line, if they do not fit."""
    state = checkpoint.load(find_checkpoint(config.init), keys=("config", "agent"))
    shapes = [f for f in checkpoint.MODEL_FIELDS if f not in ("tasks", "attempts", "store_executed")]
    was = state["config"]
    flags = " ".join(
        f"--{f} {was[f]}" for f in ("env", "tasks", "attempts", "scale", "variant") if was[f] is not None
    )
    advice = f"--init needs what those weights were trained with: {flags}, and its other flags of networks"
    checkpoint.check_compatible(was, dataclasses.asdict(config), shapes, advice)
    try:
        checkpoint.fill(agent, state["agent"])
    except checkpoint.CheckpointError as error:
        raise checkpoint.CheckpointError(
            f"the weights of {config.init} have other sizes. {advice}"
        ) from error
