//! Where a guest is when its migration has ended.

/// Where the guest is when a migration has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// At the source, as it was before.
    Here,
    /// At the source, untouched: the destination receives as many machines as it may already, and can be asked again
    /// later.
    NotYet,
    /// At the destination; the source's VMM has ended.
    There,
    /// Unknown, because it was given away and nobody answers. It is stopped here until
    /// [`ask_verdict`](super::commit::ask_verdict) answers. After [`Verdict::Aborted`](crate::host::Verdict::Aborted),
    /// `vmm.rollback()` lets it run on here.
    Unknown,
    /// At the source, where it does not run yet: `vmm.rollback()` failed, and must be tried again until it works.
    NotGivenBack,
}
