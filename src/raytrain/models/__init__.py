"""Models after the training: load, evaluate, predict, export, register. Reads runs; changes none."""
