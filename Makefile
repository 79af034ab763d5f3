# make look   set up what it takes and see which words "it" looks at in a sentence, in the terminal and as look.html
# make test   set up everything and run the tests
# make test-numerics    the numerics under other roundings and in plain PyTorch tiles (ten minutes); part of .ci/run
# make test-configurations  20,000 random configurations against float64, gradients included (half an hour)
# make test-ranks       a sequence over up to 8 processes, 300 cells and their gradients; some minutes
# make test-everywhere  the suite under every setting of MKL, ATen, threads and numba, in 10 runs of some 12 minutes
# make test-versions    the suite with PyTorch 2.6, 2.8, 2.13 and 2.15, in environments of 6 GB each below .cache/
#                       (both go on where they were stopped; python -m bench.tables puts their results into the docs)
# make test-notebooks  the page, the widget and all that shows itself, in JupyterLab and marimo (needs Chromium; a minute)
# make test-sm90        the Hopper kernels compiled for sm_90 under Triton 3.6 to 3.9, without a GPU (some minutes)
# make lint   formatting, lint and types, also those of a user's file; make lint-pyright the latter under pyright
# make lint-page  types of the page's scripts (needs npm); part of .ci/run
# make docs   the documentation as a site, into site/; fails on every warning
# make bench  speed and memory on this CPU, into bench/results/cpu.json; python -m bench.tables renews the docs
# make bench-page  the page of 100,000 tokens: saving, opening, zooming, tiles of the server (needs Chromium; minutes)
# make test-gpu, make bench-gpu  the same for the triton engine, on a machine with an NVIDIA GPU
# make gpu    all that needs a GPU, what matters most first; SECONDS=560 ends it in time, and the next call goes on from there

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
LOOKING = $(VENV)/.looking

# Some virtual machines announce AMX and trap on it: PyTorch's bfloat16 products would kill the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

SENTENCE = The animal didn't cross the street because it was too tired

.PHONY: setup look pictures test test-slow test-numerics test-everywhere test-versions test-configurations test-libraries test-loggers test-hostile-files test-ranks test-notebooks test-planted test-sm90 test-gpu test-gpu-checked gpu lint lint-pyright pyright lint-page typescript docs bench bench-gpu bench-learn bench-learn-gpu bench-page small-model clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Less than the tests take: a model to look at, and the compiled tiles.
$(LOOKING): pyproject.toml constraints.txt
	@echo "Setting up a model and what it takes to run it; the first time this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[look,fast]"
	touch $@

look: $(if $(wildcard $(READY)),$(READY),$(LOOKING))
	@$(BIN)/regard look "$(SENTENCE)" --word it
	@$(BIN)/regard look "$(SENTENCE)" --word it --out look.html
	@echo "Open it in a browser: file://$(CURDIR)/look.html"

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# Rounding of other CPUs: MKL and ATen without wide vector instructions, products split over two threads.
NUMERICS = tests/core/test_row_weights.py tests/core/test_bound.py tests/core/test_statistics.py tests/core/test_gradients.py
# And the tiles in plain PyTorch, which serve where numba does not; and Triton's interpreter with the products of another OpenBLAS.
PLAIN = tests/core/test_statistics.py tests/core/test_gradients.py tests/core/test_merge.py tests/core/test_empty_and_infinite.py
test-numerics: $(READY)
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(NUMERICS)
	REGARD_COMPILED=0 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(PLAIN)
	OPENBLAS_CORETYPE=Haswell $(BIN)/python -m pytest -n 2 --dist worksteal tests/engines/test_triton_interpreted.py

test-everywhere: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.everywhere

test-versions:
	PYTHONPATH=tests $(PYTHON) -m support.versions .cache/versions

# A run that was stopped goes on where it was; remove the file to begin again.
test-configurations: $(READY)
	mkdir -p .cache
	$(BIN)/python tests/support/configurations.py .cache/configurations.jsonl

# Real models of other libraries, in a folder of their own: torchvision has no CPU build, and would trip transformers.
test-libraries: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .libraries \
	    timm==1.0.30 torchvision==0.28.0 diffusers==0.42.1 importlib_metadata zipp requests urllib3 charset_normalizer certifi kvpress==0.5.5
	PYTHONPATH=.libraries $(BIN)/python -m pytest tests/recorder/test_record_libraries.py tests/core/test_kvpress.py

# The loggers of docs/recipes.md with the real libraries, in a folder of their own.
test-loggers: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .cache/loggers \
	    tensorboard absl-py grpcio markdown protobuf tensorboard-data-server werkzeug markupsafe lightning pytorch-lightning \
	    lightning-utilities torchmetrics accelerate psutil requests urllib3 charset_normalizer certifi idna
	PYTHONPATH=.cache/loggers $(BIN)/python -m pytest tests/test_recipe_loggers.py -m slow

# 10,000 hostile .regard files with right checksums; about five minutes.
test-hostile-files: $(READY)
	$(BIN)/python -m pytest tests/recorder/test_record_hostile.py -m "slow or not slow"

# A sequence over ranks: hundreds of cells, in processes that talk through gloo.
test-ranks: $(READY)
	$(BIN)/python -m pytest -n 0 tests/distributed -m "slow or not slow"

# JupyterLab and marimo in an environment of their own, which has what the other one has.
NOTEBOOKS = .cache/notebooks
test-notebooks: $(READY)
	$(PYTHON) -m venv $(NOTEBOOKS)
	$(NOTEBOOKS)/bin/pip install --quiet --disable-pip-version-check jupyterlab==4.6.6 marimo==0.25.2 anywidget==0.11.0
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > $$($(NOTEBOOKS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/regard.pth
	REGARD_NOTEBOOKS=$(NOTEBOOKS)/bin $(BIN)/python -m pytest -n 0 -m slow tests/look/test_look_notebook_apps.py

test-planted: $(READY)
	$(BIN)/python tests/support/planted.py

# Each version in a folder of its own below .cache/, 200 MB each.
test-sm90: $(READY)
	for version in 3.6.0 3.7.1 3.8.0 3.9.0; do \
	    $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .cache/triton/$$version triton==$$version && \
	    PYTHONPATH=.cache/triton/$$version:src $(BIN)/python tests/support/sm90.py || exit 1; \
	done

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/typing/user_code.py

# A user's file under pyright, in an environment of its own: it brings Node.
PYRIGHT = .cache/pyright/bin/basedpyright
$(PYRIGHT):
	$(PYTHON) -m venv .cache/pyright
	.cache/pyright/bin/pip install --quiet --disable-pip-version-check basedpyright==1.40.2

pyright: $(PYRIGHT)

lint-pyright: $(READY) $(PYRIGHT)
	$(PYRIGHT) --level error --pythonpath $(BIN)/python tests/typing/user_code.py

# The page's scripts under TypeScript's checker, in a folder of its own; needs npm.
TSC = .cache/typescript/node_modules/.bin/tsc
$(TSC):
	npm install --silent --no-audit --no-fund --prefix .cache/typescript typescript@5.9.3

typescript: $(TSC)

lint-page: $(TSC)
	$(TSC) --project tests/typing/tsconfig.json

docs: $(READY)
	$(BIN)/python docs/build.py

bench: $(READY)
	$(BIN)/python -m bench.cpu

# The model of the package, trained again: ten minutes on a CPU, or one on a GPU.
small-model: $(READY)
	$(BIN)/python -m bench.small_model

# The pictures of README and docs, drawn in Debian's Chromium.
pictures: $(READY)
	$(BIN)/python docs/pictures.py

# DATA: a folder with tinyshakespeare.txt and multi30k.{train,val}.{en,de}; OUT: a folder for the runs, to go on with.
bench-learn: $(READY)
	$(BIN)/python -m bench.learn cpu $(DATA) $(OUT)

bench-page: $(READY)
	$(BIN)/python -m bench.page

clean:
	rm -rf $(VENV) site

# Kernels on a real GPU, with the machine's own PyTorch and Triton.
test-gpu:
	$(PYTHON) tests/gpu/side_by_side.py
	PYTHONPATH=src:tests $(PYTHON) tests/gpu/configurations.py 0 320

# The same kernels under CUDA's memory and race checkers, every allocation on its own.
test-gpu-checked: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
test-gpu-checked:
	seq 0 9 | PYTHONPATH=src:tests xargs -P 10 -I{} compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) tests/gpu/small.py {} 10
	seq 0 9 | PYTHONPATH=src:tests xargs -P 10 -I{} compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) tests/gpu/small.py {} 10 plain

SECONDS = 7200
gpu:
	$(PYTHON) -m bench.gpu_queue --seconds $(SECONDS)

bench-gpu:
	PYTHONPATH=src $(PYTHON) -m bench.gpu
	PYTHONPATH=src $(PYTHON) -m bench.gpu_shapes

# Minutes each; make it again where one was not finished. NANOGPT: a clone of nanoGPT.
bench-learn-gpu:
	for what in gpu multi30k large seconds; do PYTHONPATH=src $(PYTHON) -m bench.learn $$what $(DATA) $(OUT) limit=540 || exit; done
	PYTHONPATH=src $(PYTHON) -m bench.learn nanogpt $(DATA) $(OUT) nanogpt=$(NANOGPT)
	PYTHONPATH=src $(PYTHON) -m bench.learn step $(DATA)
