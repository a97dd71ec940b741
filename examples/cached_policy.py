r"""The cached Transformer as a policy in a Gymnasium loop: the actions of the full forward pass, faster.

    python examples/cached_policy.py              # five seconds on one core
    python examples/cached_policy.py --quick      # rollouts of 200 steps instead of 500

A policy that remembers its whole rollout of Pendulum-v1 computes every action in two ways:

    cached   one step of the Transformer, which keeps the keys and values of earlier steps (transformer.py)
    full     a forward pass over the whole history at every step, the simplest implementation

Two rollouts follow each other: `reset` clears the cache, and the second rollout starts at time 0. Nothing is
trained: agreement and speed do not depend on the weights.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import gymnasium
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformer import CausalTransformer


def main(quick: bool) -> dict[str, float]:
    """Play two rollouts; print and return the differences between cached and full, and their times."""
    torch.manual_seed(0)
    steps = 200 if quick else 500
    env = gymnasium.make("Pendulum-v1", max_episode_steps=steps)
    model = CausalTransformer(env.observation_space.shape[0], d_model=64, d_ff=256, layers=2, heads=4).eval()
    head = nn.Linear(64, 1)
    cache = model.init_cache(batch=1, context=steps)
    state_gap = action_gap = 0.0
    seconds = {"cached": [], "full": []}
    for rollout in range(2):
        obs, _ = env.reset(seed=rollout)
        history, over = [], False
        while not over:
            history.append(torch.as_tensor(obs))
            t = len(history) - 1
            with torch.no_grad():
                begin = time.perf_counter()
                state_BD = model.step(history[-1][None], torch.tensor([t]), cache)
                middle = time.perf_counter()
                full_BD = model(torch.stack(history)[None], torch.arange(t + 1)[None])[:, -1]
                end = time.perf_counter()
                action_BA, full_BA = (2 * torch.tanh(head(h_BD)) for h_BD in (state_BD, full_BD))
            seconds["cached"].append(middle - begin)
            seconds["full"].append(end - middle)
            state_gap = max(state_gap, (state_BD - full_BD).abs().max().item())
            action_gap = max(action_gap, (action_BA - full_BA).abs().max().item())
            obs, _, terminated, truncated, _ = env.step(action_BA[0].numpy())
            over = terminated or truncated
        model.reset(cache, torch.tensor([True]))
    print(
        f"2 rollouts of {steps} steps: states differ by at most {state_gap:.1e}, actions by {action_gap:.1e}"
    )
    print(f"{'milliseconds per step, after':<28}{'cached':>8}{'full':>8}{'ratio':>8}")
    result = {"state gap": state_gap, "action gap": action_gap}
    for first in (0, steps // 4, steps // 2, steps - 20):
        # The second rollout only, after everything has run once. The median, since other programs interrupt.
        cached, full = (1000 * median(s[steps + first : steps + first + 20]) for s in seconds.values())
        print(f"{f'{first} to {first + 19} steps':<28}{cached:>8.2f}{full:>8.2f}{full / cached:>8.1f}")
        result[f"ratio after {first}"] = full / cached
    rates = [2 * steps / sum(s) for s in seconds.values()]
    print(f"{'steps per second, overall':<28}{rates[0]:>8.0f}{rates[1]:>8.0f}{rates[0] / rates[1]:>8.1f}")
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="rollouts of 200 steps")
    main(parser.parse_args().quick)
