//! A disk in another host's memory, which QEMU's NBD server offers: where people let a guest swap today that has more
//! memory than its host.

use std::fs::File;
use std::path::PathBuf;
use std::process::Child;

use super::qemu::ram_directory;
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::lab::Host;
use crate::tools;

/// Where the server listens.
const PORT: u16 = 10809;

/// A disk at work; dropping it ends its server and removes it.
pub struct MemoryDisk {
    server: Child,
    file: PathBuf,
    address: String,
}

impl MemoryDisk {
    /// A disk of so many bytes on a host of the lab.
    ///
    /// # Errors
    /// Where QEMU's storage daemon is not installed or does not start.
    pub fn start(host: &Host, bytes: u64) -> Result<Self> {
        let file = ram_directory(host)?.join("disk");
        let made = File::create(&file).and_then(|disk| disk.set_len(bytes));
        made.context(|| format!("making {}", file.display()))?;
        let mut command = host.command(tools::storage_daemon()?);
        command.args(["--blockdev", &format!("driver=file,node-name=disk,filename={}", file.display())]);
        command.args(["--nbd-server", &format!("addr.type=inet,addr.host={},addr.port={PORT}", host.address)]);
        command.args(["--export", "type=nbd,id=disk,node-name=disk,name=disk,writable=on"]);
        let server = host.spawn(&mut command, "nbd")?;
        let mut disk = Self { server, file, address: format!("{}:{PORT}", host.address) };
        let listens = || {
            if let Some(status) = disk.server.try_wait().context(|| "waiting for the NBD server".into())? {
                return Err(Error::Usage(format!("QEMU's storage daemon has ended ({status})")));
            }
            Ok(host.output("ss", &["-Hlnt"])?.contains(&disk.address).then_some(()))
        };
        wait_for("QEMU's NBD server", PATIENCE, listens)?;
        Ok(disk)
    }

    /// The disk as QEMU's `-drive file=` takes it.
    #[must_use]
    pub fn argument(&self) -> String {
        format!("nbd://{}/disk", self.address)
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}
