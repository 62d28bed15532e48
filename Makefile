# Ostinato: everything a developer runs. `make` alone lists the targets.
# Needs python3 (3.10 to 3.13) with its venv module, and g++ for the CPU kernels.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Idle threads of the math libraries must not spin on the cores that the other process needs.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
CODE   := $(wildcard src tests benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help venv test simulate stores lint format versions demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install Ostinato into it, with Gemma 3 and the developer tools

# torch goes first and pinned, so that the later resolution does not pick another build of it.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[gemma3,dev]"
	touch $@

test: lint ## run every check: ruff, mypy, import contracts, pytest
	$(PYTEST) -n 2 --dist loadfile

SECONDS ?= 600
simulate: $(STAMP) ## run random programs over all connectors and faults on both cores, every byte checked (SECONDS=600)
	OMP_NUM_THREADS=1 PYTHONPATH=src $(BIN)/python tests/torment/run.py --processes 2 --seconds $(SECONDS)

stores: $(STAMP) ## run the connector kit over real Redis and Mooncake servers, installing them where that is allowed
	scripts/install-stores $(BIN)/python
	$(PYTEST) -m stores -k "TestRedis or forgot_comes_back" tests/stores
	$(PYTEST) -m stores -k TestMooncake tests/stores/test_conformance_mooncake.py

lint: $(STAMP) ## run the checks that execute no test
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## sort imports, apply safe fixes, format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

versions: $(STAMP) ## test the oldest and the newest transformers that is supported (several minutes)
	$(BIN)/python tests/versions.py

demo: $(STAMP) ## show prefix reuse on Gemma 3 270M
	$(BIN)/ostinato demo

bench: $(STAMP) ## run the benchmarks, one after the other
	@set -e; found=0; for file in $(sort $(wildcard benchmarks/bench_*.py)); do \
		found=1; echo "== $$file"; $(BIN)/python "$$file"; \
	done; test "$$found" = 1 || echo "no benchmarks/bench_*.py yet"

clean: ## delete caches and build outputs (the virtual environment stays)
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
