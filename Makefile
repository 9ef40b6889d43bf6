# make demo | test | test-transformers | lint | format | clean; `make help` lists them.
# VENV=DIR puts the environment elsewhere, TF_VENV=DIR the one of test-transformers.
VENV ?= .venv
TF_VENV ?= .venv-tf
PYTHON ?= python3
STRATEGY ?= longstraw
FAMILY ?= qwen3
WORKERS ?= 2
TRANSFORMERS ?= 5.23.0
# Further words for pip, such as an index with CPU builds of torch, and for the demo.
PIP_ARGS ?=
ARGS ?=

TORCH := torch==2.13.0
CONSTRAINTS := constraints/cpu.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.longstraw
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip install --quiet --no-input -c $(CONSTRAINTS) $(PIP_ARGS)
TF_BIN := $(TF_VENV)/bin
TF_STAMP := $(TF_VENV)/.longstraw
TF_CONSTRAINTS := $(TF_VENV)/constraints.txt
TF_PACKAGES := peft matplotlib pytest pytest-timeout pytest-xdist
TF_PIP = $(TF_BIN)/python -m pip install --quiet --no-input -c $(TF_CONSTRAINTS) $(PIP_ARGS)
# What verl does not need. Other versions of transformers want other versions of these three.
CORE_TESTS := tests/models tests/walk tests/kernels tests/state tests/test_compare.py
TF_FREE := transformers|tokenizers|huggingface_hub
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	{ echo "the CPU environment needs Python 3.11 or 3.12: make PYTHON=python3.11 ..." >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-transformers test-env lint format clean FORCE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## train a tiny model on the CPU: make demo FAMILY=qwen3_5 STRATEGY=longstraw
	@$(BIN)/python examples/demo/run.py --family $(FAMILY) --strategy $(STRATEGY) $(ARGS)

test: lint ## lint, then all tests, the trainer runs last
	@$(TEST_ENV) $(BIN)/python -m pytest --no-header -n $(WORKERS) -m "not slow"
	@if grep -rqF mark.slow tests; then $(TEST_ENV) $(BIN)/python -m pytest --no-header -n $(WORKERS) -m slow; fi

test-transformers: $(TF_STAMP) ## the core's tests on another transformers: make test-transformers TRANSFORMERS=VERSION
	@$(TEST_ENV) $(TF_BIN)/python -m pytest --no-header -n $(WORKERS) $(CORE_TESTS)

test-env: $(STAMP) ## only make the environment: make test-env VENV=DIR

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check --output-format concise . || { echo "run make format" >&2; exit 1; }
	@$(BIN)/mypy

format: $(STAMP) ## sort imports, apply safe fixes, format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove caches and build outputs; the environment stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find workers kernels configs longstraw_backend examples tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp names the checkout that the environment imports: another checkout installs itself anew.
ifneq ($(shell cat "$(STAMP)" 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(CHECK_PYTHON)
	@echo "installing into $(VENV), one or two minutes (log: $(LOG))"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(PIP) --upgrade pip && $(PIP) $(TORCH) -e ".[verl,dev]" && $(BIN)/python -m pip check; } \
		>$(LOG) 2>&1 </dev/null || { tail -n 40 $(LOG) >&2; exit 1; }
	@if ls -d $(VENV)/lib/python*/site-packages/nvidia >/dev/null 2>&1; then \
		echo "note: this torch is a CUDA build; CONTRIBUTING.md tells how to get the smaller CPU build"; fi
	@echo "$(CURDIR)" >$(STAMP)

# This stamp names the version too.
TF_WANTED := $(CURDIR) $(TRANSFORMERS)
ifneq ($(shell cat "$(TF_STAMP)" 2>/dev/null),$(TF_WANTED))
$(TF_STAMP): FORCE
endif
$(TF_STAMP): pyproject.toml $(CONSTRAINTS)
	@$(CHECK_PYTHON)
	@echo "installing transformers $(TRANSFORMERS) into $(TF_VENV) (log: $(TF_VENV)/install.log)"
	@test -x $(TF_BIN)/python || $(PYTHON) -m venv $(TF_VENV)
	@grep -vE '^($(TF_FREE))==' $(CONSTRAINTS) >$(TF_CONSTRAINTS)
	@{ $(TF_PIP) --upgrade pip && $(TF_PIP) $(TORCH) transformers==$(TRANSFORMERS) $(TF_PACKAGES) -e . && \
		$(TF_BIN)/python -m pip check; } >$(TF_VENV)/install.log 2>&1 </dev/null || \
		{ tail -n 40 $(TF_VENV)/install.log >&2; exit 1; }
	@echo "$(TF_WANTED)" >$(TF_STAMP)
