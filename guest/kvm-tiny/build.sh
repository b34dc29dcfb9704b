#!/usr/bin/env bash
# Assembles the tiny guest into a 64 KiB firmware image.
# usage: build.sh OUTPUT
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
object=$(mktemp)
trap 'rm -f "$object"' EXIT
as --32 -o "$object" "$here/kvm-tiny.s"
# Linked at 0: the code adds its own base, and nothing is left to relocate.
ld -m elf_i386 -Ttext=0 --entry=0 --oformat binary -o "$1" "$object"
