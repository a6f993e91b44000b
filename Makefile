# Everything runs in .venv, which every target makes by itself. Set PYTHON to choose the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runs
READY := .venv/.installed
# Modules are compiled at their first import, and most have none; so what runs here may write what it compiled.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: install quickstart check quick test apart numbers test-all docs format clean

install: $(READY)

# What runs, reports and the demo need.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("g2rpo needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip # those of old Pythons take three times as long
	$(PIP) --editable '.[demo,ocr]'
	touch $(RUNS)

# And what tests, checks and the documentation need.
$(READY): $(RUNS)
	$(PIP) --editable '.[dev]'
	touch $(READY)

# Teaches the embedded tiny model to spell; run again, it continues or shows the results.
quickstart: $(RUNS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/g2rpo train words --run-dir runs/quickstart --resume

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# A process for each core, with one thread; files stay whole, so that what a file builds is built once.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not slow and not apart"

# Browsers, killed processes, ranks and the longest runs.
apart: $(READY)
	$(PYTEST) -m "apart and not slow"

# Files with tolerances once more, as processors with SSE4 and with AVX2 compute them.
numbers: $(READY)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) -m "numbers and not slow"
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) -m "numbers and not slow"

# Formulas, configs and tiny runs, in a minute.
quick: $(READY)
	$(PYTEST) -m quick

test-all: $(READY)
	$(PYTEST)

# Any warning is an error; the site is in site/.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist site src/*.egg-info
