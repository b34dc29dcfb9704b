use super::*;
use crate::state::write_record;

const ID: MigrationId = MigrationId(7);

#[test]
fn a_verdict_once_given_binds_even_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    records.write(ID, Some("vm"), Stage::Preparing).unwrap();
    assert_eq!(records.verdict_for(ID, None), Ok(Verdict::Aborted));
    assert!(records.commit(ID, false).is_err(), "the source was told that it may run the guest");
    let again = Records::load(dir.path()).unwrap();
    assert!(again.commit(ID, false).is_err());
    assert_eq!(again.verdict_for(ID, None), Ok(Verdict::Aborted));
}

#[test]
fn a_committed_migration_stays_committed() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    records.write(ID, Some("vm"), Stage::Preparing).unwrap();
    records.commit(ID, false).unwrap();
    assert_eq!(records.verdict_for(ID, None), Ok(Verdict::Committed));
    assert_eq!(Records::load(dir.path()).unwrap().verdict_for(ID, None), Ok(Verdict::Committed));
}

#[test]
fn only_the_daemon_it_is_from_learns_a_migrations_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    records.prepare(ID, "vm", Some("a.example")).unwrap();
    assert_eq!(records.verdict_for(ID, Some("b.example")), Err(NoVerdict::AnotherDaemons));
    assert_eq!(records.verdict_for(ID, None), Err(NoVerdict::AnotherDaemons));
    records.commit(ID, false).expect("the questions settled nothing");
    let again = Records::load(dir.path()).unwrap();
    assert_eq!(again.verdict_for(ID, Some("b.example")), Err(NoVerdict::AnotherDaemons), "nor after a restart");
    assert_eq!(again.verdict_for(ID, Some("a.example")), Ok(Verdict::Committed));
}

/// Seen to fail: each question left a file with two fsyncs for ever: 10,000 files, and an answer that looked like a
/// real one.
#[test]
fn questions_about_migrations_never_heard_of_settle_nothing_and_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    for id in 0..10_000 {
        assert_eq!(records.verdict_for(MigrationId(id), None), Err(NoVerdict::Unknown));
        assert_eq!(records.abort(MigrationId(id)), Verdict::Aborted);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(records.lock().records.capacity(), 0, "nor any memory");
    assert!(records.commit(ID, false).is_err(), "what was never prepared is never committed");
}

/// Seen to fail: anybody's question overwrote the record with *aborted*, and the answer said so. The source's QEMU
/// could be ended while the guest needed its pages, or let run while the guest ran elsewhere.
#[test]
fn a_sources_own_record_is_no_verdict_and_nobodys_question_touches_it() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    let stage = Stage::HandingOver { peer: "b:1".into(), postcopy: None, daemon: Some(DaemonId(5)) };
    records.write(ID, Some("vm"), stage.clone()).unwrap();
    assert_eq!(records.verdict_for(ID, None), Err(NoVerdict::BegunHere));
    records.abort(ID);
    let refused = records.prepare(ID, "another", None).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "nor does a proposal by its number");
    records.refused(ID);
    assert!(records.commit(ID, false).is_err());
    assert_eq!(records.stage(ID), Some(stage.clone()));
    assert_eq!(Records::load(dir.path()).unwrap().stage(ID), Some(stage));
}

#[test]
fn a_machine_that_is_refused_leaves_no_record_unless_somebody_was_told() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    records.prepare(ID, "vm", None).unwrap();
    records.refused(ID);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    records.prepare(ID, "vm", None).unwrap();
    assert_eq!(records.verdict_for(ID, None), Ok(Verdict::Aborted));
    records.refused(ID);
    assert_eq!(records.stage(ID), Some(Stage::Aborted), "what was said binds");
    assert!(records.prepare(ID, "vm", None).is_err());
}

#[test]
fn a_guest_that_was_on_its_way_when_the_host_went_down_is_never_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let before = MigrationRecord {
        id: ID,
        vm: Some("vm".into()),
        stage: Stage::Preparing,
        at_s: now_s(),
        number: 0,
        boot: 1,
        from: None,
        pages: None,
    };
    write_record(&dir.path().join(format!("{ID}.json")), &before).unwrap();
    assert_eq!(Records::load(dir.path()).unwrap().verdict_for(ID, None), Ok(Verdict::Committed));
}

#[test]
fn a_torn_record_is_not_taken_for_a_guest_that_never_came() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(format!("{ID}.json")), "").unwrap();
    assert_eq!(Records::load(dir.path()).unwrap().verdict_for(ID, None), Ok(Verdict::Committed));
}

/// Seen to fail: records were forgotten by age and the clock, *committed* ones too. A clock that jumped, or a peer
/// whose machines were refused many times, made this host forget that a guest runs here, and answer *aborted*.
#[test]
fn too_many_verdicts_go_by_their_order_and_what_somebody_waits_for_stays() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    for id in 0..6 {
        records.prepare(MigrationId(id), "vm", None).unwrap();
        match id % 2 {
            0 => records.commit(MigrationId(id), id == 0).unwrap(),
            _ => assert_eq!(records.abort(MigrationId(id)), Verdict::Aborted),
        }
    }
    let stage = Stage::HandingOver { peer: "b:1".into(), postcopy: None, daemon: None };
    records.write(MigrationId(6), Some("vm"), stage).unwrap();
    records.prepare(MigrationId(7), "vm", None).unwrap();
    records.prune(&mut records.lock(), 1, 1);
    let left: Vec<u128> = (0..8).filter(|id| records.stage(MigrationId(*id)).is_some()).collect();
    // These are left: the committed one with missing pages, the last committed and the last aborted one, and those that
    // are not decided.
    assert_eq!(left, [0, 4, 5, 6, 7]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 5);
    let again = Records::load(dir.path()).unwrap();
    assert_eq!(again.lock().next, records.lock().next, "the order goes on after a restart");
}

/// Seen to fail: every verdict was forgotten by age.
#[test]
fn a_guest_that_came_long_ago_by_a_clock_that_jumps_is_still_known() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"{"id":7,"vm":"m","stage":"committed","at_s":1,"boot":5,"from":null}"#;
    std::fs::write(dir.path().join(format!("{ID}.json")), text).unwrap();
    assert_eq!(Records::load(dir.path()).unwrap().verdict_for(ID, None), Ok(Verdict::Committed));
}

#[test]
fn records_of_daemons_that_knew_no_postcopy_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    let write = |id: u128, stage: &str| {
        let text = format!(r#"{{"id":{id},"vm":"m","stage":{stage},"at_s":4000000000,"boot":5,"from":null}}"#);
        std::fs::write(dir.path().join(format!("{}.json", MigrationId(id))), text).unwrap();
    };
    write(1, r#""committed""#);
    write(2, r#"{"handing-over":{"peer":"b:1"}}"#);
    let records = Records::load(dir.path()).unwrap();
    assert_eq!((records.stage(MigrationId(1)), records.pages(MigrationId(1))), (Some(Stage::Committed), None));
    let handed_over = Stage::HandingOver { peer: "b:1".into(), postcopy: None, daemon: None };
    assert_eq!(records.stage(MigrationId(2)), Some(handed_over));
}

#[test]
fn pages_that_are_to_come_are_known_to_the_next_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    records.prepare(ID, "vm", Some("a.example")).unwrap();
    records.commit(ID, true).unwrap();
    let again = Records::load(dir.path()).unwrap();
    assert_eq!((again.abort(ID), again.pages(ID)), (Verdict::Committed, Some(Pages::Coming)));
    assert!(again.may_ask(ID, Some("a.example")) && !again.may_ask(ID, Some("b.example")));
    again.pages_are(ID, Pages::Here);
    again.pages_are(ID, Pages::Gone);
    assert_eq!(Records::load(dir.path()).unwrap().pages(ID), Some(Pages::Here), "what ended once stays so");
}

#[test]
fn the_options_of_a_guest_that_needs_pages_of_here_outlive_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::load(dir.path()).unwrap();
    let options = MigrateOptions { verify: true, postcopy_bandwidth_bytes_per_s: Some(1 << 20), ..Default::default() };
    let stage =
        Stage::HandingOver { peer: "b:1".into(), postcopy: Some(Box::new(options)), daemon: Some(DaemonId(u128::MAX)) };
    records.write(ID, Some("vm"), stage.clone()).unwrap();
    assert_eq!(Records::load(dir.path()).unwrap().stage(ID), Some(stage));
}

#[test]
fn the_pages_of_a_guest_are_gone_only_where_that_is_on_record_or_the_host_went_down_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let write = |id: u128, stage: &str| {
        let text = format!(r#"{{"id":{id},"vm":"m","stage":{stage},"at_s":4000000000,"boot":5,"from":null}}"#);
        std::fs::write(dir.path().join(format!("{}.json", MigrationId(id))), text).unwrap();
    };
    write(1, r#""preparing""#);
    write(2, r#""committed""#);
    std::fs::write(dir.path().join(format!("{}.json", MigrationId(3))), "").unwrap();
    let records = Records::load(dir.path()).unwrap();
    let pages = [1, 2, 3, 4].map(|id| records.pages(MigrationId(id)));
    assert_eq!(pages, [Some(Pages::Gone), None, None, None]);
}
