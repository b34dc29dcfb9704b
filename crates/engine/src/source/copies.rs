//! Copies: bodies of pages as they were read from the guest's RAM, one after another, in memory that is used again.

use sterna_protocol::layout::PAGE_BYTES;

/// A buffer of bodies. It never shrinks, and no memory is cleared that will be overwritten.
#[derive(Debug, Default)]
pub struct Copies {
    buffer: Vec<u8>,
    kept: usize,
}

impl Copies {
    /// Forgets the bodies that are kept.
    pub fn clear(&mut self) {
        self.kept = 0;
    }

    /// Room for this many bodies behind those that are kept.
    pub fn room(&mut self, bodies: usize) -> &mut [u8] {
        let (from, to) = (self.kept * PAGE_BYTES, (self.kept + bodies) * PAGE_BYTES);
        if self.buffer.len() < to {
            self.buffer.resize(to, 0);
        }
        &mut self.buffer[from..to]
    }

    /// The body at a place behind those that are kept, as it was put into [`room`](Self::room).
    #[must_use]
    pub fn beyond(&self, place: usize) -> &[u8; PAGE_BYTES] {
        self.at(self.kept + place)
    }

    /// Keeps the bodies at these places in the room, in order, behind those that are kept already.
    pub fn keep(&mut self, places: impl IntoIterator<Item = usize>) {
        let first = self.kept;
        for place in places {
            self.move_down(first + place, self.kept);
            self.kept += 1;
        }
    }

    /// Takes out the bodies for which `take`, called with place and body, returns `true`; the others stay in their
    /// order.
    pub fn take_out(&mut self, mut take: impl FnMut(usize, &[u8; PAGE_BYTES]) -> bool) {
        let mut stay = 0;
        for place in 0..self.kept {
            if !take(place, self.at(place)) {
                self.move_down(place, stay);
                stay += 1;
            }
        }
        self.kept = stay;
    }

    /// The bodies that are kept.
    #[must_use]
    pub fn bodies(&self) -> &[u8] {
        &self.buffer[..self.kept * PAGE_BYTES]
    }

    /// Exchanges the bodies that are kept for other memory of any content; nothing is kept then.
    pub fn exchange(&mut self, other: &mut Vec<u8>) {
        self.buffer.truncate(self.kept * PAGE_BYTES);
        std::mem::swap(&mut self.buffer, other);
        self.kept = 0;
    }

    fn at(&self, place: usize) -> &[u8; PAGE_BYTES] {
        self.buffer[place * PAGE_BYTES..].first_chunk().expect("a body was put there")
    }

    fn move_down(&mut self, from: usize, to: usize) {
        if from != to {
            self.buffer.copy_within(from * PAGE_BYTES..(from + 1) * PAGE_BYTES, to * PAGE_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_and_what_is_taken_out_stays_in_order() {
        let mut copies = Copies::default();
        let fill = |copies: &mut Copies, bytes: [u8; 3]| {
            let room = copies.room(3).as_chunks_mut::<PAGE_BYTES>().0;
            room.iter_mut().zip(bytes).for_each(|(body, byte)| body.fill(byte));
        };
        let firsts = |copies: &Copies| copies.bodies().iter().step_by(PAGE_BYTES).copied().collect::<Vec<_>>();
        fill(&mut copies, [1, 2, 3]);
        assert_eq!(copies.beyond(2)[0], 3);
        copies.keep([0, 2]);
        fill(&mut copies, [4, 5, 6]);
        copies.keep([1, 2]);
        fill(&mut copies, [7, 7, 7]);
        copies.keep([]);
        assert_eq!(firsts(&copies), [1, 3, 5, 6]);
        copies.take_out(|place, body| place == 1 || body[0] == 6);
        assert_eq!(firsts(&copies), [1, 5]);
        let mut taken = vec![9; 3];
        copies.exchange(&mut taken);
        assert_eq!((taken.len(), taken[PAGE_BYTES], copies.bodies().len()), (2 * PAGE_BYTES, 5, 0));
        fill(&mut copies, [8, 8, 8]);
        copies.keep(0..3);
        assert_eq!(firsts(&copies), [8, 8, 8]);
    }
}
