//! A metric over what an experiment varies: a line for each mover and QEMU.

use std::path::Path;

use crate::error::Result;
use crate::plot::LinePlot;
use crate::result::Row;

/// A plot of lines: the names of its axes, and how metric and workload become a point.
pub(super) struct Curves<'a> {
    /// The title over the plot.
    pub(super) title: String,
    /// The name of what is varied.
    pub(super) x_label: &'a str,
    /// The metric, in words.
    pub(super) y_label: &'a str,
    /// The metric.
    pub(super) metric: &'a str,
    /// The place of a workload on the horizontal axis, by its name; `None` for one that is not in this plot.
    pub(super) x: &'a dyn Fn(&str) -> Option<f64>,
}

impl Curves<'_> {
    /// Writes the plot, unless it is empty.
    pub(super) fn write(&self, rows: &[Row], directory: &Path, name: &str) -> Result<()> {
        let lines = self.lines(rows);
        if lines.is_empty() {
            return Ok(());
        }
        let (title, x_label, y_label) = (self.title.clone(), self.x_label.into(), self.y_label.into());
        LinePlot { title, x_label, y_label, lines, spans: Vec::new() }.write(directory, name)
    }

    /// The lines: a name and points for each mover and QEMU, from left to right. Rows lie as they were measured.
    pub(super) fn lines(&self, rows: &[Row]) -> Vec<(String, Vec<(f64, f64)>)> {
        let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
        for row in rows {
            let (Some(x), Some(value)) = ((self.x)(row.word("workload")), row.metrics.get(self.metric)) else {
                continue;
            };
            let label = row.mover_and_qemu();
            match lines.iter_mut().find(|(line, _)| *line == label) {
                Some((_, points)) => points.push((x, value.median)),
                None => lines.push((label, vec![(x, value.median)])),
            }
        }
        lines.iter_mut().for_each(|(_, points)| points.sort_by(|one, other| one.0.total_cmp(&other.0)));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::baseline::{Method, Ram};
    use crate::result::rows;
    use crate::trial::Mover;

    #[test]
    fn each_mover_is_a_line_over_the_workloads_of_the_plot() {
        let mover = Mover::Qemu(Method::Vanilla, Ram::Plain);
        let runs = ["16 MiB", "8 MiB", "idle"].map(|name| sample(name, &mover, "10.0", &[("total_ms", 5.0)]));
        let x = |name: &str| name.strip_suffix(" MiB")?.parse().ok();
        let curves = Curves { title: String::new(), x_label: "", y_label: "", metric: "total_ms", x: &x };
        let expected = vec![("qemu precopy (QEMU 10.0)".to_owned(), vec![(8.0, 5.0), (16.0, 5.0)])];
        assert_eq!(curves.lines(&rows(&runs)), expected);
    }
}
