//! Clients of a memcached in a guest: set and get requests, counted every 100 ms.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use sterna_guest_programs::zipf::Zipf;

use super::values::{Random, Values};
use super::{Sample, now_us};
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::lab::{Host, net};

/// How long memcached may take to listen.
const START: Duration = PATIENCE;
/// The interval of measuring throughput.
pub const SAMPLE: Duration = Duration::from_millis(100);

/// What the clients do.
#[derive(Debug, Clone, Serialize)]
pub struct LoadConfig {
    /// Connections, a thread each.
    pub connections: usize,
    /// Distinct keys.
    pub keys: u32,
    /// Whether few of them are asked for often, by Zipf's law; else each is as likely.
    pub skewed: bool,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Share of requests that are sets, 0 to 1; the rest are gets.
    pub set_share: f64,
    /// What values are made of.
    pub values: Values,
    /// Requests that a connection sends before it reads their answers.
    pub pipeline: usize,
    /// Keys that one get asks for. Each counts as a request.
    pub keys_per_get: usize,
    /// Requests per second of all connections together; where absent, as many as are answered.
    pub rate_per_s: Option<f64>,
    /// Whether every key is set once before the load begins.
    pub fill: bool,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// Requests sent at once while a cache is filled.
const FILL_BATCH: usize = 512;
/// Items of 1,024 bytes with keys of up to ten letters that fit into a MiB of memcached's memory: its chunks for them
/// are 1,184 bytes. A few less, so that a full cache evicts nothing.
const ITEMS_PER_MIB: u32 = 870;

impl LoadConfig {
    /// Sets only: every request writes guest memory.
    #[must_use]
    pub fn set_only(seed: u64) -> Self {
        Self {
            connections: 4,
            keys: 65_536,
            skewed: false,
            value_bytes: 1024,
            set_share: 1.0,
            values: Values::Noise,
            pipeline: 1,
            keys_per_get: 1,
            rate_per_s: None,
            fill: false,
            seed,
        }
    }

    /// Fills a cache of this many MiB with mixed values; then sends only sets, all over it, this many per second.
    #[must_use]
    pub fn full_cache(mib: u32, rate_per_s: f64, seed: u64) -> Self {
        Self {
            keys: mib * ITEMS_PER_MIB,
            values: Values::Mixed,
            pipeline: 8,
            rate_per_s: Some(rate_per_s),
            fill: true,
            ..Self::set_only(seed)
        }
    }

    /// What web servers ask of a cache that has all they want: many small values at once, so many in a second.
    #[must_use]
    pub fn many_small(per_s: f64, seed: u64) -> Self {
        Self {
            keys: 16_384,
            value_bytes: 128,
            keys_per_get: 32,
            rate_per_s: Some(per_s),
            fill: true,
            ..Self::mixed(seed)
        }
    }

    /// One set in ten requests.
    #[must_use]
    pub fn mixed(seed: u64) -> Self {
        Self { set_share: 0.1, ..Self::set_only(seed) }
    }
}

/// What the clients saw.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LoadRecord {
    /// Requests answered in each interval.
    pub samples: Vec<Sample>,
    /// Requests answered in all.
    pub requests: u64,
    /// Lost connections and invalid answers.
    pub errors: u64,
    /// The longest any request waited for its answer, microseconds.
    pub longest_us: u64,
}

/// Clients at work; dropping it ends them.
pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
    sampler: Option<JoinHandle<Vec<Sample>>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    requests: AtomicU64,
    errors: AtomicU64,
    longest_us: AtomicU64,
}

impl Load {
    /// Connects from `host` to the memcached at `server` and begins.
    ///
    /// # Errors
    /// Where the first connections cannot be made, or the cache cannot be filled.
    pub fn start(host: &Host, server: SocketAddr, config: &LoadConfig) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut load = Self { shared: shared.clone(), clients: Vec::new(), sampler: None };
        // A guest that has just started says so before its memcached listens.
        let open = |_| wait_for(&format!("memcached at {server}"), START, || Ok(connect(&host.namespace, server).ok()));
        let streams = (0..config.connections).map(open).collect::<Result<Vec<_>>>()?;
        if config.fill {
            fill(&streams, config)?;
        }
        for (number, stream) in streams.into_iter().enumerate() {
            let (shared, config, namespace) = (shared.clone(), config.clone(), host.namespace.clone());
            let mut random = Random::new(config.seed.wrapping_add(number as u64));
            load.clients.push(std::thread::spawn(move || {
                let mut stream = Some(stream);
                while !shared.stop.load(Ordering::Relaxed) {
                    let open = stream.take().map_or_else(|| connect(&namespace, server), Ok);
                    if open.is_err() || open.is_ok_and(|stream| talk(stream, &config, &shared, &mut random).is_err()) {
                        shared.errors.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            }));
        }
        load.sampler = Some(std::thread::spawn(move || sample(&shared)));
        Ok(load)
    }

    /// Requests answered so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// Ends the clients and returns what they saw.
    #[must_use]
    pub fn finish(mut self) -> LoadRecord {
        let samples = self.stop();
        let shared = &self.shared;
        LoadRecord {
            samples,
            requests: shared.requests.load(Ordering::Relaxed),
            errors: shared.errors.load(Ordering::Relaxed),
            longest_us: shared.longest_us.load(Ordering::Relaxed),
        }
    }

    fn stop(&mut self) -> Vec<Sample> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.clients.drain(..).for_each(|client| drop(client.join()));
        self.sampler.take().and_then(|sampler| sampler.join().ok()).unwrap_or_default()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Sets every key once, over all connections together.
fn fill(streams: &[TcpStream], config: &LoadConfig) -> Result<()> {
    let fill_part = |number: usize, stream: &TcpStream| -> Result<()> {
        let (mut writer, mut reader) = (stream, BufReader::new(stream));
        // These values differ from those of the load.
        let mut random = Random::new(!config.seed.wrapping_add(number as u64));
        let keys: Vec<u32> = (number as u32..config.keys).step_by(streams.len()).collect();
        let (mut requests, mut line) = (Vec::new(), Vec::new());
        for batch in keys.chunks(FILL_BATCH) {
            requests.clear();
            // Only the last request is answered: answers cost the guest more than the requests.
            for (at, key) in batch.iter().enumerate() {
                append_set(&mut requests, u64::from(*key), config, &mut random, at + 1 == batch.len());
            }
            writer.write_all(&requests).context(|| "filling memcached".into())?;
            read_stored(&mut reader, &mut line)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let fill_part = &fill_part;
        let parts: Vec<_> =
            streams.iter().enumerate().map(|(number, stream)| scope.spawn(move || fill_part(number, stream))).collect();
        parts.into_iter().try_for_each(|part| part.join().unwrap_or_else(|_| Err(form("a client panicked"))))
    })
}

fn append_set(requests: &mut Vec<u8>, key: u64, config: &LoadConfig, random: &mut Random, answered: bool) {
    let noreply = if answered { "" } else { " noreply" };
    requests.extend_from_slice(format!("set key{key} 0 0 {}{noreply}\r\n", config.value_bytes).as_bytes());
    config.values.append(requests, config.value_bytes, random);
    requests.extend_from_slice(b"\r\n");
}

/// The keys that a client asks for.
struct Keys {
    count: u64,
    popular: Option<Zipf>,
}

impl Keys {
    fn of(config: &LoadConfig) -> Self {
        let count = config.keys.max(1);
        Self { count: count.into(), popular: config.skewed.then(|| Zipf::new(count as usize)) }
    }

    fn next(&self, random: &mut Random) -> u64 {
        match &self.popular {
            None => random.next() % self.count,
            Some(zipf) => zipf.key(random.share()) as u64,
        }
    }
}

/// One connection's requests, until the load ends or the connection does.
fn talk(stream: TcpStream, config: &LoadConfig, shared: &Shared, random: &mut Random) -> Result<()> {
    let mut writer = stream.try_clone().context(|| "the connection to memcached".into())?;
    let mut reader = BufReader::new(stream);
    let (pipeline, keys_per_get) = (config.pipeline.max(1), config.keys_per_get.max(1));
    let mut requests = Vec::with_capacity(pipeline * (config.value_bytes + 64));
    let (mut sets, mut line) = (Vec::with_capacity(pipeline), Vec::new());
    let (keys, mut due) = (Keys::of(config), Instant::now());
    while !shared.stop.load(Ordering::Relaxed) {
        requests.clear();
        sets.clear();
        let mut asked = 0;
        for _ in 0..pipeline {
            let is_set = random.share() < config.set_share;
            if is_set {
                let key = keys.next(random);
                append_set(&mut requests, key, config, random, true);
                asked += 1;
            } else {
                requests.extend_from_slice(b"get");
                (0..keys_per_get)
                    .for_each(|_| requests.extend_from_slice(format!(" key{}", keys.next(random)).as_bytes()));
                requests.extend_from_slice(b"\r\n");
                asked += keys_per_get;
            }
            sets.push(is_set);
        }
        let start = Instant::now();
        writer.write_all(&requests).context(|| "sending to memcached".into())?;
        for is_set in &sets {
            if *is_set {
                read_stored(&mut reader, &mut line)?
            } else {
                read_values(&mut reader, &mut line, config.value_bytes)?
            }
            shared.requests.fetch_add(if *is_set { 1 } else { keys_per_get as u64 }, Ordering::Relaxed);
        }
        shared.longest_us.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        if let Some(rate) = config.rate_per_s {
            // Requests that a guest missed while it stood still are not made up for: the rate is a limit.
            due = due.max(start) + Duration::from_secs_f64((asked * config.connections) as f64 / rate.max(1e-3));
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<()> {
    line.clear();
    let read = reader.read_until(b'\n', line).context(|| "reading from memcached".into())?;
    if read == 0 { Err(form("the server closed the connection")) } else { Ok(()) }
}

fn read_stored(reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<()> {
    read_line(reader, line)?;
    if line.starts_with(b"STORED") { Ok(()) } else { Err(form(&String::from_utf8_lossy(line))) }
}

/// `VALUE key flags bytes` and the value for each key that was set, and `END`.
fn read_values(reader: &mut impl BufRead, line: &mut Vec<u8>, value_bytes: usize) -> Result<()> {
    loop {
        read_line(reader, line)?;
        if line.starts_with(b"END") {
            return Ok(());
        }
        if !line.starts_with(b"VALUE") {
            return Err(form(&String::from_utf8_lossy(line)));
        }
        line.resize(value_bytes + 2, 0);
        reader.read_exact(line).context(|| "reading a value from memcached".into())?;
        if !line.ends_with(b"\r\n") {
            return Err(form("a value has another length"));
        }
    }
}

fn form(reason: &str) -> Error {
    Error::Form { what: "memcached".into(), reason: reason.trim().into() }
}

fn connect(namespace: &str, server: SocketAddr) -> Result<TcpStream> {
    net::inside(namespace, || {
        let stream = TcpStream::connect_timeout(&server, Duration::from_secs(5))
            .context(|| format!("connecting to {server}"))?;
        stream.set_nodelay(true).context(|| "setting TCP_NODELAY".into())?;
        // A guest that is gone for good must not hold its clients for ever.
        stream.set_read_timeout(Some(Duration::from_secs(20))).context(|| "setting a timeout".into())?;
        Ok(stream)
    })
}

/// Counts requests every [`SAMPLE`] until the load ends.
fn sample(shared: &Shared) -> Vec<Sample> {
    let mut samples = Vec::new();
    let (mut next, mut before) = (Instant::now() + SAMPLE, (now_us(), 0));
    while !shared.stop.load(Ordering::Relaxed) {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next += SAMPLE;
        let now = (now_us(), shared.requests.load(Ordering::Relaxed));
        let seconds = (now.0 - before.0) as f64 / 1e6;
        samples.push(Sample { at_us: now.0, per_s: (now.1 - before.1) as f64 / seconds.max(1e-6) });
        before = now;
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_memcached_are_told_from_errors() {
        let mut line = Vec::new();
        assert!(read_stored(&mut &b"STORED\r\n"[..], &mut line).is_ok());
        assert!(read_stored(&mut &b"SERVER_ERROR out of memory\r\n"[..], &mut line).is_err());
        assert!(read_stored(&mut &b""[..], &mut line).is_err());
        assert!(read_values(&mut &b"END\r\n"[..], &mut line, 3).is_ok());
        assert!(read_values(&mut &b"VALUE k 0 3\r\nabc\r\nEND\r\n"[..], &mut line, 3).is_ok());
        let two = b"VALUE k 0 3\r\nabc\r\nVALUE l 0 3\r\ndef\r\nEND\r\n";
        assert!(read_values(&mut &two[..], &mut line, 3).is_ok());
        assert!(read_values(&mut &two[..two.len() - 5], &mut line, 3).is_err(), "the end is missing");
        assert!(read_values(&mut &b"VALUE k 0 5\r\nabcde\r\nEND\r\n"[..], &mut line, 3).is_err());
        assert!(read_values(&mut &b"SERVER_ERROR out of memory\r\n"[..], &mut line, 3).is_err());
    }
}
