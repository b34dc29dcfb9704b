//! The VMM's process in tests of memory: this one.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sterna_sys::map::{PrivateMapping, SharedMapping};
use sterna_sys::userfaultfd::{self, Features, Userfaultfd};

use crate::agent::{Advice, Discards, MapRun};
use crate::error::MigrateError;
use crate::inside::Inside;

/// A mapping of this process, as the agent knows QEMU's.
pub trait Mapped: Send + Sync {
    /// Where it is.
    fn addresses(&self) -> Range<u64>;

    /// Advises `MADV_DONTNEED` for a range of its bytes.
    fn dont_need(&self, range: Range<u64>) -> sterna_sys::Result<()>;

    /// Advises for or against huge pages.
    fn advise_huge(&self, _: bool) -> sterna_sys::Result<()> {
        unreachable!("it is not asked for")
    }

    /// Maps anonymous memory there, where that is no file of others.
    fn map_own(&self, _: Range<u64>) -> sterna_sys::Result<()> {
        unreachable!("it has no areas")
    }

    /// Maps a part of a file there, copy-on-write, where that is no file of others.
    fn lay(&self, _: u64, _: BorrowedFd<'_>, _: Range<u64>) -> sterna_sys::Result<()> {
        unreachable!("it has no areas")
    }
}

impl Mapped for SharedMapping {
    fn addresses(&self) -> Range<u64> {
        self.addresses()
    }

    fn dont_need(&self, range: Range<u64>) -> sterna_sys::Result<()> {
        self.dont_need(range)
    }

    fn advise_huge(&self, huge: bool) -> sterna_sys::Result<()> {
        self.advise_huge(huge)
    }
}

impl Mapped for PrivateMapping {
    fn addresses(&self) -> Range<u64> {
        self.addresses()
    }

    fn dont_need(&self, range: Range<u64>) -> sterna_sys::Result<()> {
        self.discard(range)
    }

    fn map_own(&self, range: Range<u64>) -> sterna_sys::Result<()> {
        self.renew(range)
    }

    fn lay(&self, offset: u64, file: BorrowedFd<'_>, part: Range<u64>) -> sterna_sys::Result<()> {
        self.lay(offset, file, part)
    }
}

/// This process as the VMM, whose RAM these mappings are.
pub struct InsideHere<M>(pub Arc<Vec<M>>);

impl<M: Mapped> InsideHere<M> {
    /// Does something to each range, as bytes of its mapping.
    fn each(&self, ranges: &[Range<u64>], act: impl Fn(&M, Range<u64>)) {
        for range in ranges {
            let mapping = self.0.iter().find(|mapping| mapping.addresses().contains(&range.start));
            let mapping = mapping.expect("an address of the guest's RAM");
            let start = mapping.addresses().start;
            act(mapping, range.start - start..range.end - start);
        }
    }
}

impl<M: Mapped> Inside for InsideHere<M> {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let made = Userfaultfd::create(userfaultfd::open_device().expect("the device")).expect("a userfaultfd");
        made.enable(features).expect("the features");
        Ok(made)
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        self.open(features)
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        Ok(None)
    }

    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.each(ranges, |mapping, range| match advice {
            Advice::DontNeed => mapping.dont_need(range).expect("page tables without these"),
            Advice::NoHugePage => mapping.advise_huge(false).expect("small pages"),
            _ => unreachable!("no kind of memory asks for this"),
        });
        Ok(())
    }

    fn map_own(&mut self, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.each(ranges, |mapping, range| mapping.map_own(range).expect("anonymous memory"));
        Ok(())
    }

    fn map(&mut self, file: BorrowedFd<'_>, runs: &[MapRun]) -> Result<(), MigrateError> {
        for run in runs {
            let addresses = run.at.address..run.at.address + run.at.length;
            self.each(&[addresses], |mapping, range| {
                let part = run.offset..run.offset + run.at.length;
                mapping.lay(range.start, file, part).expect("the file, mapped");
            });
        }
        Ok(())
    }

    fn map_missing(&mut self, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.map_own(ranges)
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn discards(&mut self) -> Discards {
        Discards::Ranges(Vec::new())
    }

    fn close(&mut self) {}
}

/// How a process maps parts of a file.
pub type Maps<M> = dyn FnMut(&mut InsideHere<M>, BorrowedFd<'_>, &[MapRun]) -> Result<(), MigrateError> + Send;

/// This process as a VMM that maps parts of a file in a way of its own, or does not.
pub struct MapsItsWay<M>(pub InsideHere<M>, pub Box<Maps<M>>);

impl<M: Mapped> Inside for MapsItsWay<M> {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        self.0.open(features)
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        self.0.open_alone(features)
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        self.0.lend()
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        self.0.log_discards()
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        self.0.reopen()
    }

    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.0.advise(advice, ranges)
    }

    fn map(&mut self, file: BorrowedFd<'_>, runs: &[MapRun]) -> Result<(), MigrateError> {
        (self.1)(&mut self.0, file, runs)
    }

    fn pid(&self) -> u32 {
        self.0.pid()
    }

    fn discards(&mut self) -> Discards {
        self.0.discards()
    }

    fn close(&mut self) {
        self.0.close();
    }
}
