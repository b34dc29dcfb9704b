//! The order of a replacement, with VMMs that do as they are told.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use sterna_sys::map::{Access, SharedMapping};

use super::*;
use crate::memory::{BlockFile, kind};

type Told = Arc<Mutex<Vec<&'static str>>>;

fn note(told: &Told, what: &'static str) {
    told.lock().unwrap().push(what);
}

fn wrong() -> VmmError {
    VmmError::Migration { reason: "as it was told".into() }
}

/// Both VMMs and their daemon; one of them fails at a step.
struct Player {
    told: Told,
    fails: &'static str,
    /// The other end of the devices' way.
    ends: Vec<UnixStream>,
    /// More devices than their way holds, whose other end nobody reads.
    floods: bool,
    /// Its end of the devices' way, and what it reads there to load them, where a test has the other one.
    given: Option<(UnixStream, UnixStream)>,
    /// What it has loaded.
    devices: Vec<u8>,
}

impl Player {
    fn new(told: &Told, fails: &'static str) -> Self {
        Self { told: Arc::clone(told), fails, ends: Vec::new(), floods: false, given: None, devices: Vec::new() }
    }

    fn step(&self, what: &'static str) -> Result<(), VmmError> {
        note(&self.told, what);
        if self.fails == what { Err(wrong()) } else { Ok(()) }
    }

    fn way(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.ends.push(theirs);
        ours
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
        self.step("begin")?;
        Ok(self.way())
    }

    fn stopped(&mut self, _timeout: Duration) -> Result<Option<Stopped>, VmmError> {
        self.step("stopped")?;
        Ok(Some(Stopped { stop: EventTime(1), ready: EventTime(2) }))
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        self.step("save")?;
        let mut way = self.ends.remove(0);
        way.write_all(b"devices").unwrap();
        way.set_nonblocking(true).unwrap();
        while self.floods && way.write(&[0; 4096]).is_ok() {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn saved(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        self.step("saved")
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        self.step("rollback")
    }

    fn ended(&mut self) -> Option<VmmError> {
        None
    }

    fn quit(&mut self) {
        note(&self.told, "the former one quits");
    }
}

impl Destination for Player {
    fn prepare(&mut self) -> Result<UnixStream, VmmError> {
        self.step("wait")?;
        match &self.given {
            Some((ours, _)) => Ok(ours.try_clone().unwrap()),
            None => Ok(self.way()),
        }
    }

    fn loaded(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        if let Some((_, theirs)) = &mut self.given {
            theirs.set_read_timeout(None).unwrap();
            theirs.read_to_end(&mut self.devices).unwrap();
        }
        self.step("loaded")
    }

    fn alive(&mut self) -> Result<(), VmmError> {
        self.step("alive")
    }

    fn start(&mut self) -> Result<EventTime, VmmError> {
        self.step("start")?;
        Ok(EventTime(9))
    }

    fn quit(&mut self) {
        note(&self.told, "the new one quits");
    }
}

/// The daemon; `writes` is done when the guest has stopped.
struct Daemon<'a> {
    player: Player,
    writes: Box<dyn FnMut() + 'a>,
    /// The new VMM has RAM of its own at first. Then its end of the devices' way is looked at.
    moves: Option<UnixStream>,
}

impl Keeper for Daemon<'_> {
    fn moves_ram(&self) -> bool {
        self.moves.is_some()
    }

    fn move_ram(&mut self) -> Result<(), MigrateError> {
        if let Some(way) = &self.moves {
            way.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let early = (&mut &*way).read(&mut [0; 8]);
            assert!(early.is_err(), "it has got devices before it has the guest's RAM: {early:?}");
        }
        Ok(self.player.step("move RAM")?)
    }

    fn stopped(&mut self) -> Result<(), MigrateError> {
        self.player.step("change hands")?;
        (self.writes)();
        Ok(())
    }

    fn commit(&mut self) -> Result<(), MigrateError> {
        Ok(self.player.step("commit")?)
    }

    fn end_successor(&mut self) {
        note(&self.player.told, "the new one ends");
    }
}

/// RAM of this process, a file on tmpfs of which it has touched nothing.
struct Ram {
    file: std::fs::File,
    map: SharedMapping,
}

impl Ram {
    fn new() -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let map = SharedMapping::new(&file, 1 << 20, Access::ReadWrite).unwrap();
        Self { file, map }
    }

    fn watched(&self) -> Untouched {
        Untouched::of(std::process::id(), vec![self.map.addresses()]).unwrap()
    }
}

fn hand(fails: &'static str, running: bool) -> (Result<HandedOver, Stayed>, Vec<&'static str>) {
    let (told, ram) = (Told::default(), Ram::new());
    let untouched = ram.watched();
    let (mut former, mut successor) = (Player::new(&told, fails), Player::new(&told, fails));
    let mut daemon = Daemon { player: Player::new(&told, fails), writes: Box::new(|| {}), moves: None };
    let handed = hand_over((&mut former, &mut successor), &untouched, &mut daemon, running, None);
    let told = std::mem::take(&mut *told.lock().unwrap());
    (handed, told)
}

#[test]
fn the_guest_runs_in_its_new_vmm_once_that_is_on_record_and_not_before() {
    let (handed, told) = hand("nothing", true);
    assert_eq!(handed.unwrap().start, Some(EventTime(9)));
    let order =
        ["prepare", "wait", "begin", "stopped", "save", "change hands", "saved", "loaded", "alive", "commit", "start"];
    assert_eq!(told, order);
    let (handed, told) = hand("nothing", false);
    assert_eq!(handed.unwrap().start, None, "its user had paused it");
    assert_eq!(told, order[..10]);
}

#[test]
fn whatever_fails_before_that_the_new_vmm_has_ended_when_the_guest_goes_on_in_the_former() {
    for fails in ["prepare", "wait", "begin", "stopped", "save", "change hands", "saved", "loaded", "alive", "commit"] {
        let (handed, told) = hand(fails, true);
        let stayed = handed.unwrap_err();
        assert!(stayed.stopped.is_none(), "{stayed:?}");
        assert_eq!(told[told.len() - 2..], ["the new one ends", "rollback"], "{fails}: {told:?}");
        assert!(!told.contains(&"start"));
    }
}

#[test]
fn a_vmm_with_ram_of_its_own_gets_the_guest_s_before_it_gets_any_device() {
    for (fails, ends) in [("nothing", ["commit", "start"]), ("move RAM", ["the new one ends", "rollback"])] {
        let (told, ram) = (Told::default(), Ram::new());
        let (mut former, mut successor) = (Player::new(&told, fails), Player::new(&told, fails));
        let (ours, theirs) = UnixStream::pair().unwrap();
        successor.given = Some((ours, theirs.try_clone().unwrap()));
        let mut daemon = Daemon { player: Player::new(&told, fails), writes: Box::new(|| {}), moves: Some(theirs) };
        let ways = (&mut former as &mut dyn Source, &mut successor as &mut dyn Destination);
        let handed = hand_over(ways, &ram.watched(), &mut daemon, true, None);
        assert_eq!(handed.is_ok(), fails == "nothing");
        let told = told.lock().unwrap();
        assert!(told.ends_with(&ends), "{told:?}");
        let at = |what| told.iter().position(|told| *told == what);
        assert!(at("saved") < at("move RAM") && at("loaded").is_none_or(|loaded| Some(loaded) > at("move RAM")));
        assert_eq!(successor.devices, if fails == "nothing" { &b"devices"[..] } else { b"" });
    }
}

/// Did not end while the thread that carries the devices' state was waited for.
#[test]
fn a_new_vmm_that_hangs_amid_the_devices_way_holds_nobody_up() {
    let (told, ram) = (Told::default(), Ram::new());
    let (mut former, mut successor) = (Player::new(&told, ""), Player::new(&told, "loaded"));
    former.floods = true;
    let mut daemon = Daemon { player: Player::new(&told, ""), writes: Box::new(|| {}), moves: None };
    let ends = (&mut former as &mut dyn Source, &mut successor as &mut dyn Destination);
    hand_over(ends, &ram.watched(), &mut daemon, true, None).unwrap_err();
    assert!(told.lock().unwrap().ends_with(&["the new one ends", "rollback"]));
}

#[test]
fn a_guest_that_is_on_record_as_the_new_vmm_s_never_goes_back() {
    let (handed, told) = hand("start", true);
    let handed = handed.unwrap();
    assert!(handed.waits.is_some() && handed.start.is_none());
    assert!(!told.contains(&"rollback"), "{told:?}");
}

/// Fails where nobody looks whether the new VMM has touched RAM.
#[test]
fn a_vmm_that_touched_ram_too_early_does_not_get_the_guest() {
    let (told, ram) = (Told::default(), Ram::new());
    let untouched = ram.watched();
    assert_eq!(untouched.touched().unwrap(), 0, "the file has pages or not, this process has touched none");
    // A look is enough: what only reads might as well write.
    ram.map.copy_out(0..64, &mut [0; 64]);
    assert!(untouched.touched().unwrap() > 0);
    let (mut former, mut successor) = (Player::new(&told, ""), Player::new(&told, ""));
    let mut daemon = Daemon { player: Player::new(&told, ""), writes: Box::new(|| {}), moves: None };
    let stayed = hand_over((&mut former, &mut successor), &untouched, &mut daemon, true, None).unwrap_err();
    assert!(matches!(*stayed.why, MigrateError::TouchedEarly(_)), "{stayed:?}");
    assert!(told.lock().unwrap().ends_with(&["the new one ends", "rollback"]));
}

#[test]
fn a_page_that_changes_on_the_devices_way_is_found_where_that_is_asked_for() {
    use std::os::unix::fs::FileExt;
    let (told, ram) = (Told::default(), Ram::new());
    let untouched = Untouched::of(std::process::id(), Vec::new()).unwrap();
    let spec =
        sterna_protocol::spec::BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
    let block =
        BlockFile { file: ram.file.try_clone().unwrap(), address: ram.map.addresses().start, spec, process: None };
    let memory = kind::open(&[block], Access::Read).unwrap();
    for (bytes, mismatches) in [(&[0_u8][..], 0), (&[1_u8][..], 1)] {
        let (mut former, mut successor) = (Player::new(&told, ""), Player::new(&told, ""));
        let writes = Box::new(|| ram.file.write_all_at(bytes, 0x7000).unwrap());
        let mut daemon = Daemon { player: Player::new(&told, ""), writes, moves: None };
        let handed = hand_over(
            (&mut former, &mut successor),
            &untouched,
            &mut daemon,
            true,
            Some((memory.as_ref(), memory.as_ref())),
        );
        match handed {
            Ok(handed) => assert_eq!((handed.verify.checked, handed.verify.pages, mismatches), (true, 256, 0)),
            Err(stayed) => {
                let found =
                    matches!(*stayed.why, MigrateError::ChangedOnTheWay { changed, .. } if changed == mismatches);
                assert!(found && mismatches == 1, "{stayed:?}");
            }
        }
    }
}
