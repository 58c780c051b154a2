#!/usr/bin/env bash
# The GPU's tests and benchmark, on a machine with an NVIDIA GPU and no network; see docs/gpu.md.
#
#   bench/gpu.sh --wheels            beforehand, on a machine with network: fetches what the other one may lack into .whl/
#   bench/gpu.sh first               the first figures of a card, within 4 minutes: limits, every kernel once, 8B
#   bench/gpu.sh [SECTION...]        runs sections, or all, and writes bench/results/gpu.md; --help names them
#   bench/gpu.sh --toy [SECTION...]  runs them at tiny sizes on a CPU, to see that they work
#
# Whatever happens to a run, folder OUT (.cache/gpu-out) has what it found: table, rows, log, failures, profile, JUnit, kernels.
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
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$PYTHON" -m bench.gpu "$@"
