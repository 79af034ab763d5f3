# make test   set up everything and run the tests
# make lint   formatting, lint and types
# make bench  speed and memory on this CPU, into bench/results/cpu.json; python -m bench.tables renews the docs
# make test-gpu, make bench-gpu  the same for the triton engine, on a machine with an NVIDIA GPU

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

# Some virtual machines announce AMX and trap on it: PyTorch's bfloat16 products would kill the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: setup test test-slow test-planted test-gpu lint bench bench-gpu clean

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

# Kernels on a real GPU, with the machine's own PyTorch and Triton.
test-gpu:
	PYTHONPATH=src:tests $(PYTHON) -m pytest tests/gpu -c /dev/null --rootdir . --confcutdir tests/gpu -p no:cacheprovider -q

bench-gpu:
	PYTHONPATH=src $(PYTHON) -m bench.gpu
