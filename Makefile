# Every target installs what it needs: a virtual environment with pinned, hashed requirements and, on Debian as root, the few
# system packages that tests need. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
# Each file marks that its set of requirements is installed and current. A virtual environment has one of the two sets.
READY := $(VENV)/.ready
READY_LAPTOP := $(VENV)/.ready-laptop
# A second environment, for the site generator alone: its packages and those of the product do not constrain each other.
DOCS_VENV := .venv-docs
READY_DOCS := $(DOCS_VENV)/.ready
# A third one, with the oldest versions of vLLM, transformers and megatron-core that the trainer accepts, for `make soak`.
OLDEST_VENV := .venv-oldest
READY_OLDEST := $(OLDEST_VENV)/.ready
# The last line lists files of this machine that the images contain and that a slim Debian may lack.
SYSTEM_PACKAGES := libnuma1 chromium openssl iproute2 \
    containerd runc containernetworking-plugins iptables nftables conntrack mount \
    ca-certificates libstdc++6 netbase procps tzdata wget
# The commands below use the programs of the virtual environment, including uv.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONDONTWRITEBYTECODE
# All clones share this cache: mypy validates entries by file contents, and checking every library again takes minutes.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qwen35/mypy

.PHONY: help setup laptop system testbed demo demo-cluster test check soak lint docs generate picture images-check release benchmark \
    benchmark-operator clean

help:
	@echo "make demo               train a tiny Qwen3.5 by asynchronous GRPO, in about a minute"
	@echo "make demo-cluster       do the same in pods: a real node, KubeRay, our chart and images; Linux, as root"
	@echo "make laptop             install the small set of requirements, which runs qwen35"
	@echo "make test               run lint, then all tests, or some: PATHS=\"tests/pipeline tests/cli\""
	@echo "make check              run lint and the tests that start no process and do not import torch: two minutes; TORCH=1 adds torch"
	@echo "make soak               run random examples and orders, every case of every sweep, and other versions, for at least SOAK_MINUTES=60"
	@echo "make lint               check style, types, imports, language, links, generated files and locks"
	@echo "make docs               build the documentation as a searchable site in site/; broken links and missing pages are errors"
	@echo "make generate           write crds/, docs/reference/, the migration tables and requirements/"
	@echo "make picture            run the demo and take the README's picture of its report"
	@echo "make testbed            build the Kubernetes control plane that tests start; needs Go, and minutes the first time"
	@echo "make images-check       install and import what the images for GPUs and NPUs contain; downloads 6 GB, takes 15 GB of disk"
	@echo "make release            print the commands that build, scan, sign and tag all images; RELEASE=\"--identity ...\" runs them"
	@echo "make benchmark          compare the trainer with its own synchronous run and with TRL; prints JSON"
	@echo "make benchmark-operator run the operator with 100, 1,000 and 5,000 trainings; prints JSON, needs an idle machine"

setup: $(READY)

# The full set contains the small one, so a full virtual environment is kept.
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

$(READY_DOCS): requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(READY_OLDEST): requirements/oldest.txt pyproject.toml | setup
	$(PYTHON) -m venv $(OLDEST_VENV)
	uv pip sync --quiet --python $(OLDEST_VENV)/bin/python $<
	uv pip install --quiet --no-deps --python $(OLDEST_VENV)/bin/python --editable .
	@touch $@

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

# PATHS="tests/pipeline tests/cli" runs these tests, and installs only what they need.
PATHS ?=
test:
	tools/test.sh $(PATHS)

# A quick check between edits. TORCH=1 adds the tests that import torch.
TORCH ?=
check: setup
	TORCH=$(TORCH) tools/check.sh

SOAK_MINUTES ?= 60
soak: setup system testbed $(READY_OLDEST)
	QWEN35_TESTBED_KUBERAY=oldest $(PYTHON) -m tests.testbed.binaries
	python -m tests.soak --minutes $(SOAK_MINUTES)

# Marks that requirements/ fits pyproject.toml: this check takes as long as all others together.
LOCKED := $(VENV)/.locked
$(LOCKED): pyproject.toml tools/lock.sh $(wildcard requirements/*.txt images/*.yaml images/*/*.yaml images/*/uv.toml) | setup
	tools/lock.sh --check
	@touch $@

lint: setup $(LOCKED)
	ruff check .
	ruff format --check .
	mypy
	mypy tools examples --exclude tools/language
	cd benchmarks && MYPYPATH=. mypy --explicit-package-bases --config-file ../pyproject.toml embedded.py peers/trl_grpo.py
	mypy --explicit-package-bases tools/demo_cluster.py benchmarks/cluster.py benchmarks/operator_scale.py benchmarks/operator_attacks.py \
	    benchmarks/operator_clusters.py benchmarks/operator_turns.py \
	    benchmarks/scheduler.py benchmarks/simulator_scale.py benchmarks/fsdp_engine.py \
	    benchmarks/numerics.py benchmarks/export.py benchmarks/refusals.py benchmarks/driver.py benchmarks/batch_memory.py \
	    benchmarks/generation.py benchmarks/weight_sync.py benchmarks/weight_plan.py benchmarks/weight_changes.py \
	    benchmarks/published_times.py benchmarks/expert_loading.py
	mypy --explicit-package-bases images tools/language
	lint-imports --no-cache
	python -m tools.language
	python -m qwen35_operator.api.crd | diff crds/rl.qwen35.io_qwen35trainings.yaml - || { echo "run make generate"; exit 1; }
	diff crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml || { echo "run make generate"; exit 1; }
	python -m images.dockerfile --check
	python -m images.versions_reference --check
	python -m qwen35_operator.api.field_reference | diff docs/reference/api.md - || { echo "run make generate"; exit 1; }
	python -m qwen35_operator.reconcile.conditions_reference | diff docs/reference/conditions.md - || { echo "run make generate"; exit 1; }
	python -m qwen35_trainer.progress.records_reference | diff docs/reference/metrics.md - || { echo "run make generate"; exit 1; }
	python -m tools.migration --check
	python -m tools.links

# Warnings are errors: a broken link or anchor, and a page that index.md does not list.
docs: $(READY_DOCS)
	$(DOCS_VENV)/bin/python -m sphinx --quiet --fresh-env --fail-on-warning --nitpicky --builder html docs site
	@echo "open site/index.html"

generate: setup
	python -m qwen35_operator.api.crd > crds/rl.qwen35.io_qwen35trainings.yaml
	cp crds/rl.qwen35.io_qwen35trainings.yaml helm/qwen35-operator/files/crd.yaml
	python -m images.dockerfile
	python -m images.versions_reference
	python -m qwen35_operator.api.field_reference > docs/reference/api.md
	python -m qwen35_operator.reconcile.conditions_reference > docs/reference/conditions.md
	python -m qwen35_trainer.progress.records_reference > docs/reference/metrics.md
	python -m tools.migration
	python examples/tiny/generate.py
	tools/lock.sh

picture: setup system
	run="runs/picture-$$(date +%Y%m%d-%H%M%S)"; qwen35 run examples/tiny-grpo.yaml --output "$$run"; \
	python tools/picture.py "$$run/report.html" docs/images/report.png

# What a release pipeline runs; RELEASE has the signer and the build arguments, see docs/howto/verify.md.
RELEASE ?= --plan
release: setup
	python -m images.release $(RELEASE)

images-check: setup
	python -m images.check

benchmark: setup
	python benchmarks/embedded.py

benchmark-operator: setup testbed
	python -m benchmarks.operator_scale
	python -m benchmarks.operator_attacks

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(OLDEST_VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
