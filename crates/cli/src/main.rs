//! Sterna.
fn main() {}
