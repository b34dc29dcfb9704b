//! Random choices of tests that can be made again.

use sterna_bench::load::now_us;

/// Numbers that follow from a seed (SplitMix64).
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Chance, which a seed that is printed repeats (`STERNA_SEED`).
    #[must_use]
    pub fn seeded() -> Self {
        let seed = std::env::var("STERNA_SEED").ok().and_then(|word| word.parse().ok());
        let seed = seed.unwrap_or_else(|| now_us().unsigned_abs());
        println!("STERNA_SEED={seed}");
        Self(seed)
    }

    /// Less than `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    /// One of these.
    ///
    /// # Panics
    /// Where there is none.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
