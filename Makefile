# Needs Python (3.11 to 3.13), pip and make; everything else is installed into VENV.
#   make demo PYTHON=python3.12 VENV=/tmp/venv PARTITIONS=json,re

PYTHON ?= python3
VENV ?= .venv
DATA ?= $(CURDIR)/data
PORT ?= 3000
PARTITIONS ?= datetime,json,pathlib,shutil
# Slow tiers are collected first, so that both workers end with the short unit tests.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Versions, or paths of interpreters.
PYTHONS ?= 3.11 3.12 3.13

BIN := $(VENV)/bin
# An environment of their own: CI builds the wheel while the other one is installed.
TOOLS := $(VENV)-release
# The tests start many processes: each would compile the package, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE
export VANE_DEMO_DATA := $(abspath $(DATA))

.PHONY: help demo ui install check unit test test-all test-gpu bench-smoke docs docs-serve lint type \
    dist dist-check lower-bounds clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     materialize partitions of the demo and answer a question"
	@echo "make ui       open the demo in Dagster's UI"
	@echo "make check    lint, types and unit tests: before each commit"
	@echo "make unit     run the unit tests: no Ray, no Dagster runs, no processes"
	@echo "make test     run all tests except chaos, engines and large models"
	@echo "make test-all run all tests"
	@echo "make test-gpu run all that needs an NVIDIA GPU, and compare speed there with a bare loop"
	@echo "make bench-smoke  compare speed with the last tag, or BASE=<commit>: before each release"
	@echo "make docs     build the documentation's site in build/site, and check its links"
	@echo "make docs-serve  the same, at http://127.0.0.1:8000, and again after each edit"
	@echo "make lint     ruff: rules and format"
	@echo "make type     mypy, strict"
	@echo "make dist     build the sdist and the wheel into dist/, and check what they hold"
	@echo "make dist-check    run the first example from the wheel on each Python of PYTHONS"
	@echo "make lower-bounds  the same with the oldest dependencies permitted, and unit tests"
	@echo "make install  install everything that the tests need into $(VENV)"
	@echo "make clean    remove the environment, the demo's data and the caches"

demo: $(VENV)/.demo
	@$(BIN)/python -m definitions.demo --partitions $(PARTITIONS)

ui: $(VENV)/.demo
	@mkdir -p $(VANE_DEMO_DATA)/dagster
	@cp definitions/dagster.yaml $(VANE_DEMO_DATA)/dagster/
	@echo "Dagster's UI: http://127.0.0.1:$(PORT)/asset-groups (Ctrl-C ends it)"
	@DAGSTER_HOME=$(VANE_DEMO_DATA)/dagster PATH="$(abspath $(BIN)):$$PATH" \
	    $(BIN)/dagster dev --workspace workspace.yaml --host 127.0.0.1 --port $(PORT)

install: $(VENV)/.test

check:
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint type unit

unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -p no:logging tests/unit

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(addprefix tests/,unit integration dagster examples)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/providers/test_gpu.py
	$(BIN)/python -m benchmarks.gpu

bench-smoke: $(VENV)/.test
	$(BIN)/python -m benchmarks.smoke $(if $(BASE),--base $(BASE)) $(if $(SESSIONS),--sessions $(SESSIONS))

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/api.py --check >/dev/null

type: $(VENV)/.test
	$(BIN)/mypy

dist: $(TOOLS)/.done
	@rm -rf dist
	$(TOOLS)/bin/python -m uv build --quiet --python $(TOOLS)/bin/python .
	$(TOOLS)/bin/python -m twine check --strict dist/*
	@$(TOOLS)/bin/python tools/dist.py content

dist-check: dist
	@$(TOOLS)/bin/python tools/dist.py run $(PYTHONS)

lower-bounds: dist
	@$(TOOLS)/bin/python tools/dist.py run --lowest $(firstword $(PYTHONS))

clean:
	@if [ -x $(BIN)/vane-dagster ]; then $(BIN)/vane-dagster cluster stop || true; fi
	rm -rf $(addprefix $(VANE_DEMO_DATA)/,stdlib store published questions published_questions dagster logs)
	@rmdir $(VANE_DEMO_DATA) 2>/dev/null || true
	rm -rf $(VENV) $(TOOLS) build dist
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is installed is installed again only when pyproject.toml changes.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "Installing the demo into $(VENV); the first time takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "Installing what the tests need into $(VENV); the first time takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@# vLLM asks for these; they are not used here, and transformers fails where they fit no CPU.
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VENV)/.demo $@

$(TOOLS)/.done: Makefile | $(TOOLS)/bin/python
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check 'twine>=6' 'uv>=0.9'
	@touch $@

$(BIN)/python $(TOOLS)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) \
	    else "Python %d.%d is not supported; expected 3.11 to 3.13: make PYTHON=python3.12" % v)'
	@$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); \
	    echo "No virtual environment could be made; on Debian: apt-get install python3-venv"; exit 1; }
