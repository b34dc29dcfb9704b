use crate::page::{PAGE_BYTES, Page};

/// Pages of a piece.
pub const PIECE_PAGES: u64 = 16;
/// Bytes of a piece.
pub const PIECE_BYTES: usize = PIECE_PAGES as usize * PAGE_BYTES;
/// Bytes of a request: the piece's number and the file's generation, both little-endian.
pub const REQUEST_BYTES: usize = 16;

/// One request for a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which piece.
    pub piece: u64,
    /// Of which of the files, one after another.
    pub generation: u64,
}

impl Request {
    /// As it goes over the wire.
    #[must_use]
    pub fn encode(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.piece.to_le_bytes());
        bytes[8..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    /// The inverse.
    #[must_use]
    pub fn decode(bytes: [u8; REQUEST_BYTES]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Self { piece: word(0), generation: word(8) }
    }

    /// The piece that is asked for.
    #[must_use]
    pub fn body(self) -> Vec<u8> {
        let mut page = Page::zeroed(1).remove(0);
        let mut body = Vec::with_capacity(PIECE_BYTES);
        for number in self.pages() {
            page.write(number, self.generation);
            page.append_to(&mut body);
        }
        body
    }

    /// Whether `body` is that piece.
    #[must_use]
    pub fn is(self, body: &[u8]) -> bool {
        let mut page = Page::zeroed(1).remove(0);
        body.len() == PIECE_BYTES
            && body.chunks_exact(PAGE_BYTES).zip(self.pages()).all(|(bytes, number)| {
                page.copy_from(bytes);
                page.verify(number, self.generation).is_ok()
            })
    }

    fn pages(self) -> impl Iterator<Item = u64> {
        let first = self.piece.wrapping_mul(PIECE_PAGES);
        (0..PIECE_PAGES).map(move |page| first.wrapping_add(page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_told_from_every_other_and_from_a_damaged_one() {
        let request = Request { piece: 7, generation: 2 };
        assert_eq!(Request::decode(request.encode()), request);
        let mut body = request.body();
        assert!(request.is(&body));
        assert!(!Request { piece: 8, ..request }.is(&body) && !Request { generation: 3, ..request }.is(&body));
        assert!(!request.is(&body[1..]));
        body[PIECE_BYTES - 1] ^= 1;
        assert!(!request.is(&body));
    }
}
