//! The pages of experiments: their tables and plots are made from the runs that campaigns have kept, and never pasted.
//!
//! A table stands between two comments of a page, and the first says what it shows:
//!
//! ```text
//! <!-- measured: all targets -->
//! <!-- measured: converge targets -->
//! <!-- measured: converge rows total_ms downtime_ms where random, 4 -->
//! <!-- end of measured -->
//! ```
//!
//! A plot is a link to `img/ID-NAME.svg`, where NAME is what the experiment calls it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Context, Error, Result};
use crate::experiments::{self, ALL};
use crate::kept::{Kept, KeptRun};
use crate::result::{Row, Run, rows, show_summary, targets_table};
use crate::tools;

const BEGIN: &str = "<!-- measured: ";
const BEGIN_END: &str = " -->";
const END: &str = "<!-- end of measured -->";
/// The beginning of a link to a plot.
const PLOT: &str = "](img/";

/// The directory with the pages.
#[must_use]
pub fn directory() -> PathBuf {
    tools::repository("docs/experiments")
}

/// Makes the tables and plots of the pages in this directory from what is kept in its `results`, and returns the files
/// that were different. With `check` they stay as they are.
///
/// # Errors
/// A page that asks for what is not there, or a file that cannot be read or written.
pub fn make(directory: &Path, check: bool) -> Result<Vec<PathBuf>> {
    let mut kept = BTreeMap::new();
    for experiment in ALL {
        kept.insert(experiment.id, Kept::read(&directory.join("results"), experiment.id)?);
    }
    let mut different = Vec::new();
    let mut plots = BTreeSet::new();
    for page in pages(directory)? {
        let text = std::fs::read_to_string(&page).context(|| format!("reading {}", page.display()))?;
        plots.extend(linked_plots(&text).map(str::to_owned));
        let made =
            with_tables(&text, &kept).map_err(|reason| Error::Form { what: page.display().to_string(), reason })?;
        if made != text {
            if !check {
                std::fs::write(&page, made).context(|| format!("writing {}", page.display()))?;
            }
            different.push(page);
        }
    }
    different.extend(draw(directory, &plots, &kept, check)?);
    Ok(different)
}

fn pages(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = || format!("reading {}", directory.display());
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(directory).context(failed)? {
        let path = entry.context(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    pages.sort();
    Ok(pages)
}

/// The page with its tables made anew, or what is wrong with it.
fn with_tables(text: &str, kept: &BTreeMap<&str, Kept>) -> Result<String, String> {
    let mut made = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        made.push_str(line);
        made.push('\n');
        let Some(asked) = line.strip_prefix(BEGIN) else { continue };
        let asked = asked.strip_suffix(BEGIN_END).ok_or_else(|| format!("\"{line}\" does not end with{BEGIN_END}"))?;
        if !lines.any(|line| line == END) {
            return Err(format!("there is no \"{END}\" after \"{line}\""));
        }
        made.push_str(&format!("\n{}\n{END}\n", table(asked, kept)?));
    }
    Ok(made)
}

/// The table that is asked for, with an empty line below.
fn table(asked: &str, kept: &BTreeMap<&str, Kept>) -> Result<String, String> {
    let (id, what) = asked.split_once(' ').ok_or_else(|| format!("\"{asked}\" does not say what is shown"))?;
    if (id, what) == ("all", "targets") {
        return Ok(all_targets(kept));
    }
    let kept = kept.get(id).ok_or_else(|| format!("there is no experiment {id}"))?;
    if kept.runs.is_empty() {
        return Ok("Not measured yet.\n".into());
    }
    if what == "targets" {
        return Ok(format!(
            "{}\n{}\n",
            targets_table(&kept.targets),
            origins(kept, &kept.runs.iter().collect::<Vec<_>>())
        ));
    }
    let (columns, words) = what.split_once(" where ").unwrap_or((what, ""));
    let columns = columns.strip_prefix("rows ").ok_or_else(|| format!("\"{what}\" is neither targets nor rows"))?;
    let columns: Vec<&str> = columns.split_whitespace().collect();
    let chosen: Vec<&KeptRun> = kept.runs.iter().filter(|kept| fits(&kept.run, words)).collect();
    if chosen.is_empty() {
        return Err(format!("no row of {id} has the words \"{words}\""));
    }
    rows_table(&columns, &chosen).map(|table| format!("{table}\n{}\n", origins(kept, &chosen)))
}

/// Whether a run's mover and workload contain these words.
fn fits(run: &Run, words: &str) -> bool {
    let word = |name: &str| run.config.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    format!("{}, {}", word("mover"), word("workload")).contains(words)
}

/// Every target of every experiment.
fn all_targets(kept: &BTreeMap<&str, Kept>) -> String {
    let mut text = String::new();
    for experiment in ALL {
        let id = experiment.id;
        text.push_str(&format!("## `{id}`\n\n{}.\n\n", sentence(experiment.about)));
        match kept.get(id).filter(|kept| !kept.runs.is_empty()) {
            None => text.push_str("Not measured yet.\n\n"),
            Some(kept) => {
                if !kept.targets.is_empty() {
                    text.push_str(&format!("{}\n", targets_table(&kept.targets)));
                }
                text.push_str(&format!("{}\n\n", origins(kept, &kept.runs.iter().collect::<Vec<_>>())));
            }
        }
    }
    text.pop();
    text
}

fn sentence(about: &str) -> String {
    let mut letters = about.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

/// A row for each set-up: who moved what, and the metrics of these columns.
fn rows_table(columns: &[&str], chosen: &[&KeptRun]) -> Result<String, String> {
    let rows = rows(&chosen.iter().map(|kept| kept.run.clone()).collect::<Vec<_>>());
    if let Some(unknown) = columns.iter().find(|column| rows.iter().all(|row| !row.metrics.contains_key(**column))) {
        return Err(format!("no row has the metric {unknown}"));
    }
    let mut text = format!("| workload | mover | {} |\n", columns.join(" | "));
    text.push_str(&format!("| --- | --- |{}\n", " --- |".repeat(columns.len())));
    for row in &rows {
        let cell = |column: &&str| row.metrics.get(*column).map_or_else(|| "–".into(), show_summary);
        let cells: Vec<String> = columns.iter().map(cell).collect();
        text.push_str(&format!("| {} | {} | {} |\n", row.word("workload"), row.mover_and_qemu(), cells.join(" | ")));
    }
    let name = |row: &Row| format!("{}, {}", row.mover_and_qemu(), row.word("workload"));
    let failed: Vec<String> = rows.iter().flat_map(|row| row.failures(&name(row))).collect();
    if !failed.is_empty() {
        text.push_str(&format!("\n{}", failed.concat()));
    }
    Ok(text)
}

/// A sentence for each machine: when and on what these runs were made.
fn origins(kept: &Kept, runs: &[&KeptRun]) -> String {
    let machines: BTreeSet<usize> = runs.iter().map(|run| run.machine).collect();
    let of = |at: usize| {
        let here = || runs.iter().filter(move |run| run.machine == at);
        let commits: BTreeSet<&str> = here().map(|run| run.commit.as_str()).collect();
        let dates: BTreeSet<&str> = here().map(|run| run.date.as_str()).collect();
        let span = match (dates.first(), dates.last()) {
            (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
            (first, _) => first.copied().unwrap_or_default().to_owned(),
        };
        let commits = commits.into_iter().collect::<Vec<_>>().join(", ");
        format!("{} runs at {commits}, {span}, on {}.", here().count(), machine(&kept.machines[at]))
    };
    machines.into_iter().map(of).collect::<Vec<_>>().join(" ")
}

/// A machine in words.
fn machine(machine: &Value) -> String {
    let text = |name: &str| machine[name].as_str().unwrap_or("?").to_owned();
    let gib = machine["memory_bytes"].as_u64().unwrap_or(0) as f64 / f64::from(1 << 30);
    let (cpus, accelerator) = (machine["cpus"].as_u64().unwrap_or(0), text("accelerator").to_uppercase());
    format!(
        "{cpus} processors ({}), {gib:.0} GiB, Linux {}, guests under {accelerator}",
        text("cpu_model"),
        text("kernel")
    )
}

/// The files of plots that a page links to.
fn linked_plots(text: &str) -> impl Iterator<Item = &str> {
    text.split(PLOT).skip(1).filter_map(|rest| rest.split_once(')')).map(|(file, _)| file)
}

/// Draws those plots of which runs are kept; returns those that were different.
fn draw(directory: &Path, plots: &BTreeSet<String>, kept: &BTreeMap<&str, Kept>, check: bool) -> Result<Vec<PathBuf>> {
    let scratch = std::env::temp_dir().join(format!("sterna-pages-{}", std::process::id()));
    let drawn = draw_into(&scratch, directory, plots, kept, check);
    // A file that stays behind in a directory for such files harms nobody.
    let _ = std::fs::remove_dir_all(&scratch);
    drawn
}

fn draw_into(
    scratch: &Path,
    directory: &Path,
    plots: &BTreeSet<String>,
    kept: &BTreeMap<&str, Kept>,
    check: bool,
) -> Result<Vec<PathBuf>> {
    let mut different = Vec::new();
    for (id, kept) in kept.iter().filter(|(_, kept)| !kept.runs.is_empty()) {
        let own: Vec<(&String, &str)> = plots.iter().filter_map(|file| Some((file, name_of(file, id)?))).collect();
        if own.is_empty() {
            continue;
        }
        let into = scratch.join(id);
        std::fs::create_dir_all(&into).context(|| format!("making {}", into.display()))?;
        experiments::draw(id, &kept.runs(), &into)?;
        for (file, name) in own {
            let (new, old) = (into.join(name), directory.join("img").join(file));
            let made = std::fs::read(&new).context(|| format!("{id} has no plot {name}"))?;
            if std::fs::read(&old).ok().as_ref() != Some(&made) {
                if !check {
                    std::fs::write(&old, made).context(|| format!("writing {}", old.display()))?;
                }
                different.push(old);
            }
        }
    }
    Ok(different)
}

/// What this experiment calls the plot of that file, if it is its own. Where several names fit, the longest is meant.
fn name_of<'a>(file: &'a str, id: &str) -> Option<&'a str> {
    let fits = |id: &str| file.strip_prefix(id)?.strip_prefix('-');
    let longest = ALL.iter().map(|experiment| experiment.id).filter(|id| fits(id).is_some()).max_by_key(|id| id.len());
    fits(id).filter(|_| longest == Some(id))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kept::Origin;
    use crate::result::{Config, Target};

    fn run(workload: &str, repeat: usize, ms: f64) -> Run {
        let config = [("mover", "sterna, mode hybrid"), ("qemu", "10.0"), ("workload", workload)];
        let config = Config::from_iter(config.map(|(name, value)| (name.to_owned(), value.into())));
        Run {
            config,
            baseline: false,
            repeat,
            metrics: BTreeMap::from([("total_ms".into(), ms)]),
            details: Value::Null,
        }
    }

    fn kept() -> BTreeMap<&'static str, Kept> {
        let mut kept = Kept { experiment: "scale".into(), ..Kept::default() };
        let machine = json!({
            "cpus": 2, "cpu_model": "a model", "memory_bytes": 24u64 << 30, "kernel": "6.18", "accelerator": "tcg",
        });
        let origin = Origin { commit: "abcdef0".into(), date: "2026-11-26".into(), machine };
        let mut broken = run("2 GiB", 0, 9.0);
        broken.details = json!({ "error": "it\nbroke" });
        let runs = [run("1 GiB", 0, 5.0), run("1 GiB", 1, 7.0), broken];
        kept.take_in(&runs, vec![Target::at_most("time", 8.0, Some(6.0))], &origin);
        BTreeMap::from([("scale", kept), ("converge", Kept::default())])
    }

    fn made(asked: &str) -> Result<String, String> {
        with_tables(&format!("# A page\n\n<!-- measured: {asked} -->\nold\n{END}\nThe end.\n"), &kept())
    }

    #[test]
    fn tables_stand_between_their_comments_and_the_rest_of_a_page_stays() {
        let page = made("scale rows total_ms").unwrap();
        assert!(page.starts_with("# A page\n\n<!-- measured: scale rows total_ms -->\n\n| workload |"), "{page}");
        assert!(page.ends_with(&format!(
            "\n\n3 runs at abcdef0, 2026-11-26, on 2 processors (a model), 24 GiB, Linux 6.18, guests under TCG.\n\n{END}\nThe end.\n"
        )));
        assert!(page.contains("| 1 GiB | sterna, mode hybrid (QEMU 10.0) | 6 (5–7, n=2) |"), "{page}");
        assert!(page.contains("- failed: sterna, mode hybrid (QEMU 10.0), 2 GiB: it broke\n") && !page.contains("old"));
        assert_eq!(with_tables(&page, &kept()).unwrap(), page, "made again it is the same");
        let page = made("scale rows total_ms where 1 GiB").unwrap();
        assert!(page.contains("| 1 GiB |") && !page.contains("2 GiB"), "{page}");
        assert!(made("scale targets").unwrap().contains("| time | <= 8 | 6 | yes |"));
        assert!(made("converge targets").unwrap().contains("Not measured yet."));
    }

    #[test]
    fn every_experiment_is_in_the_table_of_all_whether_it_was_measured_or_not() {
        let page = made("all targets").unwrap();
        assert!(ALL.iter().all(|experiment| page.contains(&format!("## `{}`", experiment.id))));
        assert!(page.contains("| time | <= 8 | 6 | yes |"));
        assert_eq!(page.matches("Not measured yet.").count(), ALL.len() - 1);
    }

    #[test]
    fn a_page_that_asks_for_what_is_not_there_is_told_so() {
        let reason = |asked: &str| made(asked).unwrap_err();
        assert!(reason("sky targets").contains("no experiment sky"));
        assert!(reason("scale").contains("does not say what"));
        assert!(reason("scale plots").contains("neither"));
        assert!(reason("scale rows height_m").contains("height_m"));
        assert!(reason("scale rows total_ms where 9 GiB").contains("9 GiB"));
        let open = with_tables("<!-- measured: scale targets -->\n", &kept()).unwrap_err();
        assert!(open.contains(END), "{open}");
    }

    #[test]
    fn a_plot_belongs_to_the_experiment_with_the_longest_name_that_fits() {
        let plots: Vec<&str> = linked_plots("![a](img/scale-total_time.svg) and ![b](img/x.svg)").collect();
        assert_eq!(plots, ["scale-total_time.svg", "x.svg"]);
        assert_eq!(name_of(plots[0], "scale"), Some("total_time.svg"));
        assert_eq!(name_of(plots[0], "replace"), None);
        assert_eq!(name_of("d-track-total.svg", "dtrack-hash"), None);
    }
}
