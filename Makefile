# Each target works from a fresh clone: the first one to run makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all check format clean

demo: $(INSTALLED)
	$(BIN)/python examples/tour.py -o out/tour.png

test: $(INSTALLED)
	$(BIN)/pytest -n 2

# Everything `test` runs, with ten times the property-test examples.
test-all: $(INSTALLED)
	HYPOTHESIS_PROFILE=thorough $(BIN)/pytest -n 2

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist out src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
