"""The short text at the end of a run: what came out, where it is, how to browse it."""

from __future__ import annotations

from raytrain.result import Result


def summary(result: Result) -> str:
    """A few lines for a person."""
    again = "" if result.status == "finished" else "; the same command goes on with it"
    lines = [f"{result.name}: {result.status} after {result.step} optimizer steps{again}"]
    shown = {k: v for k, v in result.metrics.items() if not k.startswith(("time/", "rank/", "system/")) and _shown(k)}
    if shown:
        lines.append("  last   " + "  ".join(f"{name} {value:.4g}" for name, value in sorted(shown.items())))
    best = result.best_checkpoint
    if best is not None:
        scores = {k: v for k, v in best.metrics.items() if not k.startswith(("train/", "time/")) and _shown(k)}
        lines.append(f"  best   step {best.step}  " + "  ".join(f"{n} {v:.4g}" for n, v in sorted(scores.items())))
    if "time/samples_per_s" in result.metrics:
        lines.append(f"  speed  {result.metrics['time/samples_per_s']:,.0f} samples/s")
    if result.last_checkpoint is not None:
        lines.append(f"  saved  {(best or result.last_checkpoint).uri}")
    if result.mlflow_run_id:
        lines.append(f"  MLflow run {result.mlflow_run_id}")
        lines.append(f"  browse {result.trackers.get('mlflow_browse', '')}")
    return "\n".join(lines) + "\n"


def _shown(name: str) -> bool:
    return not name.endswith(("_epoch", "/samples", "/grad_norm", "/lr"))
