#!/usr/bin/env bash
# How fast several GPUs of one host are, in stages; needs what bench_h200.sh needs, and NCCL. Whether
# they compute the same is check_ranks.sh's matter.
#   GPUS=8 examples/bench_ranks.sh STAGE... [to the folder OUT, by default bench-results]
# Ranks are started here; under `torchrun --nproc-per-node $GPUS -m longstraw_backend bench ...` they
# are torchrun's. Compare a stage's results over GPUS=1, 2, 4, 8 with `longstraw bench plot`.
set -eu
cd "$(dirname "$0")/.."
gpus=${GPUS:?how many GPUs}
out=${OUT:-bench-results}
mkdir -p "$out"
export PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # no NVLink multicast

bench() { # verb, name of the result, options
    local verb=$1 name=$2
    shift 2
    python3 -m longstraw_backend bench "$verb" --device cuda --cp "$gpus" --json "$out/${name}_cp$gpus.json" "$@"
}

big="--shape qwen3.6-27b --chunk ${CHUNK:-65536}"
response="--response 8192 --lora 16"
for stage in "$@"; do
    case $stage in
    scaling-256k) bench replay scaling_27b_256k $big --context 256K $response --group 1 ;;
    scaling-1m) bench replay scaling_27b_1m $big --context 1M $response --group 1 ;;
    published) for group in 2 8; do # prompt 2,088,960, as arXiv 2607.14952 has it
        bench step "published_27b_g$group" $big --context 2088960 $response --group $group
    done ;;
    published-exact) bench step published_27b_exact $big --context 2088960 $response --group 2 --gradient exact ;;
    prefix-4m) bench step prefix_27b_4m $big --context 4456448 $response --group 8 ;;
    experts) bench replay experts_35b_a3b --shape qwen3.6-35b-a3b --chunk 65536 --context 256K --response 8192 --lora 16 ;;
    *)
        echo "bench_ranks.sh: expected scaling-256k, scaling-1m, published, published-exact, prefix-4m" \
            "or experts, got $stage" >&2
        exit 2
        ;;
    esac
done
