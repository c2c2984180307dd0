# Sourced by the scripts that make an environment, from the repository root: what they say and how they run pip.
# $VENV names the environment that is being made; the log of a step is kept in it.

unset PYTHONDONTWRITEBYTECODE   # every rank, grader and test process imports the same modules: compiled once

say() { printf '%s\n' "$*" >&2; }
stopped() { say ""; say "interrupted; the next run starts the set-up again"; exit 130; }
die() { say "error: $1"; [ -n "${2:-}" ] && say "" && say "hint: $2"; exit 1; }

# First interpreter of version 3.11 or newer; RLCTL_PYTHON overrides.
find_python() {
    local candidate candidates=(python3.11 python3.12 python3.13 python3 python)
    if [ -n "${RLCTL_PYTHON:-}" ]; then candidates=("$RLCTL_PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# Leaves in INSTALL how packages come into the environment of $PY: by uv, a third of pip's time, unless it reaches no
# index. torch itself is always installed by pip, whose settings may name a file for it. Of the modules of all packages
# few are ever imported: these are compiled at their first import, most of them by the look at what is installed.
choose_installer() {
    local index
    INSTALL=("$PY" -m pip install --no-compile)
    index=${PIP_INDEX_URL:-$("$PY" -m pip config get global.index-url 2>/dev/null || true)}
    local by_uv=("$PY" -m uv pip install --python "$PY" ${index:+--index-url "$index"})
    if "$PY" -m pip install --quiet uv >/dev/null 2>&1 \
        && "${by_uv[@]}" --quiet --dry-run --reinstall xxhash >/dev/null 2>&1; then
        INSTALL=("${by_uv[@]}")
    fi
}

has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# step TEXT COMMAND...: run quietly, show what pip is at and for how long; the log appears only on failure.
step() {
    local text="$1" log="$VENV/install.log" started=$SECONDS pid
    shift
    "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; stopped' INT TERM
    if [ -t 2 ]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r\033[K  %s  %ds  %.60s' "$text" $((SECONDS - started)) "$(tail -n 1 "$log" 2>/dev/null | tr -d '\r')" >&2
            sleep 0.5
        done
        printf '\r\033[K' >&2
    fi
    if ! wait "$pid"; then
        tail -n 25 "$log" >&2
        die "$text failed" "the whole log is $log; run the script again after fixing the cause"
    fi
    trap stopped INT TERM
    say "  $text  done in $((SECONDS - started)) s"
}
