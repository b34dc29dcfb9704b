//! A PostgreSQL on a host of the lab, for a guest that works with a database elsewhere.
//!
//! It is the distribution's, run beside whatever clusters the machine has: as its own user, with data, sockets and
//! shared memory that nobody else sees and that are removed with it.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};

use crate::command::{PATIENCE, output, wait_for};
use crate::error::{Context, Error, Result};
use crate::lab::{Host, PREFIX};
use crate::tools;

/// The port where it listens.
const PORT: u16 = 5432;
/// The user that it runs as: it refuses to be root.
const USER: &str = "postgres";
/// How long it may take to start, on a machine that has other work too.
const START: Duration = PATIENCE;
/// How long it may take to end; remaining processes are then killed.
const END: Duration = Duration::from_secs(5);

/// Settings for short trials whose data nobody needs afterwards: nobody waits for a disk, and nothing runs beside the
/// requests. Dynamic shared memory consists of files among the data, so that it is always removed with them.
const SETTINGS: [&str; 13] = [
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "wal_level=minimal",
    "max_wal_senders=0",
    "max_wal_size=4GB",
    "checkpoint_timeout=1h",
    "autovacuum=off",
    "jit=off",
    "shared_buffers=128MB",
    "max_connections=64",
    "dynamic_shared_memory_type=mmap",
    "log_min_messages=warning",
];

/// A PostgreSQL at work; dropping it ends it and removes its data.
pub struct Postgres {
    host: Host,
    programs: PathBuf,
    directory: PathBuf,
    child: Option<Child>,
}

impl Postgres {
    /// Makes an empty database on `host`, which anybody in the lab may use without a password as the user `postgres`.
    ///
    /// # Errors
    /// Where PostgreSQL is not installed or does not start; the message carries its words.
    pub fn start(host: &Host) -> Result<Self> {
        let directory = host.directory.join("postgres");
        let mut postgres = Self { host: host.clone(), programs: tools::postgres()?, directory, child: None };
        postgres.make_cluster()?;
        let mut command = postgres.as_user("postgres");
        command.arg("-D").arg(postgres.data()).arg("-k").arg(postgres.data());
        command.args(["-h", &host.address.to_string(), "-p", &PORT.to_string()]);
        command.args(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
        postgres.child = Some(host.spawn(&mut command, "postgres")?);
        wait_for("PostgreSQL's answer", START, || {
            if let Some(status) = postgres.child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                let words = std::fs::read_to_string(host.directory.join("postgres.log")).unwrap_or_default();
                return Err(Error::Usage(format!("PostgreSQL ended at once ({status}): {}", words.trim())));
            }
            Ok(postgres.query("SELECT 1").ok().map(drop))
        })?;
        Ok(postgres)
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((self.host.address, PORT))
    }

    /// Makes YCSB's table anew, of `rows` rows of 1 KiB. Half of each page stays free, so that updates find room
    /// without a vacuum.
    ///
    /// # Errors
    /// The error of PostgreSQL.
    pub fn load_ycsb(&self, rows: u32) -> Result<()> {
        let fields = |each: &dyn Fn(u32) -> String| (1..=10).map(each).collect::<Vec<_>>().join(", ");
        let columns = fields(&|number| format!("field{number} text"));
        let values = fields(&|number| format!("left(repeat(md5((key * 10 + {number})::text), 4), 100)"));
        self.query("DROP TABLE IF EXISTS usertable")?;
        self.query(&format!("CREATE TABLE usertable (ycsb_key int PRIMARY KEY, {columns}) WITH (fillfactor = 50)"))?;
        self.query(&format!("INSERT INTO usertable SELECT key, {values} FROM generate_series(0, {rows} - 1) key"))?;
        self.query("VACUUM ANALYZE usertable").map(drop)
    }

    /// Runs a statement and returns its rows, columns parted by `|`.
    ///
    /// # Errors
    /// The error of PostgreSQL.
    pub fn query(&self, statement: &str) -> Result<String> {
        let mut command = self.host.command(self.programs.join("psql"));
        command.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", USER, "-d", "postgres"]);
        command.args(["-h", &self.host.address.to_string(), "-p", &PORT.to_string(), "-c", statement]);
        output(&mut command).map(|rows| rows.trim_end().to_owned())
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Makes the files of an empty database.
    fn make_cluster(&self) -> Result<()> {
        let user = User::from_name(USER).context(|| format!("looking for the user {USER}"))?;
        let user =
            user.ok_or_else(|| Error::Usage(format!("there is no user {USER}: is PostgreSQL installed completely?")))?;
        std::fs::create_dir(&self.directory).context(|| format!("making {}", self.directory.display()))?;
        chown(&self.directory, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
            .context(|| format!("giving {} to {USER}", self.directory.display()))?;
        let mut command = self.as_user("initdb");
        command.arg("-D").arg(self.data());
        output(command.args(["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]))?;
        let network = format!("host all all {}/{PREFIX} trust\n", Ipv4Addr::from(network(self.host.address)));
        let file = self.data().join("pg_hba.conf");
        std::fs::write(&file, network).context(|| format!("writing {}", file.display()))
    }

    /// A command that runs one of its programs as its own user, on the host. System V's shared memory, which PostgreSQL
    /// marks its data with, is in a namespace that ends with the program: a killed server leaves none behind.
    fn as_user(&self, program: &str) -> Command {
        let mut command = self.host.command("unshare");
        let (user, group) = (format!("--reuid={USER}"), format!("--regid={USER}"));
        command.args(["--ipc", "--", "setpriv", &user, &group, "--clear-groups", "--"]);
        command.arg(self.programs.join(program)).current_dir(&self.directory);
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // "Immediate shutdown": its servers end with it, and nothing is written that would be removed anyway.
            if let Ok(pid) = i32::try_from(child.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGQUIT);
            }
            let until = Instant::now() + END;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        // Files that stay here are removed with the lab.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The lab's network that an address lies in.
fn network(address: Ipv4Addr) -> u32 {
    u32::from(address) & (u32::MAX << (32 - u32::from(PREFIX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_the_labs_own() {
        assert_eq!(Ipv4Addr::from(network(Ipv4Addr::new(10, 77, 3, 4))), Ipv4Addr::new(10, 77, 0, 0));
    }
}
