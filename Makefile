# make demo | test | lint | format | clean; `make help` lists them. VENV=DIR puts the environment elsewhere.
VENV ?= .venv
PYTHON ?= python3
STRATEGY ?= longstraw
FAMILY ?= qwen3
WORKERS ?= 2
# Further words for pip, such as an index with CPU builds of torch, and for the demo.
PIP_ARGS ?=
ARGS ?=

TORCH := torch==2.13.0
CONSTRAINTS := constraints/cpu.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.longstraw
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip install --quiet --no-input -c $(CONSTRAINTS) $(PIP_ARGS)
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

.DEFAULT_GOAL := help
.PHONY: help demo test test-env lint format clean FORCE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(STAMP) ## train a tiny model on the CPU: make demo FAMILY=qwen3_5 STRATEGY=longstraw
	@$(BIN)/python examples/demo/run.py --family $(FAMILY) --strategy $(STRATEGY) $(ARGS)

test: lint ## lint, then all tests: the fast ones in parallel, the slow ones one at a time
	@$(TEST_ENV) $(BIN)/python -m pytest --no-header -n $(WORKERS) -m "not slow"
	@if grep -rqF mark.slow tests; then $(TEST_ENV) $(BIN)/python -m pytest --no-header -m slow; fi

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
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "the CPU environment needs Python 3.11 or 3.12: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "installing into $(VENV), one or two minutes (log: $(LOG))"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(PIP) --upgrade pip && $(PIP) $(TORCH) -e ".[verl,dev]" && $(BIN)/python -m pip check; } \
		>$(LOG) 2>&1 </dev/null || { tail -n 40 $(LOG) >&2; exit 1; }
	@if ls -d $(VENV)/lib/python*/site-packages/nvidia >/dev/null 2>&1; then \
		echo "note: this torch is a CUDA build; CONTRIBUTING.md tells how to get the smaller CPU build"; fi
	@echo "$(CURDIR)" >$(STAMP)
