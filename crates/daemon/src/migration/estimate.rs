//! The estimate of a machine's migration: the machine is observed while it runs on, and stays.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::estimate::{MAX_DURATION_MS, MIN_DURATION_MS};
use sterna_api::options::{MigrateOptions, Mode};
use sterna_api::{Blame, Code, Estimate, Problem};
use sterna_engine::error::MigrateError;
use sterna_engine::memory::kind;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::estimate::estimate as played_through;
use sterna_engine::source::free::{free_now, page_cache_now};
use sterna_engine::source::observe::observe;
use sterna_protocol::pages::PageMap;
use sterna_sys::map::Access;

use crate::machines::claim::Claimed;
use crate::machines::control;
use crate::machines::hold::{Activity, Connection, Hold, cancel};
use crate::machines::reach::movable;
use crate::machines::table::Machines;
use crate::problems::{host, invalid};

/// The question to an estimate.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    /// The link's bandwidth, bytes per second.
    pub bandwidth_bytes_per_s: u64,
    /// How long to observe, milliseconds.
    pub duration_ms: u64,
    /// The longest pause accepted, milliseconds.
    pub downtime_limit_ms: f64,
    /// Whether to look for clean pages of the guest's page cache.
    pub page_cache: bool,
}

/// The activity of being observed for an estimate.
#[derive(Debug)]
struct Estimating(Arc<Monitor>);

impl Activity for Estimating {
    fn describe(&self) -> &'static str {
        "it is observed for an estimate"
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        cancel(&self.0, name)
    }

    fn connection(&self) -> Connection {
        Connection::Free
    }

    fn may_be_split(&self) -> bool {
        true
    }
}

/// Estimates a machine's migration. Blocks for the observation's time; `monitor` can cut it short. No migration of the
/// machine begins meanwhile, because only one can watch a machine's writes. Of a machine that is split what is here
/// would travel; what is free of that is not known, as what tells may be away.
///
/// # Errors
/// A [`Problem`]: the machine is unknown, busy or of a kind that cannot be moved, or the question is invalid.
pub fn estimate(
    machines: &Machines,
    name: &str,
    question: Question,
    monitor: &Arc<Monitor>,
) -> Result<Estimate, Problem> {
    question.check()?;
    let claimed = Claimed::new(machines, name, Hold::busy(Estimating(Arc::clone(monitor))))?;
    let split = machines.split_of(&claimed.record)?;
    let movable = movable(&claimed.record, split.as_ref().map(|split| split.pager()))?;
    let ram = kind::open(&movable.blocks, Access::Read);
    let ram = ram.map_err(|error| host("cannot map the machine's RAM", &error))?;
    // QEMU serves one client at a time, and it is asked for nothing more after this.
    let mut vmm = control::source(&claimed.record, movable.control.share())?;
    let nothing = || PageMap::empty(ram.layout());
    let free = match split {
        Some(_) => nothing(),
        None => free_now(&mut vmm, &ram).unwrap_or_else(|reason| {
            tracing::info!(vm = name, %reason, "the guest's free pages are unknown");
            nothing()
        }),
    };
    let cached = (question.page_cache && split.is_none()).then(|| page_cache_now(&mut vmm, &ram));
    drop(vmm);
    let cached = cached.and_then(|cached| {
        let not_told = |reason| tracing::info!(vm = name, %reason, "the guest's page cache is unknown");
        cached.map_err(not_told).ok()
    });
    let mut tracker = movable.tracker;
    let seen = observe(ram.as_ref(), &mut tracker, &free, Duration::from_millis(question.duration_ms), monitor);
    let seen = seen.map_err(|error| match error {
        MigrateError::Cancelled => {
            Problem::new(Code::Cancelled, Blame::Request, format!("the observation of '{name}' was cancelled"))
        }
        error => error.problem(),
    })?;
    let limit = Duration::from_secs_f64(question.downtime_limit_ms / 1e3);
    let mut estimate = played_through(name, &seen, question.bandwidth_bytes_per_s, limit);
    if split.is_some() {
        estimate.ways.retain(|way| matches!(way.mode, Mode::Precopy | Mode::StopAndCopy));
    }
    if let Some(mut cached) = cached {
        let allocated = ram.allocated().map_err(|error| host("cannot look for holes in the machine's RAM", &error))?;
        cached.keep(&allocated);
        estimate.observed.page_cache_pages = Some(cached.len());
    }
    Ok(estimate)
}

impl Question {
    /// Checks that a migration would accept the rate and the limit, and that the time is within bounds.
    fn check(&self) -> Result<(), Problem> {
        if !(MIN_DURATION_MS..=MAX_DURATION_MS).contains(&self.duration_ms) {
            let asked = self.duration_ms;
            return Err(invalid(format!(
                "the duration is {asked} ms: it must be between {MIN_DURATION_MS} and {MAX_DURATION_MS} ms"
            )));
        }
        let options = MigrateOptions {
            bandwidth_bytes_per_s: Some(self.bandwidth_bytes_per_s),
            downtime_limit_ms: self.downtime_limit_ms,
            ..MigrateOptions::default()
        };
        options.check().map_err(invalid)
    }
}
