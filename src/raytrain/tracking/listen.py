"""The driver's ear: what the callback of a foreign trainer forwards, on its way to the collector."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from raytrain.report import Report
from raytrain.tracking.translate import Translator

_QUIET_S = 0.5  # at the end: this long without news, and all is there
_LIMIT_S = 10.0


class Listener:
    """A thread that carries messages from a mailbox on the driver's node. Starts or joins Ray if that was not done yet.

    Args:
        translator: Makes reports of messages.
        deliver: Where the reports go.
        warn: Where warnings go.

    Attributes:
        mailbox: Handle of the actor.
    """

    def __init__(self, translator: Translator, deliver: Callable[[Report], None], warn: Callable[[str], None]) -> None:
        import ray

        from raytrain.mailbox import Mailbox

        if not ray.is_initialized():
            ray.init()
        node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=node).remote()
        self._translator, self._deliver, self._warn = translator, deliver, warn
        self._controllers: list[Any] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raytrain-listen", daemon=True)
        self._thread.start()

    def end(self, stop_training: bool) -> None:
        """Take what is left, and end the mailbox.

        A training that nobody waits for any more would go on until the process ends, and save what no one wrote down.
        """
        import ray

        for controller in self._controllers if stop_training and ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                ray.kill(controller)
        self._done.set()
        self._thread.join(_LIMIT_S)
        if self._thread.is_alive():
            self._warn(f"the last reports did not come within {_LIMIT_S:g} s and are not in MLflow.")
        with contextlib.suppress(Exception):
            if ray.is_initialized():  # else the call would start another Ray
                ray.kill(self.mailbox)

    def _run(self) -> None:
        import ray

        try:
            while True:
                last_round = self._done.is_set()
                if not ray.is_initialized():
                    raise RuntimeError("ray.shutdown() was called within the block")
                messages, _ = ray.get(self.mailbox.take.remote(_QUIET_S))
                self._controllers += [message.start.controller for message in messages if message.start]
                self._give(self._translator.take(messages))
                if last_round and not messages:
                    return self._give(self._translator.take([], everything=True))
        except Exception as failure:
            self._warn(f"reports after this do not reach MLflow: {type(failure).__name__}: {failure}".splitlines()[0])

    def _give(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._deliver(report)
