# Everything a developer runs. Each target makes the virtual environment that it needs: a fresh
# machine needs python3 (3.11 or newer, with its venv module) and make, nothing else.
#
#   make test      the test suite              make demo    a training that survives a kill -9
#   make lint      ruff and mypy --strict      make bench   beside torch, with the bounds checked
#   make docs      the documentation, in site/  make repeat  the suite N times
#   make simulate  thousands of simulated jobs under faults, a million events and more
#   make hosts     jobs and an etcd on several hosts through every loss, as root (network namespaces)
#   make schedulers  the documented jobs under a real Slurm and Open MPI, as root; some minutes
#   make views     the page of `regrow web` in a chromium; less than a minute
#   make screenshots  the pictures of the documentation, in docs/images/
#   make thorough  what the suite has no time for: rarer faults, large amounts
#   make training  the demo and the examples' trainings as tests, jobs of torch and of JAX, long ones
#   make demo-replace  a training that replaces two killed processes, one by one
#   make bench-goodput  a training under faults for half an hour, beside torchrun and NVIDIA's wrapper
#   make stops     100 jobs that a signal asks to stop at a random time
#   make clean     remove what the targets made
#
# `make test PYTHON=python3.13` runs a target with another Python, in an environment of its own.

PYTHON ?= python3
# Test processes at once (of `hosts`, each has a job of four; of `training`, one of two or three, and
# all tests of a file, which share what is slow to make), more arguments for pytest, those of the
# benchmarks that have bounds, of the simulator, and how often `repeat` repeats.
JOBS ?= 7
HOSTS_JOBS ?= 3
SCHEDULERS_JOBS ?= 4
TRAINING_JOBS ?= 2
VIEWS_JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?= --check
GOODPUT_ARGS ?=
SIMULATE_ARGS ?= --seeds 1000 --events 1000000
RESTARTS_ARGS ?= --seeds 10000
N ?= 20

# The environments of another Python than the default are named after its version. One that does not
# run has none, and check-python stops.
version = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
OF := $(if $(filter-out python3,$(PYTHON)),-$(version))
DEV := .venv$(OF)
DEMO := .venv-demo$(OF)
DOCS := .venv-docs$(OF)
BENCH := .venv-bench$(OF)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Each test process, and each agent that is started, would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help test thorough hosts schedulers training views screenshots demo demo-replace lint docs bench bench-goodput simulate stops repeat clean check-python

help:
	@sed -n '/^#  /s/^# //p' Makefile

test: $(DEV)/.rewritten
	$(DEV)/bin/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

thorough: $(DEV)/.rewritten
	$(DEV)/bin/python -m pytest -n $(JOBS) -m "thorough and not hosts and not training" $(PYTEST_ARGS)
	$(DEV)/bin/python -m pytest -n $(TRAINING_JOBS) --dist loadfile --timeout 200 \
	  -m "thorough and (hosts or training)" $(PYTEST_ARGS) || test $$? = 5 # none of the tests that PYTEST_ARGS selects

hosts: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -n $(HOSTS_JOBS) -m "hosts and not thorough" $(PYTEST_ARGS)

schedulers: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -n $(SCHEDULERS_JOBS) -m schedulers $(PYTEST_ARGS)

# Beside other work, the import of torch takes up to ten times as long.
training: $(DEV)/.frameworks
	$(DEV)/bin/python -m pytest -n $(TRAINING_JOBS) --dist loadfile --timeout 200 \
	  -m "training and not thorough" $(PYTEST_ARGS)

views: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -n $(VIEWS_JOBS) -m views tests/views $(PYTEST_ARGS)

screenshots: $(DEV)/.installed
	PYTHONPATH=tests $(DEV)/bin/python -m helpers.views.screenshots

demo: $(DEMO)/.installed
	$(DEMO)/bin/python examples/demo.py

demo-replace: $(DEMO)/.installed
	$(DEMO)/bin/python examples/demo_replace.py

lint: $(DEV)/.installed
	$(DEV)/bin/python -m ruff check .
	$(DEV)/bin/python -m ruff format --check .
	$(DEV)/bin/python -m mypy --strict

# mkdocs-material announces its successor on every build, and --strict would fail for it.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict

bench: $(DEV)/.installed
	$(DEV)/bin/python benchmarks/launch.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/store.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/logs.py --check
	$(DEV)/bin/python benchmarks/rendezvous.py $(BENCH_ARGS) $(if $(shell command -v etcd),--etcd)
	$(DEV)/bin/python benchmarks/node_loss.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/timers.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/hangs.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/heartbeat.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/inprocess.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/state.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/replace.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/preload.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/goodput_marks.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/should_stop.py $(BENCH_ARGS)
	$(DEV)/bin/python benchmarks/views.py $(BENCH_ARGS)

# Half an hour. The figures and the picture of the README come from it.
bench-goodput: $(BENCH)/.installed
	rm -f runs/goodput.json; mkdir -p runs
	$(BENCH)/bin/python benchmarks/goodput.py --json runs/goodput.json --plot docs/goodput.svg $(GOODPUT_ARGS)

simulate: $(DEV)/.installed
	PYTHONPATH=tests $(DEV)/bin/python -m simulator $(SIMULATE_ARGS)
	PYTHONPATH=tests $(DEV)/bin/python -m simulator.restarts $(RESTARTS_ARGS)

stops: $(DEV)/.installed
	REGROW_STOP_RUNS=100 $(DEV)/bin/python -m pytest -q tests/e2e/test_early_stop.py -k same_step $(PYTEST_ARGS)

repeat: $(DEV)/.rewritten
	@for run in $$(seq $(N)); do \
	  echo "== suite $$run of $(N)"; \
	  $(DEV)/bin/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS) || exit 1; \
	done

clean:
	rm -rf .venv .venv-* .hypothesis .mypy_cache .ruff_cache build dist runs site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One rule for all environments. The stamp is touched last: an install that was interrupted is
# taken up again, one that is complete is re-used until pyproject.toml changes.
$(DEV)/.installed: EXTRA = dev
$(DEMO)/.installed: EXTRA = demo
$(DOCS)/.installed: EXTRA = docs
$(BENCH)/.installed: EXTRA = bench
$(DEV)/.installed $(DEMO)/.installed $(DOCS)/.installed $(BENCH)/.installed: pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@echo "make: installing into $(@D); where torch is among it, this may take minutes"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRA)]'
	$(@D)/bin/python -m compileall -q src # pip does it for what it copies
	@touch $@

$(DEV)/.frameworks: $(DEV)/.installed
	$(DEV)/bin/python -m pip install --quiet --editable '.[dev,frameworks]'
	@touch $@

# pytest rewrites the asserts of a test file once, and keeps that: without this each of the processes
# of the first suite would do it for all of them.
$(DEV)/.rewritten: $(DEV)/.installed
	@if $(DEV)/bin/python -m pytest --collect-only -qq >/dev/null; then touch $@; fi

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: '$(PYTHON)' not found: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c '' || { \
	  echo "make: '$(PYTHON)' does not run, see above: name one that does: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: regrow needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | cut -d" " -f2): name another: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
