#!/usr/bin/env bash
# What users run, on a machine with many cores and no network, in under eight minutes: Overlord beside torch's DataLoader.
#
#   bench/on_many_cores.sh [--packages FOLDER] [--data FOLDER] [--out FOLDER] [PART ...]
#
# Parts are text, bpe, images, ready, first, scaling and memory; all but first unless given. --packages is a folder of wheels
# that the machine lacks (msgspec, orjson, cloudpickle, rich, simplejpeg, tiktoken, spdl-core ...), made for its Python.
# Data are made in --data (TMPDIR unless given), figures are written to --out. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
data=${TMPDIR:-/tmp}/overlord-bench
out=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --packages) packages=$2 ;;
    --data) data=$2 ;;
    --out) out=$2 ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
  shift 2
done
export PYTHONPATH="$PWD:$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out=${out:-$data/figures}
mkdir -p "$data" "$out"
if [[ -n ${packages:-} ]]; then
  for wheel in "$packages"/*.whl; do "$python" -m zipfile -e "$wheel" "$data/packages"; done
  export PYTHONPATH="$PYTHONPATH:$data/packages"
fi
parts=("$@"); ((${#parts[@]})) || parts=(text bpe images ready scaling memory)
compared=(overlord "overlord, one process" "overlord, same library" "overlord, no threads" torch)
echo "$(nproc) cores, $($python --version); data in $data"
time "$python" -m bench.corpus "$data"
status=0
for part in "${parts[@]}"; do
  case $part in
    text) what=(trainers --works text --seconds 3 --only "${compared[@]}" "spdl, arena") ;;
    bpe | images | ready) what=(trainers --works "$part" --seconds 3 --only "${compared[@]}") ;;
    first) what=(first --rounds 1 --only "${compared[@]}") ;;
    scaling) what=(scaling --rounds 1 --seconds 2) ;;
    memory) what=(trainers_memory --only overlord "torch, 4 workers each" torch) ;;
    *) echo "no part is called $part: text, bpe, images, ready, first, scaling or memory"; exit 2 ;;
  esac
  begun=$SECONDS
  "$python" -m bench "${what[@]}" --quick --data "$data" --save "$out/$part.json" || status=1
  echo "($part took $((SECONDS - begun)) s)"
done
exit $status
