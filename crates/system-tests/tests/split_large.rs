//! A guest that is larger than any host: half of it is where it runs, and its memory hosts come and go meanwhile.

use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_bench::command::output;
use sterna_system_tests::needs::left_to_the_proofs;
use sterna_system_tests::random::Random;
use sterna_system_tests::slow_disk::SlowDisk;
use sterna_system_tests::{Plan, Site, cli, needs, skip_without, turn};

const MIB: u64 = 1 << 20;
/// The guest's memory, and what its checker writes and reads all of, MiB.
const MEMORY: u64 = 6144;
const CHECKED: u64 = 4500;
/// What its new host and its memory hosts have, and what they keep of that for QEMU and the daemons, MiB.
const MAIN: u64 = 3072;
const LENDER: u64 = 2048;
const OWN: u64 = 192;
/// What each of four memory hosts lends where there is parity, MiB.
const LENT_WITH_PARITY: u64 = 1400;
/// How long daemons are killed and links cut.
const FOR: Duration = Duration::from_secs(600);

/// Hosts whose daemons are killed and whose links are cut, one at a time.
struct Trouble {
    hosts: &'static [&'static str],
    random: Random,
    killed: u32,
    cut: u32,
}

impl Trouble {
    fn with(hosts: &'static [&'static str]) -> Self {
        Self { hosts, random: Random::seeded(), killed: 0, cut: 0 }
    }

    fn goes_on(&mut self, site: &mut Site, how_long: Duration) {
        let began = Instant::now();
        while began.elapsed() < how_long {
            let host = self.random.of(self.hosts);
            std::thread::sleep(Duration::from_millis(self.random.below(8000)));
            let gone = Duration::from_millis(self.random.below(3000));
            if self.random.below(2) == 0 {
                site.kill_daemon(host);
                std::thread::sleep(gone);
                site.start_daemon(host);
                self.killed += 1;
            } else {
                link(site, host, "down");
                std::thread::sleep(gone);
                link(site, host, "up");
                self.cut += 1;
            }
        }
        println!("{} daemons killed, {} links cut", self.killed, self.cut);
        site.checker_is_well();
    }
}

/// A guest on the first of these hosts that reads a disk slowly; `None` where that cannot be, or not today.
fn large(hosts: &[&str]) -> Option<(SlowDisk, Plan)> {
    if left_to_the_proofs() || skip_without(&needs::GUEST) {
        return None;
    }
    let disk = SlowDisk::read_by("threads").inspect_err(|why| println!("skipped: {why}")).ok()?;
    let mut plan = disk.plan_with(&format!("checker:--mib,{CHECKED},--rate,32"));
    plan.hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
    plan.memory_bytes = MEMORY * MIB;
    Some((disk, plan))
}

/// Splits it, which must need all those hosts.
fn is_split(site: &Site, words: &[&str]) {
    let report = cli::ask(site.here(), words).completed_split();
    println!("{report:?}");
    assert!(report.allocated_before_bytes > 5 * 1024 * MIB * 9 / 10, "too little of it is in use: {report:?}");
}

/// Cuts the link of a host, or restores it.
fn link(site: &Site, host: &str, state: &str) {
    output(site.host(host).command("ip").args(["link", "set", "up0", state])).expect("a link");
}

/// What a host says of the guest.
fn shown_at(site: &Site, host: &str) -> Value {
    serde_json::from_str(&cli::ask(site.host(host), &["show", "g", "--json"]).stdout).unwrap_or_default()
}

/// No host had less memory than it was to have.
fn none_is_short(site: &Site, limits: &[(&str, u64)]) {
    let limited = |host: &str| site.host(host).group.limit_hits().expect("an account");
    let hits: Vec<_> = limits.iter().map(|(host, _)| (*host, limited(host))).collect();
    let ended = |host: &str| site.host(host).group.killed_for_memory().expect("an account");
    println!("limits were met: {hits:?}");
    assert!(limits.iter().all(|(host, _)| ended(host) == 0), "the kernel ended something for want of memory");
    assert!(hits.iter().all(|(_, hits)| *hits == 0), "a host came to its limit: {hits:?}");
}

fn comes_together(site: &Site, host: &str) {
    site.eventually("it comes together", || {
        let shown = shown_at(site, host);
        shown["state"] == "running" && shown["split"].is_null()
    });
}

/// By hand and in the long proofs: ten minutes of it, and some five before and after.
#[test]
fn a_guest_that_fits_no_host_is_right_whoever_dies_and_whatever_is_cut_and_comes_together_again() {
    let _turn = turn();
    let Some((disk, plan)) = large(&["a", "b", "c", "d"]) else { return };
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
    is_split(&site, &words);
    disk.is_read_slowly_at(&site, "d");
    site.checker_is_well();

    Trouble::with(&["b", "c", "d"]).goes_on(&mut site, FOR);
    disk.is_right(&site);
    none_is_short(&site, &limits);

    // Where it comes from there is room for all of it.
    let back = site.host("a").listen();
    site.eventually("it moves", || cli::ask(site.host("d"), &["merge", "g", "--to", &back]).code == 0);
    comes_together(&site, "a");
    site.checker_is_well();
    disk.is_right(&site);
}

/// By hand and in the long proofs, as the other one: in the middle of ten minutes a memory host goes for good.
#[test]
fn a_guest_with_parity_is_right_though_a_memory_host_goes_for_good_and_any_one_may_go_afterwards() {
    let _turn = turn();
    let Some((disk, plan)) = large(&["a", "b", "c", "d", "e", "f"]) else { return };
    let mut site = Site::without_guest(&plan);
    let spare = site.host("f").listen();
    site.configure("a", &format!("spare_memory_hosts = ['{spare}']\nspare_after = '5s'"));
    for host in ["b", "c", "d", "e", "f"] {
        site.configure(host, &format!("lend_memory = \"{}M\"", LENT_WITH_PARITY + OWN));
    }
    site.run(&plan);
    site.checker_is_well();
    let main = format!("here={}M", MAIN - OWN);
    let memory = ["b", "c", "d", "e"].map(|host| format!("{}={LENT_WITH_PARITY}M", site.host(host).listen()));
    let mut words = vec!["split", "g", "--json", "-", "--redundancy", "parity", "--main", &main];
    memory.iter().for_each(|host| words.extend(["--memory", host]));
    is_split(&site, &words);
    let limits = [("a", MAIN), ("b", LENDER), ("c", LENDER), ("d", LENDER), ("e", LENDER), ("f", LENDER)];
    let all_limits = limits.map(|(host, mib)| site.host(host).group.limit(mib * MIB).expect("a limit"));
    disk.is_read_slowly_at(&site, "a");

    let is_whole = |site: &Site| {
        site.eventually("any one may go", || {
            let split = &shown_at(site, "a")["split"];
            split["silent"] == serde_json::json!([]) && split["alone_pages"] == 0
        });
    };
    Trouble::with(&["a", "b", "c", "d", "e"]).goes_on(&mut site, FOR / 2);
    is_whole(&site);
    site.kill_daemon("c");
    site.eventually("the spare has its place", || {
        let split = &shown_at(&site, "a")["split"];
        split["memory"].as_array().is_some_and(|hosts| hosts.iter().any(|host| host["peer"] == spare.as_str()))
    });
    site.checker_is_well();
    is_whole(&site);
    Trouble::with(&["a", "b", "d", "e", "f"]).goes_on(&mut site, FOR / 2);
    is_whole(&site);
    // Without another one, for as long as its checker looks at all of its memory.
    site.kill_daemon("d");
    site.checker_is_well();
    disk.is_right(&site);
    site.start_daemon("d");
    none_is_short(&site, &limits);

    drop(all_limits);
    site.eventually("it is merged", || cli::ask(site.here(), &["merge", "g"]).code == 0);
    comes_together(&site, "a");
    site.checker_is_well();
    disk.is_right(&site);
}
