use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// Buckets of each power of two: a value is known to a sixteenth.
const PARTS: u64 = 16;

/// How often which whole number was seen, with a relative error of at most a sixteenth. Written as `bucket:count,…`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram(BTreeMap<u16, u64>);

impl FromIterator<u64> for Histogram {
    fn from_iter<I: IntoIterator<Item = u64>>(values: I) -> Self {
        let mut histogram = Self::default();
        values.into_iter().for_each(|value| histogram.note(value));
        histogram
    }
}

impl Histogram {
    /// Counts `value` once.
    pub fn note(&mut self, value: u64) {
        *self.0.entry(bucket(value)).or_default() += 1;
    }

    /// Adds what another has counted.
    pub fn add(&mut self, other: &Self) {
        for (bucket, count) in &other.0 {
            *self.0.entry(*bucket).or_default() += count;
        }
    }

    /// How many values were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// What was counted of this value's bucket and of those above.
    #[must_use]
    pub fn from(&self, value: u64) -> Self {
        Self(self.0.range(bucket(value)..).map(|(bucket, count)| (*bucket, *count)).collect())
    }

    /// The value below which the share `quantile` (0 to 1) of the values lies, as if they lay evenly within each bucket;
    /// `None` where there is none.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        let wanted = quantile.clamp(0.0, 1.0) * self.count() as f64;
        let mut below = 0.0;
        let mut last = None;
        for (&bucket, &count) in &self.0 {
            let (from, to) = (lowest(bucket) as f64, lowest(bucket + 1) as f64);
            if below + count as f64 >= wanted {
                return Some(from + (to - from) * ((wanted - below) / count as f64).max(0.0));
            }
            below += count as f64;
            last = Some(to);
        }
        last
    }
}

/// Small values have a bucket each, larger ones share one of [`PARTS`] in each power of two.
fn bucket(value: u64) -> u16 {
    if value < PARTS {
        return value as u16;
    }
    let shift = value.ilog2() - PARTS.ilog2();
    (u64::from(shift) * PARTS + (value >> shift)) as u16
}

/// The lowest value of a bucket.
fn lowest(bucket: u16) -> u64 {
    let bucket = u64::from(bucket);
    if bucket < PARTS {
        return bucket;
    }
    let (shift, part) = (bucket / PARTS - 1, bucket % PARTS + PARTS);
    // The one after the last begins beyond what a word holds.
    part.checked_mul(1_u64.checked_shl(shift as u32).unwrap_or(0)).filter(|&value| value > 0).unwrap_or(u64::MAX)
}

impl Display for Histogram {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        for (index, (bucket, count)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(out, "{comma}{bucket}:{count}")?;
        }
        Ok(())
    }
}

impl FromStr for Histogram {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut histogram = Self::default();
        for entry in text.split(',').filter(|entry| !entry.is_empty()) {
            let (number, count) =
                entry.split_once(':').ok_or_else(|| format!("`{entry}` is no bucket with a count"))?;
            let number = number.parse().ok().filter(|&number| number <= bucket(u64::MAX));
            let parsed = number.zip(count.parse::<u64>().ok()).ok_or_else(|| format!("`{entry}` is out of range"))?;
            let sum = histogram.0.entry(parsed.0).or_default();
            *sum = sum.saturating_add(parsed.1);
        }
        Ok(histogram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_which_is_a_sixteenth_wide() {
        let edges = (0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1]);
        for value in edges.chain([0, 1000, 123_456_789, u64::MAX - 1]) {
            let bucket = bucket(value);
            let (from, to) = (lowest(bucket), lowest(bucket + 1));
            assert!(from <= value && value < to, "{value} in {bucket}: {from}..{to}");
            assert!(value < PARTS || (to - from) as f64 <= value as f64 / PARTS as f64 + 1.0);
        }
    }

    #[test]
    fn quantiles_are_right_to_a_sixteenth() {
        let mut histogram = Histogram::default();
        (1..=10_000).for_each(|value| histogram.note(value));
        for quantile in [0.01, 0.5, 0.99, 1.0] {
            let (found, expected) = (histogram.quantile(quantile).unwrap(), quantile * 10_000.0);
            assert!((found / expected - 1.0).abs() < 1.0 / PARTS as f64, "{quantile}: {found}");
        }
        assert_eq!(Histogram::default().quantile(0.5), None);
        let upper = histogram.from(5_000);
        assert!((4_900..=5_400).contains(&upper.count()), "{}", upper.count());
        assert!((upper.quantile(0.0).unwrap() / 5_000.0 - 1.0).abs() < 1.0 / PARTS as f64);
    }

    #[test]
    fn a_histogram_is_read_as_it_is_written_and_added_up() {
        let mut histogram = Histogram::default();
        [0, 3, 3, 900, 1_000_000].into_iter().for_each(|value| histogram.note(value));
        let mut read: Histogram = histogram.to_string().parse().unwrap();
        assert_eq!(read, histogram);
        read.add(&histogram);
        assert_eq!(read.count(), 10);
        assert_eq!("".parse(), Ok(Histogram::default()));
        for text in ["3", "3:x", "99999:1", "3:4:5", "-1:2"] {
            assert!(text.parse::<Histogram>().is_err(), "{text} was taken");
        }
    }
}
