r"""Train one policy on many tasks at once, without task labels (AMAGO-2, arXiv 2411.11188).

    python train.py --env popgym --variant ind_ind                 # all 27 tasks; laptop scale on a CPU
    python train.py --env popgym --tasks RepeatFirstEasy,HigherLowerEasy --attempts 1 --minutes 4
    python train.py --env gym:CartPole-v1,Acrobot-v1               # any Gymnasium ids with vector observations
    python train.py --name my_run --resume                         # continue a run from its checkpoint

The loop: act, update as often as is owed, step the environments, store ended rollouts, evaluate and save when due.
The gradient step is update.py, the networks are agent.py, all settings are config.py. What keeps a run alive
(checkpoints, log, signals, error texts) is runtime/. Everything a run did can be found again under runs/<name>/.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agent import Agent, Policy
from config import Config, parse
from envs import MultiTaskEnv
from evaluate import load, make_agent
from runtime import distributed
from runtime.captured import CapturedPolicy, CapturedUpdate, compile_networks, pad
from runtime.checkpoint import CheckpointError
from runtime.episode_buffer import EpisodeBuffer, parts
from runtime.memory import in_one_pass, make_replay, with_sizes
from runtime.prefetch import Prefetcher
from runtime.run import Run
from runtime.vector_env import in_processes, make_vector_env
from suites import env_arguments, make_env
from update import update

__all__ = ["Config", "load", "main", "parse"]  # also what other programs import from here

ROOT = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> list[dict] | None:
    """Train as the command line `argv` says (default: the program's own).

    Returns the rows of the last evaluation's table (suites/scores.py), in the first process only. After Ctrl-C or
    SIGTERM it saves and exits. ValueError, OSError or CheckpointError, one line, for a user's mistake.
    """
    with distributed.process_group():
        config = distributed.run_on_first(lambda: parse(argv, ROOT))
        with Run(config, ROOT) as run:
            set_up(run)
            rows = train(run)
    if run.interrupted:  # after the block: several processes leave together
        sys.exit(128 + run.interrupted)  # the shell's convention
    return rows


def set_up(run: Run) -> None:
    """Make the parts of a run. With --resume, `open` restores weights, optimizer, counters and replay, `start` the rest."""
    seeds = run.seeds
    run.env = make_env(**env_arguments(run.config))  # never stepped: it knows the tasks and their sizes
    run.closing.callback(run.env.close)
    config = run.config = with_sizes(run.config, run.env.observation_size, run.env.image_shape, run.device)
    run.replay = make_replay(config, run.env, run.folder, run.device, seeds["replay"])
    run.agent = make_agent(config, run.env).to(run.device)
    run.optimizer, run.schedule = make_optimizer(run.agent, config)
    saved = run.open()  # also locks the folder and opens the log

    run.envs = make_vector_env(
        num_envs=config.num_envs,
        asynchronous=in_processes(config),
        worker_timeout=config.worker_timeout,
        seed=seeds["workers"] + run.steps,  # a resumed run does not draw the same again
        **env_arguments(config),
    )
    # Longer rollouts are cut into segments, at lengths that differ, so that not all segments end at once.
    length, longest = run.replay.max_length, run.env.max_rollout_length
    cuts = None if longest and longest <= length else run.rng
    run.buffer = EpisodeBuffer(config.num_envs, length, run.env.parts, cuts)
    make_policy = CapturedPolicy if config.capture else Policy
    run.policy = make_policy(run.agent, config, config.num_envs, seed=seeds["policy"])
    if config.compile:
        compile_networks(run.agent)
    few_sizes = (config.compile or config.capture) and in_one_pass(config)
    prepare = (lambda batch: pad(batch, config.context)) if few_sizes else None
    run.batches = Prefetcher(run.replay, config.batch_size, config.context, run.device, prepare)
    run.start(saved)


def train(run: Run) -> list[dict] | None:
    """The loop. Returns the rows of the last evaluation's table."""
    config, tasks = run.config, len(run.env.tasks)
    mean = distributed.mean if distributed.world_size() > 1 else None
    learner = (run.agent, run.optimizer, run.schedule)
    step = lambda batch: update(*learner, batch.to(run.device), run.config, tasks, mean)
    step = CapturedUpdate(step, run.agent) if config.capture else step
    while True:
        if run.is_over():
            return run.finish()
        # A checkpoint first: without workers an evaluation steps simulators in this process, which may crash it.
        if run.is_due("save", config.checkpoint_every):
            run.save()
        if run.is_due("evaluate", config.eval_every):
            run.evaluate(config.eval_episodes)
        act(run)
        # After acting, which waits for a GPU, and before the environments step, while a GPU works at these.
        while run.owes_update():
            run.count_update(step(run.batches.next()))
        if not run.must_stop():
            collect(run)


def act(run: Run) -> None:
    """Choose an action in every environment, unless a resumed run has done so already."""
    if run.action_E is None:
        run.action_E = explore(run.policy(run.buffer.newest()), run.epsilon(), run.agent, run.rng)


def collect(run: Run) -> None:
    """Take the chosen actions, one in every environment; ended rollouts and full segments enter the replay."""
    config, buffer, action_E = run.config, run.buffer, run.action_E
    run.action_E, learning = None, run.can_learn()
    obs, reward_E, terminated_E, truncated_E, info = run.envs.step(action_E)
    obs_E, ended_E, lost_E = parts(obs), terminated_E | truncated_E, info["lost"]
    buffer.append(obs_E, reward_E)
    for e in np.flatnonzero(
        lost_E
    ):  # its process died with the segment: `obs_E` is already another rollout's first
        run.begin(e, obs_E)
        run.lost += 1
    for e in np.flatnonzero(ended_E | buffer.full()):
        # Where a rollout has just ended, `obs_E` is already the first observation of the next one. The last of the
        # old one, from which a truncated rollout bootstraps, comes in `info`. No step is spent on the reset.
        if ended_E[e]:
            buffer.end(e, parts(info["final_obs"][e]))
        obs_T, reward_T, start = buffer.segment(e)
        action_T = actions_in(obs_T["vector"], run.env, run.agent)
        last_info = info["final_info"] if ended_E[e] else info
        task, image_T = int(last_info["task_id"][e]), obs_T.get("image")
        run.batches.settle()
        # Truncated is not terminated: its value bootstraps from the last observation. Nor is a cut an end.
        run.replay.add(obs_T["vector"], action_T, reward_T, bool(terminated_E[e]), start, task, image=image_T)
        if ended_E[e]:
            run.count_rollout(last_info, e)
            run.begin(e, obs_E)
        else:  # a cut in a long rollout is no end: the clock runs on
            buffer.start(e, obs_E, time=start + len(reward_T))
    if (ended_E | lost_E).any():
        run.policy.reset(ended_E | lost_E)
    run.steps += config.num_envs * distributed.world_size()
    # Updates per env step accumulate as a fraction. Each of several processes counts its own steps: N processes make
    # one Nth of the updates, from batches N times as large.
    if learning:
        run.updates_owed += config.num_envs / config.env_steps_per_update


def actions_in(obs_TO: np.ndarray, env: MultiTaskEnv, agent: Agent) -> np.ndarray:
    """The actions (T,) or (T, A) of a segment, read from its T+1 observations.

    Each observation shows the action that led to it: after exploration noise and, with --store_executed, the valid
    action that was executed in place of an invalid one.
    """
    shown_TA = obs_TO[1:, env.layout["previous_action"]]
    return shown_TA.argmax(-1) if agent.discrete else shown_TA


def explore(action_E, epsilon_E, agent: Agent, rng: np.random.Generator):
    """Add exploration noise to actions (E,) or (E, A): with probability epsilon a random discrete action, or epsilon
    times a Gaussian on continuous ones, clipped to [-1, 1]."""
    if agent.discrete:
        random_E = rng.integers(agent.action_dim, size=len(action_E))
        return np.where(rng.random(len(action_E)) < epsilon_E, random_E, action_E)
    noise_EA = rng.standard_normal(action_E.shape).astype(np.float32)
    return np.clip(action_E + epsilon_E[:, None].astype(np.float32) * noise_EA, -1.0, 1.0)


# ---------------------------------------------------------------------------------------- the optimizer


class WarmUp:
    """A linear warm-up of an optimizer's learning rate, counted on the device in updates that were made.

    The rate is a tensor in the optimizer's groups: a skipped update must not count, and the host does not know
    which ones are skipped. Source: authors' script.
    """

    def __init__(self, optimizer, learning_rate: float, updates: int):
        self.optimizer, self.learning_rate, self.updates = optimizer, learning_rate, max(1, updates)
        device = optimizer.param_groups[0]["params"][0].device
        self.made, self.rate = torch.zeros((), device=device), torch.zeros((), device=device)
        self.step(torch.zeros((), device=device))

    def step(self, made: Tensor) -> None:
        """Count `made` () more updates, 0 or 1, and set the rate of the next one."""
        self.made += made
        self.rate.copy_(self.learning_rate * ((self.made + 1) / self.updates).clamp(max=1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    def state_dict(self) -> dict:
        """How many updates were made."""
        return {"made": self.made}

    def load_state_dict(self, state: dict) -> None:
        """Continue after as many updates as `state` counts; the learning rate is this object's own."""
        self.made.copy_(state["made"])
        self.step(torch.zeros_like(self.made))


def make_optimizer(agent: Agent, config) -> tuple[torch.optim.Optimizer, WarmUp]:
    """AdamW on the parameters that learn, and its warm-up. Source: Table 1; warm-up: authors' script."""
    learning = [p for p in agent.parameters() if p.requires_grad]
    # Fused, because that version reads found_inf, by which an update is skipped.
    on_gpu = learning[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(learning, weight_decay=config.weight_decay, fused=True, capturable=on_gpu)
    return optimizer, WarmUp(optimizer, config.learning_rate, config.warmup_updates)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"error: {error}")
