//! The numbers by which migrations and daemons are known.

/// The number of a migration, the same at both ends: the source draws it at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct MigrationId(pub u128);

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The number of a daemon, or rather of its state directory: drawn at random once. Only this daemon can answer for its
/// records, at whatever address it is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DaemonId(pub u128);

impl std::fmt::Display for DaemonId {
    /// Shows the first third, which is enough to tell two numbers apart by eye.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:010x}", self.0 >> 88)
    }
}
