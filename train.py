r"""Train one policy on many tasks at once, without task labels (AMAGO-2, arXiv 2411.11188).

    python train.py --env popgym --variant ind_ind                 # all 27 tasks; laptop scale on a CPU
    python train.py --env popgym --tasks RepeatFirstEasy,HigherLowerEasy --attempts 1 --minutes 4
    python train.py --env gym:CartPole-v1,Acrobot-v1               # any Gymnasium ids with vector observations
    python train.py --name my_run --resume                         # go on where a run stopped

The file reads in the order in which things happen: `main`, collect, update, evaluate, save. What can be set
is in config.py, the networks and the four losses are in agent.py. Everything that a run did can be found again under runs/<name>/.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent import Agent, Policy, losses, next_values
from config import Config, parse, refuse_import
from critics import move_target, n_step_target
from encoders import random_shift
from runtime import checkpoint, distributed, resuming
from runtime.episode_buffer import EpisodeBuffer, parts
from runtime.frame_store import FramesFull
from runtime.logger import Logger, describe_versions, lock_folder
from runtime.vector_env import make_vector_env
from runtime.wiring import (
    env_arguments,
    evaluation_arguments,
    in_processes,
    make_replay,
    observation_parts,
    sizes,
)
from suites import make_env, task_family
from suites.scores import add_attempts, format_table, load_bounds, mean_scores, mean_told, score_rows

ROOT = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> list[dict] | None:
    """Train as the command line `argv` says (default: the program's own).

    Returns the last evaluation's table (rows of scores.py; None in all processes but the first). After Ctrl-C or
    SIGTERM it saves and exits.
    """
    with distributed.process_group():
        run = Run(distributed.run_on_first(lambda: parse(argv, ROOT)))
        run.log.say(f"runs/{run.config.name}: to watch it,  tensorboard --logdir runs")
        try:
            rows = train(run)
        except (OSError, MemoryError, RuntimeError) as error:
            line = explained(error, run)
            if line is None:
                raise
            raise line from error
        finally:
            run.close()
    # After the block: processes that a signal has stopped leave together, too.
    if run.interrupted:
        sys.exit(128 + run.interrupted)  # the shell's convention
    return rows


def train(run: "Run") -> list[dict] | None:
    """The loop of a run; returns the last evaluation's table. Run.update and Run.evaluate call `update` and
    `evaluate` below, and log."""
    while True:
        step = run.next_step()
        if step == "stop":
            return run.finish()
        if step == "evaluate":
            run.evaluate(run.config.eval_episodes)
            run.log.done(step)
        elif step == "save":
            run.save()
            run.log.done(step)
        elif step == "update":
            run.update()
        else:
            collect(run)


# ---------------------------------------------------------------------------------------------- collect


def collect(run: "Run") -> None:
    """One step in every environment; finished rollouts and long segments enter the replay."""
    config, lanes = run.config, run.lanes
    action_E = explore(run.policy(lanes.newest()), run.epsilon(), run.agent, run.rng)
    obs, reward_E, terminated_E, truncated_E, info = run.envs.step(action_E)
    obs_E, done_E, lost_E = parts(obs), terminated_E | truncated_E, info["lost"]
    lanes.append(obs_E, reward_E)
    for e in np.flatnonzero(lost_E):  # its process died: `obs_E` is already the first of another rollout
        run.begin(e, obs_E)
        run.lost += 1
    for e in np.flatnonzero(done_E | (lanes.full() & ~lost_E)):
        # Where a rollout has just ended, `obs_E` is already the first observation of the next one; the last
        # of the old one, from which a truncated rollout bootstraps, comes in `info`. No step is spent on it.
        if done_E[e]:
            lanes.end(e, parts(info["final_obs"][e]))
        # The stored action is the one that the next observation shows as its previous action: after
        # exploration noise and, with --store_executed, the valid one that was carried out.
        obs_T, reward_T, start = lanes.segment(e)
        shown = obs_T["vector"][1:, run.previous_action]
        action_T = shown.argmax(-1) if run.agent.discrete else shown
        last_info = info["final_info"] if done_E[e] else info
        task = int(last_info["task_id"][e])
        run.replay.add(
            obs_T["vector"], action_T, reward_T, bool(terminated_E[e]), start, task, image=obs_T.get("image")
        )
        if done_E[e]:
            run.count_rollout(last_info, e)
            run.begin(e, obs_E)
        else:  # a cut in a long rollout is no end: the clock runs on
            lanes.start(e, obs_E, time=start + len(reward_T))
    if (done_E | lost_E).any():
        run.policy.reset(done_E | lost_E)
    run.steps += config.num_envs * distributed.world_size()
    # Updates per env step accumulate as a fraction. Of several processes each counts its own steps: together
    # they then learn as often from each step as one would, from batches so many times larger.
    if run.learning:
        run.updates_owed += config.num_envs / config.env_steps_per_update


def explore(action_E, epsilon_E, agent: Agent, rng: np.random.Generator):
    """Exploration noise: a random action with probability epsilon, or epsilon times a Gaussian, clipped."""
    if agent.discrete:
        random_E = rng.integers(agent.action_dim, size=len(action_E))
        return np.where(rng.random(len(action_E)) < epsilon_E, random_E, action_E)
    noise_EA = rng.standard_normal(action_E.shape).astype(np.float32)
    return np.clip(action_E + epsilon_E[:, None].astype(np.float32) * noise_EA, -1.0, 1.0)


# ----------------------------------------------------------------------------------------------- update


def update(agent: Agent, optimizer, schedule, batch, config: Config, num_tasks: int = 1) -> dict[str, Tensor]:
    """One gradient step on a batch of windows; returns what to plot. Source: paper, section 3 and Table 1.

    Most of what is returned are scalars; `bins/<discount>` are (N,), `share/<what>` (num_tasks,).
    """
    agent.train()
    # Input statistics change here and nowhere else, from the observations of real steps.
    mask_BT1 = F.pad(batch.mask_BT, (1, 0), value=True)
    pool = [distributed.mean] if distributed.world_size() > 1 else []  # those of all processes' batches
    agent.encoder.update_statistics(batch.obs_BTO, mask_BT1, *pool)
    optimizer.zero_grad()
    totals, all_states = defaultdict(float), batch.mask_BT.sum().item()
    tasks = max(num_tasks, int(batch.task_B.max()) + 1)
    by_task = torch.zeros(len(SHARES), tasks, device=batch.obs_BTO.device)
    for part in passes(batch, config):
        for name, value in add_gradients(agent, part, config, all_states, by_task).items():
            totals[name] += value
    totals |= {f"share/{name}": size / size.sum().clamp(min=1e-30) for name, size in zip(SHARES, by_task)}
    parameters = [p for p in agent.parameters() if p.grad is not None]
    # Of several processes, each with a batch of its own: the mean gradient, and the first one's buffers
    # (the power iterations of sigma-reparam count passes, which may be more in one than in another).
    distributed.average_([p.grad for p in parameters])
    distributed.broadcast_([b for b in agent.buffers() if b.dtype == torch.float32])
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    totals |= {"popart/mu": agent.popart.mu[-1].clone(), "popart/sigma": agent.popart.sigma[-1]}
    totals |= {"gradient_norm": norm, "skipped": (~torch.isfinite(norm)).float()}
    # Clipping by a norm that is NaN would poison every weight: such an update is left out, and counted.
    if torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
        optimizer.step()
        schedule.step()
        move_target(agent.target_actor, agent.actor, config.tau)
        move_target(agent.value.target_critics, agent.value.critics, config.tau)
    return dict(totals)


def passes(batch, config: Config) -> list:
    """The batch in parts of whole windows, about `steps_per_pass` steps each, whose gradients add up to its own.

    In one part where a loss is scaled by PopArt, which has to see all targets before that loss is computed.
    With `ind_ind` PopArt is kept for the log alone, and takes in each part on its own.
    """
    windows, observations = batch.time_BT.shape
    size = max(1, config.steps_per_pass // observations)
    if size >= windows or config.variant != "ind_ind":
        return [batch]
    parts = zip(*(field.split(size) for field in batch if field is not None))
    return [type(batch)(*part) for part in parts]


SHARES = ("states", "actor", "critic", "gradient")  # what is logged of each task


def add_gradients(agent: Agent, batch, config: Config, all_states: int, by_task: Tensor) -> dict[str, Tensor]:
    """Add to the parameters' gradients what these windows, of a batch of `all_states` steps, ask of them.

    Returns their part of what to plot; adds to `by_task` (len(SHARES), tasks) in place.
    """
    autocast = torch.autocast(batch.obs_BTO.device.type, torch.bfloat16, enabled=config.precision == "bf16")
    image_BT = random_shift(batch.image_BT) if config.augment else batch.image_BT
    with autocast:
        h_BTD = agent.states(batch.obs_BTO, batch.time_BT, image_BT).float()

    # From here on, states are flat: S valid (b, t) pairs in order of time, the padding left behind.
    h_SD = h_BTD.detach()[:, :-1][batch.mask_BT]
    next_SD = h_BTD.detach()[:, 1:][batch.mask_BT]
    stored_SA = agent.action_vectors(batch.action_BT[batch.mask_BT])
    follows_S = F.pad(batch.mask_BT[:, 1:], (0, 1))[batch.mask_BT]  # is the next row the next step?
    chunks = [slice(i, i + config.chunk) for i in range(0, len(h_SD), config.chunk)]

    # Targets first, for all states: PopArt learns from all of them before any loss is computed.
    with autocast:
        q_next_SG = torch.cat([next_values(agent, next_SD[part]).float() for part in chunks])
    # OFFICIAL: the multiplier is the authors' scripts'; with bins spaced by symlog it decides how fine they are.
    reward_S = batch.reward_BT[batch.mask_BT] * config.reward_scale
    terminated_S = batch.done_BT[batch.mask_BT]
    y_SG = n_step_target(reward_S, terminated_S, q_next_SG, agent.gamma_G, follows_S, config.n_step)
    # What is not finite, or its square, would stay in the statistics for good. With `ind_ind` they are for the
    # log alone, and the number of passes may differ between processes: nothing is pooled.
    pool = {} if config.variant == "ind_ind" else {"pool": distributed.mean}
    agent.popart.update(y_SG, y_SG.abs() < 1e15, **pool)

    # L = L_Actor + lambda L_Critic. OFFICIAL: a mean over real steps, discounts and critics, where the paper
    # prints a sum over a window.
    # Plain: loss = actor_loss(h).mean() + lambda * critic_loss(h).mean(); loss.backward(). The same gradients,
    # but only `chunk` states' worth of actor and critic activations exist at a time: on a CPU that is the
    # difference between cache and memory.
    grad_SD, totals, loss_sizes = torch.empty_like(h_SD), defaultdict(float), []
    for part in chunks:
        h_part_SD = h_SD[part].requires_grad_()
        with autocast:
            actor_loss_SG, critic_loss_CSG, metrics = losses(
                agent, config, h_part_SD, stored_SA[part], y_SG[part]
            )
        share = len(h_part_SD) / all_states
        actor_loss, critic_loss = actor_loss_SG.mean(), critic_loss_CSG.mean()
        ((actor_loss + config.critic_weight * critic_loss) * share).backward()
        grad_SD[part] = h_part_SD.grad
        loss_sizes.append((actor_loss_SG.detach().abs().mean(1), critic_loss_CSG.detach().mean((0, 2))))
        metrics |= {"loss/actor": actor_loss.detach(), "loss/critic": critic_loss.detach()}
        for name, value in metrics.items():
            totals[name] += value * share

    # Which tasks the losses and the gradient come from. For the log alone: learning never sees a task's id.
    task_S = batch.task_B.unsqueeze(1).expand_as(batch.mask_BT)[batch.mask_BT]
    actor_S, critic_S = (torch.cat(sizes) for sizes in zip(*loss_sizes))
    for row, size_S in enumerate((torch.ones_like(actor_S), actor_S, critic_S, grad_SD.norm(dim=-1))):
        by_task[row] += torch.bincount(task_S, size_S, by_task.shape[1])

    # One pass through Transformer and encoder, with what all chunks together ask of the states.
    grad_BTD = torch.zeros_like(h_BTD)
    grad_BTD[:, :-1][batch.mask_BT] = grad_SD
    h_BTD.backward(grad_BTD)
    return totals


def make_optimizer(agent: Agent, config: Config):
    """AdamW on what learns, and its schedule: a linear warm-up. Source: Table 1; warm-up: authors' script."""
    learning = [p for p in agent.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        learning, config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    warm_up = lambda update: min(1.0, (update + 1) / max(1, config.warmup_updates))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


# --------------------------------------------------------------------------------------------- evaluate


def evaluate(
    agent,
    config: Config,
    episodes: int,
    *,
    tasks=None,
    split="train",
    greedy=False,
    seed=0,
    stop=lambda: False,
    bar=None,
) -> dict[str, list[dict]]:
    """Play `episodes` rollouts of each task without exploration noise, in environments of their own.

    Returns {task: [rollout]}, a rollout being the `info` of its last step: its counted "return", its
    "length" in env steps and its real "attempt_returns". Samples from the policy of the last discount, or
    takes its mode if `greedy`. `stop()` True ends it early.
    """
    make = functools.partial(make_env, **evaluation_arguments(config, split))
    tasks = tasks or make().tasks
    queue = deque((task, episode) for episode in range(episodes) for task in tasks)
    envs = [make() for _ in range(min(config.num_envs, len(queue)))]
    policy = Policy(agent, config, num_envs=len(envs), seed=seed, greedy=greedy)
    obs = {
        name: np.zeros((len(envs), *shape), dtype)
        for name, (shape, dtype) in observation_parts(envs[0]).items()
    }
    rollouts, playing = {task: [] for task in tasks}, [False] * len(envs)

    def see(lane: int, seen) -> None:
        for name, value in parts(seen).items():
            obs[name][lane] = value

    def next_rollout(lane: int) -> None:
        playing[lane] = bool(queue)
        if queue:
            task, episode = queue.popleft()
            # Far from any seed that training draws; the same variants in every evaluation.
            see(lane, envs[lane].reset(seed=10**9 + seed * 10**6 + episode, options={"task": task})[0])

    for lane in range(len(envs)):
        next_rollout(lane)
    while any(playing) and not stop():
        action = policy(obs)
        ended = np.zeros(len(envs), dtype=bool)
        for lane in np.flatnonzero(playing):
            seen, _, terminated, truncated, info = envs[lane].step(action[lane])
            see(lane, seen)
            if terminated or truncated:
                rollouts[info["task"]].append(info)
                ended[lane] = True
                next_rollout(lane)
                if bar is not None:
                    bar.update()
        if ended.any():
            policy.reset(ended)
    for env in envs:
        env.close()
    return rollouts


def table_of(rollouts: dict[str, list[dict]], env, config: Config) -> list[dict]:
    """What `evaluate` returns as a table, a row a task (scores.py). `env` is one that they were played in."""
    returns = {task: [rollout["return"] for rollout in played] for task, played in rollouts.items()}
    rows = score_rows(returns, load_bounds(config.env), env.attempts - env.free_attempts)
    return add_attempts(rows, rollouts, env.free_attempts)


# ----------------------------------------------------------------------------------- save, log, and load


class Run:
    """What a run holds while it lasts: its parts, its counters, and how it is logged, saved and resumed."""

    def __init__(self, config: Config):
        self.config, self.folder, self.parent = config, ROOT / "runs" / config.name, os.getppid()
        torch.manual_seed(config.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        # Of several processes, each draws for itself, but for the weights that they start from.
        self.seed = np.random.SeedSequence([config.seed, distributed.rank()])
        self.rng = np.random.default_rng(self.seed)
        self.device = torch.device(config.device)
        if self.device.type == "cuda" and distributed.world_size() > 1:
            self.device = torch.device("cuda", torch.cuda.current_device())  # one for each process
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        self.env = make_env(**env_arguments(config))  # never stepped: it knows tasks, layout and sizes
        self.previous_action = self.env.layout["previous_action"]
        if config.augment and self.env.image_shape is None:
            raise ValueError(f"--augment shifts images, and --env {config.env} has none: leave it out")
        frames = f"frames-{distributed.rank()}" if distributed.rank() else "frames"
        replay_seed, policy_seed, env_seed = self.seed.generate_state(3).tolist()
        self.replay = make_replay(config, self.env, self.folder / frames, self.device, replay_seed)
        self.agent = Agent(config, *sizes(self.env)).to(self.device)
        self.optimizer, self.schedule = make_optimizer(self.agent, config)
        if distributed.rank():
            torch.manual_seed(replay_seed)
        self.steps = self.updates = self.rollouts = self.lost = self.saves = 0
        self.updates_owed, self.best, self.learning = 0.0, -float("inf"), False
        # Updates left out in a row, and what was not finite in the first of them.
        self.skipped, self.first_bad, self.interrupted = 0, "", 0
        self.recent, self.returns = [], defaultdict(list)
        self.last_returns = defaultdict(lambda: deque(maxlen=20))
        # Files of the replay so far, and all those of the last checkpoint.
        self.replay_parts, self.parts_before = [], []
        self.lock = None if distributed.rank() else lock_folder(self.folder)
        own, resumed = resuming.restore(self) if config.resume else (None, {})
        if config.init and not config.resume:
            load_weights(self.agent, config)
        saved = dataclasses.asdict(config) | {"resume": False}
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "none"
        used = {"processes": distributed.world_size(), "gpu": gpu, "threads": torch.get_num_threads()}
        versions = describe_versions(ROOT) | used
        limits = config.steps, config.minutes
        files = {"config": saved, "versions": versions}
        self.log = Logger(self.folder, files, *limits, **resumed, silent=distributed.rank() > 0)

        self.envs = make_vector_env(
            num_envs=config.num_envs,
            asynchronous=in_processes(config),
            worker_timeout=config.worker_timeout,
            **env_arguments(config),
        )
        length = self.replay.max_length
        whole = self.env.max_rollout_length is not None and self.env.max_rollout_length <= length
        self.lanes = EpisodeBuffer(
            config.num_envs, length, observation_parts(self.env), None if whole else self.rng
        )
        self.policy = Policy(self.agent, config, config.num_envs, seed=policy_seed)
        if own is None:
            obs_E = parts(self.envs.reset(seed=(env_seed + self.steps) % 10**9)[0])
            for e in range(config.num_envs):
                self.begin(e, obs_E)
        else:
            resuming.go_on(self, own)
        self.logged = (time.monotonic(), self.steps, self.updates)

    def begin(self, e: int, obs_E) -> None:
        "A new rollout in environment `e`, whose first observation is in `obs_E`."
        self.lanes.start(e, obs_E, time=0)
        self.lanes.fraction_E[e] = self.rng.random()

    def next_step(self) -> str:
        "What to do next: stop, evaluate, save, update or collect. Several processes all do the same."
        c, log = self.config, self.log
        if distributed.world_size() > 1 and os.getppid() != self.parent:
            raise ValueError("torchrun has ended: this process ends, too, so that the run can be resumed")
        log.show(self.steps, self.standing)
        decided = [0.0, 0.0, 0.0]
        if not distributed.rank():
            # Updates that are owed for the last steps are made before a run ends, so that it can be gone on with.
            over = log.progress(self.steps) >= 1 and self.updates_owed < 1
            # A checkpoint first: an evaluation steps simulators in this process, and may take it down.
            decided = [over, log.due("save", c.checkpoint_every), log.due("evaluate", c.eval_every)]
        # Learning starts once every process's replay holds a batch of segments.
        waiting = len(self.replay) < c.batch_size
        signal_, waiting, *decided = distributed.maximum([log.stop_signal or 0, waiting, *decided])
        # A signal that has come meanwhile stays, for the next time that all are asked.
        log.stop_signal = log.stop_signal or int(signal_) or None
        self.learning = not waiting
        for step, yes in zip(("stop", "save", "evaluate"), (decided[0] or signal_, *decided[1:])):
            if yes:
                return step
        return "update" if self.updates_owed >= 1 else "collect"

    def standing(self) -> str:
        "What the bar says."
        families = defaultdict(list)
        for task, values in self.last_returns.items():
            families[task_family(task)].append(np.mean(values))
        means = " ".join(f"{name[:11]} {np.mean(v):.2f}" for name, v in sorted(families.items()))
        return f"{self.steps:,} steps, {self.updates:,} updates | {means}"

    def epsilon(self) -> np.ndarray:
        "Exploration in each environment, (E,): each rollout takes its own random fraction of the schedule."
        c, lanes = self.config, self.lanes
        done = min(1.0, self.steps / (c.num_envs * distributed.world_size()) / c.epsilon_steps)
        epsilon = c.epsilon_start + done * (c.epsilon_end - c.epsilon_start)
        if c.epsilon_late_start is not None:  # it also moves from a rollout's start to its end
            late = c.epsilon_late_start + done * (c.epsilon_late_end - c.epsilon_late_start)
            part_E = (lanes.time_E + lanes.count_E) / (self.env.max_rollout_length or c.segment_length)
            epsilon = epsilon + np.minimum(part_E, 1.0) * (late - epsilon)
        return lanes.fraction_E * epsilon

    def sample(self):
        batch = self.replay.sample(self.config.batch_size, self.config.context)
        on_device = (None if t is None else t.to(self.device, non_blocking=True) for t in batch)
        return type(batch)(*on_device)

    def update(self) -> None:
        "One update, and a row of the log now and then. ValueError after ten in a row that could not be made."
        batch, tasks = self.sample(), len(self.env.tasks)
        self.recent.append(update(self.agent, self.optimizer, self.schedule, batch, self.config, tasks))
        self.updates += 1
        self.updates_owed -= 1
        if not self.recent[-1]["skipped"]:
            self.skipped = 0
        else:
            self.first_bad = self.first_bad if self.skipped else not_finite(self.agent, self.recent[-1])
            self.skipped += 1
            if self.skipped == 10:
                raise ValueError(
                    f"ten updates in a row were left out, up to number {self.updates}, because a loss or gradient "
                    f"was not finite; in the first of them: {self.first_bad}. Weights are as they were before. Look "
                    "at the tasks' rewards and --reward_scale, or go on with a lower --learning_rate"
                )
        if self.updates % self.config.log_every == 0:
            self.log_training()

    def count_rollout(self, info: dict, e: int) -> None:
        "A rollout has ended in environment `e`: note its counted return under its task, for reports only."
        task = self.env.tasks[info["task_id"][e]]
        self.rollouts += 1
        self.returns[task].append(float(info["return"][e]))
        self.last_returns[task].append(float(info["return"][e]))

    def log_training(self) -> None:
        "Means over the updates and rollouts since the last row."
        then, steps, updates = self.logged
        now = time.monotonic()
        self.logged = now, self.steps, self.updates
        row = {}
        for name in self.recent[0]:
            mean = torch.stack([m[name].float() for m in self.recent]).mean(0).tolist()
            named = zip(self.env.tasks, mean) if name.startswith("share/") else ()
            row |= {f"{name}/{task}": share for task, share in named} or {name: mean}
        row |= {f"return/{task}": float(np.mean(v)) for task, v in sorted(self.returns.items())}
        if self.last_returns:
            row["return_mean"] = float(np.mean([np.mean(v) for v in self.last_returns.values()]))
        row |= {
            "learning_rate": self.schedule.get_last_lr()[0],
            "epsilon": float(self.epsilon().mean()),
            "replay_steps": self.replay.num_steps,
            "rollouts": self.rollouts,
            "lost_rollouts": self.lost,
            "steps_per_second": (self.steps - steps) / (now - then),
            "updates_per_second": (self.updates - updates) / (now - then),
        }
        self.recent, self.returns = [], defaultdict(list)
        self.log.write(self.steps, self.updates, row)

    def evaluate(self, episodes: int) -> list[dict] | None:
        "Play without noise, log it, and keep the best weights. None if a signal came, or another process does it."
        if distributed.rank():
            return None
        rollouts = evaluate(self.agent, self.config, episodes, stop=lambda: self.log.stop_signal)
        if self.log.stop_signal:
            return None
        rows = table_of(rollouts, self.env, self.config)
        mean, score = mean_scores(rows)
        row = {f"eval/return/{r['task']}": r["return"] for r in rows} | {"eval/return_mean": mean}
        if score is not None:
            row |= {f"eval/score/{r['task']}": r["score"] for r in rows} | {"eval/score_mean": score}
        for name in (column for column in rows[0] if column.startswith(("try", "success", "solved"))):
            row |= {f"eval/{name}/{r['task']}": r[name] for r in rows if r[name] is not None}
            row[f"eval/{name}_mean"] = mean_told(rows, name)
        self.log.write(self.steps, self.updates, row)
        self.log.say(
            f"evaluation at {self.steps:,} steps, {self.updates:,} updates, {self.log.minutes:.1f} min: "
            f"mean return {mean:.3f}" + ("" if score is None else f", score {score:.3f}")
        )
        if (mean if score is None else score) > self.best:
            self.best = mean if score is None else score
            checkpoint.save(self.folder / "best.pt", self.weights())
        return rows

    def weights(self) -> dict:
        "What it takes to play: best.pt."
        counters = (
            "steps",
            "updates",
            "rollouts",
            "lost",
            "saves",
            "updates_owed",
            "best",
            "skipped",
            "first_bad",
        )
        return {
            "config": dataclasses.asdict(self.config),
            "agent": checkpoint.clean_state_dict(self.agent.state_dict()),
            "counters": {name: getattr(self, name) for name in counters},
        }

    def save(self) -> None:
        "A checkpoint of everything."
        resuming.save(self)

    def again(self) -> str:
        "The command that goes on with this run."
        several = f"torchrun --nproc_per_node {distributed.local_world_size()} train.py"
        return f"{'python train.py' if distributed.world_size() == 1 else several} --name {self.config.name} --resume"

    def finish(self) -> list[dict] | None:
        "The last evaluation, its table and the curves; only a checkpoint if the run was interrupted."
        self.save()
        if self.stopped_by_signal():
            self.log.say(f"saved at env step {self.steps:,}. Go on with:  {self.again()}")
            return None
        self.log.say(f"done: evaluating {self.config.final_episodes} rollouts of each task")
        rows = self.evaluate(self.config.final_episodes)
        if self.stopped_by_signal():
            self.log.say(f"saved at env step {self.steps:,}, the last evaluation left out")
            return None
        self.save()  # once more: the log has grown
        if rows is None:
            return None
        table = format_table(rows)
        (self.folder / "table.txt").write_text(table + "\n")
        self.log.say(table)
        from plot import plot_run  # here, because matplotlib is slow to import and not needed before

        self.log.say(f"curves: {plot_run(self.folder)}")
        return rows

    def stopped_by_signal(self) -> bool:
        "Whether a signal has reached any of the processes; its number is kept for the exit status."
        self.interrupted = int(distributed.maximum([self.log.stop_signal or 0])[0])
        return self.interrupted > 0

    def close(self) -> None:
        "Close everything, each part even if another fails."
        with contextlib.ExitStack() as closing:
            if self.replay.frames is not None:
                closing.callback(self.replay.frames.close)
            closing.callback(self.envs.close)
            closing.callback(self.log.close)
            if self.lock is not None:
                closing.callback(self.lock.close)


def explained(error: Exception, run: "Run") -> Exception | None:
    "An error of the disk or the memory as one line that says what to do; None for any other one."
    c, memory = run.config, ("out of memory", "allocate memory", "DefaultCPUAllocator")
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if full and not isinstance(error, FramesFull):
        there = (run.folder / "checkpoint.pt").exists()
        rest = f"The last checkpoint stands:  {run.again()}" if there else "There is no checkpoint yet"
        return OSError(
            f"a file of {run.folder} could not be written ({error}): free some space there. {rest}"
        )
    no_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if no_memory or any(words in str(error) for words in memory):
        return ValueError(
            f"out of memory: lower --batch_size (now {c.batch_size}), --context ({c.context}), --steps_per_pass "
            f"({c.steps_per_pass}), --chunk ({c.chunk}) or --num_envs ({c.num_envs}), or the replay's capacity"
        )
    return None


def not_finite(agent: Agent, metrics: dict[str, Tensor]) -> str:
    "Which weights, losses and gradients are not finite: the first three of each, in order of the forward pass."
    named = dict(agent.named_parameters())
    kinds = {
        "weights": named,
        "losses": {name: value for name, value in metrics.items() if name != "gradient_norm"},
        "gradients": {name: p.grad for name, p in named.items() if p.grad is not None},
    }
    found = []
    for kind, tensors in kinds.items():
        bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            found.append(
                f"{kind} {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            )
    return "; ".join(found)


def load_weights(agent: Agent, config: Config) -> None:
    "Weights of another run's checkpoint, --init."
    state = checkpoint.load(config.init, keys=("config", "agent"))
    shapes = [f for f in resuming.MODEL_FIELDS if f not in ("tasks", "attempts", "store_executed")]
    checkpoint.check_compatible(state["config"], dataclasses.asdict(config), shapes)
    checkpoint.fill(agent, state["agent"])


def load(path, num_envs: int = 1, device: str = "cpu", greedy: bool = False, seed: int = 0) -> Policy:
    """The policy in a checkpoint (best.pt, checkpoint.pt, or a run's folder), ready to be called.

    `num_envs` environments are played side by side. Raises `checkpoint.CheckpointError`, one line, for a
    missing or damaged file. Loading never runs code from the file.
    """
    path = Path(path)
    state = checkpoint.load(path / "best.pt" if path.is_dir() else path, keys=("config", "agent"))
    saved = {k: tuple(v) if isinstance(v, list) else v for k, v in state["config"].items()}
    try:
        config = Config(**saved)
    except TypeError as error:
        raise checkpoint.CheckpointError(f"{path} is of another version of this program: {error}") from error
    refuse_import(config.env, f"{path} plays {config.env}", "import that module first")
    agent = Agent(config, *sizes(make_env(**env_arguments(config))))
    checkpoint.fill(agent, state["agent"])
    return Policy(agent.to(device).eval(), config, num_envs, seed, greedy)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
