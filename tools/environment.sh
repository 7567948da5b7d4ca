# Sourced by the entry scripts: gives the checkout its own virtual environment, .venv, and puts it first on PATH.
#
#     source tools/environment.sh
#     ensure_environment          # the package alone
#     ensure_environment test     # with an extra of pyproject.toml; satisfies the line above too
#
# PYTHON names the interpreter to build with (3.11 or newer; default: the first that is found). The environment is
# built anew when the interpreter, the checkout's place, the package's requirements or their lock change.

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

# Prints the path of the interpreter to build with: the one under a virtual environment, should one be active,
# because that may be the very environment that is about to be replaced.
find_python() {
    local candidates=(python3 python3.13 python3.12 python3.11) candidate found
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # ensurepip: a system Python without it cannot make virtual environments.
        if found="$("$candidate" -c 'import ensurepip, sys, venv
assert sys.version_info >= (3, 11)
print(sys._base_executable)' 2>/dev/null)"; then
            printf '%s\n' "$found"
            return
        fi
    done
    echo "no Python >= 3.11 with the venv module found (tried: ${candidates[*]}); set PYTHON to the path of one" >&2
    return 1
}

# What the environment is a function of, as one line.
environment_key() { # PYTHON
    "$1" - "$REPOSITORY" <<'PYTHON'
import hashlib, pathlib, sys, tomllib

root = pathlib.Path(sys.argv[1])
project = tomllib.loads((root / "pyproject.toml").read_text())
installed = [project["build-system"], project["project"], project["tool"]["setuptools"]]  # not the linter's settings
lock = (root / "requirements.lock").read_text()
print(hashlib.sha256(repr([sys.version, str(root), installed, lock]).encode()).hexdigest())
PYTHON
}

# Passes on what pip is doing, a line a package; on a terminal each line replaces the one before.
show_progress() {
    local line before='' after=$'\n'
    if [ -t 1 ]; then before=$'\r\e[K' after=''; fi
    while read -r line; do
        case "$line" in
            "Installing collected packages:"*) set -- $line && line="Installing $(($# - 3)) packages" ;;
            Collecting* | Building* | Installing*) line="${line%% (from *}" ;;
            *) continue ;;
        esac
        printf '%s  %.76s%s' "$before" "$line" "$after"
    done
    printf '%s' "$before"
}

# Runs with the lock held. The stamp is removed first and written last, so a build that was killed leaves an
# environment without one, and that is cleared and built again.
build_environment() { # PYTHON EXTRAS VENV
    local python="$1" extras="$2" venv="$3" key stamped_key stamped_extras
    key="$(environment_key "$python")" || return 1
    if [ -f "$venv/complete" ] && [ -x "$venv/bin/python" ]; then
        { read -r stamped_key && read -r stamped_extras; } <"$venv/complete"
    fi
    if [ "${stamped_key:-}" = "$key" ]; then
        case ",$stamped_extras," in *",$extras,"*) return 0 ;; esac
        [ -n "$extras" ] || return 0
        extras="${stamped_extras:+$stamped_extras,}$extras"
    fi

    echo "Setting up $venv with $("$python" -V)${extras:+ and the extras $extras}: a few minutes, once"
    rm -f "$venv/complete"
    if [ "${stamped_key:-}" != "$key" ]; then
        find "$venv/" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf {} + && "$python" -m venv "$venv" || return 1
    fi
    if ! (set -o pipefail && cd "$REPOSITORY" && "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-input -c requirements.lock -e ".${extras:+[$extras]}" 2>&1 | tee "$venv/install.log" | show_progress); then
        tail -n 20 "$venv/install.log" >&2
        echo "pip could not install the environment; all of its output is in $venv/install.log" >&2
        return 1
    fi
    printf '%s\n%s\n' "$key" "$extras" >"$venv/complete.tmp" && mv "$venv/complete.tmp" "$venv/complete"
}

ensure_environment() { # [EXTRA]
    local venv="$REPOSITORY/.venv" python
    python="$(find_python)" || return 1
    mkdir -p "$venv" || return 1
    # Python's flock, because not every system has the command. The lock belongs to descriptor 9, which the
    # subshell and its children hold: it outlives this script if pip does, and ends with the last of them.
    (
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
            echo "Waiting for another process to set up $venv"
            "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
        } && build_environment "$python" "${1:-}" "$venv"
    ) 9>"$venv/lock" || return 1
    unset PYTHONHOME
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
}
