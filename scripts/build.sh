# Building, and where the results are.

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
    stamped kvm-tiny "$made" "$GUEST/kvm-tiny.bin" && return
    mkdir -p "$GUEST"
    run 'please report this, with the output of `as --version`' "$source/build.sh" "$GUEST/kvm-tiny.bin"
    stamp kvm-tiny "$made"
}

image() {
    local programs made
    mapfile -t programs < <(find "$GUEST_PROGRAMS" -maxdepth 1 -type f -executable | LC_ALL=C sort)
    made=$(key "$ROOT"/guest/image/* "${programs[@]}" "$(<"$BUILD/stamps/debian")")
    stamped image "$made" "$GUEST/initrd.gz" && return
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
    [[ ! -e $NEW_KERNEL ]] || printf 'export STERNA_NEW_KERNEL=%q\n' "$NEW_KERNEL"
}

# Which accelerator the guests of this command have: as STERNA_ACCEL says, else (`auto`) as trying it says, which is done
# once for each boot of the host and kept in build/.
accelerator() {
    step 'which accelerator guests have here'
    STERNA_ACCEL=$("$TARGET/release/sterna-bench" accelerator) ||
        fail 'it could not be told which accelerator to use' 'STERNA_ACCEL=tcg works everywhere'
    export STERNA_ACCEL
}

bench() {
    eval "$(environment)"
    case ${1:-} in demo | run | campaign) [[ " $*" == *' --accel'* ]] || accelerator ;; esac
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
    step 'checking the links of the documentation'
    loud 'rustdoc names the place' env RUSTDOCFLAGS='-D warnings' \
        cargo doc --quiet --release --workspace --exclude sterna-agent --no-deps --document-private-items
    loud 'rustdoc names the place' env RUSTDOCFLAGS='-D warnings' \
        cargo doc --quiet --profile agent --package sterna-agent --no-deps --document-private-items
    if cargo deny --version >/dev/null 2>&1; then
        step 'checking licences, bans and sources of dependencies'
        # Advisories are fetched, which needs a network: `cargo deny check advisories` looks at them.
        loud 'deny.toml says what is allowed and why' cargo deny --offline check licenses bans sources
    else
        note 'cargo-deny is absent: dependencies are not checked (`cargo install cargo-deny`)'
    fi
}
