use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use sterna_sys::path::open_regular;

/// How far back from the log's end is looked, bytes.
const TAIL_BYTES: u64 = 4096;

/// How many lines are quoted.
const TAIL_LINES: usize = 4;

/// The file that QEMU's standard error goes to: the only place where QEMU before 9.1 says why it refuses device state.
#[derive(Debug)]
pub struct ErrorLog {
    path: PathBuf,
    start: u64,
}

impl ErrorLog {
    /// Watches what is written to `path` from now on. The file need not exist yet.
    pub fn new(path: PathBuf) -> Self {
        let start = open_regular(&path).ok().and_then(|file| file.metadata().ok()).map_or(0, |about| about.len());
        Self { path, start }
    }

    /// The last lines written since [`ErrorLog::new`], in one; `None` where there are none.
    pub fn last_lines(&self) -> Option<String> {
        let mut file = open_regular(&self.path).ok()?;
        let length = file.metadata().ok()?.len();
        let from = self.start.max(length.saturating_sub(TAIL_BYTES));
        file.seek(SeekFrom::Start(from)).ok()?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let quoted = lines[lines.len().saturating_sub(TAIL_LINES)..].join("; ");
        // It ends up on somebody's terminal.
        let quoted = quoted.replace(char::is_control, " ");
        (!quoted.is_empty()).then_some(quoted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_lines_are_quoted_and_control_characters_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qemu.log");
        std::fs::write(&path, "old\n").unwrap();
        let log = ErrorLog::new(path.clone());
        assert_eq!(log.last_lines(), None);
        std::fs::write(&path, "old\nfirst \x1b[31m\n\nlast\n").unwrap();
        assert_eq!(log.last_lines().as_deref(), Some("first  [31m; last"));
    }

    /// Fails without [`open_regular`]: the first lines of a file that only root may read are quoted, and the pipe is
    /// waited for.
    #[test]
    fn a_link_or_a_pipe_in_the_logs_place_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (secret, path) = (directory.path().join("secret"), directory.path().join("qemu.log"));
        std::fs::write(&secret, "").unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        let log = ErrorLog::new(path.clone());
        std::fs::write(&secret, "root:x\n").unwrap();
        assert_eq!(log.last_lines(), None);
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!((ErrorLog::new(path).last_lines(), log.last_lines()), (None, None));
    }

    #[test]
    fn a_missing_log_says_nothing() {
        assert_eq!(ErrorLog::new("/nonexistent/log".into()).last_lines(), None);
    }
}
