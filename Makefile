# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: help setup demo test lint bench clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

setup: .venv/done ## make .venv with everything pinned

.venv/done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup      ## train IID and non-IID on the built-in corpus; table, test and plot at the end
	$(BIN)/flsim demo

test: setup lint ## lint, type-check, all tests
	$(BIN)/pytest

lint: setup      ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup     ## training, import by format, a corpus of the paper's size; a quarter of an hour, 5 GB of temporary disk
	$(BIN)/flsim bench training
	$(BIN)/flsim bench data
	$(BIN)/flsim bench scale

clean:           ## remove the environment
	rm -rf .venv
