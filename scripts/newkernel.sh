# The newest Linux of the archive's backports, for guests of the next generation: beside the kernel of the guest image.

NEW_KERNEL=$BUILD/new-kernel/vmlinuz

unpack_new_kernel() {
    local made apt=$BUILD/new-kernel.apt into=$BUILD/new-kernel package
    made=$(key "$ROOT/scripts/newkernel.sh" "$ROOT/scripts/backports.sh")
    stamped new-kernel "$made" "$into" && return
    rm -rf "$into"
    mkdir -p "$into"
    step 'fetching a newer guest kernel from backports'
    # The package that stands for the current kernel's brings that; what both would want of a system that boots is left out.
    backports_fetch "$apt" linux-image-cloud-amd64 || true
    package=$(compgen -G "$apt/archives/linux-image-[0-9]*-cloud-amd64_*.deb" | head -n1 || true)
    if [[ -z $package ]]; then
        note "the archive does not offer a newer kernel (${apt#"$ROOT/"}/log says why): what needs it is skipped; \`./x clean\` to try again"
        stamp new-kernel "$made"
        return
    fi
    run "is the disk full? \`./x clean\`, then run this again" dpkg-deb -x "$package" "$into/root"
    # One image with the programs of the other suffices: nothing that is tested with it needs modules.
    install -m 644 "$into"/root/boot/vmlinuz-* "$NEW_KERNEL"
    rm -rf "$into/root" "$apt"
    stamp new-kernel "$made"
}
