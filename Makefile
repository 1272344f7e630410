# Everything runs from a fresh clone with Python 3.11 or later and make; the first call installs into .venv.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# python3.11 where there is one that runs, else python3 if it is new enough.
PYTHON ?= $(shell \
	for python in python3.11 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; \
	done)

.PHONY: help train test test-fast lint format clean docs docs-serve
.PHONY: test-long test-limit test-limit-wide test-slurm test-faults test-kill test-caught test-many test-gpu dist-test lab
.PHONY: bench bench-quick bench-gpu gpu-first bench-search bench-paper bench-emulated plan-7b accuracy

help:
	@echo "make train        train a small GPT on two CPU processes under a memory limit (examples/train_gpt.py)"
	@echo "make test         everything that must hold: lint, types, import rules, tests (about 20 minutes)"
	@echo "make test-fast    lint and the unit tests (about a minute)"
	@echo "make lint         ruff, mypy and the import rules"
	@echo "make format       let ruff rewrite what it can"
	@echo "make docs         build the documentation in build/site; make docs-serve   show it at 127.0.0.1:8000"
	@echo "make clean        remove the environment, caches and runs"
	@echo
	@echo "Slower checks:"
	@echo "make test-long        runs beside plain PyTorch, DDP and FSDP with more steps than in make test (some minutes)"
	@echo "make test-limit       a plan survives under a hard limit that kills all-replicated (root, cgroup v1)"
	@echo "make test-limit-wide  a wide model trains under a hard limit that kills FairScale FSDP (root, cgroup v1)"
	@echo "make test-slurm       preempts and resumes a run on a real two-node SLURM on this machine (root, slurm-wlm, munge)"
	@echo "make test-faults      a fault at every stage of a run, on either rank: both ranks end within 10 s (half an hour)"
	@echo "make test-kill        ten runs killed at random moments go on from their last checkpoint to the same loss"
	@echo "make test-caught      twelve scripts that catch a failure of one rank end with their own status on all ranks"
	@echo "make test-many        1,000 small layers train within a limit that replicating them does not fit (minutes)"
	@echo "make dist-test        wheel and sdist, each installed into an empty environment, train and explain there"
	@echo "make test-gpu         the tests that need a GPU (one is enough)"
	@echo "make lab              several nodes: sharding inside nodes, and a node that fails (root, cgroup v1)"
	@echo
	@echo "Benchmarks (all of them: python -m bench):"
	@echo "make bench            beside DDP, FSDP and FairScale under hard memory limits (root, cgroup v1; many hours)"
	@echo "make bench-quick      the same for small models, some minutes; make bench-gpu   the same on CUDA"
	@echo "make gpu-first        one GPU, a quarter of an hour: engines, links, memory; each call goes on with what is left"
	@echo "make bench-search     the exact search against a MILP solver"
	@echo "make bench-paper      plans the settings of the OSDP paper on its machine and writes docs/paper.md (an hour)"
	@echo "make bench-emulated   on 8 and 64 ranks that are not there (goes on where it was stopped; some hours on one core)"
	@echo "make plan-7b          a LLaMA of 7 B parameters planned for 64 emulated ranks in under 4 GB and 90 s"
	@echo "make accuracy         predicted beside measured, for many models and plans: writes docs/accuracy.md"

train: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py

# Three at a time, each file by one of them: ranks often wait for each other. In the order that tests/conftest.py gives.
test: lint
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Lint, and the unit tests that are quick and start no processes: for while you work.
test-fast: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not processes and not slow" tests/unit

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000

# The tests with tests/support/parity.py: IS_LONG.
test-long: $(INSTALLED)
	LONG_TESTS=1 $(BIN)/pytest tests/parity/test_training.py tests/parity/test_tensor_parallel_models.py tests/parity/test_half_precision_losses.py

test-limit: $(INSTALLED)
	$(BIN)/python -m bench hard-limit

test-limit-wide: $(INSTALLED)
	$(BIN)/python -m bench wide-limit

test-slurm: $(INSTALLED)
	$(BIN)/python -m tests.system.slurm.preempt

test-faults: $(INSTALLED)
	$(BIN)/python -m tests.system.faults

test-kill: $(INSTALLED)
	$(BIN)/python -m tests.system.kills 10

test-caught: $(INSTALLED)
	$(BIN)/python -m tests.system.caught_failures 12

test-many: $(INSTALLED)
	$(BIN)/python -m tests.system.many_modules

dist-test: $(INSTALLED)
	$(BIN)/python -m tests.system.distribution

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu tests

lab: $(INSTALLED)
	$(BIN)/python -m bench node-failure
	$(BIN)/python -m bench nodes

# Each goes on where it was stopped; OPTIONS='--only nd-small --settings 2-1gbit --write-docs' and the like are passed on.
bench: $(INSTALLED)
	$(BIN)/python -m bench comparison $(OPTIONS)

bench-quick: $(INSTALLED)
	$(BIN)/python -m bench comparison --quick --fresh $(OPTIONS)

bench-gpu: $(INSTALLED)
	$(BIN)/python -m bench comparison --device cuda $(OPTIONS)

# OPTIONS=--dry-run tries all of it with a small model on the CPU.
gpu-first: $(INSTALLED)
	$(BIN)/python -m bench gpu-first $(OPTIONS)

bench-search: $(INSTALLED)
	$(BIN)/python -m bench search $(OPTIONS)

bench-paper: $(INSTALLED)
	$(BIN)/python -m bench paper $(OPTIONS)

bench-emulated: $(INSTALLED)
	$(BIN)/python -m bench emulated --write $(OPTIONS)

plan-7b: $(INSTALLED)
	$(BIN)/python -m bench plan-7b

accuracy: $(INSTALLED)
	$(BIN)/python -m bench accuracy --write docs/accuracy.md

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) runs lightning_logs build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installs again only when what is to be installed has changed.
$(INSTALLED): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,docs]'
	touch $@
