# Two commands do everything on a fresh machine: `make demo` and `make test`.
PORT ?= 8091
MODEL ?= qwen3
# The version of vLLM-Omni: each has an environment, see scripts/setup.sh.
HOST ?= 0.30
VENV = .venv$(if $(filter 0.30,$(HOST)),,-$(HOST))
PYTHON_ENV = $(VENV)/bin/python
RUN = $(VENV)/bin/vllm-tts-cache
# Whatever the environment says: else each of many processes compiles all anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: size clients host-diff types style setup browser postgres nginx prometheus ffmpeg demo serve test test-all lint house bench docs help

help:  ## Show this list.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## Build .venv from nothing; HOST=0.32 builds .venv-0.32.
	@HOST=$(HOST) scripts/setup.sh

browser:  ## Install Debian's Chromium, in which `make test-all` tries the page.
	@scripts/apt_install.sh "chromium chromedriver" chromium chromium-driver fonts-dejavu-core

postgres:  ## Install Debian's PostgreSQL, on which the tests keep catalogues.
	@scripts/setup_postgres.sh

nginx:  ## Install Debian's nginx, which the tests put in front of two servers.
	@scripts/apt_install.sh nginx nginx

clients: setup  ## Build .venv-clients, of which `make test-all` speaks by each package.
	@VENV=$(VENV) scripts/setup_clients.sh

prometheus:  ## Install Debian's Prometheus, which the tests ask what it sees.
	@scripts/apt_install.sh "prometheus promtool" prometheus

ffmpeg:  ## Install Debian's ffmpeg, with which the tests make clips and hear them.
	@scripts/apt_install.sh ffmpeg ffmpeg

demo: setup  ## Register a voice, precompute it, speak, restart, speak again.
	@$(RUN) demo --family $(MODEL)

serve: setup  ## Serve a tiny checkpoint on PORT (8091), on the CPU.
	@$(RUN) serve --port $(PORT) --family $(MODEL)

lint: setup  ## Lint, format check, types, import contracts, budgets.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types style

types:
	.venv/bin/pyright

style: size
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/deptry vllm_tts_cache

size:
	@$(PYTHON_ENV) scripts/house.py

# The tests count hops as well, so `lint`, which `make test` begins with, does not.
house: setup size  ## Print how large the code is, and hops; fail over a budget of [tool.house].
	@VLLM_LOGGING_LEVEL=ERROR $(PYTHON_ENV) -m pytest -qs tests/contract/test_hops.py

# Three processes on two cores, as many tests wait: whole files, or a family's servers,
# each. And one thread in each: two that share a core wait for one another at the end of
# every small operation. Long proofs start several servers each, and get two.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON_ENV) -m pytest -q -n $(1)

# What rests on the host. On a version other than the default one these tests are run,
# with a server of each family; in the long proofs also on the host's second runner.
HOST_TESTS = $(wildcard tests/families/test_*.py) tests/fault/test_hostile_sockets.py \
  tests/families/qwen3_tts/test_failed_neighbour.py \
  $(addprefix tests/contract/test_, $(addsuffix .py, \
  checkpoint_places cpu_attention cpu_platform cpu_rows deleted_prefix diffusion_models \
  diffusion_worker failed_prefix host_patches host_surface lost_prompts openapi \
  other_models other_sites own_threads plugin_loading registries requests_unchanged \
  reservation resumption sleep speech stopping tenants voice_prefill worker_calls)) \
  tests/features tests/e2e/test_journey.py::test_a_voice_speaks
HOST_LONG = $(addprefix tests/e2e/test_, host_routes.py second_runner.py wheel.py)
LONG = TTS_CACHE_TEST_KILLS=1000 TTS_CACHE_TEST_HOSTILE_CASES=10000 $(call PYTEST,2)

ifeq ($(HOST),0.30)
test: lint postgres nginx ffmpeg  ## All checks, then the tests; HOST=0.32: those of the host.
	$(call PYTEST,3)

test-all: lint browser postgres nginx prometheus ffmpeg clients  ## As test, with the long proofs: 1,000 kills, 10,000 hostile requests, plain vLLM, the page in a browser, a fleet, a server of each family.
	$(LONG) -m "long or not long"
else
test: setup postgres nginx ffmpeg
	$(call PYTEST,3) $(HOST_TESTS) -m "not long or other_host"

test-all: setup browser postgres nginx ffmpeg clients
	$(LONG) $(HOST_TESTS) $(HOST_LONG) -m "long or not long"
endif

bench: setup  ## Measure ours beside stock (many hours); writes benchmarks/results/, docs/plots/.
	$(PYTHON_ENV) -m benchmarks

host-diff:  ## What of the host this package uses, and what changed from OLD to NEW.
	@$(PYTHON_ENV) scripts/host_diff.py $(OLD) $(NEW)

docs: setup  ## Build the documentation into .work/site/index.html.
	$(PYTHON_ENV) -m mkdocs build --strict

bench-test: setup  ## The benchmark's own tests.
	$(PYTHON_ENV) -m pytest -q benchmarks/tests
