#!/usr/bin/env bash
# The suites on a GPU, on random weights of published shapes, beside transformers and sentence-transformers.
#
#   bench/gpu.sh                          everything: 0.6b and 4b (pplx-embed's shapes), then the encoders
#   PARTS=engine SHAPES=0.6b bench/gpu.sh one part; each is well under ten minutes
#   PARTS=encoders bench/gpu.sh           BERT (bge-base, MiniLM) and ModernBERT-base, two minutes; ENCODERS chooses
#   VLLM=/opt/vllm/bin/python bench/gpu.sh   vLLM beside Hortus in the served suites, from an environment of its own
#   SHAPES=tiny ROUNDS=1 SECONDS_A_ROUND=0.1 ARGS='--tokens 32 --most-clients 4' bench/gpu.sh   does it all work? (no GPU needed)
#   PARTS=encoders ENCODERS='tiny-bert tiny-modernbert' ROUNDS=1 SECONDS_A_ROUND=0 bench/gpu.sh   the same for encoders
#
# Parts: engine (suites 1 to 3 in process), compile (beside torch.compile too, which takes a minute a size), served (suite 4 and ours),
# encoders (whatever SHAPES says).
# Needs a python3 with CUDA PyTorch, transformers and sentence-transformers, and Hortus' own few packages; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
out=${RESULTS:-bench/results/gpu.jsonl}
peers=(--target engine --target transformers --target sentence-transformers)
# Evaluation text where gensim is installed, this project's own pages where it is not.
texts=()
$python -c 'import gensim' 2> /dev/null || texts=(--texts docs/*.md docs/decisions/*.md)

bench() {
  $python -m hortus.cli bench "$@" --seconds "${SECONDS_A_ROUND:-1}" --rounds "${ROUNDS:-5}" "${texts[@]}" --out "$out" ${ARGS:-}
}

part() {  # name, shape
  echo "== $1, $2"
  case $1 in
    engine)
      bench latency,scoring,throughput --shape "$2" "${peers[@]}" ;;
    compile)
      bench latency --shape "$2" --tokens 128 512 "${peers[@]}" --target transformers-compile ;;
    served)
      bench start,concurrency,short,throughput,arrivals,mixed,graphs --shape "$2" \
        --target hortus-http=serve ${VLLM:+--target vllm:"$VLLM"} ;;
    *) echo "no part $1: engine, compile, served, encoders" >&2; exit 2 ;;
  esac
}

encoder() {  # shape
  local sizes=(1x512 32x512 1x32 1x128 64x128)
  case $1 in
    modernbert-base) sizes=(1x512 32x512) ;;
    minilm) sizes=(1x32 1x128 64x128) ;;
  esac
  echo "== encoders, $1"
  SECONDS_A_ROUND=${SECONDS_A_ROUND:-0.2} bench cases --shape "$1" --cases "${sizes[@]}" "${peers[@]}"
}

parts=${PARTS:-engine compile served encoders}
for shape in ${SHAPES:-0.6b 4b}; do
  for name in $parts; do
    [ "$name" = encoders ] || part "$name" "$shape"
  done
done
if [[ " $parts " = *" encoders "* ]]; then
  for shape in ${ENCODERS:-bge-base modernbert-base minilm}; do
    encoder "$shape"
  done
fi
