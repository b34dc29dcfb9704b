//! The pools of the gangs that come here.
//!
//! A pool's file has no name: when the last guest that maps it has ended, and nobody here holds it, the kernel frees
//! it, whatever became of this daemon. It is held until all members have come, because some may wait for their turn
//! while the first ones are here already. A member that never comes is not waited for long: its gang keeps a promise of
//! memory.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::units::show_size;
use sterna_api::{Blame, Code, Problem};
use sterna_engine::destination::offers::Offers;
use sterna_engine::destination::pool::Pool;
use sterna_engine::memory::kept::Kept;
use sterna_engine::memory::room::copied_bytes;
use sterna_engine::memory::unneeded;
use sterna_protocol::spec::GangSpec;
use sterna_sys::file::{self, FileId};

use super::prechecks::check_room;
use crate::machines::record::GangKey;
use crate::problems::host;

/// How long a pool waits for members that have not come, while none of its gang is on its way. The next member comes as
/// soon as its turn has come at the source, which is when the one before has arrived.
const WAIT: Duration = Duration::from_secs(60);

/// The most gangs that may be on their way here.
const MAX_POOLS: usize = 256;

/// The pools of gangs that are on their way here.
#[derive(Debug)]
pub struct Pools {
    /// A directory on the file system of the machines' RAM.
    dir: PathBuf,
    gangs: Mutex<HashMap<GangKey, Entry>>,
    /// How long they wait for members.
    wait: Duration,
    /// Held while pages of pools are given back: what is offered meanwhile could be among them.
    giving_back: Mutex<()>,
    /// How many have pools held that they do not know themselves.
    held: AtomicUsize,
    /// How many mappings a machine may have for what it shares.
    mappings: fn() -> io::Result<u64>,
}

#[derive(Debug)]
struct Entry {
    pool: Arc<Pool>,
    spec: GangSpec,
    /// The memory, bytes, that its members need together here.
    bytes: u64,
    /// The members that have begun to come.
    names: HashSet<String>,
    /// Since when nobody of the gang has been on its way, as far as anybody has looked.
    quiet: Option<Instant>,
}

impl Pools {
    /// No pools yet; their files will lie in this directory's file system.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        let mappings = sterna_engine::memory::room::for_newcomer;
        let (giving_back, held) = (Mutex::default(), AtomicUsize::new(0));
        Self { dir, gangs: Mutex::default(), wait: WAIT, giving_back, held, mappings }
    }

    /// The directory on whose file system they lie.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether machines may still be given pages of this pool. Once that is not so, it never is again.
    #[must_use]
    pub fn holds(&self, pool: FileId) -> bool {
        let held =
            |entry: &Entry| entry.pool.id() == pool || entry.pool.offers().is_some_and(|offers| offers.are_of(pool));
        self.are_held() || self.wanted().values().any(held)
    }

    /// Whether machines may be given pages of any pool, now.
    #[must_use]
    pub fn are_held(&self) -> bool {
        self.held.load(Ordering::SeqCst) > 0
    }

    /// Holds every pool until the guard is dropped: machines are given what others have mapped.
    pub fn hold(&self) -> Held<'_> {
        // Nothing is given back now that was looked at before.
        let _nothing_goes = self.giving_back();
        self.held.fetch_add(1, Ordering::SeqCst);
        Held(self)
    }

    /// Nothing is offered until the guard is dropped.
    pub fn giving_back(&self) -> MutexGuard<'_, ()> {
        self.giving_back.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers a gang what lies in the pools that these processes map, and what was kept of machines that left. Pools
    /// that machines are on their way to are left out: a body of theirs may be half written.
    ///
    /// # Errors
    /// A process cannot be looked into, or a pool cannot be opened.
    pub fn offer(&self, pool: &Pool, processes: &[u32], kept: &[Arc<Kept>]) -> io::Result<()> {
        let _nothing_goes = self.giving_back();
        if pool.offers().is_some() {
            return Ok(());
        }
        let device = file::device_of(&self.dir)?;
        let found = unneeded::pools_of(processes, device)?;
        let held = |id: &FileId| self.wanted().values().any(|entry| entry.pool.id() == *id);
        let mut files: Vec<File> = found.into_iter().filter(|(id, _)| !held(id)).map(|(_, file)| file).collect();
        for kept in kept {
            files.extend(kept.files()?);
        }
        pool.offer(Offers::new(&files)?);
        Ok(())
    }

    /// Looks which gangs are still on their way. To be called again and again: a gang is quiet from the first look on
    /// that finds it so.
    pub fn look(&self) {
        drop(self.wanted());
    }

    /// The gangs that are on their way, without those that are not any more.
    fn wanted(&self) -> MutexGuard<'_, HashMap<GangKey, Entry>> {
        let mut gangs = self.gangs.lock().unwrap_or_else(PoisonError::into_inner);
        gangs.retain(|_, entry| {
            // Whoever comes through here holds another reference.
            if Arc::strong_count(&entry.pool) > 1 {
                entry.quiet = None;
                return true;
            }
            !entry.pool.is_complete() && entry.quiet.get_or_insert_with(Instant::now).elapsed() < self.wait
        });
        gangs
    }

    /// The machines of gangs that are on their way, as far as they have begun to come.
    #[must_use]
    pub fn names(&self) -> HashSet<String> {
        self.wanted().values().flat_map(|entry| entry.names.iter().cloned()).collect()
    }

    /// The memory, bytes, that gangs on their way here will still need; `taken` says what a machine has taken already.
    #[must_use]
    pub fn promised_bytes(&self, taken: &dyn Fn(&str) -> u64) -> u64 {
        promised(&self.wanted(), taken)
    }

    /// Notes that this machine comes with the gang of this pool. Returns which that is.
    pub fn come(&self, pool: &Arc<Pool>, name: &str) -> Option<GangKey> {
        let mut gangs = self.wanted();
        let (key, entry) = gangs.iter_mut().find(|(_, entry)| Arc::ptr_eq(&entry.pool, pool))?;
        entry.names.insert(name.into());
        Some(key.clone())
    }

    /// The pool of a gang from this daemon. `here` says which machines have come with a gang, `room` how much this host
    /// can give to gangs beside what those still need, bytes, and `taken` what a machine of a gang has taken already.
    ///
    /// A gang whose members have come in part, and whose pool is not known any more, has another one from now on: its
    /// daemon was started again, or nobody came for a while. What those have taken for themselves is not asked for
    /// again. What they have in common is, as far as others refer to it: it is put into the new pool once more.
    ///
    /// # Errors
    /// The peer contradicts itself, the gang needs more than there is, too many gangs are on their way, or the file
    /// cannot be made.
    pub fn of(
        &self,
        gang: &GangSpec,
        from: Option<&str>,
        room: &dyn Fn(&HashSet<String>) -> u64,
        taken: &dyn Fn(&str) -> u64,
        here: &dyn Fn(&GangKey) -> HashSet<String>,
    ) -> Result<Arc<Pool>, Problem> {
        let key = GangKey { id: gang.id, from: from.map(String::from) };
        if let Some(pool) = known(&self.wanted(), &key, gang)? {
            return Ok(pool);
        }
        // It takes its time, and asks for the names of all gangs.
        let names = here(&key);
        let room_bytes = room(&names);
        let mut gangs = self.wanted();
        if let Some(pool) = known(&gangs, &key, gang)? {
            return Ok(pool);
        }
        if gangs.len() >= MAX_POOLS {
            let message = format!("{MAX_POOLS} gangs are on their way here already");
            return Err(Problem::new(Code::NoSharing, Blame::Host, message));
        }
        let room_bytes = room_bytes.saturating_sub(promised(&gangs, taken));
        let taken_bytes = names.iter().map(|name| taken(name)).sum();
        let bytes = self.needed_bytes(gang, taken_bytes, room_bytes)?;
        let pool = file::unnamed(&self.dir).map_err(io::Error::from).and_then(|file| Pool::new(file, gang.members));
        let pool = pool.map_err(|error| host("the gang's pool cannot be made", &error))?;
        let entry = Entry { pool: Arc::clone(&pool), spec: gang.clone(), bytes, names, quiet: None };
        gangs.insert(key, entry);
        Ok(pool)
    }

    /// The memory, bytes, that a gang needs here: what it has, and copies of shared pages that lie in more pieces than
    /// a process may have mappings.
    ///
    /// # Errors
    /// There is less room than what it has not taken of that.
    fn needed_bytes(&self, gang: &GangSpec, taken_bytes: u64, room_bytes: u64) -> Result<u64, Problem> {
        let mappings = (self.mappings)().map_err(|error| host("vm.max_map_count cannot be read", &error))?;
        let copied = copied_bytes(&gang.shared, mappings);
        let bytes = gang.bytes.saturating_add(copied);
        let who = format!("a gang of {}", gang.members);
        let checked = check_room(&who, bytes.saturating_sub(taken_bytes), room_bytes);
        if copied == 0 {
            return checked.map(|()| bytes);
        }
        let copied = show_size(copied);
        tracing::warn!(group = gang.group, copied, "a gang shares more pieces than vm.max_map_count lets it map here");
        let hint = format!(
            "{copied} of that are shared pages that must be copied: they lie in more pieces than a process may have \
             mappings. Raise vm.max_map_count on this host, make room on it, or choose another"
        );
        checked.map(|()| bytes).map_err(|problem| problem.hint(hint))
    }
}

/// Every pool is held.
#[derive(Debug)]
pub struct Held<'a>(&'a Pools);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The pool of a gang of which a member has come before.
fn known(gangs: &HashMap<GangKey, Entry>, key: &GangKey, gang: &GangSpec) -> Result<Option<Arc<Pool>>, Problem> {
    let Some(entry) = gangs.get(key) else { return Ok(None) };
    if entry.spec != *gang {
        return Err(Problem::new(Code::NoSharing, Blame::Peer, "a gang that it described differently before"));
    }
    Ok(Some(Arc::clone(&entry.pool)))
}

/// The memory, bytes, that these gangs will still need.
fn promised(gangs: &HashMap<GangKey, Entry>, taken: &dyn Fn(&str) -> u64) -> u64 {
    let still = |entry: &Entry| {
        let own: u64 = entry.names.iter().map(|name| taken(name)).sum();
        entry.bytes.saturating_sub(own.saturating_add(entry.pool.allocated_bytes()))
    };
    gangs.values().map(still).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
    use sterna_protocol::pages::PageSet;
    use sterna_protocol::spec::{BlockSpec, SharedPages};

    use super::*;

    fn pools() -> (tempfile::TempDir, Pools) {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let pools = Pools::new(dir.path().into());
        (dir, pools)
    }

    fn gang(id: u128, group: &str, members: u16, bytes: u64) -> GangSpec {
        GangSpec { id, group: group.into(), members, bytes, shared: Vec::new() }
    }

    /// The pool of such a gang, where this host has 1 GiB and the gang's machine `one` has taken 50 MiB.
    fn pool(pools: &Pools, gang: &GangSpec, from: Option<&str>) -> Result<Arc<Pool>, Problem> {
        pools.of(gang, from, &|_| 1 << 30, &taken, &|_| HashSet::new())
    }

    fn taken(name: &str) -> u64 {
        if name == "one" { 50 << 20 } else { 0 }
    }

    #[test]
    fn members_of_one_gang_meet_and_others_do_not() {
        let (dir, pools) = pools();
        let of = |id, group: &str, members, from| pool(&pools, &gang(id, group, members, 0), from);
        let first = of(1, "g", 2, Some("a")).expect("a pool");
        assert!(Arc::ptr_eq(&first, &of(1, "g", 2, Some("a")).expect("the pool")));
        for (gang, from) in [(2, Some("a")), (1, Some("b")), (1, None)] {
            assert!(!Arc::ptr_eq(&first, &of(gang, "g", 2, from).expect("another pool")), "{gang} {from:?}");
        }
        for (group, members) in [("h", 2), ("g", 3)] {
            let problem = of(1, group, members, Some("a")).expect_err("it contradicts itself");
            assert_eq!((problem.code, problem.blame), (Code::NoSharing, Blame::Peer));
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0, "a pool has no name");
    }

    #[test]
    fn a_gang_is_promised_what_it_needs_and_no_other_gets_it() {
        let (_dir, pools) = pools();
        let large = pool(&pools, &gang(1, "g", 2, 800 << 20), None).expect("there is room");
        pools.come(&large, "one");
        assert_eq!(pools.promised_bytes(&taken), 750 << 20);
        assert!(pools.names().contains("one"));
        let problem = pool(&pools, &gang(2, "g", 2, 300 << 20), None).expect_err("too much");
        assert_eq!((problem.code, problem.blame), (Code::OutOfMemory, Blame::Host));
        assert!(problem.message.contains("a gang of 2"), "{}", problem.message);
        pool(&pools, &gang(2, "g", 2, 100 << 20), None).expect("room for both");
        assert!(pool(&pools, &gang(3, "g", 2, u64::MAX), None).is_err());
    }

    /// Fails where a gang of which a part is here is promised all of its memory again: where there is no such room the
    /// rest is refused, and others meanwhile.
    #[test]
    fn what_members_have_taken_that_are_here_is_not_asked_for_again_with_another_pool() {
        let (_dir, pools) = pools();
        let gang = gang(1, "g", 2, 1000 << 20);
        let of = |here: &dyn Fn(&GangKey) -> HashSet<String>| pools.of(&gang, Some("a"), &|_| 1 << 30, &taken, here);
        assert_eq!(of(&|_| HashSet::new()).expect_err("1 GiB, and no margin").code, Code::OutOfMemory);
        let first = |key: &GangKey| {
            assert_eq!(*key, GangKey { id: 1, from: Some("a".into()) });
            HashSet::from(["one".to_owned()])
        };
        let pool = of(&first).expect("50 MiB of it are taken");
        assert_eq!(pools.promised_bytes(&taken), 950 << 20);
        assert_eq!(pools.names(), HashSet::from(["one".to_owned()]));
        assert_eq!(pools.come(&pool, "two"), Some(GangKey { id: 1, from: Some("a".into()) }));
    }

    #[test]
    fn copies_for_want_of_mappings_are_promised_too_or_refused_with_what_helps() {
        let (_dir, mut pools) = pools();
        pools.mappings = || Ok(30_000);
        // Each shares 1 GiB, half of it in pieces that find no room: 2 x 512 MiB.
        let shared = Vec::from([SharedPages { pages: 1 << 18, mappings: 60_000 }; 2]);
        let of = |pools: &Pools, bytes, id| {
            let gang = GangSpec { shared: shared.clone(), ..gang(id, "g", 2, bytes) };
            pools.of(&gang, None, &|_| 2 << 30, &taken, &|_| HashSet::new())
        };
        let problem = of(&pools, 1 << 30, 1).expect_err("twice 1 GiB, and no margin");
        assert_eq!((problem.code, problem.blame), (Code::OutOfMemory, Blame::Host));
        let hint = problem.hint.unwrap_or_default();
        assert!(hint.starts_with("1.00 GiB of that") && hint.contains("vm.max_map_count"), "{hint}");
        let _pool = of(&pools, 512 << 20, 2).expect("there is room");
        assert_eq!(pools.promised_bytes(&taken), (512 + 1024) << 20);
        pools.mappings = || Ok(60_000);
        let _pool = of(&pools, 400 << 20, 3).expect("no page is copied");
        assert_eq!(pools.promised_bytes(&taken), (512 + 1024 + 400) << 20);
    }

    #[test]
    fn what_is_offered_is_held_and_a_pool_that_is_being_filled_is_not_offered() {
        let (_dir, pools) = pools();
        let (filled, comes) = (pool(&pools, &gang(1, "g", 1, 0), None), pool(&pools, &gang(2, "g", 1, 0), None));
        let (filled, comes) = (filled.expect("a pool"), comes.expect("a pool"));
        let layout = layout();
        filled.enter(0, &layout).expect("its member");
        filled.put(0, ChunkIndex(0), &PageSet::first(1), &[&[7; PAGE_BYTES]]).expect("a body");
        let guest = sterna_sys::map::PrivateMapping::new(1 << 20).expect("a mapping");
        guest.lay(0, filled.reader(), 0..1 << 20).expect("laid");
        let me = [std::process::id()];
        pools.offer(&comes, &me, &[]).expect("nothing");
        assert_eq!(comes.offers().map(Offers::pages), Some(0), "somebody may be writing a body");
        let later = pool(&pools, &gang(3, "g", 1, 0), None).expect("a pool");
        let id = filled.id();
        drop(filled);
        assert!(!pools.holds(id));
        pools.offer(&later, &me, &[]).expect("offers");
        assert_eq!(later.offers().map(Offers::pages), Some(1));
        assert!(pools.holds(id), "or what was offered would be given back");
        later.enter(0, &layout).expect("its member");
        drop((later, guest));
        assert!(!pools.holds(id));
    }

    /// Seen to fail: a gang whose last member never came was promised its memory for ten minutes.
    #[test]
    fn a_gang_of_which_nobody_comes_any_more_is_promised_nothing() {
        let (_dir, mut pools) = pools();
        pools.wait = Duration::ZERO;
        let at_work = pool(&pools, &gang(1, "g", 2, 800 << 20), None).expect("there is room");
        pools.look();
        assert_eq!(pools.promised_bytes(&|_| 0), 800 << 20);
        let id = at_work.id();
        drop(at_work);
        assert_eq!((pools.promised_bytes(&|_| 0), pools.holds(id)), (0, false));
    }

    #[test]
    fn a_pool_is_held_until_its_machines_are_there() {
        let (_dir, pools) = pools();
        let pool = pool(&pools, &gang(1, "g", 1, 0), None).expect("a pool");
        pool.enter(0, &layout()).expect("its member");
        assert!(pools.holds(pool.id()));
        let id = pool.id();
        drop(pool);
        assert!(!pools.holds(id));
    }

    fn layout() -> Layout {
        let spec = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        Layout::new(&[spec]).expect("a layout")
    }

    #[test]
    fn a_pool_that_waits_for_members_is_kept_and_a_complete_one_is_not() {
        let (_dir, pools) = pools();
        let of = |id, members| pool(&pools, &gang(id, "g", members, 0), None).expect("a pool");
        let first = of(1, 2);
        first.enter(0, &layout()).expect("the first member");
        drop(first);
        drop(of(2, 1));
        let held =
            || pools.gangs.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&GangKey { id: 1, from: None });
        assert!(held(), "its second member is still to come");
        of(1, 2).enter(1, &layout()).expect("the second member");
        drop(of(2, 1));
        assert!(!held());
    }
}
