//! The migrations that this host began, as the API shows them: from their acceptance until a while after their end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Migration, Phase, Problem, Progress, Report, Totals};
use sterna_engine::monitor::Monitor;

use super::queue::Queue;
use crate::metrics::Metrics;

/// How many ended migrations are remembered.
const KEEP: usize = 100;

/// A migration as the API shows it: of one machine, or of a gang.
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
        // The end is read first: what is read after it is final.
        let ended = self.ended();
        let migrations: Vec<Report> = self.members.iter().filter_map(|member| lock(&member.report).clone()).collect();
        let totals = Totals::of(&migrations);
        Migration { id: self.id, to: self.to.clone(), progress: self.progress(), migrations, totals, ended }
    }

    /// The progress of each machine.
    #[must_use]
    pub fn progress(&self) -> Vec<Progress> {
        self.members.iter().map(|member| member.monitor.progress()).collect()
    }

    /// The monitor of one of its machines.
    #[must_use]
    pub fn monitor(&self, index: usize) -> &Arc<Monitor> {
        &self.members[index].monitor
    }

    /// Notes the final report on one of its machines.
    pub fn end(&self, index: usize, metrics: &Metrics, report: Report) {
        let member = &self.members[index];
        metrics.migration_ended(&report);
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

/// All migrations that this host began.
#[derive(Debug)]
pub struct Jobs {
    table: Mutex<Table>,
    /// The queue of those that wait for their turn.
    pub queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    jobs: VecDeque<Arc<Job>>,
}

impl Jobs {
    /// Begins, with at most this many machines on their way at one time.
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

    /// The migration of this number.
    ///
    /// # Errors
    /// A [`Problem`] where there is none of this number.
    pub fn get(&self, id: u64) -> Result<Arc<Job>, Problem> {
        lock(&self.table).jobs.iter().find(|job| job.id == id).cloned().ok_or_else(|| {
            Problem::new(Code::UnknownMigration, Blame::Request, format!("there is no migration {id}"))
                .hint(format!("the last {KEEP} are remembered until the daemon restarts"))
        })
    }

    /// Cancels all migrations that are under way and waits until their guests run on here, or until `timeout`. The next
    /// daemon goes on with those whose guests run elsewhere while pages are missing.
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

    /// A new job, of the machines of these names.
    #[must_use]
    pub fn add(&self, to: &str, names: &[String]) -> Arc<Job> {
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

    /// Forgets a job that was not begun.
    pub fn drop_job(&self, id: u64) {
        lock(&self.table).jobs.retain(|job| job.id != id);
    }
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
