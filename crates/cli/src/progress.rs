//! Progress on a terminal and in plain lines.

use std::collections::HashMap;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use sterna_api::units::show_rate;
use sterna_api::{Phase, Progress};

/// How often a plain line comes although nothing changes.
const PULSE: Duration = Duration::from_secs(1);

/// Shows progress to people, on standard error.
pub enum Display {
    /// A bar per machine.
    Bars {
        /// All bars.
        all: MultiProgress,
        /// The bars by machine.
        bars: HashMap<String, ProgressBar>,
    },
    /// A line at each change, and once a second.
    Lines {
        /// The last line for each machine, and its time.
        seen: HashMap<String, (Phase, u32, Instant)>,
    },
}

impl Display {
    /// Bars where standard error is a terminal.
    pub fn new() -> Self {
        if stderr().is_terminal() {
            Self::Bars { all: MultiProgress::new(), bars: HashMap::new() }
        } else {
            Self::Lines { seen: HashMap::new() }
        }
    }

    /// Shows the progress of a machine's migration now.
    pub fn show(&mut self, progress: &Progress) {
        match self {
            Self::Bars { all, bars } => {
                let bar = bars.entry(progress.vm.clone()).or_insert_with(|| all.add(new_bar(&progress.vm)));
                bar.set_length(progress.round_pages.max(1));
                bar.set_position(progress.round_pages.saturating_sub(progress.pages_left));
                bar.set_message(details(progress));
            }
            Self::Lines { seen } => {
                let news = seen.get(&progress.vm).is_none_or(|(phase, round, at)| {
                    (*phase, *round) != (progress.phase, progress.round)
                        || (progress.phase != Phase::Done && at.elapsed() >= PULSE)
                });
                if news {
                    eprintln!("{}", line(progress));
                    seen.insert(progress.vm.clone(), (progress.phase, progress.round, Instant::now()));
                }
            }
        }
    }

    /// Removes the bars: the report follows.
    pub fn clear(&self) {
        if let Self::Bars { all, .. } = self {
            let _ = all.clear();
        }
    }

    /// Prints a text beside the progress.
    pub fn say(&self, text: &str) {
        match self {
            Self::Bars { all, .. } => {
                let _ = all.println(text);
            }
            Self::Lines { .. } => eprintln!("{text}"),
        }
    }
}

fn new_bar(name: &str) -> ProgressBar {
    let bar = ProgressBar::new(1);
    // A template that does not parse would be a bug of ours; the bar then has its default look.
    if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:24}] {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(name.to_string());
    bar
}

/// The progress of a migration, in one line.
pub fn line(progress: &Progress) -> String {
    format!("{}: {}", progress.vm, details(progress))
}

fn details(progress: &Progress) -> String {
    let mut text = phase(progress.phase).to_string();
    if let Some(place) = place(progress) {
        text.push_str(&format!(", {place}"));
    }
    if progress.phase == Phase::Precopy {
        text.push_str(&format!(
            " round {}, {} pages left, dirty {:.0} pages/s, {}",
            progress.round,
            progress.pages_left,
            progress.dirty_rate_pages_per_s,
            show_rate(progress.throughput_bytes_per_s)
        ));
        if let Some(pause) = progress.predicted_downtime_ms {
            text.push_str(&format!(", pause now {pause:.0} ms"));
        }
        if let Some(remaining) = progress.remaining_ms {
            text.push_str(&format!(", ends in {:.1} s", remaining / 1e3));
        }
    }
    if progress.phase == Phase::Postcopy {
        let rate = show_rate(progress.throughput_bytes_per_s);
        text.push_str(&format!(", {} left, {} faults, {rate}", progress.pages_left, progress.faults.unwrap_or(0)));
    }
    text.push_str(&format!(" [{:.1} s]", progress.elapsed_ms / 1e3));
    if let Some(what) = &progress.waiting_for {
        text.push_str(&format!(", waiting for {what}"));
    }
    if let Some(ms) = progress.waiting_ms {
        text.push_str(&format!(" for {:.0} s", ms / 1e3));
    }
    text
}

/// The progress of a migration in a few words, for a table's column.
pub fn brief(progress: &Progress) -> String {
    let mut text = phase(progress.phase).to_string();
    if progress.phase == Phase::Precopy {
        let done = progress.round_pages.saturating_sub(progress.pages_left) * 100 / progress.round_pages.max(1);
        let rate = show_rate(progress.throughput_bytes_per_s);
        text.push_str(&format!(" round {}, {done} %, {rate}", progress.round));
    }
    if progress.phase == Phase::Postcopy {
        let done = progress.round_pages.saturating_sub(progress.pages_left) * 100 / progress.round_pages.max(1);
        text.push_str(&format!(", {done} %"));
    }
    match (place(progress), &progress.waiting_for) {
        (Some(place), Some(what)) => text.push_str(&format!(", {place} waiting for {what}")),
        (None, Some(what)) => text.push_str(&format!(", waiting for {what}")),
        _ => {}
    }
    text
}

/// A place in the queue: `2nd of 3`.
fn place(progress: &Progress) -> Option<String> {
    let (place, length) = (progress.queue_place?, progress.queue_length?);
    let ending = match (place % 10, place % 100) {
        (1, rest) if rest != 11 => "st",
        (2, rest) if rest != 12 => "nd",
        (3, rest) if rest != 13 => "rd",
        _ => "th",
    };
    Some(format!("{place}{ending} of {length}"))
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Queued => "queued",
        Phase::Connect => "connecting",
        Phase::Prepare => "preparing",
        Phase::Precopy => "copying",
        Phase::Switchover => "switching over",
        Phase::Postcopy => "runs there, pages follow",
        Phase::Finish => "finishing",
        Phase::Rollback => "giving back",
        Phase::Done => "done",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_has_a_place_and_a_reason() {
        let mut progress = Progress {
            vm: "db1".into(),
            waiting_for: Some("other migrations of this host to end".into()),
            queue_place: Some(2),
            queue_length: Some(3),
            ..Progress::default()
        };
        assert_eq!(brief(&progress), "queued, 2nd of 3 waiting for other migrations of this host to end");
        assert_eq!(line(&progress), "db1: queued, 2nd of 3 [0.0 s], waiting for other migrations of this host to end");
        let mut ordinal = |number| {
            progress.queue_place = Some(number);
            place(&progress).unwrap()
        };
        let ordinals = [1, 3, 4, 11, 12, 13, 21, 112].map(|number| ordinal(number).replace(" of 3", ""));
        assert_eq!(ordinals, ["1st", "3rd", "4th", "11th", "12th", "13th", "21st", "112th"]);
    }

    #[test]
    fn pages_that_follow_a_guest_are_told_with_its_faults_and_what_is_waited_for() {
        let mut progress = Progress {
            vm: "db1".into(),
            phase: Phase::Postcopy,
            round_pages: 400,
            pages_left: 100,
            faults: Some(7),
            throughput_bytes_per_s: 125_000_000,
            ..Progress::default()
        };
        assert_eq!(line(&progress), "db1: runs there, pages follow, 100 left, 7 faults, 1.0 Gbit/s [0.0 s]");
        assert_eq!(brief(&progress), "runs there, pages follow, 75 %");
        (progress.waiting_for, progress.waiting_ms) = (Some("the destination at b:1".into()), Some(12_300.0));
        assert!(line(&progress).ends_with("waiting for the destination at b:1 for 12 s"), "{}", line(&progress));
    }

    #[test]
    fn a_row_of_the_list_says_how_far_it_is() {
        let progress = Progress {
            phase: Phase::Precopy,
            round: 1,
            round_pages: 200,
            pages_left: 50,
            throughput_bytes_per_s: 125_000_000,
            ..Progress::default()
        };
        assert_eq!(brief(&progress), "copying round 1, 75 %, 1.0 Gbit/s");
    }

    #[test]
    fn a_line_has_round_pages_rates_and_the_estimated_end() {
        let progress = Progress {
            vm: "db1".into(),
            phase: Phase::Precopy,
            round: 2,
            pages_left: 77,
            dirty_rate_pages_per_s: 120.0,
            throughput_bytes_per_s: 125_000_000,
            remaining_ms: Some(1500.0),
            elapsed_ms: 400.0,
            ..Progress::default()
        };
        assert_eq!(
            line(&progress),
            "db1: copying round 2, 77 pages left, dirty 120 pages/s, 1.0 Gbit/s, ends in 1.5 s [0.4 s]"
        );
    }
}
