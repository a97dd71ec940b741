"""One thread an operation: the tests' tensors are small, and two threads only wait for each other."""

import torch

torch.set_num_threads(1)
