//! Phases *postcopy* and *finish*: the destination's part while the missing pages follow the guest here, from the
//! residue in the pause to the last page, and again after every break; and while both sides' pages are compared, also
//! where none follows, as of a split guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::errand::Put;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::message::{MAX_DIGEST_CHUNKS, PostcopyAccount, Reply, Request, ResiduePart};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::residue;
use sterna_protocol::standstill::Standstill;

use super::attachment::SourceOf;
use super::connect::Connections;
use super::landing::ARRIVAL_TIMEOUT;
use super::place::Placer;
use super::receive::Arrivals;
use super::session::Session;
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::host::MigrationId;
use crate::memory::Memory;
use crate::paging::Pager;
use crate::paging::supplier::Straight;

/// How often a wait for pages checks whether their connections have broken.
const LOOK: Duration = Duration::from_millis(50);

/// Adds a part of the residue, which comes from the peer.
pub(super) fn note_part(part: &ResiduePart, ram: &dyn Memory, residue: &mut PageMap) -> Result<(), MigrateError> {
    residue::add(part, ram.layout(), residue).map_err(|error| {
        tracing::warn!(%error, "the residue is invalid");
        MigrateError::Request("a map of pages that this machine cannot have")
    })
}

impl Session<'_> {
    /// Goes on with a migration whose source was lost and is there again.
    pub(super) fn resume(&mut self, id: MigrationId, streams: u16, request: &Request) -> Result<(), MigrateError> {
        let pager = match self.host.pager(id, self.control.peer()) {
            Ok(pager) => pager,
            Err(problem) => return self.control.answer(request, &Reply::Failed(problem)),
        };
        self.id = id;
        let ram = Arc::clone(pager.ram());
        self.control.answer(request, &Reply::Resumed { layout: ram.layout().digest() })?;
        let mut connections = Connections::wait(self, streams, false, true)?;
        let hang_up = connections.hang_up(self)?;
        let Some((requests, urgent)) = connections.faults.take() else {
            return Err(MigrateError::Bug("the faults' connection was not waited for"));
        };
        let arrivals = Arrivals::new(streams);
        let placer = Placer::new(ram.as_ref(), self.host, Some(&pager), self.digester(), None);
        let mut source = SourceOf::new(&pager, requests, self.key.key, hang_up);
        self.with_receivers(connections.pages, Some(urgent), (&placer, &arrivals), &Crew::default(), |session| {
            source.attach();
            tracing::info!(migration = %id, missing = pager.to_come(), "the source of the guest's pages is there again");
            session.page_in(&pager, Some(&source), &placer, &arrivals)
        })
    }

    /// Answers requests until the source is not needed any more. If the session breaks, the pager goes on: the source
    /// comes again.
    pub(super) fn page_in(
        &mut self,
        pager: &Arc<Pager>,
        source: Option<&SourceOf>,
        placer: &Placer,
        arrivals: &Arrivals,
    ) -> Result<(), MigrateError> {
        let result = self.page_in_requests(pager, source, placer, arrivals);
        pager.nothing_goes_straight();
        // A source that is lost after its last page is not waited for.
        self.finish(pager);
        result
    }

    fn page_in_requests(
        &mut self,
        pager: &Arc<Pager>,
        source: Option<&SourceOf>,
        placer: &Placer,
        arrivals: &Arrivals,
    ) -> Result<(), MigrateError> {
        loop {
            let request = self.control.next_request()?;
            if let Some(source) = source {
                source.heard();
            }
            let reply = match &request {
                Request::Paging => Ok(Reply::Paging { missing: pager.to_come(), faults: pager.fault_count() }),
                Request::Missing { first } => residue::part(&pager.pages_to_come(), pager.ram().layout(), *first)
                    .map(Reply::Missing)
                    .ok_or(MigrateError::Request("missing pages of chunks that this machine does not have")),
                Request::Straight { put } => straight(pager, put),
                Request::Complete { verify } => {
                    placer.settle();
                    self.complete(pager, arrivals, *verify)
                }
                Request::Release => {
                    self.finish(pager);
                    self.control.answer(&request, &Reply::Released)?;
                    return Ok(());
                }
                other => comparison(pager, other),
            };
            self.answer(&request, reply)?;
        }
    }

    /// Answers requests while both sides of a split guest are compared, of which nothing follows. Its pager goes on:
    /// pages leave and come meanwhile.
    pub(super) fn compare(&mut self, pager: &Pager) -> Result<(), MigrateError> {
        let result = self.compare_requests(pager);
        pager.nothing_is_compared();
        result
    }

    fn compare_requests(&mut self, pager: &Pager) -> Result<(), MigrateError> {
        loop {
            let request = self.control.next_request()?;
            if request == Request::Release {
                return self.control.answer(&request, &Reply::Released);
            }
            let reply = comparison(pager, &request);
            self.answer(&request, reply)?;
        }
    }

    /// Answers a request; a failure ends the session.
    fn answer(&mut self, request: &Request, reply: Result<Reply, MigrateError>) -> Result<(), MigrateError> {
        match reply {
            Ok(reply) => self.control.answer(request, &reply),
            Err(error) => {
                self.control.answer(request, &Reply::Failed(error.problem()))?;
                Err(error)
            }
        }
    }

    /// Waits for the last page. Where nothing is compared afterwards, that is the end: the source may be lost from now
    /// on.
    fn complete(&self, pager: &Arc<Pager>, arrivals: &Arrivals, verify: bool) -> Result<Reply, MigrateError> {
        let began = Instant::now();
        let mut standstill = Standstill::new(1, ARRIVAL_TIMEOUT, arrivals.frames(), Duration::ZERO);
        while !pager.wait(LOOK) {
            if let Some(problem) = arrivals.failure() {
                return Err(MigrateError::Peer(problem));
            }
            if standstill.is_over(arrivals.frames(), began.elapsed()) {
                return Err(MigrateError::Peer(Problem::new(
                    Code::PagesMissing,
                    Blame::Peer,
                    format!("the source says that all pages are sent, and {} have not come", pager.to_come()),
                )));
            }
        }
        let account = PostcopyAccount {
            cpu_us: (arrivals.cpu() + sterna_sys::process::thread_cpu_time()).as_micros() as u64,
            took_us: pager.took().as_micros() as u64,
            duplicate: pager.duplicate(),
            faults: pager.faults(),
            // A source of another version may digest in another way than the one before: every page would seem to
            // differ.
            verifiable: pager.digester() == Some(self.digester()),
        };
        if !(verify && account.verifiable) {
            self.finish(pager);
        }
        Ok(Reply::Completed(Box::new(account)))
    }

    /// Ends the paging: no page is at the source any more. That of a split guest goes on.
    fn finish(&self, pager: &Arc<Pager>) {
        if pager.to_come() > 0 {
            return;
        }
        match pager.is_split() {
            true => pager.nothing_is_compared(),
            false => pager.end(),
        }
        self.host.paged(self.id);
    }
}

/// What goes past this host.
fn straight(pager: &Pager, put: &[Put]) -> Result<Reply, MigrateError> {
    let Straight { taken, epoch, errands } = pager.straight(put)?;
    Ok(Reply::Straight { taken: taken.into_iter().map(PageSet::to_bytes).collect(), epoch, errands })
}

/// What the guest first saw.
fn comparison(pager: &Pager, request: &Request) -> Result<Reply, MigrateError> {
    match request {
        Request::ChunkDigests { first, count } => chunk_digests(pager, *first, *count),
        Request::PageDigests { chunk } => pager.page_digests(*chunk).map(Reply::Digests),
        Request::GivenBack { chunk } => given_back(pager, *chunk),
        _ => Err(MigrateError::Request("a request that does not belong here")),
    }
}

fn given_back(pager: &Pager, chunk: ChunkIndex) -> Result<Reply, MigrateError> {
    if chunk.0 >= pager.ram().layout().chunks() {
        return Err(MigrateError::Request("discards of a chunk that this machine does not have"));
    }
    Ok(Reply::GivenBack(pager.given_back(chunk).to_bytes()))
}

fn chunk_digests(pager: &Pager, first: ChunkIndex, count: u32) -> Result<Reply, MigrateError> {
    let end = u64::from(first.0) + u64::from(count);
    if count > MAX_DIGEST_CHUNKS || end > u64::from(pager.ram().layout().chunks()) {
        return Err(MigrateError::Request("digests of chunks that this machine does not have"));
    }
    let digests = (first.0..end as u32).map(|chunk| pager.chunk_digest(ChunkIndex(chunk))).collect::<Result<_, _>>();
    digests.map(Reply::Digests)
}
