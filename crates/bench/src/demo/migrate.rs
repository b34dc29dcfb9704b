//! The demo: two hosts at 1 Gbit, and a guest with memcached under load, a checker of its own memory, and a program
//! that writes memory faster than the link carries it. Sterna moves it once, as it does by default, and then QEMU by
//! itself moves another one like it.

use std::path::Path;
use std::time::Duration;

use comfy_table::Table;
use serde_json::{Value, json};
use sterna_api::units::{show_rate, show_size};
use sterna_api::{MigrateOptions, Report};

use super::{narrator, write};
use crate::accelerator;
use crate::baseline::{Method, Ram};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::{self, Lab, LabConfig};
use crate::load::memcached::LoadConfig;
use crate::meter::{self, Gap};
use crate::plot::LinePlot;
use crate::tools;
use crate::trial::{self, Mover, Qemu, Setup, Trial};

/// What the guest runs: memcached, 64 MiB that are checked and rewritten for ever, and 128 MiB of which pages are
/// written at random, 160 MiB of them in a second: the link carries 119.
const JOBS: &str = "memcached:-m,256;checker:--mib,64,--rate,16;dirtier:--mib,128,--rate,160,--bytes,16";

/// Requests to memcached in a second: fewer than the guest can answer beside its other work.
const REQUESTS_PER_S: f64 = 4000.0;

/// QEMU by itself slows a guest down that writes too fast, where it is told to: otherwise it does not end at all.
const QEMU_ALONE: Mover = Mover::Qemu(Method::AutoConverge, Ram::Plain);

/// Runs it, prints the report, writes `throughput.svg` and `.png` to `out` and the report to `json`.
/// Returns whether all is well: completed, both sides equal, no complaint of the checker. What becomes of the guest
/// that QEMU moves counts for nothing.
///
/// # Errors
/// Where the lab or the guest does not come up, or the migration fails.
pub fn run(json: Option<&Path>, out: &Path) -> Result<bool> {
    let say = narrator();
    std::fs::create_dir_all(out).context(|| format!("making {}", out.display()))?;
    lab::clear_orphans();
    say("bringing up two hosts, a client and a meter, joined at 1 Gbit");
    let lab = Lab::up(LabConfig::pair(&format!("demo{}", std::process::id())))?;
    let path = tools::qemu_10_0().or_else(|_| tools::qemu_7_2())?;
    let move_by = |mover: &Mover, name: &str, number: u8| {
        trial::run(&Setup {
            lab: &lab,
            guest: Guest::new(&lab, name, number, JOBS),
            ready: Some("CHECKER ready"),
            mover,
            qemu: &Qemu { label: "demo".into(), path: path.clone() },
            load: Some(LoadConfig::many_small(REQUESTS_PER_S, 1)),
            settle: Duration::from_secs(5),
            working_set: Duration::ZERO,
            after: Duration::from_secs(4),
            limit: trial::LIMIT,
            say: &say,
        })
    };
    say("a guest that writes faster than the link carries it, moved by Sterna");
    let trial = move_by(&Mover::Sterna(MigrateOptions { verify: true, ..MigrateOptions::default() }), "demo", 10)?;
    say("another one like it, moved by QEMU by itself, which may slow it down (auto-converge)");
    let alone = move_by(&QEMU_ALONE, "alone", 11)?;
    lab.down()?;
    say("done; the lab is gone");

    let report = trial.sterna.as_ref().ok_or_else(|| Error::Usage("the migration left no report".into()))?;
    let gap = gap_of(&trial);
    let verdict = Verdict::of(&trial, report);
    println!("{}", beside(&trial, &alone));
    println!("{}", table(&trial, report, gap, &verdict));
    plot(&trial, &alone).write(out, "throughput")?;
    println!("memcached around both migrations: {0}/throughput.svg, {0}/throughput.png", out.display());
    if let Some(file) = json {
        let mut document = document(&trial, report, gap, &verdict);
        let bad_pages = bad_pages(&alone);
        document["qemu"] = json!({
            "mover": QEMU_ALONE.label(), "metrics": alone.metrics, "gap": gap_of(&alone), "bad_pages": bad_pages,
        });
        write(&document, file)?;
    }
    verdict.complaints.iter().for_each(|complaint| eprintln!("error: {complaint}"));
    Ok(verdict.complaints.is_empty())
}

/// Whether the guest came over unharmed.
struct Verdict {
    /// Pages that the guest's checker found wrong, where it reported after the migration.
    bad_pages: Option<u64>,
    /// The problems that were found.
    complaints: Vec<String>,
}

impl Verdict {
    fn of(trial: &Trial, report: &Report) -> Self {
        let bad_pages = bad_pages(trial);
        let mut complaints = Vec::new();
        if !report.verify.checked {
            complaints.push("the two sides were not compared".into());
        }
        if report.verify.mismatches > 0 {
            complaints.push(format!("{} pages differ between source and destination", report.verify.mismatches));
        }
        match bad_pages {
            None => complaints.push("the guest's checker sent nothing after the migration".into()),
            Some(0) => {}
            Some(bad) => complaints.push(format!("the guest's checker found {bad} wrong pages")),
        }
        complaints.extend(
            trial.checker.iter().filter(|line| line.text.starts_with("CHECKER BAD")).map(|line| line.text.clone()),
        );
        Self { bad_pages, complaints }
    }
}

/// Pages that a guest's checker found wrong, where it reported after the migration.
fn bad_pages(trial: &Trial) -> Option<u64> {
    let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
    after.filter_map(|line| line.number("bad")).reduce(f64::max).map(|bad| bad as u64)
}

/// The longest time in which nothing was heard of the guest, up to a second after its move.
fn gap_of(trial: &Trial) -> Option<Gap> {
    meter::longest_gap(&trial.arrivals, trial.begin_us, trial.end_us + 1_000_000)
}

/// What somebody outside notices of both moves.
fn beside(sterna: &Trial, alone: &Trial) -> Table {
    let mut table = super::table();
    table.set_header(["seen from outside", "Sterna", "QEMU alone, auto-converge"]);
    let ms = |value: Option<f64>| value.map_or_else(|| "not measured".into(), |ms| format!("{ms:.1} ms"));
    let of = |trial: &Trial, name: &str| trial.metrics.get(name).copied();
    let took = |trial: &Trial| match (of(trial, "total_ms"), of(trial, "given_up_ms")) {
        (Some(ms), _) => format!("{:.1} s", ms / 1e3),
        (None, Some(ms)) => format!("given up after {:.0} s", ms / 1e3),
        (None, None) => "not measured".into(),
    };
    let stood = |trial: &Trial| match of(trial, "downtime_ms") {
        Some(value) => ms(Some(value)),
        None => "it was not moved".into(),
    };
    let wire = |trial: &Trial| {
        of(trial, "bytes_on_wire").map_or_else(|| "not measured".into(), |bytes| show_size(bytes as u64))
    };
    let requests = |trial: &Trial| {
        let per_s = |name: &str| of(trial, name).map_or_else(|| "?".into(), |value| format!("{value:.0}"));
        format!("{} before, {} meanwhile", per_s("requests_per_s_before"), per_s("requests_per_s_during"))
    };
    let wrong = |trial: &Trial| bad_pages(trial).map_or_else(|| "silent".into(), |bad| format!("{bad} pages"));
    let mut row = |name: &str, show: &dyn Fn(&Trial) -> String| {
        table.add_row([name.to_owned(), show(sterna), show(alone)]);
    };
    row("the move took", &took);
    row("the guest stood still", &stood);
    row("nothing was heard of it for", &|trial| ms(gap_of(trial).map(|gap| gap.ms)));
    row("longest request to memcached", &|trial| ms(of(trial, "longest_request_ms")));
    row("memcached answered in a second", &requests);
    row("bytes on the wire", &wire);
    row("wrong, by the guest's own checker", &wrong);
    table
}

fn table(trial: &Trial, report: &Report, gap: Option<Gap>, verdict: &Verdict) -> Table {
    let mut table = super::table();
    let ms = |value: f64| format!("{value:.1} ms");
    let pages = &report.pages;
    let metric = |name: &str| trial.metrics.get(name).copied();
    let rate = report.bytes_on_wire as f64 / (report.total_ms - report.setup_ms).max(1.0) * 1e3;
    let parts = &report.downtime;
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row(
        "guest",
        format!(
            "{}: {} RAM, QEMU {}, {}",
            report.vm,
            show_size(report.ram.total_pages * 4096),
            report.source.qemu,
            report.mode
        ),
    );
    row("accelerator", accelerator::chosen().name().into());
    row("total time", format!("{} (setup {})", ms(report.total_ms), ms(report.setup_ms)));
    row("downtime, by QEMU's events", ms(report.downtime_ms));
    row(
        "  of which",
        format!(
            "pause {}, last pages {}, comparing both sides {}, devices {}, start {}",
            ms(parts.pause_ms),
            ms(parts.final_pages_ms),
            ms(parts.verify_ms),
            ms(parts.device_state_ms),
            ms(parts.start_ms)
        ),
    );
    row(
        "silence at the meter",
        gap.map_or_else(|| "not measured".into(), |gap| format!("{}, {} heartbeats lost", ms(gap.ms), gap.lost)),
    );
    row("longest silence before", metric("gap_before_ms").map_or_else(|| "not measured".into(), ms));
    row("bytes on the wire", format!("{} ({})", show_size(report.bytes_on_wire), show_rate(rate as u64)));
    row("pages sent", format!("{} in {} rounds", pages.sent, report.rounds.len()));
    row(
        "pages skipped",
        format!(
            "{} unallocated, {} free in the guest, {} zero, {} written again",
            pages.unallocated, pages.free, pages.zero, pages.fake_dirty_tracked
        ),
    );
    row("compared", format!("{} pages, {} differ", report.verify.pages, report.verify.mismatches));
    row("the guest's checker", verdict.bad_pages.map_or_else(|| "silent".into(), |bad| format!("{bad} wrong pages")));
    table
}

fn plot(sterna: &Trial, alone: &Trial) -> LinePlot {
    let seconds = |trial: &Trial, at_us: i64| (at_us - trial.begin_us) as f64 / 1e6;
    let end = |trial: &Trial| seconds(trial, trial.end_us);
    let last = end(sterna).max(end(alone)) + 4.0;
    let line = |name: &str, trial: &Trial| {
        // The load ends in the last interval.
        let samples = trial.load.iter().filter_map(|load| load.samples.split_last()).flat_map(|(_, whole)| whole);
        let points = samples.map(|sample| (seconds(trial, sample.at_us), sample.per_s));
        (name.to_owned(), points.filter(|(at, _)| (-4.0..=last).contains(at)).collect())
    };
    let span = |name: &str, trial: &Trial| (name.to_owned(), 0.0, end(trial));
    LinePlot {
        title: "memcached in a guest that writes faster than the link carries, while it moves".into(),
        x_label: "seconds since the request to move it".into(),
        y_label: "requests answered per second".into(),
        lines: vec![line("moved by Sterna", sterna), line("moved by QEMU alone, auto-converge", alone)],
        spans: vec![span("Sterna's move", sterna), span("QEMU's move", alone)],
    }
}

/// The report's own fields, the same fields in the list that benches write, and what was seen from outside.
fn document(trial: &Trial, report: &Report, gap: Option<Gap>, verdict: &Verdict) -> Value {
    let mut document = json!(report);
    document["migrations"] = json!([report]);
    document["meter"] = json!({ "gap": gap, "gap_before_ms": trial.metrics.get("gap_before_ms") });
    document["checker"] = json!({ "bad_pages": verdict.bad_pages });
    document["accelerator"] = json!(accelerator::chosen().name());
    document["metrics"] = json!(trial.metrics);
    document["complaints"] = json!(verdict.complaints);
    document
}
