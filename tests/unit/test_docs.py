"""The documentation is what the code says, and the house keeps its one-way imports."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import raytrain

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "raytrain"

# Layers of the house: a module may import from its own layer and those before it, never from later ones.
LAYERS = [
    "errors durations config report yamlfile fieldhelp",
    "task optionnames storage data.order data.batch data.batched data.columns data.hashing data.images data.assemble data.columnar "
    "data.files data.nodecache data.table data.randomness data.draws data.samplers data.source data.streamed data.fetch data.lanes "
    "data.ahead data.blocks data.rowgroups data.stream_reader data.table_stream data.counts data.shards data.detect data.rows "
    "data.passes data.shared data.ownrows data.iterables data.ray_data "
    "data.describe data.device data.engine data.loader data weighted manifest cadence best",
    "liveness peers meter metrics evaluation optim schedules snapshot writer history identity pins checkpoint runtime mailbox "
    "mlflow_guard ray_worker",
    "journal keeper stream session loop work tracking.base tracking.names tracking.provenance tracking.spool tracking.backlog "
    "tracking.outlet tracking.collector tracking.console tracking.mlflow_store tracking.mlflow_inputs tracking.mlflow_start "
    "tracking.mlflow_models tracking.mlflow tracking.sending tracking.reported tracking.steps tracking.translate "
    "tracking.forward tracking.listen tracking.own_trainer tracking",
    "models models.weights result adopt options models.rebuild preflight ledger driver signals "
    "torchrun ray_connection ray_launch launch",
    "models.score models.example models.exporting models.predict models.package models.handover models.registering "
    "models.loading models.logged models.verbs",
    "summary listing repair cli __main__",
]
NO_TORCH = {
    "config",
    "durations",
    "errors",
    "report",
    "yamlfile",
    "fieldhelp",
    "task",
    "options",
    "cli",
    "tracking.mlflow",
    "tracking.own_trainer",
    "mlflow_guard",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = path
    return found


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules of raytrain (without its name) and others that a file imports, those for type checking left out."""
    tree = ast.parse(path.read_text())
    guards = [b for b in ast.walk(tree) if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.unparse(b.test)]
    typing_only = {id(node) for guard in guards for node in ast.walk(guard)}
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "raytrain":
                found |= {f"raytrain.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_every_module_has_a_layer_and_imports_go_one_way() -> None:
    layer = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
    assert layer.keys() == modules().keys()
    for name, path in modules().items():
        for other in imports(path, top_level_only=True):
            target = other.removeprefix("raytrain.")
            if other.startswith("raytrain.") and target in layer:
                assert layer[target] <= layer[name], f"{name} imports {target}"


def test_the_light_modules_import_nothing_heavy() -> None:
    for name in NO_TORCH:
        heavy = {other.split(".")[0] for other in imports(modules()[name], top_level_only=True)} & {
            "torch",
            "ray",
            "mlflow",
        }
        assert not heavy, f"{name} imports {heavy}"


def test_tracking_knows_no_torch_and_the_loop_no_tracking() -> None:
    for name, path in modules().items():
        if name.startswith("tracking"):
            assert "torch" not in {other.split(".")[0] for other in imports(path)}, name
        if name in ("loop", "session", "journal", "keeper", "work"):
            assert not any(other.startswith("raytrain.tracking") for other in imports(path)), name


def test_the_api_page_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert (ROOT / "docs" / "api.md").read_text() == maker.page(), "run python docs/make_api.py"


def test_the_file_map_of_the_readme_names_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in SOURCE.glob("*.py"):
        if path.name not in ("__init__.py", "__main__.py", "errors.py", "report.py"):
            assert path.name in readme, path.name


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == {"unit", "dist", "cluster", "e2e", "gpu"}
    assert not folders & set(pytestconfig.getini("norecursedirs"))


def test_the_public_surface() -> None:
    assert raytrain.__all__ == [
        "Result",
        "RunConfig",
        "ScalingConfig",
        "Session",
        "Task",
        "TrackingConfig",
        "TrainConfig",
        "__version__",
        "fit",
        "load",
        "main",
    ]
    assert all(hasattr(raytrain, name) for name in raytrain.__all__)


OPTIONS = """
train.epochs train.steps train.time train.batch_size train.accumulate train.eval_batch_size train.shuffle train.drop_last
train.loader_workers train.seed train.deterministic train.precision train.compile train.clip_norm train.clip_value train.schedule
train.warmup train.lr_scaling train.lr_base_batch train.sync_batchnorm train.ema_decay train.nan_policy train.ddp train.log_every
train.eval_every train.checkpoint_every train.best_metric train.best_mode train.patience
scaling.num_workers scaling.use_gpu scaling.resources_per_worker scaling.placement_strategy scaling.accelerator_type
run.name run.storage run.resume run.max_failures run.keep run.check_data
tracking.mlflow tracking.uri tracking.experiment tracking.tags tracking.progress tracking.strict
tracking.log_model tracking.register tracking.model_format
"""


def test_all_option_names() -> None:
    from raytrain.options import known_names

    class Plain(raytrain.Task):
        """No fields."""

    assert known_names(Plain) == OPTIONS.split()
