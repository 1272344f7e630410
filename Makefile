# Everything runs from a fresh clone with Python 3.11 or later and make; the first call installs into .venv.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# python3.11 where there is one that runs, else python3 if it is new enough.
PYTHON ?= $(shell \
	for python in python3.11 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; \
	done)

.PHONY: help train test lint format clean test-limit test-slurm test-kill bench bench-quick bench-gpu bench-one-gpu test-gpu bench-verify
.PHONY: test-limit-wide bench-splitting lab bench-engine bench-collectives bench-search bench-paper accuracy bench-huge
.PHONY: bench-allocator

help:
	@echo "make train   train a small GPT on two CPU processes under a memory limit (examples/train_gpt.py)"
	@echo "make test    everything that must hold: lint, types, import rules, tests"
	@echo "make lint    the first three of them"
	@echo "make test-limit   a plan survives under a hard memory limit that kills all-replicated (root, cgroup v1)"
	@echo "make test-limit-wide   a wide model trains under a hard limit that kills FairScale FSDP (root, cgroup v1)"
	@echo "make lab     several nodes: what sharding inside nodes gains, and a node that fails (root, cgroup v1)"
	@echo "make bench   side by side with DDP, FSDP and FairScale under hard memory limits (root, cgroup v1; many hours)"
	@echo "make bench-quick   the same for small models, some minutes; make bench-gpu   the same on CUDA"
	@echo "make test-gpu      the tests that need a GPU (one is enough); make bench-one-gpu   predicted beside measured there"
	@echo "make test-slurm   preempts and resumes a run on a real two-node SLURM on this machine (root, slurm-wlm, munge)"
	@echo "make test-kill    ten runs killed at random moments go on from their last checkpoint to the same loss"
	@echo "make bench-splitting   memory and time of split operators, predicted and measured (the paper's figures 6 to 8)"
	@echo "make bench-engine, bench-collectives, bench-search   figures, each against what it is compared with"
	@echo "make accuracy   predicted beside measured, for many models and plans: writes docs/accuracy.md"
	@echo "make bench-allocator   what handing freed tensors back to the system costs on a CPU"
	@echo "make bench-huge   seconds and memory that reading a LLaMA of 7 B parameters takes"
	@echo "make bench-paper   plans the settings of the OSDP paper on its machine and writes docs/paper.md (minutes)"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove the environment, caches and runs"

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

test-limit: $(INSTALLED)
	$(BIN)/python benchmarks/hard_limit.py

test-limit-wide: $(INSTALLED)
	$(BIN)/python benchmarks/wide_limit.py

lab: $(INSTALLED)
	$(BIN)/python benchmarks/node_failure.py
	$(BIN)/python benchmarks/multinode.py

# Each goes on where it was stopped; OPTIONS='--only nd-small --settings 2-1gbit --write-docs' and the like are passed on.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.throughput $(OPTIONS)

bench-quick: $(INSTALLED)
	$(BIN)/python -m benchmarks.throughput --quick --fresh $(OPTIONS)

bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.throughput --device cuda $(OPTIONS)

bench-one-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/one_gpu.py $(OPTIONS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu tests

bench-verify: $(INSTALLED)
	$(BIN)/python -m benchmarks.throughput --verify --only nd-quick --settings 2-loopback $(OPTIONS)

test-slurm: $(INSTALLED)
	$(BIN)/python tests/system/slurm/preempt.py

test-kill: $(INSTALLED)
	$(BIN)/python -m tests.system.kills 10

bench-engine: $(INSTALLED)
	$(BIN)/python benchmarks/fairscale_baseline.py

bench-collectives: $(INSTALLED)
	$(BIN)/python benchmarks/collectives.py

bench-search: $(INSTALLED)
	$(BIN)/python benchmarks/search.py

bench-paper: $(INSTALLED)
	$(BIN)/python -m benchmarks.paper

bench-splitting: $(INSTALLED)
	$(BIN)/python benchmarks/splitting.py $(OPTIONS)

accuracy: $(INSTALLED)
	$(BIN)/python benchmarks/accuracy.py --write docs/accuracy.md

bench-allocator: $(INSTALLED)
	$(BIN)/python benchmarks/allocator.py $(OPTIONS)

bench-huge: $(INSTALLED)
	$(BIN)/python benchmarks/huge.py

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
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@
