# Each target installs its requirements once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
LOCK := $(BIN)/uv pip compile --quiet --config-file requirements/uv.toml --universal --python-version 3.11 \
  --fork-strategy fewest --generate-hashes --no-emit-package torch --constraint requirements/torch.txt \
  --custom-compile-command "make lock"

.PHONY: demo demo-flower demo-private test test-cluster test-deployment test-docs test-flower test-release test-thorough lint bench docs docs-serve setup lock sbom release clean

demo: $(READY)
	$(BIN)/waffle demo

demo-flower: $(READY)
	$(BIN)/waffle deploy demo

# The same run in the clear and with masked updates: ends with one line that compares weights, accuracy and bytes.
demo-private: $(READY)
	$(BIN)/waffle deploy demo --masked --out demo-private

# Bytecode is kept even if the environment forbids it: the tests start many processes, which would compile again.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

test-thorough: $(READY)
	$(BIN)/pytest -n 2 -m thorough

test-flower: $(READY)
	$(BIN)/pytest -m flower tests/test_flower_*.py tests/test_tutorials.py

# Every page is what the committed records give, and every tutorial runs.
test-docs: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal -m "docs and not flower"

# A server and three sites as real processes: the simulator's bits, the operator's tasks, attacks on the open port.
test-deployment: $(READY)
	$(BIN)/pytest -m "deployment and not flower" tests/test_flower_running.py

# Three nodes of a Ray cluster: a node killed, Ctrl-C, every command that trains there.
test-cluster: $(READY)
	$(BIN)/pytest -m cluster tests/test_ray_nodes.py

# What is locked can be installed from the package index; minutes that a change of the code does not need.
test-release: $(READY)
	$(BIN)/pytest -m release tests/test_supply_chain.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) $(PEERS_READY)
	$(BIN)/python -m benchmarks.cpu

# Strict: a broken link, a page that the navigation lacks, or a public name without a docstring fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

setup: $(READY)

# All packages come from the lock file, including the setuptools that builds ours. On Linux pip installs the CPU build of
# torch if PIP_EXTRA_INDEX_URL is PyTorch's index for it, otherwise the CUDA build with its libraries.
$(READY): pyproject.toml requirements/dev.txt requirements/torch.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-warn-conflicts --requirement requirements/torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	command -v chromium || command -v chromium-browser || command -v google-chrome \
	  || $(BIN)/playwright install chromium >/dev/null 2>&1 \
	  || echo "no Chromium found and it could not be installed: browser tests will be skipped"
	touch $(READY)

# The peers need other package versions than ours. Building pfl needs an old setuptools.
$(PEERS_READY): benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet "setuptools<81" wheel
	$(PEERS)/bin/python -m pip install --quiet --no-build-isolation --requirement $<
	touch $(PEERS_READY)

# Keeps every pin that is still valid. UPGRADE=--upgrade takes the newest versions; set a new torch by hand in torch.txt,
# torch-cpu.txt and uv.toml. One file works for Python 3.11 and later, on Linux and macOS.
lock: $(READY)
	$(LOCK) $(UPGRADE) pyproject.toml --extra dev --extra byzfl --output-file requirements/dev.txt
	$(LOCK) pyproject.toml --extra flower --extra parquet --extra private --constraint requirements/dev.txt \
	  --output-file requirements/deploy.txt

# The packages that a deployment installs, as CycloneDX.
sbom: $(READY)
	mkdir -p dist
	$(BIN)/python packaging/sbom.py dist

# Builds and checks what is published. The wheel is installed into a clean environment per Python.
release: $(READY) test-release
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz
	$(MAKE) sbom
	$(BIN)/python tools/check_release.py $(PYTHONS)
	@ls -l dist
	@echo "Next, as a maintainer:"
	@echo "  1. Date the version in CHANGELOG.md and CITATION.cff, and commit."
	@echo "  2. Tag the commit: git tag --sign v$$($(BIN)/python -c 'import waffle_fl; print(waffle_fl.__version__)') && git push --tags"
	@echo "  3. Approve the release workflow, which publishes dist/ by trusted publishing."
	@echo "  4. Attach dist/*.cdx.json to the release, and build the image from the tag (docs/install-server.md)."

clean:
	rm -rf $(VENV) $(PEERS) demo demo-flower demo-private runs site dist
