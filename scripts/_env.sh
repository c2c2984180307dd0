# Sourced by scripts/quickstart and scripts/test, from the repository root: makes or repairs .venv, quickly when
# nothing has changed. Leaves $PY (the environment's interpreter) and puts .venv/bin first on PATH.
#
# A machine without an NVIDIA driver never gets a CUDA build of torch: scripts/_pick_torch.py decides before anything
# is downloaded, and the build is looked at again when it is installed.

VENV="$PWD/.venv"
PY="$VENV/bin/python"
STAMP="$VENV/.rlctl-stamp"     # written last: what the environment was made from
UNFINISHED="$VENV/.rlctl-unfinished"   # there while packages are being installed

. scripts/_steps.sh

# What the environment depends on; changes when it must be brought up to date.
fingerprint() {
    local gpu=cpu
    has_gpu && gpu=cuda
    printf '%s %s' "$gpu" "$(cat pyproject.toml scripts/constraints.txt scripts/_env.sh scripts/_steps.sh scripts/_pick_torch.py | cksum)"
}

# Whether .venv was made where it is: in a copied or moved one, commands start the interpreter of the old place.
in_place() { (. "$VENV/bin/activate" && [ "$VIRTUAL_ENV" -ef "$VENV" ]) 2>/dev/null; }

make_env() {
    local python torch_args want
    if [ -e "$UNFINISHED" ]; then
        say "The last set-up was interrupted: .venv is made anew."
    fi
    if [ -e "$UNFINISHED" ] || ! in_place || ! "$PY" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || die "no Python 3.11 or newer found" \
            "install it (python3.11 with its venv module), or name one: RLCTL_PYTHON=/path/to/python3.11 $0"
        say "Making .venv with $("$python" --version) ($python)"
        "$python" -m venv --clear "$VENV" >/dev/null 2>&1 || die "$python cannot make a virtual environment" \
            "install its venv module (on Debian and Ubuntu: apt install python3.11-venv)"
    fi
    : >"$UNFINISHED"
    # pip 24.1 answers a dry run from metadata alone; an older one would fetch a whole torch just to look at it.
    step "pip" "$PY" -m pip install --upgrade "pip>=24.1"
    want=$(grep '^torch==' scripts/constraints.txt)
    if ! "$PY" -m pip freeze 2>/dev/null | grep -Eq "^${want}([+]|\$)|^torch @ "; then
        torch_args=$("$PY" scripts/_pick_torch.py "$want" "$1") || exit 1
        # shellcheck disable=SC2086
        step "$want ($1 build, the longest step)" "$PY" -m pip install --no-compile --no-deps $torch_args "$want"
    fi
    choose_installer
    step "rlctl and its tools" "${INSTALL[@]}" --constraint scripts/constraints.txt --editable ".[dev]"
    step "a look at what is installed" "$PY" scripts/_pick_torch.py --installed "$1"
    rm -f "$UNFINISHED"
}

ensure_env() {
    local now kind started=$SECONDS
    # The stamp decides: no interpreter is started when it matches.
    now=$(fingerprint)
    kind=${now%% *}
    if [ -x "$PY" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$now" ] && in_place; then
        return 0
    fi
    mkdir -p "$VENV"
    # Two scripts at once: the second waits for the first, then finds the stamp.
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$PWD/.venv.lock"
        flock -w 1800 9 || die "another script has been setting up .venv for half an hour" "remove .venv.lock if none is running"
        if [ "$(cat "$STAMP" 2>/dev/null)" = "$now" ] && in_place; then
            exec 9>&-
            return 0
        fi
    fi
    say "Setting up .venv ($kind; a few minutes the first time, mostly the download of torch)"
    rm -f "$STAMP"
    # pip ends an interrupt politely, and a script without a trap would then go on.
    trap stopped INT TERM
    make_env "$kind"
    trap - INT TERM
    printf '%s' "$now" >"$STAMP"
    if command -v flock >/dev/null 2>&1; then exec 9>&-; fi
    say "Environment ready in $((SECONDS - started)) s."
}

ensure_env
export PATH="$VENV/bin:$PATH"
# The environment's own settings win over an activated one.
export VIRTUAL_ENV="$VENV"
unset PYTHONHOME
