# Every target sets itself up: a virtual environment with pinned, hashed requirements, and on Debian as root the few
# system packages that tests need. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
# Each says that its set of requirements is installed and current; a virtual environment has one of them.
READY := $(VENV)/.ready
READY_LAPTOP := $(VENV)/.ready-laptop
# The last line: what images take from this machine, as far as a slim Debian may lack it.
SYSTEM_PACKAGES := libnuma1 chromium openssl iproute2 \
    containerd runc containernetworking-plugins iptables nftables conntrack mount \
    ca-certificates libstdc++6 netbase procps tzdata wget
# What the commands below install and run comes from the virtual environment, uv too.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONDONTWRITEBYTECODE
# All clones share this cache: mypy validates entries by file contents, and checking every library again takes minutes.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qwen35/mypy

.PHONY: help setup laptop system testbed demo demo-cluster test check soak lint generate picture benchmark benchmark-operator clean

help:
	@echo "make demo       a tiny Qwen3.5 learns a task by asynchronous GRPO, in about a minute"
	@echo "make demo-cluster  the same in pods: a real node, KubeRay, our chart and images; Linux, as root"
	@echo "make test       lint, then all tests; a part of them with PATHS=\"tests/pipeline tests/cli\""
	@echo "make check      lint, and the tests that start no process and import no torch: two minutes; TORCH=1 adds torch's"
	@echo "make soak       random examples and moments, every case of every sweep, other versions, for SOAK_MINUTES=60"
	@echo "make testbed    build the Kubernetes control plane that tests start; needs Go, minutes the first time"
	@echo "make lint       style, types, import rules, generated files and locks are current"
	@echo "make generate   write crds/, docs/reference/ and requirements/ anew"
	@echo "make picture    run the demo and take the README's picture of its report"
	@echo "make benchmark  the embedded engine against its own synchronous run and TRL; prints JSON"
	@echo "make benchmark-operator  the operator with 100, 1,000 and 5,000 trainings; prints JSON, needs an idle machine"

setup: $(READY)

# What the tests need contains what the demo needs: a full virtual environment stays one.
laptop: $(if $(wildcard $(READY)),$(READY),$(READY_LAPTOP))

define install
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.12 is needed; name it with: make PYTHON=/path/to/python3.12"; exit 1; }
	@rm -f $(READY) $(READY_LAPTOP)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$$(sed -n 's/^uv==\([^ ]*\).*/\1/p' $<)"
	uv pip sync --quiet $<
	uv pip install --quiet --no-deps --editable .
	@touch $@
endef

$(READY): requirements/cpu.txt pyproject.toml
	$(install)

$(READY_LAPTOP): requirements/laptop.txt pyproject.toml
	$(install)

system:
	@missing=(); for package in $(SYSTEM_PACKAGES); do \
	    dpkg-query --show --showformat='$${Status}' $$package 2>/dev/null | grep -q "ok installed" || missing+=($$package); done; \
	if [[ $${#missing[@]} -eq 0 ]]; then exit 0; fi; \
	if [[ $$(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then \
	    echo "installing $${missing[*]}"; apt-get update -qq; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${missing[*]} >/dev/null; \
	else echo "please install: $${missing[*]} (tests that need them are skipped)"; fi

testbed:
	$(PYTHON) -m tests.testbed.binaries

demo: laptop
	qwen35 run examples/tiny-grpo.yaml --output "runs/demo-$$(date +%Y%m%d-%H%M%S)"

demo-cluster: setup system testbed
	python -m tools.demo_cluster

# PATHS="tests/pipeline tests/cli" runs a part, with what it needs.
PATHS ?=
test:
	tools/test.sh $(PATHS)

# For the minutes between two edits. TORCH=1 adds the tests that import torch.
TORCH ?=
check: setup
	TORCH=$(TORCH) tools/check.sh

SOAK_MINUTES ?= 60
soak: setup system testbed
	QWEN35_TESTBED_KUBERAY=oldest $(PYTHON) -m tests.testbed.binaries
	python -m tests.soak --minutes $(SOAK_MINUTES)

# Says that requirements/ is what pyproject.toml asks for: to find that out takes as long as all other checks together.
LOCKED := $(VENV)/.locked
$(LOCKED): pyproject.toml tools/lock.sh $(wildcard requirements/*.txt) | setup
	tools/lock.sh --check
	@touch $@

lint: setup $(LOCKED)
	ruff check .
	ruff format --check .
	mypy
	mypy tools examples
	cd benchmarks && MYPYPATH=. mypy --explicit-package-bases --config-file ../pyproject.toml embedded.py peers/trl_grpo.py
	mypy --explicit-package-bases tools/demo_cluster.py benchmarks/cluster.py benchmarks/operator_scale.py \
	    benchmarks/scheduler.py benchmarks/simulator_scale.py benchmarks/fsdp_engine.py \
	    benchmarks/numerics.py benchmarks/export.py
	mypy --explicit-package-bases images
	lint-imports --no-cache
	python -m qwen35_operator.api.crd | diff crds/rl.qwen35.io_qwen35trainings.yaml - || { echo "run make generate"; exit 1; }
	diff crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml || { echo "run make generate"; exit 1; }
	python -m images.dockerfile --check
	python -m qwen35_operator.api.reference | diff docs/reference/api.md - || { echo "run make generate"; exit 1; }
	python -m qwen35_operator.status.reference | diff docs/reference/conditions.md - || { echo "run make generate"; exit 1; }

generate: setup
	python -m qwen35_operator.api.crd > crds/rl.qwen35.io_qwen35trainings.yaml
	cp crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml
	python -m images.dockerfile
	python -m qwen35_operator.api.reference > docs/reference/api.md
	python -m qwen35_operator.status.reference > docs/reference/conditions.md
	python examples/tiny/generate.py
	tools/lock.sh

picture: setup system
	run="runs/picture-$$(date +%Y%m%d-%H%M%S)"; qwen35 run examples/tiny-grpo.yaml --output "$$run"; \
	python tools/picture.py "$$run/report.html" docs/images/report.png

benchmark: setup
	python benchmarks/embedded.py

benchmark-operator: setup testbed
	python -m benchmarks.operator_scale

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
