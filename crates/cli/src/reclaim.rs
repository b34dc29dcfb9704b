//! `sterna reclaim`: a guest's free memory is given back to its host.

use std::process::ExitCode;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use sterna_api::units::show_size;
use sterna_api::{ReclaimMethod, ReclaimRequest, Reclaimed, Status};

use crate::arguments::Reclaim;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::patience::{End, wait};
use crate::table::text_of;

/// Makes the daemon take the guest's free memory, and shows the result. Ctrl-C ends the work, and this still waits for
/// the end.
///
/// # Errors
/// The daemon's problem.
pub async fn reclaim(client: &Client, wanted: &Reclaim) -> Result<ExitCode, Failure> {
    let request = ReclaimRequest { method: wanted.method.into() };
    let path = format!("/v1/vms/{}/reclaim", escape(&wanted.name));
    let (asked, cancelling) = (client.post(&path, &request), "cancelling; what was taken stays taken");
    let done: Reclaimed = wait(client, &wanted.name, asked, cancelling, async || ()).await?;
    let text = show(&done);
    let end = End { vm: &done.vm, status: done.status, error: done.error.as_ref(), text: &text };
    end.tell(&done, wanted.json.as_deref())
}

fn show(done: &Reclaimed) -> String {
    let how = match done.status {
        Status::Completed => "",
        Status::Cancelled => ", then cancelled",
        Status::Failed => ", then it failed",
    };
    let (taken, seconds) = (show_size(done.reclaimed_bytes), done.ms / 1e3);
    let mut text = format!("{}: {taken} given back to the host in {seconds:.2} s{how}\n", done.vm);
    let mut table = Table::new();
    table.load_style(NOTHING);
    let pages = |pages: u64| show_size(pages.saturating_mul(4096));
    table.add_row([
        "free".into(),
        format!("{} in the guest, {} of it with memory", pages(done.free_pages), pages(done.candidate_pages)),
    ]);
    if done.left_huge_pages > 0 {
        let left = pages(done.left_huge_pages);
        table.add_row(["left".into(), format!("{left} in huge pages that the guest uses otherwise")]);
    }
    if done.elsewhere_pages > 0 {
        table.add_row([
            "elsewhere".into(),
            format!("{} of what was given back was at memory hosts", pages(done.elsewhere_pages)),
        ]);
    }
    table.add_row(["put back".into(), format!("{} that was not free any more", pages(done.put_back_pages))]);
    let (before, after) = (show_size(done.allocated_before_bytes), show_size(done.allocated_after_bytes));
    table.add_row(["allocated".into(), format!("{before} before, {after} after")]);
    if done.method == ReclaimMethod::Vmi {
        table.add_row([
            "guest".into(),
            format!(
                "{} writes waited, none longer than {:.1} ms; {} of {} portions let go for it; {} touched meanwhile",
                done.waits,
                done.longest_wait_ms,
                done.gave_way,
                done.portions,
                pages(done.touched_pages)
            ),
        ]);
        table.add_row([
            "looks".into(),
            format!(
                "{} in {:.1} ms, found Linux {} in {:.1} ms",
                done.looks,
                done.look_ms,
                done.kernel.as_deref().unwrap_or("?"),
                done.find_ms
            ),
        ]);
    }
    text.push_str(&text_of(&table));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_and_what_was_taken_are_in_the_first_line() {
        let mut done = Reclaimed {
            vm: "db1".into(),
            status: Status::Completed,
            reclaimed_bytes: 3 << 30,
            ms: 2_340.0,
            waits: 7,
            kernel: Some("6.1.0".into()),
            ..Reclaimed::default()
        };
        let text = show(&done);
        assert!(text.starts_with("db1: 3.00 GiB given back to the host in 2.34 s\n"), "{text}");
        assert!(text.contains("7 writes waited") && text.contains("Linux 6.1.0"), "{text}");
        (done.status, done.method) = (Status::Cancelled, ReclaimMethod::Balloon);
        let text = show(&done);
        assert!(text.contains("then cancelled") && !text.contains("waited"), "{text}");
    }
}
