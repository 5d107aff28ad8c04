# Sourced by scripts/test and scripts/demo; `setup [extra]` makes .venv ready, and does nothing when it already is.
# `setup_aot` adds what compiles for GPUs without one, in .venv/aot, where only such compiles look for it.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=.venv

die() {
    printf '%s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "jaxspec needs Python 3.11 or newer with its venv and ensurepip modules." \
        "Tried: ${PYTHON:-python3.11 python3.12 python3.13 python3 python}." \
        "Name one with PYTHON=/path/to/python (on Debian and Ubuntu also install python3-venv)."
}

setup() {
    local extra=${1:-} extras key stamp python started=$SECONDS
    key=$(cat pyproject.toml constraints.txt <(pwd) | cksum)
    # The test environment holds everything that the plain one does.
    for stamp in "$venv/stamp-$extra" "$venv/stamp-test"; do
        [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && return
    done
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        python=$(find_python) || exit 1
        "$python" -m venv --clear "$venv" || die "$python could not create $venv (see above)."
    fi
    rm -f "$venv"/stamp-*
    extras=$extra
    # What computes on a CPU is compiled at its first use; 90 MB where this machine cannot.
    [ -n "${CC:-}" ] || command -v cc gcc clang >/dev/null || extras=${extra:+$extra,}compiler
    printf 'Installing jaxspec%s into %s (a few minutes on a slow line) ... ' "${extras:+[$extras]}" "$venv" >&2
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        -c constraints.txt -e ".${extras:+[$extras]}" >"$venv/setup.log" 2>&1 || {
        echo failed >&2
        tail -n 12 "$venv/setup.log" >&2
        die "" "pip could not install what jaxspec needs; the whole log is $venv/setup.log." \
            "Check that this machine reaches a package index, then run the same command again."
    }
    printf '%s\n' "$key" >"$venv/stamp-$extra"
    echo "done in $((SECONDS - started)) s" >&2
}

setup_aot() {
    local wanted started=$SECONDS
    wanted=$("$venv/bin/python" -c 'from jaxspec.aot.process import packages; print("\n".join(packages()))') || exit 1
    [ "$(cat "$venv/aot/installed" 2>/dev/null)" = "$wanted" ] && return
    rm -rf "$venv/aot"
    printf 'Installing what compiles for GPUs into %s (220 MB) ... ' "$venv/aot" >&2
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps \
        --target "$venv/aot" $wanted >"$venv/setup-aot.log" 2>&1 || {
        echo "failed; the tests that need it are left out, $venv/setup-aot.log says why" >&2
        rm -rf "$venv/aot"
        return
    }
    printf '%s\n' "$wanted" >"$venv/aot/installed"
    echo "done in $((SECONDS - started)) s" >&2
}
