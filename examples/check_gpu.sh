#!/usr/bin/env bash
# Kernels and walks on a CUDA device against their references; needs torch and transformers, and for
# hybrids in 16 bit flash-linear-attention.
#   FAMILIES="qwen3 qwen3_5" GRADIENTS=exact TESTS=tests/walk examples/check_gpu.sh [RESULTS_FOLDER]
set -u
cd "$(dirname "$0")/.."
out=${1:-examples/results}
families=${FAMILIES:-llama qwen2 qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next glm_moe_dsa deepseek_v32 deepseek_v3}
mkdir -p "$out"
failed=0
export PYTHONPATH=.:${PYTHONPATH:-}
python3 -m pytest -q --no-header -p no:cacheprovider -m gpu ${TESTS:-tests/kernels tests/walk} || failed=1
for family in $families; do
    for gradient in ${GRADIENTS:-response_only exact}; do
        for dtype in ${DTYPES:-float32 bfloat16}; do
            python3 -m longstraw_backend compare --family "$family" --dtype "$dtype" --gradient "$gradient" \
                --device cuda --prompt 2000 --response 200 --chunk 512 --response-block 64 \
                --json "$out/compare_${family}_${gradient}_${dtype}.json" || failed=1
        done
    done
done
exit $failed
