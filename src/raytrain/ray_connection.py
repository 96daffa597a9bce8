"""A Ray to train on: the one there is, a cluster's, or an embedded one; and whether it has what is asked for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from raytrain.config import ScalingConfig
from raytrain.errors import ConfigError, RaytrainError

_RELEASE_S = 5.0  # how long resources may take to be free again
_ROUNDING = 1e-9  # Ray counts in fractions


@contextlib.contextmanager
def ray_running() -> Iterator[None]:
    """A Ray connection: the one there is, the cluster of RAY_ADDRESS, or an embedded Ray that ends with the block.

    Raises:
        RaytrainError: Ray does not start, or the cluster does not answer.
    """
    with contextlib.ExitStack() as stack:
        embedded = not os.environ.get("RAY_ADDRESS")
        if embedded and not _ray_is_initialized():
            stack.enter_context(private_token())
        import ray

        if not ray.is_initialized():
            options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
            if embedded:
                options |= {"address": "local", "include_dashboard": False}
            try:
                ray.init(**options)
            except Exception as error:
                place = "an embedded Ray does not start" if embedded else f"no Ray at {os.environ['RAY_ADDRESS']}"
                raise RaytrainError(f"{place}: {type(error).__name__}: {error}") from error
            stack.callback(ray.shutdown)
        yield


@contextlib.contextmanager
def ray_of_our_own() -> Iterator[None]:
    """A Ray that user code starts within the block takes only this process's token, and ends with it: Ray Data starts one."""
    with contextlib.ExitStack() as stack:
        if not os.environ.get("RAY_ADDRESS") and not _ray_is_initialized():
            stack.enter_context(private_token())
            stack.callback(_end_ray)
        yield


def _end_ray() -> None:
    if _ray_is_initialized():
        sys.modules["ray"].shutdown()


def _ray_is_initialized() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@contextlib.contextmanager
def private_token() -> Iterator[None]:
    """Within the block, Ray takes only callers that hold a token of this process: any user of the machine could call it else.

    The token lies in a file that only this user can read. Where the user has chosen how Ray authenticates, nothing is done.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    if any(os.environ.get(name) for name in (*names, "RAY_AUTH_TOKEN")):
        yield
        return
    with tempfile.NamedTemporaryFile("w", prefix="raytrain-token-") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=file.name)
        _read_auth_again()
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            _read_auth_again()


def _read_auth_again() -> None:
    """A Ray that was imported before keeps the mode and the token of that time."""
    if "ray" in sys.modules:
        raylet = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def as_ray_scaling(scaling: ScalingConfig) -> Any:
    """Ray's own ScalingConfig with the same meaning."""
    from ray.train import ScalingConfig as RayScalingConfig

    low, high = scaling.worker_range
    return RayScalingConfig(
        num_workers=low if low == high else (low, high),
        use_gpu=scaling.use_gpu,
        resources_per_worker=dict(scaling.resources_per_worker) if scaling.resources_per_worker else None,
        placement_strategy=scaling.placement_strategy,
        accelerator_type=scaling.accelerator_type,
    )


def check_resources(scaling: ScalingConfig, reads_ray_data: bool = False) -> None:
    """See that the least number of workers fits the cluster. With an autoscaler, nodes may still come.

    Args:
        reads_ray_data: Ray Data needs a CPU besides the workers, or it waits for ever.

    Raises:
        ConfigError: They do not fit: with what is asked for, what there is and what is free.
    """
    import ray

    if _autoscales():
        return
    low, _ = scaling.worker_range
    each = as_ray_scaling(scaling)._resources_per_worker_not_none
    asked = {name: amount * low for name, amount in each.items()}
    present, free = ray.cluster_resources(), _free_soon(asked, 1.0 if reads_ray_data else 0.0)
    for name, amount in each.items():
        if asked[name] > free.get(name, 0.0) + _ROUNDING:
            raise ConfigError(
                f"{low} workers with {amount:g} {name} each ask for {asked[name]:g} {name}; this cluster has "
                f"{present.get(name, 0):g}, of which {free.get(name, 0):g} are free. Cures: fewer scaling.num_workers, a smaller "
                f'share each (scaling.resources_per_worker, such as {{"{name}": 0.5}}), or a larger cluster.'
            )
    left = free.get("CPU", 0.0) - asked.get("CPU", 0.0)
    if reads_ray_data and left < 1 - _ROUNDING:
        raise ConfigError(
            f"Ray Data needs at least 1 CPU besides the workers, but {low} workers with {each.get('CPU', 0.0):g} CPU each leave "
            f"{left:g} of the {free.get('CPU', 0.0):g} that are free. Cures: fewer scaling.num_workers, a smaller share each "
            '(scaling.resources_per_worker, such as {"CPU": 0.5}), or a larger cluster.'
        )


def _free_soon(asked: Mapping[str, float], more_cpus: float) -> Mapping[str, float]:
    """What is free, once it suffices or has not done so for a while: what has just ended gives back its share a little later."""
    import ray

    deadline = time.monotonic() + _RELEASE_S
    while True:
        free: Mapping[str, float] = ray.available_resources()
        wanted = {**asked, "CPU": asked.get("CPU", 0.0) + more_cpus}
        enough = all(amount <= free.get(name, 0.0) + _ROUNDING for name, amount in wanted.items())
        hopeless = any(amount > ray.cluster_resources().get(name, 0.0) + _ROUNDING for name, amount in wanted.items())
        if enough or hopeless or time.monotonic() > deadline:
            return free
        time.sleep(0.1)


def _autoscales() -> bool:
    """Whether an autoscaler may add nodes: only then has the cluster a configuration of node groups."""
    state = importlib.import_module("ray._private.state").state
    return state.get_max_resources_from_cluster_config() is not None
