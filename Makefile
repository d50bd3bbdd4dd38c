# Two commands do everything on a fresh machine: `make demo` and `make test`.
PORT ?= 8091
MODEL ?= qwen3
PYTHON_ENV = .venv/bin/python
RUN = .venv/bin/vllm-tts-cache

.PHONY: setup demo serve test lint bench help

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

test: lint  ## All checks, then all tests.
	$(PYTHON_ENV) -m pytest -q

bench: setup  ## Measure ours beside stock (over an hour); writes benchmarks/results/, docs/plots/.
	$(PYTHON_ENV) -m benchmarks
