"""The pure parts of ``MlflowTracking``, and its run in MLflow, without Ray: means, steps, order, how a block ended."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from raytrain.errors import ConfigError, TrackingError
from raytrain.report import Event, Report, Row
from raytrain.tracking import MlflowTracking
from raytrain.tracking.own_trainer import outcome
from raytrain.tracking.reported import Reported, Start, average, plain, settings
from raytrain.tracking.steps import Steps
from raytrain.tracking.translate import Translator

# -- means -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "mean"),
    [
        ([{"loss": 1.0, "n": 3}, {"loss": 5.0, "n": 1}], 2.0),  # case B1
        ([{"loss": 1.0}, {"loss": 9.0}], 5.0),  # case B4
        ([{"loss": 1.0, "n": 3}, {"loss": 5.0}], 3.0),  # not all gave a count
        ([{"loss": math.nan, "n": 0}, {"loss": 5.0, "n": 1}], 5.0),  # a worker without samples
        ([{"loss": math.nan, "n": 0}, {"loss": math.nan, "n": 0}], None),
        ([{"loss": 1.0, "n": math.nan}, {"loss": 5.0, "n": 1}], 3.0),
        ([{"loss": 0.1, "n": 3}, {"loss": 0.1, "n": 7}], 0.1),
        ([{}, {"loss": 5.0}], 5.0),
        ([{"loss": math.inf}, {"loss": 1.0}], math.inf),
        ([{"loss": 1e308}, {"loss": 1e308, "n": 1}], 1e308),
    ],
)
def test_the_mean_over_workers(ranks: Any, mean: float | None) -> None:
    assert average(ranks, "n").get("loss") == mean


def test_nan_of_one_worker_shows_and_counts_are_summed() -> None:
    assert math.isnan(average([{"loss": math.nan}, {"loss": 1.0}], "n")["loss"])
    assert average([{"n": 3}, {"n": 1}], "n") == {"n": 4.0}
    assert average([{"epoch": 3}, {"epoch": 3}], "n", keep=["epoch"]) == {"epoch": 3}


def test_plain_values_of_what_was_reported() -> None:
    numbers, others = plain({"a": 1, "b": True, "c": "x", "d": None, "e": {"f": 2, "g": {}}, 5: 6})
    assert numbers == {"a": 1.0, "b": 1.0, "e/f": 2.0, "5": 6.0}
    assert others == {"c": "str", "d": "NoneType", "e/g": "dict"}


def test_settings_of_a_loop_config() -> None:
    config = {"lr": 0.1, "model": {"depth": 3, "act": max}, "sizes": [1, 2], "data": list(range(1000)), "none": None}
    assert settings(config) == {
        "lr": 0.1,
        "model.depth": 3,
        "model.act": "max",
        "sizes": "[1, 2]",
        "data": "list of 1000",
        "none": None,
    }
    assert settings(None) == {}
    loop: dict[str, Any] = {}
    loop["itself"] = loop
    assert len(settings(loop)) == 1


# -- steps -------------------------------------------------------------------------------------------------------------


def steps_of(steps: Steps, reports: list[dict[str, float]]) -> list[int]:
    return [steps.next(values, [name for name in values if name in ("loss", "val")]) for values in reports]


def losses(key: str, *values: float) -> list[dict[str, float]]:
    return [{"loss": 1.0, key: value} for value in values]


@pytest.mark.parametrize(
    ("reports", "expected", "tag"),
    [
        ([{"loss": 1.0}] * 3, [1, 2, 3], "counted"),
        (losses("step", 10, 20, 30), [10, 20, 30], "step"),
        (losses("epoch", 0, 1, 2), [0, 1, 2], "epoch"),
        ([{"loss": 1, "step": 5, "epoch": 1}, {"loss": 1, "step": 9, "epoch": 1}], [5, 9], "step"),
        (losses("epoch", 0, 0, 0, 1, 1), [0, 1, 2, 3, 4], "counted"),  # several reports per epoch
        (losses("step", 0, 1, 2, 0, 1, 2), [0, 1, 2, 3, 4, 5], "counted"),  # steps that begin again in each epoch
        ([{"loss": 1, "epoch": 1}, {"val": 1, "epoch": 1}, {"loss": 1, "epoch": 2}], [1, 1, 2], "epoch"),
        ([{"loss": 1, "step": 7}, {"val": 1}, {"loss": 1, "step": 8}], [7, 7, 8], "step"),
        ([{"val": 1}, *losses("step", 1, 2)], [1, 2, 3], "counted"),
        ([{"val": 1}, *losses("step", 10, 20)], [1, 10, 20], "step"),
        (losses("step", 0.5, 1.5), [1, 2], "counted"),
        (losses("step", math.nan, math.inf, -1), [1, 2, 3], "counted"),
    ],
)
def test_steps(reports: list[dict[str, float]], expected: list[int], tag: str) -> None:
    steps = Steps()
    assert steps_of(steps, reports) == expected
    assert steps.tags["raytrain.step"] == tag


def test_a_counted_step_goes_on_from_the_checkpoint() -> None:
    steps = Steps()
    assert steps_of(steps, [{"loss": 1}] * 2) == [1, 2]
    steps.saved()
    assert steps_of(steps, [{"loss": 1}] * 3) == [3, 4, 5]
    steps.restart()
    assert steps_of(steps, [{"loss": 1}]) == [3]
    later = Steps(before={**steps.tags, "raytrain.checkpoint.last.step": "2"})
    assert steps_of(later, [{"loss": 1, "epoch": 9}]) == [3]  # counted it was, and counted it stays


def test_without_a_checkpoint_a_new_attempt_begins_anew() -> None:
    steps = Steps()
    assert steps_of(steps, losses("epoch", 0, 0, 0)) == [0, 1, 2]
    steps.restart()
    assert steps_of(steps, losses("epoch", 0, 0, 0, 0)) == [0, 1, 2, 3]


def test_a_key_may_go_back_when_workers_start_again_and_a_named_key_is_kept() -> None:
    steps = Steps()
    assert steps_of(steps, losses("epoch", 0, 1, 2)) == [0, 1, 2]
    steps.restart()
    assert steps_of(steps, losses("epoch", 1, 2, 3)) == [1, 2, 3]
    assert steps_of(Steps("it"), [{"loss": 1}, *losses("it", 5, 5, 4, 6)]) == [0, 5, 5, 4, 6]


# -- messages ----------------------------------------------------------------------------------------------------------


def message(order: int, *ranks: dict[str, float], **more: Any) -> Reported:
    return Reported("f", order, ranks=ranks, **{"num_workers": len(ranks), **more})


def translator(warnings: list[str] | None = None, **changes: Any) -> Translator:
    options: dict[str, Any] = {"weight": "n", "per_rank": ["loss"], "known": {}}
    return Translator(Steps(), **{**options, **changes}, warn=[].append if warnings is None else warnings.append)


def rows(reports: list[Report]) -> list[Row]:
    return [row for report in reports for row in report.rows]


def kinds(reports: list[Report]) -> list[str]:
    return [event.kind for report in reports for event in report.events]


def test_messages_are_put_in_order() -> None:
    ours = translator()
    assert not ours.take([message(2, {"loss": 3.0}), message(1, {"loss": 2.0})])
    assert [row.values["loss"] for row in rows(ours.take([message(0, {"loss": 1.0})]))] == [1.0, 2.0, 3.0]
    assert not ours.take([message(5, {"loss": 6.0}), message(4, {"loss": 5.0})])
    assert [row.step for row in rows(ours.take([], everything=True))] == [4, 5]


def test_a_failure_that_is_retried_counts_as_a_start() -> None:
    ours = translator()
    start = Start("mine", "/runs/mine", "cpu", {"lr": 1})
    first = ours.take([message(0, {"loss": 1.0}, {"loss": 3.0}, checkpoint="/c/1", start=start)])
    assert kinds(first) == ["tags", "params", "started", "checkpoint", "tags"]
    assert rows(first)[0].values == {"loss": 2.0, "rank/0/loss": 1.0, "rank/1/loss": 3.0}
    assert kinds(ours.take([message(1, {"loss": 1.0}, {"loss": 3.0})])) == []
    assert ours.take([message(2, failure="rank 1: boom")]) == [Report()]  # whether it is retried is not known yet
    again = ours.take([message(3, {"loss": 4.0}, {"loss": 4.0})])
    assert (rows(again)[0].step, kinds(again)) == (2, ["tags", "started"])
    assert again[0].events[0] == Event("tags", 1, {"raytrain.error.before": "rank 1: boom"})


def test_workers_that_come_back_without_a_failure_are_noticed() -> None:
    elastic, fixed = translator(), translator()
    two, one = [{"loss": 1.0}] * 2, [{"loss": 1.0}]
    sizes = [two, two, one, one, two]
    assert [
        kinds(elastic.take([message(i, *ranks, num_workers=0)])).count("started") for i, ranks in enumerate(sizes)
    ] == [1, 0, 1, 0, 1]
    # A preempted worker of a fixed number is missing until all start again; who is missing is not known.
    told = [fixed.take([message(i, *ranks, num_workers=2)]) for i, ranks in enumerate(sizes)]
    assert [kinds(reports).count("started") for reports in told] == [1, 0, 0, 0, 1]
    assert ["rank/0/loss" in rows(reports)[0].values for reports in told] == [True, True, False, False, True]


def test_what_is_odd_is_told_once() -> None:
    warnings: list[str] = []
    ours = translator(warnings, known={"raytrain.trainer.name": "mine"})
    for i in range(3):
        start = Start("other", "", "cpu") if i == 0 else None
        epoch = {"epoch": 1.0}
        ours.take(
            [message(i, {"loss": 1.0, "x": 1.0, **epoch}, {"loss": 1.0, **epoch}, others={"t": "str"}, start=start)]
        )
    assert len(warnings) == 4
    for text in ("give both the same", "'t' (str)", "'x' is reported by 1 of 2 workers", "'epoch' does not rise"):
        assert sum(text in warning for warning in warnings) == 1


# -- the run -----------------------------------------------------------------------------------------------------------


def ended_by_ray(code: int) -> BaseException:
    """As Ray's signal handlers end the process."""
    scope: dict[str, Any] = {"__name__": "ray.somewhere"}
    exec("import sys\ndef handler(code): sys.exit(code)", scope)
    with pytest.raises(SystemExit) as caught:
        scope["handler"](code)
    return caught.value


def test_how_a_block_ended() -> None:
    assert outcome(None) == ("FINISHED", None)
    assert outcome(KeyboardInterrupt()) == ("KILLED", "interrupted")
    assert outcome(SystemExit(0)) == ("FINISHED", None)
    assert outcome(SystemExit(3)) == ("FAILED", "SystemExit: 3")
    assert [outcome(ended_by_ray(code))[0] for code in (0, 15)] == ["KILLED", "KILLED"]
    assert outcome(ValueError("x")) == ("FAILED", "ValueError: x")


def run_of(tracking: MlflowTracking) -> Any:
    return tracking._tracker.store.client.get_run(tracking.run_id)


def begin(tmp_path: Path, **options: Any) -> MlflowTracking:
    return MlflowTracking("e", storage=str(tmp_path), **{"name": "mine", **options})


def test_a_run_of_the_same_name_goes_on_unless_it_is_done(tmp_path: Path) -> None:
    lost = begin(tmp_path, params={"lr": 1}, tags={"team": "a"})
    lost.__enter__()  # as if the driver was killed: it stays RUNNING
    again = begin(tmp_path, params={"lr": 2})
    with pytest.raises(ZeroDivisionError), again:
        _ = 1 / 0
    assert again.run_id == lost.run_id
    run = run_of(again)
    assert (run.info.status, run.data.tags["raytrain.attempt"], run.data.tags["team"]) == ("FAILED", "2", "a")
    assert run.data.tags["raytrain.error"] == "ZeroDivisionError: division by zero"
    assert run.data.tags["raytrain.changed.lr"] == "1 -> 2"

    with begin(tmp_path) as third:
        assert third.run_id == lost.run_id
    assert run_of(third).info.status == "FINISHED"
    with begin(tmp_path) as anew, begin(tmp_path, name="other") as other, begin(tmp_path, name=None) as unnamed:
        assert len({lost.run_id, anew.run_id, other.run_id, unnamed.run_id}) == 4
    with begin(tmp_path, name=None, run_id=lost.run_id) as given:
        assert given.run_id == lost.run_id


def test_a_finished_run_with_a_checkpoint_goes_on_at_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(tmp_path) as first:
        for report in first._translator.take([message(0, {"loss": 1.0}), message(1, {"loss": 2.0}, checkpoint="/c")]):
            first._collector.put(report)
    assert "no report came" not in capsys.readouterr().out
    with begin(tmp_path) as second:
        for report in second._translator.take([message(0, {"loss": 3.0})]):
            second._collector.put(report)
    assert "FINISHED" in capsys.readouterr().out
    assert second.run_id == first.run_id
    history = second._tracker.store.client.get_metric_history(second.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_mlflows_exit_hook_does_not_touch_the_end(tmp_path: Path) -> None:
    import mlflow

    own = begin(tmp_path)
    own.__enter__()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.start_run(run_id=own.run_id)
    own.__exit__(None, KeyboardInterrupt(), None)
    assert mlflow.active_run() is None
    assert run_of(own).info.status == "KILLED"
    mlflow.set_tracking_uri(None)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['loss'\]"):
        begin(tmp_path, per_rank="loss")
    with pytest.raises(TrackingError, match="0123"), begin(tmp_path, run_id="0123"):
        pass
    with pytest.raises(TrackingError, match="within its block"):
        _ = begin(tmp_path).callback


def test_the_callback_never_raises_and_holds_no_client() -> None:
    from raytrain.tracking.forward import Forward, uri_of

    sent: list[Any] = []
    mailbox = SimpleNamespace(put=SimpleNamespace(remote=sent.append))
    callback = Forward(mailbox, guard=True)
    callback.after_report(None, [{}], None)
    callback.after_exception(None, {})
    assert sent == []
    run = SimpleNamespace(name="mine", storage_context=None)
    context = SimpleNamespace(
        run_id="f",
        run_config=run,
        train_loop_config={"lr": 1},
        scaling_config=SimpleNamespace(num_workers=2, use_gpu=False),
    )
    place = SimpleNamespace(filesystem=fs.LocalFileSystem(), path="/c/1")
    callback.after_report(context, [{"loss": 1}, {"loss": "x"}], place)
    callback.after_exception(context, {1: ValueError("boom")})
    assert (sent[0].ranks, sent[0].others, sent[0].checkpoint) == ([{"loss": 1.0}, {}], {"loss": "str"}, "/c/1")
    assert sent[0].start.params == {
        "train_loop_config.lr": 1,
        "scaling.num_workers": "2",
        "scaling.use_gpu": False,
    }
    assert (sent[1].order, sent[1].start, sent[1].failure.splitlines()[0]) == (1, None, "rank 1: ValueError: boom")
    assert uri_of(SimpleNamespace(type_name="s3"), "bucket/x") == "s3://bucket/x"
    assert uri_of(SimpleNamespace(type_name="py::fsspec+gcs"), "bucket/x") == "gs://bucket/x"
