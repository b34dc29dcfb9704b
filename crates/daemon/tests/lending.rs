//! A daemon that lends memory to guests of other hosts: what it says of it, what outlives it, and how it is taken back.

mod support;

use serde_json::Value;
use sterna_engine::store::client::{MemoryHost, StoreError};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Refusal};
use support::{Host, cannot_run};

const MIB: u64 = 1 << 20;
const CHUNKS: u32 = 64;
const CLAIM: Claim = Claim { guest: 0xabc, key: 0xdef, epoch: 1 };

fn open(host: &Host, claim: Claim, bytes: u64) -> Result<MemoryHost, StoreError> {
    MemoryHost::open(&host.address(), None, (1, 2), claim, bytes, CHUNKS)
}

fn refused(result: Result<MemoryHost, StoreError>) -> Refusal {
    match result {
        Err(StoreError::Refused(refusal)) => refusal,
        other => panic!("it was not refused: {other:?}"),
    }
}

/// Puts a whole chunk of one content.
fn put(lender: &mut MemoryHost, chunk: u32, version: u64, content: u8) {
    let bodies = vec![content; 256 * PAGE_BYTES];
    let pages = (PageSet::first(256), PageSet::EMPTY);
    lender.put(ChunkIndex(chunk), (version, None), pages, &[bodies.as_slice().into()]).expect("room for it");
}

fn numbers(lent: &Value) -> [u64; 3] {
    ["budget_bytes", "granted_bytes", "used_bytes"].map(|name| lent[name].as_u64().expect("a number"))
}

/// Killed and started again, also with a smaller budget, it has what it had, and removes none of it as stray RAM.
#[test]
fn what_is_lent_is_shown_and_outlives_the_daemon() {
    if cannot_run() {
        return;
    }
    let mut host = Host::configured("lend_memory = \"64M\"");
    assert_eq!(numbers(&host.get("/v1/host/lent")), [64 * MIB, 0, 0]);
    let mut lender = open(&host, CLAIM, 40 * MIB).unwrap();
    (0..3).for_each(|chunk| put(&mut lender, chunk, 1, chunk as u8 + 1));
    let summary = lender.prepare().unwrap();
    assert_eq!(refused(open(&host, Claim { guest: 7, ..CLAIM }, 30 * MIB)), Refusal::Budget { left_bytes: 24 * MIB });
    for restart in [false, true] {
        if restart {
            host.kill_daemon();
            host.start_daemon();
        }
        let lent = host.get("/v1/host/lent");
        assert_eq!(numbers(&lent), [64 * MIB, 40 * MIB, 3 * (MIB + 4096)]);
        assert_eq!(lent["guests"][0]["guest"], format!("{:032x}", CLAIM.guest));
        let metrics = host.ask_raw("GET", "/metrics", "").1.to_string();
        assert!(metrics.contains("sterna_lent_guests 1"), "{metrics}");
    }
    let mut lender = open(&host, Claim { epoch: 2, ..CLAIM }, 40 * MIB).unwrap();
    assert_eq!(lender.opened().1, 3);
    let got = lender.get(ChunkIndex(1), 1, &PageSet::first(256)).unwrap();
    assert!(got.bodies.iter().all(|byte| *byte == 2));
    let now = lender.prepare().unwrap();
    assert_eq!((now.epoch, now.pages, now.digest), (2, summary.pages, summary.digest));
    assert_eq!(refused(open(&host, CLAIM, 40 * MIB)), Refusal::Fenced { current: 2 });
    lender.close().unwrap();
    assert_eq!(numbers(&host.get("/v1/host/lent")), [64 * MIB, 0, 0]);
    // Nothing is left that would keep the RAM file system mounted.
    assert!(host.stop_daemon().success());
    assert_eq!(host.ram_files(), 0);
}

/// A person takes back what a guest has here, whose owner is gone for good. Its owner, should it come back, is told so.
#[test]
fn a_loan_is_taken_back_by_a_person() {
    if cannot_run() {
        return;
    }
    let host = Host::configured("lend_memory = \"8M\"");
    let mut lender = open(&host, CLAIM, 8 * MIB).unwrap();
    put(&mut lender, 0, 1, 1);
    assert_eq!(host.ask("DELETE", "/v1/host/lent/7", None).1["code"], "unknown-loan");
    let (status, loan) = host.ask("DELETE", &format!("/v1/host/lent/{:x}", CLAIM.guest), None);
    assert_eq!((status, loan["used_bytes"].as_u64()), (200, Some(MIB + 4096)), "{loan}");
    let asked = lender.get(ChunkIndex(0), 1, &PageSet::first(1));
    assert!(matches!(asked, Err(StoreError::Refused(Refusal::Closed))), "{asked:?}");
    assert_eq!(numbers(&host.get("/v1/host/lent")), [8 * MIB, 0, 0]);
}

#[test]
fn a_daemon_that_was_not_asked_to_lends_nothing() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    assert_eq!(refused(open(&host, CLAIM, MIB)), Refusal::LendsNothing);
    assert_eq!(numbers(&host.get("/v1/host/lent")), [0, 0, 0]);
}

/// Whatever the budget is, a host promises no memory that it does not have, and none of it twice, used or not.
#[test]
fn what_is_promised_to_one_guest_is_nobody_elses() {
    if cannot_run() {
        return;
    }
    let lends = Host::configured("lend_memory = \"100T\"");
    let left_for = |guest| match refused(open(&lends, Claim { guest, ..CLAIM }, 90 << 40)) {
        Refusal::Budget { left_bytes } => left_bytes,
        other => panic!("refused for another reason: {other}"),
    };
    let left = left_for(1);
    assert!(left < 90 << 40, "the host's memory bounds it");
    open(&lends, CLAIM, left / 2).unwrap();
    // (Others on this machine take and give memory meanwhile.)
    assert!(left_for(2) < left / 4 * 3);
}
