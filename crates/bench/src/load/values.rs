//! The values that clients store: bytes that compress as real values do, or not at all. They are the same in every run
//! with the same seed.

use serde::Serialize;

/// Words of the vocabulary that records and texts are made of.
const WORDS: u64 = 4096;

/// The kinds of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Values {
    /// Noise, as compressed or encrypted data.
    #[default]
    Noise,
    /// A mixture as in caches. Of 20 values 11 are records (names of fields, numbers, words), 5 are text, 4 are noise:
    /// about half of the values' bytes are redundant, within a page and across pages.
    Mixed,
}

impl Values {
    /// Appends a value of this many bytes.
    pub fn append(self, into: &mut Vec<u8>, bytes: usize, random: &mut Random) {
        let end = into.len() + bytes;
        match (self, random.next() % 20) {
            (Self::Noise, _) | (Self::Mixed, 0..4) => {
                while_short(into, end, |into| into.extend(random.next().to_le_bytes()))
            }
            (Self::Mixed, 4..9) => while_short(into, end, |into| word(into, random, b' ')),
            (Self::Mixed, _) => while_short(into, end, |into| record(into, random)),
        }
        into.truncate(end);
    }
}

fn while_short(into: &mut Vec<u8>, end: usize, mut more: impl FnMut(&mut Vec<u8>)) {
    while into.len() < end {
        more(into);
    }
}

/// A record of about 200 bytes.
fn record(into: &mut Vec<u8>, random: &mut Random) {
    let (id, time, amount, flag) =
        (random.next() >> 20, 1_700_000_000 + random.next() % 50_000_000, random.next() % 100_000, random.next() % 2);
    into.extend_from_slice(format!("{{\"id\":{id},\"updated_at\":{time},\"user\":\"").as_bytes());
    word(into, random, b'.');
    word(into, random, b'"');
    into.extend_from_slice(
        format!(",\"active\":{},\"amount\":{amount},\"token\":\"{:016x}\",\"text\":\"", flag == 1, random.next())
            .as_bytes(),
    );
    (0..8).for_each(|_| word(into, random, b' '));
    into.extend_from_slice(b"\"}\n");
}

/// A word of two to nine letters and what follows it. Few words are frequent, many are rare, as in any language.
fn word(into: &mut Vec<u8>, random: &mut Random, then: u8) {
    let bits = random.next();
    // The word is the smallest of three draws.
    let number = (bits % WORDS).min((bits >> 16) % WORDS).min((bits >> 32) % WORDS);
    let mut letters = Random::new(number);
    let spelling = letters.next();
    let length = 2 + spelling % 8;
    into.extend((0..length).map(|at| b"etaoinshrdlcumwfgypb"[(spelling >> (5 + 5 * at)) as usize % 20]));
    into.push(then);
}

/// xorshift64*: fast, seeded, and noise enough.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Random numbers that begin with `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator that never ends would have to be unwrapped everywhere"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The next number from 0 to 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(kind: Values, seed: u64, count: usize) -> Vec<u8> {
        let (mut random, mut all) = (Random::new(seed), Vec::new());
        (0..count).for_each(|_| kind.append(&mut all, 1021, &mut random));
        all
    }

    #[test]
    fn the_same_seed_makes_the_same_values_and_they_have_the_asked_length() {
        for kind in [Values::Noise, Values::Mixed] {
            assert_eq!(values(kind, 7, 20), values(kind, 7, 20));
            assert_ne!(values(kind, 7, 20), values(kind, 8, 20));
            assert_eq!(values(kind, 7, 20).len(), 20 * 1021);
        }
    }

    /// The bytes that are left of `data`, by the compressor that every machine has.
    fn share_left(data: &[u8]) -> Option<f64> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("values");
        std::fs::write(&file, data).unwrap();
        let output = std::process::Command::new("gzip").args(["-1", "-c"]).arg(&file).output().ok()?;
        output.status.success().then(|| output.stdout.len() as f64 / data.len() as f64)
    }

    #[test]
    fn noise_does_not_shrink_and_mixed_values_shrink_as_real_ones_do() {
        let Some(noise) = share_left(&values(Values::Noise, 1, 4000)) else {
            return eprintln!("skipped: gzip is absent");
        };
        let mixed = share_left(&values(Values::Mixed, 1, 4000)).unwrap();
        println!("left by gzip -1: noise {noise:.3}, mixed {mixed:.3}");
        assert!(noise > 0.99, "{noise}");
        assert!((0.45..0.65).contains(&mixed), "{mixed}");
    }
}
