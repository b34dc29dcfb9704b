//! Pages of a split guest that are at its memory hosts: they stay there, and the map of them goes in the pause.

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::message::{Reply, Request};
use sterna_protocol::pages::PageMap;
use sterna_protocol::residue;

use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;
use crate::source::link::Link;
use crate::split::onward::Elsewhere;
use crate::transport::control::REPLY_TIMEOUT;

/// Tells the destination which pages are at which memory host, and in which epoch they are asked.
pub(super) fn tell(link: &mut Link, elsewhere: &Elsewhere, layout: &Layout) -> Result<(), MigrateError> {
    let mut pages = 0;
    for (holder, map) in &elsewhere.away {
        pages += map.len();
        tell_of(link, *holder, map, layout)?;
    }
    note(link, &Request::AwayEnd { epoch: elsewhere.epoch, pages })
}

fn tell_of(link: &mut Link, holder: Holder, map: &PageMap, layout: &Layout) -> Result<(), MigrateError> {
    let mut first = ChunkIndex(0);
    while let Some(part) = residue::part(map, layout, first) {
        first = ChunkIndex(part.first.0 + part.chunks);
        note(link, &Request::Away { holder: holder.entry(), part })?;
    }
    Ok(())
}

fn note(link: &mut Link, request: &Request) -> Result<(), MigrateError> {
    match link.control.ask(request, REPLY_TIMEOUT)? {
        Reply::Noted => Ok(()),
        _ => Err(MigrateError::Reply("another reply than a note of pages that are at memory hosts")),
    }
}
