//! Plots: SVG, and the same as PNG.

use std::path::Path;
use std::process::Command;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::command::output;
use crate::error::{Error, Result};

/// The size of a plot of lines, and the width of one of bars, pixels.
const SIZE: (u32, u32) = (960, 480);
/// Colours that people with any kind of colour vision can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(80, 80, 80),
];

/// Lines over a common axis.
#[derive(Debug, Clone, Default)]
pub struct LinePlot {
    /// The title over the plot.
    pub title: String,
    /// The text below the horizontal axis.
    pub x_label: String,
    /// The text beside the vertical axis.
    pub y_label: String,
    /// Name and points of each line.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
    /// Shaded spans of the horizontal axis, with a name.
    pub spans: Vec<(String, f64, f64)>,
}

/// Bars, one below the other, each under its name.
#[derive(Debug, Clone, Default)]
pub struct BarPlot {
    /// The title over the plot.
    pub title: String,
    /// What the values are.
    pub label: String,
    /// Name and value of each bar, from top to bottom.
    pub bars: Vec<(String, f64)>,
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

impl LinePlot {
    /// Writes `DIRECTORY/NAME.svg`, and `.png` where `rsvg-convert` is there.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn write(&self, directory: &Path, name: &str) -> Result<()> {
        write(directory, name, SIZE, |area| self.draw(area))
    }

    fn draw(&self, area: &DrawingArea<SVGBackend, Shift>) -> Drawn {
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let (low, high) = points().fold((f64::MAX, f64::MIN), |(low, high), (x, _)| (low.min(*x), high.max(*x)));
        let top = points().fold(0.0f64, |top, (_, y)| top.max(*y)).max(1e-9) * 1.15;
        let (low, high) = if low < high { (low, high) } else { (low.min(0.0), high.max(0.0) + 1.0) };
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(76)
            .build_cartesian_2d(low..high, 0.0..top)?;
        chart.configure_mesh().x_desc(&self.x_label).y_desc(&self.y_label).light_line_style(WHITE).draw()?;
        for (index, (span, from, to)) in self.spans.iter().enumerate() {
            let shade = COLOURS[(index + 4) % COLOURS.len()].mix(0.25);
            let shape = Rectangle::new([(*from, 0.0), (*to, top)], shade.filled());
            let legend = move |(x, y): (i32, i32)| Rectangle::new([(x, y - 6), (x + 18, y + 6)], shade.filled());
            chart.draw_series(std::iter::once(shape))?.label(span).legend(legend);
        }
        for (index, (line, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let legend = move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
            chart
                .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
                .label(line)
                .legend(legend);
            // A line of few points shows where they are.
            if points.len() <= 20 {
                chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        Ok(())
    }
}

impl BarPlot {
    /// Writes `DIRECTORY/NAME.svg`, and `.png` where `rsvg-convert` is there.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn write(&self, directory: &Path, name: &str) -> Result<()> {
        let height = 110 + 44 * u32::try_from(self.bars.len().max(1)).unwrap_or(1);
        write(directory, name, (SIZE.0, height), |area| self.draw(area))
    }

    fn draw(&self, area: &DrawingArea<SVGBackend, Shift>) -> Drawn {
        let most = self.bars.iter().fold(0.0f64, |most, (_, value)| most.max(*value)).max(1e-9) * 1.15;
        let count = self.bars.len().max(1) as f64;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(44)
            .build_cartesian_2d(0.0..most, 0.0..count)?;
        chart.configure_mesh().disable_y_mesh().disable_y_axis().x_desc(&self.label).light_line_style(WHITE).draw()?;
        for (index, (name, value)) in self.bars.iter().enumerate() {
            let above = count - index as f64;
            let shape = Rectangle::new([(0.0, above - 0.45), (*value, above - 0.92)], COLOURS[0].filled());
            let text = format!("{name}: {}", crate::result::show_number(*value));
            chart.draw_series(std::iter::once(shape))?;
            chart.draw_series(std::iter::once(Text::new(text, (0.0, above - 0.05), ("sans-serif", 15))))?;
        }
        Ok(())
    }
}

fn write(
    directory: &Path,
    name: &str,
    size: (u32, u32),
    draw: impl FnOnce(&DrawingArea<SVGBackend, Shift>) -> Drawn,
) -> Result<()> {
    let (svg, png) = (directory.join(format!("{name}.svg")), directory.join(format!("{name}.png")));
    let failed =
        |error: Box<dyn std::error::Error>| Error::Form { what: svg.display().to_string(), reason: error.to_string() };
    {
        let area = SVGBackend::new(&svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(|error| failed(error.into()))?;
        draw(&area).map_err(failed)?;
        area.present().map_err(|error| failed(error.into()))?;
    }
    // The plotting library draws letters into bitmaps only with a font library of its own; librsvg has one.
    match output(Command::new("rsvg-convert").arg("--output").arg(&png).arg(&svg)) {
        // Minutes of measuring must not be lost because the second form of a picture fails.
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("{} is not made: rsvg-convert (librsvg2-bin) is absent", png.display());
            Ok(())
        }
        made => made.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, draw: impl FnOnce(&Path) -> Result<()>) {
        if Command::new("rsvg-convert").arg("--version").output().is_err() {
            return eprintln!("skipped: rsvg-convert (librsvg2-bin) is absent");
        }
        let directory = tempfile::tempdir().unwrap();
        draw(directory.path()).unwrap();
        let svg = std::fs::read_to_string(directory.path().join(format!("{name}.svg"))).unwrap();
        assert!(svg.contains("requests per second"), "the axis has its name");
        assert!(std::fs::read(directory.path().join(format!("{name}.png"))).unwrap().starts_with(b"\x89PNG"));
    }

    #[test]
    fn lines_are_written_as_svg_and_png() {
        let plot = LinePlot {
            title: "guest throughput".into(),
            x_label: "seconds".into(),
            y_label: "requests per second".into(),
            lines: vec![("sets".into(), (0..50).map(|x| (f64::from(x) / 10.0, f64::from(x % 7))).collect())],
            spans: vec![("migration".into(), 1.0, 2.0)],
        };
        check("lines", |directory| plot.write(directory, "lines"));
        check("lines", |directory| LinePlot { lines: Vec::new(), ..plot.clone() }.write(directory, "lines"));
    }

    #[test]
    fn bars_are_written_as_svg_and_png() {
        let plot = BarPlot {
            title: "a".into(),
            label: "requests per second".into(),
            bars: vec![("x".into(), 3.0), ("y".into(), 0.0)],
        };
        check("bars", |directory| plot.write(directory, "bars"));
    }
}
