# Every target sets itself up on a machine that has only python3 (3.11 or newer, with venv) and make.

PYTHON ?= python3
UV := $(or $(shell command -v uv 2>/dev/null),.venv/bin/uv)
BIN := .venv/bin
READY := .venv/ready
OLDEST_READY := .venv-oldest/ready
# Tests run in parallel processes of one thread each: most are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal --durations 30
# The tests start Python many times; without its bytecode files every start compiles torch's sources again.
unexport PYTHONDONTWRITEBYTECODE
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-oldest test-all serve lint bench docs ledger lock clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(READY)  ## train a small model in minutes, evaluate it, write a report to runs/demo
	@$(BIN)/regard demo

test: $(READY)  ## run the tests, in minutes on two CPU cores
	@$(PYTEST) -m "not slow and not gpu"

test-slow: $(READY)  ## what make test leaves out: slow tests, and more random examples
	@$(PYTEST) -m "(slow or hypothesis) and not gpu" --hypothesis-profile=thorough

test-oldest: $(OLDEST_READY)  ## the tests marked oldest, on the oldest torch that is supported
	@$(PYTEST:.venv/%=.venv-oldest/%) -m "oldest and not gpu"

test-all:  ## run make test, test-slow and test-oldest
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-slow
	@$(MAKE) --no-print-directory test-oldest

serve: $(READY)  ## serve the demo's model and its page on this machine
	@$(BIN)/regard serve runs/demo

lint: $(READY)  ## style, formatting, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/ty check

bench: $(READY)  ## compare the speed with transformers in one interleaved run; prints JSON
	@$(BIN)/python -m benchmarks

docs: $(READY)  ## build the documentation into site/, offline, warnings as errors
	@$(BIN)/python docs/generate_api.py
	@$(BIN)/zensical build --clean --strict

ledger: $(READY)  ## count the shown rows of docs/ledger.md; python -m tests.ledger --tick ticks it
	@$(BIN)/python -m tests.ledger

# The second lock differs from the first in torch and what torch brings; the copy makes all else keep its version.
lock: $(UV)  ## resolve the dependencies again into the hash-pinned locks
	@$(COMPILE) --upgrade pyproject.toml --extra dev --output-file requirements.lock
	@cp requirements.lock requirements-oldest.lock
	@echo "torch==2.11.*" | $(COMPILE) pyproject.toml - --extra dev --output-file requirements-oldest.lock

clean:  ## remove the environments, caches and built files, but not runs/
	@rm -rf .venv .venv-oldest site dist .pytest_cache .ruff_cache .hypothesis .cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "regard needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv; install it (Debian: apt-get install python3-venv) or name" \
			"another Python: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv

# uv itself comes out of the lock too, with its hashes.
.venv/bin/uv: | .venv/bin/python
	@echo "installing uv into .venv"
	@sed -n '/^uv==/,/^[^ ]/ { /^uv==/p; /^ /p }' requirements.lock > .venv/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .venv/uv.txt

.venv/ready: requirements.lock pyproject.toml | .venv/bin/python $(UV)
	@echo "installing the dependencies into .venv (the first time, torch is a download of gigabytes)"
	@$(UV) pip install --quiet --python .venv/bin/python --require-hashes -r requirements.lock
	@$(UV) pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

.venv-oldest/ready: requirements-oldest.lock pyproject.toml | .venv/bin/python $(UV)
	@echo "installing the oldest supported torch into .venv-oldest"
	@$(BIN)/python -m venv .venv-oldest
	@$(UV) pip install --quiet --python .venv-oldest/bin/python --require-hashes -r requirements-oldest.lock
	@$(UV) pip install --quiet --python .venv-oldest/bin/python --no-deps --no-build-isolation --editable .
	@touch $@
