//! `sterna split` and `sterna merge`: a part of a machine's memory leaves for memory hosts, and comes back.

use std::path::Path;
use std::process::ExitCode;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use sterna_api::split::Split as Shown;
use sterna_api::units::show_size;
use sterna_api::{SplitReport, SplitRequest, Status, Vm};

use crate::arguments::{Main, Merge, Split};
use crate::client::{Client, escape};
use crate::failure::{Failure, code_of};
use crate::patience::{End, wait};
use crate::table::text_of;
use crate::{migrate, table};

/// Has a part of a machine's memory leave. Ctrl-C undoes it.
///
/// # Errors
/// The daemon's problem.
pub async fn split(client: &Client, wanted: Split) -> Result<ExitCode, Failure> {
    let Split { name, main: Main { peer, bytes }, mode, memory, redundancy, unused, json } = wanted;
    let request = SplitRequest { here_bytes: bytes, memory, redundancy, unused, main: peer, mode, merge: false };
    let report = leave(client, &name, &request).await?;
    let told = tell(&report, &describe(&report), json.as_deref())?;
    // Where its guest is in the end, its migration says.
    Ok(report.migration.as_ref().map_or(told, |moved| ExitCode::from(code_of(moved))))
}

/// Has a part of a machine's memory leave, and the guest after it, where that is asked for.
///
/// # Errors
/// The daemon's problem.
pub async fn leave(client: &Client, name: &str, request: &SplitRequest) -> Result<SplitReport, Failure> {
    let cancelling = "cancelling; it ends as it was before, but memory hosts that have come stay";
    ask(client, name, "split", request, cancelling).await
}

/// How that ended, in words.
pub fn describe(report: &SplitReport) -> String {
    let most = show_size(report.here_bytes);
    match &report.migration {
        None => table(report, &format!("{most} of it here at most")),
        Some(moved) => {
            table(report, &format!("it runs at {}, {most} of it there at most", moved.destination.address))
                + &table::show(moved)
        }
    }
}

/// Brings all of a machine's memory here. After Ctrl-C it stays split. To another host it is moved.
///
/// # Errors
/// The daemon's problem.
pub async fn merge(client: &Client, wanted: Merge) -> Result<ExitCode, Failure> {
    if let Some(to) = wanted.to {
        return migrate::together(client, wanted.name, to, wanted.json).await;
    }
    let report = ask(client, &wanted.name, "merge", &(), "cancelling; it stays split").await?;
    let text = table(&report, "all of it here");
    tell(&report, &text, wanted.json.as_deref())
}

/// Asks, and waits for the answer; meanwhile people are told what it waits for.
async fn ask(
    client: &Client,
    name: &str,
    what: &str,
    request: &impl Serialize,
    cancelling: &str,
) -> Result<SplitReport, Failure> {
    let vm = format!("/v1/vms/{}", escape(name));
    let path = format!("{vm}/{what}");
    let mut told = String::new();
    let look = async || {
        let shown = client.get::<Vm>(&vm).await.ok().and_then(|vm| vm.split);
        let waits = shown.as_ref().map(waits).unwrap_or_default();
        if waits != told && !waits.is_empty() {
            eprintln!("{waits}");
        }
        told = waits;
    };
    wait(client, name, client.post(&path, request), cancelling, look).await
}

/// What a machine waits for, in a line.
fn waits(shown: &Shown) -> String {
    let why = |why: &Option<String>| why.as_ref().map_or(String::new(), |why| format!(" ({why})"));
    let hosts = shown.waiting.iter().map(|waiting| format!("waiting for {}{}", waiting.peer, why(&waiting.why)));
    let stuck = shown.stuck.iter().map(|stuck| format!("pages cannot leave ({stuck})"));
    hosts.chain(stuck).collect::<Vec<_>>().join("; ")
}

fn tell(report: &SplitReport, text: &str, json: Option<&Path>) -> Result<ExitCode, Failure> {
    let (status, error) = (report.status, report.error.as_ref());
    End { vm: &report.vm, status, error, text }.tell(report, json)
}

fn table(report: &SplitReport, now: &str) -> String {
    let (vm, seconds) = (&report.vm, report.ms / 1e3);
    let mut text = match report.status {
        Status::Completed => format!("{vm}: {now}, after {seconds:.2} s\n"),
        Status::Cancelled => format!("{vm}: cancelled after {seconds:.2} s\n"),
        Status::Failed => format!("{vm}: failed after {seconds:.2} s\n"),
    };
    let pages = |pages: u64| show_size(pages.saturating_mul(4096));
    let mut table = Table::new();
    table.load_style(NOTHING);
    let (before, after) = (show_size(report.allocated_before_bytes), show_size(report.allocated_after_bytes));
    table.add_row(["here".into(), format!("{after}, {before} before")]);
    table.add_row(["away".into(), format!("{} at memory hosts", pages(report.away_pages))]);
    table.add_row([
        "left".into(),
        format!(
            "{} sent; {} that the memory hosts had still, and {} of zeros; {} stayed that the guest wrote or wanted",
            pages(report.out_pages),
            pages(report.unsent_pages),
            pages(report.zero_pages),
            pages(report.kept_pages)
        ),
    ]);
    table.add_row(["came".into(), pages(report.in_pages)]);
    text.push_str(&text_of(&table));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use sterna_api::split::Waiting;

    use super::*;

    #[test]
    fn the_first_line_says_how_it_ended() {
        let mut report =
            SplitReport { vm: "db1".into(), status: Status::Completed, ms: 640.0, ..SplitReport::default() };
        let now = "96.0 MiB of it here at most";
        assert!(table(&report, now).starts_with("db1: 96.0 MiB of it here at most, after 0.64 s\n"));
        report.status = Status::Cancelled;
        assert!(table(&report, now).starts_with("db1: cancelled after 0.64 s\n"));
    }

    #[test]
    fn who_is_waited_for_is_told_with_the_reason() {
        let waiting = |why: Option<&str>| Waiting { peer: "b:1".into(), ms: 2.0, why: why.map(Into::into) };
        let mut shown = Shown { here_bytes: 1, away_pages: 2, ..Shown::default() };
        assert_eq!(waits(&shown), "");
        shown.waiting = vec![waiting(None), waiting(Some("refused"))];
        shown.stuck = Some("full".into());
        assert_eq!(waits(&shown), "waiting for b:1; waiting for b:1 (refused); pages cannot leave (full)");
    }
}
