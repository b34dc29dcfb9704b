//! Reports as tables.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use sterna_api::units::{show_rate, show_size};
use sterna_api::{Report, Status, Totals};

use crate::failure::{describe, whereabouts};

/// A table's text without blanks at the ends of its lines.
pub fn text_of(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// A report for people.
pub fn show(report: &Report) -> String {
    let mut text = match report.status {
        Status::Completed if report.partial => format!(
            "{}: moved to {}; this report tells of its last pages only, which took {:.2} s\n",
            report.vm,
            report.destination.address,
            report.total_ms / 1e3,
        ),
        Status::Completed => format!(
            "{}: moved to {} in {:.2} s, the guest stood still for {:.1} ms\n",
            report.vm,
            report.destination.address,
            report.total_ms / 1e3,
            report.downtime_ms
        ),
        Status::Cancelled => format!("{}: cancelled after {:.2} s\n", report.vm, report.total_ms / 1e3),
        Status::Failed => format!("{}: not moved\n", report.vm),
    };
    if report.bytes_on_wire > 0 || report.status == Status::Completed {
        text.push_str(&numbers(report));
        text.push('\n');
    }
    if report.rounds.len() > 1 {
        text.push_str(&rounds(report));
        text.push('\n');
    }
    text
}

/// What the machines of one migration add up to, in one line.
pub fn together(totals: &Totals) -> String {
    let shared = match totals.shared_reference {
        0 => String::new(),
        pages => format!(", {pages} of their pages went as a page that another had sent"),
    };
    format!(
        "together: {} of {} moved in {:.2} s, {} sent{shared}; none stood still for more than {:.1} ms",
        totals.completed,
        totals.machines,
        totals.total_ms / 1e3,
        show_size(totals.bytes_on_wire),
        totals.downtime_ms
    )
}

/// The failure, for standard error.
pub fn failure(report: &Report) -> Option<String> {
    let problem = report.error.as_ref()?;
    Some(format!("{}  guest:   {}\n", describe(&report.vm, problem), whereabouts(problem)))
}

/// Adds the times of the migration and its parts, which are known only of a whole migration.
fn times(table: &mut Table, report: &Report) {
    let downtime = &report.downtime;
    table.add_row([
        "time".into(),
        format!(
            "{:.1} ms ({}set-up {:.1}, after the start {:.1})",
            report.total_ms,
            if report.queued_ms >= 100.0 { format!("in the queue {:.1}, ", report.queued_ms) } else { String::new() },
            report.setup_ms - report.queued_ms,
            report.resume_ms
        ),
    ]);
    table.add_row([
        "downtime".into(),
        format!(
            "{:.2} ms (stop {:.2}, last pages {:.2}, verify {:.2}, devices {:.2}, start {:.2})",
            report.downtime_ms,
            downtime.pause_ms,
            downtime.final_pages_ms,
            downtime.verify_ms,
            downtime.device_state_ms,
            downtime.start_ms
        ),
    ]);
}

fn numbers(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    let pages = &report.pages;
    let seconds = report.total_ms / 1e3;
    let rate = if seconds > 0.0 { (report.bytes_on_wire as f64 / seconds) as u64 } else { 0 };
    table.add_row(["mode".into(), report.mode.clone()]);
    if report.partial {
        table.add_row(["time".into(), format!("{:.1} ms for the last pages", report.total_ms)]);
    } else {
        times(&mut table, report);
    }
    table.add_row([
        "on the wire".into(),
        format!("{} ({} on average)", show_size(report.bytes_on_wire), show_rate(rate)),
    ]);
    let allocated = format!("{} pages, {} allocated", report.ram.total_pages, report.ram.allocated_pages);
    table.add_row(["RAM".into(), if report.partial { format!("{} pages", report.ram.total_pages) } else { allocated }]);
    table.add_row([
        "pages".into(),
        format!(
            "{} sent ({} as differences), {} zero, {} unallocated, {} free in the guest, {} unchanged, {} left to a later round",
            pages.sent,
            pages.delta,
            pages.zero,
            pages.unallocated,
            pages.free,
            pages.fake_dirty_content,
            pages.fake_dirty_tracked
        ),
    ]);
    if let Some(reason) = &report.introspection.reason {
        table.add_row(["free pages".into(), format!("not skipped: {reason}")]);
    }
    for (name, words) in [("encoding", encoding(report)), ("convergence", convergence(report))] {
        if !words.is_empty() {
            table.add_row([name.into(), words.join(", ")]);
        }
    }
    for (name, words) in postcopy(report) {
        table.add_row([name.into(), words]);
    }
    if report.verify.checked {
        let mut result = format!("{} pages compared, {} differ", report.verify.pages, report.verify.mismatches);
        if report.verify.excluded_free_pages > 0 {
            result.push_str(&format!(", {} left out that the guest gave up", report.verify.excluded_free_pages));
        }
        if report.verify.away_pages > 0 {
            result.push_str(&format!(", {} at memory hosts", report.verify.away_pages));
        }
        if let Some(why) = &report.verify.reason {
            result.push_str(&format!("; in the pause: {why}"));
        }
        table.add_row(["verify".into(), result]);
    } else if let Some(why) = &report.verify.reason {
        table.add_row(["verify".into(), format!("NOT COMPARED: {why}")]);
    }
    text_of(&table)
}

/// The work of compression and deltas; empty where it was not asked for.
fn encoding(report: &Report) -> Vec<String> {
    let (delta, compression) = (&report.encoding.delta, &report.encoding.compression);
    let mut words = Vec::new();
    if compression.pages + compression.plain_pages > 0 {
        let share = compression.bytes as f64 / (compression.pages.max(1) * 4096) as f64;
        words.push(format!(
            "{} pages compressed to {:.0} %, {} plain",
            compression.pages,
            share * 100.0,
            compression.plain_pages
        ));
    }
    if delta.hits + delta.misses > 0 {
        let share = delta.hits as f64 / (delta.hits + delta.misses) as f64;
        words.push(format!("{:.0} % of pages sent again were in the delta cache", share * 100.0));
    }
    words
}

/// How long it took until the last page was there; nothing where it never was.
fn all_there(report: &Report) -> String {
    let ended = report.status == Status::Completed || report.postcopy.ms > 0.0;
    if ended { format!(", all there after {:.1} ms", report.postcopy.ms) } else { String::new() }
}

/// The pages that came after the guest's start at the destination, row by row; empty where none did. If that was tried
/// in vain, the reason.
fn postcopy(report: &Report) -> Vec<(&'static str, String)> {
    let (after, faults, pages) = (&report.postcopy, &report.faults, &report.pages);
    let mut rows = Vec::new();
    if after.residue_pages > 0 || pages.faulted + pages.pushed > 0 {
        if !report.partial {
            let map = format!("a map of {} in {:.2} ms", show_size(after.residue_bytes), after.residue_ms);
            rows.push((
                "post-copy",
                format!("{} pages left at the start ({map}){}", after.residue_pages, all_there(report)),
            ));
        }
        let mut came = format!("{} asked for, {} pushed, {} came twice", pages.faulted, pages.pushed, pages.duplicate);
        if pages.straight > 0 {
            came += &format!(", {} went straight to memory hosts", pages.straight);
        }
        rows.push(("pages after", came));
        let latency = &faults.latency_us;
        rows.push((
            "faults",
            format!(
                "{} (p50 {:.0} us, p99 {:.0} us, longest {:.0} us), {} settled there",
                faults.count, latency.p50, latency.p99, latency.max, faults.local
            ),
        ));
        if let Some(worst) = faults.blocktime_by_thread.first() {
            rows.push((
                "blocktime",
                format!(
                    "{:.1} ms of {} threads, {:.1} ms of the one that waited longest",
                    faults.blocktime_ms,
                    faults.blocktime_by_thread.len(),
                    worst.ms
                ),
            ));
        }
        if after.interruptions > 0 {
            let lost = format!("{}, {:.1} s in all", after.interruptions, after.interrupted_ms / 1e3);
            rows.push(("interruptions", lost));
        }
    }
    if let Some(reason) = &after.reason {
        rows.push(("because", reason.clone()));
    }
    rows
}

/// What was done where rounds did not converge; empty where they did.
fn convergence(report: &Report) -> Vec<String> {
    let done = &report.convergence;
    let mut words = Vec::new();
    if done.stalls > 0 {
        words.push(format!("{} stalls, a pause of {:.0} ms accepted", done.stalls, done.downtime_limit_ms));
    }
    if done.throttle_percent > 0 {
        words.push(format!("guest throttled by up to {} %", done.throttle_percent));
    }
    words
}

fn rounds(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["round", "dirty", "sent", "skipped", "hot", "bytes", "ms", "dirty pages/s"]);
    for round in &report.rounds {
        table.add_row([
            round.round.to_string(),
            round.dirty_pages.to_string(),
            round.sent_pages.to_string(),
            round.skipped_pages.to_string(),
            round.hot_pages.to_string(),
            show_size(round.bytes_on_wire),
            format!("{:.1}", round.ms),
            format!("{:.0}", round.dirty_rate_pages_per_s),
        ]);
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    text_of(&table)
}

#[cfg(test)]
mod tests {
    use sterna_api::report::Round;
    use sterna_api::{Blame, Problem};

    use super::*;

    #[test]
    fn a_completed_migration_shows_time_pause_and_rounds() {
        let report = Report {
            vm: "db1".into(),
            status: Status::Completed,
            total_ms: 2500.0,
            downtime_ms: 8.25,
            rounds: vec![Round::default(), Round { round: 1, dirty_pages: 77, ..Round::default() }],
            ..Report::default()
        };
        let text = show(&report);
        assert!(text.contains("2.50 s") && text.contains("8.2 ms") && text.contains("77"), "{text}");
        assert!(failure(&report).is_none());
    }

    #[test]
    fn what_was_not_asked_for_is_not_spoken_of() {
        let mut report = Report { bytes_on_wire: 1, ..Report::default() };
        let text = show(&report);
        assert!(!text.contains("encoding") && !text.contains("convergence"), "{text}");
        report.encoding.compression.pages = 10;
        report.encoding.compression.bytes = 10 * 1024;
        report.convergence.throttle_percent = 40;
        let text = show(&report);
        assert!(text.contains("10 pages compressed to 25 %") && text.contains("up to 40 %"), "{text}");
    }

    #[test]
    fn what_came_after_the_start_is_told_with_its_faults() {
        let mut report = Report { status: Status::Completed, mode: "hybrid".into(), ..Report::default() };
        assert!(!show(&report).contains("faults"));
        report.postcopy.residue_pages = 5000;
        report.postcopy.interruptions = 2;
        report.postcopy.interrupted_ms = 3100.0;
        report.postcopy.reason = Some("the rounds made no progress".into());
        (report.pages.faulted, report.pages.pushed) = (40, 4960);
        report.faults.count = 40;
        report.faults.latency_us.p99 = 812.4;
        report.faults.blocktime_ms = 12.5;
        report.faults.blocktime_by_thread.push(sterna_api::report::Blocktime { thread: 7, faults: 40, ms: 12.5 });
        let text = show(&report);
        for part in
            ["hybrid", "5000 pages", "4960 pushed", "p99 812 us", "12.5 ms of 1 threads", "2, 3.1 s", "no progress"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn one_that_knows_the_end_only_says_so_and_tells_no_downtime() {
        let mut report = Report { status: Status::Completed, partial: true, total_ms: 700.0, ..Report::default() };
        (report.pages.pushed, report.pages.straight, report.ram.total_pages) = (55, 7, 99);
        let text = show(&report);
        assert!(text.contains("last pages only") && text.contains("55 pushed, 0 came twice, 7 went"), "{text}");
        assert!(
            !text.contains("stood still") && !text.contains("downtime") && !text.contains("at the start"),
            "{text}"
        );
    }

    #[test]
    fn a_failed_one_says_where_the_guest_is() {
        let report =
            Report { vm: "db1".into(), error: Some(Problem::new("x".into(), Blame::Peer, "no")), ..Report::default() };
        assert!(failure(&report).unwrap().contains("stays at the source"));
    }
}
