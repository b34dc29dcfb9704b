//! The figures 2 and 4 of sharing-aware migration: the memory that gangs take where they come from and where they go
//! to, after the migration and at most during it; and whether they fit where memory is limited.

use std::path::Path;

use super::curves::Curves;
use super::gang_figures::{COMPLETED, PEAK, SETTLED};
use super::judge::worst;
use super::together::{self, MODES, Together, Work, middle, sterna};
use super::{Options, Plan};
use crate::error::Result;
use crate::gang::Mover;
use crate::plot::{BarPlot, LinePlot};
use crate::result::{Run, Target, rows};
use crate::stats::median;
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let sizes = Sizes::of(options.quick);
    let gangs = gangs(&sizes, &together::newest()?, options.quick)?;
    let most = sizes.most();
    let plan = Plan::new(move |record| {
        let lab = together::lab(most)?;
        together::try_gangs(&lab, &gangs, repeats, record);
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &sizes)).drawn(plot))
}

/// The gangs' sizes.
#[derive(Clone, Copy)]
struct Sizes {
    guests: &'static [usize],
    memory_mib: u64,
}

impl Sizes {
    fn of(quick: bool) -> Self {
        if quick { Self { guests: &[2], memory_mib: 256 } } else { Self { guests: &[1, 2, 4, 6, 8], memory_mib: 1024 } }
    }

    fn most(&self) -> usize {
        self.guests.iter().copied().max().unwrap_or(1)
    }

    fn gang(&self, guests: usize, limited: bool, mover: &Mover, qemu: &Qemu) -> Together {
        Together {
            guests,
            memory_mib: self.memory_mib,
            shared_percent: SHARED_PERCENT,
            limited,
            work: Work::Rest,
            watched: true,
            mover: mover.clone(),
            qemu: qemu.clone(),
        }
    }

    /// The names of the workloads: with the destination's memory as it is, and with a limit for the largest gang.
    fn workloads(&self) -> (Vec<String>, String) {
        let qemu = Qemu { label: String::new(), path: "".into() };
        let name = |guests, limited| self.gang(guests, limited, &together::QEMU_PRECOPY, &qemu).workload();
        (self.guests.iter().map(|guests| name(*guests, false)).collect(), name(self.most(), true))
    }
}

/// Every mover with every size, and the largest gang where memory is limited. Hybrid is tried with the largest alone,
/// and not in a short run.
fn gangs(sizes: &Sizes, qemu: &Qemu, quick: bool) -> Result<Vec<Together>> {
    let movers = together::all_movers(qemu)?;
    let hybrid = sterna("--mode hybrid", true)?;
    let mut gangs = Vec::new();
    for guests in sizes.guests {
        gangs.extend(movers.iter().map(|mover| sizes.gang(*guests, false, mover, qemu)));
    }
    gangs.extend((!quick).then(|| sizes.gang(sizes.most(), false, &hybrid, qemu)));
    gangs.extend(movers.iter().map(|mover| sizes.gang(sizes.most(), true, mover, qemu)));
    Ok(gangs)
}

fn targets(runs: &[Run], sizes: &Sizes) -> Result<Vec<Target>> {
    let (free, limited) = sizes.workloads();
    let shared: Vec<Mover> = MODES.iter().map(|mode| sterna(mode, true)).collect::<Result<_>>()?;
    let most = |metric: &str| {
        let each = free.iter().flat_map(|workload| shared.iter().map(move |mover| (workload, mover)));
        worst(each.map(|(workload, mover)| middle(runs, workload, mover, metric)))
    };
    // The worst is the least: all must fit.
    let fits = shared.iter().map(|mover| middle(runs, &limited, mover, COMPLETED));
    let fits = fits.collect::<Option<Vec<_>>>().and_then(|fits| fits.into_iter().reduce(f64::min));
    let qemu = [together::QEMU_PRECOPY, together::QEMU_POSTCOPY];
    let killed = qemu.iter().map(|mover| middle(runs, &limited, mover, COMPLETED).map(|completed| 1.0 - completed));
    let killed = killed.collect::<Option<Vec<_>>>().and_then(|killed| killed.into_iter().reduce(f64::min));
    Ok(vec![
        Target::at_most("sharing on: settled frames ÷ the source's, worst row", 1.02, most(SETTLED)),
        Target::at_most("sharing on: most frames during the move ÷ the source's, worst row", 1.03, most(PEAK)),
        Target::at_least("sharing on: all arrive under the limit (1: yes), both modes", 1.0, fits),
        Target::at_least("QEMU is killed under the limit (1: yes), both modes", 1.0, killed),
    ])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (name, y_label, metric) in [
        ("footprint_settled", "MiB of guests' RAM at the destination, settled", "destination_mib"),
        ("footprint_peak", "most frames during the move ÷ the source's", PEAK),
    ] {
        let title = "guests that share and move together".to_owned();
        let x_label = "guests";
        let curves = Curves { title: title.clone(), x_label, y_label, metric, x: &together::guests_of };
        let mut lines = curves.lines(&rows);
        if metric == "destination_mib" {
            lines.insert(0, ("at the source, before".to_owned(), source(runs)));
        }
        if lines.iter().any(|(_, points)| !points.is_empty()) {
            LinePlot { title, x_label: x_label.into(), y_label: y_label.into(), lines, spans: Vec::new() }
                .write(directory, name)?;
        }
    }
    let most =
        runs.iter().filter_map(|run| together::guests_of(run.config.get("workload")?.as_str()?)).reduce(f64::max);
    let bars = rows.iter().filter(|row| most.is_some() && together::guests_of(row.word("workload")) == most);
    let bars = bars.filter_map(|row| Some((row.mover_and_qemu(), row.metrics.get(SETTLED)?.median))).collect();
    let title = format!("{} guests that share, after the move", most.unwrap_or(0.0));
    BarPlot { title, label: "frames at the destination ÷ the source's".into(), bars }.write(directory, SETTLED)
}

/// The memory at the source by the number of guests, whoever moved them then.
fn source(runs: &[Run]) -> Vec<(f64, f64)> {
    let place = |run: &Run| together::guests_of(run.config.get("workload")?.as_str()?);
    let mut places: Vec<f64> = runs.iter().filter_map(place).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let at = |x: f64| {
        let there = runs.iter().filter(|run| place(run) == Some(x));
        median(&there.filter_map(|run| run.metrics.get("source_mib").copied()).collect::<Vec<_>>())
    };
    places.into_iter().filter_map(|x| Some((x, at(x)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu() -> Qemu {
        Qemu { label: "10.0".into(), path: "/nonexistent".into() }
    }

    #[test]
    fn the_worst_gang_is_judged_and_all_must_fit_where_qemu_is_killed() {
        let sizes = Sizes { guests: &[1, 2], memory_mib: 256 };
        let mut runs = Vec::new();
        for mode in MODES {
            let mover = sterna(mode, true).unwrap();
            for (guests, settled, peak) in [(1, 1.0, 1.01), (2, 1.015, 1.02)] {
                let gang = sizes.gang(guests, false, &mover, &qemu());
                runs.push(together::sample(&gang, 0, &[(SETTLED, settled), (PEAK, peak)]));
            }
            runs.push(together::sample(&sizes.gang(2, true, &mover, &qemu()), 0, &[(COMPLETED, 1.0)]));
        }
        for mover in [together::QEMU_PRECOPY, together::QEMU_POSTCOPY] {
            runs.push(together::sample(&sizes.gang(2, true, &mover, &qemu()), 0, &[(COMPLETED, 0.0)]));
        }
        let judged = |runs: &[Run]| -> Vec<_> {
            targets(runs, &sizes).unwrap().iter().map(|target| (target.measured, target.met)).collect()
        };
        let met = [1.015, 1.02, 1.0, 1.0].map(|measured| (Some(measured), true));
        assert_eq!(judged(&runs), met);
        runs[2].metrics.insert(COMPLETED.into(), 0.0);
        assert_eq!(judged(&runs)[2], (Some(0.0), false), "one mode does not fit");
        assert_eq!(judged(&[]), [(None, false); 4]);
    }

    #[test]
    fn the_source_is_the_same_line_for_all_movers_and_limited_rows_are_in_none() {
        let sizes = Sizes { guests: &[2], memory_mib: 256 };
        let of = |limited, mib| {
            let gang = sizes.gang(2, limited, &together::QEMU_PRECOPY, &qemu());
            together::sample(&gang, 0, &[("source_mib", mib)])
        };
        assert_eq!(source(&[of(false, 300.0), of(false, 310.0), of(true, 900.0)]), [(2.0, 305.0)]);
    }
}
