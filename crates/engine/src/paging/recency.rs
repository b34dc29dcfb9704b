//! Which pages came last: they are what the guest wrote last, and will most likely touch first.

use sterna_protocol::layout::{ChunkIndex, Layout};

/// When pages of each chunk came last, as a number that rises.
#[derive(Debug)]
pub(super) struct Recency {
    last: Vec<u64>,
    now: u64,
}

impl Recency {
    /// Nothing has come.
    pub(super) fn nothing(layout: &Layout) -> Self {
        Self { last: vec![0; layout.chunks() as usize], now: 0 }
    }

    /// Pages of this chunk have come.
    pub(super) fn came(&mut self, chunk: ChunkIndex) {
        self.now += 1;
        if let Some(last) = self.last.get_mut(chunk.index()) {
            *last = self.now;
        }
    }

    /// All chunks: those first of which pages came last, and those of which none came in their own order.
    pub(super) fn newest_first(&self) -> Vec<ChunkIndex> {
        let mut order: Vec<ChunkIndex> = (0..self.last.len() as u32).map(ChunkIndex).collect();
        order.sort_by_key(|chunk| std::cmp::Reverse(self.last[chunk.index()]));
        order
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::CHUNK_BYTES;
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    #[test]
    fn what_came_last_is_first_and_what_never_came_is_last() {
        let bytes = 5 * CHUNK_BYTES as u64;
        let ram = BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() };
        let mut recency = Recency::nothing(&Layout::new(&[ram]).expect("a layout"));
        [1, 4, 2, 1].into_iter().for_each(|chunk| recency.came(ChunkIndex(chunk)));
        recency.came(ChunkIndex(99));
        assert_eq!(recency.newest_first(), [1, 2, 4, 0, 3].map(ChunkIndex));
    }
}
