r"""The two-hot head and squared errors in a regression whose targets span six orders of magnitude.

    python examples/twohot_regression.py              # 40 seconds on one core
    python examples/twohot_regression.py --quick      # a fifth of the updates

A small network learns y = 10^u (1 + sin(3 a + b) / 2) from (u, a, b), with u from 0 to 6. Prices, counts and
returns can have such a range. Network, data and optimizer are the same for three losses:

    squared error           of y divided by its standard deviation, the usual choice
    squared error, symlog   of symlog(y): a regression in a compressed range
    two-hot                 cross-entropy over symlog bins (twohot.py)

The table shows the median relative error |prediction - y| / y over unseen inputs, for each factor of ten. A
prediction from u alone has an error of about 0.34 everywhere.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from twohot import BinSupport, symexp, symlog, twohot_loss


def draw(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n inputs (n, 3) in [-1, 1], their targets (n,), and u (n,)."""
    x_B3 = 2 * torch.rand(n, 3) - 1
    u_B = 3 + 3 * x_B3[:, 0]
    return x_B3, 10**u_B * (1 + torch.sin(3 * x_B3[:, 1] + x_B3[:, 2]) / 2), u_B


def learners() -> dict:
    """Name -> (number of network outputs, loss of outputs and targets, prediction from outputs)."""
    support = BinSupport(bins=128, low=-2e6, high=2e6)
    deviation = draw(100_000)[1].std()
    return {
        "squared error": (
            1,
            lambda out, y: (out[:, 0] - y / deviation).square().mean(),
            lambda out: out[:, 0] * deviation,
        ),
        "squared error, symlog": (
            1,
            lambda out, y: (out[:, 0] - symlog(y)).square().mean(),
            lambda out: symexp(out[:, 0]),
        ),
        "two-hot": (128, lambda out, y: twohot_loss(out, *support.encode(y)).mean(), support.decode),
    }


def relative_errors(outputs: int, loss_of, prediction_of, updates: int) -> list[float]:
    """Train a network, and return the median relative error for each factor of ten, smallest first."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        x_B3, y_B, _ = draw(256)
        optimizer.zero_grad()
        loss_of(net(x_B3), y_B).backward()
        optimizer.step()
        schedule.step()
    x_B3, y_B, u_B = draw(20_000)
    with torch.no_grad():
        error_B = (prediction_of(net(x_B3)) - y_B).abs() / y_B
    return [error_B[u_B.long() == decade].median().item() for decade in range(6)]


def main(quick: bool) -> dict[str, list[float]]:
    """Train the three networks, print the table, and return it."""
    torch.manual_seed(0)
    print(f"{'median relative error for 10^u from':<36}" + "".join(f"{f'1e{d}..':>9}" for d in range(6)))
    table = {}
    for name, learner in learners().items():
        table[name] = relative_errors(*learner, updates=800 if quick else 4000)
        print(f"{name:<36}" + "".join(f"{e:>9.3g}" for e in table[name]))
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the updates")
    main(parser.parse_args().quick)
