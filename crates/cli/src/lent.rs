//! `lent`.

use std::process::ExitCode;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use sterna_api::units::show_size;
use sterna_api::vm::{HostLent, Loan};

use crate::arguments::Lent;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::machines::print_json;
use crate::table::text_of;

const LENT: &str = "/v1/host/lent";

/// Shows what the host lends, or takes some of it back.
///
/// # Errors
/// The daemon's problem.
pub async fn lent(client: &Client, wanted: Lent) -> Result<ExitCode, Failure> {
    if let Some(guest) = wanted.take_back {
        let loan: Loan = client.delete(&format!("{LENT}/{}", escape(&guest))).await?;
        println!("taken back from {}: {} ({} were in use)", loan.guest, show_size(loan.granted_bytes), used(&loan));
        return Ok(ExitCode::SUCCESS);
    }
    let lent: HostLent = client.get(LENT).await?;
    if wanted.json {
        return print_json(&lent);
    }
    println!("{}", line(&lent).unwrap_or_else(|| "this host lends no memory (lend_memory in sternad.toml)".into()));
    if !lent.guests.is_empty() {
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header(["GUEST", "GRANTED", "USED", "HANDS"]);
        for loan in &lent.guests {
            table.add_row([loan.guest.clone(), show_size(loan.granted_bytes), used(loan), loan.epoch.to_string()]);
        }
        println!("{}", text_of(&table));
    }
    Ok(ExitCode::SUCCESS)
}

/// What `ps` says of it, where there is anything to say.
///
/// # Errors
/// The daemon's problem.
pub async fn tell(client: &Client) -> Result<(), Failure> {
    let lent: HostLent = client.get(LENT).await?;
    if let Some(line) = line(&lent).filter(|_| !lent.guests.is_empty()) {
        println!("{line}");
    }
    Ok(())
}

/// All that is lent, in a line; `None` where nothing is, nor may be.
fn line(lent: &HostLent) -> Option<String> {
    let HostLent { budget_bytes, granted_bytes, used_bytes, guests } = lent;
    let guests = match guests.len() {
        0 if *budget_bytes == 0 => return None,
        0 => "no guest".into(),
        1 => format!("1 guest, {} in use", show_size(*used_bytes)),
        count => format!("{count} guests, {} in use", show_size(*used_bytes)),
    };
    let (granted, budget) = (show_size(*granted_bytes), show_size(*budget_bytes));
    Some(format!("lent to guests of other hosts: {granted} of {budget} ({guests})"))
}

fn used(loan: &Loan) -> String {
    show_size(loan.used_bytes)
}
