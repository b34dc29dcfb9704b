use std::fmt;
use std::str::FromStr;

/// One heartbeat: a numbered sign of life, sent every millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Counts up by one for each beat sent: a hole in the numbers is a datagram lost on the way.
    pub sequence: u64,
    /// The guest's monotonic clock when it was sent, in nanoseconds. It stands still while the guest does.
    pub guest_ns: u64,
}

impl fmt::Display for Beat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "HEARTBEAT sequence={} guest_ns={}", self.sequence, self.guest_ns)
    }
}

/// This is no heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotABeat;

impl FromStr for Beat {
    type Err = NotABeat;

    fn from_str(line: &str) -> Result<Self, NotABeat> {
        let mut words = line.trim_end().split(' ');
        if words.next() != Some("HEARTBEAT") {
            return Err(NotABeat);
        }
        let mut field = |name: &str| {
            let (key, value) = words.next().and_then(|word| word.split_once('=')).ok_or(NotABeat)?;
            if key == name { value.parse().map_err(|_| NotABeat) } else { Err(NotABeat) }
        };
        Ok(Self { sequence: field("sequence")?, guest_ns: field("guest_ns")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_reads_back_as_it_was_written() {
        let beat = Beat { sequence: 17, guest_ns: u64::MAX };
        assert_eq!(beat.to_string().parse(), Ok(beat));
    }

    #[test]
    fn other_lines_are_no_beats() {
        for line in ["", "HEARTBEAT", "HEARTBEAT sequence=1", "HEARTBEAT guest_ns=1 sequence=1", "CHECKER ok bad=0"] {
            assert_eq!(line.parse::<Beat>(), Err(NotABeat), "{line}");
        }
    }
}
