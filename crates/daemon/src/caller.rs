//! The caller of the API: actions on a person's word are logged with it.

use tokio::net::UnixStream;

/// The process at the other end of the API's socket, as the kernel names it.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Its user and its process number; `None` where the kernel does not tell.
    who: Option<(u32, i32)>,
}

impl Caller {
    /// The caller at the other end of a connection.
    #[must_use]
    pub fn of(stream: &UnixStream) -> Self {
        let credentials = stream.peer_cred().ok();
        Self { who: credentials.map(|credentials| (credentials.uid(), credentials.pid().unwrap_or_default())) }
    }
}

impl std::fmt::Display for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.who {
            Some((uid, pid)) => write!(f, "user {uid}, process {pid}"),
            None => f.write_str("unknown"),
        }
    }
}
