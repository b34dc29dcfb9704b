//! A destination's host in tests of what puts pages into their places.

use std::sync::Arc;

use sterna_api::Problem;
use sterna_protocol::spec::VmSpec;

use super::pool::Pool;
use crate::host::{Clone, DaemonId, DestinationHost, Incoming, MigrationId, Verdict};
use crate::paging::Pager;

/// A host with this much free memory, bytes; no other method is called.
#[derive(Debug)]
pub struct Room(pub u64);

impl DestinationHost for Room {
    fn identity(&self) -> DaemonId {
        DaemonId(0)
    }
    fn prepare(
        &self,
        _: MigrationId,
        _: &VmSpec,
        _: Option<&str>,
        _: Option<&Arc<Pool>>,
        _: bool,
        _: Option<Clone>,
    ) -> Result<Incoming, Problem> {
        unreachable!()
    }
    fn room_bytes(&self) -> u64 {
        self.0
    }
    fn commit(&self, _: MigrationId, _: bool) -> Result<(), Problem> {
        unreachable!()
    }
    fn started(&self, _: MigrationId, _: Incoming, _: Option<Arc<Pager>>, _: Option<&Problem>) {
        unreachable!()
    }
    fn pager(&self, _: MigrationId, _: Option<&str>) -> Result<Arc<Pager>, Problem> {
        unreachable!()
    }
    fn paged(&self, _: MigrationId) {
        unreachable!()
    }
    fn abort(&self, _: MigrationId, _: Option<Incoming>) {
        unreachable!()
    }
    fn verdict(&self, _: MigrationId, _: Option<&str>) -> Result<Verdict, Problem> {
        unreachable!()
    }
}
