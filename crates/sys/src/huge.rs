//! Huge pages on this host: what the kernel makes of memory by itself, and pools for hugetlbfs.

use std::path::Path;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The size of the huge pages that the kernel makes of memory by itself (transparent huge pages), bytes; `None` where
/// it has none.
#[must_use]
pub fn transparent_bytes() -> Option<u64> {
    static BYTES: OnceLock<Option<u64>> = OnceLock::new();
    *BYTES.get_or_init(|| number(Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")).ok())
}

/// The huge pages of one size that this host keeps for hugetlbfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Size of a page, bytes.
    pub page_bytes: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages nobody uses.
    pub free: u64,
    /// Free pages that are promised to existing mappings.
    pub reserved: u64,
    /// Pages that the kernel may add to the pool when it runs out.
    pub overcommit: u64,
}

impl Pool {
    /// The bytes that a new mapping is certain to get.
    pub fn available_bytes(&self) -> u64 {
        self.free.saturating_sub(self.reserved).saturating_mul(self.page_bytes)
    }
}

/// The pools of this host, small pages first; none where the kernel has no hugetlbfs.
///
/// # Errors
/// `/sys` is there and cannot be read.
pub fn pools() -> Result<Vec<Pool>> {
    pools_in(Path::new("/sys/kernel/mm/hugepages"))
}

fn pools_in(directory: &Path) -> Result<Vec<Pool>> {
    let failed = |error| Error::new(format!("list {}", directory.display()), error);
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut pools = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let kib =
            name.to_str().and_then(|name| name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok());
        let Some(page_bytes) = kib.and_then(|kib| kib.checked_mul(1024)) else { continue };
        let read = |file: &str| number(&entry.path().join(file));
        pools.push(Pool {
            page_bytes,
            total: read("nr_hugepages")?,
            free: read("free_hugepages")?,
            reserved: read("resv_hugepages")?,
            overcommit: read("nr_overcommit_hugepages")?,
        });
    }
    pools.sort_by_key(|pool| pool.page_bytes);
    Ok(pools)
}

fn number(path: &Path) -> Result<u64> {
    let doing = || format!("read {}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| Error::new(doing(), error))?;
    text.trim().parse().map_err(|_| Error::malformed(doing(), "it holds no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_read_from_their_directories_and_sorted() {
        let sys = tempfile::tempdir().unwrap();
        for (name, free) in [("hugepages-1048576kB", "1\n"), ("hugepages-2048kB", "7\n"), ("unrelated", "x")] {
            let pool = sys.path().join(name);
            std::fs::create_dir(&pool).unwrap();
            for (file, text) in [
                ("nr_hugepages", "9\n"),
                ("free_hugepages", free),
                ("resv_hugepages", "3"),
                ("nr_overcommit_hugepages", "0"),
            ] {
                std::fs::write(pool.join(file), text).unwrap();
            }
        }
        let pools = pools_in(sys.path()).unwrap();
        assert_eq!(pools.iter().map(|pool| pool.page_bytes).collect::<Vec<_>>(), [2 << 20, 1 << 30]);
        assert_eq!(pools[0].available_bytes(), 4 * (2 << 20));
        assert_eq!(pools[1].available_bytes(), 0, "fewer are free than are promised");
        assert_eq!(pools_in(&sys.path().join("absent")).unwrap(), []);
    }
}
