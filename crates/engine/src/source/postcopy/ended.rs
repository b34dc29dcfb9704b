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
    /// The memory that pages were in ended here with its process, before these many pages were sent.
    Lost(u64),
    /// A user gave it up.
    GivenUp,
}

/// The results that were learned when the last page was there.
#[derive(Debug)]
pub struct Completed {
    /// The destination's account.
    pub account: PostcopyAccount,
    /// The comparison of both sides' pages.
    pub verify: Verify,
    /// The moment when the last page was there.
    pub at: Instant,
}
