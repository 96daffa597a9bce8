"""A driver lives as long as its process does, whoever has its number later."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from raytrain.liveness import SILENT_S, lives, this_process

WHO = "import json; from raytrain.liveness import this_process; print(json.dumps(this_process()), flush=True); input()"


def test_this_process_lives() -> None:
    assert lives(this_process(), 0.0)


def test_a_process_that_ended_does_not_and_neither_do_its_remains() -> None:
    process = subprocess.Popen([sys.executable, "-c", WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    driver = json.loads(process.stdout.readline())
    assert lives(driver, 0.0)
    process.kill()
    deadline = time.monotonic() + 10
    while lives(driver, time.time()) and time.monotonic() < deadline:  # not waited for yet: a zombie
        time.sleep(0.02)
    assert not lives(driver, time.time())
    process.communicate()
    assert not lives(driver, time.time())


def test_a_number_that_was_given_again_is_another_process() -> None:
    assert not lives({**this_process(), "started": "1"}, time.time())


def test_elsewhere_the_heartbeat_tells() -> None:
    there = {**this_process(), "place": "another boot"}
    assert lives(there, time.time() - SILENT_S / 2)
    assert not lives(there, time.time() - 2 * SILENT_S)
    assert not lives({}, 0.0)
