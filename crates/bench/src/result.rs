//! The results that an experiment writes: `result.json` in the form that `docs/contracts.md` fixes, and a Markdown
//! table of it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::accelerator::{self, Accelerator};
use crate::error::{Context, Result};
use crate::stats::Summary;

/// The set-up of one run: names and values, in the order in which they are shown.
pub type Config = Map<String, Value>;

/// Parts of a set-up that do not fit a table's cell: those of the workload, and those of the mover.
const LONG: [&str; 2] = ["jobs", "options"];

/// One run: its set-up and what was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// The set-up; runs with equal ones are repetitions.
    pub config: Config,
    /// Whether this was QEMU migrating by itself.
    pub baseline: bool,
    /// The number of the repetition.
    pub repeat: usize,
    /// What was measured, by name with unit.
    pub metrics: BTreeMap<String, f64>,
    /// More of what happened: a report, samples.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub details: Value,
}

/// A whole experiment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResultFile {
    /// Its id.
    pub experiment: String,
    /// One entry per set-up.
    pub rows: Vec<Row>,
    /// One entry per target that is set for this experiment.
    pub targets: Vec<Target>,
    /// The machine where it ran.
    pub machine: Value,
}

/// All repetitions of one set-up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The set-up.
    pub config: Config,
    /// Whether this was QEMU migrating by itself.
    pub baseline: bool,
    /// What was measured.
    pub metrics: BTreeMap<String, Summary>,
    /// The reasons why repetitions failed, in their order, each once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

impl Row {
    /// A word of the set-up by its name; empty where it has none.
    #[must_use]
    pub fn word(&self, name: &str) -> &str {
        self.config.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// A line of Markdown for each reason for which a repetition failed, of this name.
    #[must_use]
    pub fn failures(&self, who: &str) -> Vec<String> {
        self.errors.iter().map(|error| format!("- failed: {who}: {}\n", error.replace('\n', " "))).collect()
    }

    /// The mover of the guest and its QEMU: the row's name in plots that name the workload elsewhere.
    #[must_use]
    pub fn mover_and_qemu(&self) -> String {
        format!("{} (QEMU {})", self.word("mover"), self.word("qemu"))
    }
}

/// A target and what was reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Target {
    /// What is judged.
    pub name: String,
    /// `<=`, `>=` or `==`.
    pub op: String,
    /// The aim.
    pub target: f64,
    /// What was reached; null where it could not be measured.
    pub measured: Option<f64>,
    /// Whether that meets the aim; an absent value does not.
    pub met: bool,
}

impl Target {
    /// `measured` may be at most `target`.
    #[must_use]
    pub fn at_most(name: impl Into<String>, target: f64, measured: Option<f64>) -> Self {
        let met = measured.is_some_and(|measured| measured <= target);
        Self { name: name.into(), op: "<=".into(), target, measured, met }
    }

    /// `measured` must be at least `target`.
    #[must_use]
    pub fn at_least(name: impl Into<String>, target: f64, measured: Option<f64>) -> Self {
        let met = measured.is_some_and(|measured| measured >= target);
        Self { name: name.into(), op: ">=".into(), target, measured, met }
    }
}

/// Joins the repetitions of each set-up, in the order of first appearance.
#[must_use]
pub fn rows(runs: &[Run]) -> Vec<Row> {
    let mut firsts: Vec<&Run> = Vec::new();
    for run in runs {
        if !firsts.iter().any(|first| same_row(first, run)) {
            firsts.push(run);
        }
    }
    firsts.into_iter().map(|first| row(first, runs)).collect()
}

fn same_row(one: &Run, other: &Run) -> bool {
    one.config == other.config && one.baseline == other.baseline
}

/// The repetitions of `first` in one row.
fn row(first: &Run, runs: &[Run]) -> Row {
    let mut values: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    let mut errors: Vec<String> = Vec::new();
    for run in runs.iter().filter(|run| same_row(first, run)) {
        run.metrics.iter().for_each(|(name, value)| values.entry(name).or_default().push(*value));
        let error = run.details["error"].as_str().filter(|error| !errors.iter().any(|known| known == error));
        errors.extend(error.map(str::to_owned));
    }
    let summaries = values.into_iter().filter_map(|(name, values)| Some((name.clone(), Summary::of(&values)?)));
    Row { config: first.config.clone(), baseline: first.baseline, metrics: summaries.collect(), errors }
}

/// A metric of the runs that `chosen` picks, in the order of their repetitions, to make pairs of.
#[must_use]
pub fn series(runs: &[Run], metric: &str, chosen: impl Fn(&Run) -> bool) -> Vec<f64> {
    let mut values: Vec<(usize, f64)> =
        runs.iter().filter(|run| chosen(run)).filter_map(|run| Some((run.repeat, *run.metrics.get(metric)?))).collect();
    values.sort_by_key(|(repeat, _)| *repeat);
    values.into_iter().map(|(_, value)| value).collect()
}

impl ResultFile {
    /// Writes `result.json`, `runs.json` and `table.md` into `directory`.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn write(&self, directory: &Path, runs: &[Run]) -> Result<()> {
        std::fs::create_dir_all(directory).context(|| format!("making {}", directory.display()))?;
        let json = |name: &str, value: serde_json::Result<Vec<u8>>| {
            let text = value.map_err(std::io::Error::other).context(|| format!("writing {name}"))?;
            // The file is written whole or not at all, because an experiment may be cut short at any moment.
            let (file, new) = (directory.join(name), directory.join(format!("{name}.new")));
            let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &file));
            written.context(|| format!("writing {}", file.display()))
        };
        json("result.json", serde_json::to_vec_pretty(self))?;
        json("runs.json", serde_json::to_vec_pretty(runs))?;
        json("table.md", Ok(self.markdown().into_bytes()))
    }

    /// The rows and the targets as Markdown tables: medians, with the range where a set-up ran more than once. Texts
    /// that are too long for a cell (options and the guest's jobs) are in a list below.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut configs: Vec<&String> = Vec::new();
        let mut metrics: Vec<&String> = Vec::new();
        for row in &self.rows {
            row.config.keys().filter(|key| !LONG.contains(&key.as_str())).for_each(|key| {
                if !configs.contains(&key) {
                    configs.push(key)
                }
            });
            row.metrics.keys().for_each(|key| {
                if !metrics.contains(&key) {
                    metrics.push(key)
                }
            });
        }
        let mut text = format!("# {}\n\n", self.experiment);
        if let Some(accelerator) = self.machine["accelerator"].as_str() {
            text.push_str(&format!("accelerator: {accelerator}\n\n"));
        }
        text.push('|');
        let titles = configs.iter().chain(&metrics);
        titles.clone().for_each(|title| text.push_str(&format!(" {title} |")));
        text.push_str("\n|");
        titles.for_each(|_| text.push_str(" --- |"));
        for row in &self.rows {
            text.push_str("\n|");
            for key in &configs {
                text.push_str(&format!(" {} |", row.config.get(*key).map(plain).unwrap_or_default()));
            }
            for key in &metrics {
                text.push_str(&format!(" {} |", row.metrics.get(*key).map(show_summary).unwrap_or_default()));
            }
        }
        text.push_str("\n\n");
        for line in self.long_values().into_iter().chain(self.failures()) {
            text.push_str(&line);
        }
        text.push('\n');
        text.push_str(&targets_table(&self.targets));
        text
    }
}

impl ResultFile {
    /// A line for each different value of a set-up that is too long for a cell.
    fn long_values(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for row in &self.rows {
            for (key, of) in LONG.iter().zip(["workload", "mover"]) {
                let (Some(value), Some(of)) = (row.config.get(*key), row.config.get(of)) else { continue };
                let line = format!("- {}, {key}: `{}`\n", plain(of), plain(value));
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }

    /// A line for each reason for which a run failed.
    fn failures(&self) -> Vec<String> {
        let of = |row: &Row| {
            let word = |name: &str| row.config.get(name).map(plain).unwrap_or_default();
            let who = format!("{}, {}", word("mover"), word("workload"));
            row.failures(&who)
        };
        self.rows.iter().flat_map(of).collect()
    }
}

/// Targets as a Markdown table.
#[must_use]
pub fn targets_table(targets: &[Target]) -> String {
    let mut text = "| target | aim | measured | met |\n| --- | --- | --- | --- |\n".to_owned();
    for Target { name, op, target, measured, met } in targets {
        let measured = measured.map_or_else(|| "not measured".into(), show_number);
        let (aim, met) = (show_number(*target), if *met { "yes" } else { "no" });
        text.push_str(&format!("| {name} | {op} {aim} | {measured} | {met} |\n"));
    }
    text
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A summary in a cell: the median, and the range where a set-up ran more than once.
#[must_use]
pub fn show_summary(summary: &Summary) -> String {
    let median = show_number(summary.median);
    if summary.n > 1 {
        format!("{median} ({}–{}, n={})", show_number(summary.min), show_number(summary.max), summary.n)
    } else {
        median
    }
}

/// A number with as many decimals as are significant.
#[must_use]
pub fn show_number(value: f64) -> String {
    match value.abs() {
        _ if value == value.trunc() && value.abs() < 1e15 => format!("{value:.0}"),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    }
}

/// This machine, as far as a reader needs it to judge the numbers.
#[must_use]
pub fn machine() -> Value {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, model)| model.to_owned());
    let memory =
        read("/proc/meminfo").lines().next().and_then(|line| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok());
    serde_json::json!({
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu_model": model,
        "memory_bytes": memory.map(|kib| kib * 1024),
        "kvm": std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok(),
        "accelerator": accelerator::settled().map(Accelerator::name),
        "sterna": env!("CARGO_PKG_VERSION"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(who: &str, baseline: bool, repeat: usize, ms: f64) -> Run {
        let config = Config::from_iter([("who".to_owned(), Value::from(who))]);
        Run { config, baseline, repeat, metrics: BTreeMap::from([("total_ms".to_owned(), ms)]), details: Value::Null }
    }

    fn file() -> ResultFile {
        let runs = [
            run("sterna", false, 0, 2.0),
            run("qemu", true, 0, 5.0),
            run("qemu", true, 1, 7.0),
            run("sterna", false, 1, 4.0),
        ];
        let targets = vec![Target::at_most("time ratio", 0.5, Some(0.4)), Target::at_least("speed", 1.5, None)];
        ResultFile { experiment: "throughput".into(), rows: rows(&runs), targets, machine: machine() }
    }

    #[test]
    fn the_result_has_exactly_the_form_of_the_contract() {
        let value = serde_json::to_value(file()).unwrap();
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&value), ["experiment", "rows", "targets", "machine"]);
        assert_eq!(keys(&value["rows"][0]), ["config", "baseline", "metrics"]);
        assert_eq!(keys(&value["rows"][0]["metrics"]["total_ms"]), ["median", "min", "max", "n"]);
        assert_eq!(keys(&value["targets"][0]), ["name", "op", "target", "measured", "met"]);
        assert_eq!(value["rows"][0]["metrics"]["total_ms"]["median"], 3.0);
        assert_eq!(value["rows"][1]["baseline"], true);
        assert!(value["targets"][1]["measured"].is_null());
        assert_eq!(value["targets"][1]["met"], false);
    }

    #[test]
    fn repetitions_are_put_together_and_pairs_are_in_their_order() {
        let runs = [run("qemu", true, 1, 7.0), run("sterna", false, 0, 2.0), run("qemu", true, 0, 5.0)];
        assert_eq!(rows(&runs).len(), 2);
        assert_eq!(series(&runs, "total_ms", |run| run.baseline), [5.0, 7.0]);
    }

    #[test]
    fn the_table_says_what_ran_the_guests_where_that_is_known() {
        let of =
            |accelerator: Value| ResultFile { machine: serde_json::json!({ "accelerator": accelerator }), ..file() };
        assert!(of("kvm".into()).markdown().contains("\naccelerator: kvm\n"));
        assert!(!of(Value::Null).markdown().contains("accelerator"));
        assert!(machine().as_object().unwrap().contains_key("accelerator"));
    }

    #[test]
    fn the_table_shows_every_row_and_every_target() {
        let text = file().markdown();
        assert!(text.contains("| sterna | 3 (2–4, n=2) |"), "{text}");
        assert!(text.contains("| speed | >= 1.500 | not measured | no |"), "{text}");
    }

    #[test]
    fn numbers_keep_what_says_something() {
        assert_eq!(show_number(1.0), "1");
        assert_eq!(show_number(12345.678), "12346");
        assert_eq!(show_number(0.98765), "0.988");
        assert_eq!(show_number(0.00123), "0.00123");
    }
}
