//! Route: which of the connections a chunk's frames take.
//!
//! A chunk always takes the same one, so that a later body of a page arrives later. After the switchover every page
//! goes only once: then each connection takes pages when it has room ([`push`](crate::source::postcopy)), and no route
//! is needed.

use sterna_protocol::layout::ChunkIndex;

/// The route over a number of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    streams: u32,
}

impl Route {
    /// The route over this many connections, in turns.
    #[must_use]
    pub fn over(streams: usize) -> Self {
        Self { streams: streams.max(1) as u32 }
    }

    /// The number of the connection that a chunk takes.
    #[must_use]
    pub fn of(self, chunk: ChunkIndex) -> usize {
        (chunk.0 % self.streams) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_has_one_connection_and_every_connection_its_share() {
        for streams in 1..=5 {
            let route = Route::over(streams);
            let mut shares = vec![0; streams];
            (0..60).for_each(|chunk| shares[route.of(ChunkIndex(chunk))] += 1);
            assert_eq!(shares, vec![60 / streams; streams]);
        }
    }
}
