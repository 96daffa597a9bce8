"""Data: the order of samples, each rank's share of it, and random streams that belong to samples."""

from __future__ import annotations

from raytrain.data.batch import Batch
from raytrain.data.device import move
from raytrain.data.loader import EvalLoader, TrainLoader, eval_loader, plan_eval, plan_train, train_loader
from raytrain.data.order import Order
from raytrain.data.randomness import get_rng_state, sample_generator, seed_everything, set_rng_state
from raytrain.data.source import DataPlan

__all__ = [
    "Batch",
    "DataPlan",
    "EvalLoader",
    "Order",
    "TrainLoader",
    "eval_loader",
    "get_rng_state",
    "move",
    "plan_eval",
    "plan_train",
    "sample_generator",
    "seed_everything",
    "set_rng_state",
    "train_loader",
]
