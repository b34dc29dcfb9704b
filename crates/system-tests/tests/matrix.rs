//! A busy guest in every kind of machine: versions of QEMU, machine types, processors, sizes of RAM. Each property
//! meets each other one at least once, not all of them together.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use sterna_bench::command::wait_for;
use sterna_bench::error::Context;
use sterna_bench::lab::{CLIENT, net};
use sterna_bench::tools;
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs};
use sterna_system_tests::{PATIENCE, Plan, Site, needs, skip_without, turn};

const GIB: u64 = 1 << 30;
const MEMCACHED: u16 = 11211;
const REDIS: u16 = 6379;

#[derive(Clone, Copy, PartialEq)]
enum Qemu {
    Old,
    New,
}
use Qemu::{New, Old};

/// Every version, machine, size and way between versions has its turn every day; all of them together with
/// `STERNA_LONG=1`.
#[derive(Clone, Copy, PartialEq)]
enum Turn {
    EveryDay,
    Proofs,
}
use Turn::{EveryDay, Proofs};

/// Moves a guest there and back, both sides compared; what its servers were told before they know afterwards.
fn moves(when: Turn, from: Qemu, to: Qemu, machine: &str, cpus: u32, memory_bytes: u64) {
    let _turn = turn();
    if when == Proofs && left_to_the_proofs() {
        return;
    }
    let newer: &[needs::Need] = if [from, to].contains(&New) { &[tools::qemu_10_0] } else { &[] };
    if left_to_another_day(5) || skip_without(&[&needs::GUEST[..], newer].concat()) {
        return;
    }
    let qemu = |which| if which == New { tools::qemu_10_0() } else { tools::qemu_7_2() }.unwrap();
    let jobs = "checker:--mib,24,--rate,8;memcached:-m,32;redis-server";
    let machine = machine.into();
    // The same in both versions, which the richest is not.
    let cpu = (from != to).then(|| "qemu64".to_owned());
    let plan =
        Plan { qemu: [qemu(from), qemu(to)], memory_bytes, cpus, machine, cpu, jobs: jobs.into(), ..Plan::small() };
    let mut site = Site::start(&plan);
    let servers = |site: &Site, word: &str| {
        let memcached = ask(site, MEMCACHED, &format!("get {word}\r\n"), 2);
        let redis = ask(site, REDIS, &format!("GET {word}\r\n"), 2);
        (memcached, redis)
    };
    assert_eq!(ask(&site, MEMCACHED, "set word 0 0 4\r\nkept\r\n", 1), ["STORED"]);
    assert_eq!(ask(&site, REDIS, "SET word kept\r\n", 1), ["+OK"]);
    for _ in 0..2 {
        let report = site.migrate(&["--streams", "2"]);
        assert_eq!(report.ram.total_pages, memory_bytes / 4096);
        assert!(report.pages.sent < 400 << 8, "holes do not travel: {:?}", report.pages);
        site.checker_is_well();
        let (memcached, redis) = servers(&site, "word");
        assert_eq!((memcached[1].as_str(), redis[1].as_str()), ("kept", "kept"));
    }
}

/// Says something to a server of the guest, from the client's host, and reads so many lines.
fn ask(site: &Site, port: u16, words: &str, lines: usize) -> Vec<String> {
    let address = SocketAddr::from((site.guest.address(), port));
    let connect =
        || TcpStream::connect_timeout(&address, Duration::from_secs(10)).context(|| format!("reaching {address}"));
    let namespace = site.host(CLIENT).namespace.clone();
    let what = format!("the server at {address}");
    let mut stream = wait_for(&what, PATIENCE, || Ok(net::inside(&namespace, connect).ok())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(words.as_bytes()).unwrap();
    BufReader::new(stream).lines().take(lines).map(Result::unwrap).collect()
}

#[test]
fn pc_in_qemu_7_2_with_one_processor() {
    moves(EveryDay, Old, Old, "pc", 1, GIB / 4);
}

#[test]
fn pc_in_qemu_10_0_with_two_processors_and_ram_above_4_gib() {
    moves(Proofs, New, New, "pc", 2, 5 * GIB);
}

#[test]
fn q35_in_qemu_7_2_with_two_processors_and_ram_above_4_gib() {
    moves(EveryDay, Old, Old, "q35", 2, 5 * GIB);
}

#[test]
fn q35_in_qemu_10_0_with_one_processor() {
    moves(Proofs, New, New, "q35", 1, GIB / 2);
}

#[test]
fn microvm_in_qemu_7_2_with_two_processors() {
    moves(Proofs, Old, Old, "microvm", 2, GIB / 4);
}

#[test]
fn microvm_in_qemu_10_0_with_one_processor_and_ram_above_4_gib() {
    moves(EveryDay, New, New, "microvm", 1, 5 * GIB);
}

#[test]
fn a_versioned_pc_from_qemu_7_2_to_10_0_with_two_processors() {
    moves(Proofs, Old, New, "pc-i440fx-7.2", 2, GIB / 4);
}

#[test]
fn a_versioned_q35_from_qemu_10_0_to_7_2_with_ram_above_4_gib() {
    moves(EveryDay, New, Old, "pc-q35-7.2", 1, 5 * GIB);
}
