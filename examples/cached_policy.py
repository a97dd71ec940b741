r"""The cached Transformer as a policy in a plain Gymnasium loop: the same actions as the full forward, sooner.

    python examples/cached_policy.py              # five seconds on one core
    python examples/cached_policy.py --quick      # rollouts of 200 steps, not 500

A policy that remembers its whole rollout of Pendulum-v1 acts in two ways at once, on the same observations:

    cached   one step of the Transformer, which keeps keys and values of the past (transformer.py)
    full     the whole history through the Transformer again at every step, as one would write it first

Two rollouts, one after the other: `reset` forgets the first, and the second starts at time 0 again. Nothing is
trained here: random weights can neither help the two to agree nor make them faster.
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
    """Play two rollouts, print how far cached and full are apart and what they cost; returns these numbers."""
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
        f"2 rollouts of {steps} steps: states differ by at most {state_gap:.1e}, torques by {action_gap:.1e}"
    )
    print(f"{'milliseconds a step, after':<28}{'cached':>8}{'full':>8}{'ratio':>8}")
    result = {"state gap": state_gap, "action gap": action_gap}
    for first in (0, steps // 4, steps // 2, steps - 20):
        # Of the second rollout: by then everything has run once. The median, as other programs interrupt.
        cached, full = (1000 * median(s[steps + first : steps + first + 20]) for s in seconds.values())
        print(f"{f'{first} to {first + 19} steps':<28}{cached:>8.2f}{full:>8.2f}{full / cached:>8.1f}")
        result[f"ratio after {first}"] = full / cached
    rates = [2 * steps / sum(s) for s in seconds.values()]
    print(f"{'steps a second in all':<28}{rates[0]:>8.0f}{rates[1]:>8.0f}{rates[0] / rates[1]:>8.1f}")
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="rollouts of 200 steps")
    main(parser.parse_args().quick)
