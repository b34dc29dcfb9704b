//! Urgent pages, which faults request: a thread reads the requests and answers each at once, on a connection that
//! carries nothing else.
//!
//! A requested page goes alone, so that the guest's thread waits for nothing else. Its neighbours come behind it where
//! nobody waits for another page and the link has room for them, in the part that the push leaves. Where faults take
//! that part themselves, a page's neighbours would only delay the next page. This thread never waits for the push's
//! pace or limits: its bytes are charged to them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::bodies::Bodies;
use super::ends::Ends;
use super::pending::Pending;
use super::requests::Requests;
use super::work::{Work, no_thread};
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::source::gang::Member;
use crate::source::stream::{Stream, link_broke};
use crate::transport::connection::HangUp;

/// How long the thread looks for the next request before it sleeps: a guest that walks through memory asks again within
/// a round trip, and a wake-up takes as long as one. The time is bounded per request, and other threads may have the
/// processor meanwhile.
const LOOK: Duration = Duration::from_micros(150);
/// The bytes that faults may save up of their part of the link: a few pages with their neighbours.
const SAVED: f64 = 65536.0;

/// The thread, which runs until this is dropped.
pub struct Urgent {
    ends: Arc<Ends>,
    own: [HangUp; 2],
    thread: Option<JoinHandle<()>>,
    crew: Crew,
}

struct Serving {
    requests: Requests,
    stream: Stream,
    pending: Arc<Pending>,
    work: Arc<Work>,
    bodies: Bodies,
    /// For pages whose bodies must come as they are.
    whole: Bodies,
    room: Room,
}

/// The rest of the faults' part of the link.
struct Room {
    bytes: f64,
    at: Instant,
}

impl Room {
    fn full(now: Instant) -> Self {
        Self { bytes: SAVED, at: now }
    }

    /// Whether something is left at `now`, of a part of so many bytes per second.
    fn any(&mut self, part: u64, now: Instant) -> bool {
        let time = now.saturating_duration_since(self.at);
        self.bytes = (self.bytes + part as f64 * time.as_secs_f64()).min(SAVED);
        self.at = now;
        self.bytes > 0.0
    }

    /// Counts bytes that went; bytes beyond the part are owed.
    fn spend(&mut self, bytes: u64) {
        self.bytes = (self.bytes - bytes as f64).max(-SAVED);
    }
}

impl Urgent {
    /// Begins to serve the pages that are pending, now and later. Where it fails, the session ends.
    ///
    /// # Errors
    /// No thread or descriptor left.
    pub fn start(
        (requests, stream): (Requests, Stream),
        pending: Arc<Pending>,
        work: Arc<Work>,
        ends: &Arc<Ends>,
        member: Option<Arc<Member>>,
    ) -> Result<Self, MigrateError> {
        let hang_up = || Ok([requests.hang_up()?, stream.connection().hang_up()?]);
        let own: [HangUp; 2] = hang_up().map_err(no_thread())?;
        hang_up().map_err(no_thread())?.into_iter().for_each(|connection| ends.add(connection));
        let (told, mut serving) = (
            Arc::clone(ends),
            Serving {
                bodies: Bodies::new(stream.digester(), member),
                whole: Bodies::new(stream.digester(), None),
                requests,
                stream,
                pending,
                work,
                room: Room::full(Instant::now()),
            },
        );
        let crew = Crew::default();
        let serve = move || {
            if let Err(error) = serving.serve() {
                told.fail(error);
            }
            serving.work.tally.thread_ends(serving.bodies.did());
        };
        let thread = crew.spawn("urgent", serve).map_err(no_thread())?;
        Ok(Self { ends: Arc::clone(ends), own, thread: Some(thread), crew })
    }
}

impl Urgent {
    /// Its thread, once it runs.
    pub fn crew(&self) -> &Crew {
        &self.crew
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        self.ends.close();
        self.own.iter().for_each(HangUp::now);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Serving {
    fn serve(&mut self) -> Result<(), MigrateError> {
        while let Some(request) = self.requests.receive()? {
            let page: PageSet = [request.page.page].into_iter().collect();
            let asked = |pending: &Pending| {
                if pending.ask(&request, Instant::now()) { page } else { PageSet::EMPTY }
            };
            if !self.take(request.page.chunk, asked)?.is_empty() {
                self.send(request.page.chunk, &page, true)?;
                let spare = self.work.spare.load(Ordering::Relaxed);
                if !self.requests.waiting() && self.room.any(spare, Instant::now()) {
                    let neighbours = self.take(request.page.chunk, |pending| pending.neighbours(&request))?;
                    if !neighbours.is_empty() {
                        self.send(request.page.chunk, &neighbours, false)?;
                    }
                }
            } else if self.pending.owes_body(request.page) {
                std::mem::swap(&mut self.bodies, &mut self.whole);
                let sent = self.send(request.page.chunk, &page, true);
                std::mem::swap(&mut self.bodies, &mut self.whole);
                sent?;
            }
            let began = Instant::now();
            while !self.requests.waiting() && began.elapsed() < LOOK {
                std::thread::yield_now();
            }
        }
        // The destination asks no more: either all pages are there, or it is gone, which is a lost link.
        if self.pending.left() == 0 {
            return Ok(());
        }
        Err(MigrateError::link("waiting for requests for pages")(std::io::ErrorKind::UnexpectedEof.into()))
    }

    /// Has pending pages taken, whose bodies are read only then.
    fn take(&self, chunk: ChunkIndex, take: impl FnOnce(&Pending) -> PageSet) -> Result<PageSet, MigrateError> {
        let Work { ram, leaving, .. } = &*self.work;
        let taken = leaving.take(ram.as_ref(), chunk, || take(&self.pending));
        taken.map_err(MigrateError::host("reading the guest's RAM"))
    }

    fn send(&mut self, chunk: ChunkIndex, pages: &PageSet, asked: bool) -> Result<(), MigrateError> {
        // The page is not compressed: that would take longer than sending it plain.
        let made = self.bodies.make(
            self.work.ram.as_ref(),
            (self.work.round, chunk),
            pages,
            &self.work.free_in(chunk),
            None,
        )?;
        self.pending.referred(chunk, &made.references());
        let bytes = self.stream.send(&made).map_err(link_broke)?;
        self.work.pacer.charge(bytes);
        self.work.tally.sent(&made.counts, bytes, asked);
        self.bodies.give_back(made);
        self.work.tally.because_of_a_fault(bytes);
        self.room.spend(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 10_000_000;
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_faults_take_of_their_part_over_time_is_the_part() {
        let start = Instant::now();
        let (mut room, mut bytes) = (Room::full(start), 0);
        for ms in 0..10_000 {
            while room.any(PART, start + MS * ms) {
                room.spend(8 * 4096);
                bytes += 8 * 4096;
            }
        }
        let rate = bytes as f64 / 10.0;
        assert!((0.98..1.02).contains(&(rate / PART as f64)), "{rate} B/s of {PART}");
    }

    #[test]
    fn what_was_saved_is_a_few_pages_however_long_nothing_was_asked_for() {
        let start = Instant::now();
        let mut room = Room::full(start);
        let tomorrow = start + Duration::from_secs(86_400);
        assert!(room.any(PART, tomorrow));
        room.spend(SAVED as u64);
        assert!(!room.any(PART, tomorrow), "the clock stands still");
        assert!(room.any(PART, tomorrow + MS));
    }

    #[test]
    fn faults_that_took_more_owe_it_and_never_more_than_could_be_saved() {
        let start = Instant::now();
        let mut room = Room::full(start);
        room.spend(1 << 30);
        let owed = Duration::from_secs_f64(SAVED / PART as f64);
        assert!(!room.any(PART, start + owed - MS));
        assert!(room.any(PART, start + owed + MS));
    }

    #[test]
    fn without_a_part_there_is_nothing_but_what_was_saved() {
        let start = Instant::now();
        let mut room = Room::full(start);
        assert!(room.any(0, start));
        room.spend(SAVED as u64);
        assert!(!room.any(0, start + Duration::from_secs(86_400)));
    }
}
