use std::ops::Range;
use std::time::{Duration, Instant};

use crate::check::{Agreement, agreement};
use crate::counters::{self, ZoneCounters};
use crate::free::{self, Found};
use crate::image;
use crate::layout::{CacheLayout, Layout};
use crate::paging::{Fault, PageTables, Virtual};
use crate::vmcoreinfo::{self, Vmcoreinfo};
use crate::{PAGE_BYTES, Physical, Unreadable, cache, contents};

/// The tries of a look whose result does not agree with the guest's counters: the guest may have been busy.
const ATTEMPTS: u32 = 4;

/// Descriptions that are tried, of all that a guest's RAM holds.
const CANDIDATES: u32 = 64;

/// The offset of the release in a name: `struct new_utsname` has fields of 65 bytes, and the release is the third.
const RELEASE: usize = 2 * 65;

/// The reason why nothing is known about a guest's free pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The guest's RAM holds no description of a kernel: it is no Linux, does not support kdump, or is still starting.
    #[error("the guest's RAM holds no Linux kernel that describes itself (VMCOREINFO)")]
    NoKernel,
    /// A kernel was found, but the guest runs something else: it is starting, in its firmware, or was restarted.
    #[error("the guest's processors do not run the Linux {release} that its RAM holds")]
    NotRunning {
        /// The release that was found.
        release: String,
    },
    /// Another kernel has taken the place of the one that was found: the caller must find it again.
    #[error("the Linux {release} that was found is no longer there")]
    Replaced {
        /// The release that was found.
        release: String,
    },
    /// The kernel does not say where something is. Kernels of other architectures than x86-64 are among these.
    #[error("the guest's kernel does not say {what} in its VMCOREINFO")]
    Missing {
        /// The line that is missing.
        what: String,
    },
    /// Something in the kernel's structures is invalid.
    #[error("the guest's memory contradicts itself: {what}")]
    Malformed {
        /// What is invalid.
        what: String,
    },
    /// The kernel points to an address without RAM.
    #[error("the guest's kernel points to an address without RAM")]
    Unreadable(#[source] Unreadable),
    /// The guest's memory is encrypted.
    #[error("the guest's memory is encrypted")]
    Encrypted,
    /// The kernel checks what its free pages hold (`page_poison=1`).
    #[error("the guest's kernel fills free pages with a pattern and checks it (page_poison)")]
    Poisons,
    /// The kernel looks for misuse of free pages (`debug_pagealloc=on`).
    #[error("the guest's kernel takes free pages out of its page tables (debug_pagealloc)")]
    Hides,
    /// The free pages that were found are not as many as the kernel counts.
    #[error(
        "{found_pages} free pages were found and the guest's kernel counts {counted_pages}: a running guest explains a \
         difference of {allowed_pages} at most"
    )]
    CountersDisagree {
        /// Pages found in the memory map.
        found_pages: u64,
        /// Pages counted by the kernel.
        counted_pages: u64,
        /// The largest difference that is allowed.
        allowed_pages: u64,
    },
}

impl Unfit {
    pub(crate) fn from_fault(fault: Fault, what: &str) -> Self {
        match fault {
            Fault::NotMapped => Self::Malformed { what: format!("{what}: the address is not mapped") },
            Fault::Unreadable(error) => Self::Unreadable(error),
        }
    }

    /// Whether another try soon may succeed: the guest is starting, or was too busy.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NoKernel | Self::NotRunning { .. } | Self::Replaced { .. } | Self::CountersDisagree { .. })
    }
}

/// A Linux kernel found in a guest's RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introspection {
    note: Vmcoreinfo,
    layout: Layout,
}

/// A guest's free pages at one look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Guest-physical page frames, in runs: sorted, disjoint, not adjacent, inside RAM. Each was free at an instant
    /// after the look began; it may be in use again.
    pub free: Vec<Range<u64>>,
    /// Pages in `free`.
    pub free_pages: u64,
    /// Free pages that `free` leaves out because they are too scattered.
    pub left_out_pages: u64,
    /// The kernel's own counters just after the look.
    pub zones: Vec<ZoneCounters>,
    /// How well both agree.
    pub agreement: Agreement,
    /// How long it took.
    pub took: Duration,
}

/// Clean pages of a guest's page cache at one look. Experimental.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageCache {
    /// Guest-physical page frames, in runs: sorted, disjoint, not adjacent, inside RAM.
    pub clean: Vec<Range<u64>>,
    /// Pages in `clean`.
    pub pages: u64,
    /// Clean pages that `clean` leaves out because they are too scattered.
    pub left_out_pages: u64,
    /// How long it took.
    pub took: Duration,
}

impl Look {
    /// Pages in the kernel's free lists.
    #[must_use]
    pub fn counted_pages(&self) -> u64 {
        self.zones.iter().map(ZoneCounters::free_pages).fold(0, u64::saturating_add)
    }
}

impl Introspection {
    /// Looks for the kernel that these processors run: where its image points to its description, or else in all RAM.
    /// Callers keep the result.
    ///
    /// `processors` are the page tables of every processor that uses any, as the VMM says **now**. RAM outlives a
    /// restart of the guest, and so does the description of a kernel that no longer runs, whose free pages may be in
    /// use now. So a kernel is believed only where every processor's page tables map it.
    ///
    /// # Errors
    /// [`Unfit`]: of the kernel that came closest.
    pub fn find(ram: &dyn Physical, processors: &[PageTables]) -> Result<Self, Unfit> {
        let mut closest = Unfit::NoKernel;
        let mut left = CANDIDATES;
        let mut each = |note| {
            left -= 1;
            match Self::try_from_note(ram, note, processors) {
                Ok(found) => return Some(Some(found)),
                // A valid description came closer than an invalid one.
                Err(_) if matches!(closest, Unfit::NotRunning { .. }) => {}
                Err(error) => closest = error,
            }
            // The end of the search.
            (left == 0).then_some(None)
        };
        // All tables share the kernel's image; a program's own tables may leave it out.
        let mut tables: Vec<_> = processors.first().into_iter().flat_map(|it| [*it, it.of_kernel()]).collect();
        tables.dedup();
        let pointed_to = tables.into_iter().find_map(|tables| image::pointed_to(ram, tables, &mut each));
        let found = pointed_to.or_else(|| vmcoreinfo::search(ram, each));
        found.flatten().ok_or(closest)
    }

    fn try_from_note(ram: &dyn Physical, note: Vmcoreinfo, processors: &[PageTables]) -> Result<Self, Unfit> {
        let layout = Layout::of(&note)?;
        let found = Self { note, layout };
        found.check_running(ram, processors)?;
        Ok(found)
    }

    /// The kernel's release, as `uname -r` in the guest has it.
    #[must_use]
    pub fn release(&self) -> &str {
        self.note.release()
    }

    /// Reads which pages the kernel holds free, whether the guest runs or not. Pages in the processors' own lists,
    /// waiting to be reused, count as used.
    ///
    /// For a migration: arm write tracking, ask the VMM for `processors`, then look. A page that is free at an instant
    /// after the arming matters to nobody until it is written, and a write is seen.
    ///
    /// # Errors
    /// [`Unfit`]; then nothing is known.
    pub fn look(&self, ram: &dyn Physical, processors: &[PageTables]) -> Result<Look, Unfit> {
        let began = Instant::now();
        self.still_runs(ram, processors)?;
        let mut attempt = 1;
        let (found, zones, agreement) = loop {
            match self.look_once(ram) {
                Err(Unfit::CountersDisagree { .. }) if attempt < ATTEMPTS => attempt += 1,
                other => break other?,
            }
        };
        let left_out_pages = found.runs.left_out;
        let free = found.runs.into_inner();
        let mut memory = Virtual::new(ram, self.layout.tables);
        let direct = self.direct_map(&mut memory)?;
        contents::check(ram, &mut memory, direct, &free)?;
        let free_pages = crate::runs::count(&free);
        Ok(Look { free, free_pages, left_out_pages, zones, agreement, took: began.elapsed() })
    }

    /// Checks that the kernel that was found is still there, and is what `processors` run.
    ///
    /// # Errors
    /// [`Unfit::Replaced`] or [`Unfit::NotRunning`] where one of these does not hold.
    pub fn still_runs(&self, ram: &dyn Physical, processors: &[PageTables]) -> Result<(), Unfit> {
        if !Vmcoreinfo::at(ram, self.note.address).is_some_and(|note| note.says_the_same(&self.note)) {
            return Err(Unfit::Replaced { release: self.release().to_owned() });
        }
        self.check_running(ram, processors)
    }

    /// The number of free pages that the kernel counts: about what [`look`](Self::look) would find, for next to
    /// nothing.
    ///
    /// # Errors
    /// [`Unfit`]; then nothing is known.
    pub fn counted_pages(&self, ram: &dyn Physical, processors: &[PageTables]) -> Result<u64, Unfit> {
        self.still_runs(ram, processors)?;
        let mut memory = Virtual::new(ram, self.layout.tables);
        let zones = counters::read(&mut memory, &self.layout)?;
        Ok(zones.iter().map(ZoneCounters::free_pages).fold(0, u64::saturating_add))
    }

    /// Reads which of some page frames are free, where that costs less than a whole [`look`](Self::look): it yields
    /// runs, as a look does, of all free pages in the blocks of the highest order around the frames. Nothing tells
    /// whether the result is right, since the kernel counts only the whole. So use it for a kernel of which a whole
    /// look was believed. Where the guest may have been restarted since, call [`still_runs`](Self::still_runs) before
    /// believing pages that are new here.
    ///
    /// # Errors
    /// [`Unfit`]; then nothing is known.
    pub fn look_around(&self, ram: &dyn Physical, frames: &[Range<u64>]) -> Result<Vec<Range<u64>>, Unfit> {
        let mut memory = Virtual::new(ram, self.layout.tables);
        Ok(free::walk_around(ram, &mut memory, &self.layout, frames)?.runs.into_inner())
    }

    /// Reads which pages are clean copies of what is on the guest's disks, which its kernel could read again. This is
    /// experimental, and good only for counting: nothing is checked against what the kernel counts.
    ///
    /// # Errors
    /// [`Unfit`]; then nothing is known.
    pub fn page_cache(&self, ram: &dyn Physical, processors: &[PageTables]) -> Result<PageCache, Unfit> {
        let began = Instant::now();
        self.still_runs(ram, processors)?;
        let mut memory = Virtual::new(ram, self.layout.tables);
        let layout = CacheLayout::of(&self.note)?;
        let runs = cache::walk(&mut memory, &self.layout.sections, &layout, &free::frames(ram))?;
        let left_out_pages = runs.left_out;
        let clean = runs.into_inner();
        Ok(PageCache { pages: crate::runs::count(&clean), clean, left_out_pages, took: began.elapsed() })
    }

    fn look_once(&self, ram: &dyn Physical) -> Result<(Found, Vec<ZoneCounters>, Agreement), Unfit> {
        let mut memory = Virtual::new(ram, self.layout.tables);
        let before = counters::read(&mut memory, &self.layout)?;
        let found = free::walk(ram, &mut memory, &self.layout)?;
        let after = counters::read(&mut memory, &self.layout)?;
        let bytes = ram.ranges().iter().map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add);
        let agreed = agreement(&before, &after, &found.blocks, bytes / PAGE_BYTES)?;
        Ok((found, after, agreed))
    }

    /// The address at which the kernel maps all physical memory: it names the roots of its sections by such addresses.
    fn direct_map(&self, memory: &mut Virtual<'_>) -> Result<u64, Unfit> {
        let roots = self.layout.sections.roots;
        let found = memory.translate(roots).map_err(|fault| Unfit::from_fault(fault, "the list of memory sections"))?;
        Ok(roots.wrapping_sub(found.address))
    }

    /// Checks that the kernel is the one that runs. Three things have to hold: some processor uses page tables at all;
    /// the tables of each such processor map the kernel's text to where this one has it; and the name at that place is
    /// this kernel's. An earlier kernel without address randomisation may have lain in the same place, but then the
    /// later one's name is there now.
    ///
    /// Every processor is checked, not just one: a kernel that was started by another (kexec) runs on the first
    /// processor, and the others may keep the page tables of the earlier kernel for ever.
    fn check_running(&self, ram: &dyn Physical, processors: &[PageTables]) -> Result<(), Unfit> {
        let runs = !processors.is_empty() && processors.iter().all(|tables| self.is_mapped_by(ram, *tables));
        if runs && self.has_its_name(ram) {
            return Ok(());
        }
        Err(Unfit::NotRunning { release: self.release().to_owned() })
    }

    fn is_mapped_by(&self, ram: &dyn Physical, tables: PageTables) -> bool {
        [tables, tables.of_kernel()].iter().any(|tables| {
            let mut memory = Virtual::new(ram, *tables);
            [self.layout.text, self.layout.uts].iter().all(|&address| {
                memory.translate(address).is_ok_and(|found| found.address == self.layout.in_image(address))
            })
        })
    }

    fn has_its_name(&self, ram: &dyn Physical) -> bool {
        let release = [self.release().as_bytes(), &[0]].concat();
        self.layout.name.iter().any(|&offset| {
            let mut name = [0; RELEASE + 65];
            ram.read(self.layout.in_image(self.layout.uts).wrapping_add(offset), &mut name).is_ok()
                && name.starts_with(b"Linux\0")
                && name[RELEASE..].starts_with(&release)
        })
    }
}
