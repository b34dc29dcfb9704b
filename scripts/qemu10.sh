# QEMU 10.0 from the archive's backports, in a folder of its own beside the installed 7.2.

QEMU_10=$BUILD/qemu-10.0/qemu-system-x86_64

unpack_qemu_10() {
    local made apt=$BUILD/qemu-10.0.apt into=$BUILD/qemu-10.0
    made=$(key "$ROOT/scripts/qemu10.sh" "$ROOT/scripts/backports.sh")
    stamped qemu-10.0 "$made" "$into" && return
    rm -rf "$into"
    mkdir -p "$into"
    step 'fetching QEMU 10.0 from backports'
    # Only what the installed system lacks is fetched: QEMU itself, its firmware, and libraries that 7.2 did not bring.
    if ! backports_fetch "$apt" qemu-system-x86 || ! compgen -G "$apt/archives/qemu-system-x86_1%3a10.0*.deb" >/dev/null; then
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

# QEMU looks for firmware and modules under /usr: point it at its own. The shell replaces itself, so the process keeps its number.
qemu_10_wrapper() {
    cat <<'WRAPPER'
#!/bin/sh
# Made by ./x: QEMU 10.0 out of its own folder. A complaint about a module under /usr is harmless: QEMU looks there
# too, and refuses what belongs to another version.
# Without another program, which would take as long as a third of QEMU's own start.
self=$0
[ ! -h "$self" ] || self=$(readlink -f "$self")
here=$(cd "${self%/*}" && pwd)
export QEMU_MODULE_DIR="$here/usr/lib/x86_64-linux-gnu/qemu"
export LD_LIBRARY_PATH="$here/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/usr/bin/qemu-system-x86_64" -L "$here/usr/share/qemu" -L "$here/usr/share/seabios" -L /usr/lib/ipxe/qemu "$@"
WRAPPER
}
