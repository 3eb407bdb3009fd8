# Two commands do everything on a fresh machine with python3 (3.11+), pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
BENCH := bench/.venv
LOWEST := .venv-lowest
FORMATS := .venv-formats
ALL := .[torch,images,object-stores,ray,tokenizers,metrics,otel,page]
# Dependency groups need pip 25.1; the environment's own pip is brought up to it.
PIP := -m pip --quiet --disable-pip-version-check

.PHONY: demo test test-formats test-lowest test-thorough integrations chaos fuzz check docs package fix bench clean

demo: $(CORE)
	$(BIN)/overlord demo

test: $(DEV)
	$(BIN)/pytest -n 2 -q

# What needs the libraries of other formats, in an environment of its own: they bring pandas, and much else. litData asks for
# torchvision and uses it for images alone.
test-formats: $(FORMATS)/.made
	$(FORMATS)/bin/pytest -q tests/sources/test_huggingface.py tests/sources/test_lake_tables.py tests/sources/test_iceberg.py \
		tests/sources/test_litdata.py tests/sources/test_fsspec_store.py tests/jobfile/test_inspection.py \
		tests/faults/test_disturbed_formats.py
	$(FORMATS)/bin/pytest -q tests/fuzz/test_fuzz.py -k "iceberg or delta or lance"

# The same with the oldest releases that pyproject.toml allows.
test-lowest: $(LOWEST)/.made
	$(LOWEST)/bin/pytest -n 2 -q

# Properties on examples that nobody has seen, and no second try for anything: an hour.
test-thorough: $(DEV)
	HYPOTHESIS_PROFILE=thorough SECOND_TRIES=0 $(BIN)/pytest -n 2 -q --timeout 1200

# Training frameworks, in an environment of their own: every example trains, stops and resumes. About a quarter of an hour.
INTEGRATIONS := .venv-integrations
integrations: $(INTEGRATIONS)/.made
	OVERLORD_INTEGRATIONS=1 $(INTEGRATIONS)/bin/pytest -q tests/integrations

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
	$(BIN)/pyright -p tests

docs: $(DEV)
	$(BIN)/mkdocs build --strict

# A wheel and an sdist, installed into an environment of their own where the demo runs without the checkout.
package: $(DEV)
	rm -rf dist .venv-package
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python $(PIP) install "$$(ls dist/*.whl)[images]"
	cd dist && ../.venv-package/bin/overlord demo
	rm -rf .venv-package

fix: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH)/.made
	$(BENCH)/bin/python -m bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install -e '.[images]'
	@touch $@

$(DEV): pyproject.toml constraints/newest.txt | $(BIN)/python
	$(BIN)/python $(PIP) install --upgrade 'pip>=25.1'
	$(BIN)/python $(PIP) install -c constraints/newest.txt --group dev --group docs -e '$(ALL)'
	@touch $@ $(CORE)

$(LOWEST)/.made: pyproject.toml constraints/lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python $(PIP) install --upgrade 'pip>=25.1'
	$(LOWEST)/bin/python $(PIP) install -c constraints/lowest.txt --group dev -e '$(ALL)'
	@touch $@

$(FORMATS)/.made: pyproject.toml constraints/newest.txt
	$(PYTHON) -m venv $(FORMATS)
	$(FORMATS)/bin/python $(PIP) install --upgrade 'pip>=25.1'
	$(FORMATS)/bin/python $(PIP) install -c constraints/newest.txt --group dev --group formats -e '$(ALL)' -e '.[huggingface,lance,delta,iceberg,fsspec]'
	$(FORMATS)/bin/python $(PIP) install --no-deps litdata lightning-utilities
	@touch $@

# verl and Megatron-Core ask for GPUs, and verl for other releases of transformers and tensordict than the other frameworks;
# what is tested of them needs none of it. triton is for torchtitan, which imports it on a CPU too.
$(INTEGRATIONS)/.made: pyproject.toml constraints/newest.txt constraints/integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python $(PIP) install --upgrade 'pip>=25.1'
	$(INTEGRATIONS)/bin/python $(PIP) install -c constraints/newest.txt torch
	$(INTEGRATIONS)/bin/python $(PIP) install -c constraints/newest.txt -c constraints/integrations.txt --group integrations -e .
	$(INTEGRATIONS)/bin/python $(PIP) install -c constraints/integrations.txt --no-deps megatron-core verl
	@touch $@

# The peers that Overlord is measured against live in an environment of their own.
$(BENCH)/.made: bench/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) install -c constraints/newest.txt torch
	$(BENCH)/bin/python $(PIP) install -c constraints/newest.txt -r bench/requirements.txt -e .
	@touch $@

clean:
	rm -rf $(VENV) $(FORMATS) $(LOWEST) $(INTEGRATIONS) $(BENCH) dist site bench/.data .pytest_cache .ruff_cache .hypothesis .import_linter_cache
