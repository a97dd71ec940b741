r"""Train one policy on many tasks at once, without task labels (AMAGO-2, arXiv 2411.11188).

    python train.py --env popgym --variant ind_ind                 # all 27 tasks; laptop scale on a CPU
    python train.py --env popgym --tasks RepeatFirstEasy,HigherLowerEasy --attempts 1 --minutes 4
    python train.py --env gym:CartPole-v1,Acrobot-v1               # any Gymnasium ids with vector observations
    python train.py --name my_run --resume                         # go on where a run stopped

The file reads in the order in which things happen: the configuration, the agent, then `main`, collect,
update, evaluate, save. Everything that a run did can be found again under runs/<name>/.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import checkpoint
from agent import Agent, Policy, losses, next_values
from critics import move_target, n_step_target
from encoders import random_shift
from envs import all_tasks, make_env, make_vector_env, task_family
from frames import FramesFull
from lanes import Lanes, parts
from logbook import Logbook, describe_versions
from presets import preset
from scores import add_attempts, format_table, load_bounds, mean_scores, score_rows
from wiring import env_arguments, evaluation_arguments, in_processes, make_replay, observation_parts, sizes

ROOT = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Config:
    """Train AMAGO-2. An explicit flag beats the scale, which beats the preset (presets.py)."""

    # ---- what to train on
    env: str = "popgym"  # benchmark, or gym:ID[,ID...] for any Gymnasium ids
    tasks: str | None = None  # comma-separated subset of the benchmark's tasks; default all
    attempts: int = 2  # plays of a task in a rollout, all but the last free exploration | section 4
    max_steps: int | None = None  # cap on a rollout, env steps, below the benchmark's own
    clip_rewards: bool = False  # to [-1, 1] while training | section 4: unclipped
    store_executed: bool = False  # store the valid action carried out, not the one chosen | DEVIATION
    # actor and critic loss, each independent of the scale of returns or dependent on it | Eq. 1 to 4
    variant: Literal["ind_ind", "ind_dep", "dep_ind", "dep_dep"] = "ind_ind"
    # ---- the run
    name: str | None = None  # folder under runs/; default: environment, variant and time
    scale: Literal["auto", "paper", "laptop", "smoke"] = "auto"  # auto: paper on a GPU, laptop on a CPU
    resume: bool = False  # continue runs/<name> from its checkpoint
    init: str | None = None  # start from the weights of this checkpoint (fine-tuning)
    seed: int = 0  # of everything: weights, environments, replay, exploration
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    threads: int | None = None  # CPU threads of one operation; default: as many as there are cores
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 autocast on a GPU, float32 on a CPU
    steps: int = 100_000_000  # stop after this many env steps, over all environments | paper, section 4
    minutes: float | None = None  # or after this many minutes by the clock
    # ---- collecting
    num_envs: int = 24  # environments stepped together | our choice
    # step environments in worker processes, one each; auto: where a simulator is slow and there are cores
    workers: Literal["auto", "processes", "none"] = "auto"
    env_steps_per_update: float = 12.0  # env steps collected for each gradient step | authors' script
    epsilon_start: float = 1.0  # share of random actions at the start | authors' script
    epsilon_end: float = 0.05  # and at the end of the schedule | authors' script
    epsilon_late_start: float | None = None  # the same two at a rollout's end; None: it stays as it is
    epsilon_late_end: float | None = None  # | authors' script (Meta-World)
    epsilon_steps: int = 1_000_000  # length of the schedule, in steps of each environment | authors' script
    segment_length: int = 2000  # longer rollouts are stored in segments of 3/4 to all of this | our choice
    replay_trajectories: int | None = 15_000  # replay capacity in trajectories | Table 1 (POPGym)
    replay_steps: int | None = None  # or in env steps; exactly one of the two
    replay_ram: float = (
        8.0  # GB of compressed frames in memory; more spill to runs/<name>/frames | our choice
    )
    # ---- learning
    batch_size: int = 24  # sequences in a batch | Table 1
    context: int = 600  # env steps the policy can look back | Table 2 (POPGym)
    learning_rate: float = 1e-4  # AdamW | Table 1 (POPGym)
    warmup_updates: int = 2000  # linear warm-up of the learning rate | authors' script
    weight_decay: float = 1e-4  # AdamW | Table 1, "L2 Penalty"
    grad_clip: float = 1.0  # norm of the whole gradient | Table 1
    gammas: tuple[float, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999)  # the last one acts | Table 1
    tau: float = 0.003  # target networks move this share of the way each update | Table 1
    n_step: int = 1  # rewards summed before a target bootstraps | section 3: one
    critic_weight: float = 10.0  # lambda: weight of the critic's loss beside the actor's | authors' code
    reward_scale: float = 200.0  # rewards are multiplied by this before learning | authors' script
    action_samples: int = 3  # K: samples behind the value of a state, Eq. 4 | authors' code
    chunk: int = 256  # states per chunk of critic work; changes memory and speed, not results | our choice
    augment: bool = False  # random shifts of pixels while training | appendix A
    # ---- the networks
    # timestep encoder: ff for vectors, impala or nature for pixels, grid_language for BabyAI | Table 2
    encoder: Literal["ff", "impala", "nature", "grid_language"] = "ff"
    frames_per_pass: int | None = 1024  # frames whose CNN activations exist at a time; changes memory only
    encoder_depths: tuple[int, ...] = (16, 32, 32)  # channels of a CNN's blocks | Table 2
    encoder_hidden: int = 512  # timestep encoder, hidden width | Table 2
    encoder_dim: int = 200  # timestep encoder, output width | Table 2
    d_model: int = 256  # Transformer width D | Table 2
    d_ff: int = 1024  # Transformer feed-forward width | Table 2
    layers: int = 3  # Transformer blocks | Table 2
    heads: int = 8  # attention heads H | Table 2
    dropout: float = 0.05  # on embeddings and feed-forward | authors' script
    hidden: tuple[int, ...] = (256, 256)  # actor and critic MLPs | Table 2
    critics: int = 4  # critic ensemble C | Table 1
    bins: int = 64  # critic output bins N | Table 2 (POPGym)
    bin_low: float = -1e5  # limits of the bins, in scaled returns | appendix A
    bin_high: float = 1e5  # upper limit | appendix A
    symlog: bool = True  # bins spaced evenly in symlog space (--no-symlog: in returns) | appendix A
    value_label: Literal["twohot", "hlgauss"] = "twohot"  # two-hot critic's labels | Eq. 5, 6; appendix A
    popart_beta: float = 5e-4  # step size of PopArt's statistics | authors' code
    prob_low: float = (
        1e-6  # discrete policies: probabilities are clipped from below | our choice (27 actions)
    )
    prob_high: float = 1.0  # and from above
    # ---- reporting
    log_every: int = 50  # updates between rows of metrics.jsonl
    eval_every: float = 5.0  # minutes between evaluations
    eval_episodes: int = 5  # rollouts of each task in an evaluation
    final_episodes: int = 20  # rollouts of each task in the last evaluation
    checkpoint_every: float = 5.0  # minutes between checkpoints


# ------------------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the command line `argv` says (default: the program's own).

    Returns the last evaluation's table (rows of scores.py). After Ctrl-C or SIGTERM it saves and exits.
    """
    config = parse(argv)
    run = Run(config)
    try:
        while not run.finished():
            collect(run)
            while run.updates_owed >= 1 and not run.log.stop_signal:
                run.update()
                run.updates += 1
                run.updates_owed -= 1
                if run.updates % config.log_every == 0:
                    run.log_training()
            if run.log.due("evaluate", config.eval_every):
                run.evaluate(config.eval_episodes)
            if run.log.due("save", config.checkpoint_every):
                run.save("checkpoint.pt")
        return run.finish()
    finally:
        run.close()


# ---------------------------------------------------------------------------------------------- collect


def collect(run: "Run") -> None:
    """One step in every environment; finished rollouts and long segments enter the replay."""
    config, lanes = run.config, run.lanes
    action_E = explore(run.policy(lanes.newest()), run.epsilon(), run.agent, run.rng)
    obs, reward_E, terminated_E, truncated_E, info = run.envs.step(action_E)
    obs_E, done_E = parts(obs), terminated_E | truncated_E
    lanes.append(obs_E, reward_E)
    for e in np.flatnonzero(done_E | lanes.full()):
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
        # A cut in a long rollout is no end: the clock runs on.
        lanes.start(e, obs_E, time=0 if done_E[e] else start + len(reward_T))
        if done_E[e]:
            run.count_rollout(last_info, e)
            lanes.fraction_E[e] = run.rng.random()
    if done_E.any():
        run.policy.reset(done_E)
    run.steps += config.num_envs
    if run.ready():  # updates per env step accumulate as a fraction
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
    device = batch.obs_BTO.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
    # Input statistics change here and nowhere else, from the observations of real steps.
    mask_BT1 = F.pad(batch.mask_BT, (1, 0), value=True)
    agent.encoder.update_statistics(batch.obs_BTO, mask_BT1)
    image_BT = random_shift(batch.image_BT) if config.augment else batch.image_BT
    with autocast:
        h_BTD = agent.states(batch.obs_BTO, batch.time_BT, image_BT).float()

    # From here on, states are flat: S valid (b, t) pairs in order of time, the padding left behind.
    h_SD = h_BTD.detach()[:, :-1][batch.mask_BT]
    next_SD = h_BTD.detach()[:, 1:][batch.mask_BT]
    stored_SA = agent.action_vectors(batch.action_BT[batch.mask_BT])
    follows_S = F.pad(batch.mask_BT[:, 1:], (0, 1))[batch.mask_BT]  # is the next row the next step?
    chunks = [slice(i, i + config.chunk) for i in range(0, len(h_SD), config.chunk)]

    # Targets first, for all states: PopArt learns from the whole batch before any loss is computed.
    with autocast:
        q_next_SG = torch.cat([next_values(agent, next_SD[part]).float() for part in chunks])
    reward_S = batch.reward_BT[batch.mask_BT] * config.reward_scale
    terminated_S = batch.done_BT[batch.mask_BT]
    y_SG = n_step_target(reward_S, terminated_S, q_next_SG, agent.gamma_G, follows_S, config.n_step)
    agent.popart.update(y_SG, torch.isfinite(y_SG))  # what is not would stay in the statistics for good

    # L = L_Actor + lambda L_Critic, a mean over states where the paper prints their sum.
    # Plain: loss = actor_loss(h).mean() + lambda * critic_loss(h).mean(); loss.backward(). The same gradients,
    # but only `chunk` states' worth of actor and critic activations exist at a time: on a CPU that is the
    # difference between cache and memory.
    optimizer.zero_grad()
    grad_SD, totals, loss_sizes = torch.empty_like(h_SD), defaultdict(float), []
    for part in chunks:
        h_part_SD = h_SD[part].requires_grad_()
        with autocast:
            actor_loss_SG, critic_loss_CSG, metrics = losses(
                agent, config, h_part_SD, stored_SA[part], y_SG[part]
            )
        share = len(h_part_SD) / len(h_SD)
        actor_loss, critic_loss = actor_loss_SG.mean() * share, critic_loss_CSG.mean() * share
        (actor_loss + config.critic_weight * critic_loss).backward()
        grad_SD[part] = h_part_SD.grad
        metrics |= {"loss/actor": actor_loss.detach() / share, "loss/critic": critic_loss.detach() / share}
        loss_sizes.append((actor_loss_SG.detach().abs().mean(1), critic_loss_CSG.detach().mean((0, 2))))
        for name, value in metrics.items():
            totals[name] += value * share

    # Which tasks the losses and the gradient come from. For the log alone: learning never sees a task's id.
    task_S = batch.task_B.unsqueeze(1).expand_as(batch.mask_BT)[batch.mask_BT]
    actor_S, critic_S = (torch.cat(sizes) for sizes in zip(*loss_sizes))
    by_task = {"states": torch.ones_like(actor_S), "actor": actor_S, "critic": critic_S}
    for name, size_S in (by_task | {"gradient": grad_SD.norm(dim=-1)}).items():
        totals[f"share/{name}"] = torch.bincount(task_S, size_S, num_tasks) / size_S.sum().clamp(min=1e-30)

    # One pass through Transformer and encoder, with what all chunks together ask of the states.
    grad_BTD = torch.zeros_like(h_BTD)
    grad_BTD[:, :-1][batch.mask_BT] = grad_SD
    h_BTD.backward(grad_BTD)
    parameters = [p for p in agent.parameters() if p.grad is not None]
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
    lanes = [make() for _ in range(min(config.num_envs, len(queue)))]
    policy = Policy(agent, config, num_envs=len(lanes), seed=seed, greedy=greedy)
    obs = {
        name: np.zeros((len(lanes), *shape), dtype)
        for name, (shape, dtype) in observation_parts(lanes[0]).items()
    }
    rollouts, playing = {task: [] for task in tasks}, [False] * len(lanes)

    def see(lane: int, seen) -> None:
        for name, value in parts(seen).items():
            obs[name][lane] = value

    def next_rollout(lane: int) -> None:
        playing[lane] = bool(queue)
        if queue:
            task, episode = queue.popleft()
            # Far from any seed that training draws; the same variants in every evaluation.
            see(lane, lanes[lane].reset(seed=10**9 + seed * 10**6 + episode, options={"task": task})[0])

    for lane in range(len(lanes)):
        next_rollout(lane)
    while any(playing) and not stop():
        action = policy(obs)
        ended = np.zeros(len(lanes), dtype=bool)
        for lane in np.flatnonzero(playing):
            seen, _, terminated, truncated, info = lanes[lane].step(action[lane])
            see(lane, seen)
            if terminated or truncated:
                rollouts[info["task"]].append(info)
                ended[lane] = True
                next_rollout(lane)
                if bar is not None:
                    bar.update()
        if ended.any():
            policy.reset(ended)
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
        self.config, self.folder = config, ROOT / "runs" / config.name
        torch.manual_seed(config.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.rng = np.random.default_rng(config.seed)
        self.device = torch.device(config.device)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        self.env = make_env(**env_arguments(config))  # never stepped: it knows tasks, layout and sizes
        self.previous_action = self.env.layout["previous_action"]
        self.replay = make_replay(config, self.env, self.folder / "frames", self.device)
        self.agent = Agent(config, *sizes(self.env)).to(self.device)
        self.optimizer, self.schedule = make_optimizer(self.agent, config)
        self.steps = self.updates = self.rollouts = 0
        self.updates_owed, self.best = 0.0, -float("inf")
        self.recent, self.returns = [], defaultdict(list)
        self.last_returns = defaultdict(lambda: deque(maxlen=20))
        resumed = self.restore() if config.resume else {}
        if config.init:
            load_weights(self.agent, config)
        saved = dataclasses.asdict(config) | {"resume": False}
        versions = describe_versions(ROOT)
        self.log = Logbook(self.folder, saved, versions, config.steps, config.minutes, **resumed)

        self.envs = make_vector_env(
            num_envs=config.num_envs, asynchronous=in_processes(config), **env_arguments(config)
        )
        length = self.replay.max_length
        whole = self.env.max_rollout_length is not None and self.env.max_rollout_length <= length
        self.lanes = Lanes(config.num_envs, length, observation_parts(self.env), None if whole else self.rng)
        self.policy = Policy(self.agent, config, config.num_envs, seed=config.seed + self.steps)
        seed = int(np.random.SeedSequence([config.seed, self.steps]).generate_state(1)[0] % 10**9)
        obs_E = parts(self.envs.reset(seed=seed)[0])
        for e in range(config.num_envs):
            self.lanes.start(e, obs_E, time=0)
            self.lanes.fraction_E[e] = self.rng.random()
        self.logged = (time.monotonic(), self.steps, self.updates)

    def finished(self) -> bool:
        "Whether to stop; shows the bar on the way."
        self.log.show(self.steps, self.standing)
        return bool(self.log.stop_signal) or self.log.progress(self.steps) >= 1

    def standing(self) -> str:
        "What the bar says."
        families = defaultdict(list)
        for task, values in self.last_returns.items():
            families[task_family(task)].append(np.mean(values))
        means = " ".join(f"{name[:11]} {np.mean(v):.2f}" for name, v in sorted(families.items()))
        return f"{self.steps:,} steps, {self.updates:,} updates | {means}"

    def ready(self) -> bool:
        "Learning starts once the replay holds a batch of segments."
        return self.replay.num_trajectories >= self.config.batch_size

    def epsilon(self) -> np.ndarray:
        "Exploration in each environment, (E,): each rollout takes its own random fraction of the schedule."
        c, lanes = self.config, self.lanes
        done = min(1.0, self.steps / c.num_envs / c.epsilon_steps)
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
        batch, tasks = self.sample(), len(self.env.tasks)
        self.recent.append(update(self.agent, self.optimizer, self.schedule, batch, self.config, tasks))

    def count_rollout(self, info: dict, e: int) -> None:
        "A rollout has ended in environment `e`: note its counted return under its task, for reports only."
        task = self.env.tasks[info["task_id"][e]]
        self.rollouts += 1
        self.returns[task].append(float(info["return"][e]))
        self.last_returns[task].append(float(info["return"][e]))

    def log_training(self) -> None:
        "Means over the updates and rollouts since the last row."
        then, steps, updates = self.logged
        self.logged = now, _, _ = time.monotonic(), self.steps, self.updates
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
            "steps_per_second": (self.steps - steps) / (now - then),
            "updates_per_second": (self.updates - updates) / (now - then),
        }
        self.recent, self.returns = [], defaultdict(list)
        self.log.write(self.steps, self.updates, row)

    def evaluate(self, episodes: int) -> list[dict] | None:
        "Play without noise, log it, and keep the best weights. None if a signal came meanwhile."
        rollouts = evaluate(self.agent, self.config, episodes, stop=lambda: self.log.stop_signal)
        if self.log.stop_signal:
            return None
        rows = table_of(rollouts, self.env, self.config)
        mean, score = mean_scores(rows)
        row = {f"eval/return/{r['task']}": r["return"] for r in rows} | {"eval/return_mean": mean}
        if score is not None:
            row |= {f"eval/score/{r['task']}": r["score"] for r in rows} | {"eval/score_mean": score}
        for name in (column for column in rows[0] if column.startswith(("try", "success", "solved"))):
            row |= {f"eval/{name}/{r['task']}": r[name] for r in rows}
            row[f"eval/{name}_mean"] = float(np.mean([r[name] for r in rows]))
        self.log.write(self.steps, self.updates, row)
        self.log.say(
            f"evaluation at {self.steps:,} steps, {self.updates:,} updates, {self.log.minutes:.1f} min: "
            f"mean return {mean:.3f}" + ("" if score is None else f", score {score:.3f}")
        )
        if (mean if score is None else score) > self.best:
            self.best = mean if score is None else score
            self.save("best.pt", everything=False)
        return rows

    def save(self, name: str, everything: bool = True) -> None:
        "checkpoint.pt: all that a resume needs. best.pt: weights and configuration."
        state = {
            "config": dataclasses.asdict(self.config),
            "agent": checkpoint.clean_state_dict(self.agent.state_dict()),
            "counters": {
                "steps": self.steps,
                "updates": self.updates,
                "rollouts": self.rollouts,
                "updates_owed": self.updates_owed,
                "minutes": self.log.minutes,
                "best": self.best,
            },
        }
        if everything:
            state |= {
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "replay": self.replay.state_dict(),
                "rng": checkpoint.rng_state(),
            }
        checkpoint.save(self.folder / name, state)

    def restore(self) -> dict:
        "Continue from checkpoint.pt; returns what the log needs to know of it."
        state = checkpoint.load(self.folder / "checkpoint.pt")
        checkpoint.check_compatible(state["config"], dataclasses.asdict(self.config), MODEL_FIELDS)
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.replay.load_state_dict(state["replay"])
        checkpoint.set_rng_state(state["rng"])
        counters = dict(state["counters"])
        minutes = counters.pop("minutes")
        for name, value in counters.items():
            setattr(self, name, value)
        self.rng = np.random.default_rng([self.config.seed, self.steps])
        print(f"resuming runs/{self.config.name} at env step {self.steps:,}, update {self.updates:,}")
        return {"resume_step": self.steps, "earlier_minutes": minutes}

    def finish(self) -> list[dict]:
        "The last evaluation, its table and the curves; only a checkpoint if the run was interrupted."
        self.save("checkpoint.pt")
        if self.log.stop_signal:
            self.log.say(
                f"saved at env step {self.steps:,}. Go on with:  python train.py --name {self.config.name} --resume"
            )
            sys.exit(128 + self.log.stop_signal)  # the shell's convention
        self.log.say(f"done: evaluating {self.config.final_episodes} rollouts of each task")
        rows = self.evaluate(self.config.final_episodes)
        if rows is None:
            sys.exit(128 + self.log.stop_signal)
        table = format_table(rows)
        (self.folder / "table.txt").write_text(table + "\n")
        self.log.say(table)
        from plot import plot_run  # here, because matplotlib is slow to import and not needed before

        self.log.say(f"curves: {plot_run(self.folder)}")
        return rows

    def close(self) -> None:
        self.log.close()
        self.envs.close()
        if self.replay.frames is not None:
            self.replay.frames.close()


# Fields that decide the shapes of weights, or what they mean: a checkpoint only fits where they agree.
MODEL_FIELDS = (
    *("env", "tasks", "attempts", "store_executed", "clip_rewards", "variant", "gammas"),
    *("encoder", "encoder_hidden", "encoder_dim", "encoder_depths"),
    *("d_model", "d_ff", "layers", "heads", "hidden", "critics", "bins", "bin_low", "bin_high", "symlog"),
)


def load_weights(agent: Agent, config: Config) -> None:
    "Weights of another run's checkpoint, --init."
    state = checkpoint.load(config.init)
    shapes = [f for f in MODEL_FIELDS if f not in ("tasks", "attempts", "store_executed")]
    checkpoint.check_compatible(state["config"], dataclasses.asdict(config), shapes)
    agent.load_state_dict(state["agent"])


def load(path, num_envs: int = 1, device: str = "cpu", greedy: bool = False, seed: int = 0) -> Policy:
    """The policy in a checkpoint (best.pt, checkpoint.pt, or a run's folder), ready to be called.

    `num_envs` environments are played side by side. Raises `checkpoint.CheckpointError`, one line, for a
    missing or damaged file. Loading never runs code from the file.
    """
    path = Path(path)
    state = checkpoint.load(path / "best.pt" if path.is_dir() else path)
    saved = {k: tuple(v) if isinstance(v, list) else v for k, v in state["config"].items()}
    config = Config(**saved)
    agent = Agent(config, *sizes(make_env(**env_arguments(config))))
    agent.load_state_dict(state["agent"])
    return Policy(agent.to(device).eval(), config, num_envs, seed, greedy)


# ------------------------------------------------------------------------------------- the command line


def parse(argv: list[str] | None = None) -> Config:
    """The configuration that `argv` asks for: preset, then scale, then explicit flags. Checks the run's name."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # Which preset and scale are the defaults of all other flags has to be known before they are parsed.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("env", "scale", "name", "device", "variant"):
        first.add_argument(f"--{flag}", default=None)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(argv)
    device = known.device or "auto"
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if known.resume:
        defaults = saved_config(known.name)
    else:
        env = known.env or Config.env
        all_tasks(env)  # says what is wrong with the name before a preset is looked up by it
        scale = known.scale or "auto"
        if scale == "auto":
            scale = "paper" if device.startswith("cuda") else "laptop"
            reason = "a GPU is there" if scale == "paper" else "there is no GPU"
            print(f"scale: {scale}, because {reason} (--scale paper, laptop or smoke overrides)")
        values = preset("gym" if env.startswith("gym:") else env, scale, known.variant or Config.variant)
        defaults = Config(**{"env": env, **values, "scale": scale})
    config = tyro.cli(Config, args=argv, default=defaults)
    replacing = {"device": device, "scale": defaults.scale}
    if config.precision == "auto":
        replacing["precision"] = "bf16" if device.startswith("cuda") else "float32"
    if not config.name:
        stem = config.env.replace(":", "_").replace(",", "_")
        replacing["name"] = f"{stem}_{config.variant}_{config.scale}_{time.strftime('%Y%m%d_%H%M%S')}"
    config = dataclasses.replace(config, **replacing)
    check(config)
    return config


def saved_config(name: str | None) -> Config:
    "The configuration of a run to be resumed."
    if not name:
        raise ValueError("--resume needs the run's name: python train.py --name NAME --resume")
    path = ROOT / "runs" / name / "config.json"
    if not path.exists():
        runs = sorted(p.parent.name for p in path.parent.parent.glob("*/config.json"))
        near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
        raise ValueError(
            f"no run runs/{name} to resume" + (f". Did you mean {', '.join(near)}?" if near else "")
        )
    saved = json.loads(path.read_text())
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})


def check(config: Config) -> None:
    "What is wrong with a configuration in itself, in one line."
    c = config
    if not c.resume and (ROOT / "runs" / c.name / "config.json").exists():
        raise ValueError(f"runs/{c.name} exists: choose another --name, or add --resume to go on with it")
    if (c.replay_steps is None) == (c.replay_trajectories is None):
        raise ValueError("give exactly one of --replay_trajectories and --replay_steps (the other as None)")
    if c.d_model % c.heads:
        raise ValueError(f"--d_model {c.d_model} must be a multiple of --heads {c.heads}")
    at_least_1 = ("steps", "num_envs", "batch_size", "context", "chunk", "segment_length", "action_samples")
    at_least_1 += ("n_step", "layers", "heads", "critics", "log_every", "eval_episodes", "final_episodes")
    for field in at_least_1:
        if getattr(c, field) < 1:
            raise ValueError(f"--{field} must be at least 1, got {getattr(c, field)}")
    for field in ("tau", "epsilon_start", "epsilon_end", "prob_low", "prob_high"):
        if not 0 <= getattr(c, field) <= 1:
            raise ValueError(f"--{field} must lie between 0 and 1, got {getattr(c, field)}")
    if not c.gammas or not all(0 <= g < 1 for g in c.gammas):
        raise ValueError(f"--gammas takes one or more discounts in [0, 1), got {list(c.gammas)}")
    if (c.epsilon_late_start is None) != (c.epsilon_late_end is None):
        raise ValueError("--epsilon_late_start and --epsilon_late_end go together: give both or neither")
    if not 0 < c.popart_beta <= 1:
        raise ValueError(f"--popart_beta must be above 0 and at most 1, got {c.popart_beta}")
    if not c.bin_low < c.bin_high:
        raise ValueError(f"--bin_low {c.bin_low} must lie below --bin_high {c.bin_high}")
    if c.replay_ram <= 0 or (c.max_steps is not None and c.max_steps < 1):
        raise ValueError(f"--replay_ram {c.replay_ram} and --max_steps {c.max_steps} must be above 0")
    if c.minutes is not None and c.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {c.minutes}")
    if c.name != Path(c.name).name:
        raise ValueError(f"--name is a folder's name under runs/, without slashes, got {c.name}")
    if c.env_steps_per_update <= 0:
        raise ValueError(f"--env_steps_per_update must be above 0, got {c.env_steps_per_update}")
    if not c.device.startswith(("cpu", "cuda")):
        raise ValueError(f"--device {c.device} is not known here: say auto, cpu, cuda or cuda:1")
    if c.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {c.device}, but no GPU is there: leave it out, or say --device cpu")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, FramesFull, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
