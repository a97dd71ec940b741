r"""PopArt on a critic whose targets grow a thousandfold in mid-training, against none.

    python examples/popart_critic.py              # 20 seconds on one core
    python examples/popart_critic.py --quick      # fewer updates

One task, and the network of this agent in small: layers that a critic and a policy share, one loss of both
(cross-entropy of 4 actions, plus 10 times the squared error of the value), Adam, gradients clipped to norm 1.
Half-way the unit of rewards changes: every target is 1,000 times larger from then on. Nothing changes for the
policy. Twice, from the same start:

    plain     the squared error of the value itself
    popart    the squared error of normalised values (popart.py)

One output of the network is worth 10 in both, which is what PopArt begins with: with 1 instead, either needs far
longer to the larger values. Read both columns of each: PopArt keeps the size of the critic's loss, so that the
critic does not take the shared layers away from the policy. It brings the values to their new size no sooner.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from popart import PopArt

GROWTH, CRITIC_WEIGHT = 1000.0, 10.0
WORTH = 10.0  # of one output: sqrt(nu) of a new PopArt


def draw(n: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """n states (n, 4), their values (n, 1) times `scale`, and the right one of 4 actions, (n,)."""
    x_SD = torch.randn(n, 4)
    y_S1 = scale * (torch.sin(2 * x_SD[:, :1]) + x_SD[:, 1:2])
    return x_SD, y_S1, 2 * (x_SD[:, 2] > 0).long() + (x_SD[:, 3] > x_SD[:, 0]).long()


def train(popart: PopArt | None, before: int, after: int) -> dict[int, tuple[float, float, float]]:
    """Train; {updates since the change: (critic's loss, relative error of values, share of right actions)}."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    critic, policy = nn.Linear(64, 1), nn.Linear(64, 4)
    parameters = [*shared.parameters(), *critic.parameters(), *policy.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    noted = {}
    for update in range(1 - before, after + 1):
        scale = GROWTH if update > 0 else 1.0
        x_SD, y_S1, action_S = draw(128, scale)
        h_SD = shared(x_SD)
        raw_S1 = critic(h_SD)
        if popart is None:
            critic_loss = (WORTH * raw_S1 - y_S1).square().mean()
        else:
            popart.update(y_S1)
            critic_loss = (popart.normalised(raw_S1) - popart.standardise(y_S1)).square().mean()
        optimizer.zero_grad()
        (F.cross_entropy(policy(h_SD), action_S) + CRITIC_WEIGHT * critic_loss).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if update in (0, 1) or update > 0 and update % 200 == 0:
            with torch.no_grad():
                x_SD, y_S1, action_S = draw(4000, scale)
                raw_S1 = critic(shared(x_SD))
                q_S1 = WORTH * raw_S1 if popart is None else popart.denormalised(raw_S1)
                error = (q_S1 - y_S1).square().mean().sqrt() / y_S1.std()
                right = (policy(shared(x_SD)).argmax(-1) == action_S).float().mean()
            noted[update] = (critic_loss.item(), error.item(), right.item())
    return noted


def main(quick: bool) -> dict[str, dict]:
    """Train both, print them side by side, and return what was noted of each."""
    before, after = (500, 200) if quick else (2000, 2000)
    result = {"plain": train(None, before, after), "popart": train(PopArt(1, beta=0.01), before, after)}
    print(f"{'':<24}{'plain':^36}{'popart':^36}")
    print(f"{'updates since the change':<24}" + f"{'critic loss':>14}{'error':>8}{'right':>8}      " * 2)
    for update in result["plain"]:
        row = "".join("{:>14.3g}{:>8.2f}{:>8.0%}      ".format(*noted[update]) for noted in result.values())
        print(f"{update:<24}{row}".rstrip())
    print(
        "error: of values, 1 for who always says the mean; right: actions of the policy, whose task is as before"
    )
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer updates")
    main(parser.parse_args().quick)
