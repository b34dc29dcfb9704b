//! The demos: each shows on a page what Sterna does, to somebody who sees it for the first time.

/// A warm guest goes on as eleven.
pub mod fork;

/// A busy guest moves between two hosts.
pub mod migrate;

use std::path::Path;
use std::time::Instant;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde_json::Value;

use crate::error::{Context, Result};

/// What prints a step, with the time since this was made.
fn narrator() -> impl Fn(&str) {
    let start = Instant::now();
    move |step| println!("[{:5.1} s] {step}", start.elapsed().as_secs_f64())
}

/// An empty table.
fn table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table
}

/// Writes a demo's report.
fn write(document: &Value, file: &Path) -> Result<()> {
    let text = serde_json::to_vec_pretty(document).map_err(std::io::Error::other);
    let written = text.and_then(|text| std::fs::write(file, text));
    written.context(|| format!("writing {}", file.display()))
}
