# Each target works from a bare checkout: it makes .venv when that is missing or older than what it is made from.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
PAGE := web/node_modules/.package-lock.json
TORCH := torch==2.13.0
# Errors alone are shown. Modules are compiled when they are first imported, which is a small part of all there are.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet --no-compile -c constraints.txt
# The first interpreter of these that really runs and is new enough (a version manager's shim may do neither).
PYTHON := $(shell for python in python3 python3.12 python3.13 python3.11 python; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)

.PHONY: demo smoke test test-all test-gpu test-gpu-all check performance package install clean

demo: $(INSTALLED)
	$(BIN)/kvern run examples/requests.jsonl examples/answers.jsonl --overwrite

# What a new user does first, where nothing is installed that tests need.
smoke: $(INSTALLED)
	$(BIN)/python tests/support/smoke.py

# Hundreds of processes are started, which would compile what they import each time where images of containers tell Python
# to keep no bytecode.
CPU_TEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(TOOLS) $(PAGE)
	$(CPU_TEST) -m "not gpu and not nightly" --ignore tests/gpu

test-all: $(TOOLS) $(PAGE)
	$(CPU_TEST) --hypothesis-profile night

# On a machine with an NVIDIA GPU: most tests side by side, then those that look at times or memory. A plugin that is not
# asked for would warn of xdist, and warnings are errors.
GPU_TEST = OMP_NUM_THREADS=2 $(BIN)/python -m pytest -p no:benchmark -m

test-gpu: $(TOOLS)
	$(GPU_TEST) "gpu and not alone and not nightly" -n 6 --dist worksteal
	$(GPU_TEST) "gpu and alone and not nightly"

test-gpu-all: $(TOOLS)
	$(GPU_TEST) "gpu and not alone" -n 6 --dist worksteal
	$(GPU_TEST) "gpu and alone"

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_structure.py tests/test_docs.py

# The tables of docs/PERFORMANCE.md, from benchmarks/results/.
performance: $(INSTALLED)
	$(BIN)/python -m benchmarks.performance

# What is published, in dist/; the wheel is tried in a new environment.
package: $(INSTALLED)
	deploy/package.sh $(BIN)/python

install: $(TOOLS)

# What runs kvern. PyTorch comes first and alone: it is by far the largest, and a machine that has it keeps it when the
# rest changes.
$(INSTALLED): pyproject.toml constraints.txt
ifeq ($(PYTHON),)
	@echo "kvern needs Python 3.11 or newer with the venv module; none of python3, python3.12, python3.13," \
		"python3.11, python is that. Install one, or name it: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python3.12" >&2
	@exit 1
endif
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e .
	@touch $@

# And what tests and checks it.
$(TOOLS): $(INSTALLED)
	$(PIP) -e ".[parquet,test,check]"
	@touch $@

# What builds the chat page and checks it, where npm is at hand: the tests that need it say so when it is missing.
$(PAGE): web/package-lock.json
	-@! command -v npm >/dev/null || (cd web && npm ci --ignore-scripts --silent)

# A Triton Inference Server for tests, in an environment of its own (369 MB).
.triton-env:
	$(PYTHON) -m venv $@.new
	$@.new/bin/python -m pip install --quiet --quiet --no-compile nvidia-pytriton==0.7.0 numpy==1.26.4
	mv $@.new $@

clean:
	rm -rf $(VENV) .triton-env web/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/answers* examples/.answers* .clients
