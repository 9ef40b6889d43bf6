#!/usr/bin/env bash
# Kernels and walks on a CUDA device against their references; needs torch and transformers alone.
#   examples/check_gpu.sh [RESULTS_FOLDER]
set -u
cd "$(dirname "$0")/.."
out=${1:-examples/results}
mkdir -p "$out"
failed=0
PYTHONPATH=. python3 -m pytest -q --no-header -p no:cacheprovider -m gpu tests/kernels || failed=1
for family in llama qwen2 qwen3 qwen3_moe; do
    for dtype in float32 bfloat16; do
        PYTHONPATH=. python3 -m longstraw_backend compare --family "$family" --dtype "$dtype" \
            --device cuda --prompt 2000 --response 200 --chunk 512 \
            --json "$out/compare_${family}_${dtype}.json" || failed=1
    done
done
exit $failed
