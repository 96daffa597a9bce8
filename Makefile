# make train: train the digits job on this machine.  make test: run the tests.  Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint docs clean

train: $(READY)
	$(BIN)/python jobs/digits.py --scaling.num_workers 2

test: $(READY)
	$(BIN)/python -m pytest -m "not gpu"

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(None if ok else "raytrain needs Python 3.10 to 3.13; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11, for example.")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
