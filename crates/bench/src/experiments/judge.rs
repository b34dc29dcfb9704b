//! Figures that experiments derive from runs to judge them: pairs, shares, worst rows.

use std::collections::BTreeMap;

use super::is;
use crate::lab::Lab;
use crate::result::Run;
use crate::stats::median;
use crate::trial::Mover;

/// The share of the throughput just before the migration that was left during it.
pub(super) const KEPT: &str = "throughput_kept";
/// How fast the guest wrote fresh pages, as the mover saw it, as a share of what the link carries.
pub(super) const DIRTY_SHARE: &str = "dirty_share_of_link";

/// Total time without the set-up, as a share of the time that the link needs for the pages in use.
pub(super) const TO_LIMIT: &str = "total_to_link_limit";

/// Adds [`TO_LIMIT`], for a link of that rate, where the metrics that it needs are there.
pub(super) fn derive_limit(link_bytes_per_s: u64, metrics: &mut BTreeMap<String, f64>) {
    let get = |name: &str| metrics.get(name).copied();
    let used_ms = get("nonzero_pages").map(|pages| pages * 4096.0 / link_bytes_per_s as f64 * 1e3);
    let moving_ms = get("total_ms").map(|total| total - get("setup_ms").unwrap_or(0.0));
    let limit = moving_ms.zip(used_ms.filter(|used| *used > 0.0)).map(|(moving, used)| moving / used);
    metrics.extend(limit.map(|limit| (TO_LIMIT.into(), limit)));
}

/// Adds [`KEPT`] and [`DIRTY_SHARE`] where the metrics that they need are there.
pub(super) fn derive_shares(lab: &Lab, metrics: &mut BTreeMap<String, f64>) {
    let ratio =
        |during: &str, before: &str| Some(metrics.get(during)? / metrics.get(before).filter(|rate| **rate > 0.0)?);
    let kept = ratio("requests_per_s_during", "requests_per_s_before")
        .or_else(|| ratio("writes_per_s_during", "writes_per_s_before"));
    let link = lab.state().rate_bytes_per_s.map(|rate| rate as f64);
    let share = metrics.get("dirty_pages_per_s").zip(link).map(|(pages, link)| pages * 4096.0 / link);
    metrics.extend(kept.map(|kept| (KEPT.into(), kept)));
    metrics.extend(share.map(|share| (DIRTY_SHARE.into(), share)));
}

/// How long a run took. A run that was given up took at least as long as it was tried. A ratio to that time does not
/// flatter it, because all runs have the same limit.
pub(super) fn time_ms(run: &Run) -> Option<f64> {
    run.metrics.get("total_ms").or_else(|| run.metrics.get("given_up_ms")).copied()
}

/// The median over repetitions of one row's value divided by the other's in the same repetition.
pub(super) fn ratio(
    runs: &[Run],
    value: impl Fn(&Run) -> Option<f64>,
    own: impl Fn(&Run) -> bool,
    other: impl Fn(&Run) -> bool,
) -> Option<f64> {
    let of = |repeat, chosen: &dyn Fn(&Run) -> bool| {
        runs.iter().find(|run| run.repeat == repeat && chosen(run)).and_then(&value)
    };
    let repeats = 1 + runs.iter().map(|run| run.repeat).max()?;
    let ratios = (0..repeats).filter_map(|repeat| Some(of(repeat, &own)? / of(repeat, &other).filter(|v| *v > 0.0)?));
    median(&ratios.collect::<Vec<_>>())
}

/// Whether this is a run of that case by that mover, on a QEMU of that version.
pub(super) fn is_row(run: &Run, workload: &str, mover: &Mover, qemu: &str) -> bool {
    is(run, &[("workload", workload), ("mover", &mover.label()), ("qemu", qemu)])
}

/// The median of a value over the runs of that case by that mover, on a QEMU of that version.
pub(super) fn middle(
    runs: &[Run],
    workload: &str,
    mover: &Mover,
    qemu: &str,
    value: impl Fn(&Run) -> Option<f64>,
) -> Option<f64> {
    let chosen = runs.iter().filter(|run| is_row(run, workload, mover, qemu));
    median(&chosen.filter_map(value).collect::<Vec<_>>())
}

/// A metric by its name, for [`middle`] and [`ratio`].
pub(super) fn metric(name: &str) -> impl Fn(&Run) -> Option<f64> + Copy {
    move |run| run.metrics.get(name).copied()
}

/// Adds one metric divided by another, where both are there and the second is not 0.
pub(super) fn derive_quotient(metrics: &mut BTreeMap<String, f64>, name: &str, above: &str, below: &str) {
    let quotient = metrics.get(above).zip(metrics.get(below).filter(|value| **value > 0.0)).map(|(a, b)| a / b);
    metrics.extend(quotient.map(|quotient| (name.to_owned(), quotient)));
}

/// What `auto` is measured by: pre-copy where that ends, else what is better of hybrid and post-copy.
pub(super) fn best_choice(precopy: Option<f64>, hybrid: Option<f64>, postcopy: Option<f64>) -> Option<f64> {
    precopy.or_else(|| Some(hybrid?.min(postcopy?)))
}

/// The greatest of these values; `None` where one is absent, because the worst row may be one that was not measured.
pub(super) fn worst(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    values.into_iter().collect::<Option<Vec<_>>>()?.into_iter().reduce(f64::max)
}

/// The smallest, likewise, where more is better.
pub(super) fn least(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    values.into_iter().collect::<Option<Vec<_>>>()?.into_iter().reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(mover: &str, repeat: usize, metric: &str, value: f64) -> Run {
        Run {
            config: [("mover".to_owned(), mover.into())].into_iter().collect(),
            baseline: mover == "qemu",
            repeat,
            metrics: BTreeMap::from([(metric.to_owned(), value)]),
            details: serde_json::Value::Null,
        }
    }

    #[test]
    fn runs_are_paired_by_repetition_even_where_one_is_missing() {
        let runs = [
            run("qemu", 0, "total_ms", 10.0),
            run("sterna", 1, "total_ms", 3.0),
            run("qemu", 1, "total_ms", 6.0),
            run("qemu", 2, "total_ms", 0.0),
            run("sterna", 2, "total_ms", 3.0),
        ];
        let of = |name: &'static str| move |run: &Run| is(run, &[("mover", name)]);
        assert_eq!(ratio(&runs, time_ms, of("sterna"), of("qemu")), Some(0.5));
        assert_eq!(ratio(&runs, time_ms, of("nobody"), of("qemu")), None);
    }

    #[test]
    fn the_links_limit_is_the_time_for_the_pages_in_use_and_the_set_up_does_not_count() {
        let metrics = [("nonzero_pages", 1000.0), ("total_ms", 5296.0), ("setup_ms", 200.0)];
        let mut metrics: BTreeMap<String, f64> = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        derive_limit(1_000_000, &mut metrics);
        assert!((metrics[TO_LIMIT] - 5096.0 / 4096.0).abs() < 1e-9, "{metrics:?}");
        let mut given_up = BTreeMap::from([("nonzero_pages".to_owned(), 1000.0)]);
        derive_limit(1_000_000, &mut given_up);
        assert!(!given_up.contains_key(TO_LIMIT));
    }

    #[test]
    fn a_run_that_was_given_up_took_at_least_as_long_as_it_was_tried() {
        assert_eq!(time_ms(&run("qemu", 0, "given_up_ms", 90_000.0)), Some(90_000.0));
        assert_eq!(time_ms(&run("qemu", 0, "failed", 1.0)), None);
    }

    #[test]
    fn the_worst_of_rows_is_unknown_where_a_row_is() {
        assert_eq!(worst([Some(1.0), Some(3.0), Some(2.0)]), Some(3.0));
        assert_eq!(worst([Some(1.0), None]), None);
        assert_eq!(worst([]), None);
    }
}
