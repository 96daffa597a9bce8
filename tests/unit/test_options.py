"""Settings from defaults, files and flags; bad ones are named with the cure."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain import RunConfig, ScalingConfig, Task, TrackingConfig, TrainConfig, yamlfile
from raytrain.errors import CheckpointError, ConfigError
from raytrain.options import Options, action, dump, flatten, known_names, parse, run_command
from raytrain.task import LoopTask


class Colour(enum.Enum):
    """Two of them."""

    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    """A nested group."""

    depth: int = 2
    rate: float = 1e-5
    """Rate of the nested one."""

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate is not below 0: {self.rate}")


@dataclass(frozen=True)
class Demo(Task):
    """Show options."""

    lr: float = 1e-3  # learning rate of the demo, 100% of it
    hidden: int = 8
    """Width of the demo."""
    name: str = "on"
    flag: bool = False
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    kind: Literal["a", "b"] = "a"
    path: Path | None = None
    colour: Colour = Colour.RED
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None
    made: int = field(default=0, init=False)


class Plain(Task):
    """A task without fields."""


def loop(session: object) -> None:
    """A loop."""


def loop_with_config(session: object, config: Inner) -> None:
    """A loop with settings."""


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {epochs: 3, batch_size: 16}\ntask: {lr: 0.5, hidden: 9}\n")
    options = parse(
        Demo, ["--config", str(file), "--train.epochs", "5", "--task.lr=0.25"], train=TrainConfig(epochs=1, seed=7)
    )
    assert (options.train.epochs, options.train.batch_size, options.train.seed) == (5, 16, 7)
    assert options.task == Demo(lr=0.25, hidden=9)


def test_of_two_files_the_later_wins(tmp_path: Path) -> None:
    for name, epochs in (("a", 2), ("b", 3)):
        (tmp_path / name).write_text(f"train:\n  epochs: {epochs}\n")
    options = parse(Demo, ["--config", str(tmp_path / "a"), "--config", str(tmp_path / "b")])
    assert options.train.epochs == 3


@pytest.mark.parametrize(
    ("flags", "group", "name", "value"),
    [
        (["--scaling.num_workers", "2"], "scaling", "num_workers", 2),
        (["--scaling.num-workers=3"], "scaling", "num_workers", 3),
        (["--scaling.num_workers", "2:8"], "scaling", "num_workers", "2:8"),
        (["--scaling.use_gpu", "true"], "scaling", "use_gpu", True),
        (["--scaling.resources_per_worker", '{"CPU": 2}'], "scaling", "resources_per_worker", {"CPU": 2}),
        (["--train.eval_every", "none"], "train", "eval_every", None),
        (["--train.eval_every", "null"], "train", "eval_every", None),
        (["--train.ddp.find_unused_parameters", "true"], "train", "ddp", {"find_unused_parameters": True}),
        (["--train.ddp", '{"static_graph": true}'], "train", "ddp", {"static_graph": True}),
        (["--train.clip_norm", "1e-1"], "train", "clip_norm", 0.1),
        (["--run.name", "1e5"], "run", "name", "1e5"),
        (["--train.clip_norm", "none"], "train", "clip_norm", None),
        (["--train.clip-norm=None"], "train", "clip_norm", None),
        (["--run.name", "none"], "run", "name", None),
        (["--train.lr_scaling", "none"], "train", "lr_scaling", "none"),
        (["--tracking.tags.team", "vision"], "tracking", "tags", {"team": "vision"}),
        (["--tracking.tags.my-team=none"], "tracking", "tags", {"my-team": "none"}),
        (["--scaling.resources_per_worker.my-chip", "2"], "scaling", "resources_per_worker", {"my-chip": 2.0}),
        (["--train", "{epochs: 4}"], "train", "epochs", 4),
        (["--task.other.depth", "4"], "task", "other", Inner(depth=4)),
        (["--task.other", "{depth: 5}"], "task", "other", Inner(depth=5)),
        (["--task.colour", "BLUE"], "task", "colour", Colour.BLUE),
        (["--task.sizes", "[4, 5]"], "task", "sizes", [4, 5]),
        (["--task.inner.depth", "4"], "task", "inner", Inner(depth=4)),
        (["--task.flag", "true"], "task", "flag", True),
        (["--task.path", "/x y"], "task", "path", Path("/x y")),
        (["--task.name", "off"], "task", "name", "off"),
    ],
)
def test_values_of_every_kind(flags: list[str], group: str, name: str, value: object) -> None:
    got = getattr(getattr(parse(Demo, flags), group), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.epoch", "3"], ["--train.epoch;", "--train.epochs"]),
        (["--epochs", "3"], ["--epochs", "--train.epochs"]),
        (["--task.lrr", "3"], ["--task.lrr", "--task.lr"]),
        (["--scaling.workers", "3"], ["--scaling.workers", "--scaling.num_workers"]),
        (["--train.epochs", "three"], ["train.epochs", "three"]),
        (["--train.precision", "bf32"], ["train.precision", "bf32", "bf16"]),
        (["--task.kind", "c"], ["task.kind = 'c'", "Allowed: 'a', 'b'."]),
        (["--task.colour", "GREEN"], ["task.colour = 'GREEN'", "Allowed: RED, BLUE."]),
        (["--task.sizes", "3"], ["task.sizes = '3'", "Allowed: a list [...], each a whole number."]),
        (["--task.flag", "1"], ["task.flag = '1'", "Allowed: true or false."]),
        (["--task.inner.dept", "4"], ["--task.inner.dept;", "--task.inner.depth?"]),
        (["--task.inner", "{dept: 4}"], ["task.inner.dept;", "task.inner.depth?"]),
        (["--task.other.dept", "4"], ["--task.other.dept;", "--task.other.depth?"]),
        (["--task.lr.x", "4"], ["--task.lr.x;", "--task.lr?"]),
        (["--task.inner.rate", "-1"], ["rate is not below 0: -1.0"]),
        (["--task.other.rate", "-1"], ["rate is not below 0: -1.0"]),
        (["--tracking.tags", "{a: 1}"], ["tracking.tags", "'1'", "each value text"]),
        (["--train.clip_norm", "high"], ["train.clip_norm = 'high'", "Allowed: a number or null."]),
        (["--config"], ["--config needs a YAML file"]),
        (["--train.batch_size", "0"], ["train.batch_size = 0", "at least 1"]),
        (["--train.log_every", "soon"], ["train.log_every", "soon", "500st"]),
        (["--scaling.num_workers", "8:2"], ["scaling.num_workers", "8:2"]),
        (["--run.resume", "maybe"], ["run.resume", "maybe"]),
        (["--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
        (["stray"], ["stray"]),
    ],
)
def test_bad_flags_are_named_with_the_cure(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Demo, flags)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert len(text.splitlines()) == 1
    assert len(text) < 250


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("train: {epoch: 3}", ["epoch", "train.epochs"]),
        ("trian: {epochs: 3}", ["trian", "train"]),
        ("task: {hiden: 3}", ["hiden", "task.hidden"]),
        ("train: {epochs: three}", ["train.epochs", "three"]),
        ("- 1\n- 2\n", ["holds a list", "a mapping of groups"]),
        ("train: {epochs: [", ["is not YAML"]),
        ("train: 3", ["train is a group of settings, not 3"]),
        ("train:\n", ["train is a group of settings, not None"]),
        ("task: {inner: {dept: 3}}", ["task.inner.dept", "task.inner.depth?"]),
        ("task: {other: {dept: 3}}", ["task.other.dept", "task.other.depth?"]),
        ("train: {epochs: 1}\ntrain: {steps: 2}\n", ["'train' is there twice"]),
        ("train: {epochs: 1, epochs: 2}", ["'epochs' is there twice"]),
        ("task: {name: 3}", ["task.name = '3'", "quotes"]),
        ("task: !!python/object/apply:os.getcwd []", ["not YAML", "python/object"]),
    ],
)
def test_bad_files_are_named_with_the_cure(content: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse(Demo, ["--config", str(file)])
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert len(text.splitlines()) == 1


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    assert parse(Demo, ["--config", str(file)]) == parse(Demo, [])


def test_what_is_dumped_alone_repeats_the_run(tmp_path: Path) -> None:
    options = Options(
        Demo(
            lr=1e-7,
            name="no",
            flag=True,
            sizes=[3],
            kind="b",
            path=Path("/a"),
            colour=Colour.BLUE,
            inner=Inner(rate=1e30),
        ),
        TrainConfig(epochs=2, clip_norm=1e-5, ddp={"static_graph": True}, eval_every=None, warmup="1st"),
        ScalingConfig(num_workers="2:8", resources_per_worker={"CPU": 0.5}),
        RunConfig(name="on", storage="a b"),
        TrackingConfig(tags={"yes": "no"}),
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump(options))
    assert parse(Demo, ["--config", str(file)]) == options


TEXTS = ["1e5", "1.e3", ".5", "0x1f", "0o7", "1_0", "1:30", "on", "no", "Off", "y", "null", "~", "none", "true", ".inf"]
TEXTS += [
    "",
    " a",
    "a: b",
    "a # b",
    "- a",
    "{a",
    "[a]",
    "'a'",
    '"',
    "\u00e9",
    "two\nlines",
    "2026-01-01",
    "=",
    "<<",
    "!x",
    "*a",
    "%",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_the_dump(text: str, tmp_path: Path) -> None:
    options = Options(Demo(name=text), TrainConfig(), ScalingConfig(), RunConfig(), TrackingConfig(tags={text: text}))
    file = tmp_path / "config.yaml"
    file.write_text(dump(options), encoding="utf-8")
    assert parse(Demo, ["--config", str(file)]) == options


@given(number=st.floats(allow_nan=False))
def test_any_number_comes_back_from_the_dump(number: float) -> None:
    back = yamlfile.load(yamlfile.dump({"a": number}))["a"]
    assert (type(back), back) == (float, number)


def test_flat_names_for_tracking() -> None:
    flat = flatten(parse(Demo, ["--train.ddp.static_graph", "true"]))
    assert flat["task.lr"] == 1e-3
    assert flat["task.inner.depth"] == 2
    assert flat["task.sizes"] == "[1, 2]"
    assert flat["train.ddp.static_graph"] is True
    assert not any(isinstance(value, (dict, list)) for value in flat.values())


def test_a_task_without_fields_and_loops() -> None:
    assert isinstance(parse(Plain, []).task, Plain)
    assert parse(loop, []).task == LoopTask(loop)
    task = parse(loop_with_config, ["--task.depth", "5"]).task
    assert isinstance(task, LoopTask)
    assert task.config == Inner(depth=5)
    assert "task.depth" in known_names(loop_with_config)


class NeedsArguments(Task):
    """Made by hand."""

    def __init__(self, width: int) -> None:
        self.width = width


class Undecorated(Demo):
    """Looks as if it had a new default."""

    lr: float = 0.5


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (NeedsArguments, "NeedsArguments(...) needs width."),
        (Undecorated, "Undecorated has fields (lr): put @dataclass(frozen=True) above it."),
        (Demo(), "main() takes a subclass of raytrain.Task"),
        (Inner, "main() takes a subclass of raytrain.Task"),
        (lambda session, config: None, "give the second argument a dataclass"),
    ],
)
def test_what_is_no_job_is_refused(job: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(job, [])


def test_a_field_without_default_is_asked_for() -> None:
    @dataclass(frozen=True)
    class Needs(Task):
        """One of its fields has no default."""

        lr: float

    with pytest.raises(ConfigError, match=r"required: task\.lr"):
        parse(Needs, [])
    assert parse(Needs, ["--task.lr", "2"]).task == Needs(2.0)


@pytest.mark.parametrize(("name", "value"), [("train", 3), ("rain", TrainConfig()), ("train", RunConfig())])
def test_bad_defaults_of_a_job_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"main\({name}=\.\.\.\): allowed are train, scaling, run, tracking"):
        parse(Demo, [], **{name: value})


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("no such place"), 2, "raytrain: error: no such place"),
        (CheckpointError("half a file"), 1, "raytrain: failed: half a file"),
        (KeyboardInterrupt(), 130, "raytrain: interrupted"),
        (ZeroDivisionError("of the user"), 1, "ZeroDivisionError: of the user"),
    ],
)
def test_exit_codes_of_what_training_raises(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(options: Options) -> int:
        raise error

    token = action.set(raises)
    try:
        assert run_command(Demo, []) == code
    finally:
        action.reset(token)
    text = capsys.readouterr().err
    assert words in text
    assert ("Traceback" in text) == isinstance(error, ZeroDivisionError)


def test_exit_code_and_text_of_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Demo, ["--train.epoch", "3"]) == 2
    assert capsys.readouterr().err.startswith(
        "raytrain: error: unknown option --train.epoch; did you mean --train.epochs?"
    )


def test_help_shows_docstrings_and_comments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Demo, ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: ")
    assert text.index("--print-config] Show options.") < 150
    for words in (
        "learning rate of the demo, 100% of it (type",
        "Width of the demo.",
        "Rate of the nested one.",
        "Global batch size",
    ):
        assert words in text


def test_print_config_shows_the_effective_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Demo, ["--task.lr", "0.5", "--run.name", "1e5", "--print-config"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "lr: 0.5" in shown
    (tmp_path / "run.yaml").write_text(shown)
    assert parse(Demo, ["--config", str(tmp_path / "run.yaml")]) == parse(
        Demo, ["--task.lr", "0.5", "--run.name", "1e5"]
    )


def test_parsing_imports_neither_torch_nor_ray_nor_mlflow() -> None:
    code = (
        "import sys, raytrain; from raytrain.options import parse\n"
        "class T(raytrain.Task): pass\n"
        "parse(T, ['--train.epochs', '2'])\n"
        "print([m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
