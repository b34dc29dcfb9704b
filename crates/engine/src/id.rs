//! The numbers by which migrations and daemons are known.

/// One migration, the same at both ends: drawn at random by the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct MigrationId(pub u128);

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A daemon, or rather its state directory: drawn at random once. What it has on record only it can answer for,
/// wherever it is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DaemonId(pub u128);

impl std::fmt::Display for DaemonId {
    /// The first third: enough to tell two apart by eye.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:010x}", self.0 >> 88)
    }
}
