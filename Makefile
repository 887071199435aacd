# Each target works from a bare checkout: it makes .venv when that is missing or older than what it is made from.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
# The first interpreter of these that really runs and is new enough (a version manager's shim may do neither).
PYTHON := $(shell for python in python3 python3.12 python3.13 python3.11 python; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)

.PHONY: demo test check install clean

demo: $(STAMP)
	$(BIN)/kvern run examples/requests.jsonl examples/answers.jsonl --overwrite

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

install: $(STAMP)

# PyTorch comes first and alone: it is by far the largest, and a machine that has it keeps it when the rest changes.
$(STAMP): pyproject.toml constraints.txt
ifeq ($(PYTHON),)
	@echo "kvern needs Python 3.11 or newer with the venv module; none of python3, python3.12, python3.13," \
		"python3.11, python is that. Install one, or name it: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python3.12" >&2
	@exit 1
endif
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install --quiet -e ".[parquet,test,check]" -c constraints.txt
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/answers* examples/.answers*
