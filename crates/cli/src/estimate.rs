//! `sterna estimate`: what a migration would take now.

use std::process::ExitCode;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use sterna_api::estimate::Observed;
use sterna_api::options::Compress;
use sterna_api::units::{show_rate, show_size};

use crate::arguments::Estimate;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::machines::{print_json, word};
use crate::table::text_of;

/// Makes the daemon observe the machine, and shows the estimate of each way of moving it.
///
/// # Errors
/// The daemon's problem.
pub async fn estimate(client: &Client, question: &Estimate) -> Result<ExitCode, Failure> {
    let path = format!(
        "/v1/vms/{}/estimate?bandwidth_bytes_per_s={}&duration_ms={}&downtime_limit_ms={}&page_cache={}",
        escape(&question.name),
        question.bandwidth,
        question.duration.as_millis(),
        question.downtime_limit.as_secs_f64() * 1e3,
        question.page_cache
    );
    let estimate: sterna_api::Estimate = client.get(&path).await?;
    if question.json {
        return print_json(&estimate);
    }
    print!("{}", show(&estimate));
    if question.page_cache {
        print!("{}", page_cache(&estimate.observed));
    }
    Ok(ExitCode::SUCCESS)
}

fn show(estimate: &sterna_api::Estimate) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["MODE", "COMPRESS", "TOTAL", "DOWNTIME", "ON THE WIRE", "ROUNDS", "WITHIN LIMIT"]);
    for way in &estimate.ways {
        table.add_row([
            word(&way.mode),
            if way.compress == Compress::Off { "-".into() } else { word(&way.compress) },
            format!("{:.2} s", way.total_ms / 1e3),
            format!("{:.1} ms", way.downtime_ms),
            show_size(way.bytes_on_wire),
            way.rounds.to_string(),
            if way.reaches_downtime_limit { "yes" } else { "no" }.into(),
        ]);
    }
    table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    let mut text = format!(
        "{}: at {} with at most {} ms of downtime, if it goes on as in the last {:.1} s\n{}\n",
        estimate.vm,
        show_rate(estimate.bandwidth_bytes_per_s),
        estimate.downtime_limit_ms,
        estimate.observed.duration_ms / 1e3,
        text_of(&table)
    );
    text.push_str(&seen(&estimate.observed));
    if estimate.ways.iter().any(|way| way.rounds > 1 && !way.reaches_downtime_limit) {
        text.push_str("Rounds do not reach the limit: these are the figures of --on-timeout force.\n");
    }
    text
}

fn seen(observed: &Observed) -> String {
    let written = observed.written.iter().map(|point| point.pages).max().unwrap_or(0);
    format!(
        "Seen: {} pages allocated, {} of them free in the guest, {:.0} % of the others zeros; {} written, {:.0} % of these with what was there. It cost the guest {} write faults.\n",
        observed.allocated_pages,
        observed.free_pages,
        observed.zero_share * 1e2,
        written,
        observed.silent_share * 1e2,
        observed.write_faults
    )
}

fn page_cache(observed: &Observed) -> String {
    match observed.page_cache_pages {
        Some(pages) => {
            format!("{pages} pages are clean copies of what is on the guest's disks; they travel all the same.\n")
        }
        None => "The guest's page cache is unknown; the daemon's log says why.\n".into(),
    }
}

#[cfg(test)]
mod tests {
    use sterna_api::estimate::Way;

    use super::*;

    #[test]
    fn every_way_is_a_line_and_a_missed_limit_is_explained() {
        let way = |mode, rounds, reaches_downtime_limit| Way {
            mode,
            rounds,
            reaches_downtime_limit,
            total_ms: 8_590.0,
            ..Way::default()
        };
        let mut estimate = sterna_api::Estimate {
            vm: "db1".into(),
            ways: vec![way(sterna_api::Mode::StopAndCopy, 1, false), way(sterna_api::Mode::Precopy, 5, true)],
            ..sterna_api::Estimate::default()
        };
        let text = show(&estimate);
        assert!(text.contains("stop-and-copy") && text.contains("8.59 s") && text.contains("yes"), "{text}");
        assert!(!text.contains("--on-timeout force"), "{text}");
        estimate.ways[1].reaches_downtime_limit = false;
        assert!(show(&estimate).contains("--on-timeout force"));
    }
}
