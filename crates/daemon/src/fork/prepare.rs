//! What a fork does while the guest runs.
//!
//! Clones whose disks need no overlays start at once, while the machine is asked what it is made of: nothing takes as
//! long as a QEMU's start. They run nothing before the pause, and where the machine turns out to be none that can be
//! forked they are ended. Others start when their overlays are there.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{ScopedJoinHandle, scope};

use sterna_api::{Blame, Code, ForkRequest, MemoryMode, Problem};

use super::away::{Away, Way};
use super::clone::{Begun, Plan};
use super::overlays::{Made, Overlays};
use super::source::{self, Source};
use super::templates::{Templates, template_name};
use super::warm::{content_bytes, needed_bytes};
use crate::machines::claim::Reservation;
use crate::machines::hold::InPlace;
use crate::machines::overlay::TEMPLATE;
use crate::machines::record::VmRecord;
use crate::machines::start::Launcher;
use crate::machines::table::Machines;
use crate::migration::departures::Departures;
use crate::migration::incoming::Destination;
use crate::migration::promises::Promise;
use crate::problems::host;
use crate::several;

/// Clones before they run.
pub(super) struct Clones {
    /// Those of this host.
    pub here: Vec<Begun>,
    /// Those that go to others.
    pub away: Option<Away>,
    /// The overlays that clones of the template get copies of.
    pub of_the_template: Made,
    /// The memory that all of them may need, until they are there.
    pub room: Option<Promise>,
}

/// Clones whose QEMUs start.
type Starting<'scope> = ScopedJoinHandle<'scope, Vec<Result<Begun, Problem>>>;

/// Who prepares.
pub(super) struct Preparation<'a> {
    /// The machines.
    pub machines: &'a Arc<Machines>,
    /// What starts QEMUs.
    pub launcher: &'a Launcher,
    /// This host as one that machines come to.
    pub here: &'a Destination,
    /// This host as one that machines leave.
    pub departures: &'a Arc<Departures>,
    /// The templates.
    pub templates: &'a Templates,
}

impl Preparation<'_> {
    /// Does all that can be done while the guest runs.
    ///
    /// # Errors
    /// A [`Problem`]: what is in the way. The machine is as it was, and nothing of the clones is left.
    pub fn prepare(
        &self,
        record: &VmRecord,
        request: &ForkRequest,
        doing: &InPlace,
    ) -> Result<(Source, Clones), Problem> {
        if request.hold.is_some() {
            self.check_template(record, request)?;
        }
        source::check(record)?;
        let reserved = request.names.iter().map(|name| Reservation::starting(self.machines, name));
        let reserved = reserved.collect::<Result<Vec<_>, _>>()?;
        let named = request.names.iter().cloned().zip(reserved);
        let plan = Plan::new(record, &record.machine, request)?;
        let room = self.promise_room(record, request)?;
        let at_once = !request.overlay_disks && request.to.is_empty();
        let (now, later): (Vec<_>, Vec<_>) = named.partition(|_| at_once);
        scope(|scope| {
            let start = |(name, reservation)| {
                plan.begin(self.launcher, &Overlays::default(), (name, reservation, Made::default()))
            };
            let starting = scope.spawn(move || several::map(now, start));
            let mut source = Source::reach(record, self.launcher, self.here.pools.dir(), request)?;
            doing.found(source.running);
            tracing::debug!("it can be forked");
            match self.ready(&mut source, (starting, later), (record, &plan), request) {
                Ok((here, away, of_the_template)) => Ok((source, Clones { here, away, of_the_template, room })),
                Err(problem) => {
                    source.called_off();
                    Err(problem)
                }
            }
        })
    }

    /// Has all of it ready for the pause. Some clones start already, others do so `later`.
    fn ready(
        &self,
        source: &mut Source,
        (starting, later): (Starting<'_>, Vec<(String, Reservation)>),
        (record, plan): (&VmRecord, &Plan<'_>),
        request: &ForkRequest,
    ) -> Result<(Vec<Begun>, Option<Away>, Made), Problem> {
        let overlays = Overlays::plan(record, source.disks().to_vec(), request)?;
        plan.check(&overlays)?;
        if !overlays.all.is_empty() {
            let making = VmRecord { overlays: overlays.all.clone(), ..record.clone() };
            let stored = self.machines.store(&making);
            stored.map_err(|error| host("cannot write the machine's record", &error))?;
            source.make_overlays(&overlays)?;
        }
        let later = later.into_iter().map(|(name, reservation)| {
            let disks = source.take_overlays(&name);
            (name, reservation, disks)
        });
        let (mut later, mut away) = (later.collect::<Vec<_>>(), None);
        let of_the_template = source.take_overlays(TEMPLATE);
        if !request.to.is_empty() {
            let Self { departures, launcher, here, .. } = *self;
            let (spec, overlays, unshare_reserve) = (source.spec(), &overlays, here.unshare_reserve);
            let image =
                source.image_file().map_err(|error| host("cannot open what the clones are to begin as", &error))?;
            let way = Way { departures, launcher, source: record, spec, plan, overlays, unshare_reserve };
            away = Some(Away::begin(&way, &image, std::mem::take(&mut later), &request.to)?);
        }
        let all_wait = AtomicBool::new(false);
        let (copied, begun, ready) = scope(|scope| {
            let copied = scope.spawn(|| source.get_ready().map(|()| source.empty_page_tables(&all_wait)));
            let mut begun = several::map(later, |each| plan.begin(self.launcher, &overlays, each));
            begun.extend(joined(starting));
            let ready = away.as_mut().map_or(Ok(()), Away::wait_until_ready);
            all_wait.store(true, Ordering::Relaxed);
            (joined(copied), begun, ready)
        });
        copied?;
        ready?;
        let here = begun.into_iter().collect::<Result<_, _>>()?;
        // What the guest has written since.
        source.copy_ahead()?;
        Ok((here, away, of_the_template))
    }

    /// Checks that a template can be made of a machine.
    fn check_template(&self, record: &VmRecord, request: &ForkRequest) -> Result<(), Problem> {
        self.templates.check_free(template_name(request, &record.name))?;
        let Some(begun_as) = record.template() else { return Ok(()) };
        let (name, file) = (&record.name, begun_as.path.display());
        let message = format!("no template can be made of '{name}': its memory began as {file}, which is not Sterna's");
        Err(Problem::new(Code::CannotFork, Blame::Request, message).hint("fork it into clones with names"))
    }

    /// Has room promised for the clones' QEMUs, for what is kept back of what they may write, and for the copy of the
    /// pages that a guest in private memory has for its own; where they go to other hosts, for the copy of private
    /// memory that is what they begin as. Once they are there their records say that.
    fn promise_room(&self, record: &VmRecord, request: &ForkRequest) -> Result<Option<Promise>, Problem> {
        let (here, name) = (self.here, &record.name);
        if !request.to.is_empty() && record.memory_mode == MemoryMode::Shared {
            return Ok(None);
        }
        let content = content_bytes(record);
        if !request.to.is_empty() {
            return here.promise(&format!("a copy of the memory of '{name}'"), content).map(Some);
        }
        let clones = request.names.len() as u64 + u64::from(request.hold.unwrap_or(0));
        let copied = if record.memory_mode == MemoryMode::Private { record.allocated_bytes() } else { 0 };
        let needed = needed_bytes(content, here.unshare_reserve, clones).saturating_add(copied);
        here.promise(&format!("what may become of {clones} clones of '{name}'"), needed).map(Some)
    }
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
