//! What this host keeps of machines that have left, so that less travels when they come back (`keep_departed`).
//!
//! It is kept in memory that nobody else needs: never more than half of what would be free without it, and nothing
//! where the host is short of memory. Whoever asks how much room there is hears what there would be without it, and the
//! oldest goes before memory gets short. It ends with its time, with the machine's return, and with this daemon: its
//! files have no names.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sterna_api::problem::Whereabouts;
use sterna_api::units::show_size;
use sterna_api::vm::HostKept;
use sterna_api::{Blame, Code, Problem};
use sterna_engine::destination::pool::Pool;
use sterna_engine::memory::Memory;
use sterna_engine::memory::kept::Kept;
use sterna_engine::store::Store;

use crate::room::room_bytes;

/// How often it is looked whether something must go.
const LOOK: Duration = Duration::from_millis(500);
/// Nothing is kept where there is less than so many times the floor.
const ENOUGH: u64 = 4;

/// What this host keeps of machines that have left.
#[derive(Debug)]
pub struct Keeper {
    /// Where machines' RAM lies.
    ram: PathBuf,
    /// For how long; `None` where nothing is kept.
    limit: Option<Duration>,
    /// The memory below which guests are stopped, bytes.
    floor: u64,
    /// The memory that can still be given, bytes.
    room: fn(&Path) -> u64,
    /// What is lent to guests of other hosts: what is promised to them is nobody else's.
    lent: Arc<Store>,
    entries: Mutex<Vec<Entry>>,
}

/// What is kept of machines that left together.
#[derive(Debug)]
struct Entry {
    what: Arc<Kept>,
    /// The trust group in which they shared pages; empty where they shared with nobody.
    group: String,
    /// Each machine that has not come back, with the number of its ticket.
    machines: Vec<(String, u128)>,
    since: Instant,
    /// The pool to which it was offered last.
    offered: Weak<Pool>,
}

impl Entry {
    /// A gang may be given pages of it now: it stays until the gang has come, and its memory with it.
    fn is_in_use(&self) -> bool {
        self.offered.strong_count() > 0
    }
}

/// What becomes of the machines of one gang, or of one machine, when they have left.
#[derive(Debug, Clone)]
pub struct Keeping {
    keeper: Arc<Keeper>,
    what: Arc<Kept>,
    group: String,
}

impl Keeping {
    /// Keeps a machine's RAM; `number` is that of its ticket. It takes time.
    pub fn keep(&self, name: &str, number: u128, ram: &dyn Memory) {
        let Self { keeper, what, group } = self;
        keeper.came(name);
        let bytes = ram.allocated_bytes().unwrap_or(u64::MAX);
        // Private memory is copied, and given back only afterwards.
        let copied = matches!(ram.outlasting(), Ok(None));
        if copied && !keeper.has_room(bytes) {
            return tracing::info!(vm = name, "nothing is kept of it: there is too little memory");
        }
        keeper.note(what, group, (name, number));
        match what.keep(ram, &|| keeper.has_room(0)) {
            Ok(()) => tracing::info!(vm = name, bytes = what.bytes(), "what its memory was is kept"),
            Err(error) => tracing::warn!(vm = name, %error, "what its memory was cannot be kept"),
        }
        keeper.tidy();
    }
}

impl Keeper {
    /// Nothing is kept yet. With `limit` 0 nothing ever is.
    #[must_use]
    pub fn new(ram: PathBuf, lent: Arc<Store>, limit: Duration, floor: u64) -> Arc<Self> {
        let limit = (!limit.is_zero()).then_some(limit);
        Arc::new(Self { ram, limit, floor, room: room_bytes, lent, entries: Mutex::default() })
    }

    /// Begins to look what must go, on a thread of its own, for as long as this daemon runs.
    pub fn begin(self: &Arc<Self>) {
        if self.limit.is_none() {
            return;
        }
        let keeper = Arc::clone(self);
        let look = move || {
            loop {
                keeper.tidy();
                std::thread::sleep(LOOK);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("kept".into()).spawn(look) {
            tracing::error!(%error, "cannot start the thread that drops what was kept of machines that left");
        }
    }

    /// For machines that leave together, or one alone; `None` where nothing is kept.
    #[must_use]
    pub fn keeping(self: &Arc<Self>, group: &str) -> Option<Keeping> {
        self.limit?;
        let what = Arc::new(Kept::nothing(self.ram.clone()));
        Some(Keeping { keeper: Arc::clone(self), what, group: group.into() })
    }

    /// The memory, bytes, that can still be given to guests: what is kept counts as free, but for what is in use.
    /// Where that memory is needed now, it is given back first.
    #[must_use]
    pub fn room_bytes(&self) -> u64 {
        let kept = self.tidy();
        self.left().saturating_add(kept)
    }

    /// The memory, bytes, that can be given without giving up what is kept.
    #[must_use]
    pub fn room_beside_bytes(&self) -> u64 {
        self.left()
    }

    /// Checks that a machine may be started: that this host is not so short of memory that guests are stopped.
    ///
    /// # Errors
    /// A [`Problem`]: it is.
    pub fn check_not_short(&self) -> Result<(), Problem> {
        let room = self.room_bytes();
        if room >= self.floor {
            return Ok(());
        }
        let (room, floor) = (show_size(room), show_size(self.floor));
        let message =
            format!("this host is short of memory: it has {room} left, and guests may be stopped below {floor}");
        Err(Problem::new(Code::OutOfMemory, Blame::Host, message).guest(Whereabouts::Gone).hint(
            "move a machine away or stop one, run it on another host, or set a lower memory_floor in sternad.toml",
        ))
    }

    /// Whether anything is kept of machines that were given these tickets.
    #[must_use]
    pub fn keeps(&self, shown: &[u128]) -> bool {
        self.tidy();
        self.lock().iter().any(|entry| entry.machines.iter().any(|(_, number)| shown.contains(number)))
    }

    /// What is offered to a gang of this trust group: what was kept of machines of the group that were given these
    /// tickets, and with `all` of all of the group. It stays until the pool is dropped.
    #[must_use]
    pub fn offer(&self, group: &str, shown: &[u128], all: bool, pool: &Arc<Pool>) -> Vec<Arc<Kept>> {
        let mut entries = self.lock();
        let offered = entries.iter_mut().filter(|entry| {
            let was_shown = entry.machines.iter().any(|(_, number)| shown.contains(number));
            entry.group == group && (was_shown || all && !group.is_empty())
        });
        let offered = offered.map(|entry| {
            entry.offered = Arc::downgrade(pool);
            Arc::clone(&entry.what)
        });
        offered.collect()
    }

    /// A machine of this name is here (again), or leaves again: what was kept of it before is old.
    pub fn came(&self, name: &str) {
        self.lock().retain_mut(|entry| {
            entry.machines.retain(|(machine, _)| machine != name);
            !entry.machines.is_empty()
        });
    }

    /// Drops all that is kept. What is offered to a gang goes when that has come.
    pub fn drop_all(&self) {
        self.lock().clear();
    }

    /// What is kept now, as the API shows it.
    #[must_use]
    pub fn show(&self) -> HostKept {
        self.tidy();
        let entries = self.lock();
        let mut machines: Vec<_> =
            entries.iter().flat_map(|entry| &entry.machines).map(|(name, _)| name.clone()).collect();
        machines.sort_unstable();
        HostKept { bytes: entries.iter().map(|entry| entry.what.bytes()).sum(), machines }
    }

    /// Notes what is about to be kept of a machine.
    fn note(&self, what: &Arc<Kept>, group: &str, (name, number): (&str, u128)) {
        let mut entries = self.lock();
        let machine = (name.to_owned(), number);
        match entries.iter_mut().find(|entry| Arc::ptr_eq(&entry.what, what)) {
            Some(entry) => entry.machines.push(machine),
            None => entries.push(Entry {
                what: Arc::clone(what),
                group: group.into(),
                machines: vec![machine],
                since: Instant::now(),
                offered: Weak::new(),
            }),
        }
    }

    /// Whether so much more may be kept, bytes, beside what is: there must be as much memory left as is kept then.
    fn has_room(&self, more: u64) -> bool {
        let kept: u64 = self.lock().iter().map(|entry| entry.what.bytes()).sum();
        let left = self.left().saturating_sub(more);
        left >= kept.saturating_add(more) && left >= self.floor.saturating_mul(ENOUGH)
    }

    /// Drops what has been kept for its time, and the oldest for as long as there is less memory than is kept, or
    /// little of it. Returns how much could be dropped yet, bytes.
    fn tidy(&self) -> u64 {
        let Some(limit) = self.limit else { return 0 };
        let mut entries = self.lock();
        entries.retain(|entry| entry.is_in_use() || entry.since.elapsed() < limit);
        loop {
            let droppable = entries.iter().filter(|entry| !entry.is_in_use()).map(|entry| entry.what.bytes());
            let droppable: u64 = droppable.sum();
            if droppable == 0 {
                return 0;
            }
            let left = self.left();
            if left >= droppable && left >= self.floor.saturating_mul(ENOUGH) {
                return droppable;
            }
            let Some(oldest) = entries.iter().position(|entry| !entry.is_in_use()) else { return 0 };
            let gone = entries.remove(oldest);
            let machines: Vec<_> = gone.machines.iter().map(|(name, _)| name.as_str()).collect();
            tracing::info!(machines = machines.join(", "), "what was kept of them is dropped: memory is needed");
        }
    }

    /// The memory that can be given, bytes: without what is kept, and without what guests of other hosts are promised.
    fn left(&self) -> u64 {
        (self.room)(&self.ram).saturating_sub(self.lent.promised_bytes())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "kept_tests.rs"]
mod tests;
