//! FCtrans' figures 13 to 15: right after its boot a guest is split; a program goes through memory that the guest has
//! never used, and then through it again.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Instant;

use serde_json::json;

use super::curves::Curves;
use super::gang_figures::{Measured, measure};
use super::judge::{least, ratio, worst};
use super::lenders::{self, HERE_MIB, MEMORY_MIB, MIB, Moment, Way, paged, rates};
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::command::PATIENCE;
use crate::console::Console;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::meter::Line;
use crate::plot::LinePlot;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// What the program goes through, MiB: there is room here for the first two.
const SIZES: [u64; 4] = [128, 256, 512, 640];
const FITTING: usize = 2;
/// How long it rests between two passes.
const REST_MS: u64 = 3000;

const FIRST: &str = "first_mib_per_s";
const AGAIN: &str = "again_mib_per_s";
const FIRST_IN: &str = "first_in_pages";
const FIRST_OUT: &str = "first_out_pages";
const AGAIN_IN: &str = "again_in_pages";
const AGAIN_OUT: &str = "again_out_pages";
/// The longest that the program took for a page, milliseconds.
const LONGEST: &str = "longest_page_ms";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let sizes: &[u64] = if options.quick { &SIZES[1..3] } else { &SIZES };
    let attempts = attempts(&together::newest()?, sizes);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab()?, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// A walk through memory that a guest has never used.
#[derive(Debug, Clone)]
struct Walk {
    way: Way,
    mib: u64,
    qemu: Qemu,
}

fn attempts(qemu: &Qemu, sizes: &[u64]) -> Vec<Walk> {
    let each = sizes.iter().flat_map(|mib| Way::ALL.map(|way| (way, *mib)));
    each.map(|(way, mib)| Walk { way, mib, qemu: qemu.clone() }).collect()
}

fn workload(mib: u64) -> String {
    format!("{mib} MiB never used before")
}

impl Attempt for Walk {
    fn rows(&self) -> Vec<Row> {
        vec![self.way.row(&self.qemu, &workload(self.mib), &[])]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guest = Guest::new(lab, name, 10, "checker:--mib,16,--rate,4");
        vec![Guest { memory_bytes: MEMORY_MIB * MIB, typed_at: true, ..guest }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let guest = site.guest()?;
        measure(runs, |measured| self.walk(site.lab, guest, measured))
    }

    fn tell(&self, run: &Run) -> String {
        let [first, again, came, left] = [FIRST, AGAIN, FIRST_IN, FIRST_OUT].map(|name| figure(run, name));
        format!("{first} MiB/s the first time, {again} the second; at first {came} pages came and {left} left")
    }
}

impl Walk {
    fn walk(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        guest.wait_until_up(PATIENCE)?;
        std::thread::sleep(REST);
        let report = self.way.split(lab, &vm)?;
        std::thread::sleep(REST);
        let mut console = Console::open(guest)?;
        let walk = |begin: Instant| {
            let before = paged(&vm)?;
            console.type_line(&format!("walker --mib {} --passes 2 --rest-ms {REST_MS}", self.mib))?;
            let first = console.wait_for("WALKER pass=1", PATIENCE)?;
            let (between, first_s) = (paged(&vm)?, begin.elapsed().as_secs_f64());
            let again = console.wait_for("WALKER pass=2", PATIENCE)?;
            Ok(([first, again], [before, between, paged(&vm)?], [first_s, begin.elapsed().as_secs_f64()]))
        };
        let ((passes, [before, between, after], ends_s), moments) = lenders::watched(&vm, walk)?;
        guest.wait_until_well(PATIENCE)?;
        let [first, again] = &passes;
        measured.details =
            json!({ "split": report, "first": first, "again": again, "ends_s": ends_s, "paged": moments });
        let [first, again] = passes.map(|text| Pass::read(&text));
        let (first, again) = (first?, again?);
        for (name, value) in [
            (FIRST, first.mib_per_s),
            (AGAIN, again.mib_per_s),
            (LONGEST, first.longest_ms),
            (FIRST_IN, between[0] - before[0]),
            (FIRST_OUT, between[1] - before[1]),
            (AGAIN_IN, after[0] - between[0]),
            (AGAIN_OUT, after[1] - between[1]),
        ] {
            measured.note(name, value);
        }
        Ok(())
    }
}

/// What the program says of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pass {
    mib_per_s: f64,
    longest_ms: f64,
}

impl Pass {
    fn read(text: &str) -> Result<Self> {
        let line = Line { from: Ipv4Addr::UNSPECIFIED, at_us: 0, text: text.into() };
        let of = |word: &str| line.number(word);
        let wrong = || Error::Form { what: "a pass through memory".into(), reason: text.into() };
        let (pages, elapsed_us, longest_us) = (of("pages"), of("elapsed_us"), of("longest_us"));
        let (Some(pages), Some(elapsed_us), Some(longest_us), Some(0.0)) = (pages, elapsed_us, longest_us, of("bad"))
        else {
            return Err(wrong());
        };
        Ok(Self { mib_per_s: pages / 256.0 / (elapsed_us.max(1.0) / 1e6), longest_ms: longest_us / 1e3 })
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let row = |way: Way, mib: u64| move |run: &Run| is(run, &[("mover", way.label()), ("workload", &workload(mib))]);
    let of = |name: &'static str| move |run: &Run| run.metrics.get(name).copied();
    let (fitting, larger) = SIZES.split_at(FITTING);
    let came = fitting.iter().map(|mib| median(&series(runs, FIRST_IN, row(Way::Tracked, *mib))));
    let speed = |mib: &u64| ratio(runs, of(FIRST), row(Way::Tracked, *mib), row(Way::Whole, *mib));
    let fewer = |mib: &u64| ratio(runs, of(FIRST_IN), row(Way::Tracked, *mib), row(Way::Ignored, *mib));
    vec![
        Target::at_most("there is room: pages that come while it is first used, worst row", 0.0, worst(came)),
        Target::at_least(
            "there is room: speed of first use ÷ that of a whole guest, worst row",
            0.9,
            least(fitting.iter().map(speed)),
        ),
        Target::at_most(
            "no room: pages that come at first ÷ those where unused memory is ignored, worst row",
            0.02,
            worst(larger.iter().map(fewer)),
        ),
    ]
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    let size = |workload: &str| workload.strip_suffix(" MiB never used before")?.parse().ok();
    for (metric, name, title, y_label) in [
        (FIRST, "first", "memory used for the first time", "MiB a second"),
        (AGAIN, "again", "and again", "MiB a second"),
        (FIRST_IN, "first-in", "memory used for the first time", "pages that came"),
        (AGAIN_IN, "again-in", "and again", "pages that came"),
    ] {
        let title = format!("{title}: {HERE_MIB} MiB of {MEMORY_MIB} may be here");
        Curves { title, x_label: "MiB", y_label, metric, x: &size }.write(&rows, directory, name)?;
    }
    SIZES.iter().try_for_each(|mib| plot_over_time(runs, *mib, directory))
}

/// Pages that come and leave while the program goes through so much memory, twice.
fn plot_over_time(runs: &[Run], mib: u64, directory: &Path) -> Result<()> {
    let (mut lines, mut spans) = (Vec::new(), Vec::new());
    for way in [Way::Tracked, Way::Ignored] {
        let row = |run: &&Run| is(run, &[("mover", way.label()), ("workload", &workload(mib))]);
        let seen = |run: &Run| {
            let moments = serde_json::from_value::<Vec<Moment>>(run.details["paged"].clone()).ok()?;
            Some((moments, serde_json::from_value::<[f64; 2]>(run.details["ends_s"].clone()).ok()?))
        };
        let Some((moments, ends_s)) = runs.iter().filter(row).find_map(seen) else { continue };
        for (at, word) in ["come", "leave"].into_iter().enumerate() {
            lines.push((format!("{}: {word}", way.label()), rates(&moments, at)));
        }
        // The two passes; a rest lies between them.
        if way == Way::Tracked {
            spans.push((format!("{}: first", way.label()), 0.0, ends_s[0]));
            spans.push((format!("{}: again", way.label()), ends_s[0] + REST_MS as f64 / 1e3, ends_s[1]));
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    let title = format!("{mib} MiB used for the first time, and again: {HERE_MIB} MiB of {MEMORY_MIB} may be here");
    let (x_label, y_label) = ("seconds".into(), "pages a second".into());
    LinePlot { title, x_label, y_label, lines, spans }.write(directory, &format!("over-time-{mib}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pass_says_is_read_and_damage_is_no_figure() {
        let pass = Pass::read("WALKER pass=1 pages=512 elapsed_us=500000 longest_us=900 bad=0").unwrap();
        assert_eq!(pass, Pass { mib_per_s: 4.0, longest_ms: 0.9 });
        assert!(Pass::read("WALKER pass=2 pages=512 elapsed_us=500000 longest_us=900 bad=1").is_err());
        assert!(Pass::read("WALKER pass=2 pages=512").is_err());
    }

    #[test]
    fn the_worst_row_is_judged_and_none_where_one_is_missing() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let runs: Vec<Run> = attempts(&qemu, &SIZES)
            .iter()
            .map(|walk| {
                let mut run = walk.rows()[0].run(0);
                let (speed, came) = match walk.way {
                    Way::Whole => (100.0, 0.0),
                    Way::Tracked => {
                        (if walk.mib == 256 { 92.0 } else { 96.0 }, if walk.mib > 256 { 50.0 } else { 0.0 })
                    }
                    Way::Ignored => (50.0, if walk.mib == 640 { 1000.0 } else { 5000.0 }),
                };
                run.metrics.extend([(FIRST.into(), speed), (FIRST_IN.into(), came)]);
                run
            })
            .collect();
        let judged = |runs: &[Run]| -> Vec<_> { targets(runs).iter().map(|target| target.measured).collect() };
        assert_eq!(judged(&runs), [Some(0.0), Some(0.92), Some(0.05)]);
        assert_eq!(judged(&runs[1..]), [Some(0.0), None, Some(0.05)]);
        assert_eq!(judged(&[]), [None; 3]);
    }
}
