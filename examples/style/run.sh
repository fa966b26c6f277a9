#!/bin/sh
# Tune SmolLM2-135M-Instruct to the style of style.py, by supervised fine-tuning and by DPO, and measure both.
# The argument is a new folder for the results: sh examples/style/run.sh /tmp/style
set -eu
[ $# = 1 ] || { echo "usage: sh run.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"
data=$out/data runs=$out/runs
python style.py prompts "$data"

# The model's own answers become examples in the style, and the rejected completions of the pairs.
regard eval smollm2 --data "$data/prompts.jsonl" --reward style:in_short --max-new 64 --json > "$data/plain.json"
python style.py examples "$data"

started=$(date +%s)
regard tune sft smollm2 --data "$data/chats.jsonl" --out "$runs/sft" --adapter.rank=16 --data.rows=4 --data.length=128 --data.held_out=2 --train.steps=28 --train.lr=2.5e-4 --train.schedule.warmup=4
echo "sft $(($(date +%s) - started))" >> "$out/seconds"

# Without the likelihood, DPO lowers the probability of both completions, and the answers become nonsense.
started=$(date +%s)
regard tune dpo smollm2 --data "$data/pairs.jsonl" --out "$runs/dpo" --objective.beta=0.5 --objective.likelihood=1 --data.rows=4 --data.length=128 --data.held_out=2 --train.steps=28 --train.lr=4e-4 --train.schedule.warmup=4
echo "dpo $(($(date +%s) - started))" >> "$out/seconds"

for model in smollm2 "$runs/sft" "$runs/dpo"; do
    result=$out/$(basename "$model")
    regard eval "$model" --data "$data/held_out.jsonl" --reward style:in_short --max-new 64 --json > "$result.style.json"
    regard eval "$model" --data "$data/other.txt" --data.rows=4 --data.length=512 --json > "$result.other.json"
done

# PEFT reads the adapters, on the same model in the format of transformers.
regard export smollm2 "$out/base"
regard export "$runs/sft" "$out/sft-adapter"
regard export "$runs/dpo" "$out/dpo-adapter"
python style.py table "$out"
