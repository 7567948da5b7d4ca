#!/usr/bin/env bash
# The recipe in miniature, from nothing: SFT, MGPO, evaluation, export.
#
#     bash launch/demo.sh [--seed N] [--workdir DIR]
#         a tiny Qwen2 learns arithmetic from random weights; minutes on two CPU cores
#     bash launch/demo.sh --checkpoint HF_DIR --data PROBLEMS [--workdir DIR]
#         two MGPO steps on real weights and real problems (GSM8K jsonl, verl parquet or our records)
#
# Every step is a `vibethinker` verb and continues where it stopped: run the same line again after an interruption.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/../tools/environment.sh"

seed=0 workdir='' checkpoint='' data=''
while [ $# -gt 0 ]; do
    case "$1" in
        --seed | --workdir | --checkpoint | --data)
            [ $# -ge 2 ] || { echo "demo.sh: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "demo.sh: unknown option $1; see --help" >&2; exit 2 ;;
    esac
done
if { [ -n "$checkpoint" ] && [ -z "$data" ]; } || { [ -z "$checkpoint" ] && [ -n "$data" ]; }; then
    echo "demo.sh: --checkpoint and --data go together" >&2
    exit 2
fi

# Paths on the command line are relative to where the user is; everything else to the checkout.
absolute() { case "$1" in /* | *://*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac; }
[ -z "$workdir" ] || workdir="$(absolute "$workdir")"
[ -z "$checkpoint" ] || checkpoint="$(absolute "$checkpoint")" data="$(absolute "$data")"

ensure_environment || exit 1
cd -- "$REPOSITORY"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" # the demo is sized for a CPU; set JAX_PLATFORMS to run it elsewhere

step() { printf '\n== %s\n' "$*"; }

if [ -n "$checkpoint" ]; then
    workdir="${workdir:-$REPOSITORY/runs/demo-real}"
    step "MGPO: two steps from $checkpoint on $data"
    vibethinker train --config configs/demo.py:real --workdir "$workdir/mgpo" \
        --config.model.checkpoint="$checkpoint" --config.data.path="$data" --config.seed="$seed"
    vibethinker status "$workdir/mgpo"
    step "evaluation of the updated weights on four of the problems, briefly"
    vibethinker eval --checkpoint "$workdir/mgpo" --data "$data" --limit 4 --samples 1 --max-new-tokens 128 \
        --max-length 512 --max-slots 4 --output "$workdir/eval"
    exported="$workdir/exported"
    [ -d "$exported" ] || vibethinker convert orbax-to-hf "$workdir/mgpo" "$exported"
    printf '\nrun directory    %s\nmetrics          %s\nrollouts         %s\nexported model   %s\n' \
        "$workdir" "$workdir/mgpo/metrics.jsonl" "$workdir/mgpo/rollouts" "$exported"
    exit 0
fi

workdir="${workdir:-$REPOSITORY/runs/demo-seed-$seed}"
step "data: arithmetic with worked solutions, split by hash"
vibethinker data arithmetic --output "$workdir/data" --seed "$seed"

step "SFT from random weights (its length is fixed in configs/demo.py)"
vibethinker train --config configs/demo.py:sft --workdir "$workdir/sft" --config.seed="$seed" \
    --config.model.checkpoint="$workdir/data/model" --config.data.path="$workdir/data/sft.jsonl"

step "MGPO with real rollouts and the real verifier"
vibethinker train --config configs/demo.py:mgpo --workdir "$workdir/mgpo" --config.seed="$seed" \
    --config.model.checkpoint="$workdir/sft" --config.data.path="$workdir/data/rl.jsonl"

for stage in sft mgpo; do
    step "evaluation after $stage on held-out problems"
    vibethinker eval --checkpoint "$workdir/$stage" --data "$workdir/data/heldout.jsonl" --samples 8 --top-p 1 \
        --max-length 128 --max-slots 128 --output "$workdir/eval-$stage"
done

step "export to Hugging Face format"
[ -d "$workdir/exported" ] || vibethinker convert orbax-to-hf "$workdir/mgpo" "$workdir/exported"

step "MGPO against SFT, problem by problem"
vibethinker compare "$workdir/eval-sft" "$workdir/eval-mgpo"
printf '\nrun directory    %s\nmetrics          %s\ntensorboard      tensorboard --logdir %s\nexported model   %s\n' \
    "$workdir" "$workdir/mgpo/metrics.jsonl" "$workdir" "$workdir/exported"
