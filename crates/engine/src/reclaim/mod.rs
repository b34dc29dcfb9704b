//! Free memory of a guest that runs, given back to its host (`docs/design/reclaim.md` says why this way).
//!
//! The guest's kernel is looked into once as a whole. Of the pages that it holds free those that have memory are taken,
//! portion by portion:
//!
//! 1. the portion is fenced in: nobody can write its pages ([`fence`](crate::faults::fence));
//! 2. its page frames are looked at once more, and the VMM is asked which page tables the processors use;
//! 3. where those are still of the kernel that was found, holes are punched where the pages are free, and nowhere else;
//! 4. the portion is let go, which wakes who waits.
//!
//! # Why no page is lost
//!
//! What a page holds cannot change between 1 and 4. So a page that was free at an instant in between holds then what it
//! held all the time, and nobody relies on that: the guest's kernel gives a page to nobody but who writes it before he
//! reads it. Who allocates it afterwards and writes it waits, and then writes into a fresh page of zeros. Content that
//! somebody relies on is never taken away, so there is none to be put back, and none that only this process holds.
//!
//! For each race, why no page is lost:
//!
//! * **allocated and written between the first look and the fence**: it is not free in the second look, and left alone
//! * **allocated before the second look, and not written yet**: the same
//! * **allocated after the second look, and written**: the write waits for the hole, and goes into a page of zeros
//! * **allocated after the second look, and read**: what it holds is undefined until it is written; zeros are as good
//! * **freed between the looks**: it is no candidate in this run
//! * **cleared when it was freed (`init_on_free`)**: the kernel expects zeros, and a hole reads as zeros
//! * **the kernel checks what free pages hold (`page_poison`)**: refused by [`sterna_introspect`]
//! * **a device writes it**: through the VMM's mapping: it waits as a processor does; by direct I/O that is under way:
//!   then the page has an owner and is not free; through another mapping (vhost-user, vfio): such guests are refused by
//!   the daemon
//! * **the guest is started again, or starts another kernel, before the fence**: the page tables are asked for after
//!   the fence: they are not that kernel's, or the VMM tells of the reset, or the kernel's counters are not there yet;
//!   nothing is taken
//! * **… after the fence**: what the later one writes waits; what the page held was the earlier one's, and free
//! * **the guest gives the page back at the same time (balloon, free page reporting)**: it is a hole then, and stays
//!   one
//! * **the look is misled by a page that changed under it ([`sterna_introspect`] says how)**: a block's first page
//!   would have to be free twice within some 10 µs, and what is wrongly called free must have been so in the first look
//!   and be in use since: nobody has seen it
//! * **the guest is being moved**: what is taken counts as given back, and the migration seals the RAM before it stops
//!   the guest ([`seal`](crate::faults::GuestFaults::seal)), so nothing is taken after its last look
//! * **the guest runs before all its pages are here**: what is away is neither read nor taken; a page that comes in the
//!   meantime is left alone in this run. What was taken is here, so nothing is asked of the source: it reads as zeros
//! * **pages of the guest are at memory hosts, and come and go meanwhile (split)**: a page that is fenced in is seen by
//!   nobody, wherever it is, so the second look counts for it as for any other. One that is away is noted as given
//!   back, and its memory host is told ([`split`](crate::split)). What is looked at is read where it is here before
//!   and after ([`elsewhere`](crate::memory::elsewhere)); what is not comes before the portion is fenced in, and not
//!   meanwhile
//! * **this process dies**: the kernel lifts the fence: holes are where free pages were, and the rest is as it was
//!
//! One case cannot be told apart: the same kernel, started again by kexec without a reset and without address
//! randomisation, that lies in the same place, has set up its counters, and has not yet overwritten parts of the
//! earlier one's memory map. Large machines fill in theirs for some hundred milliseconds after the start of the second
//! processor. Who starts kernels so should not have memory taken meanwhile.
//!
//! # Who waits for whom
//!
//! The VMM may answer only once a thread of its own goes on that waits for a fenced page. So the question is asked by
//! another thread, and a portion for which somebody waits is let go when it has had [`GRACE`](crate::reclaim::GRACE),
//! with nothing more taken: what was punched out until then was rightly so. Those pages are let go first for which
//! somebody waits.

/// Why it could not be taken.
mod error;

/// Page frames as runs.
pub mod frames;

/// The VMM, asked by a thread of its own.
mod asker;

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use sterna_api::Reclaimed;
use sterna_api::units::milliseconds as ms;
use sterna_introspect::{Introspection, PAGE_BYTES, PageTables, Unfit};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::reclaim::{Portion, RUN_PAGES, Rate};
use sterna_protocol::usage::UsageMap;
use sterna_sys::map::Access;
use sterna_sys::pagemap::Pagemap;

use self::asker::{Answer, Asker};
pub use self::error::ReclaimError;
use self::frames::{Frames, Portions, both, but_few, count, sorted};
use crate::error::MigrateError;
use crate::faults::GuestFaults;
use crate::faults::fence::{Fence, Patience};
use crate::memory::elsewhere::PagesElsewhere;
use crate::memory::fault::RamError;
use crate::memory::physical::GuestPhysical;
use crate::memory::{BlockFile, Memory, kind, pages_of};
use crate::monitor::Monitor;
use crate::vmm;

/// How long a portion has once somebody waits for one of its pages: then it is let go, with what is not taken yet left
/// alone.
pub const GRACE: Duration = Duration::from_millis(2);
/// How long a pause may go on unasked.
const ASK: Duration = Duration::from_millis(50);
/// The most pages of a guest that come here to be looked at: so many, and of its RAM one of so many. Its kernel's
/// account of its memory takes one of 64.
const LOOKED_AT: u64 = (64 << 20) / PAGE_BYTES;
const LOOKED_AT_SHARE: u64 = 32;
/// Pages of a huge page, and the fewest that are taken out of one: a hole splits it, and whoever uses the rest of it
/// is slower from then on.
const HUGE_FRAMES: u64 = 512;
const LEAST_OF_HUGE: u64 = HUGE_FRAMES / 8;
/// How many looks in a row may show nothing because what tells has left.
const IN_VAIN: u32 = 16;

/// A machine whose free memory is to be taken.
pub struct Machine<'a> {
    /// Its VMM. What else uses its connection waits meanwhile, for a millisecond or two at a time.
    pub vmm: &'a mut dyn vmm::Source,
    /// The faults of its RAM: whoever else wants to know of them shares this.
    pub faults: Arc<GuestFaults>,
    /// Its RAM, with addresses in the VMM's process.
    pub blocks: &'a [BlockFile],
    /// Pages that are not here yet, where the guest runs before all of them are. Nothing of them is looked at or taken.
    pub away: Option<PageMap>,
    /// Pages of it are elsewhere, and come and go. What is looked at comes here; what is free is taken wherever it is.
    pub elsewhere: Option<Arc<dyn PagesElsewhere>>,
    /// For tests that show what the second look is for, and never in earnest: what was free in the first look is taken,
    /// whoever has it now.
    pub trust_first_look: bool,
}

/// Takes what a guest holds free, until `monitor` cancels it. What was done is in `account`, whatever the end.
///
/// # Errors
/// [`ReclaimError`]; what was taken until then was taken rightly.
pub fn reclaim(machine: Machine<'_>, monitor: &Monitor, account: &mut Reclaimed) -> Result<(), ReclaimError> {
    let ram = kind::open(machine.blocks, Access::Read).map_err(|error| match error {
        RamError::Layout(error) => ReclaimError::Layout(error),
        error => ReclaimError::System(error.into()),
    })?;
    account.allocated_before_bytes = allocated_bytes(ram.as_ref())?;
    let arriving = machine.away.is_some();
    let done = take(machine, &ram, monitor, account).map_err(|error| match error {
        ReclaimError::Unfit(Unfit::Unreadable(_) | Unfit::NoKernel) if arriving => ReclaimError::Arriving,
        error => error,
    });
    account.allocated_after_bytes = allocated_bytes(ram.as_ref())?;
    done
}

fn take(
    machine: Machine<'_>,
    ram: &Arc<dyn Memory>,
    monitor: &Monitor,
    account: &mut Reclaimed,
) -> Result<(), ReclaimError> {
    let Machine { vmm, faults, away, elsewhere, trust_first_look, .. } = machine;
    account.total_pages = ram.layout().pages();
    let blocks = ram.spans().into_iter().zip(ram.layout().blocks());
    let small: Vec<_> = blocks.filter(|(_, block)| block.page_bytes == PAGE_BYTES).map(|(span, _)| span).collect();
    if small.is_empty() {
        return Err(ReclaimError::HugePages);
    }
    let mut memory = GuestPhysical::new(&vmm.memory_map()?, Arc::clone(ram))?;
    if let Some(away) = &away {
        memory = memory.without(away.clone());
    }
    if let Some(elsewhere) = &elsewhere {
        memory = memory.beside(Arc::clone(elsewhere), LOOKED_AT + account.total_pages / LOOKED_AT_SHARE);
    }
    // What was before does not matter.
    vmm.was_reset()?;
    let kernel = find(&memory, vmm, account)?;
    let processors = vmm.page_tables()?;
    let began = Instant::now();
    let look = kernel.look(&memory, &processors);
    note_look(account, began);
    let look = look.map_err(|unfit| unfit_of(&memory, unfit))?;
    account.free_pages = look.free_pages;
    let allocated = allocated_pages(ram.as_ref())?;
    // Of a page that is away there may be an earlier round's body, which the one to come replaces.
    let mut here = ram.takeable().map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
    if let Some(away) = &away {
        here.take_out(away);
    }
    if let Some(elsewhere) = &elsewhere {
        here.add(&elsewhere.away());
    }
    let candidates = both(&look.free, &small_frames(&here, ram.as_ref(), &memory));
    account.candidate_pages = count(&candidates);
    let pid = faults.inside().pid();
    let candidates = but_few(&candidates, &huge_frames(pid, ram.as_ref(), &memory), HUGE_FRAMES, LEAST_OF_HUGE);
    account.left_huge_pages = account.candidate_pages - count(&candidates);
    if candidates.is_empty() {
        return Ok(());
    }
    let mut usage = UsageMap::new(allocated);
    let fence = Fence::new(faults, small)?;
    let done = std::thread::scope(|scope| {
        let asker = Asker::start(scope, vmm);
        let (memory, ram, fence, usage) = (&memory, ram.as_ref(), &fence, &mut usage);
        let elsewhere = elsewhere.as_deref();
        let seen = Seen { processors, in_vain: 0 };
        let mut taking =
            Taking { memory, kernel, ram, elsewhere, seen, fence, asker, usage, trust_first_look, account };
        let done = taking.take(candidates, monitor);
        // Its thread ends once nothing can be asked any more.
        drop(taking);
        done
    });
    drop(fence);
    account.touched_pages = usage.observe(allocated_pages(ram.as_ref())?).touched.len();
    done
}

fn find(
    memory: &GuestPhysical,
    vmm: &mut dyn vmm::Source,
    account: &mut Reclaimed,
) -> Result<Introspection, ReclaimError> {
    let processors = vmm.page_tables()?;
    let began = Instant::now();
    let found = Introspection::find(memory, &processors);
    account.find_ms = ms(began.elapsed());
    let found = found.map_err(|unfit| unfit_of(memory, unfit))?;
    account.kernel = Some(found.release().to_owned());
    Ok(found)
}

/// Why nothing can be told, where pages that were to be looked at may not have come.
fn unfit_of(memory: &GuestPhysical, unfit: Unfit) -> ReclaimError {
    match unfit {
        Unfit::Unreadable(_) | Unfit::NoKernel if memory.fell_short() => ReclaimError::Elsewhere,
        other => other.into(),
    }
}

/// What was seen of a guest whose pages come and go.
struct Seen {
    /// The page tables of its processors.
    processors: Vec<PageTables>,
    /// How many looks in a row have shown nothing, perhaps because what tells had left.
    in_vain: u32,
}

/// What is needed from portion to portion.
struct Taking<'a> {
    memory: &'a GuestPhysical,
    kernel: Introspection,
    ram: &'a dyn Memory,
    elsewhere: Option<&'a dyn PagesElsewhere>,
    seen: Seen,
    fence: &'a Fence,
    asker: Asker,
    usage: &'a mut UsageMap,
    trust_first_look: bool,
    account: &'a mut Reclaimed,
}

impl Taking<'_> {
    fn take(&mut self, candidates: Frames, monitor: &Monitor) -> Result<(), ReclaimError> {
        let mut portions = Portions::of(candidates);
        let mut rate = Rate::new(available_parallelism().map_or(1, NonZero::get));
        loop {
            let frames = portions.next(rate.portion(), RUN_PAGES);
            if frames.is_empty() {
                return Ok(());
            }
            monitor.check().map_err(|_| ReclaimError::Cancelled)?;
            if self.fence.is_sealed() {
                return Err(ReclaimError::Leaving);
            }
            let seen = self.portion(&frames)?;
            let mut pause = rate.after(&seen);
            while !pause.is_zero() {
                let part = pause.min(ASK);
                std::thread::sleep(part);
                pause -= part;
                monitor.check().map_err(|_| ReclaimError::Cancelled)?;
            }
        }
    }

    /// Takes what is free of these frames.
    fn portion(&mut self, frames: &[Range<u64>]) -> Result<Portion, ReclaimError> {
        let (fence, began) = (self.fence, Instant::now());
        if self.memory.comes_and_goes() {
            // What tells which of them are free comes now, while nobody waits for us. What it says counts later.
            let _ = self.kernel.look_around(self.memory, frames);
            let _ = self.kernel.counted_pages(self.memory, &self.seen.processors);
        }
        self.memory.only_here(true);
        let patience = fence.patience(GRACE);
        let (mut taken, mut only_waited) = (None, Duration::ZERO);
        if let Some(fenced) = fence.close(self.addresses(frames), &patience)? {
            // From here on nobody writes these frames. The question and the look may be answered in either order: both
            // come after.
            self.asker.ask();
            let looked = Instant::now();
            let free = if self.trust_first_look {
                frames.to_vec()
            } else {
                let free = self.kernel.look_around(self.memory, frames);
                both(&self.as_far_as_here(free)?, frames)
            };
            note_look(self.account, looked);
            let asked = Instant::now();
            let answer = self.asker.answer(|| patience.is_over());
            only_waited = asked.elapsed();
            taken = match answer {
                Answer::Tables(processors) => {
                    self.seen.processors = processors;
                    if self.still_counts(count(&free))? { self.punch(&free, &patience)? } else { Some(0) }
                }
                Answer::TooLate => None,
                Answer::Reset => return Err(Unfit::Replaced { release: self.kernel.release().to_owned() }.into()),
                Answer::Failed(error) => return Err(error.into()),
            };
            fence.waits()?;
            fenced.open()?;
        }
        self.memory.only_here(false);
        let waits = fence.waits()?;
        let longest_wait = if waits > 0 { patience.longest_wait() } else { Duration::ZERO };
        let worked = began.elapsed().saturating_sub(only_waited);
        self.account.portions += 1;
        self.account.gave_way += u64::from(taken.is_none());
        self.account.waits += waits;
        self.account.reclaimed_pages += taken.unwrap_or(0);
        self.account.reclaimed_bytes = self.account.reclaimed_pages * PAGE_BYTES;
        self.account.put_back_pages += count(frames) - taken.unwrap_or(0);
        self.account.longest_wait_ms = self.account.longest_wait_ms.max(ms(longest_wait));
        // The answer that came too late is waited for while nobody waits for us.
        self.asker.settle();
        Ok(Portion { worked, waits, longest_wait })
    }

    /// Whether the kernel that was looked into is the one that these processors run, and holds so many pages free at
    /// all: one that has just been started in the place of its like counts none yet.
    fn still_counts(&mut self, free: u64) -> Result<bool, ReclaimError> {
        if self.trust_first_look {
            return Ok(true);
        }
        let counted = self.kernel.counted_pages(self.memory, &self.seen.processors);
        Ok(self.as_far_as_here(counted)? >= free)
    }

    /// What was seen; nothing where what tells has left meanwhile: then nothing is taken. Where that is so again and
    /// again, it is not there at all.
    fn as_far_as_here<T: Default>(&mut self, seen: Result<T, Unfit>) -> Result<T, ReclaimError> {
        match seen {
            Err(Unfit::Unreadable(_) | Unfit::Replaced { .. } | Unfit::NotRunning { .. })
                if self.memory.comes_and_goes() && self.seen.in_vain < IN_VAIN =>
            {
                self.seen.in_vain += 1;
                Ok(T::default())
            }
            other => {
                self.seen.in_vain = 0;
                other.map_err(|unfit| unfit_of(self.memory, unfit))
            }
        }
    }

    /// Gives these frames' memory back: holes that read as zeros. They are fenced in, and free. How many; `None` where
    /// somebody waited too long for the first of them already.
    fn punch(&mut self, frames: &[Range<u64>], patience: &Patience<'_>) -> Result<Option<u64>, ReclaimError> {
        let (mut taken, mut away) = (PageMap::empty(self.ram.layout()), 0);
        let places = self.places(frames);
        for (chunk, pages) in places.flat_map(|(block, bytes)| pages_of(self.ram.layout(), block, bytes)) {
            if patience.is_over() {
                break;
            }
            let elsewhere = self.elsewhere.map_or(PageSet::EMPTY, |elsewhere| elsewhere.presence(chunk).0);
            away += pages.and(&elsewhere).len() as u64;
            // Noted in one with what is taken: a collection of written pages sees either none of it or all.
            let discarded = self.fence.taking(self.addresses_in(chunk, &pages), || self.ram.discard(chunk, &pages));
            discarded.map_err(MigrateError::host("giving back memory of the guest's RAM"))?;
            taken.insert_all(chunk, &pages);
        }
        self.account.elsewhere_pages += away;
        // Before they are let go: who touches one of them now does so after it was taken.
        self.usage.take(&taken);
        let pages = taken.len();
        Ok((pages > 0 || frames.is_empty()).then_some(pages))
    }

    /// Where a run of a chunk's pages lies in the VMM's memory.
    fn addresses_in(&self, chunk: ChunkIndex, pages: &PageSet) -> Range<u64> {
        let Some((place, (first, length))) = self.ram.layout().place(chunk).zip(pages.runs().next()) else {
            return 0..0;
        };
        let start = self.ram.spans()[place.block].start + place.offset + first as u64 * PAGE_BYTES;
        start..start + length as u64 * PAGE_BYTES
    }

    /// Where frames lie in the VMM's memory.
    fn addresses(&self, frames: &[Range<u64>]) -> Vec<Range<u64>> {
        let spans = self.ram.spans();
        let address = |(block, bytes): (usize, Range<u64>)| {
            let base = spans[block].start;
            base + bytes.start..base + bytes.end
        };
        self.places(frames).map(address).collect()
    }

    fn places(&self, frames: &[Range<u64>]) -> impl Iterator<Item = (usize, Range<u64>)> {
        frames.iter().flat_map(|run| self.memory.locate(run.start * PAGE_BYTES..run.end * PAGE_BYTES))
    }
}

/// The frames of these pages, where pages are small.
fn small_frames(pages: &PageMap, ram: &dyn Memory, memory: &GuestPhysical) -> Frames {
    let mut frames = Frames::new();
    for (chunk, set) in pages.iter().filter(|(chunk, _)| !ram.tracked_coarsely(*chunk)) {
        let Some(place) = ram.layout().place(chunk) else { continue };
        for (first, length) in set.runs() {
            let start = place.offset + first as u64 * PAGE_BYTES;
            let addresses = memory.addresses(place.block, start..start + length as u64 * PAGE_BYTES);
            frames.extend(addresses.map(|run| run.start / PAGE_BYTES..run.end / PAGE_BYTES));
        }
    }
    sorted(frames)
}

/// The frames that the VMM has mapped by huge pages; none where that cannot be told, for they get no other treatment
/// than what is taken first and what is not.
fn huge_frames(pid: u32, ram: &dyn Memory, memory: &GuestPhysical) -> Frames {
    let (mut frames, mut regions) = (Frames::new(), Vec::new());
    let Ok(pagemap) = Pagemap::open(pid) else { return frames };
    for (block, span) in ram.spans().into_iter().enumerate() {
        if pagemap.huge(span.clone(), &mut regions).is_err() {
            continue;
        }
        for region in &regions {
            let addresses = memory.addresses(block, region.start - span.start..region.end - span.start);
            frames.extend(addresses.map(|run| run.start / PAGE_BYTES..run.end / PAGE_BYTES));
        }
    }
    let whole = |run: &Range<u64>| [run.start, run.end].iter().all(|frame| frame.is_multiple_of(HUGE_FRAMES));
    sorted(frames).into_iter().filter(whole).collect()
}

/// The pages for which the host has given memory.
fn allocated_pages(ram: &dyn Memory) -> Result<PageMap, ReclaimError> {
    Ok(ram.allocated().map_err(MigrateError::host("looking for holes in the guest's RAM"))?)
}

/// Memory that the host has given for this RAM, bytes.
fn allocated_bytes(ram: &dyn Memory) -> Result<u64, ReclaimError> {
    Ok(ram.allocated_bytes().map_err(MigrateError::host("looking at the guest's RAM files"))?)
}

fn note_look(account: &mut Reclaimed, began: Instant) {
    account.looks += 1;
    account.look_ms += ms(began.elapsed());
}
