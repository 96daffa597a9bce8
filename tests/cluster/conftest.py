"""One Ray for all tests here, started and ended as raytrain does it itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def ray_of_this_machine() -> Iterator[None]:
    """A connection to a new Ray."""
    from raytrain.ray_connection import ray_running

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_running():
            yield
