#!/usr/bin/env bash
# Everything worth knowing on a GPU, in one go and one table: benchmarks/gpu_check.sh [PYTEST-ARGUMENT...]
#
# Uses CUPY_COLL_PYTHON, else the Python of the project's own environment, else python3. Exits with 0 when every part
# has passed.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit

python=${CUPY_COLL_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
LIMIT=300 # seconds a part
TABLE=()
FAILED=0

# part NAME WORD...: runs a command and adds a line to the table.
part() {
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    timeout "$LIMIT" "$@" || status=$?
    ((status == 0)) || FAILED=1
    TABLE+=("$(printf '%-36s %6d s   %s' "$name" "$((SECONDS - begin))" "$( ((status)) && echo "failed ($status)" || echo passed)")")
}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: $python sees no GPU" >&2
    exit 1
fi
"$python" -c '
import torch
from cupy.cuda import nccl
for i in range(torch.cuda.device_count()):
    print(f"cuda:{i}  {torch.cuda.get_device_name(i)}, compute capability {torch.cuda.get_device_capability(i)}")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl.get_version()} by CuPy")'

part "NCCL, bridges, streams, capture" "$python" -m pytest tests/gpu -rs -q "$@"

printf '\n'
printf '%s\n' "${TABLE[@]}"
exit "$FAILED"
