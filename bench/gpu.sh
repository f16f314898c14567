#!/usr/bin/env bash
# The suites on a GPU, on random weights of the pplx-embed shapes, beside transformers and sentence-transformers.
#
#   bench/gpu.sh                          everything, for 0.6b and 4b
#   PARTS=engine SHAPES=0.6b bench/gpu.sh one part; each is well under ten minutes
#   VLLM=/opt/vllm/bin/python bench/gpu.sh   vLLM beside Hortus in the served suites, from an environment of its own
#   SHAPES=tiny ROUNDS=1 SECONDS_A_ROUND=0.1 ARGS='--tokens 32 --most-clients 4' bench/gpu.sh   does it all work? (no GPU needed)
#
# Parts: engine (suites 1 to 3 in process), compile (torch.compile, which takes a minute a size), served (suite 4 and ours).
# Needs a python3 with CUDA PyTorch, transformers and sentence-transformers, and Hortus' own few packages; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
out=${RESULTS:-bench/results/gpu.jsonl}
# Evaluation text where gensim is installed, this project's own pages where it is not.
texts=()
$python -c 'import gensim' 2> /dev/null || texts=(--texts docs/*.md docs/decisions/*.md)

bench() {
  $python -m hortus.cli bench "$@" --seconds "${SECONDS_A_ROUND:-1}" --rounds "${ROUNDS:-5}" "${texts[@]}" --out "$out" ${ARGS:-}
}

for shape in ${SHAPES:-0.6b 4b}; do
  for part in ${PARTS:-engine compile served}; do
    echo "== $part, $shape"
    case $part in
      engine)
        bench latency,scoring,throughput --shape "$shape" \
          --target engine --target transformers --target sentence-transformers ;;
      compile)
        bench latency --shape "$shape" --tokens 128 512 --target engine --target transformers-compile ;;
      served)
        bench start,concurrency,short,throughput,arrivals,mixed,graphs --shape "$shape" \
          --target hortus-http=serve ${VLLM:+--target vllm:"$VLLM"} ;;
      *) echo "no part $part: engine, compile, served" >&2; exit 2 ;;
    esac
  done
done
