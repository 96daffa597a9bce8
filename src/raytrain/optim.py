"""The exact optimizer step: the gradient of the global batch, however its rows fall on ranks and micro-batches.

DDP averages the ranks' gradients. With a local mean loss times ``n_local * world_size / n_global`` before the
backward pass, that average is the mean over the samples of the global batch. A loss given as (sum, weight) is
brought to the samples' scale first and to its true weight after the last backward pass, when all ranks know it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain.config import TrainConfig
from raytrain.data import Batch
from raytrain.errors import ConfigError, NonFiniteError, RaytrainError
from raytrain.evaluation import autocast
from raytrain.peers import Peers
from raytrain.weighted import Loss


class ExactStep:
    """Backward passes and optimizer step of one global batch at a time.

    Per global batch: ``zero()``, then for each micro-batch ``forward()`` as a context and ``backward(loss)``, then ``apply()``.
    All ranks call the same sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        peers: Peers,
        device: torch.device,
    ) -> None:
        self._model = model
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._optimizer = optimizer
        self._config = config
        self._peers = peers
        self._device = device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._alike = len({(p.dtype, p.device) for p in self._parameters}) == 1
        self._check_unused = self._ddp is not None and not config.ddp.get("find_unused_parameters", False)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self._weight: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._global_rows = 1

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._weight = None

    @contextlib.contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Surrounds forward and backward of a micro-batch: precision, and one all-reduce per optimizer step."""
        with contextlib.ExitStack() as stack:
            if self._ddp is not None and not batch.is_last:
                stack.enter_context(self._ddp.no_sync())
            if batch.num_rows == 0:
                stack.enter_context(untouched(self._model, self._device))
            yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of ``train.precision`` for the forward pass; nothing for 'full'."""
        return autocast(self._config.precision, self._device)

    def backward(self, loss: Loss, batch: Batch) -> None:
        """Add the gradient of a micro-batch, in its share of the global batch."""
        amount = cast(torch.Tensor, loss.value.amount)
        if not loss.value.is_sum:
            scaled = amount if batch.scale == 1.0 else amount * batch.scale
        else:
            self._count(loss.value.weight, batch)
            scaled = amount * (batch.world_size / batch.global_rows if batch.num_rows else 0.0)
        if self.scaler.is_enabled():
            scaled = self.scaler.scale(scaled)
        if batch.is_last and self._weight is not None:
            self._work = self._peers.add_up(self._weight)  # travels while the backward pass runs
        scaled.backward()

    def _count(self, weight: Any, batch: Batch) -> None:
        if self._weight is None:
            self._weight = torch.zeros((), dtype=torch.float64)
            self._global_rows = batch.global_rows
        if batch.num_rows:
            self._weight += float(weight)

    def apply(self) -> tuple[torch.Tensor, bool]:
        """Bring the gradient to its true weight, clip it and step the optimizer.

        Returns:
            The global norm of the true gradient before clipping (scalar tensor), and whether the step was made.

        Raises:
            NonFiniteError: The gradient is not finite and ``nan_policy`` is "stop".
            RaytrainError: Parameters got no gradient under DDP; they are named.
        """
        if self._check_unused:
            self._refuse_unused()
        total_weight = self._total_weight()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self._optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if total_weight is not None and total_weight > 0:
            torch._foreach_mul_(gradients, self._global_rows / total_weight)
        norm = self._norm(gradients)
        if total_weight == 0:
            return norm, False  # no token anywhere: there is nothing to learn from this batch
        return norm, self._step(norm, gradients)

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            return torch.zeros(())
        if not self._alike:
            return torch.nn.utils.get_total_norm(gradients)
        # The same without the sorting by device and dtype, which costs more than the norm of a small model.
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm

    def _step(self, norm: torch.Tensor, gradients: Sequence[torch.Tensor]) -> bool:
        if not self.scaler.is_enabled() and not self._finite(norm):
            return False
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.clip_norm, norm)
        if self._config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._parameters, self._config.clip_value)
        if not self.scaler.is_enabled():
            self._optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self._optimizer)
        self.scaler.update()
        made = self.scaler.get_scale() >= scale
        if not made and self._config.nan_policy == "stop" and self.scaler.get_scale() < 2.0**-14:
            self._raise_non_finite(norm)
        return made

    def _total_weight(self) -> float | None:
        if self._weight is None:
            return None
        if self._work is not None:
            self._work.wait()
        return float(self._weight)

    def _finite(self, norm: torch.Tensor) -> bool:
        # The gradient is the same on all ranks after the all-reduce, and so is this decision.
        if math.isfinite(norm.item()):
            return True
        if self._config.nan_policy == "stop":
            self._raise_non_finite(norm)
        return False

    def _raise_non_finite(self, norm: torch.Tensor) -> None:
        raise NonFiniteError(
            f"the gradient is not finite (norm {norm.item()}). The optimizer step was not made. Cures: a lower learning rate, "
            "train.clip_norm, or train.nan_policy=skip to leave such steps out on all ranks."
        )

    def _refuse_unused(self) -> None:
        if all(p.grad is not None for p in self._parameters):
            return
        names = [n for n, p in bare(self._model).named_parameters() if p.requires_grad and p.grad is None]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise RaytrainError(
            f"these parameters got no gradient in this step: {shown}. With several workers the gradients of a step must be "
            "complete. Set train.ddp.find_unused_parameters=true if they are left out on purpose, or freeze them with "
            "requires_grad_(False) in model()."
        )


class Ema:
    """Exponential moving average of the weights, with the buffers of the latest model (torch.optim.swa_utils)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._source = bare(model)
        self._averaged = AveragedModel(self._source, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @property
    def model(self) -> nn.Module:
        """The averaged model."""
        return self._averaged.module

    def update(self) -> None:
        """Take the weights in, after an optimizer step."""
        self._averaged.update_parameters(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Averaged weights under the model's own names, and the number of updates."""
        return {"model": self.model.state_dict(), "num_updates": int(self._averaged.n_averaged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self._averaged.n_averaged.fill_(state["num_updates"])


def bare(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP and torch.compile wrappers, so that state keys carry no prefix."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo what a pass over borrowed rows does to buffers (BatchNorm statistics) and random streams."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


def prepare_for_training(model: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """SyncBatchNorm and compilation, before the model is wrapped.

    Raises:
        ConfigError: SyncBatchNorm on a CPU.
    """
    if config.sync_batchnorm:
        if device.type == "cpu":
            raise ConfigError(
                "train.sync_batchnorm = True needs GPUs: torch's SyncBatchNorm does not take CPU tensors. "
                "Set scaling.use_gpu=true, or leave it off: BatchNorm then uses each worker's own rows."
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.compile:
        model.compile()
    return model
