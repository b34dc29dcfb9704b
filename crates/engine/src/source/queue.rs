//! Queues of frames for each connection, between the threads that encode and those that send.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TryRecvError, TrySendError};
use std::time::{Duration, Instant};

use super::encode::Meter;
use super::outbound::Outbound;

/// How many frames wait for a connection: one goes next while another is made.
const QUEUED: usize = 2;

/// The end of a queue at which a sender takes frames.
pub struct Queue<'a> {
    frames: Receiver<Outbound<'a>>,
    stopped: &'a AtomicBool,
    meter: Option<&'a Meter>,
    /// Whether a frame was taken. The wait for the first is not counted: the encoders begin there.
    begun: bool,
}

/// The end of a queue at which encoders put frames.
#[derive(Clone)]
pub struct Inlet<'a>(SyncSender<Outbound<'a>>);

/// A queue for one connection. A thread that fails sets `stopped`; `meter` counts the waits.
pub fn queue<'a>(stopped: &'a AtomicBool, meter: Option<&'a Meter>) -> (Inlet<'a>, Queue<'a>) {
    let (fill, frames) = mpsc::sync_channel(QUEUED);
    (Inlet(fill), Queue { frames, stopped, meter, begun: false })
}

impl<'a> Queue<'a> {
    /// Takes the next frame; `None` where no more comes.
    pub fn take(&mut self) -> Option<Outbound<'a>> {
        let (frame, waited) = match self.frames.try_recv() {
            Ok(frame) => (frame, Duration::ZERO),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {
                let began = Instant::now();
                (self.frames.recv().ok()?, began.elapsed())
            }
        };
        if let Some(meter) = self.meter
            && std::mem::replace(&mut self.begun, true)
            && !waited.is_zero()
        {
            meter.sender_waited(waited);
        }
        Some(frame)
    }

    /// Whether all of the round came through, once there is no more.
    #[must_use]
    pub fn complete(&self) -> bool {
        !self.stopped.load(Ordering::Acquire)
    }
}

impl<'a> Inlet<'a> {
    /// Puts a frame into the queue. Returns how long it waited for room, or `None` where nobody takes the frame any
    /// more.
    pub fn put(&self, frame: Outbound<'a>) -> Option<Duration> {
        match self.0.try_send(frame) {
            Ok(()) => Some(Duration::ZERO),
            Err(TrySendError::Disconnected(_)) => None,
            Err(TrySendError::Full(frame)) => {
                let began = Instant::now();
                self.0.send(frame).ok()?;
                Some(began.elapsed())
            }
        }
    }
}
