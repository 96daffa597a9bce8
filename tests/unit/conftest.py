"""What unit tests get besides: the threads of other tests are told from their own."""

from __future__ import annotations

import threading

import pytest

from tests.unit import stream_kit


@pytest.fixture(autouse=True)
def _lanes_of_other_tests() -> None:
    stream_kit.others = set(threading.enumerate())
