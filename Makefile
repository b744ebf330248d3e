# The one definition of each check. CI and people call these targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 2
TEST_PROCESSES ?= 2
EXAMPLES ?= 20000
PROMPT ?= What is the capital of France?
PACKAGES := inferq protocol producer worker kernels

.PHONY: help setup demo test test-slow check lint format typecheck bench screenshots soak fuzz helm-tools chart-files image-packages image-check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install everything (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt inferq/version.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# By the environment and unexpanded, so that any character of a prompt arrives as it is.
export PROMPT_TEXT := $(value PROMPT)

demo: setup ## Start embedded Valkey and a worker, and stream one answer through the queue
	@$(BIN)/inferq demo --prompt="$$PROMPT_TEXT"

# Files stay whole: their servers and models are started once.
test: setup ## Run the tests, except slow ones, in TEST_PROCESSES processes
	@$(BIN)/python -m pytest -m 'not slow' -n $(TEST_PROCESSES) --dist loadscope

test-slow: setup ## Run the slow tests
	@$(BIN)/python -m pytest -m slow

check: setup lint typecheck ## ruff, ruff format, mypy --strict, import arrows and packaging guards
	@$(BIN)/python -m pytest -q tests/test_arrows.py tests/test_packaging.py

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: setup ## Format the code and apply safe lint fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# mypy does not follow the editable install's import hook: give it the package tree as links.
typecheck: setup
	@rm -rf build/typing && mkdir -p build/typing/inferq
	@for f in inferq/*; do ln -s "$(CURDIR)/$$f" build/typing/inferq/; done
	@for p in protocol producer worker kernels; do ln -s "$(CURDIR)/$$p" build/typing/inferq/$$p; done
	@MYPYPATH=build/typing $(BIN)/mypy --config-file pyproject.toml -p inferq

bench: setup ## Run the short set of benchmarks against the last run and the peers; RECORD=1 keeps it
	@$(BIN)/python benchmarks/short_set.py $(if $(RECORD),--record)

screenshots: setup ## Take the pictures of the gateway's pages in docs/images, with Chromium
	@$(BIN)/python scripts/screenshot_pages.py

soak: setup ## Break things at random for MINUTES and check that nothing is lost or repeated
	@$(BIN)/python tests/chaos/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz: setup ## Feed every decoder EXAMPLES random inputs
	@INFERQ_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q --timeout=0 tests/fuzz

helm-tools: setup ## Put Helm 3 and 4 into the cache, for the tests of the chart
	@$(BIN)/python scripts/helm_tools.py

chart-files: setup ## Write what the chart takes from settings, protocol and its own comments
	@$(BIN)/python scripts/chart_files.py

image-packages: setup ## Write which versions of packages the images hold: those tested here
	@$(BIN)/python scripts/image_packages.py

image-check: setup ## Build the gateway's image without a Docker engine and look into it (as root, minutes)
	@$(BIN)/python scripts/image_check.py

clean: ## Remove what the build and the tools left
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
