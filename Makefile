# Two commands do everything on a fresh machine with python3 (3.11+), pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
BENCH := bench/.venv

.PHONY: demo test chaos fuzz check fix bench clean

demo: $(CORE)
	$(BIN)/overlord demo

test: $(DEV)
	$(BIN)/pytest -n 2 -q

# Hundreds of random faults, about ten minutes. `make chaos CHAOS="--seed 7"` repeats the faults of a seed.
chaos: $(DEV)
	$(BIN)/python -m tests.faults.chaos $(CHAOS)

# Damaged files, states and messages for every reader, ten minutes. `make fuzz FUZZ="--seconds 60 --seed 7 --target parquet"`
fuzz: $(DEV)
	$(BIN)/python -m tests.fuzz $(FUZZ)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

fix: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH)/.made
	$(BENCH)/bin/python -m bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[images]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(CORE)

# The peers that Overlord is measured against live in an environment of their own.
$(BENCH)/.made: bench/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check -r bench/requirements.txt -e .
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH) bench/.data .pytest_cache .ruff_cache .hypothesis .import_linter_cache
