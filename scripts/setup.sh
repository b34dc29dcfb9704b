# What the machine needs: Debian packages, a Rust tool chain. The only place that installs anything.

# Programs used to build, to run hosts and guests, and to load a guest from outside. None of them starts a service.
PACKAGES=(
    binutils busybox-static cpio gcc gzip libc6-dev pkg-config # building, the guest image
    qemu-system-x86                                            # QEMU 7.2
    iproute2 procps util-linux                                 # hosts as network namespaces
    libmemcached-tools redis-tools                             # load for memcached and Redis
    iperf3 wrk                                                 # load for links and web servers
    postgresql                                                 # a database for guests to work with
    librsvg2-bin                                               # plots as PNG
)

setup() {
    rust
    packages
    unpack_guest_packages
    unpack_qemu_10
    unpack_new_kernel
}

rust() {
    command -v cargo >/dev/null || PATH=$HOME/.cargo/bin:$PATH
    local install='install Rust with rustup: https://rustup.rs (curl --proto =https -sSf https://sh.rustup.rs | sh), then run this again'
    command -v cargo >/dev/null || fail 'there is no Rust on this machine (`cargo` not found)' "$install"
    local want have
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml")
    have=$(rustc --version | cut -d' ' -f2)
    [[ $(printf '%s\n' "$want" "$have" | sort -V | head -n1) == "$want" ]] ||
        fail "Rust $have is too old, $want or later is needed" '`rustup update stable`, then run this again'
}

packages() {
    command -v dpkg-query >/dev/null || fail 'this is no Debian machine (`dpkg-query` not found)' 'use Debian 12, in a container or a VM if need be'
    local package missing=()
    for package in "${PACKAGES[@]}"; do
        [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    if ((${#missing[@]})); then
        ((EUID == 0)) || fail "packages are missing: ${missing[*]}" "run this as root, or \`apt-get install ${missing[*]}\` yourself"
        step "installing ${missing[*]}"
        package_lists
        [[ " ${missing[*]} " != *' postgresql '* ]] || no_postgresql_cluster
        UCF_FORCE_CONFFOLD=1 DEBIAN_FRONTEND=noninteractive run 'is the package archive reachable? `apt-get -f install` mends a broken state' \
            apt-get install -y --no-install-recommends "${missing[@]}"
    fi
}

# PostgreSQL's package makes a cluster and starts it, unless it finds this. Where somebody has decided otherwise, that stands.
no_postgresql_cluster() {
    local settings=/etc/postgresql-common/createcluster.conf
    [[ ! -e $settings ]] || return 0
    mkdir -p "${settings%/*}"
    printf '%s\n' '# Made by ./x of Sterna, which needs the programs and no cluster. See pg_createcluster(1).' \
        'create_main_cluster = false' >"$settings"
}

# Fetches apt's lists, once a run.
package_lists() {
    [[ -z ${PACKAGE_LISTS_FETCHED:-} ]] || return 0
    step "fetching the package lists"
    run 'is the package archive reachable? see /etc/apt/sources.list' apt-get update
    PACKAGE_LISTS_FETCHED=1
}

# Packages whose files go into the guest are unpacked, not installed: no service starts, no boot loader is touched.
unpack_guest_packages() {
    local list=$ROOT/guest/image/packages into=$BUILD/debian made
    made=$(key "$list" "$ROOT/scripts/setup.sh")
    stamped debian "$made" "$into/root" && return
    package_lists
    local wanted package
    mapfile -t wanted < <(sed 's/#.*//' "$list" | xargs -n1)
    for package in "${!wanted[@]}"; do
        # A package that only stands for the current kernel's: take the one that it depends on.
        [[ ${wanted[package]} != linux-image-cloud-amd64 ]] ||
            wanted[package]=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n1)
        [[ -n ${wanted[package]} ]] || fail 'the archive names no package for linux-image-cloud-amd64' 'is main of bookworm among the apt sources?'
    done
    step "unpacking the guest's packages (kernel ${wanted[0]#linux-image-}) into ${into#"$ROOT/"}"
    rm -rf "$into"
    mkdir -p "$into/archives" "$into/root"
    (cd "$into/archives" && APT_CONFIG='' run 'is the package archive reachable?' apt-get -o APT::Sandbox::User=root download "${wanted[@]}")
    for package in "$into"/archives/*.deb; do
        run "is the disk full? \`./x clean\`, then run this again" dpkg-deb -x "$package" "$into/root"
    done
    rm -rf "$into/archives"
    stamp debian "$made"
}
