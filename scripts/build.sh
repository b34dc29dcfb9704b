# Building, testing, and where the results are.

GUEST=$BUILD/guest
GUEST_TARGET=x86_64-unknown-linux-gnu
GUEST_PROGRAMS=$TARGET/guest/$GUEST_TARGET/release

ready() {
    setup
    build
    image
}

build() {
    step 'building the programs'
    loud 'the compiler names the place' cargo build --quiet --release
    loud 'the compiler names the place' cargo build --quiet --package sterna-agent --profile agent
    build_guest
}

# The guest's own programs are static: the guest needs nothing of the machine that built them. A folder of their own keeps
# their different flags from throwing out the other builds.
build_guest() {
    step "building the guest's programs"
    RUSTFLAGS='-C target-feature=+crt-static' CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_PANIC=abort \
        loud 'the compiler names the place' \
        cargo build --quiet --release --package sterna-guest-programs --target "$GUEST_TARGET" --target-dir "$TARGET/guest"
    kvm_tiny
}

kvm_tiny() {
    local source=$ROOT/guest/kvm-tiny made
    made=$(key "$source"/*)
    stamped kvm-tiny "$made" && return
    mkdir -p "$GUEST"
    run 'please report this, with the output of `as --version`' "$source/build.sh" "$GUEST/kvm-tiny.bin"
    stamp kvm-tiny "$made"
}

image() {
    local programs made
    mapfile -t programs < <(find "$GUEST_PROGRAMS" -maxdepth 1 -type f -executable | LC_ALL=C sort)
    made=$(key "$ROOT"/guest/image/* "${programs[@]}" "$(<"$BUILD/stamps/debian")")
    stamped image "$made" && return
    step 'making the guest image'
    run 'the message above names the file; `./x clean` and again fetches the packages anew' \
        "$ROOT/guest/image/make.sh" "$BUILD/debian/root" "$GUEST" "${programs[@]}"
    stamp image "$made"
}

# What whole-system tests and experiments need to find.
environment() {
    printf 'export %s=%q\n' \
        STERNA_BIN_DIR "$TARGET/release" \
        STERNA_AGENT_SO "$TARGET/agent/libsterna_agent.so" \
        STERNA_QEMU_7 "$(command -v qemu-system-x86_64)" \
        STERNA_KERNEL "$GUEST/vmlinuz" \
        STERNA_INITRD "$GUEST/initrd.gz" \
        STERNA_KVM_TINY "$GUEST/kvm-tiny.bin"
    # Unset where the archive does not offer it: what needs it skips.
    [[ ! -x $QEMU_10 ]] || printf 'export STERNA_QEMU_10=%q\n' "$QEMU_10"
}

bench() {
    eval "$(environment)"
    "$TARGET/release/sterna-bench" "$@"
}

lint() {
    if cargo fmt --version >/dev/null 2>&1; then
        step 'checking the format'
        loud '`./x fmt` puts it right' cargo fmt --all --check
    else
        note 'rustfmt is absent: the format is not checked (`rustup component add rustfmt`)'
    fi
    if cargo clippy --version >/dev/null 2>&1; then
        step 'checking lints'
        loud 'clippy names the place' cargo clippy --quiet --release --workspace --exclude sterna-agent --all-targets -- -D warnings
        loud 'clippy names the place' cargo clippy --quiet --profile agent --package sterna-agent -- -D warnings
    else
        note 'clippy is absent: lints are not checked (`rustup component add clippy`)'
    fi
}

# Every test of the workspace, then one closing line. A test that cannot run here writes `skipped: REASON` straight to
# standard error and returns; it counts as skipped, not as passed.
run_tests() {
    local log=$BUILD/log/test.log status=0
    lint
    eval "$(environment)"
    step 'running the tests'
    mkdir -p "$LOG"
    # The agent is a library for QEMU's process without a standard library: its tests load it from outside.
    cargo test --release --no-fail-fast --workspace --exclude sterna-agent "$@" 2>&1 | tee "$log" || status=$?
    awk -v status="$status" '
        /^test result:/ { for (i = 2; i < NF; i++) { if ($(i+1) ~ /^passed/) passed += $i; if ($(i+1) ~ /^failed/) failed += $i; if ($(i+1) ~ /^ignored/) skipped += $i } }
        { unable += gsub(/skipped: /, "") }
        END {
            if (status != 0 && failed == 0) { print "the tests did not run to their end" > "/dev/stderr"; failed = 1 }
            printf "%d passed, %d failed, %d skipped\n", passed - unable, failed, skipped + unable
        }' "$log"
    return "$status"
}
