//! Peers that offer the pieces of a file, for a guest's `downloader`: they stand in for a download from many peers, and
//! every piece can be checked.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_guest_programs::piece::{PIECE_BYTES, REQUEST_BYTES, Request};

use crate::error::{Context, Result};
use crate::lab::{Host, net};

/// The first peer's port; the others follow.
const PORT: u16 = 7000;
/// How often a waiting peer checks whether it must end.
const LOOK: Duration = Duration::from_millis(50);

/// Peers at work; dropping them ends them.
pub struct Peers {
    address: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    pieces: AtomicU64,
}

impl Peers {
    /// Starts `count` peers on a host, each of which sends at most `bytes_per_s` bytes a second.
    ///
    /// # Errors
    /// Where a port is taken.
    pub fn start(host: &Host, count: u16, bytes_per_s: f64) -> Result<Self> {
        let mut peers = Self { address: Self::address_on(host.address), shared: Arc::default(), threads: Vec::new() };
        for peer in 0..count {
            let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT + peer));
            let listener = net::inside(&host.namespace, || listen().context(|| "listening as a peer".into()))?;
            listener.set_nonblocking(true).context(|| "listening as a peer".into())?;
            let shared = peers.shared.clone();
            peers.threads.push(std::thread::spawn(move || offer(&listener, bytes_per_s, &shared)));
        }
        Ok(peers)
    }

    /// The first peer's address on a host of this address.
    #[must_use]
    pub fn address_on(host: Ipv4Addr) -> SocketAddr {
        SocketAddr::from((host, PORT))
    }

    /// The first peer's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Pieces sent so far.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.shared.pieces.load(Ordering::Relaxed)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Runs one peer. It serves the latest guest that called, because the one before is gone.
fn offer(listener: &TcpListener, bytes_per_s: f64, shared: &Shared) {
    let mut guest: Option<TcpStream> = None;
    let mut due = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) {
        if let Ok((stream, _)) = listener.accept() {
            let ready = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(LOOK)));
            guest = ready.and_then(|()| stream.set_write_timeout(Some(Duration::from_secs(20)))).ok().map(|()| stream);
        }
        let Some(stream) = &mut guest else {
            std::thread::sleep(LOOK);
            continue;
        };
        let mut request = [0; REQUEST_BYTES];
        match stream.read(&mut request) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            // A request is smaller than any packet that carries it: it comes whole.
            Ok(REQUEST_BYTES) => {}
            _ => {
                guest = None;
                continue;
            }
        }
        due = due.max(Instant::now()) + Duration::from_secs_f64(PIECE_BYTES as f64 / bytes_per_s.max(1.0));
        if stream.write_all(&Request::decode(request).body()).is_err() {
            guest = None;
        } else {
            shared.pieces.fetch_add(1, Ordering::Relaxed);
        }
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}
