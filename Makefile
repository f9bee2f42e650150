# Every target sets itself up: a virtual environment with pinned, hashed requirements, and on Debian as root the few
# system packages that tests need. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SYSTEM_PACKAGES := libnuma1 chromium openssl iproute2
# What the commands below install and run comes from the virtual environment, uv too.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup system testbed demo test lint generate picture benchmark benchmark-operator clean

help:
	@echo "make demo       a tiny Qwen3.5 learns a task by asynchronous GRPO, in about a minute"
	@echo "make test       lint, then all tests"
	@echo "make testbed    build the Kubernetes control plane that tests start; needs Go, minutes the first time"
	@echo "make lint       style, types, import rules, generated files and locks are current"
	@echo "make generate   write crds/, docs/reference/ and requirements/ anew"
	@echo "make picture    run the demo and take the README's picture of its report"
	@echo "make benchmark  the embedded engine against its own synchronous run and TRL; prints JSON"
	@echo "make benchmark-operator  the operator with 100, 1,000 and 5,000 trainings; prints JSON, needs an idle machine"

setup: $(READY)

$(READY): requirements/cpu.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.12 is needed; name it with: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/cpu.txt)"
	uv pip sync --quiet --compile-bytecode requirements/cpu.txt
	uv pip install --quiet --no-deps --editable .
	@touch $@

system:
	@missing=(); for package in $(SYSTEM_PACKAGES); do \
	    dpkg-query --show --showformat='$${Status}' $$package 2>/dev/null | grep -q "ok installed" || missing+=($$package); done; \
	if [[ $${#missing[@]} -eq 0 ]]; then exit 0; fi; \
	if [[ $$(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then \
	    echo "installing $${missing[*]}"; apt-get update -qq; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${missing[*]} >/dev/null; \
	else echo "please install: $${missing[*]} (tests that need them are skipped)"; fi

testbed: setup
	python -m tests.testbed build

demo: setup
	qwen35 run examples/tiny-grpo.yaml --output "runs/demo-$$(date +%Y%m%d-%H%M%S)"

test: setup system lint testbed
	python -m pytest

lint: setup
	ruff check .
	ruff format --check .
	mypy
	mypy tools examples
	cd benchmarks && MYPYPATH=. mypy --explicit-package-bases --config-file ../pyproject.toml embedded.py peers/trl_grpo.py
	mypy --explicit-package-bases benchmarks/operator_scale.py benchmarks/scheduler.py benchmarks/simulator_scale.py
	lint-imports --no-cache
	python -m qwen35_operator.api.crd | diff crds/rl.qwen35.io_qwen35trainings.yaml - || { echo "run make generate"; exit 1; }
	diff crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml || { echo "run make generate"; exit 1; }
	python -m qwen35_operator.api.reference | diff docs/reference/api.md - || { echo "run make generate"; exit 1; }
	python -m qwen35_operator.status.reference | diff docs/reference/conditions.md - || { echo "run make generate"; exit 1; }
	tools/lock.sh --check

generate: setup
	python -m qwen35_operator.api.crd > crds/rl.qwen35.io_qwen35trainings.yaml
	cp crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml
	python -m qwen35_operator.api.reference > docs/reference/api.md
	python -m qwen35_operator.status.reference > docs/reference/conditions.md
	python examples/tiny/generate.py
	tools/lock.sh

picture: setup system
	run="runs/picture-$$(date +%Y%m%d-%H%M%S)"; qwen35 run examples/tiny-grpo.yaml --output "$$run"; \
	python tools/picture.py "$$run/report.html" docs/images/report.png

benchmark: setup
	python benchmarks/embedded.py

benchmark-operator: testbed
	python -m benchmarks.operator_scale

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
