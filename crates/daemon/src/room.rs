//! The memory that this host can still give: what host and cgroups leave, and the room of the RAM file system.

use std::path::Path;

/// The bytes that can still be given to guests whose RAM lies on the file system of `ram_dir`.
#[must_use]
pub fn room_bytes(ram_dir: &Path) -> u64 {
    let memory = sterna_sys::memory::room_bytes().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot tell how much memory is left");
        u64::MAX
    });
    let file_system =
        std::fs::File::open(ram_dir).ok().and_then(|dir| sterna_sys::file::free_bytes(&dir).ok().flatten());
    memory.min(file_system.unwrap_or(u64::MAX))
}

/// All memory of the host, bytes.
#[must_use]
pub fn total_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_some_room_and_less_than_all_memory() {
        let room = room_bytes(Path::new("/dev/shm"));
        assert!(room > 0 && room <= total_bytes(), "{room}");
    }
}
