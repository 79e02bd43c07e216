# Every verb works on a fresh machine with Python 3.11 and make: the virtual environment is made when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := -c constraints.txt
STAMP := $(VENV)/.installed-dev
DEMO_STAMP := $(VENV)/.installed-demo
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test check lint types contracts torture versions bench clean

help:
	@echo "demo test check lint types contracts torture versions bench clean"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# torch goes first and by its exact version: pip then takes the CPU build, and nothing later replaces it.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e '.[demo]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(DEMO_STAMP)

demo: $(DEMO_STAMP)
	$(BIN)/gapless demo

test: $(STAMP)
	$(PYTEST) -n 2 --dist loadgroup

check: lint types contracts test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(STAMP)
	PYTHONPATH=spool:uploader:schemas $(BIN)/lint-imports

torture: $(STAMP)
	$(PYTEST) -m torture --timeout 5400

# Each sink against its package at both ends of its range; takes most of an hour, and asks pip's index alone.
versions: $(STAMP)
	$(BIN)/python -m tests.sinks.versions

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
