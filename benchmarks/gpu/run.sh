#!/usr/bin/env bash
# Measures kernels and engine on this machine's GPU, from the checkout, with nothing installed: it
# needs Python 3.11 or later with torch, triton, transformers, safetensors, tokenizers, msgpack and
# numpy. Ends within 8 minutes; writes results.json and results.md to ${OUT:-benchmarks/results/gpu}.
# `run.sh --smoke` runs every line with tiny shapes on the CPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
shim=$(mktemp -d)
trap 'rm -rf "$shim"' EXIT
# The packages lie beside each other in the checkout: links make the tree that Python imports.
mkdir "$shim/inferq"
ln -s "$root"/inferq/* "$shim/inferq/"
for package in protocol producer worker kernels; do
  ln -s "$root/$package" "$shim/inferq/$package"
done
export PYTHONPATH="$shim:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
# The checkout itself must not be on the path: its inferq/ is only a part of the package.
export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# The profiler keeps its hold on the device: starting it anew breaks captured graphs.
export DISABLE_CUPTI_LAZY_REINIT=1 TEARDOWN_CUPTI=0
# Kernels for CPUs would only be compiled for nothing.
export INFERQ_NATIVE_KERNELS=off
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$shim/triton}"
"${PYTHON:-python3}" -m gpu --out "${OUT:-benchmarks/results/gpu}" "$@" &
child=$!
# Told to stop, it still writes its results.
trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
  status=0
  wait "$child" || status=$?
done
exit "$status"
