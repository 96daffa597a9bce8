"""Tracking: from the workers' reports to MLflow and the console. Runs on the driver, knows nothing of torch."""

from __future__ import annotations

from raytrain.tracking.base import RunInfo, Status, Tracker
from raytrain.tracking.collector import Collector
from raytrain.tracking.console import ConsoleTracker
from raytrain.tracking.mlflow import MlflowTracker
from raytrain.tracking.own_trainer import MlflowTracking

__all__ = ["Collector", "ConsoleTracker", "MlflowTracker", "MlflowTracking", "RunInfo", "Status", "Tracker"]
