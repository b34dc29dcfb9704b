//! How a migration ended after the switchover.

use std::time::Instant;

use sterna_api::Problem;
use sterna_api::report::Verify;
use sterna_protocol::message::PostcopyAccount;

/// How a migration after the switchover ended.
pub enum Ended {
    /// Every page is there.
    Paged(Option<Completed>),
    /// The guest has ended there.
    Gone(Problem),
    /// Somebody gave it up.
    GivenUp,
}

/// What was learned when the last page was there.
#[derive(Debug)]
pub struct Completed {
    /// What the destination saw.
    pub account: PostcopyAccount,
    /// The comparison of both sides.
    pub verify: Verify,
    /// When the last page was there.
    pub at: Instant,
}
