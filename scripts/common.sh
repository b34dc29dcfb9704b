# Paths, messages and stamps, for every other piece of `./x`.

BUILD=$ROOT/build
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
# Runs of `./x test` beside each other have a folder each.
LOG=${STERNA_TEST_OUTPUT:-$BUILD/log}

# One line a step, on standard error: `./x env` and the programs that `./x` starts own standard output.
step() { printf '==> %s\n' "$*" >&2; }

note() { printf '    %s\n' "$*" >&2; }

# fail WHAT HINT: the end, with what to do about it.
fail() {
    printf 'error: %s\n' "$1" >&2
    [[ -z ${2:-} ]] || printf 'hint:  %s\n' "$2" >&2
    exit 1
}

# run HINT COMMAND…: runs it quietly; where it fails, shows the end of what it said, the command itself and the hint.
run() {
    local hint=$1 log status=0
    shift
    mkdir -p "$LOG"
    log=$LOG/${1##*/}.log
    "$@" >"$log" 2>&1 </dev/null || status=$?
    ((status == 0)) && return
    tail -n 30 "$log" >&2
    fail "\`$*\` failed with status $status (all of its output: $log)" "$hint"
}

# loud HINT COMMAND…: the same for commands whose output is worth seeing as it comes.
loud() {
    local hint=$1 status=0
    shift
    "$@" </dev/null || status=$?
    ((status == 0)) || fail "\`$*\` failed with status $status" "$hint"
}

# key FILE-OR-WORD…: one hash over the contents of the files and the words themselves.
key() {
    local item
    for item in "$@"; do
        if [[ -f $item ]]; then sha256sum <"$item"; else printf '%s\n' "$item"; fi
    done | sha256sum | cut -c1-32
}

# stamped NAME KEY RESULT: was NAME made from exactly this before, and is its result still there?
stamped() { [[ -e $3 && -f $BUILD/stamps/$1 && $(<"$BUILD/stamps/$1") == "$2" ]]; }

stamp() {
    mkdir -p "$BUILD/stamps"
    printf '%s\n' "$2" >"$BUILD/stamps/$1"
}
