/// A xorshift64* generator: fast and good enough to pick pages and to fill them with what does not compress.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that `seed` stands for.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed | 1).max(1))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from 0 to 1, without 1.
    pub fn share(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// True in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.below(100) < percent as usize
    }
}

/// Spreads every bit of `value` over the whole word (the finaliser of SplitMix64).
#[must_use]
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_the_bound_and_reach_all_of_it() {
        let mut random = Random::new(7);
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[random.below(10)] = true;
        }
        assert!(seen.iter().all(|&seen| seen));
    }

    #[test]
    fn a_percentage_is_met() {
        let mut random = Random::new(7);
        let hits = (0..100_000).filter(|_| random.percent(20)).count();
        assert!((19_000..21_000).contains(&hits), "{hits}");
    }
}
