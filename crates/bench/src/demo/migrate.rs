//! The demo: two hosts at 1 Gbit, a guest with memcached under load and a checker of its own memory, moved once.

use std::path::Path;
use std::time::Duration;

use comfy_table::Table;
use serde_json::{Value, json};
use sterna_api::units::{show_rate, show_size};
use sterna_api::{MigrateOptions, Report};

use super::{narrator, write};
use crate::accelerator;
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::{self, Lab, LabConfig};
use crate::load::memcached::LoadConfig;
use crate::meter::{self, Gap};
use crate::plot::LinePlot;
use crate::tools;
use crate::trial::{self, Mover, Qemu, Setup, Trial};

/// What the guest runs: memcached, and 64 MiB that are checked and rewritten for ever.
const JOBS: &str = "memcached:-m,256;checker:--mib,64,--rate,16";

/// Runs it, prints the report, writes `throughput.svg` and `.png` to `out` and the report to `json`.
/// Returns whether all is well: completed, both sides equal, no complaint of the checker.
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
    let trial = trial::run(&Setup {
        lab: &lab,
        guest: Guest::new(&lab, "demo", 10, JOBS),
        ready: Some("CHECKER ready"),
        mover: &Mover::Sterna(MigrateOptions { verify: true, ..MigrateOptions::default() }),
        qemu: &Qemu { label: "demo".into(), path },
        load: Some(LoadConfig::mixed(1)),
        settle: Duration::from_secs(5),
        working_set: Duration::ZERO,
        after: Duration::from_secs(4),
        limit: trial::LIMIT,
        say: &say,
    })?;
    lab.down()?;
    say("done; the lab is gone");

    let report = trial.sterna.as_ref().ok_or_else(|| Error::Usage("the migration left no report".into()))?;
    let gap = meter::longest_gap(&trial.arrivals, trial.begin_us, trial.end_us + 1_000_000);
    let verdict = Verdict::of(&trial, report);
    println!("{}", table(&trial, report, gap, &verdict));
    plot(&trial, gap).write(out, "throughput")?;
    println!("guest throughput around the migration: {0}/throughput.svg, {0}/throughput.png", out.display());
    if let Some(file) = json {
        write(&document(&trial, report, gap, &verdict), file)?;
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
        let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
        let bad_pages = after.filter_map(|line| line.number("bad")).reduce(f64::max).map(|bad| bad as u64);
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
    let requests = |name: &str| metric(name).map_or_else(|| "?".into(), |value| format!("{value:.0}/s"));
    row(
        "memcached requests",
        format!("{} before, {} during", requests("requests_per_s_before"), requests("requests_per_s_during")),
    );
    table
}

fn plot(trial: &Trial, gap: Option<Gap>) -> LinePlot {
    let seconds = |at_us: i64| (at_us - trial.begin_us) as f64 / 1e6;
    let shown = |at: f64| (-4.0..=seconds(trial.end_us) + 4.0).contains(&at);
    let samples = trial.load.iter().flat_map(|load| &load.samples).map(|sample| (seconds(sample.at_us), sample.per_s));
    let mut spans = vec![("migration".to_owned(), 0.0, seconds(trial.end_us))];
    spans.extend(gap.map(|gap| (format!("silence, {:.1} ms", gap.ms), seconds(gap.from_us), seconds(gap.to_us))));
    LinePlot {
        title: "memcached in the guest, around its migration".into(),
        x_label: "seconds since the request".into(),
        y_label: "requests per second".into(),
        lines: vec![("requests answered, each 100 ms".into(), samples.filter(|(at, _)| shown(*at)).collect())],
        spans,
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
