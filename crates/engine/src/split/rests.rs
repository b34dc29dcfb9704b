//! Rests: what a memory host may have that counts no more, since it did not answer once.

use sterna_protocol::layout::ChunkIndex;

/// Where a memory host may have rests.
#[derive(Debug, Default, PartialEq)]
pub(super) enum Rests {
    /// Nowhere.
    #[default]
    Nowhere,
    /// In these chunks, with which nothing could be done when the others were gone through.
    In(Vec<ChunkIndex>),
    /// Anywhere.
    Anywhere,
}

impl Rests {
    /// Notes what else there may be.
    pub(super) fn join(&mut self, more: Self) {
        match (&mut *self, more) {
            (Self::Anywhere, _) | (_, Self::Nowhere) => {}
            (Self::In(chunks), Self::In(more)) => chunks.extend(more),
            (_, more) => *self = more,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_twice_is_noted_once_and_nothing_is_forgotten_that_may_be_anywhere() {
        let of = |chunks: &[u32]| Rests::In(chunks.iter().copied().map(ChunkIndex).collect());
        let mut rests = Rests::default();
        rests.join(Rests::Nowhere);
        assert_eq!(rests, Rests::Nowhere);
        rests.join(of(&[3]));
        rests.join(of(&[5]));
        assert_eq!(rests, of(&[3, 5]));
        rests.join(Rests::Anywhere);
        rests.join(of(&[7]));
        rests.join(Rests::Nowhere);
        assert_eq!(rests, Rests::Anywhere);
    }
}
