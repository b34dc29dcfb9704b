//! The daemon: its parts, and how they are put together. Each part names what it may touch; only the API sees all of
//! them.

use std::sync::Arc;

use sterna_api::Problem;
use sterna_engine::store::Store;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::transport::share::Share;
use sterna_sys::host;

use crate::adopt::Adoptions;
use crate::balloon::Balloons;
use crate::balloon::lending::Lending;
use crate::care::Care;
use crate::config::Config;
use crate::fork::Fork;
use crate::fork::templates::Templates;
use crate::fork::warm::WarmPools;
use crate::identity;
use crate::kept::Keeper;
use crate::machines::images::Images;
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::start::Launcher;
use crate::machines::table::Machines;
use crate::metrics::Metrics;
use crate::migration::departures::Departures;
use crate::migration::incoming::Destination;
use crate::migration::jobs::Jobs;
use crate::migration::paging::Pages;
use crate::migration::pools::Pools;
use crate::migration::records::Records;
use crate::qemu::user::User;
use crate::reclaim::Reclaim;
use crate::recover::Recovery;
use crate::replace::Replace;
use crate::split::Splits;
use crate::split::loans::Loans;
use crate::state::StateDir;

/// The daemon: everything a request needs.
#[derive(Debug)]
pub struct Daemon {
    /// The configuration.
    pub config: Config,
    /// The state directory: what outlives the daemon.
    pub state: Arc<StateDir>,
    /// The machines.
    pub machines: Arc<Machines>,
    /// Their balloons.
    pub balloons: Arc<Balloons>,
    /// The part that looks after them.
    pub care: Care,
    /// The part that starts them.
    pub launcher: Arc<Launcher>,
    /// What is lent to guests of other hosts.
    pub lent: Arc<Store>,
    /// What is kept of machines that have left.
    pub keeper: Arc<Keeper>,
    /// The part that takes running machines over.
    pub adoptions: Adoptions,
    /// This host as a source.
    pub departures: Arc<Departures>,
    /// This host as a destination.
    pub destination: Destination,
    /// The files that RAM consists of once it was forked.
    pub images: Arc<Images>,
    /// What clones can be made of, and those that are held ready.
    pub warm: Arc<WarmPools>,
    /// The part that splits machines.
    pub splits: Arc<Splits>,
    /// What memory hosts have lent, and is to be given back.
    pub loans: Arc<Loans>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
}

impl Daemon {
    /// Prepares the state directory; machines are found by [`Daemon::recovery`].
    ///
    /// # Errors
    /// What is invalid or missing, with its causes.
    pub fn new(config: Config) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let state = Arc::new(StateDir::open(&config.state_dir, config.huge_pages)?);
        let identity = identity::load_or_make(&config.state_dir)?;
        let records = Arc::new(Records::load(&state.migrations())?);
        let user = config.qemu_user.as_deref().map(User::find).transpose()?;
        let credentials = config.tls.clone().map(|files| Credentials::load(files).map(Arc::new)).transpose();
        let credentials = credentials.map_err(|error| wrong_credentials(&error.problem()))?;
        let (metrics, lending) = (Arc::new(Metrics::new()), Arc::new(Lending::default()));
        let loans = Arc::new(Loans::new(state.owed(), credentials.clone()));
        let forgotten = {
            let (records, loans, state) = (Arc::clone(&records), Arc::clone(&loans), Arc::clone(&state));
            move |record: &VmRecord| {
                records.machine_ended(record);
                // What was lent to one that has gone to another host, or never came from one, that host gives back.
                if record.lifecycle == Lifecycle::Here {
                    loans.owe(record, &state.vm(&record.name));
                    loans.pay();
                }
            }
        };
        let machines = Arc::new(Machines::new(Arc::clone(&state), forgotten));
        let balloons = Arc::new(Balloons::new(Arc::clone(&machines), Arc::clone(&metrics), Arc::clone(&lending)));
        let care = Care { machines: Arc::clone(&machines), balloons: Arc::clone(&balloons) };
        let launcher = Arc::new(Launcher {
            state: Arc::clone(&state),
            agent: config.agent.clone(),
            user,
            ksm_group: config.ksm_group.clone(),
            huge_pages: config.huge_pages,
        });
        let lent = Arc::new(Store::open(&state.lent(), host::name(), config.lend_memory_bytes)?);
        let keeper = Keeper::new(state.ram(), Arc::clone(&lent), config.keep_departed, config.memory_floor_bytes);
        let departures = Arc::new(Departures {
            identity,
            keeper: Arc::clone(&keeper),
            machines: Arc::clone(&machines),
            records: Arc::clone(&records),
            jobs: Arc::new(Jobs::new(config.max_outgoing)),
            metrics: Arc::clone(&metrics),
            lending,
            credentials: credentials.clone(),
            bandwidth: Arc::new(Share::new(config.bandwidth_bytes_per_s)),
            trust_first_look: config.test_trust_first_look,
            may_haste: config.pause_priority,
        });
        let reached = (departures.credentials.clone(), config.listen.clone());
        let splits = Splits::new(care.clone(), Arc::clone(&state), Arc::clone(&keeper), reached, Arc::clone(&loans));
        let splits = Arc::new(splits);
        let destination = Destination {
            identity,
            credentials,
            care: care.clone(),
            pages: Arc::new(Pages::new(care.clone(), Arc::clone(&records))),
            records,
            launcher: Arc::clone(&launcher),
            pools: Arc::new(Pools::new(state.ram())),
            promises: Arc::default(),
            keeper: Arc::clone(&keeper),
            lent: Arc::clone(&lent),
            max_incoming: config.max_incoming,
            unshare_reserve: config.unshare_reserve,
            memory_floor_bytes: config.memory_floor_bytes,
            offer_pools: config.offer_pools,
            may_haste: config.pause_priority,
            qemu: config.qemu.clone(),
            listen: config.listen.clone(),
            splits: Arc::clone(&splits),
        };
        let images = Arc::new(Images::new(state.ram()));
        let templates = Templates::new(state.templates(), Arc::clone(&images));
        let warm = Arc::new(WarmPools::new(care.clone(), Arc::clone(&launcher), destination.clone(), templates));
        let adoptions = Adoptions::new(care.clone(), Arc::clone(&state));
        Ok(Self {
            config,
            state,
            machines,
            balloons,
            care,
            launcher,
            lent,
            keeper,
            adoptions,
            departures,
            destination,
            images,
            warm,
            splits,
            loans,
            metrics,
        })
    }

    /// The part that takes up what an earlier daemon left in the state directory.
    #[must_use]
    pub fn recovery(&self) -> Recovery<'_> {
        Recovery {
            state: &self.state,
            care: &self.care,
            pages: &self.destination.pages,
            departures: &self.departures,
            images: &self.images,
            warm: &self.warm,
            splits: &self.splits,
            loans: &self.loans,
        }
    }

    /// The part that takes memory that guests hold free.
    #[must_use]
    pub fn reclaim(&self) -> Reclaim<'_> {
        Reclaim {
            machines: &self.machines,
            lending: &self.departures.lending,
            metrics: &self.metrics,
            trust_first_look: self.config.test_trust_first_look,
        }
    }

    /// The part that replaces machines' QEMUs.
    #[must_use]
    pub fn replace(&self) -> Replace<'_> {
        let (here, may_haste) = (&self.destination, self.config.pause_priority);
        Replace { care: &self.care, launcher: &self.launcher, here, may_haste }
    }

    /// The part that forks machines.
    #[must_use]
    pub fn fork(&self) -> Fork<'_> {
        Fork {
            care: &self.care,
            launcher: &self.launcher,
            here: &self.destination,
            departures: &self.departures,
            images: &self.images,
            warm: &self.warm,
        }
    }

    /// The migrations that this host began.
    #[must_use]
    pub fn jobs(&self) -> &Jobs {
        &self.departures.jobs
    }
}

/// What is wrong with `[tls]`, and what to do, in one line.
fn wrong_credentials(problem: &Problem) -> String {
    format!("[tls] cannot be used: {}; {}", problem.with_causes(), problem.hint.as_deref().unwrap_or_default())
}
