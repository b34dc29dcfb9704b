//! The source of a migration: a VMM whose guest is the writers, and a daemon.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_api::Problem;
use sterna_engine::host::{DaemonId, MigrationId, SourceHost};
use sterna_engine::transport::clock::now_us;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::{self, EventTime, MappedRam, Stopped, Untracked, VmmError};
use sterna_introspect::PageTables;

use super::guest::Writers;

/// What happens to a VMM on purpose.
#[derive(Default)]
pub struct Faults {
    /// At the first look it does not say yet that the guest has stopped.
    pub stop_is_told_late: bool,
    pub at_stop: Option<Box<dyn FnOnce() + Send>>,
    pub while_saving: Option<Box<dyn FnOnce() + Send>>,
    /// Before it says that it has saved them.
    pub before_saved: Option<Box<dyn FnOnce() + Send>>,
    pub switched_off: Arc<AtomicBool>,
    /// Who writes RAM past the page tables, as it says when it is asked.
    pub writes_untracked: Untracked,
}

/// A source "VMM": its guest is the writers, its devices 300,000 bytes.
pub struct SourceVmm {
    pub writers: Option<Writers>,
    pub faults: Faults,
    pub rolled_back: Arc<AtomicBool>,
    /// How often it still refuses to be rolled back.
    pub refuse_rollback: Arc<AtomicU64>,
    pub quit: Arc<AtomicBool>,
    /// How large its RAM is, from address 0 on, and the page tables of its processors: what looks into a guest from
    /// outside asks for.
    pub kernel: Option<(u64, Vec<PageTables>)>,
    stream: Option<UnixStream>,
}

pub const DEVICE_BYTES: usize = 300_000;

impl SourceVmm {
    pub fn new(writers: Option<Writers>) -> Self {
        let (faults, rolled_back, quit) = (Faults::default(), Arc::default(), Arc::default());
        Self { writers, faults, rolled_back, refuse_rollback: Arc::default(), quit, kernel: None, stream: None }
    }
}

impl vmm::Source for SourceVmm {
    fn prepare(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        Ok(true)
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        Ok(self.writers.iter().map(|writers| writers.id).collect())
    }

    fn memory_map(&mut self) -> Result<Vec<MappedRam>, VmmError> {
        let none = || VmmError::Refused { command: "memory map".into(), reason: "it has no kernel".into() };
        let (bytes, _) = self.kernel.as_ref().ok_or_else(none)?;
        Ok(vec![MappedRam { guest_physical: 0..*bytes, block: "ram".into(), offset: 0 }])
    }

    fn page_tables(&mut self) -> Result<Vec<PageTables>, VmmError> {
        Ok(self.kernel.as_ref().map(|(_, tables)| tables.clone()).unwrap_or_default())
    }

    fn writes_untracked(&mut self) -> Result<Untracked, VmmError> {
        Ok(self.faults.writes_untracked)
    }

    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        self.stream = Some(ours);
        Ok(theirs)
    }

    fn stopped(&mut self, _timeout: Duration) -> Result<Option<Stopped>, VmmError> {
        let stop = EventTime(now_us());
        self.writers.iter_mut().for_each(Writers::stop);
        if let Some(act) = self.faults.at_stop.take() {
            act();
        }
        if std::mem::take(&mut self.faults.stop_is_told_late) {
            return Ok(None);
        }
        Ok(Some(Stopped { stop, ready: EventTime(now_us()) }))
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        if let Some(act) = self.faults.while_saving.take() {
            act();
        }
        let mut stream = self.stream.take().expect("begun");
        std::thread::spawn(move || {
            let _ = stream.write_all(&[7; DEVICE_BYTES]);
        });
        Ok(())
    }

    fn saved(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        if let Some(act) = self.faults.before_saved.take() {
            act();
        }
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        let less = |times: u64| times.checked_sub(1);
        if self.refuse_rollback.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok() {
            return Err(VmmError::Silent { waiting_for: "cont".into(), seconds: 1 });
        }
        self.stream = None;
        self.rolled_back.store(true, Ordering::Release);
        Ok(())
    }

    fn ended(&mut self) -> Option<VmmError> {
        self.faults.switched_off.load(Ordering::Acquire).then_some(VmmError::Gone { guest_off: true })
    }

    fn quit(&mut self) {
        self.quit.store(true, Ordering::Release);
    }
}

/// A source "daemon" that remembers whether it gave a guest away.
#[derive(Default)]
pub struct Source {
    pub handed_over: AtomicBool,
    /// To whom.
    pub handed_to: Mutex<Option<DaemonId>>,
    /// Where its user says that the destination is now.
    pub peer_now: Mutex<Option<String>>,
    pub credentials: Option<Arc<Credentials>>,
}

impl SourceHost for Source {
    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.credentials.clone()
    }

    fn accepted(&self) {}

    fn peer_now(&self, _id: MigrationId) -> Option<String> {
        self.peer_now.lock().unwrap().clone()
    }

    fn handing_over(
        &self,
        _id: MigrationId,
        _peer: &str,
        daemon: Option<DaemonId>,
        _postcopy: bool,
    ) -> Result<(), Problem> {
        self.handed_over.store(true, Ordering::Release);
        *self.handed_to.lock().unwrap() = daemon;
        Ok(())
    }
}
