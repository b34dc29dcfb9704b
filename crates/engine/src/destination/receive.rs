//! Reception: frames off one connection, and the progress of all connections.

use std::io::Read;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_protocol::frame::{Frame, FrameReader};
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::standstill::Standstill;

use super::arrival::Arrival;
use super::decode::Decoder;
use super::place::Placer;
use crate::error::MigrateError;
use crate::transport::connection::Connection;
use crate::transport::frames::next_frame;

/// The progress of each connection, and the first failure on any.
#[derive(Debug)]
pub struct Arrivals {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The last round each connection has ended.
    rounds: Vec<Option<u32>>,
    /// The number of frames so far: progress.
    frames: u64,
    failure: Option<Problem>,
    cpu: Duration,
}

impl Arrivals {
    /// Nothing has arrived yet, on this many connections.
    #[must_use]
    pub fn new(streams: u16) -> Self {
        let state = State { rounds: vec![None; usize::from(streams)], frames: 0, failure: None, cpu: Duration::ZERO };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits until every connection has ended a round.
    ///
    /// # Errors
    /// The failure of any connection, or no frame for `stall`.
    pub fn wait(&self, round: u32, stall: Duration) -> Result<(), MigrateError> {
        let mut state = self.lock();
        let began = Instant::now();
        let mut standstill = Standstill::new(1, stall, state.frames, Duration::ZERO);
        loop {
            if let Some(problem) = &state.failure {
                return Err(MigrateError::Peer(problem.clone()));
            }
            if state.rounds.iter().all(|ended| *ended >= Some(round)) {
                return Ok(());
            }
            if standstill.is_over(state.frames, began.elapsed()) {
                return Err(MigrateError::Link {
                    doing: "waiting for pages",
                    source: std::io::ErrorKind::TimedOut.into(),
                });
            }
            state = self.changed.wait_timeout(state, stall).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes a failure; the first is kept.
    pub fn fail(&self, problem: Problem) {
        self.lock().failure.get_or_insert(problem);
        self.changed.notify_all();
    }

    /// The first failure, if any.
    #[must_use]
    pub fn failure(&self) -> Option<Problem> {
        self.lock().failure.clone()
    }

    /// The processor time of the receivers, as of their last frames.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.lock().cpu
    }

    fn ended(&self, stream: usize, round: u32, cpu: Duration) {
        let mut state = self.lock();
        // The connection of requested pages takes part in no round.
        if let Some(ended) = state.rounds.get_mut(stream) {
            *ended = Some(round);
        }
        state.cpu += cpu;
        state.frames += 1;
        self.changed.notify_all();
    }

    fn frame(&self, cpu: Duration) {
        let mut state = self.lock();
        state.cpu += cpu;
        state.frames += 1;
    }

    /// The number of frames so far, on all connections.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.lock().frames
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives on one connection until it is closed. A failure is noted, and the connection shut down so that the source
/// sees it.
pub fn receive(index: usize, stream: &mut Connection, reader: FrameReader, placer: &Placer, arrivals: &Arrivals) {
    if let Err(error) = frames(index, stream, reader, placer, arrivals) {
        arrivals.fail(error.problem());
        stream.end();
    }
}

fn frames(
    index: usize,
    stream: &mut Connection,
    mut reader: FrameReader,
    placer: &Placer,
    arrivals: &Arrivals,
) -> Result<(), MigrateError> {
    // A source may be quiet between rounds as long as it lives; TCP's keepalive notices when it does not.
    stream.set_read_timeout(None).map_err(MigrateError::link("receiving pages"))?;
    let mut counted = Duration::ZERO;
    let mut since_counted = || {
        let cpu = sterna_sys::process::thread_cpu_time();
        cpu - std::mem::replace(&mut counted, cpu)
    };
    // A chunk fits the processor's cache: what is read here was received a moment ago.
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut decoder = Decoder::new(placer.digester());
    // The bodies of the next frame that get into the gang's pool.
    let mut shared: Option<(ChunkIndex, PageSet)> = None;
    loop {
        // The source says why on the control connection before it closes this one.
        let Some((frame, digests)) = next_frame(stream, &mut reader, placer.layout())? else { return Ok(()) };
        let place = |shared: Option<(ChunkIndex, PageSet)>, arrival: &Arrival| match shared {
            None => placer.place(arrival),
            Some((chunk, pages)) if chunk == arrival.chunk => placer.place_shared(arrival, &pages),
            Some(_) => Err(MigrateError::Request("shared pages without their bodies")),
        };
        match frame {
            Frame::Shared(frame) if shared.is_none() => {
                placer.refer(frame.chunk, &frame.references)?;
                shared = (!frame.pooled.is_empty()).then_some((frame.chunk, frame.pooled));
                arrivals.frame(since_counted());
            }
            Frame::Chunk(frame) => {
                let bodies = &mut buffer[..frame.body_bytes()];
                stream.read_exact(bodies).map_err(MigrateError::link("receiving pages"))?;
                let bodies = [(frame.full, &*bodies)];
                place(shared.take(), &Arrival::plain(&frame, &digests, placer.digester(), &bodies))?;
                arrivals.frame(since_counted());
            }
            Frame::Packed(frame) => {
                // At most `MAX_PAYLOAD_BYTES`: a chunk, and two bytes for each page.
                let bytes = frame.payload_bytes();
                if buffer.len() < bytes {
                    buffer.resize(bytes, 0);
                }
                let payload = &mut buffer[..bytes];
                stream.read_exact(payload).map_err(MigrateError::link("receiving pages"))?;
                let bodies = decoder.decode(&frame, &digests, payload, placer.ram())?;
                let (full, delta) = bodies.split_at(frame.full.len() * PAGE_BYTES);
                // Each body was checked against its digest as it was decoded.
                let (bodies, suspect) = ([(frame.full, full), (frame.delta, delta)], PageSet::EMPTY);
                let (chunk, zero) = (frame.chunk, frame.zero);
                place(shared.take(), &Arrival { chunk, bodies: &bodies, zero, pooled: None, suspect })?;
                arrivals.frame(since_counted());
            }
            Frame::Shared(_) | Frame::RoundEnd { .. } | Frame::Close if shared.is_some() => {
                return Err(MigrateError::Request("shared pages without their bodies"));
            }
            Frame::Shared(_) => unreachable!("it is taken above"),
            Frame::RoundEnd { round } => arrivals.ended(index, round, since_counted()),
            Frame::Close => return Ok(()),
        }
    }
}
