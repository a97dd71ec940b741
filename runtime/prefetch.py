r"""Batches that are ready before they are needed.

What     `Prefetcher.next` returns a batch; a thread already copies the one after it into memory of its own
Why      a GPU would wait while the host gathers windows. Pinned memory lets the copy to the GPU run beside Python
Paper    none
Notes    Windows are drawn in the caller's thread, one batch ahead, so that draws do not depend on the thread's speed.
         The batch that waits belongs to a checkpoint: a resumed run's replay would draw another one.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from replay import Batch, Replay


class Prefetcher:
    """Batches of `batch_size` windows of at most `context` steps from `replay`, on the host, for `device`.

    `prepare` changes a batch in the thread: captured.pad. Call `settle` before the replay changes.
    """

    def __init__(
        self, replay: Replay, batch_size: int, context: int, device, prepare: Callable | None = None
    ):
        self.replay, self.batch_size, self.context = replay, batch_size, context
        self.device, self.prepare = torch.device(device), prepare or (lambda batch: batch)
        self.thread = ThreadPoolExecutor(1, "prefetch")
        self.ahead: Future | None = None

    def next(self) -> Batch:
        """The next batch; for a GPU, in pinned memory. Raises what reading the replay raises."""
        batch = (self.ahead or self._begin()).result()
        self.ahead = self._begin()
        return batch

    def _begin(self) -> Future:
        "Draw windows now, and gather them in the thread."
        return self.thread.submit(self._gather, self.replay.draw(self.batch_size, self.context))

    def _gather(self, windows) -> Batch:
        return self._pinned(self.prepare(self.replay.gather(windows)))

    def _pinned(self, batch: Batch) -> Batch:
        if self.device.type != "cuda":
            return batch
        return Batch(*(x.pin_memory() if isinstance(x, Tensor) else x for x in batch))

    def settle(self) -> None:
        """Wait until no window is being read: the replay may drop a segment and its frames after this."""
        if self.ahead is not None:
            self.ahead.result()

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()

    def state_dict(self) -> dict:
        """The batch that waits, as tensors and numbers; empty if there is none."""
        return {} if self.ahead is None else dict(self.ahead.result()._asdict())

    def load_state_dict(self, state: dict) -> None:
        """Let the batch of a `state_dict` be the next one."""
        self.ahead = Future() if state else None
        if state:
            self.ahead.set_result(self._pinned(Batch(**state)))
