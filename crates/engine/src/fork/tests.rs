//! The order of a fork, with a VMM that does as it is told.

use std::io::Write;
use std::sync::{Arc, Mutex};

use super::*;

type Told = Arc<Mutex<Vec<&'static str>>>;

/// A VMM; it fails at a step.
struct Player {
    told: Told,
    fails: &'static str,
    /// The other end of the devices' way.
    end: Option<UnixStream>,
}

fn player(fails: &'static str) -> Player {
    Player { told: Told::default(), fails, end: None }
}

impl Player {
    fn step(&self, what: &'static str) -> Result<(), VmmError> {
        self.told.lock().unwrap().push(what);
        if self.fails == what { Err(VmmError::Migration { reason: "as it was told".into() }) } else { Ok(()) }
    }
}

impl Source for Player {
    fn prepare(&mut self) -> Result<(), VmmError> {
        self.step("prepare")
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        Ok(true)
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        Ok(Vec::new())
    }

    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.end = Some(theirs);
        self.step("begin").map(|()| ours)
    }

    fn stopped(&mut self, _: Duration) -> Result<Option<Stopped>, VmmError> {
        let at = Stopped { stop: EventTime(1000), ready: EventTime(1100) };
        self.step("stop").map(|()| Some(at))
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        self.step("save")?;
        let mut end = self.end.take().unwrap();
        end.write_all(b"devices").unwrap();
        Ok(())
    }

    fn saved(&mut self, _: Duration) -> Result<(), VmmError> {
        self.step("saved")
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        self.step("run on")
    }

    fn resumed(&mut self) -> Option<EventTime> {
        Some(EventTime(2000))
    }

    fn ended(&mut self) -> Option<VmmError> {
        None
    }

    fn quit(&mut self) {}
}

fn forked(player: &mut Player) -> (Result<Saved, NotSaved>, Vec<&'static str>) {
    let told = Arc::clone(&player.told);
    let fails = player.fails == "keep";
    let mut keep = || {
        told.lock().unwrap().push("keep");
        if fails { Err(MigrateError::Bug("as it was told")) } else { Ok(()) }
    };
    let saved = save(player, &mut keep);
    let told = player.told.lock().unwrap().clone();
    (saved, told)
}

#[test]
fn ram_is_kept_when_the_devices_are_saved_and_before_the_guest_runs() {
    let (saved, told) = forked(&mut player(""));
    let saved = saved.expect("forked");
    assert_eq!(told, ["prepare", "begin", "stop", "save", "saved", "keep", "run on"]);
    assert_eq!(saved.devices, b"devices");
    assert_eq!((saved.stopped.stop, saved.resumed), (EventTime(1000), Some(EventTime(2000))));
}

#[test]
fn whatever_fails_the_guest_runs_on_last_of_all() {
    for fails in ["prepare", "begin", "stop", "save", "saved", "keep"] {
        let (saved, told) = forked(&mut player(fails));
        assert!(saved.expect_err(fails).waits.is_none());
        assert_eq!(told.last(), Some(&"run on"), "{fails}");
        assert!(fails == "keep" || !told.contains(&"keep"), "{fails}: RAM is touched for nothing");
    }
}

#[test]
fn a_guest_that_its_vmm_does_not_let_run_is_told() {
    let (saved, _) = forked(&mut player("run on"));
    let saved = saved.expect("its image is there all the same");
    assert!(saved.waits.is_some() && saved.resumed.is_none());
}
