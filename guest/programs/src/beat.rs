/// Bytes of a heartbeat's datagram.
pub const BEAT_BYTES: usize = 16;

/// One heartbeat: a numbered sign of life, sent every millisecond.
///
/// On the wire: its fields in this order, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Counts up by one for each beat sent: a hole in the numbers is a datagram lost on the way.
    pub sequence: u64,
    /// The guest's monotonic clock when it was sent, in nanoseconds. It stands still while the guest does.
    pub guest_ns: u64,
}

impl Beat {
    /// The datagram.
    #[must_use]
    pub fn to_bytes(self) -> [u8; BEAT_BYTES] {
        let mut bytes = [0; BEAT_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.guest_ns.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_is_its_number_and_its_time_little_endian() {
        let beat = Beat { sequence: 0x0102, guest_ns: 0xff << 56 };
        assert_eq!(beat.to_bytes(), [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff]);
    }
}
