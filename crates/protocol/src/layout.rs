//! Pages and chunks.
