# Every target sets itself up. PYTHON and VENV choose the interpreter and where its environment lives.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= models/starling-pydoc

.PHONY: help setup demo test lint format bench e2e constraints clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## make the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Starling needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@echo "setting up $(VENV) (the first time downloads about 2.5 GB)"
	@$(PYTHON) -m venv $(VENV)
	@if command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; then \
		PATH="$(BIN):$$PATH" uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@$(BIN)/python -m starling_engine.native
	@touch $@

demo: setup ## serve the repository's model on this machine and chat with it
	@$(BIN)/python examples/demo.py $(MODEL)

test: setup ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## style, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

bench: setup ## compare with the peer and write bench/results (see bench/README.md)
	$(BIN)/python bench/run.py $(ARGS)

e2e: setup ## build the distribution, install it elsewhere, and use it as a user would
	$(BIN)/python -m pytest e2e $(ARGS)

constraints: ## renew constraints.txt
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
		--no-emit-index-url --no-annotate --no-header --quiet -o constraints.txt

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist build
