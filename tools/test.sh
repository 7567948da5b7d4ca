#!/usr/bin/env bash
# All that must pass before a change lands: formatting, lint, what tracked files may not contain, tests.
#
#     bash tools/test.sh                    all but the tests marked slow
#     bash tools/test.sh --all              those too
#     bash tools/test.sh tests/rewards -x   other arguments go to pytest
#
# Every step runs, whichever fails; the failed ones are named at the end.
set -uo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY" || exit 1
ensure_environment test || exit 1

export JAX_PLATFORMS=cpu
export HF_HUB_OFFLINE=1 # a test that reaches for the network is a broken test
# Two pytest workers share the cores: one thread each for the libraries that would start one per core.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 RAYON_NUM_THREADS=1

markers=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then markers=(); else arguments+=("$argument"); fi
done

# Where packages come from, and where this checkout or a home directory lies, is each machine's own business.
# (The bracketed letters keep this file from matching itself.)
no_machine_names() {
    local hosts='pyp[i]\.org|pythonhoste[d]\.org|npmj[s]\.org|pytorc[h]\.org/whl|(extra-)?index-ur[l]|find-link[s]'
    local paths='(^|[^[:alnum:]_.{}~$/-])/(root|work|home/[a-z][a-z0-9_-]*|Users/[A-Za-z]+)/'
    git grep -nIE -e "$hosts" -e "$paths"
    [ $? -eq 1 ] # 0: found some; above 1: git could not look
}

failed=()
step() {
    local name="$1"
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}
step "ruff format" python -m ruff format --check .
step "ruff check" python -m ruff check .
step "machine names" no_machine_names
step "pytest" python -m pytest -n 2 ${markers[@]+"${markers[@]}"} ${arguments[@]+"${arguments[@]}"}

if [ ${#failed[@]} -gt 0 ]; then
    printf 'tools/test.sh: FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "tools/test.sh: all steps passed"
