//! Sterna.
