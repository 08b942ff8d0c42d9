#!/usr/bin/env bash
# Start a Python script on MPI ranks; make the environment that it needs first, where there is none. See --help.
#
# Needs bash 4.4, coreutils and util-linux (any Linux), and Python 3.11 with venv.
# Reads from top to bottom: which Python, its environment, which launcher, the command, running it, the tests.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
VENV=$ROOT/.venv
STAMP=$VENV/.cupy_coll_stamp # line 1: what it was made from; line 2: the extras in it
GRACE=15                     # seconds from passing a signal on to killing what is left of the job
PART_LIMIT=900               # seconds for one part of --test; four times that with --slow

usage() {
    cat <<'END'
Start a Python script on MPI ranks, setting up what it needs on first use.

  ./mpi_launch.sh [-n N] script.py [ARGUMENT...]    run a script on N ranks
  ./mpi_launch.sh [-n N] -m module [ARGUMENT...]    run a module on N ranks
  ./mpi_launch.sh --test [--slow] [PYTEST-ARGUMENT...]
                                                    run the tests: in one process, then on 1, 2, 3 and 4 ranks
  ./mpi_launch.sh --setup [--test] [--dev]          only set up; prints the Python to use

  -n N        ranks (default: as many as the scheduler gave; else one a GPU where there are GPUs, else one a core, but at
              most 4)
  --ppn P     ranks a node
  --hosts H   hosts, separated by commas
  --hostfile F
              a file of hosts
  --bind W    bind each rank to a core, or to none: what the launcher is told; without it, its own choice
  --env V     pass the variable V on, besides CUPY_COLL_*, NCCL_* and OMP_NUM_THREADS; may be repeated
  --tag       begin each line of output with its rank
  --launcher L
              mpiexec, srun, jsrun or flux; without it, see below
  --setup     set up and stop; with --test also what the tests need, with --dev also the linters
  --test      run the tests (with --setup: only set up for them)
  --slow      with --test: the slow tests too
  --dry-run   print the command as it would run, set nothing up
  --help      this text

Everything after the script's name (or the module's) belongs to the script, untouched.

Python is the first of
  1. $CUPY_COLL_PYTHON;
  2. the active environment, or python3 on PATH, where it finds cupy_coll and mpi4py;
  3. .venv beside this launcher: made on first use, remade when pyproject.toml or constraints.txt change. It gets CuPy
     where nvidia-smi shows a GPU. pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are respected.
mpiexec is the one beside that Python, else the first on PATH: MPICH's, Intel's, Open MPI's or PALS' (Cray).

The ranks are started by --launcher; else, inside a Slurm allocation, by srun where it has what this MPI needs (pmi2 for
MPICH and Intel MPI, pmix for Open MPI); inside one of LSF by jsrun where there is one; inside a Flux instance by flux;
else by mpiexec, inside a PBS job with its node file. jsrun, flux and PALS have not been tried.

OMP_NUM_THREADS, unless set, becomes SLURM_CPUS_PER_TASK, or cores / ranks of the node that a rank runs on, at least 1.

The status is the job's: an exception on any rank ends the job with 1, sys.exit(n) with n. SIGTERM and SIGINT are passed
on, and the status is then 143 or 130; ranks that still run 15 seconds later, or at a second signal, are killed.
A wrong use of the launcher gives 2.
END
}

say() { printf 'mpi_launch.sh: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}
misuse() {
    say "$* (see ./mpi_launch.sh --help)"
    exit 2
}

# The words as a shell would take them back, on one line.
quoted() {
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+="$word "
    done
    printf '%s\n' "${line% }"
}

# ---------------------------------------------------------------------------------------------------------------------
# GPUs

gpu_count() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        local -a visible
        local list=,$CUDA_VISIBLE_DEVICES
        list=${list%%,-*} # CUDA reads no further than a negative number
        IFS=, read -ra visible <<<"${list#,}"
        echo "${#visible[@]}"
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# The CuPy extra that the driver asks for; nothing where there is no GPU.
cuda_extra() {
    local text
    text=$(nvidia-smi 2>/dev/null) || return 0
    [[ $text =~ CUDA[A-Za-z\ ]*Version\ *:\ *([0-9]+) ]] || return 0
    if ((BASH_REMATCH[1] >= 13)); then
        echo cuda13
    elif ((BASH_REMATCH[1] == 12)); then
        echo cuda12
    fi
}

default_ranks() {
    local gpus cores
    if [[ -n ${SLURM_NTASKS:-} ]]; then
        echo "$SLURM_NTASKS"
        return
    elif [[ -n ${PBS_NODEFILE:-} ]]; then
        awk 'NF' "$PBS_NODEFILE" | wc -l
        return
    elif [[ -n ${LSB_DJOB_NUMPROC:-} ]]; then
        echo "$LSB_DJOB_NUMPROC"
        return
    fi
    gpus=$(command -v nvidia-smi >/dev/null && gpu_count || echo 0)
    cores=$(nproc)
    if ((gpus > 0)); then
        echo "$gpus"
    else
        echo $((cores < 4 ? cores : 4))
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Which Python

# -I, or a clone's folder would pass for an installed package.
finds_project() {
    "$1" -I -c '
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("cupy_coll", "mpi4py"))))' >/dev/null 2>&1
}

# Sets PYTHON to the interpreter itself (not a shim for it) and BIN to the folder of its commands.
use_python() {
    local -a found
    mapfile -t found < <("$1" -c 'import sys, sysconfig; print(sys.executable, sysconfig.get_path("scripts"), sep="\n")')
    PYTHON=${found[0]} BIN=${found[1]}
}

# require_modules EXTRAS MODULE...: an environment of the user's is never installed into; say what it lacks.
require_modules() {
    local extras=$1 missing
    shift
    missing=$("$PYTHON" -I -c '
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@")
    [[ -z $missing ]] || die "$PYTHON lacks $missing. Install them with:" \
        "$(quoted "$PYTHON" -m pip install -c "$ROOT/constraints.txt" -e "${ROOT}[$extras]")"
}

# Sets PYTHON, BIN and OWN (1: .venv, 0: an environment of the user's).
choose_python() {
    local candidate
    OWN=0
    if [[ -n ${CUPY_COLL_PYTHON:-} ]]; then
        command -v -- "$CUPY_COLL_PYTHON" >/dev/null ||
            die "CUPY_COLL_PYTHON is $CUPY_COLL_PYTHON, which is not an executable"
        finds_project "$CUPY_COLL_PYTHON" ||
            die "CUPY_COLL_PYTHON is $CUPY_COLL_PYTHON, which does not find cupy_coll and mpi4py. Install them with:" \
                "$(quoted "$CUPY_COLL_PYTHON" -m pip install -e "$ROOT")"
        use_python "$CUPY_COLL_PYTHON"
        return
    fi
    for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" \
        "$(command -v python3 || true)"; do
        [[ -n $candidate && $candidate != "$VENV"/* ]] || continue # an active .venv must still be kept current
        if finds_project "$candidate"; then
            use_python "$candidate"
            return
        fi
    done
    OWN=1 PYTHON=$VENV/bin/python BIN=$VENV/bin
}

# A Python to make .venv with. Tried by running: a version manager's command may be there and yet refuse.
base_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer with its venv module; found none on PATH" \
        "(Debian and Ubuntu: the package python3-venv), or set CUPY_COLL_PYTHON"
}

# ---------------------------------------------------------------------------------------------------------------------
# The environment

# Sets KEY and EXTRAS from the stamp: what .venv was made from, and the extras in it. Both empty where it is unfinished.
read_stamp() {
    KEY='' EXTRAS=''
    { read -r KEY && read -r EXTRAS; } 2>/dev/null <"$STAMP" || KEY=''
}

venv_key() { { cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" && printf '%s' "$ROOT"; } | sha256sum | cut -d' ' -f1; }

# The optional dependencies of pyproject.toml that this call needs.
wanted_extras() {
    local cuda
    cuda=$(cuda_extra)
    # The tests use CuPy's binding and compiler, which need no GPU: without one, either CuPy will do.
    if ((TEST)) && [[ -z $cuda ]]; then
        cuda=cuda13
        [[ $EXTRAS != *cuda12* ]] || cuda=cuda12
    fi
    echo "bench mpi${cuda:+ $cuda}$( ((!TEST)) || echo " test")$( ((!DEV)) || echo " dev")"
}

# Sets NEED, what has to be done to .venv (nothing, add, make), and EXTRAS, what will be in it then.
plan_venv() {
    local extra have
    read_stamp
    have=$EXTRAS NEED=nothing
    [[ $KEY == "$(venv_key)" ]] && finds_project "$PYTHON" || NEED=make have=''
    for extra in $(wanted_extras); do
        [[ " $have " == *" $extra "* ]] && continue
        [[ $NEED == make ]] || NEED=add
        # The two CuPys are the same files: one cannot be added to the other.
        [[ $extra != cuda* || $have != *cuda* ]] || NEED=make have=${have/ cuda1[23]/}
        have+=" $extra"
    done
    EXTRAS=${have# }
}

# pip_install WHAT ARGUMENT...: pip's full output goes to a log, what it fetches is shown.
pip_install() {
    local what=$1 log=$VENV.log
    shift
    say "installing $what"
    if ! (cd "$ROOT" && PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip install --no-input \
        --progress-bar off -c constraints.txt "$@") 2>&1 | tee -a "$log" |
        sed -un '/[.]metadata/d; s/^ *\(Downloading [^ ]* (.*)\)$/  \1/p; s/^Installing collected packages.*/  Unpacking/p' >&2; then
        say "pip failed; the end of $log:"
        tail -n 25 "$log" >&2
        exit 1
    fi
}

# Does what NEED says. The stamp goes first and comes back last, so that an interrupted set-up is done again.
make_venv() {
    local base key start=$SECONDS
    key=$(venv_key) # of the files as they are now: a change while pip runs counts as a change
    if [[ $NEED == add ]]; then
        say "adding to $VENV, for: ${EXTRAS// /, }"
        rm -f "$STAMP"
        : >"$VENV.log"
    else
        base=$(base_python)
        if [[ -e $VENV ]]; then
            say "remaking $VENV: it is unfinished, or not what pyproject.toml, constraints.txt and the GPU ask for"
        else
            say "making $VENV, once: this downloads torch and others (docs/install.md: how much, and how to make it less)"
        fi
        rm -rf "$VENV"
        "$base" -m venv "$VENV" >"$VENV.log" 2>&1 || {
            tail -n 25 "$VENV.log" >&2
            die "$base -m venv failed"
        }
        pip_install "pip and setuptools, with $("$base" --version), $base" --upgrade pip setuptools
    fi
    pip_install "cupy_coll with ${EXTRAS// /, }" --no-build-isolation -e ".[${EXTRAS// /,}]"
    printf '%s\n%s\n' "$key" "$EXTRAS" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "$VENV is ready, after $((SECONDS - start)) s"
}

# Descriptor 9 is held while .venv is looked at or changed; 8 is shared by all jobs that run from it, until they end.
ensure_venv() {
    if [[ ! -w $ROOT ]]; then # a clone of somebody else's
        plan_venv
        [[ $NEED == nothing ]] || die "$VENV has to be set up, but $ROOT is not yours to write to"
        return
    fi
    exec 8<>"$VENV.use" 9<>"$VENV.lock"
    flock -n 9 || {
        say "waiting for another mpi_launch.sh that sets up $VENV"
        flock 9
    }
    plan_venv
    if [[ $NEED == make ]] && ! flock -n 8; then
        die "$VENV has to be remade, but a job still runs from it: start again when it has ended"
    fi
    [[ $NEED == nothing ]] || make_venv
    flock -s 8
    exec 9>&-
}

set_up() {
    choose_python
    if ((OWN && DRY_RUN)); then
        plan_venv
        [[ $NEED == nothing ]] || say "would first set up $VENV, for: ${EXTRAS// /, }"
    elif ((OWN)); then
        ensure_venv
    else
        ((!TEST)) || require_modules test,cuda13 pytest xdist hypothesis setuptools cupy
        ((!DEV)) || require_modules dev ruff mypy importlinter
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Which launcher, and how it wants to be asked. A launcher is one function launch_NAME that, given the number of ranks,
# sets COMMAND to the words before the Python.

# Sets MPIEXEC, and LAUNCHER to its kind.
choose_mpiexec() {
    local version
    MPIEXEC=$BIN/mpiexec LAUNCHER=hydra
    if [[ ! -x $MPIEXEC ]]; then
        ((!OWN || !DRY_RUN)) || return 0 # it will be MPICH's, once .venv is there
        MPIEXEC=$(command -v mpiexec) || die "found no mpiexec, neither beside $PYTHON nor on PATH. Load your cluster's" \
            "MPI, or install one: $(quoted "$PYTHON" -m pip install mpich)"
    fi
    version=$("$MPIEXEC" --version 2>&1) || true
    case $version in
    *"HYDRA build details"* | *"Intel(R) MPI"*) LAUNCHER=hydra ;;
    *"Open MPI"* | *OpenRTE*) LAUNCHER=openmpi ;;
    *PALS*) LAUNCHER=pals ;;
    *)
        [[ $(readlink -f -- "$MPIEXEC") != */pals/* ]] ||
            { LAUNCHER=pals && return; } # where the version is a number only
        die "$MPIEXEC --version names neither MPICH nor Intel MPI nor Open MPI nor PALS, but: ${version%%$'\n'*}"
        ;;
    esac
}

# What mpi4py's MPI library says that it is; nothing where it cannot be loaded.
mpi_library() {
    "$PYTHON" -c 'import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().strip("\0").split()))' 2>/dev/null || true
}

# Open MPI's mpiexec ends ranks of another MPI with that one's words about PMI. (Those of MPICH and others start them as so
# many worlds, which the ranks notice: job_command.)
refuse_foreign() {
    local library
    [[ $LAUNCHER == openmpi ]] || return 0
    library=$(mpi_library)
    [[ -z $library || $library == *"Open MPI"* ]] ||
        die "$MPIEXEC is Open MPI's, but mpi4py has loaded ${library:0:40}: use the mpiexec of that one, or let mpi4py" \
            "load Open MPI: MPI4PY_LIBMPI=/path/to/libmpi.so.40 (docs/install.md)"
}

# The PMI by which srun starts ranks of mpi4py's MPI; nothing where this Slurm has not got it.
slurm_pmi() {
    local wanted=pmi2
    [[ $(mpi_library) != *"Open MPI"* ]] || wanted=pmix
    [[ $(srun --mpi=list 2>&1) != *"$wanted"* ]] || echo "$wanted"
}

in_slurm() { [[ -n ${SLURM_JOB_ID:-} ]]; }

choose_launcher() {
    PMI=
    case ${ASKED:-} in
    '')
        if in_slurm && command -v srun >/dev/null; then
            PMI=$(slurm_pmi)
            if [[ -n $PMI ]]; then
                LAUNCHER=srun
                return
            fi
            say "srun lists no PMI for this MPI (srun --mpi=list): starting by mpiexec"
        elif [[ -n ${LSB_JOBID:-} ]] && command -v jsrun >/dev/null; then
            LAUNCHER=jsrun
            return
        elif [[ -n ${FLUX_URI:-} ]] && command -v flux >/dev/null; then
            LAUNCHER=flux
            return
        fi
        choose_mpiexec
        ;;
    mpiexec) choose_mpiexec ;;
    *)
        command -v "$ASKED" >/dev/null || die "--launcher $ASKED: there is no $ASKED on PATH"
        LAUNCHER=$ASKED
        if [[ $ASKED == srun ]]; then
            PMI=$(slurm_pmi)
            [[ -n $PMI ]] || die "--launcher srun: srun --mpi=list names no PMI for this MPI (pmi2 for MPICH and Intel MPI," \
                "pmix for Open MPI); use --launcher mpiexec inside the allocation"
        fi
        ;;
    esac
}

# The file of hosts to give to mpiexec: the user's, or PBS's.
node_file() { echo "${HOSTFILE:-${PBS_NODEFILE:-}}"; }

# The variables to pass on to other hosts.
forwarded() {
    compgen -e | grep -E '^(CUPY_COLL_|NCCL_)' || true
    [[ -z $THREADS ]] || echo OMP_NUM_THREADS
    ((${#VARIABLES[@]} == 0)) || printf '%s\n' "${VARIABLES[@]}"
}

# It passes the whole environment on by itself.
launch_hydra() {
    local file
    file=$(node_file)
    COMMAND=("$MPIEXEC" -n "$1")
    [[ -z $PPN ]] || COMMAND+=(-ppn "$PPN")
    if [[ -n $HOSTS ]]; then
        COMMAND+=(-hosts "$HOSTS")
    elif [[ -n $file ]]; then
        COMMAND+=(-f "$file")
    fi
    [[ -z $BIND ]] || COMMAND+=(-bind-to "$BIND")
    ((!TAG)) || COMMAND+=(-l)
}

# More ranks than cores are allowed, as with MPICH, and ranks are not bound, or two would get one core each.
launch_openmpi() {
    local file name
    file=$(node_file)
    COMMAND=("$MPIEXEC" -n "$1" --oversubscribe --bind-to "${BIND:-none}")
    ((EUID != 0)) || COMMAND+=(--allow-run-as-root)
    [[ -z $PPN ]] || COMMAND+=(--map-by "ppr:$PPN:node")
    if [[ -n $HOSTS ]]; then
        COMMAND+=(--host "$HOSTS")
    elif [[ -n $file ]]; then
        COMMAND+=(--hostfile "$file")
    fi
    ((!TAG)) || COMMAND+=(--tag-output)
    if [[ -n $HOSTS || -n $file ]] || in_slurm; then
        while read -r name; do COMMAND+=(-x "$name"); done < <(forwarded)
    fi
}

# It knows a PBS job's nodes, and passes the whole environment on. Written from its documentation.
launch_pals() {
    COMMAND=("$MPIEXEC" -n "$1")
    [[ -z $PPN ]] || COMMAND+=(--ppn "$PPN")
    [[ -z $HOSTS ]] || COMMAND+=(--hosts "$HOSTS")
    [[ -z $HOSTFILE ]] || COMMAND+=(--hostfile "$HOSTFILE")
    [[ -z $BIND ]] || COMMAND+=(--cpu-bind "$BIND")
    ((!TAG)) || COMMAND+=(--label)
}

# Without -K1 a job goes on when one of its ranks is killed.
launch_srun() {
    COMMAND=(srun -K1 "--ntasks=$1" "--mpi=$PMI")
    [[ -z $PPN ]] || COMMAND+=("--ntasks-per-node=$PPN")
    # sbatch's does not reach srun by itself (Slurm 22.05 and later).
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || COMMAND+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    [[ -z $HOSTS ]] || COMMAND+=("--nodelist=$HOSTS")
    [[ -z $HOSTFILE ]] || COMMAND+=("--nodefile=$HOSTFILE")
    case $BIND in
    core) COMMAND+=(--cpu-bind=cores) ;;
    none) COMMAND+=(--cpu-bind=none) ;;
    esac
    ((!TAG)) || COMMAND+=(--label)
}

# refuse LAUNCHER OPTION VALUE...: an option that has a value, which this launcher would have to be told in another way.
refuse() {
    local launcher=$1
    shift
    while (($#)); do
        [[ -z $2 ]] || misuse "$1 is not passed on to $launcher; use --launcher mpiexec, or ask the scheduler for it"
        shift 2
    done
}

launch_jsrun() {
    refuse jsrun --ppn "$PPN" --hosts "$HOSTS" --hostfile "$HOSTFILE" --bind "${BIND#none}"
    COMMAND=(jsrun --np "$1")
    ((!TAG)) || COMMAND+=(--stdio_mode prepended)
    [[ $BIND != none ]] || COMMAND+=(--bind none)
}

launch_flux() {
    refuse flux --hostfile "$HOSTFILE" --bind "${BIND#none}"
    COMMAND=(flux run -n "$1")
    [[ -z $PPN ]] || COMMAND+=("--tasks-per-node=$PPN")
    [[ -z $HOSTS ]] || COMMAND+=("--requires=host:$HOSTS")
    [[ $BIND != none ]] || COMMAND+=(-o cpu-affinity=off)
    ((!TAG)) || COMMAND+=(--label-io)
}

# Threads of each rank; nothing where only the ranks can see how many cores and ranks their nodes have.
threads() {
    local cores
    if [[ -n ${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-}} ]]; then
        echo "${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
    elif [[ $LAUNCHER =~ ^(hydra|openmpi)$ && -z $HOSTS$(node_file)${SLURM_JOB_ID:-}${LSB_JOBID:-} ]]; then
        cores=$(nproc)
        echo $((cores > $1 ? cores / $1 : 1))
    fi
}

# job_command RANKS WORD...: sets COMMAND. mpi4py's runner ends the whole job when one rank fails; MPI is imported before
# it, or an exception before the script's own import of MPI would leave the other ranks waiting. An mpiexec of another
# MPI than mpi4py's starts so many worlds of one rank, with status 0: hence the look at the size. The status that a rank
# ends the job with goes to STATUS_FILE too: see run_job.
job_command() {
    local ranks=$1 in_rank=
    shift
    THREADS=$(threads "$ranks")
    "launch_$LAUNCHER" "$ranks"
    if [[ -z $THREADS ]]; then
        # Where ranks are bound each sees its own cores only: hence the union.
        in_rank="node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED); \
cores = set().union(*node.allgather(os.sched_getaffinity(0))); \
os.environ['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS') or str(max(1, len(cores) // node.size)); node.Free(); "
    elif [[ -z ${OMP_NUM_THREADS:-} ]]; then
        COMMAND=(env "OMP_NUM_THREADS=$THREADS" "${COMMAND[@]}")
    fi
    COMMAND+=("$PYTHON" -c "import os, sys; from mpi4py import MPI, run; n = MPI.COMM_WORLD.size; n == $ranks or \
sys.exit(f\"mpi_launch.sh: asked for $ranks ranks but MPI counts {n}: mpiexec and mpi4py's MPI are not of one kind (docs/install.md)\"); \
end = MPI._set_abort_status; \
MPI._set_abort_status = lambda status: (os.path.exists(file := os.environ.get('CUPY_COLL_STATUS_FILE', '')) and \
os.write(os.open(file, os.O_WRONLY | os.O_APPEND), b'%d\n' % status), end(status)); \
${in_rank}run.main()" "$@")
}

# ---------------------------------------------------------------------------------------------------------------------
# Running a job

# The process and all below it. Ranks live in sessions of their own, so only parentage finds them.
family() {
    local pid=$1 stat
    local -A children=()
    for stat in /proc/[0-9]*/stat; do
        { read -r stat <"$stat"; } 2>/dev/null || continue
        local fields=${stat##*) }                         # the name before it may hold anything
        fields=${fields#* }                               # the state
        children[${fields%% *}]+=" ${stat%% *}"
    done
    local -a todo=("$pid")
    while ((${#todo[@]})); do
        pid=${todo[0]}
        # shellcheck disable=SC2206 # a list of numbers
        todo=("${todo[@]:1}" ${children[$pid]:-})
        echo "$pid"
    done
}

# after SECONDS SIGNAL: sends this script the signal then.
after() {
    (
        trap 'kill "$!"' TERM
        sleep "$1" &
        wait "$!" && kill -s "$2" "$$"
    ) </dev/null >/dev/null 2>&1 8>&- 9>&- &
    TIMERS+=("$!")
}

# end_job SIGNAL STATUS: passes the signal on; kills what is left after GRACE, or at the second signal. One within two
# seconds is the first again: coreutils' timeout signals its child, and then the child's whole process group.
end_job() {
    if [[ -z $ENDED ]]; then
        ENDED=$2 ENDED_AT=$SECONDS
        kill -s "$1" "$JOB" 2>/dev/null || true
        after "$GRACE" USR1
    elif ((SECONDS - ENDED_AT >= 2)); then
        kill_job
    fi
}

kill_job() {
    local -a pids
    mapfile -t pids < <(family "$JOB")
    kill -s KILL "${pids[@]}" 2>/dev/null || true
}

# run_job SECONDS WORD...: runs the words, at most so long (0: without limit), and returns their status: 143, 130 or 129
# where this script was told to end, 124 where the time was up.
#
# The job gets a session of its own: Ctrl-C in a terminal reaches this script alone, which passes it on once (at a second
# interrupt hydra returns 0). Its standard input stays what it is.
#
# When a rank ends the job, hydra kills the others, and may return 9 for that instead of the rank's status: the first
# status in STATUS_FILE counts then. Ranks on other hosts do not see the file.
run_job() {
    local limit=$1 status told=
    shift
    if [[ ${LAUNCHER:-} == hydra ]]; then
        STATUS_FILE=$(mktemp) || say "the job's status will be the one that mpiexec gives"
        export CUPY_COLL_STATUS_FILE=$STATUS_FILE
    fi
    ENDED='' TIMERS=()
    (
        trap - INT QUIT # ignored in the background jobs of a script
        exec setsid -- "$@"
    ) <&0 8>&- 9>&- &
    JOB=$!
    trap 'end_job TERM 143' TERM
    trap 'end_job INT 130' INT
    trap 'end_job HUP 129' HUP
    trap 'end_job TERM 124' ALRM
    trap kill_job USR1
    ((limit == 0)) || after "$limit" ALRM
    while true; do
        status=0
        wait "$JOB" 2>/dev/null || status=$? # bash would report a kill of our own
        kill -0 "$JOB" 2>/dev/null || break # else a signal ended the wait early
    done
    trap - TERM INT HUP ALRM USR1
    kill "${TIMERS[@]}" 2>/dev/null || true
    if [[ -n ${STATUS_FILE:-} ]]; then
        read -r told <"$STATUS_FILE" || true
        rm -f -- "$STATUS_FILE"
        unset STATUS_FILE CUPY_COLL_STATUS_FILE
        ((status != 9)) || status=${told:-9}
    fi
    return "${ENDED:-$status}"
}

# MPICH's ranks leave their files in /dev/shm when they are killed: remove one's own that no process has mapped. Not new
# ones: between making and mapping such a file, a rank that starts right now seems not to use it.
sweep_shm() {
    local file used
    local -a stale
    mapfile -t stale < <(find /dev/shm -maxdepth 1 -name 'mpich_shm_*' -user "$EUID" -mmin +1 2>/dev/null)
    ((${#stale[@]})) || return 0
    used=$(cat /proc/[0-9]*/maps 2>/dev/null | grep -o '/dev/shm/mpich_shm_[^ ]*' || true)
    for file in "${stale[@]}"; do
        [[ $used == *"$file"* ]] || rm -f -- "$file"
    done
}

run_or_print() {
    if ((DRY_RUN)); then
        shift
        quoted "$@"
    else
        run_job "$@"
    fi
}

run_script() {
    [[ $1 == -m || -e $1 ]] || misuse "no such script: $1"
    [[ $1 != -m || $# -ge 2 ]] || misuse "-m needs the name of a module"
    set_up
    choose_launcher
    job_command "${RANKS:-$(default_ranks)}" "$@"
    if ((!DRY_RUN)); then
        refuse_foreign
        sweep_shm
    fi
    run_or_print 0 "${COMMAND[@]}"
}

# ---------------------------------------------------------------------------------------------------------------------
# The tests

# part NAME WORD...: runs one part of the tests and adds a line to SUMMARY.
part() {
    local name=$1 status=0 start=$SECONDS outcome
    shift
    ((DRY_RUN)) || printf '\n==> %s\n' "$name"
    run_or_print $((SLOW ? 4 * PART_LIMIT : PART_LIMIT)) "$@" || status=$?
    ((status != 5 || !SELECTION)) || status=0 # pytest: the user's choice of tests left none in this part
    case $status in
    0) outcome=passed ;;
    124) outcome="ended after $((SECONDS - start)) s without an end" ;;
    129 | 130 | 143) exit "$status" ;;
    *) outcome="failed with status $status" ;;
    esac
    [[ $outcome == passed ]] || FAILED=1
    SUMMARY+=("$(printf '%-28s %5d s  %s' "$name" $((SECONDS - start)) "$outcome")")
}

# Goes on after a part that failed.
run_tests() {
    local ranks
    FAILED=0 SUMMARY=() SELECTION=$#
    ((!SLOW)) || set -- --slow "$@"
    set_up
    ASKED=mpiexec # also inside an allocation: the tests make their own groups of ranks on this host
    unset PBS_NODEFILE
    choose_launcher
    ((DRY_RUN)) || sweep_shm
    cd "$ROOT"
    export CUPY_COLL_PYTHON=$PYTHON # for the launchers that the tests start
    SUMMARY+=("$(printf '%-28s %5d s' set-up "$SECONDS")")
    part "in one process" "$PYTHON" -m pytest -n 2 --dist loadscope tests/unit "$@"
    part "jobs" "$PYTHON" -m pytest tests/jobs "$@"
    for ranks in 1 2 3 4; do
        job_command "$ranks" -m pytest tests/ranks "$@"
        part "on $ranks rank$( ((ranks == 1)) || echo s)" "${COMMAND[@]}"
        job_command "$ranks" -m pytest tests/nccl "$@" # over a library that stands in for NCCL
        part "NCCL's stand-in, on $ranks" "${COMMAND[@]}"
    done
    if ((!DRY_RUN)); then
        printf '\n'
        printf '%s\n' "${SUMMARY[@]}"
        printf '%-28s %5d s  %s\n' total "$SECONDS" "$( ((FAILED)) && echo failed || echo passed)"
    fi
    return "$FAILED"
}

# ---------------------------------------------------------------------------------------------------------------------

take_option() {
    case $1 in
    --ppn)
        [[ $2 =~ ^[1-9][0-9]*$ ]] || misuse "--ppn needs a number of ranks, got '$2'"
        PPN=$2
        ;;
    --hosts)
        [[ $2 =~ ^[^,[:space:]]+(,[^,[:space:]]+)*$ ]] || misuse "--hosts needs hosts separated by commas, got '$2'"
        HOSTS=$2
        ;;
    --hostfile)
        [[ -r $2 ]] || misuse "--hostfile: cannot read '$2'"
        HOSTFILE=$2
        ;;
    --bind)
        [[ $2 == core || $2 == none ]] || misuse "--bind needs core or none, got '$2'"
        BIND=$2
        ;;
    --env)
        [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || misuse "--env needs the name of a variable, got '$2'"
        VARIABLES+=("$2")
        ;;
    --launcher)
        [[ $2 =~ ^(mpiexec|srun|jsrun|flux)$ ]] || misuse "--launcher needs mpiexec, srun, jsrun or flux, got '$2'"
        ASKED=$2
        ;;
    esac
}

main() {
    local tool setup=0
    RANKS='' TEST=0 SLOW=0 DEV=0 DRY_RUN=0
    ASKED='' PPN='' HOSTS='' HOSTFILE='' BIND='' TAG=0 VARIABLES=()
    while (($#)); do
        case $1 in
        --help | -h)
            usage
            return
            ;;
        -n)
            (($# >= 2)) || misuse "-n needs a number"
            RANKS=$2
            [[ $RANKS =~ ^[1-9][0-9]*$ ]] || misuse "-n needs a number of ranks, got '$RANKS'"
            shift
            ;;
        --ppn | --hosts | --hostfile | --bind | --env | --launcher)
            (($# >= 2)) || misuse "$1 needs a value"
            take_option "$1" "$2"
            shift
            ;;
        --tag) TAG=1 ;;
        --setup) setup=1 ;;
        --test) TEST=1 ;;
        --slow) SLOW=1 ;;
        --dev) DEV=1 ;;
        --dry-run) DRY_RUN=1 ;;
        -m) break ;;
        -*)
            ((!TEST)) || break # pytest's
            misuse "unknown option: $1"
            ;;
        *) break ;;
        esac
        shift
    done
    for tool in flock nproc setsid sha256sum; do
        command -v "$tool" >/dev/null || die "needs the command $tool (coreutils or util-linux)"
    done
    if ((setup)); then
        (($# == 0)) || misuse "--setup takes no script, got: $1"
        set_up
        echo "$PYTHON"
    elif ((TEST)); then
        run_tests "$@"
    elif (($#)); then
        run_script "$@"
    else
        usage >&2
        return 2
    fi
}

main "$@"
