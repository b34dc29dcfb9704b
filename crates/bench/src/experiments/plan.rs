//! The plan of an experiment: how its runs are judged and drawn, and how its rows are tried. A plan is made without a
//! lab, so that runs which were kept are judged and drawn again anywhere.

use std::path::Path;

use super::record::{Judge, Record};
use crate::error::Result;
use crate::result::{Run, Target};

/// The function that draws the plots of these runs into a directory.
type Draw = Box<dyn Fn(&[Run], &Path) -> Result<()>>;

/// The function that tries the rows and adds them to the record.
type Try = Box<dyn FnOnce(&mut Record) -> Result<()>>;

/// How an experiment tries, judges and draws its rows.
pub(super) struct Plan {
    try_rows: Try,
    judge: Judge,
    draw: Draw,
}

impl Plan {
    /// A plan that tries rows in this way; it has no targets and no plots yet.
    pub(super) fn new(try_rows: impl FnOnce(&mut Record) -> Result<()> + 'static) -> Self {
        Self { try_rows: Box::new(try_rows), judge: Box::new(|_| Ok(Vec::new())), draw: Box::new(|_, _| Ok(())) }
    }

    /// Sets how its targets are judged.
    pub(super) fn judged(self, judge: impl Fn(&[Run]) -> Result<Vec<Target>> + 'static) -> Self {
        Self { judge: Box::new(judge), ..self }
    }

    /// Sets how its plots are drawn.
    pub(super) fn drawn(self, draw: impl Fn(&[Run], &Path) -> Result<()> + 'static) -> Self {
        Self { draw: Box::new(draw), ..self }
    }

    /// Tries the rows, judges them after each, and draws them at the end.
    ///
    /// # Errors
    /// Where it could not go on, or a plot cannot be written; the record keeps the rows until then.
    pub(super) fn carry_out(self, record: &mut Record) -> Result<()> {
        record.judge(self.judge);
        (self.try_rows)(record)?;
        (self.draw)(record.runs(), record.directory())
    }

    /// Draws the plots of these runs into a directory.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(super) fn draw(&self, runs: &[Run], directory: &Path) -> Result<()> {
        (self.draw)(runs, directory)
    }
}
