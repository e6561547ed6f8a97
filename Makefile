PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long test-all test-x64 test-oldest dist docs lint format audit bench bench-published clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Everything that guards privacy and correctness, in minutes.
test: $(READY)
	DPVIM_TESTS=quick $(BIN)/python -m pytest -n auto -m "not long"

# Statistical and end to end tests, in programs that are optimised, with annotations checked.
test-long: $(READY)
	$(BIN)/python -m pytest -n auto -m long

# What a change must pass before it lands, with test-x64.
test-all: test test-long

# What guards privacy, with JAX set to double precision, as many statisticians have it.
test-x64: $(READY)
	JAX_ENABLE_X64=1 $(BIN)/python -m pytest -n auto -m "not long" tests/audit tests/inference/test_loop.py tests/synthesis/test_twin.py \
	  tests/test_fitting.py tests/test_svi.py tests/posterior/test_posterior.py \
	  $(addprefix tests/privacy/test_,$(addsuffix .py,batches clipping lattice noise randomness records sampling source)) \
	  tests/bridge/test_bridge.py tests/bridge/test_data.py tests/models

# With the oldest versions that pyproject.toml allows, in an environment of its own.
OLDEST := .venv-oldest
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "uv>=0.5"
	VIRTUAL_ENV=$(OLDEST) $(OLDEST)/bin/uv pip install --quiet --resolution lowest-direct -e ".[all]" \
	  "pytest>=8.2" "pytest-xdist>=3.6" "hypothesis>=6.100" "beartype>=0.20"
	$(OLDEST)/bin/python -m pytest -n auto -m "not long" tests/cli tests/test_extras.py tests/test_fitting.py tests/ledger \
	  tests/bridge/test_data.py tests/inference/test_variants.py tests/models tests/synthesis \
	  $(addprefix tests/privacy/test_,$(addsuffix .py,counts plan randomness))

# The wheel and the source archive, as they go to PyPI.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# The site, in build/site. Runs the code of its pages; warnings are errors.
docs: $(READY)
	$(BIN)/python tools/docs/pictures.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(READY)
	$(BIN)/dpvim audit
	$(BIN)/python benchmarks/audit_faults.py faults
	$(BIN)/python benchmarks/audit_faults.py control
	$(BIN)/python benchmarks/audit_faults.py table

bench: $(READY)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/time_to_answer.py
	$(BIN)/python benchmarks/lattice.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/many_fits.py

bench-published: $(READY)
	$(BIN)/python benchmarks/published_adult.py

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpvim needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis demo-output
