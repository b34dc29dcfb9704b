//! The page map of a process: which pages were written, and arming them again.
//!
//! This is `PAGEMAP_SCAN` on `/proc/PID/pagemap` (kernel's `Documentation/admin-guide/mm/pagemap.rst`). It works on any
//! process that the caller may trace. It does not see writes through another mapping of the same file, writes into
//! pages that were pinned before arming (direct I/O in flight, registered buffers), and discards (the mark of an armed
//! page outlives them).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general as raw;

use crate::PAGE_BYTES;
use crate::abi;
use crate::error::{Error, Result};

/// Runs of pages that one call of the kernel can return: 1.5 MiB of buffer. A scan with more to say takes several
/// calls.
pub const REGIONS_PER_CALL: usize = 64 * 1024;

bitflags::bitflags! {
    /// The categories of a page (`PAGE_IS_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Categories: u64 {
        /// Its mapping is registered for asynchronous write protection.
        const TRACKED = raw::PAGE_IS_WPALLOWED as u64;
        /// Written since it was armed, or never armed: true of every unarmed page, whether it is there or not.
        const WRITTEN = raw::PAGE_IS_WRITTEN as u64;
        /// Of a file or of shared memory, not anonymous.
        const FILE = raw::PAGE_IS_FILE as u64;
        /// Mapped in this process.
        const PRESENT = raw::PAGE_IS_PRESENT as u64;
        /// Swapped out, or an armed hole: the kernel shows both the same way.
        const SWAPPED = raw::PAGE_IS_SWAPPED as u64;
        /// The shared page of zeros.
        const ZERO_PAGE = raw::PAGE_IS_PFNZERO as u64;
        /// Part of a huge page.
        const HUGE = raw::PAGE_IS_HUGE as u64;
        /// Written since soft-dirty bits were cleared, on kernels that have them.
        const SOFT_DIRTY = raw::PAGE_IS_SOFT_DIRTY as u64;
        /// A guard page.
        const GUARD = raw::PAGE_IS_GUARD as u64;
    }
}

/// A run of pages of which the same is true. The layout is the kernel's `struct page_region`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    /// The first byte.
    pub start: u64,
    /// The byte behind the last.
    pub end: u64,
    /// Their categories, among those that [`Scan::report`] asks for.
    pub categories: Categories,
}

const _: () = assert!(size_of::<Region>() == size_of::<abi::page_region>());

impl Region {
    /// The addresses of the run.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE_BYTES
    }
}

/// A scan: the pages to look for, and what to do with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan {
    /// Pages of which all of these are true …
    pub all: Categories,
    /// … and at least one of these, unless this is empty …
    pub any: Categories,
    /// … where each of these counts as true when it is false.
    pub inverted: Categories,
    /// The categories that the regions report; regions are split where these differ.
    pub report: Categories,
    /// Arm every page found, in the same step: a write after it is found by the next scan, a write before it was found
    /// by this.
    pub arm: bool,
}

impl Scan {
    /// A scan for pages of which all of `categories` are true; it reports these.
    pub const fn of(categories: Categories) -> Self {
        Self {
            all: categories,
            any: Categories::empty(),
            inverted: Categories::empty(),
            report: categories,
            arm: false,
        }
    }

    /// The same scan, which reports `report`.
    pub const fn reporting(self, report: Categories) -> Self {
        Self { report, ..self }
    }

    /// The same scan, which also arms the pages that it finds.
    pub const fn arming(self) -> Self {
        Self { arm: true, ..self }
    }
}

/// `/proc/PID/pagemap` of a process. It stays with the process's memory: after `execve` or exit it never shows
/// another's.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// The page map of another process, for the memory that it has now. A child that was just spawned may not have left
    /// its parent's memory yet (`vfork`): wait for something that only the new program does.
    ///
    /// # Errors
    /// No such process, or this one may not trace it.
    pub fn open(pid: u32) -> Result<Self> {
        Self::open_path(format!("/proc/{pid}/pagemap"))
    }

    /// The page map of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> Result<Self> {
        Self::open_path("/proc/self/pagemap".to_owned())
    }

    fn open_path(path: String) -> Result<Self> {
        match File::open(&path) {
            Ok(file) => Ok(Self { file }),
            Err(error) => Err(Error::new(format!("open {path}"), error)),
        }
    }

    /// Pages of `range` that match, in ascending order, into `regions` (emptied first; its capacity grows to one region
    /// per page of the range, at most [`REGIONS_PER_CALL`], so reuse one vector). Addresses where nothing is mapped are
    /// passed over.
    ///
    /// # Errors
    /// `EPERM` when arming: part of the range is not registered for asynchronous write protection. `ESRCH`: the process
    /// has ended. `EINTR`: this thread is being killed. After an error of an arming scan some pages may have been armed
    /// and not returned: tracking must begin anew.
    pub fn scan(&self, range: Range<u64>, scan: Scan, regions: &mut Vec<Region>) -> Result<()> {
        regions.clear();
        let mut at = range.start;
        while at < range.end {
            regions.reserve(REGIONS_PER_CALL.min((range.end - at).div_ceil(PAGE_BYTES) as usize));
            let known = regions.len();
            let free = regions.spare_capacity_mut();
            let mut arg = abi::pm_scan_arg {
                size: size_of::<abi::pm_scan_arg>() as u64,
                // Without the check, unregistered parts would be passed over silently.
                flags: if scan.arm { u64::from(raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC) } else { 0 },
                start: at,
                end: range.end,
                walk_end: 0,
                vec: free.as_mut_ptr() as u64,
                vec_len: free.len() as u64,
                max_pages: 0,
                category_inverted: scan.inverted.bits(),
                category_mask: scan.all.bits(),
                category_anyof_mask: scan.any.bits(),
                return_mask: scan.report.bits(),
            };
            // SAFETY: `vec` points to room for `vec_len` regions, which live in `regions` until the call returns; `arg`
            // is what PAGEMAP_SCAN takes, and a file that is no pagemap refuses the number.
            let found = unsafe { abi::ioctl(self.file.as_fd(), abi::PAGEMAP_SCAN, &mut arg) }
                .map_err(|error| Error::new("scan the page map of a process", error))?;
            // SAFETY: the kernel has initialised `found` regions, no more than there was room for; any bit pattern is a
            // `Region`.
            unsafe { regions.set_len(known + found as usize) };
            join_at(regions, known);
            if arg.walk_end <= at {
                // This does not happen, because a full buffer holds at least one page. But never loop on it.
                return Err(Error::malformed("scan the page map of a process", "the kernel made no progress"));
            }
            at = arg.walk_end;
        }
        self.is_alive()
    }

    /// Checks that the process's memory is still there. Some kernels (seen: 6.18) scan the memory of an ended process
    /// as if nothing were mapped, which looks as if nothing was written. There a read of the page map ends at once.
    /// Memory does not come back: memory that lives after a scan lived throughout it.
    ///
    /// # Errors
    /// `ESRCH`: it is gone.
    pub fn is_alive(&self) -> Result<()> {
        let doing = "scan the page map of a process";
        match self.file.read_at(&mut [0; 8], 0) {
            Ok(0) => Err(Error::new(doing, rustix::io::Errno::SRCH)),
            Ok(_) => Ok(()),
            Err(error) => Err(Error::new(doing, error)),
        }
    }

    /// Pages written since they were last armed, armed again in the same step. Pages never armed count as written,
    /// holes too.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn written_and_arm(&self, range: Range<u64>, regions: &mut Vec<Region>) -> Result<()> {
        self.scan(range, Scan::of(Categories::WRITTEN).arming(), regions)
    }

    /// Of private memory, pages of the process's own that were written since they were last armed, armed again in the
    /// same step: a page of a file is none, and becomes one by the first write. What is a file's, and holes, are not
    /// armed, which takes page tables for all of them.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn own_written_and_arm(&self, range: Range<u64>, regions: &mut Vec<Region>) -> Result<()> {
        let own = Scan {
            all: Categories::WRITTEN | Categories::FILE,
            any: Categories::PRESENT | Categories::SWAPPED,
            inverted: Categories::FILE,
            report: Categories::WRITTEN,
            arm: true,
        };
        self.scan(range, own, regions)
    }

    /// Pages written since they were last armed: a look that changes nothing.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn written(&self, range: Range<u64>, regions: &mut Vec<Region>) -> Result<()> {
        self.scan(range, Scan::of(Categories::WRITTEN), regions)
    }

    /// Pages of `range` that are mapped by a huge page, in ascending order, into `regions` (emptied first).
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn huge(&self, range: Range<u64>, regions: &mut Vec<Region>) -> Result<()> {
        self.scan(range, Scan::of(Categories::HUGE.union(Categories::PRESENT)), regions)
    }

    /// Pages of `range`, which is private memory, that have content of their own, in ascending order, into `regions`
    /// (emptied first): those that are mapped and not to the page of zeros, and those that are swapped out. A page that
    /// moves at this moment counts. A marker does not, nor does a page of a file that is mapped there privately.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn with_content(&self, range: Range<u64>, regions: &mut Vec<Region>) -> Result<()> {
        let either = Scan {
            any: Categories::PRESENT | Categories::SWAPPED,
            report: Categories::SWAPPED | Categories::ZERO_PAGE | Categories::FILE,
            ..Scan::of(Categories::empty())
        };
        self.scan(range, either, regions)?;
        if regions.iter().all(|region| region.categories.is_empty()) {
            return Ok(());
        }
        let mut entries = Vec::new();
        let mut kept: Vec<Region> = Vec::with_capacity(regions.len());
        for region in std::mem::take(regions) {
            if region.categories.is_empty() {
                keep(&mut kept, region);
            } else if region.categories.contains(Categories::SWAPPED) {
                self.entries(region.range(), &mut entries)?;
                for (at, entry) in region.range().step_by(PAGE_BYTES as usize).zip(&entries) {
                    // It may have come back since the scan.
                    if !entry.file() && (entry.present() || entry.swapped() && !entry.marker()) {
                        keep(&mut kept, Region { start: at, end: at + PAGE_BYTES, categories: Categories::empty() });
                    }
                }
            }
        }
        *regions = kept;
        self.is_alive()
    }

    /// How much of `range`, which is private memory, is in pages that have content of their own, bytes.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn content_bytes(&self, range: Range<u64>) -> Result<u64> {
        let mut regions = Vec::new();
        self.with_content(range, &mut regions)?;
        Ok(regions.iter().map(|region| region.end - region.start).sum())
    }

    /// Reads the page map's entry of each page of `range` into `entries` (emptied first). This costs about 30 ns a
    /// page.
    ///
    /// # Errors
    /// The range is not of this process's address space, or the process has ended.
    pub fn entries(&self, range: Range<u64>, entries: &mut Vec<Entry>) -> Result<()> {
        entries.clear();
        let mut buffer = [0u8; 8 * 512];
        let mut page = range.start / PAGE_BYTES;
        let end = range.end.div_ceil(PAGE_BYTES);
        while page < end {
            let pages = usize::try_from(end - page).unwrap_or(usize::MAX).min(buffer.len() / 8);
            let room = &mut buffer[..pages * 8];
            self.file
                .read_exact_at(room, page * 8)
                .map_err(|error| Error::new("read the page map of a process", error))?;
            entries.extend(
                room.chunks_exact(8).map(|entry| Entry(u64::from_ne_bytes(entry.try_into().expect("8 bytes")))),
            );
            page += pages as u64;
        }
        Ok(())
    }
}

/// Adds a region of pages, of which nothing more is said, behind the others.
fn keep(kept: &mut Vec<Region>, region: Region) {
    match kept.last_mut() {
        Some(last) if last.end == region.start => last.end = region.end,
        _ => kept.push(Region { categories: Categories::empty(), ..region }),
    }
}

/// Joins one call's last region and the next call's first, where they are of one kind and touch.
fn join_at(regions: &mut Vec<Region>, seam: usize) {
    let Some([before, after]) = seam.checked_sub(1).and_then(|first| regions.get(first..=seam)) else { return };
    if before.end == after.start && before.categories == after.categories {
        regions[seam - 1].end = after.end;
        regions.remove(seam);
    }
}

/// A page's entry in `/proc/PID/pagemap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry(pub u64);

impl Entry {
    const PFN: u64 = (1 << 55) - 1;

    /// Whether the page is mapped.
    pub fn present(self) -> bool {
        self.0 & (1 << 63) != 0
    }

    /// Whether it is swapped out, or a write-protected hole.
    pub fn swapped(self) -> bool {
        self.0 & (1 << 62) != 0
    }

    /// Whether it is only a marker: there is no page, and what the kernel keeps in its place says something about
    /// accesses to come (that a write is to be noticed, for example). It looks swapped out; of the numbers that the
    /// kernel gives to areas of swap, the last stands for markers (`SWP_PTE_MARKER` in its `include/linux/swap.h`).
    /// Only for a reader with `CAP_SYS_ADMIN`.
    pub fn marker(self) -> bool {
        const AREA: u64 = 0x1f;
        self.swapped() && self.0 & AREA == AREA
    }

    /// Whether it is of a file or of shared memory.
    pub fn file(self) -> bool {
        self.0 & (1 << 61) != 0
    }

    /// Whether a userfaultfd write-protects it.
    pub fn protected(self) -> bool {
        self.0 & (1 << 57) != 0
    }

    /// Whether it is mapped here and nowhere else.
    pub fn exclusive(self) -> bool {
        self.0 & (1 << 56) != 0
    }

    /// The page frame that it is mapped to, if it is mapped and the reader has `CAP_SYS_ADMIN`.
    pub fn frame(self) -> Option<u64> {
        let frame = self.0 & Self::PFN;
        (self.present() && frame != 0).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(start: u64, end: u64, categories: Categories) -> Region {
        Region { start, end, categories }
    }

    #[test]
    fn regions_of_two_calls_are_joined_where_they_touch_and_are_alike() {
        let (written, present) = (Categories::WRITTEN, Categories::PRESENT);
        let mut regions = vec![region(0, 4, written), region(4, 8, written), region(12, 16, written)];
        join_at(&mut regions, 1);
        assert_eq!(regions, [region(0, 8, written), region(12, 16, written)]);
        join_at(&mut regions, 1);
        assert_eq!(regions.len(), 2, "a gap lies between");
        regions.push(region(16, 20, present));
        join_at(&mut regions, 2);
        assert_eq!(regions.len(), 3, "they are not alike");
        join_at(&mut regions, 0);
        join_at(&mut regions, 3);
        assert_eq!(regions.len(), 3, "nothing lies on the other side");
    }
}
