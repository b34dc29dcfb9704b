//! Fetches the pieces of a file from many peers in random order, checks each and keeps it in memory; then the next file, for ever.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::Every;
use sterna_guest_programs::piece::{PIECE_BYTES, Request};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "downloader --peers IP:FIRST-PORT [--count PEERS] [--mib N] [--interval-ms BETWEEN-LINES]";

/// Between two attempts to reach a peer.
const RETRY: Duration = Duration::from_millis(200);

/// What the peers have brought, and what is still to be asked for.
struct Download {
    generation: u64,
    missing: Vec<u64>,
    pieces: Vec<Vec<u8>>,
    random: Random,
    fetched: u64,
    bad: u64,
    errors: u64,
}

impl Download {
    /// A piece that nobody was asked for yet; of the next file where this one has none left.
    fn next(&mut self) -> Request {
        if self.missing.is_empty() {
            self.generation += 1;
            self.missing = (0..self.pieces.len() as u64).collect();
        }
        let at = self.random.below(self.missing.len());
        Request { piece: self.missing.swap_remove(at), generation: self.generation }
    }

    fn keep(&mut self, request: Request, body: Vec<u8>) {
        self.fetched += 1;
        self.bad += u64::from(!request.is(&body));
        if let Some(place) = self.pieces.get_mut(request.piece as usize) {
            place.copy_from_slice(&body);
        }
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let peers: SocketAddr = arguments.get("peers", SocketAddr::from(([127, 0, 0, 1], 7000)));
    let count = arguments.get("count", 8_u16);
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    let pieces = (arguments.get("mib", 64_usize) << 20) / PIECE_BYTES;
    if pieces == 0 || count == 0 {
        arguments.reject("mib", "nothing to fetch");
    }
    let download = Mutex::new(Download {
        generation: 0,
        missing: Vec::new(),
        pieces: vec![vec![0; PIECE_BYTES]; pieces],
        random: Random::new(5),
        fetched: 0,
        bad: 0,
        errors: 0,
    });
    let report = Report::from_environment();
    report.line(format_args!("DOWNLOADER ready pieces={pieces} peers={count}"));
    std::thread::scope(|scope| {
        for peer in 0..count {
            let mut address = peers;
            address.set_port(peers.port().saturating_add(peer));
            let download = &download;
            scope.spawn(move || {
                loop {
                    if fetch(address, download).is_err() {
                        download.lock().unwrap_or_else(PoisonError::into_inner).errors += 1;
                        std::thread::sleep(RETRY);
                    }
                }
            });
        }
        let mut every = Every::new(interval, Instant::now());
        let mut total = 0;
        loop {
            std::thread::sleep(interval);
            let Some(elapsed) = every.elapsed(Instant::now()) else { continue };
            let (fetched, bad, errors, generation) = {
                let mut download = download.lock().unwrap_or_else(PoisonError::into_inner);
                (std::mem::take(&mut download.fetched), download.bad, download.errors, download.generation)
            };
            total += fetched;
            let per_second = fetched as f64 / elapsed.as_secs_f64();
            report.line(format_args!(
                "DOWNLOADER ok pieces_per_s={per_second:.1} bad={bad} errors={errors} file={generation} total={total}"
            ));
        }
    });
}

/// Asks one peer for one piece after another, until the connection breaks.
fn fetch(peer: SocketAddr, download: &Mutex<Download>) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&peer, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    loop {
        let request = download.lock().unwrap_or_else(PoisonError::into_inner).next();
        // A piece of a connection that breaks is asked for again with the next file.
        stream.write_all(&request.encode())?;
        let mut body = vec![0; PIECE_BYTES];
        stream.read_exact(&mut body)?;
        download.lock().unwrap_or_else(PoisonError::into_inner).keep(request, body);
    }
}
