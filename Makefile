# Each target works from a fresh clone: the first one to run makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := .venv/.demo
INSTALLED := .venv/.installed
IS_NEW := 'import sys; sys.version_info < (3, 11) and sys.exit("make needs Python 3.11 or newer: for example PYTHON=python3.12")'
DOCUMENTED := .venv/.documented
NEWEST := .venv-newest

.PHONY: demo test test-core test-all test-newest check docs release-check format sanitize clean

demo: $(DEMO)
	$(BIN)/posenc compare --quick --overwrite -o out/compare
	@echo
	@echo "out/compare/figure.png shows how each encoding does on sequences longer than it was trained on."
	@echo "Next: .venv/bin/posenc show rope, .venv/bin/posenc explain --help, and docs/index.md."

# A worker takes neighbours, which share imports and fixtures, and the rest of the other's at the end.
WORKERS := -n 2 --dist worksteal
PYTEST := $(BIN)/pytest $(WORKERS)

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

# The numbers, the ops, the functions and the modules: what a change of an encoding needs.
test-core: $(INSTALLED)
	$(PYTEST) -m "not slow" tests/numerics tests/ops tests/functional tests/nn

# The slow tests too, and ten times the property-test examples.
test-all: $(INSTALLED)
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

# With the newest of every package, whatever constraints.txt says; asks for newer ones at each run.
test-newest:
	test -x $(NEWEST)/bin/python || { $(PYTHON) -c $(IS_NEW) && $(PYTHON) -m venv $(NEWEST); }
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --upgrade --upgrade-strategy eager -e '.[test]'
	$(NEWEST)/bin/pytest $(WORKERS) -m "not slow"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "manual: $(CURDIR)/site/index.html"

# Builds sdist and wheels, checks them, and tries each in an environment of PYTHON with torch only.
release-check: docs
	$(PYTHON) -c $(IS_NEW) && $(PYTHON) tools/release

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SANITIZED := build/sanitized
sanitize: $(INSTALLED)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/posenc $(SANITIZED)
	rm -f $(SANITIZED)/posenc/ops/native/*.so
	gcc -std=c99 -O1 -g -fexceptions -fsanitize=address,undefined -fno-sanitize-recover=undefined -fPIC -shared \
	  -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['include'])") \
	  src/posenc/ops/native/native.c -o $(SANITIZED)/posenc/ops/native/_native.abi3.so -ldl -lm
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) \
	  $(BIN)/python -m pytest $(addprefix tests/ops/rotation/test_, outputs.py norm.py c.py rotate.py ops.py polar.py) \
	  -k "outputs or test_ops and not opcheck or c and not triton and not opcheck"

# What the demo needs: torch, and what the `posenc` command draws and prints with.
$(DEMO): pyproject.toml constraints.txt setup.py $(wildcard src/posenc/ops/*/*.[ch])
	test -x $(BIN)/python || { $(PYTHON) -c $(IS_NEW) && $(PYTHON) -m venv .venv; }
	$(INSTALL) -e '.[cli]'
	touch $@

# The rest: what the suite and the checks need.
$(INSTALLED): $(DEMO)
	$(INSTALL) -e '.[dev]'
	touch $@

# What the manual needs, which the suite does not.
$(DOCUMENTED): $(INSTALLED)
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv $(NEWEST) build dist out site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
