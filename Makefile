# Two commands do all the set-up: `make quickstart` runs the main job, `make test` the tests.
# Another interpreter: `make test PYTHON=python3.12`. Each interpreter has an environment of its own.
PYTHON ?= python3
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv-$(TAG)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Two processes: compiling, which takes most of the tests' time, uses one core. WORKERS=0 for one.
WORKERS ?= 2
# Tests that compile for TPU slices find the compiler here. It lies beside the environment, because
# with it inside every command would look for a TPU. `TPU=` leaves it out.
TPU ?= 1
LIBTPU := $(abspath $(VENV))-tpu
PYTEST := JAXRL_TEST_LIBTPU=$(LIBTPU)/libtpu/libtpu.so $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: help quickstart test test-slow lint format docs slices hooks constraints clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: $(VENV)/.quickstart ## install, then cold start, asynchronous GRPO and evaluation (about 5 minutes)
	$(BIN)/jaxrl train --config=configs/quickstart.py $(ARGS)

test: $(VENV)/.test $(if $(TPU),$(VENV)/.tpu) ## install what tests need and run the default tests
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.test $(if $(TPU),$(VENV)/.tpu) ## the tests marked slow
	$(PYTEST) -m slow $(ARGS)

lint: $(VENV)/.dev ## formatter and linter, without changing files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_notebooks.py

format: $(VENV)/.dev ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.quickstart ## regenerate docs/cli-reference.md
	$(BIN)/python tools/config_reference.py

slices: $(VENV)/.quickstart ## compile the large configs for their TPU slices, and regenerate their table (NAMES="...")
	$(PIP) --editable '.[tpu-compile]'
	$(BIN)/python tools/slices_table.py $(NAMES)

hooks: $(VENV)/.dev ## install the git hooks (once per clone)
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

constraints: ## resolve constraints.txt anew with PYTHON and, if given, PYTHON_NEWEST
	$(PYTHON) tools/update_constraints.py $(PYTHON) $(PYTHON_NEWEST)

clean: ## remove environments and caches
	rm -rf .venv-* .pytest_cache .ruff_cache .hypothesis test-report build *.egg-info

# The version check comes first: a wrong interpreter fails with one line, before anything is made.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxrl needs Python 3.11 or newer; %s is %s. Try: make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[tasks,plots]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.quickstart

# Where there is none for the machine, those tests are skipped.
$(VENV)/.tpu: $(BIN)/python constraints.txt
	@$(PIP) --no-deps --upgrade --target $(LIBTPU) libtpu && touch $@ || echo "The TPU compiler (libtpu) cannot be installed: tests that need it are skipped."

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.quickstart
