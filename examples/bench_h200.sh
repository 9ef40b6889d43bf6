#!/usr/bin/env bash
# What one H200 can tell, in stages of a few minutes each; needs torch, transformers, for hybrids
# flash-linear-attention, and peft for adapters.
#   examples/bench_h200.sh STAGE... [to the folder OUT, by default bench-results]
# Stages that end in -start go on in the background; `wait` waits for them, WAIT seconds at most.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-bench-results}
mkdir -p "$out"
export PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

bench() { # verb, name of the result, options
    local verb=$1 name=$2
    shift 2
    python3 -m longstraw_backend bench "$verb" --device cuda --json "$out/$name.json" "$@"
}

start() { # the same in the background; SAVE minutes between saves of the state, 0 for none
    local verb=$1 name=$2
    shift 2
    python3 -m longstraw_backend bench "$verb" --device cuda --detach "$out/$name" \
        --save-every "${SAVE:-0}" ${RESUME:+--resume} "$@"
}

wait_all() {
    local until=$((SECONDS + ${WAIT:-450})) dir
    for dir in "$out"/*/settings.json; do
        dir=$(dirname "$dir")
        while [ ! -e "$dir/result.json" ] && [ $SECONDS -lt $until ]; do sleep 2; done
        tail -c 600 "$dir/log.txt"
        if [ -e "$dir/result.json" ]; then cp "$dir/result.json" "$dir.json"; fi
    done
}

big="--shape qwen3.6-27b --chunk ${CHUNK:-16384}"
response="--response 8192 --lora 16"
for stage in "$@"; do
    case $stage in
    plan) for shape in qwen3.5-4b qwen3.5-9b qwen3.6-27b; do
        bench plan "plan_$shape" --shape $shape --context 256K,1M,2M $response
    done ;;
    capture) bench ladder capture_27b $big --context 64K,256K,512K --plot "$out/capture_27b.png" ;;
    capture-1m-start) start ladder capture_27b_1m $big --context 64K,256K,512K,1M ;;
    group) for group in 2 8; do
        bench replay "replay_27b_g$group" $big --context 256K --random-state $response --group $group
    done ;;
    replay-512k) bench replay replay_27b_512k $big --context 512K --random-state $response ;;
    exact) bench step step_27b_exact $big --context 64K $response --gradient exact ;;
    step) bench step step_27b $big --context 64K $response ;;
    2m-4b-start) start ladder capture_4b_2m --shape qwen3.5-4b --chunk 16384 --context 256K,1M,2M ;;
    2m-9b-start) start ladder capture_9b_2m --shape qwen3.5-9b --chunk 16384 --context 256K,1M,2M ;;
    2m-replay) for shape in qwen3.5-4b qwen3.5-9b; do
        bench replay "replay_2m_$shape" --shape $shape --context 2M --random-state $response --group 1
    done ;;
    2m-27b) # half of the layers: the state of all is 128 GiB
        bench capture chunk_27b_2m $big --layers 32 --context 2M --random-state
        bench replay replay_27b_2m $big --layers 32 --context 2M --random-state $response --group 1 ;;
    glm) bench ladder "capture_glm_${LAYERS:-5}" --shape glm-5.2 --layers "${LAYERS:-5}" --context 64K,256K
        bench replay "replay_glm_${LAYERS:-5}" --shape glm-5.2 --layers "${LAYERS:-5}" --context 256K \
            --random-state --response 2048 --lora 8 ;;
    offload) for kinds in none attention; do
        bench capture "chunk_27b_$kinds" $big --context 512K --random-state --offload $kinds
        bench replay "replay_27b_$kinds" $big --context 512K --random-state --offload $kinds $response --group 1
    done ;;
    stock-step) python3 examples/bench_stock.py step --shape qwen3.5-4b --json "$out/stock_step_4b.json" ;;
    stock-longest) for shape in qwen3.5-4b qwen3-8b; do
        python3 examples/bench_stock.py longest --shape $shape --responses 1024 --json "$out/stock_longest_$shape.json"
    done ;;
    wait) wait_all ;;
    *)
        echo "bench_h200.sh: expected plan, capture, capture-1m-start, group, replay-512k, step, exact," \
            "2m-4b-start, 2m-9b-start, 2m-replay, 2m-27b, glm, offload, stock-step, stock-longest or wait, got $stage" >&2
        exit 2
        ;;
    esac
done
