# make train: train the digits job on this machine.  make test: run the tests.  Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-lowest lint clean

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

# Unit and two-process tests on the lowest versions of the dependencies (its torch is a large CUDA build).
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[test]'
	.venv-lowest/bin/python -m pytest tests/unit tests/dist

clean:
	rm -rf $(VENV) build dist src/*.egg-info
