//! When guests are stopped for want of memory, and that they go on.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::Instant;

use serde_json::{Value, json};
use sterna_api::Code;
use sterna_engine::monitor::Monitor;
use sterna_engine::store::Store;

use super::*;
use crate::machines::table::Entry;
use crate::machines::table::tests::List;
use crate::process::Identity;

const FLOOR: u64 = 100;

fn guest(name: &str, shared: u64, stopped: bool) -> Guest {
    Guest { name: name.into(), shared, own: None, stopped }
}

fn stop(name: &str) -> Step {
    Step::Stop(name.into())
}

#[test]
fn whoever_writes_what_it_shared_is_named_and_then_stopped_and_nobody_else() {
    let mut rule = Rule::new(FLOOR);
    let quiet = guest("quiet", 50, false);
    assert_eq!(rule.step(350, &[guest("w", 90, false), quiet.clone()]), []);
    assert_eq!(rule.step(250, &[guest("w", 80, false), quiet.clone()]), [], "there is enough");
    assert_eq!(rule.step(150, &[guest("w", 70, false), quiet.clone()]), [Step::Warn(vec!["w".into()])]);
    assert_eq!(rule.step(120, &[guest("w", 60, false), quiet.clone()]), [], "once is enough");
    assert_eq!(rule.step(90, &[guest("w", 50, false), quiet.clone()]), [stop("w")]);
    assert_eq!(rule.step(90, &[guest("w", 50, true), quiet]), []);
}

#[test]
fn whoever_gives_back_what_it_shared_is_not_taken_for_one_that_writes_it() {
    let mut rule = Rule::new(FLOOR);
    let guest = |shared, own| Guest { own: Some(own), ..guest("g", shared, false) };
    assert_eq!(rule.step(90, &[guest(50, 10)]), []);
    assert_eq!(rule.step(90, &[guest(40, 10)]), [], "its balloon grows");
    assert_eq!(rule.step(90, &[guest(35, 15)]), [Step::Warn(vec!["g".into()]), stop("g")]);
}

#[test]
fn a_guest_of_which_nothing_is_known_yet_is_not_stopped() {
    let mut rule = Rule::new(FLOOR);
    assert_eq!(rule.step(10, &[guest("new", 50, false)]), []);
    assert_eq!(rule.step(10, &[guest("new", 49, false)]), [Step::Warn(vec!["new".into()]), stop("new")]);
}

#[test]
fn those_that_were_stopped_go_on_one_after_the_other_once_there_is_enough() {
    let mut rule = Rule::new(FLOOR);
    let both = [guest("a", 50, true), guest("b", 50, true)];
    assert_eq!(rule.step(150, &both), [], "more than the floor is not enough");
    assert_eq!(rule.step(200, &both), [Step::LetRun("a".into())]);
    assert_eq!(rule.step(90, &[guest("a", 40, false), guest("b", 50, true)])[1..], [stop("a")]);
}

/// Failed while it was always the first one's turn: one that was being moved kept all others from going on.
#[test]
fn whoever_cannot_go_on_now_has_its_next_turn_after_the_others() {
    let mut rule = Rule::new(FLOOR);
    let all = ["a", "b", "c"].map(|name| guest(name, 50, true));
    let turns: Vec<Step> = (0..4).flat_map(|_| rule.step(200, &all)).collect();
    assert_eq!(turns, ["a", "b", "c", "a"].map(|name| Step::LetRun(name.into())));
}

#[test]
fn guests_are_looked_at_before_there_is_little_left() {
    let rule = Rule::new(FLOOR);
    assert!(rule.looks(399) && !rule.looks(400));
}

/// Machines of a host, whose QEMUs are not there.
impl List {
    /// A machine, and the socket of its QEMU.
    fn with(&self, name: &str, waits_for_room: bool) -> UnixListener {
        let qmp = self.directory.path().join(format!("{name}.sock"));
        let listener = UnixListener::bind(&qmp).expect("a socket");
        let process = Identity::of(std::process::id()).expect("it lives");
        let record = VmRecord { name: name.into(), qmp, process, waits_for_room, ..VmRecord::sample() };
        self.state.make_vm(name).expect("its directory");
        self.machines.table().insert(name.into(), Entry::new(Some(record), Hold::Free));
        listener
    }

    fn is_stopped(&self, name: &str) -> bool {
        self.machines.entry(name).expect("it is there").record.is_some_and(|record| record.waits_for_room)
    }

    fn keeper(&self) -> Arc<Keeper> {
        let lent = Store::open(&self.directory.path().join("lent"), "here".into(), 0).expect("nothing is there");
        Keeper::new(self.directory.path().into(), Arc::new(lent), Duration::ZERO, 0)
    }
}

/// Answers as QEMU does, of a guest in this state; `hears` is told each command first.
fn answer(listener: UnixListener, mut status: &'static str, hears: impl Fn(&str) + Send + 'static) {
    let mut serve = move |stream: UnixStream| -> std::io::Result<()> {
        writeln!(&stream, "{}", json!({ "QMP": { "version": { "qemu": { "major": 7, "minor": 2, "micro": 0 } } } }))?;
        for line in BufReader::new(&stream).lines() {
            let asked: Value = serde_json::from_str(&line?)?;
            let command = asked["execute"].as_str().unwrap_or_default();
            hears(command);
            match command {
                "stop" => status = "paused",
                "cont" => status = "running",
                _ => {}
            }
            writeln!(&stream, "{}", json!({ "return": { "status": status }, "id": asked["id"] }))?;
        }
        Ok(())
    };
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(serve(stream))));
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Failed while guests were stopped one after the other: each QEMU that was silent let the others write for five
/// seconds.
#[test]
fn a_qemu_that_does_not_answer_holds_up_no_other() {
    let Some(host) = List::new() else { return };
    let (_silent, writer) = (host.with("silent", false), host.with("w", false));
    answer(writer, "running", |_| ());
    let acts = Acts::new(Arc::clone(&host.machines));
    for name in ["silent", "silent", "w"] {
        acts.begin(stop(name), 1);
    }
    eventually("the other one is stopped", || host.is_stopped("w"));
    assert!(lock(&acts.under_way).contains("silent"), "it was waited for");
    eventually("it is given up", || lock(&acts.under_way).is_empty());
    assert!(lock(&acts.told).contains("silent") && !host.is_stopped("silent"));
}

/// Failed while nobody looked where no guest is ever stopped: a guest that an earlier daemon had stopped stood still
/// for ever.
#[test]
fn a_guest_that_was_stopped_goes_on_where_none_is_stopped_any_more() {
    let Some(host) = List::new() else { return };
    answer(host.with("m", true), "paused", |_| ());
    begin(Arc::clone(&host.machines), host.keeper(), 0);
    eventually("it goes on", || !host.is_stopped("m"));
}

/// Failed while a machine that waits for its turn to leave counted as one that is being moved: it wrote what it shared,
/// perhaps for hours, and could not be stopped.
#[test]
fn a_guest_that_waits_for_its_turn_to_leave_is_stopped_and_goes_on_and_its_turn_comes_afterwards() {
    let Some(host) = List::new() else { return };
    let ((told, hears), (lets, may)) = (mpsc::channel(), mpsc::channel::<()>());
    answer(host.with("m", false), "running", move |command| {
        if command == "cont" {
            told.send(()).expect("it is heard");
            may.recv().expect("it may");
        }
    });
    let leaving = Arc::new(Leaving::new(Arc::new(Monitor::new("m")), "b:1"));
    host.machines.hold("m", Hold::shared(&leaving));
    let busy = |stopped| set(&host.machines, "m", stopped).expect_err("it is being moved").code == Code::VmBusy;
    assert!(busy(true));
    leaving.set_waits(true);
    assert!(set(&host.machines, "m", true).expect("it waits for its turn") && host.is_stopped("m"));
    std::thread::scope(|scope| {
        let goes_on = scope.spawn(|| set(&host.machines, "m", false));
        hears.recv().expect("QEMU is told");
        let turn = scope.spawn(|| {
            leaving.set_waits(false);
            host.is_stopped("m")
        });
        // Time for a turn that does not wait.
        std::thread::sleep(Duration::from_millis(50));
        lets.send(()).expect("QEMU answers");
        assert!(!turn.join().expect("it comes"), "it came before that was on record");
        assert!(goes_on.join().expect("it ends").expect("it waits for its turn"));
    });
    assert!(busy(true) && busy(false));
    assert!(host.machines.entry("m").expect("it is there").hold.is::<Leaving>());
}
