//! A guest that is larger than any host: it moves to one that has room for half of it, and runs there while its memory
//! hosts come and go.

use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_bench::command::output;
use sterna_system_tests::needs::left_to_the_proofs;
use sterna_system_tests::random::Random;
use sterna_system_tests::slow_disk::SlowDisk;
use sterna_system_tests::{Site, cli, needs, skip_without, turn};

const MIB: u64 = 1 << 20;
/// The guest's memory, and what its checker writes and reads all of, MiB.
const MEMORY: u64 = 6144;
const CHECKED: u64 = 4500;
/// What its new host and its memory hosts have, and what they keep of that for QEMU and the daemons, MiB.
const MAIN: u64 = 3072;
const LENDER: u64 = 2048;
const OWN: u64 = 192;
/// How long daemons are killed and links cut.
const FOR: Duration = Duration::from_secs(600);

/// Cuts the link of a host, or restores it.
fn link(site: &Site, host: &str, state: &str) {
    output(site.host(host).command("ip").args(["link", "set", "up0", state])).expect("a link");
}

/// By hand and in the long proofs: ten minutes of it, and some five before and after.
#[test]
fn a_guest_that_fits_no_host_is_right_whoever_dies_and_whatever_is_cut_and_comes_together_again() {
    let _turn = turn();
    if left_to_the_proofs() || skip_without(&needs::GUEST) {
        return;
    }
    let disk = match SlowDisk::read_by("threads") {
        Ok(disk) => disk,
        Err(why) => return println!("skipped: {why}"),
    };
    let mut plan = disk.plan_with(&format!("checker:--mib,{CHECKED},--rate,32"));
    plan.hosts = ["a", "b", "c", "d"].map(str::to_owned).into();
    plan.memory_bytes = MEMORY * MIB;
    let mut site = Site::without_guest(&plan);
    for host in ["b", "c"] {
        site.configure(host, &format!("lend_memory = \"{}M\"", LENDER - OWN));
    }
    site.run(&plan);
    let limits = [("b", LENDER), ("c", LENDER), ("d", MAIN)];
    let _limits = limits.map(|(host, mib)| site.host(host).group.limit(mib * MIB).expect("a limit"));

    let memory = ["b", "c"].map(|host| format!("{}={}M", site.host(host).listen(), LENDER - OWN));
    let main = format!("{}={}M", site.host("d").listen(), MAIN - OWN);
    let words = ["split", "g", "--json", "-", "--main", &main, "--memory", &memory[0], "--memory", &memory[1]];
    let moved = cli::ask(site.here(), &words).completed_split();
    println!("{moved:?}");
    assert!(moved.allocated_before_bytes > 5 * 1024 * MIB * 9 / 10, "too little of it is in use: {moved:?}");
    disk.is_read_slowly_at(&site, "d");
    site.checker_is_well();

    let mut random = Random::seeded();
    let (began, mut killed, mut cut) = (Instant::now(), 0, 0);
    while began.elapsed() < FOR {
        let host = random.of(&["b", "c", "d"]);
        std::thread::sleep(Duration::from_millis(random.below(8000)));
        let gone = Duration::from_millis(random.below(3000));
        if random.below(2) == 0 {
            site.kill_daemon(host);
            std::thread::sleep(gone);
            site.start_daemon(host);
            killed += 1;
        } else {
            link(&site, host, "down");
            std::thread::sleep(gone);
            link(&site, host, "up");
            cut += 1;
        }
    }
    println!("{killed} daemons killed, {cut} links cut");
    site.checker_is_well();
    disk.is_right(&site);
    let limited = |host: &str| site.host(host).group.limit_hits().expect("an account");
    let hits = limits.map(|(host, _)| (host, limited(host)));
    let ended = limits.map(|(host, _)| site.host(host).group.killed_for_memory().expect("an account"));
    println!("limits were met: {hits:?}");
    assert_eq!(ended, [0; 3], "the kernel ended something for want of memory");
    assert!(hits.iter().all(|(_, hits)| *hits == 0), "a host came to its limit: {hits:?}");

    // Where it comes from there is room for all of it.
    let back = site.host("a").listen();
    site.eventually("it moves", || cli::ask(site.host("d"), &["merge", "g", "--to", &back]).code == 0);
    site.eventually("it comes together", || {
        let shown = cli::ask(site.host("a"), &["show", "g", "--json"]).stdout;
        let shown: Value = serde_json::from_str(&shown).unwrap_or_default();
        shown["state"] == "running" && shown["split"].is_null()
    });
    site.checker_is_well();
    disk.is_right(&site);
}
