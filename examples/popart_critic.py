r"""A critic with and without PopArt, when its targets become a thousand times larger during training.

    python examples/popart_critic.py              # 20 seconds on one core
    python examples/popart_critic.py --quick      # fewer updates

One task and a small version of this agent's network: a critic and a policy share layers and have one loss
(cross-entropy of 4 actions, plus 10 times the squared error of the value), with Adam and gradients clipped to
norm 1. Half-way through training the unit of rewards changes: all targets become 1,000 times larger, and the
policy's task stays the same. The training runs twice from the same weights:

    plain     the squared error of the value
    popart    the squared error of the normalised value (popart.py)

In both, a network output of 1 is a value of 10, as in a new PopArt layer; with 1 instead of 10, both need
much longer to reach the larger values. PopArt keeps the size of the critic's loss, so the critic's gradient
does not take over the shared layers, and the policy keeps its accuracy. The values do not grow any faster.
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
UNIT = 10.0  # the value of a network output of 1: sqrt(nu) of a new PopArt


def draw(n: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n states (n, 4), their values (n, 1) times `scale`, and the correct one of 4 actions, (n,)."""
    x_SD = torch.randn(n, 4)
    y_S1 = scale * (torch.sin(2 * x_SD[:, :1]) + x_SD[:, 1:2])
    return x_SD, y_S1, 2 * (x_SD[:, 2] > 0).long() + (x_SD[:, 3] > x_SD[:, 0]).long()


def train(popart: PopArt | None, before: int, after: int) -> dict[int, tuple[float, float, float]]:
    """Train, and return {updates since the change: (critic's loss, relative error of values, accuracy)}."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    critic, policy = nn.Linear(64, 1), nn.Linear(64, 4)
    parameters = [*shared.parameters(), *critic.parameters(), *policy.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    records = {}
    for update in range(1 - before, after + 1):
        scale = GROWTH if update > 0 else 1.0
        x_SD, y_S1, action_S = draw(128, scale)
        h_SD = shared(x_SD)
        raw_S1 = critic(h_SD)
        if popart is None:
            critic_loss = (UNIT * raw_S1 - y_S1).square().mean()
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
                q_S1 = UNIT * raw_S1 if popart is None else popart.denormalised(raw_S1)
                error = (q_S1 - y_S1).square().mean().sqrt() / y_S1.std()
                correct = (policy(shared(x_SD)).argmax(-1) == action_S).float().mean()
            records[update] = (critic_loss.item(), error.item(), correct.item())
    return records


def main(quick: bool) -> dict[str, dict]:
    """Train both, print their records side by side, and return the records."""
    before, after = (500, 200) if quick else (2000, 2000)
    result = {"plain": train(None, before, after), "popart": train(PopArt(1, beta=0.01), before, after)}
    print(f"{'':<24}{'plain':^36}{'popart':^36}")
    print(f"{'updates since the change':<24}" + f"{'critic loss':>14}{'error':>8}{'correct':>8}      " * 2)
    for update in result["plain"]:
        row = "".join(
            "{:>14.3g}{:>8.2f}{:>8.0%}      ".format(*records[update]) for records in result.values()
        )
        print(f"{update:<24}{row}".rstrip())
    print("error: relative error of values, 1 if the mean is predicted; correct: accuracy of the policy")
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer updates")
    main(parser.parse_args().quick)
