# QEMU 10.0 from the archive's backports, in a folder of its own beside the installed 7.2.
# Its apt has its own sources, lists and cache: the system's apt never hears of backports.

QEMU_10=$BUILD/qemu-10.0/qemu-system-x86_64

unpack_qemu_10() {
    local made apt=$BUILD/qemu-10.0.apt into=$BUILD/qemu-10.0
    made=$(key "$ROOT/scripts/qemu10.sh")
    stamped qemu-10.0 "$made" "$into" && return
    rm -rf "$apt" "$into"
    mkdir -p "$apt"/{lists,archives}/partial "$into"
    qemu_10_sources >"$apt/sources.list"
    local options=(
        -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$apt/lists"
        -o "Dir::Cache=$apt" -o APT::Sandbox::User=root -o Acquire::Languages=none -o APT::Update::Post-Invoke-Success=
    )
    step 'fetching QEMU 10.0 from backports'
    # Only what the installed system lacks is fetched: QEMU itself, its firmware, and libraries that 7.2 did not bring.
    if ! apt-get "${options[@]}" update >"$apt/log" 2>&1 ||
        ! apt-get "${options[@]}" -t "$(qemu_10_suite)" install -y --no-install-recommends --download-only qemu-system-x86 >>"$apt/log" 2>&1 ||
        ! compgen -G "$apt/archives/qemu-system-x86_1%3a10.0*.deb" >/dev/null; then
        note "the archive does not offer QEMU 10.0 (${apt#"$ROOT/"}/log says why): what needs it is skipped; \`./x clean\` to try again"
        stamp qemu-10.0 "$made"
        return
    fi
    local package
    for package in "$apt"/archives/*.deb; do
        run "is the disk full? \`./x clean\`, then run this again" dpkg-deb -x "$package" "$into"
    done
    qemu_10_wrapper >"$QEMU_10"
    chmod 755 "$QEMU_10"
    run 'please report this, with the output of `apt-get --version`' "$QEMU_10" --version
    rm -rf "$apt"
    stamp qemu-10.0 "$made"
}

qemu_10_suite() { printf '%s-backports' "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"; }

# The Debian sources that this machine uses already, and backports from the same mirror.
qemu_10_sources() {
    local uri suite component signed_by format='$(REPO_URI) $(RELEASE) $(COMPONENT) $(SIGNED_BY)'
    [[ -n $(apt-get indextargets --format "$format" 'Identifier: Packages' 'Origin: Debian') ]] || package_lists
    while read -r uri suite component signed_by; do
        # apt prints the placeholder itself where a source names no key; Debian's own key ring is the one meant.
        [[ $signed_by == /* ]] || signed_by=/usr/share/keyrings/debian-archive-keyring.gpg
        printf 'deb [signed-by=%s] %s %s %s\n' "$signed_by" "$uri" "$suite" "$component"
        [[ $suite-backports != "$(qemu_10_suite)" ]] ||
            printf 'deb [signed-by=%s] %s %s %s\n' "$signed_by" "$uri" "$suite-backports" "$component"
    done < <(apt-get indextargets --format "$format" 'Identifier: Packages' 'Origin: Debian') | sort -u
}

# QEMU looks for firmware and modules under /usr: point it at its own. The shell replaces itself, so the process keeps its number.
qemu_10_wrapper() {
    cat <<'WRAPPER'
#!/bin/sh
# Made by ./x: QEMU 10.0 out of its own folder. A complaint about a module under /usr is harmless: QEMU looks there
# too, and refuses what belongs to another version.
here=$(dirname "$(readlink -f "$0")")
export QEMU_MODULE_DIR="$here/usr/lib/x86_64-linux-gnu/qemu"
export LD_LIBRARY_PATH="$here/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/usr/bin/qemu-system-x86_64" -L "$here/usr/share/qemu" -L "$here/usr/share/seabios" -L /usr/lib/ipxe/qemu "$@"
WRAPPER
}
