# Two commands do everything on a fresh machine: `make demo` and `make test`.
PORT ?= 8091
MODEL ?= qwen3
PYTHON_ENV = .venv/bin/python
RUN = .venv/bin/vllm-tts-cache

.PHONY: setup demo serve test test-all lint bench help

help:  ## Show this list.
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup:  ## Build .venv from nothing; quick when it is up to date.
	@scripts/setup.sh

demo: setup  ## Register a voice, precompute it, speak, restart, speak again.
	@$(RUN) demo --family $(MODEL)

serve: setup  ## Serve a tiny checkpoint on PORT (8091), on the CPU.
	@$(RUN) serve --port $(PORT) --family $(MODEL)

lint: setup  ## Lint, format check, types, import contracts.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports
	.venv/bin/deptry vllm_tts_cache

# Two processes: whole files, or a family's servers, each.
PYTEST = $(PYTHON_ENV) -m pytest -q -n 2

test: lint  ## All checks, then all tests.
	$(PYTEST)

test-all: lint  ## As test, with the long proofs: 1,000 kills, 10,000 hostile requests, plain vLLM.
	TTS_CACHE_TEST_KILLS=1000 TTS_CACHE_TEST_HOSTILE_CASES=10000 $(PYTEST) -m "long or not long"

bench: setup  ## Measure ours beside stock (over an hour); writes benchmarks/results/, docs/plots/.
	$(PYTHON_ENV) -m benchmarks

bench-test: setup  ## The benchmark's own tests.
	$(PYTHON_ENV) -m pytest -q benchmarks/tests
