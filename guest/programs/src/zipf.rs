use crate::random::{Random, mix};

/// How uneven: the exponent that YCSB uses.
const THETA: f64 = 0.99;

/// Keys of which few are used often and most seldom, as YCSB picks them: by Zipf's law, with the popular ones scattered.
///
/// The method is that of Gray et al., "Quickly generating billion-record synthetic databases", SIGMOD 1994.
#[derive(Clone, Debug)]
pub struct Zipf {
    count: usize,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    /// Keys below `count`, which is not 0. Takes a moment for many.
    #[must_use]
    pub fn new(count: usize) -> Self {
        let zeta = |of: usize| (1..=of).map(|rank| 1.0 / (rank as f64).powf(THETA)).sum::<f64>();
        let all = zeta(count);
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - zeta(2) / all);
        Self { count, zeta: all, alpha: 1.0 / (1.0 - THETA), eta }
    }

    /// How popular the key is that stands for a number from 0 to 1, each as likely: 0 is the most popular one.
    fn rank(&self, share: f64) -> usize {
        let scaled = share * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) {
            return 1.min(self.count - 1);
        }
        let rank = self.count as f64 * (self.eta * share - self.eta + 1.0).powf(self.alpha);
        (rank as usize).min(self.count - 1)
    }

    /// The key that stands for a number from 0 to 1, each as likely.
    #[must_use]
    pub fn key(&self, share: f64) -> usize {
        (mix(self.rank(share) as u64 + 1) % self.count as u64) as usize
    }

    /// The next key.
    pub fn next(&self, random: &mut Random) -> usize {
        self.key(random.share())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popularity_follows_zipfs_law() {
        let (zipf, mut random) = (Zipf::new(1000), Random::new(1));
        let mut counts = vec![0_u32; 1000];
        for _ in 0..400_000 {
            counts[zipf.rank(random.share())] += 1;
        }
        let share = |rank: usize| f64::from(counts[rank]) / 400_000.0;
        for rank in [0, 1, 9, 99] {
            let expected = 1.0 / ((rank + 1) as f64).powf(THETA) / zipf.zeta;
            assert!((share(rank) / expected - 1.0).abs() < 0.3, "rank {rank}: {} for {expected}", share(rank));
        }
    }

    #[test]
    fn keys_stay_below_their_number_even_where_there_are_few() {
        for count in [1, 2, 3, 10] {
            let (zipf, mut random) = (Zipf::new(count), Random::new(1));
            assert!((0..10_000).all(|_| zipf.next(&mut random) < count));
        }
    }
}
