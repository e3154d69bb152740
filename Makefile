# `make demo` and `make test` set everything up themselves; they need Python 3.11 or newer with venv, and make.

# make test PYTHON=python3.13: with this Python and the newest JAX for it, in environments of their own. pyenv has
# Pythons that are not on PATH.
PYTHON :=
VENV := .venv$(addprefix -,$(notdir $(PYTHON)))
PYENVS := $(and $(PYTHON),$(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/*/bin/$(notdir $(PYTHON))))
AOT  := .venv-aot$(addprefix -,$(notdir $(PYTHON)))
BIN  := $(VENV)/bin
PIP   = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
ARGS ?=
SAMPLE ?= 8
# The modules of benchmarks/ that print JSON lines when run without arguments; a new one is added here. Those that need
# the TPU compiler (tpu_cycles, tpu_memory, tpu_windows, update_memory, attention_kernels) run in $(AOT): make bench-aot.
BENCH ?= two_layer language_model halo reshards scale resnet_spatial moe_layer dispatch ragged_exchange sharded_update paper_tables mesh_tensorflow moe_family overlap overlap_dense attention gpu_memory calls loop imported

# Some images set it; then each of the processes that the tests start would compile the package's sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
AOT_BENCH ?= tpu_cycles tpu_memory tpu_windows update_memory attention_kernels

.PHONY: help demo test test-quick test-aot docs lint format fuzz laws bench bench-aot clean

help:
	@echo "make demo     one model, three layouts, eight CPU devices: equal losses, different collectives"
	@echo "make test     the tests, every docs snippet included     (ARGS='-k planner', JOBS=4)"
	@echo "make test-quick  the laws and the tests of what changed since main, some cases of each, in 90 seconds"
	@echo "make test PYTHON=python3.13   with the newest JAX for this Python, in .venv-python3.13; so does test-aot"
	@echo "make test-aot the tests that need the TPU compiler, in their own environment, without a TPU"
	@echo "make lint     ruff check, ruff format --check, pyright   (make format repairs what it can)"
	@echo "make docs     HTML documentation, warnings are errors"
	@echo "make fuzz     the long property tests                    (ARGS='-k layout_law')"
	@echo "make laws     the long forms of the laws                 (LAW=steps CASES=2000; make laws ARGS=--help lists them)"
	@echo "make bench    every benchmark, as JSON lines             (BENCH=two_layer)"
	@echo "make bench-aot  the benchmarks of the TPU compiler       (AOT_BENCH=tpu_cycles)"
	@echo "make clean    remove the environments and everything built"

demo: $(VENV)/.core
	$(BIN)/python -m meshdsl.tools.demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# tests/quick.py chooses the files.
test-quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --sample $(SAMPLE) $(ARGS) $$($(BIN)/python -m tests.quick)

# libtpu has an environment of its own, because JAX looks for TPUs on every start where it is installed.
test-aot: $(AOT)/.aot
	$(AOT)/bin/python -m pytest -q -n $(JOBS) -m aot $(ARGS) tests/compilers

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.laws fuzz bounds
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -n $(JOBS) -m "slow or not slow" $(ARGS)

# tests/laws/__main__.py has the table of laws.
laws: $(VENV)/.dev
	$(BIN)/python -m tests.laws $(LAW) $(if $(CASES),--cases $(CASES)) $(ARGS)

bench: $(VENV)/.dev
	@set -e; for name in $(BENCH); do $(BIN)/python -m benchmarks.$$name $(ARGS); done

bench-aot: $(AOT)/.aot
	@set -e; for name in $(AOT_BENCH); do $(AOT)/bin/python -m benchmarks.$$name $(ARGS); done

clean:
	rm -rf .venv .venv-* docs/_build docs/reference docs/notebooks build *.egg-info .pytest_cache .ruff_cache .hypothesis

# A stamp file says what is installed; it is out of date when pyproject.toml is newer.
$(VENV)/.core: pyproject.toml | $(BIN)/pip
	@echo "installing meshdsl into $(VENV) ..." >&2
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/pip
	@echo "installing meshdsl[$*] into $(VENV) (a minute or two the first time) ..." >&2
	@$(PIP) -e '.[$*]'
	@touch $@

$(AOT)/.aot: pyproject.toml | $(AOT)/bin/pip
	@echo "installing meshdsl[aot] into $(AOT) (a minute or two the first time) ..." >&2
	@$(PIP) -e '.[aot,aot-test]' || { \
	  echo "make: the TPU compiler could not be installed; the index needs the libtpu that the installed jax names" >&2; \
	  exit 1; }
	@touch $@

# pip is the last thing that venv writes, so its presence says that the environment is complete.
$(VENV)/bin/pip $(AOT)/bin/pip:
	@for python in $(or $(strip $(PYTHON) $(PYENVS)),python3.11 python3); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -m venv $(@D:/bin=) && exit 0; \
	  echo "make: $$python cannot create a virtual environment; install its venv module (Debian: python3.11-venv)" >&2; \
	  exit 1; \
	done; \
	echo "make: meshdsl needs Python 3.11 or newer, as python3.11 or python3 on PATH or by PYTHON=; found: $$(python3 --version 2>&1)" >&2; \
	exit 1
