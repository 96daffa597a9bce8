"""The verbs of the ``raytrain`` command that use a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from raytrain import options
from raytrain.config import TrainConfig
from raytrain.errors import ConfigError
from raytrain.models.loading import Opened, open_model
from raytrain.task import Task


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help.")


def run(verb: str, argv: Sequence[str]) -> int:
    """Run one verb; gives the exit code back."""
    return _VERBS[verb](list(argv))


def _parser(verb: str, text: str) -> _Parser:
    parser = _Parser(
        prog=f"raytrain {verb}",
        description=text,
        allow_abbrev=False,
        epilog="Settings of the run may follow as flags, such as --task.folder DIR; they win over the recorded ones.",
    )
    parser.add_argument(
        "model", metavar="RUN", help="a run's folder, a checkpoint's, models:/NAME@ALIAS or runs:/ID/model"
    )
    parser.add_argument("--checkpoint", default="best", help="of a run: best (default), last, or a step")
    parser.add_argument(
        "--device", default=None, help="cpu, cuda, ... (default: cuda when the run used GPUs and there is one)"
    )
    parser.add_argument("--tracking-uri", default=None, help="of MLflow, for models:/ and runs:/")
    parser.add_argument("--trusted", action="store_true", help="allow models that execute pickled code when loaded")
    return parser


def _open(given: argparse.Namespace, flags: Sequence[str]) -> Opened:
    opened = open_model(
        given.model,
        given.checkpoint,
        flags=flags,
        trusted=given.trusted,
        tracking_uri=given.tracking_uri,
    )
    opened.model.to(_device(given, opened))
    return opened


def _device(given: argparse.Namespace, opened: Opened) -> Any:
    import torch

    used_gpu = opened.settings is not None and opened.settings.scaling.use_gpu and torch.cuda.is_available()
    try:
        return torch.device(given.device or ("cuda" if used_gpu else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"--device {given.device}: {str(error).splitlines()[0]}") from None


def _task(opened: Opened) -> tuple[Task, TrainConfig]:
    if opened.task is None or opened.settings is None:
        raise ConfigError(f"{opened.where} was not logged by raytrain: its task and data are not known.")
    return opened.task, opened.settings.train


def _evaluate(argv: list[str]) -> int:
    from raytrain.models.score import score, sets_of

    parser = _parser("evaluate", "Evaluate a checkpoint as the training did, and print the metrics, every digit.")
    parser.add_argument("--data", action="append", default=[], help="a set of eval_data(), or train; may be repeated")
    given, flags = parser.parse_known_args(argv)
    opened = _open(given, flags)
    task, train = _task(opened)
    sets = sets_of(task, train.seed, tuple(given.data))
    scores = score(task, opened.model, sets, train, _device(given, opened))
    print(f"{opened.where}: step {opened.step}")
    width = max(map(len, scores))
    for name, value in sorted(scores.items()):
        print(f"  {name:{width}}  {value!r}")
    return options.DONE


def _predict(argv: list[str]) -> int:
    from raytrain.evaluation import eval_batch_size
    from raytrain.models.predict import Rows, kind_of, predict

    parser = _parser("predict", "Write the model's answer to each row of a file.")
    parser.add_argument("--input", required=True, help="rows: FILE.parquet, .csv or .npy")
    parser.add_argument("--output", required=True, help="predictions, in the same order: FILE.parquet, .csv or .npy")
    parser.add_argument(
        "--columns", default="", help="of a table: which ones, in which order, such as a,b,c (default: all)"
    )
    parser.add_argument("--batch-size", type=int, help="rows at once (default: as in evaluation)")
    given, flags = parser.parse_known_args(argv)
    kind_of(given.output)
    if given.output == given.input:
        raise ConfigError("--output is the --input. Name another file.")
    opened = _open(given, flags)
    train = opened.settings.train if opened.settings else TrainConfig()
    rows = Rows(given.input, [name for name in given.columns.split(",") if name])
    size = given.batch_size or eval_batch_size(train)
    answers = predict(opened.task, opened.model, rows, size, _device(given, opened), train.precision)
    print(f"{given.output}: {answers.write(given.output)} rows by {opened.where}")
    return options.DONE


def _export(argv: list[str]) -> int:
    from raytrain.models.example import example_of
    from raytrain.models.exporting import FORMATS, write_whole

    parser = _parser("export", "Write the model as a program that needs no raytrain, compared with the model first.")
    parser.add_argument("--format", required=True, choices=sorted(FORMATS), help="torch.export's pt2, or onnx")
    parser.add_argument("--output", required=True, help="file to write")
    given, flags = parser.parse_known_args(argv)
    opened = _open(given, [*flags])
    task, train = _task(opened)
    opened.model.to("cpu")
    example = example_of(task, opened.model, train)
    data, difference = FORMATS[given.format](opened.model, example)
    write_whole(given.output, data)
    free = "any number of rows" if example.rows and example.rows > 1 else "the example's shape only"
    print(f"{given.output}: {given.format} of {opened.where}, {len(data)} bytes, takes {free}")
    print(f"  compared with the model on the example: greatest difference {difference:.3g}")
    return options.DONE


def _register(argv: list[str]) -> int:
    from raytrain.models.handover import Order, hand_over
    from raytrain.models.registering import of_run

    parser = _Parser(
        prog="raytrain register",
        allow_abbrev=False,
        description="Log a run's models into its MLflow run; register them.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--name", help="registered name (default: tracking.register of the run; without one it is only logged)"
    )
    parser.add_argument(
        "--log", choices=("best", "last", "both"), help="which checkpoints (default: as the run says, else best)"
    )
    parser.add_argument("--format", choices=("pt2", "weights", "pickle"), help="as tracking.model_format")
    parser.add_argument("--reference", action="store_true", help="refer to the checkpoint instead of copying its model")
    given, flags = parser.parse_known_args(argv)
    run = of_run(given.run, flags)
    tracking = run.settings.tracking
    log = given.log or (tracking.log_model if tracking.log_model != "none" else "best")
    order = Order(log, given.name or tracking.register, given.format or tracking.model_format, given.reference)
    with run.tracker.uploading() as book:
        for line in hand_over(run.folder, run.settings.task, run.settings.train, book, order, print):
            print(line)
    return options.DONE


_VERBS = {"evaluate": _evaluate, "predict": _predict, "export": _export, "register": _register}
