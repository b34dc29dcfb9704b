#!/usr/bin/env bash
# Runs a command on a slower machine: with a share of its processors, and beside busy loops.
# usage: scripts/slowly.sh [--share PERCENT] [--busy] COMMAND…
#   --share PERCENT   of all processors together, for the command and whatever it starts (default 20)
#   --busy            beside a loop on each processor that never rests, which is not limited; the share is then all unless it is given, too
set -euo pipefail

share='' busy=''
while [[ ${1:-} == --* ]]; do
    case $1 in
    --share) share=${2:?a share, in percent} && shift 2 ;;
    --busy) busy=yes && shift ;;
    *) break ;;
    esac
done
(($# > 0)) || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ -n $share$busy ]] || share=20

loops=() group=''
finish() {
    ((${#loops[@]} == 0)) || kill "${loops[@]}" 2>/dev/null || true
    [[ -n $group ]] || return 0
    # What the command left behind goes where this shell is from.
    local back pid
    back=$(dirname "$group")
    while read -r pid; do
        echo "$pid" >"$back/cgroup.procs" 2>/dev/null || true
    done <"$group/cgroup.procs"
    rmdir "$group"
}
trap finish EXIT

if [[ -n $share ]]; then
    processors=$(nproc)
    period=100000
    quota=$((period * processors * share / 100))
    if [[ -f /sys/fs/cgroup/cgroup.controllers ]]; then
        grep -qw cpu /sys/fs/cgroup/cgroup.controllers || { echo 'error: there is no cpu controller' >&2; exit 1; }
        echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
        group=/sys/fs/cgroup/slowly-$$
        mkdir "$group"
        echo "$quota $period" >"$group/cpu.max"
        # It gets its share also beside others that want all.
        echo 10000 >"$group/cpu.weight"
    else
        [[ -f /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]] || { echo 'error: no cpu controller is mounted at /sys/fs/cgroup/cpu' >&2; exit 1; }
        group=/sys/fs/cgroup/cpu/slowly-$$
        mkdir "$group"
        echo "$period" >"$group/cpu.cfs_period_us"
        echo "$quota" >"$group/cpu.cfs_quota_us"
        echo 65536 >"$group/cpu.shares"
        # Where the kernel keeps account of real-time threads, a group has no time for any unless it is given some.
        if [[ -f $group/cpu.rt_runtime_us ]]; then
            echo $(($(<"$group/cpu.rt_period_us") * share / 100)) >"$group/cpu.rt_runtime_us"
        fi
    fi
fi
if [[ -n $busy ]]; then
    for ((loop = 0; loop < $(nproc); loop++)); do
        (while :; do :; done) &
        loops+=($!)
    done
fi

status=0
if [[ -n $group ]]; then
    # A shell of its own enters the group, and becomes the command.
    bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" "$@" || status=$?
else
    "$@" || status=$?
fi
exit "$status"
