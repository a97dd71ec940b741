r"""The binary filter in behaviour cloning on a fixed data set of mixed quality.

    python examples/filtered_cloning.py              # 15 seconds on one core

The data are random actions in CartPole-v1: the pole falls after about 22 steps, and half of the actions are
wrong. Two policies learn from the data without playing:

    cloning    loss = -log pi(a | s)                        imitates all actions
    filtered   loss = -1{ A(s, a) > 0 } log pi(a | s)       imitates actions with a positive advantage

The filter is one line (crr_actor.py), but it needs a critic, which learns one-step targets from the same
data. Returns are means over 20 rollouts; the largest possible return is 500.
"""

import argparse
import copy
import functools
import sys
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from critics import move_target, td_target
from crr_actor import ActorHead, Categorical, advantage, crr_loss

GAMMA_1 = torch.tensor([0.98])


def play(env: gymnasium.Env, choose, rollouts: int) -> tuple[list[float], list[tuple]]:
    """The returns of some rollouts, and their steps (state, action, reward, next state, terminated)."""
    returns, steps = [], []
    for seed in range(rollouts):
        state, _ = env.reset(seed=seed)
        over, returns = False, [*returns, 0.0]
        while not over:
            action = choose(state)
            after, reward, terminated, truncated, _ = env.step(action)
            steps.append((state, action, reward, after, terminated))
            state, over, returns[-1] = after, terminated or truncated, returns[-1] + reward
    return returns, steps


def train(data: list[Tensor], filtered: bool, updates: int) -> tuple[ActorHead, float]:
    """Train a policy on the data; returns it and the share of actions that its last update imitated."""
    actor = ActorHead(4, features=2, discounts=1, hidden=(64, 64))
    critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target, share = copy.deepcopy(critic), 1.0
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    for _ in range(updates):
        row_S = torch.randint(len(data[0]), (256,))
        state_SD, action_S, reward_S, after_SD, over_S = (x[row_S] for x in data)
        action_S1A = F.one_hot(action_S, 2).float().unsqueeze(1)
        policy = Categorical(actor(state_SD))  # (S, 1, A): one policy for the one discount
        log_prob_S1 = policy.log_prob(action_S1A)
        loss = -log_prob_S1.mean()
        if filtered:
            with torch.no_grad():
                probs_SA = Categorical(actor(after_SD)).probs.squeeze(1)
                next_S1 = (probs_SA * target(after_SD)).sum(-1, keepdim=True)
                y_S1 = td_target(reward_S, over_S, next_S1, GAMMA_1)
            q_S1A = critic(state_SD).unsqueeze(1)
            q_S1 = (q_S1A * action_S1A).sum(-1)
            kept_S1, metrics = crr_loss(log_prob_S1, advantage(q_S1, (q_S1A * policy.sample(4)).sum(-1)))
            loss, share = kept_S1.mean() + (q_S1 - y_S1).square().mean(), metrics["filter"].mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move_target(target, critic, tau=0.01)
    return actor, share


def main(updates: int) -> dict[str, float]:
    """Collect data, train both policies, print their returns, and return the returns by name."""
    torch.manual_seed(0)
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(0)
    returns, steps = play(env, lambda state: int(rng.integers(2)), 500)
    print(
        f"{len(steps)} steps of random actions: mean return {np.mean(returns):.0f}, best {max(returns):.0f}"
    )
    state_SD, action_S, reward_S, after_SD, over_S = (torch.tensor(np.array(x)) for x in zip(*steps))
    data, table = [state_SD, action_S, reward_S.float(), after_SD, over_S], {"data": np.mean(returns).item()}
    for name, filtered in (("cloning", False), ("filtered", True)):
        actor, share = train(data, filtered, updates)

        @torch.no_grad()
        def choose(state, greedy: bool, actor=actor) -> int:
            policy = Categorical(actor(torch.tensor(state)))
            return int((policy.mode() if greedy else policy.sample(1)).argmax())

        for choice, greedy in (("sampled", False), ("likeliest", True)):
            returns, _ = play(env, functools.partial(choose, greedy=greedy), 20)
            table[f"{name}, {choice}"] = np.mean(returns).item()
        print(f"{name:<9} imitates {share:>4.0%} of the actions; mean return with sampled actions", end="")
        print(f"{table[f'{name}, sampled']:>4.0f}, with the most probable{table[f'{name}, likeliest']:>4.0f}")
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--updates", type=int, default=1000, help="updates of each policy, with batches of 256 steps"
    )
    main(parser.parse_args().updates)
