"""A Ray to train on: the one there is, a cluster's, or an embedded one; and whether it has what is asked for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from raytrain.config import ScalingConfig
from raytrain.errors import ConfigError, RaytrainError


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


def check_resources(scaling: ScalingConfig) -> None:
    """See that the least number of workers fits the cluster. With an autoscaler, nodes may still come.

    Raises:
        ConfigError: They do not fit: with what is asked for, what there is and what is free.
    """
    import ray

    if _autoscales():
        return
    low, _ = scaling.worker_range
    each = as_ray_scaling(scaling)._resources_per_worker_not_none
    present, free = ray.cluster_resources(), ray.available_resources()
    for name, amount in each.items():
        asked = amount * low
        if asked > free.get(name, 0.0) + 1e-9:
            raise ConfigError(
                f"{low} workers with {amount:g} {name} each ask for {asked:g} {name}; this cluster has {present.get(name, 0):g}, "
                f"of which {free.get(name, 0):g} are free. Cures: fewer scaling.num_workers, a smaller share each "
                f'(scaling.resources_per_worker, such as {{"{name}": 0.5}}), or a larger cluster.'
            )


def _autoscales() -> bool:
    """Whether an autoscaler may add nodes: only then has the cluster a configuration of node groups."""
    state = importlib.import_module("ray._private.state").state
    return state.get_max_resources_from_cluster_config() is not None
