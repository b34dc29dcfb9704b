//! One migration's session with its source: the control connection, and threads that receive pages beside it.

use std::sync::mpsc::Receiver;

use sterna_protocol::frame::{Digester, FrameReader};
use sterna_protocol::hello::{Features, Role, Version};

use super::place::Placer;
use super::receive::{self, Arrivals};
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::host::{DestinationHost, MigrationId};
use crate::transport::SessionKey;
use crate::transport::connection::{Connection, HangUp};
use crate::transport::control::Answering;

/// A connection of a session, as the listener hands it on.
pub(crate) type Call = (Role, Connection);

/// What both sides of a session agreed on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agreed {
    /// The version that both speak.
    pub version: Version,
    /// What both can do.
    pub features: Features,
}

/// One migration's session with its source.
pub(super) struct Session<'a> {
    pub(super) id: MigrationId,
    pub(super) key: SessionKey,
    pub(super) agreed: Agreed,
    pub(super) host: &'a dyn DestinationHost,
    pub(super) control: Answering,
    pub(super) calls: Receiver<Call>,
}

impl Session<'_> {
    /// How both sides digest the migration's pages.
    pub(super) fn digester(&self) -> Digester {
        Digester::of(self.agreed.version, self.id.0)
    }

    /// Does `work` while a thread for each connection receives pages. They end with the work, however it ends.
    pub(super) fn with_receivers(
        &mut self,
        mut pages: Vec<Connection>,
        urgent: Option<Connection>,
        (placer, arrivals): (&Placer, &Arrivals),
        crew: &Crew,
        work: impl FnOnce(&mut Self) -> Result<(), MigrateError>,
    ) -> Result<(), MigrateError> {
        // The connection of requested pages comes last: it is in no round, so the numbers of the others stay as they
        // are.
        pages.extend(urgent);
        let hang_up = pages.iter().map(Connection::hang_up).collect::<Result<_, _>>();
        let hang_up = HangUpAll(hang_up.map_err(MigrateError::host("setting up the pages' way into RAM"))?);
        std::thread::scope(|scope| {
            // The threads read until their connection is shut down.
            let _hang_up = hang_up;
            for (index, stream) in pages.iter_mut().enumerate() {
                let reader = FrameReader::new(self.key.key, self.agreed.features);
                scope.spawn(move || {
                    crew.join();
                    receive::receive(index, stream, reader, placer, arrivals);
                });
            }
            work(self)
        })
    }
}

/// Connections that end when this is dropped, which wakes their readers.
struct HangUpAll(Vec<HangUp>);

impl Drop for HangUpAll {
    fn drop(&mut self) {
        self.0.iter().for_each(HangUp::now);
    }
}
