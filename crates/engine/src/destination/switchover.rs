//! Phase *switchover*: the guest is stopped at the source; its last pages, or their map, and its devices arrive; it
//! runs here.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::message::{MAX_DIGEST_CHUNKS, MAX_SUSPECTS, Reply, Request};
use sterna_protocol::pages::PageMap;
use sterna_protocol::spec::VmSpec;

use super::away::Away;
use super::landing::Landing;
use super::postcopy::note_part;
use crate::error::MigrateError;
use crate::haste::Haste;
use crate::paging::Pager;
use crate::split::Split;
use crate::split::onward::ArrivingSplit;
use crate::transport::clock::now_us;
use crate::vmm::EventTime;

/// How long the VMM may take to load its devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers requests until the guest runs here. Returns the pager where pages are to follow, or to be compared.
///
/// # Errors
/// As [`precopy`](super::precopy::precopy); from the commit on the guest is ours, and an error only means that the
/// source does not know it yet.
pub(super) fn switchover(landing: &mut Landing) -> Result<Option<Arc<Pager>>, MigrateError> {
    let mut residue = PageMap::empty(landing.placer.layout());
    let mut away = Away::default();
    loop {
        let request = landing.next_request()?;
        let reply = match &request {
            Request::FinalRoundEnd { round } => last_pages(landing, *round),
            Request::ChunkDigests { first, count } => chunk_digests(landing, *first, *count),
            Request::PageDigests { chunk } => page_digests(landing, *chunk),
            Request::Load => load(landing),
            Request::Residue(part) => note_part(part, landing.placer.ram(), &mut residue).map(|()| Reply::Noted),
            Request::LoadPostcopy(part) => note_part(part, landing.placer.ram(), &mut residue).and_then(|()| {
                let residue = std::mem::replace(&mut residue, PageMap::empty(landing.placer.layout()));
                load_postcopy(landing, residue)
            }),
            Request::Away { holder, part } => away.note(landing.placer.layout(), *holder, part).map(|()| Reply::Noted),
            Request::AwayEnd { epoch, pages } => std::mem::take(&mut away).end(*epoch, *pages).map(|elsewhere| {
                landing.elsewhere = Some(elsewhere);
                Reply::Noted
            }),
            Request::Commit => return commit(landing, &request),
            _ => Err(MigrateError::Request("a request that does not belong here")),
        };
        landing.answer(&request, reply)?;
    }
}

/// What is at the guest's memory hosts is this host's to ask for from now on.
fn take_over(split: ArrivingSplit, spec: &VmSpec) -> Arc<Split> {
    let (split, raised) = split.take_over();
    if let Err(error) = raised {
        tracing::error!(vm = spec.name, %error, "memory hosts are asked in the source's epoch until it can be raised");
    }
    split
}

/// Waits for the last pages before the guest's start here; the device state goes on once all of them are in place.
fn last_pages(landing: &mut Landing, round: u32) -> Result<Reply, MigrateError> {
    let reply = landing.arrived(round)?;
    if matches!(&reply, Reply::Arrived { suspects } if suspects.is_empty()) {
        tracing::debug!("the last pages are there");
        landing.whole = true;
        let elsewhere = landing.elsewhere.take();
        let nothing = PageMap::empty(landing.placer.layout());
        // The devices' loading is the first that may write RAM: each page is noted before. Of a split guest it is so
        // already.
        let is_split = landing.guard.begin_elsewhere(elsewhere.as_ref(), &nothing)?;
        if let Some(pager) = landing.guard.pager.as_ref().filter(|_| landing.verify_after && !is_split) {
            pager.begin_whole()?;
        }
        landing.held.release();
        if !landing.verify_after && !is_split {
            // Every page is here: from now on the guest's RAM is as any process's. The devices load meanwhile, and
            // their faults wait no longer than this takes.
            landing.guard.end_pager();
        }
    }
    Ok(reply)
}

fn load(landing: &mut Landing) -> Result<Reply, MigrateError> {
    landing.guard.incoming().vmm.loaded(LOAD_TIMEOUT)?;
    tracing::debug!("the devices are loaded");
    landing.held.finish()?;
    Ok(Reply::Loaded)
}

/// Loads the devices once the residue is known. The loading may itself need missing pages.
fn load_postcopy(landing: &mut Landing, residue: PageMap) -> Result<Reply, MigrateError> {
    let (Some(pager), Some(source)) = (landing.guard.pager.clone(), &mut landing.source) else {
        return Err(MigrateError::Request("pages that follow the guest were not agreed on"));
    };
    // The others would be shown as they are here.
    if !landing.told {
        return Err(MigrateError::Damaged(MAX_SUSPECTS));
    }
    let elsewhere = landing.elsewhere.take();
    if !landing.guard.begin_elsewhere(elsewhere.as_ref(), &residue)? {
        pager.begin(residue)?;
    }
    source.attach();
    landing.held.release();
    load(landing)
}

fn chunk_digests(landing: &Landing, first: ChunkIndex, count: u32) -> Result<Reply, MigrateError> {
    let (ram, digester) = (landing.placer.ram(), landing.placer.digester());
    let end = u64::from(first.0) + u64::from(count);
    if count > MAX_DIGEST_CHUNKS || end > u64::from(ram.layout().chunks()) {
        return Err(MigrateError::Request("digests of chunks that this machine does not have"));
    }
    let digests = (first.0..end as u32).map(|chunk| ram.chunk_digest(ChunkIndex(chunk), digester));
    let digests = digests.collect::<Result<_, _>>();
    digests.map(Reply::Digests).map_err(MigrateError::host("reading the guest's RAM to compare it"))
}

fn page_digests(landing: &Landing, chunk: ChunkIndex) -> Result<Reply, MigrateError> {
    let digests = landing.placer.ram().page_digests(chunk, landing.placer.digester());
    digests.map(Reply::Digests).map_err(MigrateError::host("reading the guest's RAM to compare it"))
}

/// The guest is ours: the point of no return at the destination. The record is written before the guest runs: whatever
/// happens to this daemon or to the link afterwards, the answer to the source is the same. Returns the pager where
/// pages are to follow, or to be compared. Whether the answer arrives does not matter then: the next request says so.
fn commit(landing: &mut Landing, request: &Request) -> Result<Option<Arc<Pager>>, MigrateError> {
    let Landing { session, guard, spec, arrivals, whole, haste, vmm_threads, verify_after, .. } = landing;
    let pager = guard.pager.clone();
    // The VMM may have died since it said that it was loaded: then the guest must stay at the source. (It can still die
    // between this check and the record: no check can be late enough for a QEMU that dies in its first millisecond.)
    let alive = guard.incoming().vmm.alive().map_err(|error| MigrateError::from(error).problem());
    if let Err(problem) = alive.and_then(|()| session.host.commit(session.id, pager.is_some() && !*whole)) {
        *haste = Haste::none();
        guard.end();
        session.control.answer(request, &Reply::Failed(problem.clone()))?;
        return Err(MigrateError::Record(problem));
    }
    tracing::debug!("the guest is ours, on record");
    let split = guard.split.take().map(|split| take_over(split, spec));
    let mut incoming = guard.keep();
    haste.runs(vmm_threads.as_ref());
    let started = if spec.running { incoming.vmm.start() } else { Ok(EventTime(now_us())) };
    tracing::debug!("the guest runs");
    // Before threads are started that stay.
    let haste = std::mem::replace(haste, Haste::none());
    let cpu = arrivals.cpu() + sterna_sys::process::thread_cpu_time();
    let reply = match started {
        Ok(start) => Reply::Running { start_us: start.0, cpu_us: cpu.as_micros() as u64 },
        // The guest is ours all the same: the daemon looks after it.
        Err(error) => Reply::Failed(MigrateError::from(error).problem().guest(Whereabouts::Paused)),
    };
    let failed = if let Reply::Failed(problem) = &reply { Some(problem) } else { None };
    if let Some(split) = split {
        let answered = session.control.answer(request, &reply);
        drop(haste);
        if let Err(error) = split.pager().map_ahead(session.host.may_haste()) {
            tracing::info!(%error, "pages are not mapped ahead");
        }
        let pager = Arc::clone(split.pager());
        let follows = (!*whole).then(|| Arc::clone(&pager));
        session.host.took_over(session.id, split);
        session.host.started(session.id, incoming, follows.clone(), failed);
        return if follows.is_some() || *verify_after { Ok(Some(pager)) } else { answered.map(|()| None) };
    }
    let Some(pager) = pager else {
        drop(haste);
        session.host.started(session.id, incoming, None, failed);
        return session.control.answer(request, &reply).map(|()| None);
    };
    // The answer goes out first: the guest may wait for a page already, and the source pushes none before it has the
    // answer.
    let answered = session.control.answer(request, &reply);
    drop(haste);
    if let Err(error) = pager.map_ahead(session.host.may_haste()) {
        tracing::info!(%error, "pages are not mapped ahead");
    }
    session.host.started(session.id, incoming, Some(Arc::clone(&pager)), failed);
    if let Err(error) = answered {
        tracing::info!(%error, "the source was not told that the guest runs");
    }
    Ok(Some(pager))
}
