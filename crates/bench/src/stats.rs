//! The few statistics that reports need.

use serde::{Deserialize, Serialize};

/// A metric over repeated runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle value; the mean of the two middle ones where their number is even.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// The number of runs.
    pub n: usize,
}

impl Summary {
    /// Summarises `values`; `None` where there is none. Values that are not finite are left out.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        Some(Self { median: middle(&sorted)?, min: *sorted.first()?, max: *sorted.last()?, n: sorted.len() })
    }
}

/// The median of values in any order; `None` where there is none.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    Summary::of(values).map(|summary| summary.median)
}

/// The median of `a[i] / b[i]`, by which paired runs are judged. Pairs with a zero or absent partner are left out.
#[must_use]
pub fn paired_ratio(a: &[f64], b: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = a.iter().zip(b).filter(|(_, b)| **b != 0.0).map(|(a, b)| a / b).collect();
    median(&ratios)
}

/// The value below which the share `quantile` (0 to 1) of `values` lies (nearest rank).
#[must_use]
pub fn quantile(values: &[f64], quantile: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (quantile.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

/// Slope, intercept and R² of the least-squares line through `points`; `None` with fewer than two distinct abscissas.
#[must_use]
pub fn line(points: &[(f64, f64)]) -> Option<(f64, f64, f64)> {
    let n = points.len() as f64;
    let (mean_x, mean_y) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let xx: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
    let xy: f64 = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
    let yy: f64 = points.iter().map(|p| (p.1 - mean_y).powi(2)).sum();
    if points.len() < 2 || xx == 0.0 {
        return None;
    }
    let slope = xy / xx;
    let r_squared = if yy == 0.0 { 1.0 } else { xy * xy / (xx * yy) };
    Some((slope, mean_y - slope * mean_x, r_squared))
}

fn middle(sorted: &[f64]) -> Option<f64> {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted.get(half).copied()
    } else {
        Some((sorted.get(half.checked_sub(1)?)? + sorted.get(half)?) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[9.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn values_that_are_not_numbers_do_not_spoil_a_summary() {
        let summary = Summary::of(&[f64::NAN, 2.0, 1.0]).unwrap();
        assert_eq!((summary.min, summary.max, summary.n), (1.0, 2.0, 2));
    }

    #[test]
    fn pairs_are_divided_before_the_median_is_taken() {
        // The medians' ratio would be 2/20; pair by pair it is 0.1, 0.2, 1.
        assert_eq!(paired_ratio(&[1.0, 2.0, 30.0], &[10.0, 10.0, 30.0]), Some(0.2));
        assert_eq!(paired_ratio(&[1.0], &[0.0]), None);
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.99), Some(99.0));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 1.0), Some(100.0));
    }

    #[test]
    fn a_line_is_found_through_its_points() {
        let (slope, intercept, r_squared) = line(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]).unwrap();
        assert!((slope - 2.0).abs() < 1e-12 && (intercept - 1.0).abs() < 1e-12 && (r_squared - 1.0).abs() < 1e-12);
        assert_eq!(line(&[(1.0, 1.0), (1.0, 2.0)]), None);
    }
}
