//! Why free memory could not be taken.

use sterna_api::problem::Problem;
use sterna_api::{Blame, Code};
use sterna_introspect::Unfit;
use sterna_protocol::layout::LayoutError;

use crate::error::MigrateError;
use crate::memory::physical::GuestPhysicalError;
use crate::vmm::VmmError;

/// Why free memory could not be taken, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    /// Somebody cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// A migration stops the guest.
    #[error("the guest is about to run elsewhere")]
    Leaving,
    /// A page in which the guest's kernel says what is free is not here yet.
    #[error("the pages that tell what the guest holds free are not all here yet")]
    Arriving,
    /// Pages in which the guest's kernel says what is free are at memory hosts, and not all of them came.
    #[error(
        "what tells which memory the guest holds free was not found: some of the guest is at memory hosts, and did not come to be looked at"
    )]
    Elsewhere,
    /// Nothing is known of the guest's free pages.
    #[error("the guest's free pages cannot be told")]
    Unfit(#[from] Unfit),
    /// The VMM does not say where the guest sees its RAM, or which page tables it uses.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// What it says cannot be.
    #[error("where the guest sees its RAM cannot be told")]
    Map(#[from] GuestPhysicalError),
    /// Its RAM cannot be.
    #[error("the guest's RAM cannot be addressed")]
    Layout(#[from] LayoutError),
    /// All of its RAM is in huge pages.
    #[error("the guest's RAM is made of huge pages, which were set aside for it and are of no use to others")]
    HugePages,
    /// The kernel or the agent did not do what it was asked.
    #[error(transparent)]
    System(#[from] MigrateError),
}

impl ReclaimError {
    /// As people and programs see it.
    #[must_use]
    pub fn problem(&self) -> Problem {
        const OTHER_WAY: &str = "where the guest has a balloon, '--method balloon' does without looking into it";
        let (code, blame, hint) = match self {
            Self::System(error) => return error.problem(),
            Self::Cancelled => (Code::Cancelled, Blame::Request, None),
            Self::Leaving => {
                (Code::VmBusy, Blame::Request, Some("what the guest holds free can be taken where it runs"))
            }
            Self::Arriving => {
                (Code::GuestUnfit, Blame::Request, Some("try again when all pages of the guest are here"))
            }
            Self::Elsewhere => (
                Code::GuestUnfit,
                Blame::Peer,
                Some(
                    "'sterna show' says whether a memory host does not answer; of a guest that is no Linux nothing can be told so, and '--method balloon' takes what it has",
                ),
            ),
            Self::Unfit(unfit) if unfit.may_pass() => {
                (Code::GuestUnfit, Blame::Guest, Some("it may be starting, or very busy: try again later"))
            }
            Self::Unfit(_) => (Code::GuestUnfit, Blame::Guest, Some(OTHER_WAY)),
            Self::Vmm(VmmError::Gone { .. }) => (Code::QemuGone, Blame::Qemu, None),
            Self::Vmm(_) | Self::Map(_) => (Code::QemuFailed, Blame::Qemu, Some(OTHER_WAY)),
            Self::Layout(_) => (Code::RamLayout, Blame::Request, None),
            Self::HugePages => (Code::HugePages, Blame::Request, None),
        };
        let mut problem = Problem::from_error(code, blame, self);
        problem.hint = hint.map(String::from);
        problem
    }
}
