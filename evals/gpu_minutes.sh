#!/usr/bin/env bash
# What to measure on a GPU that one has for ten minutes, the most important first.
#
#   OUT=FOLDER bash evals/gpu_minutes.sh     where quantkit's dependencies and pytest are installed
#   bash evals/gpu_minutes.sh --rehearse     the same at tiny sizes, on the CPU or interpreted
#   bash evals/gpu_minutes.sh --list         the commands
#
# Kernels are compiled first, by all cores at once, in models of 16 layers whose results count for nothing. (Of
# fewer layers they would be others: Triton compiles for integers that are 1 or a multiple of 16.) A stage that
# fails or outruns its time doesn't stop the next one, and all take $RUN_SECONDS at most. In $OUT are log.txt and
# results.tar.gz, which is packed every ten seconds, so that a run which is killed leaves what it has measured.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

OUT=${OUT:-gpu-minutes} WORK=${WORK:-/tmp/quantkit-gpu-minutes} PYTHON=${PYTHON:-python3} mode=measure
device=cuda scale=1 seconds=540 clients=64 repeats=5 rehearse=() marker=gpu peers=bf16,int8,int4
model=synthetic:llama-3.1-8b experts="synthetic:qwen3-30b-a3b?layers=8" context=1100 long=1100,32000,128000 batches=1,64,256 prompts=2048,8192
contexts=1x32768,1x131072,64x1100 rows=1,16,32,64,128,256,512,2048
trellis=(tests/kernels -k "trellis and bfloat16 and not large and not order")
tests=(tests/runtime/gpu/test_prompts.py tests/runtime/gpu/test_drafts.py tests/kernels/test_experts.py
       tests/runtime/gpu/test_model.py tests/runtime/gpu/test_engine_ahead.py)
case ${1:-} in
  "") ;;
  --list) mode=list ;;
  --rehearse)
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
    device=cpu scale=20 seconds=7200 clients=4 repeats=1 rehearse=(--rehearse) marker="not gpu and not slow"
    model="synthetic:llama-1b?layers=1" experts=synthetic:tiny-qwen3-moe context=40 long=40,200 batches=1,4 prompts=64,128 contexts=1x70,2x70
    rows=1,20 trellis=(tests/formats -k trellis) peers=bf16,int8 tests=(tests/kernels/test_levels.py) ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
test=("$PYTHON" -m pytest -m "$marker" -p no:cacheprovider -n 8 -vv)
deadline=${RUN_SECONDS:-$seconds} into=$WORK/results
say() { printf '%s == %s\n' "$(date +%H:%M:%S)" "$*" | tee -a "$OUT/log.txt"; }

stage() {  # stage SECONDS NAME COMMAND…: measured, or one of those that compile at the same time
  local most=$(($1 * scale)) name=$2 begin=$SECONDS left=$((deadline - SECONDS)) code
  shift 2
  if [ "$mode" = list ]; then printf '%s:' "$name"; printf ' %q' "$@"; echo; return; fi
  if [ "$mode" = compile ]; then
    { timeout -k 5 75 "$@"; echo "exit code $? after $SECONDS s"; } >"$into/$name.log" 2>&1 & return
  fi
  [ "$most" -lt "$left" ] || most=$left
  if [ "$most" -lt 5 ]; then say "$name: no time is left"; return; fi
  timeout -k 5 "$most" "$@" 2>&1 | tee -a "$OUT/log.txt"
  code=${PIPESTATUS[0]}
  say "$name: exit code $code after $((SECONDS - begin)) s of $most, $((deadline - SECONDS)) s are left"
}

kernels() {  # kernels SECONDS NAME TEXT,… [OPTION…]: those whose names and shapes contain one of the texts
  stage "$1" "$2" "$PYTHON" -m quantkit_kernels.tools.bench --quick --only "$3" --json "$into/$2.json" \
    "${rehearse[@]}" "${@:4}"
}

decode() {  # decode SECONDS NAME RECIPE [OPTION…]
  stage "$1" "$2" "$PYTHON" -m quantkit.cli.main bench decode "$model" --random "$3" --device "$device" \
    --prefill 0 --max-tokens 64 --repeats "$repeats" --quiet --out "$into/$2.json" "${@:4}"
}

profiled() {  # profiled SECONDS NAME RECIPE [OPTION…]
  stage "$1" "$2" "$PYTHON" evals/profile_gpu.py "$model" --random "$3" --device "$device" \
    --out "$into/$2.json" "${@:4}"
}

models() {
  kernels 20 ceilings "w16a16 o m1,w4a16 g128 o m1"
  grep -q trellis kernels/quantkit_kernels/tools/cases/products.py && for bits in 4 3 2; do
    kernels 25 "trellis$bits" "trellis$bits "  # with the table in the cache, then in shared memory
  done
  stage 40 trellis-tests "${test[@]}" "${trellis[@]}"
  kernels 60 attention "attention b,attention int8,attention fp8,attention int4,attention hadamard4" \
    --contexts "$contexts"
  decode 40 decode-bf16 none --context "$context" --kv none
  decode 70 decode-int8 int8 --context "$long" --kv none,int8,fp8,int4
  decode 60 decode-int4-rtn int4-rtn --context "$context" --kv none,int8 --batch "$batches"
  decode 40 decode-trellis4 trellis4 --context "$context" --kv none
  decode 40 decode-trellis3 trellis3 --context "$context" --kv none
  profiled 60 prompts int4-rtn --prompt "$prompts" --chunk 512,2048
  profiled 40 prompts-fp8 fp8 --prompt "$prompts" --chunk 2048
  model=$experts decode 40 decode-experts int4-rtn --context "$context" --kv none --batch "$batches"
}

products() {
  for kind in "w4a16 g128" "w4a16 g64" w16a16 nvfp4; do
    kernels 25 "products-${kind// /-}" "$kind o m,$kind gate" --rows "$rows"
  done
}

serving() {  # first token, tokens a second, and the milliseconds of steps by the number of sequences
  local server='' url=URL begin=$SECONDS
  local command=("$PYTHON" -m quantkit.cli.main serve-local "$model" --random int4-rtn --device "$device" --port 0
                 --max-batch "$clients" --drain-timeout 5 --json)
  if [ "$mode" = list ]; then stage 0 server "${command[@]}"; else
    "${command[@]}" >"$WORK/server.json" 2>"$into/server.log" &
    server=$!
    until url=$(sed -n 's/^{"url": "\([^"]*\)".*/\1/p' "$WORK/server.json") && [ -n "$url" ] \
        || ! kill -0 $server || [ $((SECONDS - begin)) -gt $((60 * scale)) ]; do sleep 0.2; done
  fi
  stage 80 serving "$PYTHON" evals/serving/load.py throughput "$url" --clients "$clients" --per-client 2 \
    --rounds 2 --route completions --out "$into/serving.json"
  [ -n "$server" ] || return
  timeout 10 "$PYTHON" -c 'if True:
    import json, statistics, sys, urllib.request
    trace = json.load(urllib.request.urlopen(sys.argv[1] + "/trace"))
    json.dump(trace, open(sys.argv[2], "w"))
    steps = [step for step in trace["models"][0]["steps"] if not step["prompt_tokens"]]
    for bits in range(1, 10):
        durations = [1e3 * (step["end"] - step["start"]) for step in steps
                     if step["decode_rows"].bit_length() == bits]
        if durations:
            print(f"{len(durations)} steps of {1 << bits >> 1} to {(1 << bits) - 1} sequences without prompts: "
                  f"{statistics.median(durations):.2f} ms")' "$url" "$into/serving-trace.json" 2>&1 | tee -a "$OUT/log.txt"
  kill $server
  wait $server
}

if [ "$mode" = measure ]; then
  mkdir -p "$OUT" "$into/compiled"
  OUT=$(cd "$OUT" && pwd)
  export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$WORK/triton QUANTKIT_CACHE=$WORK/cpu-cache
  export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
  pack() { tar -C "$WORK" -czf "$OUT/partial" results; mv "$OUT/partial" "$OUT/results.tar.gz"; }
  (while sleep 10; do pack; done) &
  trap "kill $!; pack" EXIT
  trap 'exit 143' TERM INT HUP
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader 2>&1 | tee -a "$OUT/log.txt"
  if [ "$device" = cuda ]; then
    (mode=compile into=$into/compiled model="$model?layers=16" context=200 long=200 prompts=2048 repeats=1
     models; products; wait)
    say "compiled after $SECONDS s"
  fi
fi
models
serving
if [ "$mode" = list ] || command -v ncu >/dev/null; then
  stage 30 ncu ncu --clock-control none --kernel-name regex:split_kv_kernel --launch-count 1 \
    --section SpeedOfLight --section SchedulerStats --section WarpStateStats --section LaunchStats \
    "$PYTHON" -m quantkit_kernels.tools.bench --quick --only "attention int8" --contexts 1x32768
fi
profiled 30 "decode-$clients" int4-rtn --batch "$clients" --context "$context"
products
stage 60 tests "${test[@]}" "${tests[@]}"
stage 80 torch-compile "$PYTHON" evals/peers/torch_compile.py --weights "$peers" --context 1100 \
  --out "$into/torch-compile.json" "${rehearse[@]}"
