#!/usr/bin/env bash
# Everything worth knowing on a GPU, in one go and one table, in under ten minutes:
#     benchmarks/gpu_check.sh [--dry-run] [PYTEST-ARGUMENT...]
#
# --dry-run: what can run on a processor does, with small shapes, to see that it would run.
# Uses CUPY_COLL_PYTHON, else the Python of the project's own environment, else python3. Exits with 0 when every part
# has passed.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit

python=${CUPY_COLL_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
LIMIT=240 # seconds a part
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

if [[ ${1-} == --dry-run ]]; then
    shift
    export GPU_CHECK_DRY_RUN=1
    part "kernels against float64" "$python" -m pytest tests/gpu/test_kernels_on_gpu.py -rs -q "$@"
    part "kernels, once each" "$python" benchmarks/kernels.py --dry-run --sanitize
    part "kernels, bandwidth" "$python" benchmarks/kernels.py --dry-run
    printf '\n%s\n' "A dry run, on a processor: no GPU was used."
    printf '%s\n' "${TABLE[@]}"
    exit "$FAILED"
fi
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

part "kernels against float64" "$python" -m pytest tests/gpu/test_kernels_on_gpu.py -rs -q "$@"
part "NCCL, bridges, streams, capture" "$python" -m pytest tests/gpu/test_nccl_on_gpu.py -rs -q "$@"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        LIMIT=60 part "compute-sanitizer, $tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$python" benchmarks/kernels.py --sanitize
    done
else
    printf '\n== compute-sanitizer is not installed: left out\n'
fi
part "kernels, bandwidth" "$python" benchmarks/kernels.py --seconds 180

printf '\n'
printf '%s\n' "${TABLE[@]}"
exit "$FAILED"
