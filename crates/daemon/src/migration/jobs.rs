//! The migrations this host began: accepted, queued, driven, and remembered for a while.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, MigrateRequest, Migration, Phase, Problem, Progress, Report, Status};
use sterna_engine::monitor::Monitor;

use super::outgoing;
use super::queue::Queue;
use crate::problems::{host, invalid, unknown_vm};
use crate::vms::{Daemon, Hold, VmRecord};

/// Ended migrations that are remembered.
const KEEP: usize = 100;
/// The most machines of one gang.
const MAX_GANG: usize = 256;

/// A migration: one machine, or a gang moved together.
#[derive(Debug)]
pub struct Job {
    /// Its number on this host.
    pub id: u64,
    /// The destination daemon.
    pub to: String,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    monitor: Arc<Monitor>,
    report: Mutex<Option<Report>>,
    ended: AtomicBool,
}

impl Job {
    /// The migration as the API shows it.
    #[must_use]
    pub fn show(&self) -> Migration {
        // Ended first: what is read after it is the final word.
        let ended = self.ended();
        Migration {
            id: self.id,
            to: self.to.clone(),
            progress: self.progress(),
            migrations: self.members.iter().filter_map(|member| lock(&member.report).clone()).collect(),
            ended,
        }
    }

    /// Where each machine stands.
    #[must_use]
    pub fn progress(&self) -> Vec<Progress> {
        self.members.iter().map(|member| member.monitor.progress()).collect()
    }

    /// How one of its machines' migration is seen.
    #[must_use]
    pub fn monitor(&self, index: usize) -> &Arc<Monitor> {
        &self.members[index].monitor
    }

    /// The last word on one of its machines.
    pub fn end(&self, index: usize, daemon: &Daemon, report: Report) {
        let member = &self.members[index];
        daemon.metrics.migration_ended(&report);
        member.monitor.update(|progress| progress.phase = Phase::Done);
        *lock(&member.report) = Some(report);
        member.ended.store(true, Ordering::Release);
    }

    /// Whether all machines have ended.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.members.iter().all(|member| member.ended.load(Ordering::Acquire))
    }
}

/// All of them.
#[derive(Debug)]
pub struct Jobs {
    table: Mutex<Table>,
    /// Those that wait for their turn.
    pub queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    jobs: VecDeque<Arc<Job>>,
}

impl Jobs {
    /// With so many machines on their way at one time.
    #[must_use]
    pub fn new(max_outgoing: usize) -> Self {
        let table = Table { next: 1, jobs: VecDeque::new() };
        Self { table: Mutex::new(table), queue: Arc::new(Queue::new(max_outgoing)) }
    }

    /// All that are running or remembered, the oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Job>> {
        lock(&self.table).jobs.iter().cloned().collect()
    }

    /// One of them.
    ///
    /// # Errors
    /// A [`Problem`] where there is none of this number.
    pub fn get(&self, id: u64) -> Result<Arc<Job>, Problem> {
        lock(&self.table).jobs.iter().find(|job| job.id == id).cloned().ok_or_else(|| {
            Problem::new(Code::UnknownMigration, Blame::Request, format!("there is no migration {id}"))
                .hint(format!("the last {KEEP} are remembered until the daemon restarts"))
        })
    }

    /// Cancels all that are under way and waits until their guests are given back, or until `timeout`. Those whose guests run elsewhere before
    /// all their pages are there are the next daemon's to go on with.
    pub fn cancel_all(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let jobs = self.list();
        let members = || jobs.iter().flat_map(|job| &job.members);
        members().for_each(|member| {
            member.monitor.cancel();
        });
        let ends = |member: &Member| {
            member.ended.load(Ordering::Acquire) || member.monitor.progress().phase == Phase::Postcopy
        };
        while !members().all(ends) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A job for a machine that was handed over before.
    #[must_use]
    pub fn take_up(&self, to: &str, name: &str) -> Arc<Job> {
        self.add(to, &[name.into()])
    }

    /// Where the migration goes that is seen so.
    #[must_use]
    pub fn peer_of(&self, monitor: &Arc<Monitor>) -> Option<String> {
        let is_it = |job: &&Arc<Job>| job.members.iter().any(|member| Arc::ptr_eq(&member.monitor, monitor));
        self.list().iter().find(is_it).map(|job| job.to.clone())
    }

    fn add(&self, to: &str, names: &[String]) -> Arc<Job> {
        let mut table = lock(&self.table);
        let member = |name: &String| Member {
            monitor: Arc::new(Monitor::new(name)),
            report: Mutex::new(None),
            ended: AtomicBool::new(false),
        };
        let job = Arc::new(Job { id: table.next, to: to.into(), members: names.iter().map(member).collect() });
        table.next += 1;
        table.jobs.push_back(Arc::clone(&job));
        let surplus = table.jobs.len().saturating_sub(KEEP);
        let oldest: Vec<u64> = table.jobs.iter().filter(|job| job.ended()).map(|job| job.id).take(surplus).collect();
        table.jobs.retain(|job| !oldest.contains(&job.id));
        job
    }

    fn drop_job(&self, id: u64) {
        lock(&self.table).jobs.retain(|job| job.id != id);
    }
}

impl Daemon {
    /// Begins a migration. Every machine is claimed, or none is.
    ///
    /// # Errors
    /// A [`Problem`]: an unknown or busy machine, options that cannot be.
    pub fn migrate(self: &Arc<Self>, request: &MigrateRequest) -> Result<Arc<Job>, Problem> {
        check_request(request)?;
        let job = self.jobs.add(&request.to, &request.vms);
        let mut claimed: Vec<VmRecord> = Vec::new();
        for (name, member) in request.vms.iter().zip(&job.members) {
            match self.claim(name, Hold::Leaving(Arc::clone(&member.monitor))) {
                Ok(record) => claimed.push(record),
                Err(problem) => {
                    for record in &claimed {
                        self.release(&record.name);
                        // While it was claimed nobody took note of its end.
                        self.forget_if_ended(record);
                    }
                    self.jobs.drop_job(job.id);
                    return Err(problem);
                }
            }
        }
        for (index, record) in claimed.into_iter().enumerate() {
            let (daemon, to_drive, options) = (Arc::clone(self), Arc::clone(&job), request.options.clone());
            // In the order of the request, whichever thread is the first.
            let ticket = self.jobs.queue.join(&request.to);
            let leaving = record.clone();
            let drive = move || {
                let monitor = &to_drive.members[index].monitor;
                let report = outgoing::drive(&daemon, &leaving, &to_drive.to, &options, monitor, &ticket);
                drop(ticket);
                to_drive.end(index, &daemon, report);
            };
            let spawned = std::thread::Builder::new().name(format!("move-{}", record.name)).spawn(drive);
            if let Err(error) = spawned {
                let problem = host("cannot start a migration's thread", &error);
                let monitor = &job.members[index].monitor;
                let report =
                    outgoing::refused(self, &record, &job.to, &request.options, monitor, problem, Status::Failed);
                job.end(index, self, report);
            }
        }
        Ok(job)
    }

    /// Cancels a machine's migration, its estimate, or the taking of its free memory.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, not being moved, or past the point of no return.
    pub fn cancel(&self, name: &str) -> Result<(), Problem> {
        let hold = self.table().get(name).map(|entry| entry.hold.clone()).ok_or_else(|| unknown_vm(name))?;
        let late = |why: &str| {
            Err(Problem::new(
                Code::TooLate,
                Blame::Request,
                format!("'{name}' {why}: its migration cannot be cancelled"),
            ))
        };
        match hold {
            Hold::Leaving(monitor) | Hold::Estimating(monitor) | Hold::Reclaiming(monitor) if monitor.cancel() => {
                Ok(())
            }
            Hold::Leaving(monitor) if monitor.progress().phase == Phase::Postcopy => {
                late("runs at its destination already, and the rest of its pages follow")
            }
            Hold::Leaving(_) | Hold::WaitingForPeer { .. } => late("has been handed over"),
            Hold::Arriving(_) => Err(Problem::new(
                Code::Arriving,
                Blame::Request,
                format!("'{name}' is being moved here: its migration is its source's to cancel"),
            )),
            _ => Err(Problem::new(Code::NotMigrating, Blame::Request, format!("'{name}' is not being moved"))),
        }
    }
}

fn check_request(request: &MigrateRequest) -> Result<(), Problem> {
    request.options.check().map_err(invalid)?;
    if request.vms.is_empty() || request.vms.len() > MAX_GANG {
        return Err(invalid(format!(
            "{} machines cannot be moved together: between 1 and {MAX_GANG}",
            request.vms.len()
        )));
    }
    if let Some(twice) = request.vms.iter().enumerate().find(|(index, name)| request.vms[..*index].contains(name)) {
        return Err(invalid(format!("'{}' is named twice", twice.1)));
    }
    check_address(&request.to)
}

/// Whether a daemon can be at this address.
///
/// # Errors
/// A [`Problem`] where it is not of the form `HOST:PORT`.
pub fn check_address(address: &str) -> Result<(), Problem> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    if port.is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(invalid(format!("'{address}' is not of the form HOST:PORT")));
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_jobs_are_never_forgotten_and_ended_ones_are() {
        let jobs = Jobs::new(1);
        let running = jobs.add("b:1", &["running".into()]);
        for _ in 0..150 {
            let job = jobs.add("b:1", &["x".into()]);
            job.members[0].ended.store(true, Ordering::Release);
        }
        assert!(jobs.get(running.id).is_ok());
        assert!(jobs.list().len() <= KEEP + 1);
        assert_eq!(jobs.get(2).unwrap_err().code, "unknown-migration");
    }
}
