//! Who calls: what is done on a person's word is logged with it.

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

/// The process at the other end of the API's socket, by the kernel's word.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Its user and its number; `None` where the kernel does not say.
    who: Option<(u32, i32)>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Caller {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        let credentials = stream.io().peer_cred().ok();
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
