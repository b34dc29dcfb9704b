use crate::random::{Random, mix};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Words in front of a self-checking page's body: page number, sequence, checksum.
const HEADER_WORDS: usize = 3;
/// What each word of a body adds to the one before; odd, and without a short pattern of bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One page of memory.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Page([u64; WORDS]);

/// What is wrong with a self-checking page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A whole page of another time: its sequence, where another was expected.
    OtherSequence(u64),
    /// A whole page of another place: its page number.
    OtherPage(u64),
    /// All zeros.
    Zero,
    /// Not what anybody wrote: parts of different writes.
    Torn,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OtherSequence(sequence) => write!(out, "sequence-{sequence}"),
            Self::OtherPage(page) => write!(out, "page-{page}"),
            Self::Zero => out.write_str("zero"),
            Self::Torn => out.write_str("torn"),
        }
    }
}

impl Page {
    /// `count` pages of zeros.
    #[must_use]
    pub fn zeroed(count: usize) -> Vec<Self> {
        vec![Self([0; WORDS]); count]
    }

    /// Fills the page's first `bytes` with what does not compress.
    pub fn scramble(&mut self, bytes: usize, random: &mut Random) {
        for word in self.front(bytes) {
            *word = random.next_u64();
        }
    }

    /// Stores in the page's first `bytes` what stands there already.
    pub fn store_silently(&mut self, bytes: usize) {
        for word in self.front(bytes) {
            // Opaque to the compiler, which would leave such a store out.
            *word = std::hint::black_box(*word);
        }
    }

    /// Stores to the page's first `bytes` what stands for `number`: cheap to make, and nowhere zero.
    pub fn fill(&mut self, bytes: usize, number: u64) {
        let mut word = mix(number) | 1;
        for slot in self.front(bytes) {
            *slot = word;
            word = word.wrapping_add(STEP << 1);
        }
    }

    /// The sum of the page's first `bytes`, all of which are read.
    #[must_use]
    pub fn sum(&self, bytes: usize) -> u64 {
        self.0[..words(bytes)].iter().fold(0, |sum, word| sum.wrapping_add(*word))
    }

    /// Writes the self-checking contents of page `number` at `sequence`.
    pub fn write(&mut self, number: u64, sequence: u64) {
        let seed = seed(number, sequence);
        let mut checksum = 0_u64;
        let mut word = seed;
        for slot in &mut self.0[HEADER_WORDS..] {
            *slot = word;
            checksum = checksum.rotate_left(1) ^ word;
            word = word.wrapping_add(STEP);
        }
        self.0[..HEADER_WORDS].copy_from_slice(&[number, sequence, checksum]);
    }

    /// Checks that the page holds page `number` at `sequence`, every word of it.
    ///
    /// # Errors
    /// What it holds instead.
    pub fn verify(&self, number: u64, sequence: u64) -> Result<(), Fault> {
        let [found_number, found_sequence, found_checksum] = [self.0[0], self.0[1], self.0[2]];
        let mut checksum = 0_u64;
        let mut word = seed(found_number, found_sequence);
        let mut whole = true;
        for &slot in &self.0[HEADER_WORDS..] {
            whole &= slot == word;
            checksum = checksum.rotate_left(1) ^ slot;
            word = word.wrapping_add(STEP);
        }
        if !whole || checksum != found_checksum {
            return Err(if self.0.iter().all(|&word| word == 0) { Fault::Zero } else { Fault::Torn });
        }
        if found_number != number {
            return Err(Fault::OtherPage(found_number));
        }
        if found_sequence != sequence {
            return Err(Fault::OtherSequence(found_sequence));
        }
        Ok(())
    }

    /// Appends the page's bytes, words little-endian.
    pub fn append_to(&self, bytes: &mut Vec<u8>) {
        self.0.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    }

    /// The inverse: makes the page these bytes, as many as there are.
    pub fn copy_from(&mut self, bytes: &[u8]) {
        for (slot, word) in self.0.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
            *slot = u64::from_le_bytes(std::array::from_fn(|byte| word[byte]));
        }
    }

    fn front(&mut self, bytes: usize) -> &mut [u64] {
        &mut self.0[..words(bytes)]
    }
}

/// The words that `bytes` of a page lie in.
fn words(bytes: usize) -> usize {
    bytes.div_ceil(size_of::<u64>()).min(WORDS)
}

fn seed(number: u64, sequence: u64) -> u64 {
    mix(mix(number ^ STEP) ^ sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(number: u64, sequence: u64) -> Page {
        let mut page = Page::zeroed(1).remove(0);
        page.write(number, sequence);
        page
    }

    #[test]
    fn a_page_verifies_only_as_what_was_written() {
        let page = written(5, 9);
        assert_eq!(page.verify(5, 9), Ok(()));
        assert_eq!(page.verify(5, 10), Err(Fault::OtherSequence(9)));
        assert_eq!(page.verify(6, 9), Err(Fault::OtherPage(5)));
    }

    #[test]
    fn a_page_that_lost_its_contents_is_told_apart() {
        assert_eq!(Page::zeroed(1)[0].verify(0, 0), Err(Fault::Zero));
    }

    #[test]
    fn one_changed_bit_anywhere_is_found() {
        for word in 0..WORDS {
            for bit in [0, 31, 63] {
                let mut page = written(5, 9);
                page.0[word] ^= 1 << bit;
                assert!(page.verify(5, 9).is_err(), "word {word}, bit {bit}");
            }
        }
    }

    #[test]
    fn halves_of_two_writes_are_torn() {
        let mut page = written(5, 9);
        page.0[WORDS / 2..].copy_from_slice(&written(5, 8).0[WORDS / 2..]);
        assert_eq!(page.verify(5, 9), Err(Fault::Torn));
    }

    #[test]
    fn a_filled_page_has_no_zeros_and_only_its_front_is_touched() {
        let mut page = Page::zeroed(1).remove(0);
        page.fill(16, 7);
        assert!(page.0[..2].iter().all(|word| *word != 0) && page.0[2..].iter().all(|word| *word == 0));
        assert_eq!(page.sum(8), page.0[0]);
        page.fill(PAGE_BYTES, 8);
        assert!(page.0.iter().all(|word| *word != 0));
        assert_eq!(page.sum(1 << 20), page.0.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
    }

    #[test]
    fn a_silent_store_changes_nothing() {
        let mut page = written(5, 9);
        page.store_silently(PAGE_BYTES);
        assert_eq!(page.verify(5, 9), Ok(()));
    }
}
