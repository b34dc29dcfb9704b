//! The listener: it takes calls and brings the connections of a session together.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_protocol::hello::{Features, Role};

use super::{Agreed, Call, serve_session};
use crate::error::MigrateError;
use crate::host::DestinationHost;
use crate::transport::control::Answering;
use crate::transport::refusal::TlsError;
use crate::transport::{SessionKey, answer};

/// The most connections that may be open at once: further ones are closed.
const MAX_CONNECTIONS: usize = 512;

/// The sessions that wait for connections, by their names.
type Sessions = Arc<Mutex<HashMap<u128, Founder>>>;

/// A session's founder, and the channel that hands the session its other connections.
struct Founder {
    peer: Option<String>,
    calls: Sender<Call>,
}

/// Takes calls for ever, each on a thread of its own.
pub fn serve(listener: &TcpListener, host: &Arc<dyn DestinationHost>) {
    let sessions = Sessions::default();
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                // Most likely no descriptor is left: others will be closed.
                tracing::warn!(%error, "cannot take a call");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let place = Place::take(&open);
        let Some(place) = place else {
            tracing::warn!("more than {MAX_CONNECTIONS} connections: hanging up on the next");
            continue;
        };
        let (sessions, host) = (Arc::clone(&sessions), Arc::clone(host));
        let spawned = std::thread::Builder::new().name("incoming".into()).spawn(move || {
            let _place = place;
            if let Err(error) = take(stream, &sessions, host.as_ref()) {
                tracing::info!(%error, "a call failed");
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot take a call");
        }
    }
}

/// Takes one call: a control connection, or one to a memory host, is served here to its end; the others are handed to
/// their session.
fn take(stream: TcpStream, sessions: &Sessions, host: &dyn DestinationHost) -> Result<(), MigrateError> {
    let (stream, hello) = answer(stream, host.credentials().as_deref())?;
    if hello.role == Role::Store {
        let store = host.store().ok_or(MigrateError::Request("this host lends no memory"))?;
        return crate::store::serve::serve(stream, hello.key, &store, || host.room_bytes());
    }
    let peer = stream.peer().map(String::from);
    let key = SessionKey { session: hello.session, key: hello.key, needed: Features::NONE };
    if hello.role != Role::Control {
        let calls = match lock(sessions).get(&hello.session) {
            // Only the daemon that began a session may go on with it.
            Some(founder) if founder.peer != peer => {
                return Err(TlsError::Intruder { name: peer.unwrap_or_default() }.into());
            }
            founder => founder.map(|founder| founder.calls.clone()),
        };
        return calls
            .and_then(|calls| calls.send((hello.role, stream)).ok())
            .ok_or(MigrateError::Request("a connection of a session that does not wait for one"));
    }
    let (sender, received) = channel();
    // A second control connection of the same session asks for a verdict: it must not take the first one's calls.
    let founded = {
        let mut sessions = lock(sessions);
        let vacant = !sessions.contains_key(&hello.session);
        if vacant {
            sessions.insert(hello.session, Founder { peer, calls: sender });
        }
        vacant
    };
    let _founded = founded.then(|| Founded { sessions: Arc::clone(sessions), session: hello.session });
    let agreed = Agreed { version: stream.version(), features: hello.features.common(Features::KNOWN) };
    serve_session(key, agreed, Answering::new(stream, key.key), received, host);
    Ok(())
}

fn lock(sessions: &Sessions) -> MutexGuard<'_, HashMap<u128, Founder>> {
    sessions.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session that waits for connections, until it is dropped.
struct Founded {
    sessions: Sessions,
    session: u128,
}

impl Drop for Founded {
    fn drop(&mut self) {
        lock(&self.sessions).remove(&self.session);
    }
}

/// One of the places for open connections.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Option<Self> {
        let taken = open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < MAX_CONNECTIONS).then_some(n + 1));
        taken.ok().map(|_| Self(Arc::clone(open)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
