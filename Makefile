# `make demo` and `make test` do all of their own set-up: a virtual environment, the tested torch, then this package.
VENV ?= .venv
PYTHON ?= python3.11
BIN := $(VENV)/bin
READY := $(VENV)/.lightning-par-ready
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-slow test-long test-gpu lint

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,dev]"
	touch $@

demo: $(READY)
	$(BIN)/lightning-par train experiment=demo

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m "slow and not long"

test-long: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m long

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
