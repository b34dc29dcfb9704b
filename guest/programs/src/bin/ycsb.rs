//! Reads and updates rows of a PostgreSQL table, the popular ones more often, as YCSB's workload A does, for ever.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use postgres::{Client, Config, Error, NoTls};
use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::histogram::Histogram;
use sterna_guest_programs::pace::Every;
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;
use sterna_guest_programs::zipf::Zipf;

const USAGE: &str =
    "ycsb --server IP:PORT [--connections N] [--rows N] [--read PERCENT] [--seed N] [--interval-ms BETWEEN-LINES]";

/// Fields of a row beside its key.
const FIELDS: usize = 10;
/// Characters of a field.
const FIELD_BYTES: usize = 100;
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

/// What the connections have done since the last line.
#[derive(Default)]
struct Tally {
    reads: u64,
    updates: u64,
    errors: u64,
    /// Microseconds from a request to its answer.
    latency: Histogram,
    /// The last error, in words.
    problem: Option<String>,
}

/// What a connection does.
#[derive(Clone)]
struct Work {
    server: SocketAddr,
    read_percent: u32,
    keys: Zipf,
}

impl Work {
    /// Requests until the connection breaks.
    fn talk(&self, random: &mut Random, tally: &Mutex<Tally>) -> Result<(), Error> {
        let mut client = self.connect()?;
        let read = client.prepare("SELECT * FROM usertable WHERE ycsb_key = $1")?;
        let fields: Vec<String> = (1..=FIELDS).map(|number| format!("field{number} = ${}", number + 1)).collect();
        let update = client.prepare(&format!("UPDATE usertable SET {} WHERE ycsb_key = $1", fields.join(", ")))?;
        loop {
            let key = self.keys.next(random) as i32;
            let is_read = random.percent(self.read_percent);
            let values: Vec<String> = if is_read { Vec::new() } else { (0..FIELDS).map(|_| text(random)).collect() };
            let start = Instant::now();
            let rows = if is_read {
                client.query(&read, &[&key])?.len() as u64
            } else {
                let fields = values.iter().map(|value| value as &(dyn postgres::types::ToSql + Sync));
                client.execute(&update, &std::iter::once(&key as _).chain(fields).collect::<Vec<_>>())?
            };
            let took = start.elapsed();
            let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
            tally.latency.note(took.as_micros() as u64);
            tally.errors += u64::from(rows != 1);
            *if is_read { &mut tally.reads } else { &mut tally.updates } += 1;
        }
    }

    fn connect(&self) -> Result<Client, Error> {
        let mut config = Config::new();
        // By address: there is nothing in a guest that could look up a name.
        config.host(&self.server.ip().to_string()).hostaddr(self.server.ip()).port(self.server.port());
        config.user("postgres").dbname("postgres").connect_timeout(Duration::from_secs(5));
        config.connect(NoTls)
    }
}

/// A field's new value.
fn text(random: &mut Random) -> String {
    let mut value = String::with_capacity(FIELD_BYTES + 15);
    while value.len() < FIELD_BYTES {
        value.push_str(&format!("{:016x}", random.next_u64()));
    }
    value.truncate(FIELD_BYTES);
    value
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let server = arguments.get("server", String::new());
    let Ok(server) = server.parse() else { arguments.reject("server", &format!("`{server}` is no IP:PORT")) };
    let connections = arguments.get("connections", 4_u64);
    let rows = arguments.get("rows", 10_000_usize);
    let seed = arguments.get("seed", 1_u64);
    let interval = Duration::from_millis(arguments.get("interval-ms", 500));
    if rows == 0 || i32::try_from(rows).is_err() {
        arguments.reject("rows", "is none, or more than keys have numbers for");
    }
    let work = Work { server, read_percent: arguments.get("read", 50), keys: Zipf::new(rows) };

    let report = Report::from_environment();
    let tally = Arc::new(Mutex::new(Tally::default()));
    for number in 0..connections {
        let (work, tally) = (work.clone(), tally.clone());
        let mut random = Random::new(seed.wrapping_mul(1000).wrapping_add(number) << 1);
        std::thread::spawn(move || {
            loop {
                if let Err(problem) = work.talk(&mut random, &tally) {
                    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                    tally.errors += 1;
                    tally.problem = Some(problem.to_string());
                }
                std::thread::sleep(RETRY);
            }
        });
    }
    let mut every = Every::new(interval, Instant::now());
    loop {
        std::thread::sleep(interval);
        let Some(elapsed) = every.elapsed(Instant::now()) else { continue };
        let tally = std::mem::take(&mut *tally.lock().unwrap_or_else(PoisonError::into_inner));
        let quantile = |share: f64| tally.latency.quantile(share).unwrap_or(0.0);
        report.line(format_args!(
            "YCSB ok ops_per_s={:.1} reads={} updates={} errors={} p50_us={:.0} p99_us={:.0} latency={}",
            tally.latency.count() as f64 / elapsed.as_secs_f64(),
            tally.reads,
            tally.updates,
            tally.errors,
            quantile(0.5),
            quantile(0.99),
            tally.latency
        ));
        if let Some(problem) = tally.problem {
            report.line(format_args!("YCSB error {problem}"));
        }
    }
}
