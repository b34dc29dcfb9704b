//! A peer that is no daemon.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterna_bench::error::Context;
use sterna_bench::lab::{Host, net};

use crate::PATIENCE;

/// What a peer that is no daemon says to its callers.
#[derive(Debug, Clone)]
pub enum Babble {
    /// It says nothing, for ever.
    Nothing,
    /// It says these bytes, then nothing.
    Bytes(Vec<u8>),
}

/// A peer that is no daemon; dropping it ends it.
pub struct Stranger {
    /// The address where it listens.
    pub address: String,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Stranger {
    /// Listens on `host`.
    ///
    /// # Panics
    /// Where the host has no port left.
    #[must_use]
    pub fn start(host: &Host, babble: Babble) -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").context(|| "binding a stranger".into());
        let listener = net::inside(&host.namespace, bind).expect("a port");
        listener.set_nonblocking(true).expect("a setting");
        let address = listener.local_addr().expect("an address").to_string();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let began = Instant::now();
            let mut open = Vec::new();
            while !stopped.load(Ordering::Acquire) && began.elapsed() < 10 * PATIENCE {
                if let Ok((mut stream, _)) = listener.accept() {
                    if let Babble::Bytes(bytes) = &babble {
                        let _ = stream.write_all(bytes);
                    }
                    open.push(stream);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
