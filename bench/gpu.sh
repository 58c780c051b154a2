#!/usr/bin/env bash
# The GPU's tests and benchmark, on a machine with an NVIDIA GPU and no network; see docs/gpu.md.
#
#   bench/gpu.sh --wheels            beforehand, on a machine with network: fetches what the other one may lack into .whl/
#   bench/gpu.sh [SECTION...]        runs sections (all: limits tests kernels decode prefill serve start sleep compile) and writes bench/results/gpu.md
#   bench/gpu.sh --toy [SECTION...]  runs them at tiny sizes on a CPU, to see that they work
#
# PYTHON names the interpreter (python3), which has torch, triton, transformers, tokenizers and safetensors.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=.whl

if [ "${1:-}" = --wheels ]; then
    exec "$PYTHON" bench/gpu/wheels.py fetch "$WHEELS"
fi
# What is missing is put in a folder of its own: the interpreter's own packages stay as they are.
site=$("$PYTHON" bench/gpu/wheels.py install "$WHEELS" .cache/gpu-site)
export PYTHONPATH="$PWD:$PWD/engine:$PWD/agent:$PWD/operator:$PWD/crds:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -m bench.gpu "$@"
