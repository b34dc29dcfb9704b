//! The pools of the gangs that come here.
//!
//! A pool's file has no name: when the last guest that maps it has ended, and nobody here holds it, the kernel frees
//! it, whatever became of this daemon. It is held until all members have come, because some may wait for their turn
//! while the first ones are here already.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use sterna_api::{Blame, Code, Problem};
use sterna_engine::destination::pool::Pool;

use crate::problems::host;

/// How long a pool waits for members that have not come.
const WAIT: Duration = Duration::from_secs(600);

/// The most gangs that may be on their way here.
const MAX_POOLS: usize = 256;

/// A gang: its number, and the daemon it comes from, by its certificate.
type Key = (u128, Option<String>);

/// The pools of gangs that are on their way here.
#[derive(Debug)]
pub struct Pools {
    /// A directory on the file system of the machines' RAM.
    dir: PathBuf,
    gangs: Mutex<HashMap<Key, Entry>>,
}

#[derive(Debug)]
struct Entry {
    pool: Arc<Pool>,
    group: String,
    members: u16,
    /// When a member came last.
    used: Instant,
}

impl Pools {
    /// No pools yet; their files will lie in this directory's file system.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, gangs: Mutex::default() }
    }

    /// The pool of a gang from this daemon.
    ///
    /// # Errors
    /// The peer contradicts itself, too many gangs are on their way, or the file cannot be made.
    pub fn of(&self, gang: u128, group: &str, members: u16, from: Option<&str>) -> Result<Arc<Pool>, Problem> {
        let mut gangs = self.gangs.lock().unwrap_or_else(PoisonError::into_inner);
        gangs.retain(|_, entry| {
            // Whoever comes through here holds another reference.
            let at_work = Arc::strong_count(&entry.pool) > 1;
            at_work || !entry.pool.is_complete() && entry.used.elapsed() < WAIT
        });
        let key = (gang, from.map(String::from));
        if let Some(entry) = gangs.get_mut(&key) {
            if entry.group != group || entry.members != members {
                let why = "a gang that it described differently before";
                return Err(Problem::new(Code::NoSharing, Blame::Peer, why));
            }
            entry.used = Instant::now();
            return Ok(Arc::clone(&entry.pool));
        }
        if gangs.len() >= MAX_POOLS {
            let message = format!("{MAX_POOLS} gangs are on their way here already");
            return Err(Problem::new(Code::NoSharing, Blame::Host, message));
        }
        let unnamed = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.dir, unnamed, Mode::RUSR | Mode::WUSR);
        let pool = file.map_err(std::io::Error::from).and_then(|file| Pool::new(file.into(), members));
        let pool = pool.map_err(|error| host("the gang's pool cannot be made", &error))?;
        let entry = Entry { pool: Arc::clone(&pool), group: group.into(), members, used: Instant::now() };
        gangs.insert(key, entry);
        Ok(pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools() -> (tempfile::TempDir, Pools) {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let pools = Pools::new(dir.path().into());
        (dir, pools)
    }

    #[test]
    fn members_of_one_gang_meet_and_others_do_not() {
        let (dir, pools) = pools();
        let first = pools.of(1, "g", 2, Some("a")).expect("a pool");
        assert!(Arc::ptr_eq(&first, &pools.of(1, "g", 2, Some("a")).expect("the pool")));
        for (gang, from) in [(2, Some("a")), (1, Some("b")), (1, None)] {
            assert!(!Arc::ptr_eq(&first, &pools.of(gang, "g", 2, from).expect("another pool")), "{gang} {from:?}");
        }
        for (group, members) in [("h", 2), ("g", 3)] {
            let problem = pools.of(1, group, members, Some("a")).expect_err("it contradicts itself");
            assert_eq!((problem.code, problem.blame), (Code::NoSharing, Blame::Peer));
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0, "a pool has no name");
    }

    #[test]
    fn a_pool_that_waits_for_members_is_kept_and_a_complete_one_is_not() {
        let (_dir, pools) = pools();
        let spec = sterna_protocol::spec::BlockSpec {
            id: "ram".into(),
            bytes: 1 << 20,
            page_bytes: 4096,
            path: String::new(),
        };
        let layout = sterna_protocol::layout::Layout::new(&[spec]).expect("a layout");
        let pool = pools.of(1, "g", 2, None).expect("a pool");
        pool.enter(0, &layout).expect("the first member");
        drop(pool);
        drop(pools.of(2, "g", 1, None));
        let held = || pools.gangs.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&(1, None));
        assert!(held(), "its second member is still to come");
        pools.of(1, "g", 2, None).expect("the pool").enter(1, &layout).expect("the second member");
        drop(pools.of(2, "g", 1, None));
        assert!(!held());
    }
}
