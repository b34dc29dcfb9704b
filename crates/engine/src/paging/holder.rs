//! Holders: who has pages of a machine that are not on its host.

/// Who holds a chunk's pages that are away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder(u8);

/// For each of the two hosts of a number what says that it alone is to be believed.
const ALONE: [u8; 2] = [64, 128];

impl Holder {
    /// The source, in post-copy.
    pub const SOURCE: Self = Self(1);
    /// The most memory hosts of a guest.
    pub const MAX_HOSTS: usize = 16;

    /// The memory host of this number, which must be below [`MAX_HOSTS`](Self::MAX_HOSTS).
    #[must_use]
    pub fn host(number: usize) -> Option<Self> {
        (number < Self::MAX_HOSTS).then_some(Self(number as u8 + 2))
    }

    /// Of two memory hosts with this number the one at this place, 0 or 1, alone.
    #[must_use]
    pub fn one_of(number: usize, which: usize) -> Option<Self> {
        Some(Self(Self::host(number)?.0 | ALONE.get(which)?))
    }

    /// The place of the one that is to be believed alone, where two memory hosts have this number.
    #[must_use]
    pub fn alone(self) -> Option<usize> {
        ALONE.iter().position(|alone| self.0 & alone != 0)
    }

    /// The number of the memory host.
    #[must_use]
    pub fn host_number(self) -> Option<usize> {
        self.whole().0.checked_sub(2).map(usize::from)
    }

    /// Both of two.
    #[must_use]
    pub fn whole(self) -> Self {
        Self(self.0 & !(ALONE[0] | ALONE[1]))
    }

    /// As an entry names it.
    #[must_use]
    pub fn entry(self) -> u8 {
        self.0
    }

    /// As an entry names it. The number 0 means nobody.
    #[must_use]
    pub fn from_entry(number: u8) -> Option<Self> {
        let (holder, all) = (Self(number), ALONE[0] | ALONE[1]);
        let one = number & all != all && (number & all == 0 || holder.host_number().is_some());
        (one && (1..Self::MAX_HOSTS as u8 + 2).contains(&holder.whole().0)).then_some(holder)
    }
}
