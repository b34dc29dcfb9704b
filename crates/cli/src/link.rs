//! `link`.

use std::process::ExitCode;

use sterna_api::{LinkRequest, NetworkCard};

use crate::arguments::{Link, LinkState};
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::machines::print_json;

/// Changes the links of a machine's network cards, or shows them.
///
/// # Errors
/// The daemon's problem.
pub async fn link(client: &Client, wanted: Link) -> Result<ExitCode, Failure> {
    let path = format!("/v1/vms/{}/link", escape(&wanted.name));
    let cards: Vec<NetworkCard> = match wanted.state {
        None => client.get(&path).await?,
        Some(state) => {
            let up = state == LinkState::Up;
            let request = LinkRequest { up, card: wanted.card, bridge: wanted.bridge, new_mac: wanted.new_mac };
            client.put(&path, &request).await?
        }
    };
    if wanted.json {
        return print_json(&cards);
    }
    let now = wanted.state.map_or("", |state| if state == LinkState::Up { " up," } else { " down," });
    for card in &cards {
        let to = match (&card.tap, &card.back_end) {
            (Some(tap), _) => format!("connected to the tap {tap}"),
            (None, Some(kind)) => format!("connected to '{kind}'"),
            (None, None) => "connected to nothing".into(),
        };
        println!("{}: {}:{now} {}, {to}", wanted.name, card.name, card.mac);
    }
    Ok(ExitCode::SUCCESS)
}
