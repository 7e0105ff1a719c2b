# Two commands set everything up and need no other step: make demo, make test.
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed
export OPENBLAS_NUM_THREADS := 1

.PHONY: demo test check benchmark survive calibrate dashboard clean

demo: $(INSTALLED)
	@$(PYTHON) -m experiments demo

test: $(TEST_INSTALLED)
	$(PYTHON) -m pytest

check: $(TEST_INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

benchmark: $(TEST_INSTALLED)
	$(PYTHON) -m benchmarks.step_time
	$(PYTHON) -m benchmarks.recorder_overhead
	$(PYTHON) -m benchmarks.statistics_kernel
	$(PYTHON) -m benchmarks.write_path

# Recording runs killed 200 times, four times each, at random moments: about four minutes; `make test` kills a few.
survive: $(TEST_INSTALLED)
	$(PYTHON) -m benchmarks.crash --kills 200

# Faults x severities x seeds, and docs/calibration.md: about 1.5 hours on two cores; continues where it was.
calibrate: $(INSTALLED)
	$(PYTHON) -m calibration run --part tuning
	$(PYTHON) -m calibration run --part judged
	$(PYTHON) -m calibration report

# The committed reference page that a reader opens first.
dashboard: $(INSTALLED)
	$(PYTHON) -m experiments run 19-healthy --overwrite
	$(VENV)/bin/analyzer render runs/19-healthy -o experiments/19-healthy/dashboard.html

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist runs
