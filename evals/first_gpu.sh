#!/usr/bin/env bash
# The first half hour on a GPU machine that is rented or borrowed, bare, and perhaps without a network.
#
#   bash evals/first_gpu.sh pack                  here: what is taken along, into $CARRY
#   OUT=results bash evals/first_gpu.sh check     there, in the repository's root: most important first
#   OUT=results bash evals/first_gpu.sh bench
#   OUT=results bash evals/first_gpu.sh same tune
#   bash evals/first_gpu.sh --rehearse all        anywhere: the same at tiny sizes, without a GPU
#
# check: versions, the bandwidth of a read and a copy, gated products against float64, one test of each function
# bench: the kernels, and an 8B model at contexts of 1k and 128k; without and with programmatic dependent launch
# same:  whether a GPU computes what the CPU does, with a real model
# tune:  launch parameters of products
#
# The stages of a run take $RUN_SECONDS together at most: 560, or half an hour for `all`. In $OUT: log.txt;
# results.tar.gz, packed again every few seconds, so that a run which is killed leaves all but the last of them;
# triton-cache.tar.gz.*, which the next run restores from $CARRY, so that it compiles nothing again. These are
# 7 files of at most 15 MiB.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

PYTHON=${PYTHON:-python3}
OUT=${OUT:-first-gpu-results}
CARRY=${CARRY:-.gpu}                            # wheels/, model.gguf, triton-cache.tar.gz.*
WORK=${WORK:-/tmp/quantkit-first-gpu}           # Triton's cache holds this path: the same one every time
TARGET_PYTHON=${TARGET_PYTHON:-3.12}            # pack: of the machine with the GPU
CARRY_MIB=${CARRY_MIB:-64}                      # pack: that can be taken along, with the repository's files
PROCESSES=${PROCESSES:-14}
PACK_SECONDS=${PACK_SECONDS:-10}
MOST_PARTS=5

# small packages that a machine with torch and triton often lacks; large ones (numpy, scipy, llvmlite) it has
PACKAGES=(pydantic pydantic-core annotated-types typing-inspection typing-extensions ruamel.yaml pluggy
          rich-click click rich pygments markdown-it-py mdurl jinja2 markupsafe safetensors tokenizers
          gguf tqdm requests urllib3 certifi charset-normalizer idna pyyaml
          huggingface-hub filelock fsspec hf-xet packaging httpx2 httpcore2 truststore
          fastapi starlette uvicorn h11 anyio annotated-doc opentelemetry-api
          pytest iniconfig pytest-xdist execnet hypothesis sortedcontainers)

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*" | tee -a "$OUT/log.txt"; }

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2; }

pack_results() {
  tar -C "$WORK" -czf "$OUT/results.tar.gz.partial" results 2>/dev/null
  mv -f "$OUT/results.tar.gz.partial" "$OUT/results.tar.gz"
}

pack_cache() {  # machine code and what is known of it; all else is only looked for, so empty files will do
  [ -d "$WORK/triton" ] || return 0
  local loaded=(\( -name '*.json' -o -name '*.cubin' -o -name '*.so' \))
  rm -rf "$OUT"/triton-cache.tar.gz.* "$WORK/empty"
  mkdir -p "$WORK/empty/triton"
  (cd "$WORK" && find triton -type f ! "${loaded[@]}" -print0) | (cd "$WORK/empty" \
    && xargs -0 -r bash -c 'for file; do mkdir -p "${file%/*}" && : >"$file"; done' _)
  (cd "$WORK" && find triton -type f "${loaded[@]}" -print0 \
    | tar -czf - -C "$WORK/empty" triton -C "$WORK" --null -T -) \
    | (cd "$OUT" && split -b 15M -a 1 - triton-cache.tar.gz.)
  local parts=("$OUT"/triton-cache.tar.gz.*)
  if [ "${#parts[@]}" -gt "$MOST_PARTS" ]; then
    say "Triton's cache takes ${#parts[@]} parts, $MOST_PARTS are allowed: it is left there"
    rm -f "${parts[@]}"
  fi
}

finish() {
  [ -z "${packer:-}" ] || kill "$packer" 2>/dev/null
  pack_results
  say "results: $(du -ch "$OUT"/* | tail -1 | cut -f1) in $OUT"
}

left() { echo $((deadline - $(date +%s))); }

step() {  # step SECONDS NAME COMMAND…: so long at most, and at most until the run's end
  local most=$(($1 * patience)) name=$2 left code
  left=$(left)
  shift 2
  if [ "$left" -lt 5 ]; then say "$name: no time is left for it"; failed=1; return 1; fi
  [ "$most" -lt "$left" ] || most=$left
  say "-- $name, ${most} s at most"
  timeout -k 5 "$most" "$@" 2>&1 | tee -a "$WORK/results/$name.log" "$OUT/log.txt"
  code=$?
  case $code in
    0) ;;
    124 | 137) say "$name: stopped after $most s; what it had measured is kept"; failed=1 ;;
    *) say "$name: failed, exit code $code"; failed=1 ;;
  esac
  return $code
}

setup() {
  mkdir -p "$OUT" "$WORK/results" "$WORK/site"
  OUT=$(cd "$OUT" && pwd)
  export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$WORK/triton QUANTKIT_CACHE=$WORK/cpu-cache
  export PYTHONPATH=$WORK/site:$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
  say "$("$PYTHON" --version 2>&1) at $(command -v "$PYTHON")"
  "$PYTHON" evals/first_gpu/install.py "$CARRY/wheels" "$WORK/site" 2>&1 | tee -a "$OUT/log.txt" \
    || { say "what is missing above is needed: bash evals/first_gpu.sh pack"; exit 1; }
  if [ ! -d "$WORK/triton" ] && ls "$CARRY"/triton-cache.tar.gz.* >/dev/null 2>&1; then
    cat "$CARRY"/triton-cache.tar.gz.* | tar -C "$WORK" -xzf - && say "Triton's cache is restored"
  fi
  trap finish EXIT
  trap 'exit 143' TERM INT HUP
  (while sleep "$PACK_SECONDS"; do pack_results; done) &
  packer=$!
}

check() {
  step 150 check "$PYTHON" evals/first_gpu/check.py --out "$WORK/results/check.jsonl" "${rehearse[@]}"
  "$PYTHON" -m pytest --collect-only -q -o addopts=--import-mode=importlib -m "$marker" "${tests[@]}" \
    2>"$WORK/results/collect.log" \
    | "$PYTHON" evals/first_gpu/pick_tests.py --most "$most_tests" "${preferred[@]}" >"$WORK/tests"
  if [ ! -s "$WORK/tests" ]; then say "no tests were found"; failed=1; return; fi
  local picked parallel=()
  mapfile -t picked <"$WORK/tests"
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then parallel=(-n "$PROCESSES" --dist worksteal); fi
  step 400 tests "$PYTHON" -m pytest -q -m "$marker" "${parallel[@]}" -p no:cacheprovider "${picked[@]}"
}

decode() {  # decode SECONDS NAME RECIPE CONTEXTS [OPTION…]
  local most=$1 name=$2 recipe=$3 contexts=$4
  shift 4
  step "$most" "$name" "$PYTHON" -m quantkit.cli.main bench decode "$shape" --random "$recipe" \
    --device "$device" --batch 1 --context "$contexts" --kv none --prefill "$prompt" --max-tokens "$tokens" \
    --repeats 2 --quiet --out "$WORK/results/$name.json" "$@"
}

bench() {
  step 150 kernels "$PYTHON" -m quantkit_kernels.tools.bench --quick --minutes 2 \
    --only "$all_rows" --json "$WORK/results/kernels.json" "${rehearse[@]}"
  decode 150 decode-int4 int4-rtn "$contexts"
  decode 150 decode-int8 int8 "$contexts"
  decode 60 decode-int4-pdl int4-rtn "${contexts%%,*}" --pdl
  decode 60 decode-int8-pdl int8 "${contexts%%,*}" --pdl
  step 60 kernels-pdl "$PYTHON" -m quantkit_kernels.tools.bench --quick --minutes 0.7 --pdl --only "$few_rows" \
    --json "$WORK/results/kernels-pdl.json" "${rehearse[@]}"
}

same() {
  step 260 same "$PYTHON" evals/on_gpu.py "$model" --device "$device" --recipe "$recipes" --kv "$kv" \
    --window "$window" --windows 2 --out "$WORK/results/same.json"
}

tune() {  # for as long as is left
  mkdir -p "$WORK/results/tuned"
  local minutes=$((($(left) - 30) / 60))
  step 1800 tune "$PYTHON" -m quantkit_kernels.tools.tune --folder "$WORK/results/tuned" \
    --minutes "${tune_minutes:-$((minutes > 0 ? minutes : 1))}" "${rehearse[@]}"
}

pack() {
  local platform platforms=() size tree
  mkdir -p "$CARRY/wheels"
  for platform in 28 27 17; do platforms+=(--platform "manylinux_2_${platform}_x86_64"); done
  rm -f "$CARRY"/wheels/*
  "$PYTHON" -m pip download -q --no-deps --only-binary :all: --python-version "$TARGET_PYTHON" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    -c constraints.txt -d "$CARRY/wheels" "${PACKAGES[@]}" || exit 1
  "$PYTHON" evals/first_gpu/cut_model.py "$CARRY/model.gguf" ${MODEL:+--source "$MODEL"} || exit 1
  (cd "$CARRY" && du -h --apparent-size wheels/* model.gguf triton-cache.tar.gz.* 2>/dev/null)
  tree=$(git ls-files -z | du -cb --files0-from=- | tail -1 | cut -f1)
  size=$(du -sb "$CARRY" | cut -f1)
  echo "$((size / 1048576)) MiB in $CARRY and $((tree / 1048576)) MiB of the repository's files," \
    "$CARRY_MIB MiB can be taken along"
  [ $((size + tree)) -le $((CARRY_MIB * 1048576)) ]
}

main() {  # a function, so that the whole script is read before anything runs
  # what is run, on a GPU
  device=cuda rehearse=() marker=gpu tests=(tests/kernels) preferred=(cuda-bfloat16 cuda) most_tests=1000
  all_rows="" few_rows=" m1" shape=synthetic:llama-3.1-8b contexts=1100,128000 prompt=8192 tokens=32
  model=$CARRY/model.gguf recipes=none,int8,int4-rtn,nf4 kv=none,int8,int4 window=256 tune_minutes=
  patience=1 failed=0 stages=() seconds=560

  for one in "$@"; do
    case $one in
      --rehearse)
        patience=10 RUN_SECONDS=${RUN_SECONDS:-18000}  # interpreted, perhaps on a busy machine
        device=cpu rehearse=(--rehearse) marker="not gpu and not slow" PROCESSES=1 most_tests=2
        tests=(tests/kernels/test_advance.py tests/kernels/test_fragment.py) preferred=(interpreter-float32)
        all_rows="w4a16 g128 o m1" few_rows="w8a16 o m1" shape=synthetic:tiny contexts=8,40 prompt=16 tokens=4
        model=${REHEARSAL_MODEL:-synthetic:tiny} recipes=none,int4-rtn kv=none,int8 window=64 tune_minutes=0.25
        export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= ;;
      check | bench | same | tune | pack) stages+=("$one") ;;
      all) stages+=(check bench same tune) seconds=1740 ;;
      *) usage ;;
    esac
  done
  [ "${#stages[@]}" -gt 0 ] || usage
  if [ "${stages[0]}" = pack ]; then pack; exit; fi

  deadline=$(($(date +%s) + ${RUN_SECONDS:-$seconds}))
  setup
  for stage in "${stages[@]}"; do
    say "== $stage, $(left) s are left"
    "$stage"
    pack_cache
  done
  exit "$failed"
}

main "$@"
