# `make demo` and `make test` do all their own set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-processes test-kernels test-cpus test-exactness test-lowest-torch test-docs test-engines test-clients test-agents test-trainers test-sinks test-scale test-dashboard flakes screenshots environments lint format docs bench chaos soak clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready
	@$(BIN)/lockstep demo || { code=$$?; \
		echo "The demo ended with code $$code: $(BIN)/lockstep doctor says what this machine can do" >&2; \
		exit $$code; }

# AGAIN=1 runs what failed in a target, one after the other; JOBS=n uses n processes; NO_EXACT=1 takes
# exact arithmetic away. Each target has a cache of its own, because CI runs two at once and each
# rewrites its list of failures.
JOBS ?= 2
PYTEST = $(BIN)/pytest -o cache_dir=.pytest_cache/$@ --durations=10 --durations-min=1 $(if $(NO_EXACT),--no-exact) \
	$(if $(AGAIN),--last-failed --last-failed-no-failures none --timeout 600)
PARALLEL = $(PYTEST) $(if $(AGAIN),,-n $(JOBS) --dist loadscope)

# Tests that start commands, fleets and runs as a user does, and kill them.
PROCESSES := tests/cli tests/e2e tests/faults tests/check tests/launch tests/replay tests/stores tests/tracing \
	tests/benchmarks \
	$(wildcard tests/train/test_*.py) tests/train/demo/test_demo.py tests/train/envs/test_harness.py \
	tests/train/records/test_sinks.py tests/fleet/test_evidence_live.py tests/fleet/update/test_faults_live.py \
	tests/deploy/test_metrics_and_probes.py

# What has a target of its own below.
APART := $(PROCESSES) tests/engine/cuda tests/cpus tests/exactness tests/docs tests/engines tests/clients tests/agents \
	tests/trainers tests/sinks tests/scale tests/browser

test: $(VENV)/.ready
	$(PARALLEL) $(addprefix --ignore=,$(APART))

test-processes: $(VENV)/.ready
	$(PARALLEL) $(PROCESSES)

# The kernels for GPUs, in Triton's interpreter, which is slow.
test-kernels: $(VENV)/.ready
	$(PYTEST) $(if $(AGAIN),,-n $(JOBS)) tests/engine/cuda

# The self-test and short demos on every kind of CPU that this one can play.
test-cpus: $(VENV)/.ready
	$(PARALLEL) tests/cpus

# The guard against undeclared close arithmetic, and the exact-only tests on other kinds of CPU and on none.
test-exactness: $(VENV)/.ready
	$(PYTEST) $(if $(AGAIN),,-n $(JOBS)) tests/exactness

# Tests of arithmetic on the lowest torch that pyproject.toml allows; before a release.
LOWEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
LOWEST := .venv-lowest-torch
test-lowest-torch:
	$(PYTHON) -m venv $(LOWEST)
	grep -Ev '^(torch|triton)==' constraints.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(LOWEST_TORCH)
	$(LOWEST)/bin/pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[dev]'
	$(LOWEST)/bin/lockstep doctor --report
	$(LOWEST)/bin/pytest -n 2 --dist loadscope tests/engine tests/cpus tests/train/learning --ignore=tests/engine/cuda

# Every command and Python block of README and docs.
test-docs: $(VENV)/.ready
	$(PARALLEL) tests/docs

# One and two faults at once on real processes, under load; SEED=n repeats one.
chaos: SECONDS ?= 600
chaos: $(VENV)/.ready
	$(BIN)/python -m tests.faults.campaign --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# Mixed load and weight updates on real processes: memory, descriptors, tasks and threads stay flat.
soak: SECONDS ?= 900
soak: $(VENV)/.ready
	$(BIN)/python -m tests.soak --seconds $(SECONDS)

# One installation at a time: a suite that needs an environment while all of them are being installed
# waits for the current one and installs its own next.
INSTALL = PYTHON=$(PYTHON) $(if $(shell command -v flock),flock $(VENV)/.installing)

# The environments of all suites below, which install their own where this was not run.
environments: $(VENV)/.ready
	@for script in scripts/install-*.sh; do echo "== $$script"; $(INSTALL) $$script || exit; done

# Real vLLM, SGLang and Dynamo, each in an environment of its own.
test-engines: $(VENV)/.ready
	$(INSTALL) scripts/install-vllm.sh
	$(INSTALL) scripts/install-sglang.sh
	$(INSTALL) scripts/install-dynamo.sh
	$(PYTEST) tests/engines --timeout 600

# Stock SDKs and agent frameworks against a gateway, in an environment of their own.
test-clients: $(VENV)/.ready
	$(INSTALL) scripts/install-clients.sh
	$(PYTEST) tests/clients

# Trackers that a run logs to, readers of exports, and Arize Phoenix for traces, in environments of their own.
test-sinks: $(VENV)/.ready
	$(INSTALL) scripts/install-sinks.sh
	$(INSTALL) scripts/install-phoenix.sh
	$(PYTEST) tests/sinks

# Real coding agents against a gateway and a scripted worker, in an environment of their own.
test-agents: $(VENV)/.ready
	$(INSTALL) scripts/install-agents.sh
	$(PYTEST) tests/agents

# Several gateways on real PostgreSQL, Dynamo on real etcd and NATS, from an environment of their own;
# with a campaign of kills for SECONDS.
test-scale: SECONDS ?= 120
test-scale: $(VENV)/.ready
	$(INSTALL) scripts/install-scale.sh
	$(INSTALL) scripts/install-dynamo.sh
	CAMPAIGN_SECONDS=$(SECONDS) $(PYTEST) tests/scale

# Trainers that people already have, on a gateway, in environments of their own.
test-trainers: $(VENV)/.ready
	$(INSTALL) scripts/install-trainers.sh
	$(PYTEST) tests/trainers

# The dashboard and the report in Debian's Chromium, before a live fleet; a page stays open for SECONDS.
test-dashboard: SECONDS ?= 60
test-dashboard: $(VENV)/.ready
	$(INSTALL) scripts/install-dashboard.sh
	LOCKSTEP_TEST_OPEN_SECONDS=$(SECONDS) $(PYTEST) tests/browser --timeout $$(($(SECONDS) * 2 + 180))

# The tests of .ci/flakes.txt, which passed in CI only alone: each RUNS=20 times beside a busy process per
# core. TESTS='id...' names others.
flakes: $(VENV)/.ready
	$(BIN)/python scripts/flakes.py run $(TESTS)

# The pictures of docs/dashboard.md, of a live fleet.
screenshots: $(VENV)/.ready
	$(INSTALL) scripts/install-dashboard.sh
	$(BIN)/python -m tests.browser.screenshots

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/failure_modes.py --check
	$(BIN)/python scripts/chat_fields.py --check
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/package_map.py --check
	$(BIN)/python scripts/prose.py

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site of docs/, into site/; fails on a broken link or anchor.
docs: $(VENV)/.ready
	$(BIN)/python scripts/reference.py --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Beside the peers, each in an environment of its own; writes docs/benchmarks.md.
bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache .hypothesis
