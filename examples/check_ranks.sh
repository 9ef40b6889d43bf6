#!/usr/bin/env bash
# Ranks against one rank, on a machine with many cores and some GPUs:
#   OUT=results examples/check_ranks.sh
# CPU=1: all splits of every family over gloo, a process a family and dtype, up to RANKS ranks.
# GPU=1: `longstraw compare` over NCCL, a GPU a rank, every split of GPUS ranks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-results} RANKS=${RANKS:-4} GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
FAMILIES=${FAMILIES:-llama qwen2 qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next glm_moe_dsa deepseek_v32 deepseek_v3}
GPU_FAMILIES=${GPU_FAMILIES:-qwen3 qwen3_moe qwen3_5 glm_moe_dsa deepseek_v3}
MOE=" qwen3_moe qwen3_5_moe qwen3_next glm_moe_dsa deepseek_v32 deepseek_v3 "
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
mkdir -p "$OUT"
failed=0

cpu() {
    for dtype in ${DTYPES:-float64 float32}; do
        for family in $FAMILIES; do
            timeout "${LIMIT:-540}" "$PYTHON" examples/check_ranks.py --families "$family" --ranks "$RANKS" \
                --dtype "$dtype" --json "$OUT/ranks_${dtype}_$family.json" >"$OUT/ranks_${dtype}_$family.log" 2>&1 &
        done
    done
}

compare() { # family name options...
    local family=$1 name=$2
    shift 2
    "$PYTHON" -m longstraw_backend compare --device cuda --family "$family" --chunk 32 --response-block 16 \
        --json "$OUT/${family}_$name.json" "$@" >"$OUT/${family}_$name.log" 2>&1 || {
        echo "MISSED $family $*"
        failed=1
    }
}

gpu() {
    for family in $GPU_FAMILIES; do
        for gradient in response_only exact; do
            for dtype in float32 bfloat16; do
                compare "$family" "cp${GPUS}_${gradient}_$dtype" --cp "$GPUS" --gradient $gradient --dtype $dtype
            done
        done
        compare "$family" "dp${GPUS}_exact_float32" --dp "$GPUS" --gradient exact
        [[ $MOE == *" $family "* ]] && compare "$family" "dp${GPUS}_ep${GPUS}_exact_float32" --dp "$GPUS" --ep "$GPUS" --gradient exact
    done
}

[[ ${CPU:-0} == 1 ]] && cpu
[[ ${GPU:-0} == 1 ]] && gpu
wait
grep -hc "NOT within" "$OUT"/ranks_*.log 2>/dev/null | paste -sd+ | sed 's/^$/0/' | { read -r sum; echo "cases outside the bars: $((${sum:-0}))"; }
exit $failed
