//! How much of a split guest is kept here: two marks, as a kernel has for its free memory.

use sterna_api::Unused;

/// How much of a guest may be here, and when its pages begin and end to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// More than that is too much, bytes.
    most: u64,
    /// Whether pages that the guest does not use count.
    unused: Unused,
}

impl Room {
    /// For all of any guest: nothing leaves.
    pub const ALL: Self = Self { most: u64::MAX, unused: Unused::Track };

    /// So many bytes.
    #[must_use]
    pub fn of(most: u64) -> Self {
        Self { most, ..Self::ALL }
    }

    /// The same, where pages that the guest does not use are somewhere, or nowhere.
    #[must_use]
    pub fn with(self, unused: Unused) -> Self {
        Self { unused, ..self }
    }

    /// Whether pages that the guest does not use are somewhere.
    #[must_use]
    pub fn unused(self) -> Unused {
        self.unused
    }

    /// No more than that, bytes.
    #[must_use]
    pub fn most(self) -> u64 {
        self.most
    }

    /// Pages leave once there are more: before it is too much, as the guest goes on using more meanwhile.
    #[must_use]
    pub fn high(self) -> u64 {
        self.most - self.most / 16
    }

    /// And until there are no more than that.
    #[must_use]
    pub fn low(self) -> u64 {
        self.most - self.most / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_to_leave_before_it_is_too_much() {
        let room = Room::of(160 << 20);
        assert_eq!((room.high() >> 20, room.low() >> 20), (150, 140));
        assert_eq!((Room::of(0).high(), Room::of(3).low()), (0, 3));
    }
}
