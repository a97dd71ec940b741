r"""Watching a policy think: one rollout, and what it attended to, expected and did at each step of it.

What     `play` a rollout with a trained policy; `attend`: the attention weights of every layer and head, and
         the states they lead to; `judge`: what the critics thought of each action; `draw_attention` all of it
Why      whether a memory is used is a picture, not a number: a task that asks for what was seen three steps
         ago draws a diagonal, one that asks for the first card a line down from step 0
Paper    none; the critic's bins over time are its Figure 7 (centre) for one rollout instead of one training
Shapes   T steps of a rollout, H heads, E = D / H, D state width, C critics, G discounts, N bins, A action,
         K action samples. A layer's weights (H, T, T): from the step that looks (row) to the step that is
         looked at (column), each row sums to 1
Notes    The model's own weights, through the model's own projections: with the attention in between written
         out, states equal those that acted, also past the context, where each layer forgets by itself.
         Two-hot critic: the mean of the C softmaxes over bins. Scalar critic: a line a discount.
         Advantages are those of the acting policy, over its expectation: exact over discrete actions, over
         K = 64 samples of continuous ones, where training takes 3. Nothing learns here.
"""

import math
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from agent import Policy, TwoHotValue
from envs import nearest
from evaluate import find_checkpoint, load
from plots.curves import STYLES
from runtime.episode_buffer import parts
from twohot import BinSupport, symexp

MOST_STEPS = 1000  # that are played and drawn: a picture has no more rows than that to show them in
SAMPLES = 64  # K: of continuous actions behind an expectation
LEAST = 0.01  # of the probability, in any step: bins with less are not drawn


class Rollout(NamedTuple):
    """What was lived: `obs` {part: (T, ...)}, `action` (T,) or (T, A) as the replay would store it, `reward_T`
    as learning sees it before its multiplier, `start_T` True where an attempt begins; `terminated` as the
    task says; `total`, the counted return, None if the rollout is not over."""

    task: str
    obs: dict[str, Tensor]
    action: Tensor
    reward_T: Tensor
    start_T: Tensor
    terminated: bool
    total: float | None


class Judgement(NamedTuple):
    """Values (T, G) of the actions taken, their probabilities over bins (T, G, N) or None (scalar critic), and
    the acting discount's advantages (T,). In scaled returns, as the critics have them."""

    value_TG: Tensor
    bins_TGN: Tensor | None
    advantage_T: Tensor


def play(policy: Policy, env, task: str, seed: int = 0, most: int = MOST_STEPS) -> Rollout:
    """One rollout of `task` without exploration noise, or its first `most` steps. ValueError: no such task."""
    if task not in env.tasks:
        raise ValueError(f"not trained on task '{task}'. Did you mean {nearest(task, env.tasks)}?")
    # Seeds as in an evaluation: variants that training has never drawn.
    obs, info = env.reset(seed=10**9 + seed * 10**6, options={"task": task})
    policy.reset()
    seen, rewards = [parts(obs)], []
    while "return" not in info and len(rewards) < most:
        obs, reward, terminated, _, info = env.step(policy(obs))
        seen.append(parts(obs))
        rewards.append(reward)
    stacked = {name: torch.as_tensor(np.stack([obs[name] for obs in seen])) for name in seen[0]}
    # The action that a step led to is what the next observation shows as its previous one: with
    # --store_executed not always the one that the policy chose.
    shown = stacked["vector"][1:, env.layout["previous_action"]]
    return Rollout(
        task,
        {name: value[:-1] for name, value in stacked.items()},
        shown.argmax(-1) if policy.agent.discrete else shown,
        torch.tensor(rewards, dtype=torch.float32),
        stacked["vector"][:-1, env.layout["attempt_start"]].squeeze(-1) > 0,
        terminated,
        info.get("return"),
    )


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
    """How much weight each head gives to what lies 0, 1, 2, ... steps back: means over all steps with so much
    past, (H, T / 2). Further back, fewer than half of the steps have a past, and a mean would say little."""
    ages = range((weight_HTT.shape[-1] + 1) // 2)
    return torch.stack([weight_HTT.diagonal(-age, 1, 2).mean(-1) for age in ages], dim=-1)


@torch.no_grad()
def judge(agent, h_TD: Tensor, action: Tensor, seed: int = 0) -> Judgement:
    """What the critics think of the actions (T,) or (T, A) that were taken in the states (T, D)."""
    value, taken_T1A = agent.value, agent.action_vectors(action).unsqueeze(1)
    twohot, policy = isinstance(value, TwoHotValue), agent.policy(agent.actor(h_TD))

    def values(outputs: Tensor) -> Tensor:
        "Critics' outputs (C, ..., G, N) or (C, ..., G) -> values (..., G), the mean over critics."
        decoded = value.support.decode(outputs) if twohot else agent.popart.denormalised(outputs)
        return decoded.mean(0)

    def of_actions(action_TGA: Tensor) -> Tensor:
        "Outputs for one action a state, as `values` takes them."
        if agent.discrete and not twohot:
            return (value.critics(h_TD) * action_TGA).sum(-1)
        outputs = value.critics(h_TD, action_TGA)
        return outputs if twohot else outputs.squeeze(-1)

    outputs = of_actions(taken_T1A)
    value_TG = values(outputs)
    if agent.discrete:
        # A = sum_a pi(a) (Q(taken) - Q(a)): exactly 0 where the policy always takes the taken action
        q_TA = action_values(agent, h_TD)
        q_T1 = q_TA.gather(-1, action.unsqueeze(-1))
        advantage_T = (policy.probs[:, -1] * (q_T1 - q_TA)).sum(-1)
    else:
        # Eq. 4:  A = Q(h_t, a_t) - E_{a' ~ pi(h_t)}[Q(h_t, a')].  One sample at a time, for memory's sake
        generator = torch.Generator(h_TD.device).manual_seed(seed)
        drawn = (policy.sample(1, generator=generator)[0] for _ in range(SAMPLES))
        advantage_T = sum(value_TG - values(of_actions(action_TGA)) for action_TGA in drawn)[:, -1] / SAMPLES
    return Judgement(value_TG, outputs.softmax(-1).mean(0) if twohot else None, advantage_T)


def action_values(agent, h_TD: Tensor) -> Tensor:
    """Values (T, A) of every discrete action for the acting discount, the mean over critics."""
    value, (steps, actions, last) = agent.value, (len(h_TD), agent.action_dim, len(agent.gamma_G) - 1)
    if not isinstance(value, TwoHotValue):
        raw_CTAG = value.critics(h_TD).transpose(-1, -2)
        return agent.popart.denormalised(raw_CTAG)[..., last].mean(0)
    t_M = torch.arange(steps, device=h_TD.device).repeat_interleave(actions)
    a_M = torch.arange(actions, device=h_TD.device).repeat(steps)
    q_CM = value.support.decode(value.critics.chosen(h_TD, t_M, torch.full_like(t_M, last), a_M))
    return q_CM.mean(0).view(steps, actions)


# -------------------------------------------------------------------------------------------- drawing


def draw_attention(run: str, task: str | None = None, seed: int = 0) -> tuple[Figure, Path]:
    """One rollout of the run (folder or checkpoint) as a figure, and the folder that it belongs into.

    `task` is the run's first unless given. Prints which head looks where. ValueError and CheckpointError,
    one line, for no such run or task.
    """
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {seed}")
    path = find_checkpoint(run)
    policy = load(path, seed=seed)
    agent, config, env = policy.agent, policy.config, policy.make_env()
    rollout = play(policy, env, task or env.tasks[0], seed)
    env.close()
    with torch.no_grad():
        x_TI = agent.embed(rollout.obs["vector"], rollout.obs.get("image"))
    weights, h_TD = attend(agent.transformer, x_TI, config.context)
    judged = judge(agent, h_TD, rollout.action, seed)
    steps, starts = len(rollout.reward_T), rollout.start_T.nonzero().flatten().tolist()[1:]
    others = [name for name in env.tasks if name != rollout.task]
    hint = f" (others: --task {', '.join(others[:5])}{', ...' if len(others) > 5 else ''})" if others else ""
    print(f"{rollout.task}, {steps} steps{hint}")

    values = 1 if judged.bins_TGN is None else len(config.gammas)
    rows = -(-len(weights) // 2)
    heights = (2.6 * rows + 0.3, 1.35 * (values + 2) + 0.5)
    figure = Figure(figsize=(11.5, sum(heights) + 0.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=heights)
    axes = list(top.subplots(rows, 4 if len(weights) > 1 else 2, squeeze=False).flat)
    for layer, weight_HTT in enumerate(weights, 1):
        draw_weights(axes.pop(0), weight_HTT, starts, f"layer {layer}, mean of its heads")
        share_HT = weight_by_age(weight_HTT)
        draw_ages(axes.pop(0), share_HT, f"layer {layer}, head by head")
        head, age = divmod(int(share_HT.argmax()), share_HT.shape[1])
        share = share_HT[head, age]
        print(f"layer {layer}: head {head + 1} gives {share:.2f} of its weight to the step {age} back")
    for axis in axes:
        axis.set_visible(False)
    axes = bottom.subplots(values + 2, 1, sharex=True)
    if judged.bins_TGN is None:
        draw_values(axes[0], judged.value_TG / config.reward_scale, config.gammas)
    else:
        for g, axis in enumerate(axes[:-2]):
            draw_bins(axis, rollout, judged, g, agent.value.support, config)
    draw_actions(axes[-2], axes[-1], rollout, judged.advantage_T / config.reward_scale)
    for axis in axes:
        for step in starts:
            axis.axvline(step, color="black", linestyle=(0, (4, 2)), linewidth=0.9)
    axes[-1].set_xlim(0, steps)
    axes[-1].set_xlabel("env step of the rollout", fontsize=8)
    title = f"{path.parent.name}: {rollout.task}, seed {seed}, "
    title += f"the first {steps} steps" if rollout.total is None else f"return {rollout.total:.3f}"
    figure.suptitle(title + ("; dashed: a new attempt begins" if starts else ""), fontsize=10)
    return figure, path.parent


def describe(axis, title: str, y: str, x: str | None = None, bar=None, unit: str = "", **place) -> None:
    "Title, axes' labels and, of a heat map, a colour bar at its `place`."
    axis.set_title(title, fontsize=8)
    axis.set_ylabel(y, fontsize=7)
    if x:
        axis.set_xlabel(x, fontsize=7)
    axis.tick_params(labelsize=7)
    if bar is not None:
        bar = axis.figure.colorbar(bar, ax=axis, **place)
        bar.ax.tick_params(labelsize=6)
        bar.set_label(unit, fontsize=7)


def draw_weights(axis, weight_HTT: Tensor, starts: list[int], title: str) -> None:
    """Heat map of a layer's weights (H, T, T), the mean over heads: who looks (down), at what (across)."""
    weight_TT = weight_HTT.mean(0).numpy()
    # The square root of the weight: a tenth of the attention is still visible.
    mesh = axis.pcolormesh(weight_TT, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=weight_TT.max()))
    for line in [draw(step) for step in starts for draw in (axis.axvline, axis.axhline)]:
        line.set(color=STYLES[1][0], linestyle=STYLES[1][1], linewidth=0.8)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    axes = {"y": "env step that looks", "x": "env step looked at"}
    describe(axis, title, **axes, bar=mesh, unit="weight", shrink=0.65, pad=0.02)


def draw_ages(axis, share_HT: Tensor, title: str) -> None:
    """How far back each head looks: `weight_by_age` (H, T / 2), up to four times the age of the highest peak."""
    shown = min(share_HT.shape[1], max(16, 4 * (int(share_HT.argmax()) % share_HT.shape[1]) + 1))
    look = {"marker": "o" if shown <= 60 else None, "markersize": 2, "linewidth": 1.1}
    for head, (share_T, (color, dash)) in enumerate(zip(share_HT, cycle(STYLES)), 1):
        axis.plot(np.arange(shown), share_T[:shown], color=color, linestyle=dash, label=f"{head}", **look)
    axis.set_ylim(0, 1.02)
    axis.set_box_aspect(1)
    axis.xaxis.get_major_locator().set_params(integer=True)
    describe(axis, title, "mean weight", "env steps back")
    axis.legend(title="head", fontsize=6, title_fontsize=6, frameon=False, ncols=2)


def draw_bins(axis, rollout: Rollout, judged: Judgement, g: int, support: BinSupport, config) -> None:
    """The probabilities that the critics give to each bin, step by step, for one discount.

    With the value that they decode to and, where the task is over, the discounted return that followed.
    """
    p_TN, scale, gamma = judged.bins_TGN[:, g].numpy(), config.reward_scale, config.gammas[g]
    returns = {"value": judged.value_TG[:, g]}
    if rollout.terminated:
        returns["what followed"] = discounted(rollout.reward_T * scale, gamma)
    at = {name: (support.transform(x) - support.first) / support.width for name, x in returns.items()}
    # Shown are the bins that are likely in any step, and those that the lines pass through.
    used = [
        *np.flatnonzero(p_TN.max(0) > LEAST),
        *(int(end.round()) for x in at.values() for end in x.aminmax()),
    ]
    low, high, time_T = min(used), max(used), np.arange(len(p_TN) + 1)
    rows, norm = np.arange(low, high + 2) - 0.5, PowerNorm(0.5, vmin=0, vmax=1)
    mesh = axis.pcolormesh(time_T, rows, p_TN[:, low : high + 1].T, cmap="Greys", norm=norm)
    look = {"linewidth": 1.2, "path_effects": [withStroke(linewidth=2.6, foreground="white")]}
    for (name, bin_T), (color, dash) in zip(at.items(), STYLES):
        axis.plot(time_T[:-1] + 0.5, bin_T, color=color, linestyle=dash, label=name, **look)
    axis.set_ylim(rows[0], rows[-1])
    returns_N = (symexp(support.bins_N) if support.use_symlog else support.bins_N) / scale
    ticks = np.arange(low, high + 1, max(1, -(-(high + 1 - low) // 6)))
    axis.set_yticks(ticks, [f"{returns_N[i]:.2g}" for i in ticks])
    title = "" if g else "probabilities of the critic's bins, for the action taken"
    label = f"return,\ndiscount {gamma:g}"
    describe(axis, title, label, bar=mesh, unit="probability", pad=0.01, fraction=0.02)
    if g == 0:
        axis.legend(fontsize=6, ncols=2, loc="lower left")


def discounted(reward_T: Tensor, gamma: float) -> Tensor:
    """The discounted return (T,) from each step on, of rewards (T,) up to the rollout's end."""
    followed_T, total = torch.zeros_like(reward_T), 0.0
    for t in reversed(range(len(reward_T))):
        total = followed_T[t] = reward_T[t] + gamma * total
    return followed_T


def draw_values(axis, value_TG: Tensor, gammas) -> None:
    """A scalar critic's values (T, G), a line a discount, in units of return."""
    for value_T, gamma, (color, dash) in zip(value_TG.T, gammas, cycle(STYLES)):
        axis.plot(np.arange(len(value_T)) + 0.5, value_T, color=color, linestyle=dash, label=f"{gamma:g}")
    axis.legend(title="discount", fontsize=6, title_fontsize=6, ncols=len(gammas))
    describe(axis, "value of the action taken", "value, return")


def draw_actions(upper, lower, rollout: Rollout, advantage_T: Tensor) -> None:
    """The actions taken, below them their advantages (T,): filled where the filter would let an action through."""
    time_T, passed_T = np.arange(len(advantage_T)) + 0.5, (advantage_T > 0).numpy()
    look = {"s": 9 if len(time_T) <= 200 else 3, "edgecolors": STYLES[0][0], "linewidths": 0.7, "zorder": 3}
    look["facecolors"] = np.where(passed_T, STYLES[0][0], "white")
    if rollout.action.ndim == 1:
        upper.scatter(time_T, rollout.action, **look)
        upper.yaxis.get_major_locator().set_params(integer=True)
        upper.margins(y=0.2)
    else:
        for a, (action_T, (color, dash)) in enumerate(zip(rollout.action.T, cycle(STYLES))):
            upper.plot(time_T, action_T, color=color, linestyle=dash, linewidth=0.9, label=f"{a}")
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
        upper.legend(title="dimension", fontsize=6, title_fontsize=6, **place)
    describe(upper, "action taken", "action" if rollout.action.ndim == 1 else "action, -1 to 1")
    lower.axhline(0, color="0.6", linewidth=0.8)
    lower.vlines(time_T, 0, advantage_T, color="0.75", linewidth=0.8)
    lower.scatter(time_T, advantage_T, **look)
    count = f"{passed_T.sum()} of {len(time_T)}"
    title = f"advantage over the acting policy's expectation. Filled: above 0, the filter would let it through ({count})"
    describe(lower, title, "advantage,\nreturn")
