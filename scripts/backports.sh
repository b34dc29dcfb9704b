# Packages from the archive's backports, in folders of their own beside what is installed.
# Their apt has its own sources, lists and cache: the system's apt never hears of backports.

# backports_fetch FOLDER WORD…: an apt of its own in FOLDER, whose archives then hold what `apt-get WORD…` downloads. Fails where the
# archive does not offer it; FOLDER/log says why.
backports_fetch() {
    local apt=$1
    shift
    rm -rf "$apt"
    mkdir -p "$apt"/{lists,archives}/partial
    backports_sources >"$apt/sources.list"
    local options=(
        -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$apt/lists"
        -o "Dir::Cache=$apt" -o APT::Sandbox::User=root -o Acquire::Languages=none -o APT::Update::Post-Invoke-Success=
    )
    apt-get "${options[@]}" update >"$apt/log" 2>&1 &&
        apt-get "${options[@]}" -t "$(backports_suite)" install -y --no-install-recommends --download-only "$@" >>"$apt/log" 2>&1
}

backports_suite() { printf '%s-backports' "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"; }

# The Debian sources that this machine uses already, and backports from the same mirror.
backports_sources() {
    local uri suite component signed_by format='$(REPO_URI) $(RELEASE) $(COMPONENT) $(SIGNED_BY)'
    [[ -n $(apt-get indextargets --format "$format" 'Identifier: Packages' 'Origin: Debian') ]] || package_lists
    while read -r uri suite component signed_by; do
        # apt prints the placeholder itself where a source names no key; Debian's own key ring is the one meant.
        [[ $signed_by == /* ]] || signed_by=/usr/share/keyrings/debian-archive-keyring.gpg
        printf 'deb [signed-by=%s] %s %s %s\n' "$signed_by" "$uri" "$suite" "$component"
        [[ $suite-backports != "$(backports_suite)" ]] ||
            printf 'deb [signed-by=%s] %s %s %s\n' "$signed_by" "$uri" "$suite-backports" "$component"
    done < <(apt-get indextargets --format "$format" 'Identifier: Packages' 'Origin: Debian') | sort -u
}
