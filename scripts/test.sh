# Testing.

# How many programs of tests run side by side. Most of them wait half of the time: for guests, or for a peer that says
# nothing.
LANES=$(($(nproc) > 1 ? 3 : 1))

# How long one of them may take: one that waits for ever is to be named, and the others are to run. Long ones may.
LIMIT=20m
[[ ${STERNA_LONG-} != 1 ]] || LIMIT=0

# Every test of the workspace, then what was skipped and one closing line. With arguments: those that `cargo test` takes.
run_tests() {
    local log=$LOG/test.log status=0 tests=every_test
    (($# == 0)) || tests=chosen_tests
    lint
    eval "$(environment)"
    accelerator
    step "running the tests (all of their output: ${log#"$ROOT/"})"
    mkdir -p "$LOG"
    $tests "$@" 2>&1 | tee "$log" | { grep --line-buffered -E '^test |^ +(Running|Doc-tests) ' || true; } || status=$?
    if grep -q '^failures:$' "$log"; then
        sed -n '/^failures:$/,/^test result: /p' "$log"
    elif ((status != 0)); then
        tail -n 40 "$log"
    fi
    awk -v status="$status" -f "$ROOT/scripts/test-summary.awk" "$log"
    return "$status"
}

# The agent has no standard library to be tested with: the engine's tests load it into a QEMU.
cargo_test() {
    cargo test --release --no-fail-fast --workspace --exclude sterna-agent "$@"
}

chosen_tests() {
    cargo_test "$@" -- --show-output
}

# All but the whole-system tests in lanes, then those, then the documentation's examples.
every_test() {
    local status=0 programs
    programs=$(test_programs) || return
    export LOG LIMIT
    rm -rf "$LOG/tests"
    mkdir -p "$LOG/tests"
    export -f test_program in_lane
    grep -v $'/crates/system-tests\t' <<<"$programs" | in_lanes || status=101
    grep $'/crates/system-tests\t' <<<"$programs" | in_lanes || status=101
    cargo_test --doc || status=101
    return "$status"
}

in_lanes() {
    most_tests_first | tr '\n' '\0' | xargs -0 -n 1 -P "$LANES" bash -c 'in_lane "$1"' lane
}

# Builds the programs of tests: a line for each, with its crate's directory, its source, and where it is.
test_programs() {
    local crate='"manifest_path":"\([^"]*\)/Cargo.toml"' source='"src_path":"\([^"]*\)"'
    local test='"profile":{[^}]*"test":true}' program='"executable":"\([^"]*\)"'
    cargo_test --no-run --message-format json-render-diagnostics |
        sed -n "s|.*$crate.*$source.*$test.*$program.*|\1\t\2\t\3|p" | LC_ALL=C sort
}

# So that no lane is left alone with the longest one at the end.
most_tests_first() {
    local line
    while read -r line; do
        printf '%d\t%s\n' "$("${line##*$'\t'}" --list | grep -c ': test$')" "$line"
    done | sort -srn | cut -f 2-
}

# Runs one of these lines as cargo does, in the directory of its crate.
test_program() {
    local directory source program
    IFS=$'\t' read -r directory source program <<<"$1"
    printf '     Running %s (%s)\n' "${source#"$directory/"}" "$program"
    (cd "$directory" && timeout --foreground --verbose --kill-after=10 "$LIMIT" "$program" --show-output)
}

# The same beside others: what it says comes as a whole when it has ended.
in_lane() {
    local said=$LOG/tests/${1##*/}.log status=0
    test_program "$1" >"$said" 2>&1 || status=$?
    flock "$LOG" cat "$said"
    return "$status"
}
