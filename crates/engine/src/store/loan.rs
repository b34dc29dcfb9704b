use sterna_protocol::store::Holdings;

/// What a store has lent to one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loan {
    /// The guest's number.
    pub guest: u128,
    /// How often it has changed hands.
    pub epoch: u64,
    /// What was granted, bytes.
    pub granted_bytes: u64,
    /// What is used of it, bytes.
    pub used_bytes: u64,
}

impl Loan {
    /// Of what there is of a guest.
    pub(super) fn of(holdings: &Holdings) -> Self {
        let claim = holdings.claim();
        let (granted_bytes, used_bytes) = (holdings.granted_bytes(), holdings.used_bytes());
        Self { guest: claim.guest, epoch: claim.epoch, granted_bytes, used_bytes }
    }
}

/// A guest's number, as messages show it.
#[derive(Debug, Clone, Copy)]
pub struct Number(pub u128);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
