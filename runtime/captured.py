r"""Updates and acting as CUDA graphs, and networks compiled: the same numbers, launched all at once.

What     `CapturedUpdate` records what an update launches, once for each size of batch, and replays it; `CapturedPolicy`
         does so for acting; `pad` brings batches to a few sizes; `compile_networks` calls torch.compile
Why      an update launches a thousand kernels. From Python each takes about 6 microseconds, longer than most of them run
Paper    none
Shapes   B windows, T steps, S states
Notes    A graph reads and writes the same memory each time, so everything that an update changes is changed in place.
         It repeats what Python did when it was recorded: the sizes, --reward_scale, but not the random draws.
         Recording runs nothing; so each size is updated once without a graph first, which also warms up libraries.
         No graph has been recorded on a GPU yet: tests replay them on a CPU, by calling the update again
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from agent import Agent, Policy
from replay import Batch

TIME_STEPS, STATES = 64, 1024  # batches are padded to multiples of these


def pad(batch: Batch, context: int) -> Batch:
    """A batch of windows of at most `context` steps with padding up to one of a few sizes; its means are unchanged.

    T becomes a multiple of TIME_STEPS (at most `context`), S one of STATES. Steps of padding weigh 0.
    """
    T, S = batch.mask_BT.shape[1], len(batch.real_S)
    more = min(-(-T // TIME_STEPS) * TIME_STEPS, max(T, context)) - T
    extra = -(-S // STATES) * STATES - S
    along_time = lambda x: x if x is None else F.pad(x, (0, 0) * (x.ndim - 2) + (0, more))
    columns = ("obs_BTO", "action_BT", "reward_BT", "done_BT", "mask_BT", "time_BT", "image_BT")
    padded = {name: along_time(getattr(batch, name)) for name in columns}
    # Step t of window b was number b T + t. Padding repeats the first step.
    real_S = F.pad(batch.real_S + batch.real_S.div(T, rounding_mode="floor") * more, (0, extra))
    padded |= {"real_S": real_S, "weight_S": F.pad(batch.weight_S, (0, extra))}
    # To the update, all windows are of one length, in one group.
    return batch._replace(**padded, lengths=(T + more,) * len(batch.lengths))


def record(work: Callable, generator: torch.Generator | None = None) -> tuple[Callable, Tensor]:
    """Record what `work()` launches on the current CUDA stream; returns a function that launches it, and its result.

    `generator` is a generator beside PyTorch's own that `work` draws from.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = work()
    return graph.replay, result


class CapturedUpdate:
    """`step(batch)` (train.py), which makes an update and returns metrics, as CUDA graphs for `agent`'s device.

    Batches come from the host and are padded; they are copied to the device as one block of bytes.
    """

    def __init__(self, step: Callable[[Batch], dict[str, Tensor]], agent: Agent):
        self.step, self.agent = step, agent
        self.device = next(agent.parameters()).device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.seen, self.graphs = set(), {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """One update; returns its metrics, which the next update leaves alone."""
        if self.stream is None:
            return self.launch(batch)
        # All on one stream of its own: backward remembers the stream of the first update, and a graph has one alone.
        now = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            metrics = self.launch(batch)
        now.wait_stream(self.stream)
        return metrics

    def launch(self, batch: Batch) -> dict[str, Tensor]:
        "The same, on the current stream."
        self.agent.train()  # layers forget the weights that they have kept for acting: a replay does not tell them
        size = (batch.mask_BT.shape[1], len(batch.real_S))
        if size not in self.seen:
            self.seen.add(size)
            return self.step(batch)
        if size not in self.graphs:
            self.graphs[size] = self.capture(batch)
        block, replay, flat, shapes = self.graphs[size]
        block.copy_(packed(batch), non_blocking=True)
        replay()
        parts = flat.clone().split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}

    def capture(self, batch: Batch) -> tuple:
        "A block of memory for batches of this size, a function that updates from it, metrics and their shapes."
        shapes, block = {}, packed(batch).to(self.device)
        own = unpacked(block, batch)

        def work() -> Tensor:
            metrics = self.step(own)
            shapes.update({name: value.shape for name, value in metrics.items()})
            return torch.cat([value.float().flatten() for value in metrics.values()])

        return block, *record(work), shapes


def packed(batch: Batch) -> Tensor:
    """The tensors of a batch on the host, one behind another, as bytes."""
    block = torch.empty(offsets(batch)[-1], dtype=torch.uint8, pin_memory=batch.obs_BTO.is_pinned())
    for own, given in zip(unpacked(block, batch), batch):
        if isinstance(given, Tensor):
            own.copy_(given)
    return block


def unpacked(block: Tensor, like: Batch) -> Batch:
    """The batch whose bytes `packed` wrote into `block` (bytes,): views with the shapes and types of `like`."""
    begin, fields = iter(offsets(like)), []
    for x in like:
        if isinstance(x, Tensor):
            first = next(begin)
            x = block[first : first + x.nbytes].view(x.dtype).view(x.shape)
        fields.append(x)
    return Batch(*fields)


def offsets(batch: Batch) -> list[int]:
    "Where each tensor of a batch begins in its block, and where the last one ends. Types need even addresses."
    ends = [0]
    for x in batch:
        if isinstance(x, Tensor):
            ends.append(ends[-1] + -(-x.nbytes // 16) * 16)
    return ends


class CapturedPolicy(Policy):
    """A `Policy` on a GPU whose steps are replayed as one CUDA graph. Each of them looks at the whole cache."""

    graph = None  # observations, images, a function that acts, actions
    warm = False

    def act(self, obs_BO: Tensor, image_B: Tensor | None) -> Tensor:
        """As `Policy.act`: observations (B, O) and images (B, H, W, 3) -> actions (B,) or (B, A)."""
        self.cache.steps = [self.config.context] * len(self.cache.steps)
        if not self.warm:
            self.warm = True
            return super().act(obs_BO, image_B)
        if self.graph is None:
            self.agent.eval()  # layers forget kept weights, so that the graph computes them from the newest
            obs, image = obs_BO.clone(), None if image_B is None else image_B.clone()
            act = super().act
            self.graph = (obs, image, *record(lambda: act(obs, image), self.generator))
            self.agent.eval()
        obs, image, replay, action = self.graph
        obs.copy_(obs_BO)
        if image is not None:
            image.copy_(image_B)
        replay()
        return action


def compile_networks(agent: Agent) -> None:
    """Let torch.compile make kernels for the Transformer and the critics, for each shape that they meet.

    Where no compiler is, PyTorch says so and they run as they are. In place: names of weights stay.
    """
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = 1000  # beyond it, shapes would be computed differently
    for network in (agent.transformer, agent.value.critics, agent.value.target_critics):
        network.compile(dynamic=False)  # a kernel must not depend on the shapes that came before
