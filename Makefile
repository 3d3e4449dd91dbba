# Each target says what it does in its first line; `make help` lists them.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test simulate bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(STAMP)  ## make .venv with the package and all that demo and test need

# What builds the package comes first and is used from the environment, so that nothing is unpinned.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) --no-build-isolation \
	    -e '.[demo,dev,server,yaml]'
	touch $@

demo: setup  ## serve real conversations over L1, L2 and L3 and check every answer
	mkdir -p build/demo
	$(BIN)/hicache demo --json build/demo/report.json --html build/demo/report.html

test: setup  ## lint, types, layers and all tests that need no GPU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m 'not gpu'

simulate: setup  ## simulations with faults at every point, for a minute and a half, each of a fresh seed
	$(BIN)/hicache simulate --seconds 60
	$(BIN)/hicache simulate --ranks 2 --seconds 30

bench: setup  ## all benchmarks, beside SGLang and LMCache where they are; results in build/bench
	$(BIN)/python -m benchmarks all build/bench --peers sglang,lmcache

clean:  ## remove what the targets made
	rm -rf build $(VENV)
