PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: test demo check lint docs pytest test-long format clean

## test: everything CI runs (lint, types, imports, documentation, tests)
test: check docs pytest test-long

## demo: train a small network on digits in float, then at 8, 4 and 2 bits with every gradient rule
demo: $(INSTALLED)
	$(BIN)/python examples/digits.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pytest: $(INSTALLED)
	$(BIN)/pytest -n 2 -m "not long"

## test-long: more than 2^31 elements, one process at a time: about 20 GiB of memory
test-long: $(INSTALLED)
	$(BIN)/pytest -m long

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site docs/pictures

$(INSTALLED): pyproject.toml constraints.txt peers.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]'
	$(BIN)/pip install --quiet --no-deps --requirement peers.txt
	touch $@
