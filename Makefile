# make test   set up everything and run the tests
# make lint   formatting, lint and types
# make bench  speed and memory on this CPU, into bench/results/cpu.json and docs/speed.md

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

# Some virtual machines announce AMX and trap on it: PyTorch's bfloat16 products would kill the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: setup test test-slow test-planted lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

test-planted: $(READY)
	$(BIN)/python tests/planted.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench.cpu

clean:
	rm -rf $(VENV)
