//! The source's side of a migration, phase by phase: `connect` → `prepare` → `precopy` → `switchover` →
//! `postcopy` → `finish`, and from each of the first four, `rollback`.

/// The state that all phases share.
pub mod departure;

/// Phase *connect*: version and features.
pub mod connect;

/// The connections to the destination.
pub mod link;

/// Phase *prepare*: the machine is accepted, tracking is armed.
pub mod prepare;

/// Phase *precopy*: rounds while the guest runs.
pub mod precopy;

/// Foresight: whether rounds can reach the downtime limit at all.
mod foresight;

/// Rounds of pages.
pub mod rounds;

/// Tracking: which pages the guest writes.
pub mod track;

/// Writes that no tracker sees.
pub mod untracked;

/// Skips: reasons that leave outstanding pages to a later round.
pub mod skip;

/// Fake dirty pages: written again before their turn.
pub mod fake_dirty;

/// Hot pages: written in each of the last rounds.
pub mod hot;

/// Free pages: those that the guest holds for nobody.
pub mod free;

/// Free pages that are left out of rounds, from one look to the next.
pub mod left_out;

/// Sent pages: what the destination holds of each.
pub mod sent;

/// Pages of a split guest that do not travel.
pub mod stays;

/// Silent writes: pages that are written and hold what they held.
mod silent;

/// Unchanged pages: their content is what was last sent.
pub mod content;

/// Selection: the decision which pages of a chunk travel.
pub mod select;

/// Copies of pages' bodies, in memory that is used again.
pub mod copies;

/// Gangs: machines that leave together, and the bodies that they share.
pub mod gang;

/// Tickets: what machines take along for the day when they come back.
pub mod tickets;

/// Encoding: deltas, compressed, or plain.
pub mod encode;

/// Outbound: what goes of a chunk, ready to be sent.
pub mod outbound;

/// Streams: the connections that carry pages.
pub mod stream;

/// Route: which connection a chunk takes.
pub mod route;

/// Queues between the threads that encode and those that send.
mod queue;

/// One round, and its threads.
pub mod round;

/// Throttling: processor time taken away from the guest.
pub mod throttle;

/// Pauses of machines that leave together.
pub mod pauses;

/// Phase *switchover*: the guest stops here and is loaded there.
pub mod switchover;

/// A guest whose devices are loaded at the destination.
pub mod loaded;

/// The devices' state on its way to the destination.
pub mod devices;

/// Verification: the comparison of both sides.
pub mod verify;

/// Commit: the point of no return.
pub mod commit;

/// Fate: where the guest is in the end.
pub mod fate;

/// Phase *postcopy*: the rest of the pages follows.
pub mod postcopy;

/// Phase *finish*: the VMM ends here.
mod finish;

/// Phase *rollback*: the guest stays.
mod rollback;

/// The migration's report.
pub mod account;

/// Pages for a guest that an earlier daemon handed over.
mod serve;

/// Observation: a short look at a guest that runs on.
pub mod observe;

/// Samples of the content of a guest's pages.
pub mod sample;

/// Estimation: what a migration would cost.
pub mod estimate;

use std::sync::Arc;

use sterna_api::report::{Host, Report};
use sterna_api::{MigrateOptions, Phase};
use sterna_protocol::spec::VmSpec;

use self::account::Account;
use self::commit::Given;
pub use self::commit::ask_verdict;
use self::departure::Departure;
pub use self::fate::Fate;
pub use self::gang::Gang;
use self::link::Link;
use self::pauses::Place;
use self::postcopy::Handed;
use self::prepare::Prepared;
pub use self::serve::{Left, serve};
use self::stays::Stays;
use self::throttle::Throttle;
use self::tickets::Tickets;
use self::track::Tracker;
use self::verify::AtStop;
use crate::error::MigrateError;
use crate::haste::Haste;
use crate::host::{Clone, DaemonId, MigrationId, SourceHost};
use crate::memory::{BlockFile, Memory};
use crate::monitor::Monitor;
use crate::split::Split;
use crate::transport::share::Share;
use crate::vmm;

/// A machine to be moved away, and what is needed to move it.
pub struct Outgoing {
    /// The migration, drawn at random.
    pub id: MigrationId,
    /// The machine, for the destination.
    pub spec: VmSpec,
    /// Its VMM.
    pub vmm: Box<dyn vmm::Source>,
    /// Its RAM, in the order of `spec.blocks`, with addresses in the VMM's process.
    pub blocks: Vec<BlockFile>,
    /// The tracker of its writes; [`track::WriteProtect`] for QEMU.
    pub tracker: Box<dyn Tracker>,
    /// The throttle, where one is asked for; [`throttle::ProcessThrottle`] for QEMU.
    pub throttle: Box<dyn Throttle>,
    /// Who is known to write into its RAM past the page tables; the VMM is asked again while its pages are sent.
    pub untracked: vmm::Untracked,
    /// Whether pages that were free once are left out for ever, whoever writes them. Only for tests that show why the
    /// order of the looks matters.
    #[doc(hidden)]
    pub trust_first_look: bool,
    /// What all migrations away from this host may send together.
    pub bandwidth: Arc<Share>,
    /// The gang that the machine shares pages with, and which of its members the machine is.
    pub gang: Option<(Arc<Gang>, u16)>,
    /// Its tickets.
    pub tickets: Tickets,
    /// What it is, where it is a clone of a machine that runs on.
    pub clone: Option<Clone>,
    /// The part of it that is at memory hosts, and stays there; `spec.split` says where. Its tracker stands beside the
    /// pager ([`WriteProtect::of`](track::WriteProtect::of)).
    pub split: Option<Arc<Split>>,
    /// When its guest may be stopped, where others leave with it.
    pub pause: Place,
    /// This host, for the report.
    pub here: Host,
}

/// A migration that has ended.
pub struct Outcome {
    /// Its report.
    pub report: Report,
    /// The VMM, which has ended where the fate is [`Fate::There`].
    pub vmm: Box<dyn vmm::Source>,
    /// Where the guest is.
    pub fate: Fate,
    /// The daemon that accepted it, where it got that far and the daemon could say who it is.
    pub daemon: Option<DaemonId>,
}

/// Moves a machine to `peer`. Blocks until it has ended; meanwhile `monitor` shows where it stands, and cancels it. The
/// options' time limit counts from here.
#[must_use]
pub fn migrate(
    outgoing: Outgoing,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Outcome {
    let Outgoing { id, spec, mut vmm, blocks, mut tracker, mut throttle, untracked, trust_first_look, .. } = outgoing;
    let Outgoing { bandwidth, gang, tickets, clone, split, pause, here, .. } = outgoing;
    let mut account = Account::new(Report::asked(&spec.name, options, here, peer), monitor);
    // At `debug`, each line of a gang's members says whose it is.
    let _whose = tracing::debug_span!("leaves", vm = %spec.name).entered();
    monitor.begin();
    account.begun();
    let mut departure = Departure {
        id,
        spec: &spec,
        vmm: vmm.as_mut(),
        blocks: &blocks,
        tracker: tracker.as_mut(),
        throttle: throttle.as_mut(),
        untracked,
        trust_first_look,
        bandwidth,
        gang,
        tickets,
        ram: None,
        clone,
        split,
        pause,
        haste: Haste::none(),
        vmm_threads: None,
        peer,
        daemon: None,
        options,
        host,
        monitor,
        account,
    };
    let departed = depart(&mut departure);
    departure.let_go();
    let fate = departed.unwrap_or_else(|error| rollback::rollback(&mut departure, error));
    finish::finish(&mut departure, fate);
    let Departure { daemon, account, .. } = departure;
    Outcome { report: account.report, vmm, fate, daemon }
}

/// Runs the phases in their order. An error means that the guest is still the source's.
fn depart(departure: &mut Departure) -> Result<Fate, MigrateError> {
    let ram = departure.check()?;
    let mut link = connect::connect(departure)?;
    match leave(departure, &mut link, &ram) {
        Ok(Gone::Ended(fate)) => Ok(fate),
        Ok(Gone::Paging(handed)) => {
            postcopy::postcopy(departure, link, *handed);
            Ok(Fate::There)
        }
        Err(error) => Err(rollback::reason(departure, &mut link, error)),
    }
}

/// Runs the phases in which the guest is still here.
fn leave(departure: &mut Departure, link: &mut Link, ram: &Arc<dyn Memory>) -> Result<Gone, MigrateError> {
    let mut prepared = prepare::prepare(departure, link, ram)?;
    let given = precopy::precopy(departure, link, &mut prepared)
        .and_then(|ending| switchover::switchover(departure, link, &mut prepared, ending))
        .and_then(|loaded| commit::commit(departure, link, &loaded, prepared.clock_offset_us));
    departure.haste = Haste::none();
    departure.pause.over();
    prepared.rounds.calm();
    departure.account.rounds(&prepared.rounds);
    match given {
        Ok(Given::Ended(fate)) => {
            if fate == Fate::There && departure.options.verify && prepared.verify_after.is_ok() {
                departure.monitor.enter(Phase::Finish);
                let rounds = &prepared.rounds;
                let away = rounds.stays.as_ref().and_then(Stays::told);
                let verify = verify::compare_after(link, AtStop { ram: ram.as_ref(), free: Some(rounds.free()), away });
                departure.account.compared(verify);
            }
            Ok(Gone::Ended(fate))
        }
        Ok(Given::Postcopy { stands }) => {
            let Prepared { mut rounds, begun, .. } = prepared;
            Ok(Gone::Paging(Box::new(Handed::new(begun, &mut rounds, stands))))
        }
        Err(error) => {
            if let Some(member) = &prepared.rounds.member {
                member.give_up();
            }
            Err(prepared.reason(error))
        }
    }
}

/// The work that is left once the guest has gone, or nobody knows whether it has.
enum Gone {
    /// No work is left.
    Ended(Fate),
    /// Its pages follow it.
    Paging(Box<Handed>),
}
