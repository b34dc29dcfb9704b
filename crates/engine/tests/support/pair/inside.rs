//! A foot inside the VMM's process, which is this one.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sterna_engine::agent::{Advice, Discard, Discards, UnderWay};
use sterna_engine::error::MigrateError;
use sterna_engine::inside::Inside;
use sterna_sys::map::SharedMapping;
use sterna_sys::userfaultfd::{self, Features, Userfaultfd};

/// A foot inside this very process, which keeps a duplicate of the userfaultfd as the agent does.
#[derive(Default)]
pub struct InsideSelf {
    /// The guest's own mappings of its RAM, where it is a destination.
    pub mappings: Arc<Mutex<Vec<Arc<SharedMapping>>>>,
    pub kept: Arc<Mutex<Option<OwnedFd>>>,
    pub discards: Arc<Mutex<Vec<Discard>>>,
    pub overflow: Arc<AtomicBool>,
    /// Tells at each look what is being read into RAM past the page tables, where that is told.
    pub under_way: Option<Box<dyn FnMut() -> UnderWay + Send>>,
}

impl Inside for InsideSelf {
    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        *self.kept.lock().unwrap() = None;
        Ok(())
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let device = userfaultfd::open_device().map_err(MigrateError::kernel("opening /dev/userfaultfd"))?;
        let created = Userfaultfd::create(device).map_err(MigrateError::kernel("making a userfaultfd"))?;
        created.enable(features).map_err(MigrateError::kernel("enabling features"))?;
        Ok(created)
    }

    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let created = self.open_alone(features)?;
        let duplicate = created.as_fd().try_clone_to_owned().map_err(MigrateError::host("keeping a duplicate"))?;
        *self.kept.lock().unwrap() = Some(duplicate);
        Ok(created)
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        let kept = self.kept.lock().unwrap();
        let duplicate = kept.as_ref().map(OwnedFd::try_clone).transpose();
        Ok(duplicate.map_err(MigrateError::host("keeping a duplicate"))?.map(Userfaultfd::from))
    }

    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        let mappings = self.mappings.lock().unwrap();
        if advice == Advice::NoHugePage {
            // A source's mapping is not known here, unless it has huge pages.
            mappings.iter().for_each(|mapping| mapping.advise_huge(false).expect("small pages"));
            return Ok(());
        }
        for range in ranges {
            let of_range = |mapping: &&Arc<SharedMapping>| mapping.addresses().contains(&range.start);
            let mapping = mappings.iter().find(of_range).expect("a guest's mapping");
            let base = mapping.addresses().start;
            let unmapped = mapping.dont_need(range.start - base..range.end - base);
            unmapped.map_err(MigrateError::kernel("unmapping guest RAM"))?;
        }
        Ok(())
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn discards(&mut self) -> Discards {
        if self.overflow.swap(false, Ordering::AcqRel) {
            return Discards::Everything;
        }
        Discards::Ranges(std::mem::take(&mut *self.discards.lock().unwrap()))
    }

    fn under_way(&mut self) -> Result<UnderWay, MigrateError> {
        Ok(self.under_way.as_mut().map_or(UnderWay::Untold, |tells| tells()))
    }

    fn close(&mut self) {
        *self.kept.lock().unwrap() = None;
    }
}
