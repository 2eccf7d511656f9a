# `make demo` shows the main job on CPU ranks, `make test` runs the tests; both make their own .venv first.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint install clean

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow or gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED)

$(INSTALLED): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "Python 3.12 or newer is needed, $(PYTHON) is $$($(PYTHON) --version): set PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, megatron-core and the development tools into $(VENV): several GB, some minutes"
	$(BIN)/pip install -q --disable-pip-version-check -e ".[train,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build demo_out
