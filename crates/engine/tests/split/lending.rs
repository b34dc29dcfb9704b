use std::net::TcpListener;
use std::sync::Arc;

use sterna_engine::split::Lender;
use sterna_engine::store::Store;
use sterna_engine::store::serve::serve;
use sterna_engine::transport::answer;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::store::most_bytes;

use super::CHUNKS;
use super::relay::Relay;

/// A host that lends, for as long as the test runs, behind a network that can be cut.
pub struct LendingHost {
    chunks: u32,
    pub store: Arc<Store>,
    _directory: tempfile::TempDir,
    pub relay: Arc<Relay>,
}

impl LendingHost {
    pub fn new() -> Self {
        Self::to_guests_of(CHUNKS)
    }

    pub fn to_guests_of(chunks: u32) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = Arc::new(Store::open(directory.path(), "lender".into(), most_bytes(chunks)).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Arc::new(Relay::to(&listener.local_addr().unwrap().to_string(), u64::MAX));
        let shared = Arc::clone(&store);
        std::thread::spawn(move || {
            for call in listener.incoming() {
                let (call, store) = (call.unwrap(), Arc::clone(&shared));
                std::thread::spawn(move || {
                    let Ok((connection, hello)) = answer(call, None) else { return };
                    let _ = serve(connection, hello.key, &store, || u64::MAX);
                });
            }
        });
        Self { chunks, store, _directory: directory, relay }
    }

    pub fn lender(&self) -> Lender {
        Lender {
            peer: self.relay.address.clone(),
            mirror: None,
            parity: None,
            once: Default::default(),
            credentials: None,
            bytes: most_bytes(self.chunks),
            leaving: false,
        }
    }

    /// The pages that it has, with one for its note of each chunk.
    pub fn pages(&self) -> u64 {
        self.store.loans().iter().map(|loan| loan.used_bytes / PAGE_BYTES as u64).sum()
    }
}
