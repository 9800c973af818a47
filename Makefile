# Everything happens in .venv, which the first target that needs it creates.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PROMPT ?= Give me three tips for learning a language.
MODEL ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## install, fetch the demo model (about 100 MB, once) and chat with it
	@echo; echo "> $(PROMPT)"
	@$(BIN)/colibri-mmap chat --demo --verbose --temp 0 -n 160 -p "$(PROMPT)"
	@echo
	@echo "To go on in a conversation:      $(BIN)/colibri-mmap chat --demo"
	@echo "In a browser, and for programs:  $(BIN)/colibri-mmap serve --demo"
	@echo "With a model of your own:        $(BIN)/colibri-mmap chat -m MODEL.gguf"

test: check ## install what is missing, run all checks and the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not bench"

test-all: check ## the same with the slow tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not bench"

check: $(VENV)/.installed-dev ## format, lint, types and import contracts
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed ## measure MODEL=file.gguf, or the demo model
	@model="$(MODEL)"; \
	[ -n "$$model" ] || model=$$($(BIN)/python -c 'from colibri_mmap.demo import ensure_demo_model; print(ensure_demo_model())'); \
	$(BIN)/colibri-mmap bench -m "$$model"

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) build dist *.egg-info .coverage htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: $(PYTHON) is not installed; on Debian or Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, this is $$("$(PYTHON)" --version); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: Python's venv module is incomplete; on Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.installed $@
