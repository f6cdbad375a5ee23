# Each target does its own set-up: a virtual environment in .venv with everything installed.
#
#   PYTHON    interpreter that makes the environment (3.10 or newer)
#   TORCH     requirement for torch
#   PIP_ARGS  further arguments for pip, for example PyTorch's own wheels:
#             make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   OUTSIDE   folder of other people's programs, and OUTSIDE_SOURCES: one of checked-out repositories; for make outside.
#             OUTSIDE_PACKAGES: one of packages that only some of them need
#   WORKERS   processes that run tests side by side, each with ranks of its own
#   ARGS      arguments for the program that the target runs: make test ARGS="-k layout -x"

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Another requirement is another stamp, hence another install.
CHOICE := $(shell printf '%s' '$(TORCH) $(PIP_ARGS)' | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.installed-$(CHOICE)
OUTSIDE_VENV ?= .venv-outside
OUTSIDE_STAMP := $(OUTSIDE_VENV)/.installed-$(CHOICE)
WHEEL_VENV := .venv-wheel
WHEEL_DIR := build/wheel
RUN := OMP_NUM_THREADS=1 $(BIN)/python
# Tests start hundreds of processes. Where the environment forbids bytecode files, each of them would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup test test-all test-wheel outside mutants lint format demo bench compare docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a small GPT, sharded over all GPUs or two CPU ranks"
	@echo "make test       the tests, then those marked 'wheel' against the built wheel"
	@echo "make test-all   the same, with the exhaustive sets of the tests"
	@echo "make lint       ruff and mypy            make format   apply ruff's formatting"
	@echo "make bench      the short benchmarks     make docs     write docs/reference"
	@echo "make outside    other people's programs, unedited, under DDP and sharded; ends with a table"
	@echo "make compare    peculiar scripts under DDP, FSDP1, FSDP2, ZeRO-3 and this engine (docs/compared.md)"
	@echo "make mutants    what the tests fail to notice: mutated engines (hours; goes on where it stopped)"
	@echo "Variables: PYTHON, TORCH, PIP_ARGS, WORKERS, ARGS, OUTSIDE, OUTSIDE_SOURCES, OUTSIDE_PACKAGES (see the top)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; choose one with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) '$(TORCH)' -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@

# Tests wait a good deal, for ranks and for processes to start. A file stays with one worker, which keeps its ranks alive.
test: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)
	@$(MAKE) --no-print-directory test-wheel

test-all: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m 'not outside' $(ARGS)
	@$(MAKE) --no-print-directory test-wheel

# An editable install makes the whole repository importable and so hides what the wheel lacks. Here
# the wheel is installed into an environment of its own, which sees the packages of .venv through a
# .pth file, but not the editable install (its .pth file is not read there), and a copy of the tests
# runs in a folder without the sources.
test-wheel: $(STAMP)
	@rm -rf $(WHEEL_DIR) $(WHEEL_VENV) && mkdir -p $(WHEEL_DIR)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEEL_DIR) .
	$(BIN)/python -m venv --without-pip $(WHEEL_VENV)
	$(BIN)/python -m pip --python $(WHEEL_VENV)/bin/python install --quiet --no-deps --no-index $(WHEEL_DIR)/*.whl
	@here=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  there=$$($(WHEEL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "$$here" > "$$there/packages.pth"
	@cp -r tests pyproject.toml $(WHEEL_DIR)/
	cd $(WHEEL_DIR) && OMP_NUM_THREADS=1 TORCH_SHARD_WHEEL=1 ../../$(WHEEL_VENV)/bin/python -m pytest -q \
	  -m 'wheel and not exhaustive' -p no:cacheprovider $$(grep -rl --include='test_*.py' 'mark\.wheel' tests)

# These programs need other libraries, some of them in versions that others exclude: an environment of its own.
$(OUTSIDE_STAMP): pyproject.toml
	test -x $(OUTSIDE_VENV)/bin/python || $(PYTHON) -m venv $(OUTSIDE_VENV)
	$(OUTSIDE_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) '$(TORCH)' -e '.[outside]'
	$(OUTSIDE_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps setfit==1.2.0 litgpt==0.5.13
	@rm -f $(OUTSIDE_VENV)/.installed-* && touch $@

outside: $(OUTSIDE_STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/outside/in_process:core:. $(OUTSIDE_VENV)/bin/python -m pytest -m outside tests/outside $(ARGS)

# What it needs besides goes into .venv at its first run: tools/mutants/__init__.py says what it does. Steps and
# options in ARGS: make mutants ARGS="quick report --only 003,017"
mutants: $(STAMP)
	$(BIN)/python -c 'import cosmic_ray, coverage' 2>/dev/null || $(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[mutants]'
	$(RUN) -m tools.mutants $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	$(RUN) examples/lightning_gpt.py $(ARGS)

bench: $(STAMP)
	$(RUN) bench/train.py --short $(ARGS)
	$(RUN) bench/alone.py --short
	$(RUN) bench/traffic.py --tiny
	$(RUN) bench/overhead.py --short
	$(RUN) bench/launches.py --short
	$(RUN) bench/optim.py --short
	$(RUN) bench/checkpoint.py --short
	$(RUN) bench/offload.py --smoke
	$(RUN) bench/prediction.py --limit 6
	$(RUN) bench/choice.py --models mlp --rounds 3
	$(RUN) bench/gpu.py --smoke

# One row, with the reasons: make compare ARGS="--only encode --reasons"
compare: $(STAMP)
	$(RUN) bench/compare.py $(ARGS)

docs: $(STAMP)
	$(RUN) docs/make_reference.py

clean:
	rm -rf $(VENV) $(WHEEL_VENV) $(OUTSIDE_VENV) build dist
