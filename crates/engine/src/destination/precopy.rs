//! Phase *precopy*: rounds of pages arrive while the guest runs at the source.

use sterna_protocol::message::{Reply, Request};

use super::landing::Landing;
use crate::error::MigrateError;
use crate::transport::clock::now_us;

/// Answers requests until the guest has stopped at the source.
///
/// # Errors
/// The link broke, the source aborted, or pages could not be placed. The source has been told, and the machine is given
/// back.
pub(super) fn precopy(landing: &mut Landing) -> Result<(), MigrateError> {
    landing.be_ready();
    loop {
        let request = landing.next_request()?;
        let reply = match &request {
            Request::Clock => Ok(Reply::Clock { now_us: now_us() }),
            Request::RoundEnd { round } => landing.arrived(*round),
            Request::Stopped => {
                landing.held.hold();
                landing.hurry();
                return landing.answer(&request, Ok(Reply::Holding));
            }
            _ => Err(MigrateError::Request("a request that does not belong here")),
        };
        landing.answer(&request, reply)?;
    }
}
