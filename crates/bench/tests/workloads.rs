//! The image has the programs that experiments run in guests, and a guest tells the meter how they do. Needs root,
//! QEMU, the guest's image and PostgreSQL.

mod support;

use sterna_bench::baseline::{BaselineVm, Ram};
use sterna_bench::command::{PATIENCE, wait_for};
use sterna_bench::lab::{CLIENT, METER, net};
use sterna_bench::load::iperf::IperfServer;
use sterna_bench::load::peers::Peers;
use sterna_bench::load::postgres::Postgres;
use sterna_bench::load::web::WebClients;
use sterna_bench::meter::{Line, Meter};
use sterna_bench::{Guest, tools};
use sterna_guest_programs::histogram::Histogram;

/// Waits until a program of the guest has sent `count` lines with `key`, and returns them.
fn lines(meter: &Meter, guest: &Guest, program: &str, key: &str, count: usize) -> Vec<Line> {
    let told = || {
        let lines: Vec<Line> = meter.lines(guest.address(), program);
        let lines: Vec<Line> = lines.into_iter().filter(|line| line.number(key).is_some()).collect();
        Ok((lines.len() >= count).then_some(lines))
    };
    wait_for(&format!("{key} of {program}"), PATIENCE, told)
        .unwrap_or_else(|error| panic!("{error}; the console: {}", guest.console_text()))
}

#[test]
fn a_guest_reports_what_its_writer_changes_and_how_far_its_sorts_are() {
    let Some(lab) = support::lab("work", Some(125_000_000)) else { return };
    let jobs =
        "dirtier:--mib,8,--rate,4,--silent,50,--silent-of,pages,--interval-ms,100;quicksort:--mib,2,--interval-ms,200";
    let mut guest = Guest::new(&lab, "g", 9, jobs);
    guest.memory_bytes = 320 << 20;
    lab.create_tap(&guest.tap()).unwrap();
    let meter = Meter::start(lab.host(METER).unwrap()).unwrap();
    let _vm = BaselineVm::start(&lab, "a", &guest, &tools::qemu_7_2().unwrap(), Ram::Plain).unwrap();

    let writer = lines(&meter, &guest, "DIRTIER", "total", 20);
    let sum = |key: &str| writer.iter().filter_map(|line| line.number(key)).sum::<f64>();
    let (writes, silent, changed) = (sum("writes"), sum("silent"), sum("changed"));
    assert!(writes > 500.0, "{writes} writes in 20 lines");
    assert!((0.35..0.65).contains(&(silent / writes)), "{silent} of {writes} were silent");
    assert!(changed > 0.0 && changed <= writes - silent, "{changed} pages by {} stores", writes - silent);
    let totals: Vec<f64> = writer.iter().filter_map(|line| line.number("total")).collect();
    assert!(totals.is_sorted(), "{totals:?}");

    let sorts = lines(&meter, &guest, "QUICKSORT", "sorts", 10);
    assert!(sorts.iter().all(|line| line.number("bad") == Some(0.0)), "{sorts:?}");
    assert!(sorts.iter().all(|line| line.number("sorts_per_s").is_some_and(|rate| rate > 0.0)), "{sorts:?}");
}

#[test]
fn a_guest_works_with_a_database_on_another_host_which_leaves_nothing() {
    let Some(lab) = support::lab("base", Some(125_000_000)) else { return };
    if let Err(error) = tools::postgres() {
        return eprintln!("skipped: {error}");
    }
    let client = lab.host(CLIENT).unwrap();
    let postgres = Postgres::start(client).unwrap();
    postgres.load_ycsb(1000).unwrap();
    assert_eq!(postgres.query("SELECT count(*), max(length(field10)) FROM usertable").unwrap(), "1000|100");

    let jobs = format!("ycsb:--server,{},--rows,1000,--connections,3,--interval-ms,200", postgres.address());
    let mut guest = Guest::new(&lab, "g", 9, &jobs);
    guest.memory_bytes = 320 << 20;
    lab.create_tap(&guest.tap()).unwrap();
    let meter = Meter::start(lab.host(METER).unwrap()).unwrap();
    let vm = BaselineVm::start(&lab, "a", &guest, &tools::qemu_7_2().unwrap(), Ram::Plain).unwrap();
    let sum = |lines: &[Line], key: &str| lines.iter().filter_map(|line| line.number(key)).sum::<f64>();
    let work = wait_for("requests of the guest", PATIENCE, || {
        let lines = meter.lines(guest.address(), "YCSB");
        Ok((sum(&lines, "reads") + sum(&lines, "updates") > 200.0).then_some(lines))
    });
    let work = work.unwrap_or_else(|error| panic!("{error}; the console: {}", guest.console_text()));
    let (reads, updates) = (sum(&work, "reads"), sum(&work, "updates"));
    assert!((0.3..0.7).contains(&(reads / (reads + updates))), "{reads} reads, {updates} updates");
    assert_eq!(sum(&work, "errors"), 0.0, "{work:?}");
    let counted: u64 =
        work.iter().filter_map(|line| line.word("latency")?.parse::<Histogram>().ok()).map(|h| h.count()).sum();
    assert_eq!(counted as f64, reads + updates);
    let changed = postgres.query("SELECT count(*) FROM usertable WHERE field1 !~ '^(.{32})\\1'").unwrap();
    assert_ne!(changed, "0", "the updates reached the table");

    drop(vm);
    drop(postgres);
    assert!(client.group.processes().is_empty(), "{:?}", client.group.processes());
    assert!(!client.directory.join("postgres").exists());
}

#[test]
fn a_guest_touches_builds_downloads_serves_and_sends_and_no_load_outlives_its_owner() {
    let Some(lab) = support::lab("apps", Some(125_000_000)) else { return };
    if let Err(error) = tools::iperf3().and_then(|_| tools::wrk()) {
        return eprintln!("skipped: {error}");
    }
    let client = lab.host(CLIENT).unwrap();
    let peers = Peers::start(client, 4, 1e6).unwrap();
    let iperf = IperfServer::start(client).unwrap();
    let jobs = format!(
        "nginx:2;toucher:--mib,8,--access,write,--rate,4,--interval-ms,200,--freed-mib,16;builder:--interval-ms,200;\
         downloader:--peers,{},--count,4,--mib,4,--interval-ms,200;iperf3:-c,{},-t,3600,-b,1M",
        peers.address(),
        client.address
    );
    let mut guest = Guest::new(&lab, "g", 9, &jobs);
    guest.memory_bytes = 512 << 20;
    let web = WebClients::start(client, guest.address(), 2).unwrap();
    lab.create_tap(&guest.tap()).unwrap();
    let meter = Meter::start(lab.host(METER).unwrap()).unwrap();
    let vm = BaselineVm::start(&lab, "a", &guest, &tools::qemu_7_2().unwrap(), Ram::Plain).unwrap();

    let touches = lines(&meter, &guest, "TOUCHER", "touches", 10);
    let counted: u64 =
        touches.iter().filter_map(|line| line.word("latency_ns")?.parse::<Histogram>().ok()).map(|h| h.count()).sum();
    let told: f64 = touches.iter().filter_map(|line| line.number("touches")).sum();
    assert!(counted > 1000 && counted as f64 == told, "{counted} of {told}");
    let builds = lines(&meter, &guest, "BUILDER", "units", 4);
    let well = |line: &Line| line.number("bad").is_none_or(|bad| bad == 0.0);
    assert!(builds.iter().all(well), "{builds:?}");
    let downloads = lines(&meter, &guest, "DOWNLOADER", "total", 4);
    assert!(downloads.iter().all(well), "{downloads:?}");
    let work = wait_for("pieces and packets", PATIENCE, || {
        let sent = iperf.samples().iter().filter(|sample| sample.per_s > 1e4).count();
        Ok((peers.pieces() > 100 && sent > 8).then_some(()))
    });
    work.unwrap_or_else(|error| panic!("{error}; {} pieces; the console: {}", peers.pieces(), guest.console_text()));
    let sent = net::link_bytes(lab.name(), "a").unwrap().0;
    wait_for("what the web server sends", PATIENCE, || {
        // More than all else together sends in that time.
        Ok((net::link_bytes(lab.name(), "a").unwrap().0 > sent + (8 << 20)).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error}; the console: {}", guest.console_text()));
    let console = guest.console_text();
    assert_eq!(console.lines().find(|line| line.starts_with("ENDED")), None, "the console: {console}");

    drop((vm, web, iperf, peers));
    assert!(client.group.processes().is_empty(), "{:?}", client.group.processes());
}
