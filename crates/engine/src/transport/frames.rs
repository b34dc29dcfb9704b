//! Frames as they come on a connection.

use std::io::Read;

use sterna_protocol::frame::{Frame, FrameReader, HEADER_BYTES};
use sterna_protocol::layout::Layout;

use super::connection::Connection;
use crate::error::MigrateError;

/// The next frame, checked against the machine's layout, and the digests of its bodies; its bodies or blocks are still
/// to be read. `None` where the connection ends instead.
///
/// # Errors
/// The link broke, or the peer sent what is no frame: the connection is useless from then on.
pub fn next_frame(
    connection: &mut Connection,
    reader: &mut FrameReader,
    layout: &Layout,
) -> Result<Option<(Frame, Vec<u64>)>, MigrateError> {
    let link = || MigrateError::link("receiving pages");
    let mut header = [0; HEADER_BYTES];
    match connection.read(&mut header).map_err(link())? {
        0 => return Ok(None),
        read => connection.read_exact(&mut header[read..]).map_err(link())?,
    }
    let pending = reader.header(&header)?;
    let mut words = vec![0u8; pending.words() * 8];
    connection.read_exact(&mut words).map_err(link())?;
    let words: Vec<u64> = words.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let (frame, digests) = reader.accept(&pending, &words, layout)?;
    Ok(Some((frame, digests.to_vec())))
}
