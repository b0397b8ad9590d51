# Each target sets up what it needs; a second run does not install again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready

.PHONY: demo demo-flower test test-flower lint bench setup clean

demo: $(READY)
	$(BIN)/waffle demo

demo-flower: $(READY)
	$(BIN)/waffle deploy demo

test: $(READY)
	$(BIN)/pytest -n 2

test-flower: $(READY)
	$(BIN)/pytest -m flower tests/test_flower_*.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) $(PEERS_READY)
	$(BIN)/python -m benchmarks.cpu

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps byzfl \
	  || echo "no byzfl, and none could be fetched: tests beside it will be skipped"
	command -v chromium || command -v chromium-browser || command -v google-chrome \
	  || $(BIN)/playwright install chromium >/dev/null 2>&1 \
	  || echo "no Chromium, and none could be fetched: tests in a browser will be skipped"
	touch $(READY)

# The peers need other versions than ours. pfl's own build needs an old setuptools.
$(PEERS_READY): benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet "setuptools<81" wheel
	$(PEERS)/bin/python -m pip install --quiet --no-build-isolation --requirement $<
	touch $(PEERS_READY)

clean:
	rm -rf $(VENV) $(PEERS) demo demo-flower runs
