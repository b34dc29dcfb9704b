//! The machines of this host.
//!
//! One table holds them all. Whoever begins something with a machine claims it first (`Hold`); nothing slow happens under the
//! table's lock.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_api::{Blame, Code, Problem};
use sterna_engine::host::{DaemonId, MigrationId};
use sterna_engine::monitor::Monitor;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::transport::share::Share;

use crate::config::Config;
use crate::identity;
use crate::metrics::Metrics;
use crate::migration::jobs::Jobs;
use crate::migration::records::Records;
use crate::migration::resuming::Resuming;
use crate::migration::waiting::Question;
use crate::problems::{busy, host, name_taken, unknown_vm};
use crate::qemu::user::User;
use crate::state::{StateDir, write_record};

/// A machine's durable record.
pub mod record;

/// The files that hold machines' RAM.
pub mod backing;

/// What is asked of a machine's QEMU.
pub mod control;

/// Starting machines.
pub mod run;

/// Taking over machines that were started by other means.
pub mod adopt;

/// Balloons.
pub mod balloon;

/// Free memory of guests.
pub mod reclaim;

/// Showing machines.
pub mod show;

/// Stopping machines, and what happens when one ends.
pub mod end;

/// Reading machines' records.
pub mod load;

/// What a restarted daemon finds, and makes of it.
pub mod recover;

/// Machines that run here before all their pages are here.
pub mod paging;

use balloon::Balloons;
use paging::{Bringer, still_arriving};
pub use record::{Lifecycle, VmRecord};

/// What is being done with a machine.
#[derive(Debug, Clone)]
pub enum Hold {
    /// Nothing: it belongs here and may be stopped or moved.
    Free,
    /// It is being started or taken over.
    Starting,
    /// It is being stopped.
    Stopping,
    /// The handling of its balloon is being changed.
    Adjusting,
    /// It is observed, to estimate what its migration would take.
    Estimating(Arc<Monitor>),
    /// What its guest holds free is being taken.
    Reclaiming(Arc<Monitor>),
    /// It is being moved away.
    Leaving(Arc<Monitor>),
    /// It is being moved here.
    Arriving(MigrationId),
    /// It was handed over, and the peer's verdict is not known: it must not run here.
    WaitingForPeer {
        /// Asked for again and again.
        verdict: Arc<Question>,
    },
    /// It is this host's after a migration, and its QEMU has not let it run yet.
    Resuming(Arc<Resuming>),
}

/// A machine in the table.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What is known of it; nothing while it is being started.
    pub record: Option<VmRecord>,
    /// What is being done with it.
    pub hold: Hold,
    /// More on it, for people.
    pub note: Option<String>,
    /// What brings its pages, where it runs here before all of them are here.
    pub pager: Option<Bringer>,
    /// Held while its record is written.
    writing: Arc<Mutex<()>>,
}

impl Entry {
    /// A machine with which this is being done.
    #[must_use]
    pub fn new(record: Option<VmRecord>, hold: Hold) -> Self {
        Self { record, hold, note: None, pager: None, writing: Arc::default() }
    }
}

/// The daemon: everything a request or a migration needs.
#[derive(Debug)]
pub struct Daemon {
    /// The configuration.
    pub config: Config,
    /// What outlives the daemon.
    pub state: StateDir,
    /// Who it is to other daemons.
    pub identity: DaemonId,
    /// What became of migrations.
    pub records: Records,
    /// The migrations this host began.
    pub jobs: Jobs,
    /// What is counted.
    pub metrics: Metrics,
    /// What connections to other daemons are encrypted with, where they are.
    pub credentials: Option<Arc<Credentials>>,
    /// What all migrations away from here may send together.
    pub bandwidth: Arc<Share>,
    /// The balloons that are looked after.
    pub balloons: Balloons,
    table: Mutex<Table>,
    /// Held while what is known of missing pages changes.
    pages_changed: Mutex<()>,
    /// Held while a machine is taken over.
    adopting: Mutex<()>,
    user: Option<User>,
}

/// The machines, by name.
pub type Table = HashMap<String, Entry>;

/// How many machines are on their way here.
#[must_use]
pub fn arriving(table: &Table) -> usize {
    table.values().filter(|entry| matches!(entry.hold, Hold::Arriving(_))).count()
}

/// The machine of the table, another than this one, that has RAM in a file of this one's. Some day machines may share
/// files that none of them writes: those are for this to let pass.
#[must_use]
pub fn shares_ram(table: &Table, record: &VmRecord) -> Option<String> {
    let others = table.values().filter_map(|entry| entry.record.as_ref()).filter(|other| other.name != record.name);
    let shares = |other: &&VmRecord| other.backings().any(|a| record.backings().any(|b| a.file() == b.file()));
    others.into_iter().find(shares).map(|other| other.name.clone())
}

/// What is wrong with `[tls]`, and what to do, in one line.
fn wrong_credentials(problem: &Problem) -> String {
    format!("[tls] cannot be used: {}; {}", problem.with_causes(), problem.hint.as_deref().unwrap_or_default())
}

impl Daemon {
    /// Prepares the state directory; machines are found by [`Daemon::recover`].
    ///
    /// # Errors
    /// What cannot be used, with its causes.
    pub fn new(config: Config) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let state = StateDir::open(&config.state_dir)?;
        let identity = identity::load_or_make(&config.state_dir)?;
        let records = Records::load(&state.migrations())?;
        let user = config.qemu_user.as_deref().map(User::find).transpose()?;
        let credentials = config.tls.clone().map(|files| Credentials::load(files).map(Arc::new)).transpose();
        let credentials = credentials.map_err(|error| wrong_credentials(&error.problem()))?;
        let jobs = Jobs::new(config.max_outgoing);
        let table = Mutex::new(HashMap::new());
        let bandwidth = Arc::new(Share::new(config.bandwidth_bytes_per_s));
        let (metrics, balloons, pages_changed) = (Metrics::new(), Balloons::default(), Mutex::new(()));
        Ok(Self {
            config,
            state,
            identity,
            records,
            jobs,
            metrics,
            credentials,
            bandwidth,
            balloons,
            table,
            pages_changed,
            adopting: Mutex::new(()),
            user,
        })
    }

    /// The machines, to look at or change; nothing slow may happen while this is held.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a name.
    ///
    /// # Errors
    /// A [`Problem`] where it is taken.
    fn reserve(self: &Arc<Self>, name: &str, hold: Hold) -> Result<Reservation, Problem> {
        self.reserve_in(&mut self.table(), name, hold)
    }

    fn reserve_in(self: &Arc<Self>, table: &mut Table, name: &str, hold: Hold) -> Result<Reservation, Problem> {
        if table.contains_key(name) {
            return Err(name_taken(name));
        }
        table.insert(name.into(), Entry::new(None, hold));
        Ok(Reservation { daemon: Arc::clone(self), name: name.into(), kept: false })
    }

    /// Reserves the name of a machine that comes here.
    ///
    /// # Errors
    /// A [`Problem`] where it is taken, or as many machines as may are on their way here.
    pub fn reserve_arriving(self: &Arc<Self>, name: &str, id: MigrationId) -> Result<Reservation, Problem> {
        let mut table = self.table();
        self.check_incoming(&table)?;
        self.reserve_in(&mut table, name, Hold::Arriving(id))
    }

    /// Whether one more machine may come here.
    ///
    /// # Errors
    /// A [`Problem`] where as many as may are on their way already. It says so to the source, which asks again later.
    pub fn check_incoming(&self, table: &Table) -> Result<(), Problem> {
        let limit = self.config.max_incoming;
        if arriving(table) < limit {
            return Ok(());
        }
        Err(Problem::new(Code::TooManyIncoming, Blame::Host, format!("it takes {limit} at a time")))
    }

    /// Claims a machine that nobody else is busy with. One whose pages are not all here can be stopped and nothing else.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, or busy and with what.
    pub fn claim(&self, name: &str, hold: Hold) -> Result<VmRecord, Problem> {
        let mut table = self.table();
        let entry = table.get_mut(name).ok_or_else(|| unknown_vm(name))?;
        match (&entry.hold, &entry.record) {
            (Hold::Free, Some(record)) => {
                if let Some(paging) = &record.paging
                    && !matches!(hold, Hold::Stopping)
                {
                    return Err(still_arriving(name, paging, entry.pager.as_ref()));
                }
                let record = record.clone();
                entry.hold = hold;
                Ok(record)
            }
            (hold, _) => Err(busy(name, describe(hold))),
        }
    }

    /// The same for as long as what is returned lives.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub fn claim_for_now(&self, name: &str, hold: Hold) -> Result<Claimed<'_>, Problem> {
        Ok(Claimed { record: self.claim(name, hold)?, daemon: self })
    }

    /// Gives a claimed machine back.
    pub fn release(&self, name: &str) {
        if let Some(entry) = self.table().get_mut(name) {
            entry.hold = Hold::Free;
        }
    }

    /// Writes a machine's record, to disk and then into the table.
    ///
    /// # Errors
    /// Where the disk refuses; the table then is unchanged.
    pub fn store(&self, record: &VmRecord) -> io::Result<()> {
        let gone = || io::Error::other("the machine is not on the list any more");
        let writing = self.table().get(&record.name).map(|entry| Arc::clone(&entry.writing)).ok_or_else(gone)?;
        // What is written last is what is in the table; and nothing is written while the machine's directory goes.
        let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |entry: &Entry| entry.record.as_ref().is_none_or(|known| known.process == record.process);
        if !self.table().get(&record.name).is_some_and(is_same) {
            return Err(gone());
        }
        write_record(&self.state.vm(&record.name).join("vm.json"), record)?;
        if let Some(entry) = self.table().get_mut(&record.name) {
            entry.record = Some(record.clone());
        }
        Ok(())
    }

    /// The same, where nothing but the log can be told of a failure; whether it is on disk. In the table it stands
    /// either way, and goes to disk with whatever is written next; a daemon started anew finds out again.
    pub fn try_store(&self, record: &VmRecord) -> bool {
        let stored = self.store(record);
        if let Err(error) = &stored {
            tracing::error!(vm = %record.name, %error, "cannot write the machine's record");
            let mut table = self.table();
            let is_same = |known: &VmRecord| known.process == record.process;
            let known = table.get_mut(&record.name).and_then(|entry| entry.record.as_mut());
            if let Some(known) = known.filter(|known| is_same(known)) {
                *known = record.clone();
            }
        }
        stored.is_ok()
    }

    /// The user QEMU runs as.
    #[must_use]
    pub fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    /// A new RAM file's path.
    #[must_use]
    pub fn new_ram_path(&self, name: &str) -> PathBuf {
        self.state.ram().join(format!("{name}-{:08x}", random_u128() as u32))
    }

    /// The library inside QEMU: where the configuration says, else beside the daemon, else where packages put it.
    ///
    /// # Errors
    /// A [`Problem`] where it is nowhere.
    pub fn agent_library(&self) -> Result<PathBuf, Problem> {
        const NAME: &str = "libsterna_agent.so";
        let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(NAME)));
        let places = match &self.config.agent {
            Some(path) => vec![path.clone()],
            None => beside.into_iter().chain([Path::new("/usr/lib/sterna").join(NAME)]).collect(),
        };
        places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
            let list: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
            Problem::new(Code::AgentNotFound, Blame::Host, "the agent library for QEMU is not on this host")
                .hint(format!("it is looked for at {}; name another with 'agent' in sternad.toml", list.join(" and ")))
        })
    }
}

/// A machine that is claimed: given back, whatever the end, when this is dropped.
pub struct Claimed<'a> {
    /// What is known of it.
    pub record: VmRecord,
    daemon: &'a Daemon,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        self.daemon.release(&self.record.name);
        self.daemon.forget_if_ended(&self.record);
    }
}

/// What a machine is busy with, for people.
fn describe(hold: &Hold) -> &'static str {
    match hold {
        Hold::Free => "it is busy",
        Hold::Starting => "it is being started",
        Hold::Stopping => "it is being stopped",
        Hold::Adjusting => "its balloon is being changed",
        Hold::Estimating(_) => "it is observed for an estimate",
        Hold::Reclaiming(_) => "the memory that its guest holds free is being taken",
        Hold::Leaving(_) => "it is being moved away",
        Hold::Arriving(_) => "it is being moved here",
        Hold::Resuming(_) => "it is stopped after a migration, and being let run",
        Hold::WaitingForPeer { .. } => "it was handed over to a peer that has not answered yet",
    }
}

/// A reserved name: given back when dropped, unless kept.
#[derive(Debug)]
pub struct Reservation {
    daemon: Arc<Daemon>,
    name: String,
    kept: bool,
}

impl Reservation {
    /// The machine is there: its record is written, and the name stays.
    ///
    /// # Errors
    /// Where the record cannot be written; the name is given back.
    pub fn keep(mut self, record: &VmRecord, hold: Hold) -> Result<(), Problem> {
        self.daemon.store(record).map_err(|error| host("cannot write the machine's record", &error))?;
        if let Some(entry) = self.daemon.table().get_mut(&self.name) {
            entry.hold = hold;
        }
        self.kept = true;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.daemon.table().remove(&self.name);
        }
    }
}

/// A random number that no other host draws.
#[must_use]
pub fn random_u128() -> u128 {
    let mut bytes = [0u8; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => u128::from_le_bytes(bytes),
        // Requests of up to 256 bytes are never cut short, and every kernel Sterna runs on has the call.
        other => unreachable!("the kernel gives no random numbers: {other:?}"),
    }
}
