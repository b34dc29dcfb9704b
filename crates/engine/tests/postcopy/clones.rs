//! Clones of a guest that runs on: they wait for its pause, and begin as it was then.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Phase};
use sterna_engine::error::MigrateError;
use sterna_engine::fork::away::{Pause, Still, Unthrottled, Writes};
use sterna_engine::fork::{Image, Saved};
use sterna_engine::host;
use sterna_engine::memory::Memory;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::track::{Cost, Tracker, Watch};
use sterna_engine::source::{Fate, Outcome, Outgoing, migrate};
use sterna_engine::vmm::{EventTime, Stopped};
use sterna_protocol::hello::{Features, HELLO_BYTES, Hello};
use sterna_protocol::pages::PageMap;

use crate::fixture::{MIB, PAGES, Program, destination, filled_ram, nothing_wrong, until};
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::inside::InsideSelf;
use crate::pair::outgoing;
use crate::pair::source::{DEVICE_BYTES, Source, SourceVmm};
use crate::pair::tracking_works;
use crate::relay::Relay;

fn options() -> MigrateOptions {
    MigrateOptions { mode: Mode::Postcopy, ..MigrateOptions::default() }
}

/// A clone whose RAM is this, and that is told of its source's pause.
fn clone(ram: &GuestRam, pause: &Arc<Pause>, tracker: impl Tracker + 'static) -> (Outgoing, mpsc::Receiver<()>) {
    let (told, ready) = mpsc::channel();
    let outgoing = Outgoing {
        vmm: Box::new(Still::of(pause, told)),
        tracker: Box::new(tracker),
        throttle: Box::new(Unthrottled),
        clone: Some(host::Clone { connected: false }),
        ..outgoing(ram, SourceVmm::new(None), InsideSelf::default())
    };
    (outgoing, ready)
}

fn saved() -> Saved {
    let stopped = Stopped { stop: EventTime(1), ready: EventTime(1) };
    Saved { devices: vec![7; DEVICE_BYTES], stopped, resumed: None, waits: None }
}

/// A clone of a guest that writes all the time until its pause. Pages that it has written first while the clone waited
/// for the pause are the clone's, too. Returns how it ended.
fn cloned_while_it_writes(tracker: impl Tracker + 'static) -> (Outcome, mpsc::Receiver<Vec<u64>>) {
    let ram = GuestRam::new(PAGES * 4096);
    ram.write_page(0, 1);
    let (host, peer, seen) = destination(&ram, Program::Scattered);
    *host.touched.lock().unwrap() = vec![77, 3001];
    let pause = Arc::new(Pause::default());
    let (outgoing, ready) = clone(&ram, &pause, tracker);
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| migrate(outgoing, &peer, &options(), &Source::default(), &Monitor::new("clone")));
        ready.recv().expect("it waits for the pause");
        let mut writers = Writers::start(&ram, 0..PAGES, Duration::ZERO);
        // Far from all that it will write has content when the clone is proposed, and much of it now.
        until("pages are written", || {
            let runs = sterna_sys::file::allocated_runs(&ram.file, 0..ram.bytes).flatten();
            runs.map(|run| (run.end - run.start) / 4096).sum::<u64>() > PAGES / 2
        });
        assert!(!host.running.load(Ordering::Acquire), "it runs before its source was forked");
        writers.stop();
        pause.over(&saved(), &Arc::new(Image::default()));
        going.join().unwrap()
    });
    assert_eq!(*host.clone.lock().unwrap(), Some(host::Clone { connected: false }));
    (outcome, seen)
}

#[test]
fn a_clone_is_what_its_source_was_at_its_pause_whatever_it_wrote_before() {
    if !tracking_works() {
        return;
    }
    let (outcome, seen) = cloned_while_it_writes(Writes::default());
    assert_eq!((outcome.fate, outcome.report.status), (Fate::There, Status::Completed), "{:?}", outcome.report.error);
    assert!(outcome.report.pages.full > PAGES / 2, "{:?}", outcome.report.pages);
    nothing_wrong(&seen);
}

/// The test above can fail: without the look after the pause, pages are missing in the clone.
#[test]
fn what_nobody_names_after_the_pause_is_missing_in_a_clone() {
    struct Nothing;
    impl Tracker for Nothing {
        fn arm(&mut self, _: &dyn Memory) -> Result<(), MigrateError> {
            Ok(())
        }
        fn collect(&mut self, _: &dyn Memory, _: &mut PageMap, _: &mut PageMap) -> Result<(), MigrateError> {
            Ok(())
        }
        fn watch(&self) -> Option<Arc<dyn Watch>> {
            None
        }
        fn seal(&mut self) {}
        fn disarm(&mut self) {}
        fn cost(&self) -> Cost {
            Cost::default()
        }
    }
    if !tracking_works() {
        return;
    }
    let (_, seen) = cloned_while_it_writes(Nothing);
    let wrong = seen.recv_timeout(crate::fixture::PATIENCE).expect("it looked at all its pages");
    assert!(wrong.len() as u64 > PAGES / 4, "{}", wrong.len());
}

#[test]
fn a_clone_goes_on_after_its_link_was_cut_in_the_middle() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Scattered);
    let (relay, pause, monitor) = (Relay::to(&peer, u64::MAX), Arc::new(Pause::default()), Monitor::new("clone"));
    let (outgoing, ready) = clone(&ram, &pause, Writes::default());
    let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(8 * MIB), ..options() };
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| migrate(outgoing, &relay.address, &options, &Source::default(), &monitor));
        ready.recv().expect("it waits for the pause");
        pause.over(&saved(), &Arc::new(Image::default()));
        until("it runs", || monitor.progress().phase == Phase::Postcopy);
        until("some pages went", || (1..PAGES * 3 / 4).contains(&monitor.progress().pages_left));
        relay.cut();
        relay.restore();
        going.join().unwrap()
    });
    let report = outcome.report;
    assert_eq!((outcome.fate, report.status), (Fate::There, Status::Completed), "{:?}", report.error);
    assert!(report.postcopy.interruptions >= 1, "{:?}", report.postcopy);
    nothing_wrong(&seen);
    host.assert_same(&ram);
}

#[test]
fn a_clone_whose_source_is_not_forked_is_given_up_and_a_link_that_ends_before_is_told() {
    let ram = filled_ram();
    let (host, peer, _seen) = destination(&ram, Program::Ascending);
    let pause = Arc::new(Pause::default());
    let (outgoing, ready) = clone(&ram, &pause, Writes::default());
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| migrate(outgoing, &peer, &options(), &Source::default(), &Monitor::new("clone")));
        ready.recv().expect("it waits for the pause");
        pause.came_to_nothing();
        going.join().unwrap()
    });
    assert_eq!(outcome.fate, Fate::Here, "it never was anywhere");
    until("it is given up there", || host.aborted.load(Ordering::Acquire));
    assert!(!host.running.load(Ordering::Acquire));
    // What is over stays so.
    let pause = Arc::new(Pause::default());
    pause.over(&saved(), &Arc::new(Image::default()));
    pause.came_to_nothing();
    pause.nobody_writes().expect("it is over");
    // Nobody answers.
    let (outgoing, ready) = clone(&ram, &pause, Writes::default());
    let outcome = migrate(outgoing, "127.0.0.1:1", &options(), &Source::default(), &Monitor::new("clone"));
    assert!(outcome.fate == Fate::Here && ready.recv().is_err());
}

/// A daemon that is too old lacks the feature, and is asked for nothing.
#[test]
fn a_daemon_that_knows_no_clones_is_refused_before_anything_is_asked_of_it() {
    let ram = filled_ram();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let old = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a call");
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes).expect("a hello");
        let hello = Hello::decode(&bytes).expect("a hello");
        assert!(hello.needed.contains(Features::CLONES));
        let answer = Hello { features: Features::KNOWN.without(Features::CLONES), needed: Features::NONE, ..hello };
        stream.write_all(&answer.encode()).expect("an answer");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest
    });
    let (outgoing, ready) = clone(&ram, &Arc::default(), Writes::default());
    let outcome = migrate(outgoing, &address, &options(), &Source::default(), &Monitor::new("clone"));
    assert!(outcome.fate == Fate::Here && ready.recv().is_err());
    let problem = outcome.report.error.expect("it is refused");
    assert!(problem.with_causes().contains("clones from other hosts"), "{}", problem.with_causes());
    assert_eq!(old.join().expect("the old daemon"), [0; 0], "it is asked for something");
}
