r"""One rollout of a trained policy: what it attended to, what it expected, and how it acted.

What     `play` a rollout; `attend`: the attention weights of every layer and head, and the states they lead to;
         `judge`: the critics' values of the actions taken; `plot_attention` draws all of it
Why      a picture shows whether a memory is used: a task that asks for the observation of three steps ago
         draws a diagonal, one that asks for the first observation a vertical line at step 0
Paper    none. The critic's bins over time are Figure 7 (centre) for one rollout instead of one training
Shapes   T steps of a rollout, H heads, E = D / H, D state width, C critics, G discounts, N bins, A action,
         K action samples. A layer's weights are (H, T, T), from the attending step (row) to the attended
         step (column); each row sums to 1
Notes    The weights are the model's own, through its own projections. Attention is written out in between, and
         the states equal those that acted, also past the context, where each layer forgets separately.
         Two-hot critic: the mean of the C softmaxes over bins. Scalar critic: a line for each discount.
         Advantages are those of the acting policy, over its expectation: exact over discrete actions, over
         K = 64 samples of continuous ones, where training takes 3
"""

import math
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from agent import Policy, TwoHotValue
from config import prepare_torch
from evaluate import find_checkpoint, load
from plots.style import bin_map, bin_position, heat_map, save, styled
from runtime.episode_buffer import parts
from runtime.vector_env import seed_globals
from suites import nearest
from twohot import BinSupport

MOST_STEPS = 1000  # are played and drawn; a picture has too few rows of pixels for more
SAMPLES = 64  # K: of continuous actions, behind an expectation
LEAST = 0.01  # bins whose probability stays below this in all steps are not drawn


class Rollout(NamedTuple):
    """One rollout: `obs` {part: (T, ...)}, `action` (T,) or (T, A) as the replay would store it, `reward_T`
    as learning sees it before its multiplier, `start_T` True where an attempt begins; `terminated` by the
    task; `total`, the return that counts, None if the rollout is not over."""

    task: str
    obs: dict[str, Tensor]
    action: Tensor
    reward_T: Tensor
    start_T: Tensor
    terminated: bool
    total: float | None


class Judgement(NamedTuple):
    """Values (T, G) of the actions taken, their probabilities over bins (T, G, N) or None (scalar critic), and
    advantages (T,) for the acting discount. In scaled returns, as the critics see them."""

    value_TG: Tensor
    bins_TGN: Tensor | None
    advantage_T: Tensor


def play(policy: Policy, env, task: str, seed: int = 0, most: int = MOST_STEPS) -> Rollout:
    """One rollout of `task` without exploration noise, or its first `most` steps. ValueError: no such task."""
    if task not in env.tasks:
        raise ValueError(f"not trained on task '{task}'. Did you mean {nearest(task, env.tasks)}?")
    # Seeds as in an evaluation: variants that training never draws.
    obs, info = env.reset(seed=10**9 + seed * 10**6, options={"task": task})
    policy.reset()
    seen, rewards = [parts(obs)], []
    while "return" not in info and len(rewards) < most:
        obs, reward, terminated, _, info = env.step(policy(obs))
        seen.append(parts(obs))
        rewards.append(reward)
    obs = {name: torch.as_tensor(np.stack([obs[name] for obs in seen])) for name in seen[0]}
    start_T = obs["vector"][:-1, env.layout["attempt_start"]].squeeze(-1) > 0
    # An action is read from the next observation, which shows it as the previous one: with --store_executed
    # it is not always the one that the policy chose.
    shown = obs["vector"][1:, env.layout["previous_action"]]
    action = shown.argmax(-1) if policy.agent.discrete else shown
    obs, reward_T = (
        {name: part[:-1] for name, part in obs.items()},
        torch.tensor(rewards, dtype=torch.float32),
    )
    return Rollout(task, obs, action, reward_T, start_T, terminated, info.get("return"))


@torch.no_grad()
def attend(transformer, x_TI: Tensor, context: int) -> tuple[list[Tensor], Tensor]:
    """Inputs (T, I) of a rollout from its start -> each layer's weights (H, T, T), and the states (T, D).

    `context` L is what acting remembers: a step sees itself and the L - 1 before it, in every layer.
    """
    time_T = torch.arange(len(x_TI), device=x_TI.device)
    back_TT = time_T[:, None] - time_T  # how long ago
    unseen_TT = (back_TT < 0) | (back_TT >= context)
    x_TD, weights = transformer.embed(x_TI, time_T), []
    for block in transformer.blocks:
        q_HTE, k_HTE, v_HTE = (part.transpose(0, 1) for part in block.queries_keys_values(x_TD))
        # Eq. 1 of Vaswani et al.:  softmax(Q K^T / sqrt(E)) V
        scores_HTT = q_HTE @ k_HTE.mT / math.sqrt(q_HTE.shape[-1])
        weight_HTT = scores_HTT.masked_fill(unseen_TT, -math.inf).softmax(-1)
        x_TD = block.after_attention(x_TD, (weight_HTT @ v_HTE).transpose(0, 1))
        weights.append(weight_HTT)
    return weights, transformer.norm(x_TD)


def weight_by_age(weight_HTT: Tensor) -> Tensor:
    """The mean weight that each head gives to the step 0, 1, 2, ... steps back, (H, T / 2).

    Means over all steps with so much past. Further back than T / 2, fewer than half of the steps have one.
    """
    ages = range((weight_HTT.shape[-1] + 1) // 2)
    return torch.stack([weight_HTT.diagonal(-age, 1, 2).mean(-1) for age in ages], dim=-1)


@torch.no_grad()
def judge(agent, h_TD: Tensor, action: Tensor, seed: int = 0) -> Judgement:
    """The critics' judgement of the actions (T,) or (T, A) that were taken in the states (T, D)."""
    value, taken_T1A = agent.value, agent.action_vectors(action).unsqueeze(1)
    twohot, policy = isinstance(value, TwoHotValue), agent.policy(agent.actor(h_TD))

    def values(action_TGA: Tensor) -> Tensor:
        "Values (T, G) of one action in each state, the mean over critics."
        if twohot:
            return value.support.decode(value.critics(h_TD, action_TGA)).mean(0)
        return agent.popart.denormalised(value.raw(h_TD, action_TGA)).mean(0)

    if agent.discrete:
        one_hots = torch.eye(agent.action_dim, device=h_TD.device)
        weighted = ((p_T, a.repeat(len(h_TD), 1, 1)) for p_T, a in zip(policy.probs[:, -1].T, one_hots))
    else:
        generator = torch.Generator(h_TD.device).manual_seed(seed)
        weighted = ((1 / SAMPLES, policy.sample(1, generator=generator)[0]) for _ in range(SAMPLES))
    value_TG = values(taken_T1A)
    # Eq. 4:  A = Q(h_t, a_t) - E_{a' ~ pi(h_t)}[Q(h_t, a')]
    # As a mean of differences it is exactly 0 where the policy always takes the taken action. One action at
    # a time, for memory's sake.
    advantage_T = sum(p_T * (value_TG - values(action_TGA))[:, -1] for p_T, action_TGA in weighted)
    bins_TGN = value.critics(h_TD, taken_T1A).softmax(-1).mean(0) if twohot else None
    return Judgement(value_TG, bins_TGN, advantage_T)


def discounted(reward_T: Tensor, gamma: float) -> Tensor:
    """The discounted return (T,) from each step on, of rewards (T,) up to the rollout's end."""
    followed_T, total = torch.zeros_like(reward_T), 0.0
    for t in reversed(range(len(reward_T))):
        total = followed_T[t] = reward_T[t] + gamma * total
    return followed_T


# -------------------------------------------------------------------------------------------- drawing


@styled
def plot_attention(run: str, task: str | None = None, seed: int = 0, out: str | Path | None = None) -> Path:
    """Draw one rollout of the run (folder or checkpoint); returns the path of the picture.

    `task` is the run's first unless given; the picture goes to attention.png in the run's folder unless `out`
    is given. Prints the largest weight of each layer. ValueError and CheckpointError, one line, for no such
    run or task.
    """
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {seed}")
    path = find_checkpoint(run)
    torch.manual_seed(seed_globals(seed))
    policy = load(path, seed=seed)
    agent, config, env = policy.agent, policy.config, policy.make_env()
    prepare_torch(config.threads)
    with closing(env):
        rollout = play(policy, env, task or env.tasks[0], seed)
    with torch.no_grad():
        x_TI = agent.embed(rollout.obs["vector"], rollout.obs.get("image"))
    weights, h_TD = attend(agent.transformer, x_TI, config.context)
    judged = judge(agent, h_TD, rollout.action, seed)
    steps, starts = len(rollout.reward_T), rollout.start_T.nonzero().flatten().tolist()[1:]
    others = ", ".join(name for name in env.tasks if name != rollout.task)
    print(f"{rollout.task}, {steps} steps" + (f" (others: --task {others})" if others else ""))

    rows = 3 if judged.bins_TGN is None else len(config.gammas) + 2
    figure = Figure(figsize=(11.5, 2.6 * len(weights) + 1.35 * rows + 1.4))
    upper, lower = figure.subfigures(2, 1, height_ratios=(2 * len(weights), rows))
    maps, ages = upper.subplots(len(weights), 2, squeeze=False, width_ratios=(2, 3)).T
    for layer, (left, right, weight_HTT) in enumerate(zip(maps, ages, weights), 1):
        draw_layer(left, right, weight_HTT, layer)
    axes = lower.subplots(rows, 1, sharex=True)
    if judged.bins_TGN is None:
        axes[0].plot(np.arange(steps) + 0.5, judged.value_TG / config.reward_scale, label=config.gammas)
        axes[0].set(title="value of the action taken, by discount", ylabel="value, return")
    else:
        for g, axis in enumerate(axes[:-2]):
            draw_bins(axis, rollout, judged, g, agent.value.support, config)
        axes[0].set_title("probabilities of the critic's bins, for the action taken")
    axes[0].legend(ncols=2, loc="lower left", frameon=True)
    draw_actions(axes[-2], axes[-1], rollout, judged.advantage_T / config.reward_scale)
    for step in starts:
        for axis in (*maps, *axes):
            axis.axvline(step, color="black", linestyle=(0, (4, 2)), linewidth=0.9)
    axes[-1].set(xlim=(0, steps), xlabel="env step of the rollout")
    end = f"the first {steps} steps" if rollout.total is None else f"return {rollout.total:.3f}"
    figure.suptitle(f"{path.parent.name}: {rollout.task}, seed {seed}, {end}; dashed: a new attempt begins")
    return save(figure, out or path.parent / "attention.png")


def draw_layer(left, right, weight_HTT: Tensor, layer: int) -> None:
    """A layer's weights (H, T, T): the mean over heads as a heat map; the age of the steps that each head attends to.

    Ages are shown up to four times that of the highest peak. Prints the peak.
    """
    edges = np.arange(weight_HTT.shape[-1] + 1)
    heat_map(left, edges, edges, weight_HTT.mean(0).numpy(), "weight", pad=0.02)
    left.set(title=f"layer {layer}, mean of its heads", aspect="equal", ylim=(edges[-1], 0))
    left.set(ylabel="attending env step", xlabel="attended env step")
    share_HT = weight_by_age(weight_HTT)
    head, age = divmod(int(share_HT.argmax()), share_HT.shape[1])
    share = share_HT[head, age]
    print(f"layer {layer}: head {head + 1} gives {share:.2f} of its weight to the step {age} back")
    right.plot(share_HT.T, marker=".", label=range(1, len(share_HT) + 1))
    right.set(title=f"layer {layer}, head by head", xlim=(-0.5, max(16, 4 * age)), ylim=(0, 1.02))
    right.set(ylabel="mean weight", xlabel="env steps back")
    right.legend(title="head", ncols=2)


def draw_bins(axis, rollout: Rollout, judged: Judgement, g: int, support: BinSupport, config) -> None:
    """The probabilities that the critics give to each bin, step by step, for discount `g`.

    Lines: the value that they decode to and, if the task has ended, the discounted return that followed.
    """
    p_TN, scale, gamma = judged.bins_TGN[:, g].numpy(), config.reward_scale, config.gammas[g]
    returns = {"value": judged.value_TG[:, g]}
    if rollout.terminated:
        returns["discounted return"] = discounted(rollout.reward_T * scale, gamma)
    lines = {name: bin_position(support, return_T) for name, return_T in returns.items()}
    # Drawn are the bins that are likely in any step, and those that the lines pass through.
    used = [*np.flatnonzero(p_TN.max(0) > LEAST), *torch.cat(list(lines.values())).round().int().tolist()]
    time_T = np.arange(len(p_TN) + 1)
    bin_map(axis, time_T, p_TN, used, support, scale, "probability", pad=0.01, fraction=0.02)
    # These two colours are visible on white and on black.
    for (name, bin_T), color in zip(lines.items(), ("C1", "C6")):
        axis.plot(time_T[:-1] + 0.5, bin_T, color=color, label=name)
    axis.set_ylabel(f"return,\ndiscount {gamma:g}")


def draw_actions(upper, lower, rollout: Rollout, advantage_T: Tensor) -> None:
    """The actions taken and, below, their advantages (T,): filled where the filter lets an action through."""
    time_T, passed_T = np.arange(len(advantage_T)) + 0.5, (advantage_T > 0).numpy()
    dots = {"s": 6, "edgecolors": "C0", "facecolors": np.where(passed_T, "C0", "white"), "zorder": 3}
    if rollout.action.ndim == 1:
        upper.scatter(time_T, rollout.action, **dots)
        upper.yaxis.get_major_locator().set_params(integer=True)
    else:
        upper.plot(time_T, rollout.action, linewidth=0.9, label=range(rollout.action.shape[1]))
        upper.legend(title="dimension", loc="center left", bbox_to_anchor=(1.0, 0.5))
    upper.set(title="action taken", ylabel="action", ymargin=0.2)
    lower.axhline(0, color="0.6", linestyle="-", linewidth=0.8)
    lower.vlines(time_T, 0, advantage_T, color="0.75", linewidth=0.8)
    lower.scatter(time_T, advantage_T, **dots)
    passed = f"filled: above 0, passes the filter ({passed_T.sum()} of {len(time_T)})"
    title = f"advantage over the acting policy's expectation; {passed}"
    lower.set(title=title, ylabel="advantage,\nreturn")
