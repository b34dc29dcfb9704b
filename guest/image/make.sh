#!/usr/bin/env bash
# Makes the guest's kernel and initramfs out of unpacked Debian packages and our programs.
# The same input gives the same bytes: names sorted, times and owners fixed.
# usage: make.sh DEBIAN-ROOT OUTPUT-DIR PROGRAM…
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
debian=$1
output=$2
shift 2
root=$output/root
kernel=$(basename "$debian"/lib/modules/*)

list() { sed 's/#.*//' "$1" | xargs -n1; }

# A library goes in once, with all that it needs in turn. It must come from the packages, not from this machine.
add_libraries() {
    local name path
    for name in $(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
        [[ ! -e $root/lib/$name ]] || continue
        path=$(find "$debian"/lib "$debian"/usr/lib -name "$name" -print -quit)
        [[ -n $path ]] || { echo "no package in guest/image/packages has $name, which $1 needs" >&2; exit 1; }
        install -m 644 "$(readlink -f "$path")" "$root/lib/$name"
        add_libraries "$path"
    done
}

add_program() {
    install -m 755 "$(readlink -f "$1")" "$root/bin/$(basename "$1")"
    add_libraries "$1"
}

# Writes /lib/modules/load: the modules in the order in which they must be loaded, by file name.
add_modules() {
    local wanted line module
    # depmod's own index is made here: the package leaves that to its installation.
    "$root/bin/busybox" depmod -b "$debian" "$kernel"
    mkdir -p "$root/lib/modules"
    for wanted in $(list "$here/modules"); do
        line=$(grep -E "/${wanted//[-_]/[-_]}\.ko(\.[a-z]+)?:" "$debian/lib/modules/$kernel/modules.dep" || true)
        if [[ -z $line ]]; then
            grep -qE "/${wanted//[-_]/[-_]}\.ko" "$debian/lib/modules/$kernel/modules.builtin" && continue
            echo "kernel $kernel has no module $wanted" >&2
            exit 1
        fi
        # A line names a module, then what it needs, nearest first: backwards is the order of loading.
        for module in $(tr -d : <<<"$line" | xargs -n1 | tac); do
            unpack_module "$debian/lib/modules/$kernel/$module"
        done
    done
}

unpack_module() {
    local name
    name=$(basename "${1%.ko*}").ko
    [[ ! -e $root/lib/modules/$name ]] || return 0
    case $1 in
    *.xz) xz -dc "$1" ;;
    *.zst) zstd -dcq "$1" ;;
    *) cat "$1" ;;
    esac >"$root/lib/modules/$name"
    echo "$name" >>"$root/lib/modules/load"
}

# A compiler that is small, and sources for it: stb's libraries, of one header each, and of the C library's headers just those they include.
add_compiler() {
    local tcc=$debian/usr/lib/x86_64-linux-gnu/tcc file
    add_program "$debian/usr/bin/tcc"
    mkdir -p "$root"/{src,usr/lib/x86_64-linux-gnu}
    cp -r "$tcc" "$root/usr/lib/x86_64-linux-gnu/tcc"
    while read -r file part; do
        printf '#define %s\n' "$part" STBI_NO_SIMD STBI_NO_THREAD_LOCALS >"$root/src/$file.c"
        printf '#include <%s>\n' stdint.h assert.h "stb/$file.h" >>"$root/src/$file.c"
        "$debian/usr/bin/tcc" -w -B"$tcc" -nostdinc -I"$tcc/include" -I"$debian/usr/include/x86_64-linux-gnu" \
            -I"$debian/usr/include" -MD -MF "$root/dependencies" -c "$root/src/$file.c" -o "$root/object"
        while read -r file; do
            install -D -m 644 "$file" "$root/${file#"$debian"/}"
        done < <(tr ' \\' '\n\n' <"$root/dependencies" | grep "^$debian/usr/include/" | sort -u)
        rm "$root/dependencies" "$root/object"
    done < <(list_sources)
}

# Each library's header, and the word that makes it more than declarations.
list_sources() {
    printf '%s\n' 'stb STB_DEFINE' 'stb_c_lexer STB_C_LEXER_IMPLEMENTATION' 'stb_ds STB_DS_IMPLEMENTATION' \
        'stb_dxt STB_DXT_IMPLEMENTATION' 'stb_hexwave STB_HEXWAVE_IMPLEMENTATION' 'stb_image STB_IMAGE_IMPLEMENTATION' \
        'stb_image_resize STB_IMAGE_RESIZE_IMPLEMENTATION' 'stb_image_write STB_IMAGE_WRITE_IMPLEMENTATION' \
        'stb_perlin STB_PERLIN_IMPLEMENTATION' 'stb_rect_pack STB_RECT_PACK_IMPLEMENTATION' \
        'stb_sprintf STB_SPRINTF_IMPLEMENTATION' 'stb_truetype STB_TRUETYPE_IMPLEMENTATION' 'stb_vorbis STB_VORBIS_IMPLEMENTATION'
}

rm -rf "$root"
mkdir -p "$root"/{bin,dev,etc,lib,proc,run,sys,tmp}
ln -s lib "$root/lib64"
install -m 755 "$here/init" "$root/init"
install -m 755 "$debian/bin/busybox" "$root/bin/busybox"
for applet in $("$root/bin/busybox" --list); do
    [[ -e $root/bin/$applet ]] || ln -s busybox "$root/bin/$applet"
done
install -m 755 "$(readlink -f "$debian/lib64/ld-linux-x86-64.so.2")" "$root/lib/ld-linux-x86-64.so.2"
add_program "$debian/usr/bin/memcached"
add_program "$debian/usr/bin/redis-server"
add_program "$debian/usr/bin/iperf3"
add_program "$debian/usr/sbin/nginx"
mkdir -p "$root"/{srv,var/lib/nginx,var/log/nginx}
install -m 644 "$here/nginx.conf" "$root/etc/nginx.conf"
add_compiler
for program in "$@"; do
    install -m 755 "$program" "$root/bin/"
done
echo 'root:x:0:0:root:/:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
mkdir -p "$root/etc/acpi/PWRF"
# The network first, as every distribution does: a virtio network card that still sends while Linux takes its devices
# down may loop for ever (Linux 0d0eff39ceb3 mends it; Debian's 6.1.192 has what made it, and not that).
printf '#!/bin/sh\nip link set eth0 down 2>/dev/null\npoweroff -f\n' >"$root/etc/acpi/PWRF/00000080"
chmod 755 "$root/etc/acpi/PWRF/00000080"
add_modules

find "$root" -exec touch -h -d @0 {} +
(cd "$root" && find . | LC_ALL=C sort | cpio --quiet --reproducible --owner=0:0 -o -H newc) | gzip -n -9 >"$output/initrd.gz.new"
install -m 644 "$debian/boot/vmlinuz-$kernel" "$output/vmlinuz"
mv "$output/initrd.gz.new" "$output/initrd.gz"
rm -rf "$root"
