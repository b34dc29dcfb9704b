//! Decoding of what QEMU says over QMP, one JSON object per line. No byte of it is trusted.

use serde_json::Value;

use crate::vmm::EventTime;

/// The longest line taken from QEMU, bytes. Its longest known reply, the schema, is under 1 MiB.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// The longest line of an event, bytes. Events are kept until a caller asks for them. QEMU's have some hundred bytes.
const MAX_EVENT_BYTES: usize = 16 << 10;

/// QEMU's version: major, minor, micro.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Something that happened in QEMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, such as `STOP`.
    pub name: String,
    /// The time of the event, by QEMU's clock.
    pub time: EventTime,
    /// The event's data; null where it has none.
    pub data: Value,
}

impl Event {
    /// The new status, where this is a migration's change of status.
    pub fn migration_status(&self) -> Option<&str> {
        if self.name == "MIGRATION" { self.data.get("status")?.as_str() } else { None }
    }
}

/// One line from QEMU.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first line of a connection.
    Greeting(Version),
    /// A command's result.
    Return {
        /// The command's number; absent only in answers to what QEMU could not parse.
        id: Option<u64>,
        /// The result.
        value: Value,
    },
    /// A command's refusal.
    Error {
        /// The command's number.
        id: Option<u64>,
        /// The reason, for people.
        reason: String,
    },
    /// An event.
    Event(Event),
}

/// A line that is no QMP message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A line longer than [`MAX_LINE_BYTES`].
    #[error("a line of QMP is longer than {MAX_LINE_BYTES} bytes")]
    TooLong,
    /// An event longer than 16 KiB.
    #[error("an event of QMP is longer than {MAX_EVENT_BYTES} bytes")]
    LongEvent,
    /// A line that is not JSON.
    #[error("a line of QMP is not JSON: {0}")]
    Json(String),
    /// A line that is JSON, but neither greeting, result, error nor event.
    #[error("a line of QMP is no message that is known")]
    Unknown,
}

impl Message {
    /// Reads one line, without its end.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that is not one of the four messages.
    pub fn decode(line: &[u8]) -> Result<Self, DecodeError> {
        let Value::Object(mut object) =
            serde_json::from_slice(line).map_err(|error| DecodeError::Json(error.to_string()))?
        else {
            return Err(DecodeError::Unknown);
        };
        let id = object.get("id").and_then(Value::as_u64);
        if let Some(greeting) = object.get("QMP") {
            let version = version(&greeting["version"]).ok_or(DecodeError::Unknown)?;
            return Ok(Self::Greeting(version));
        }
        if let Some(Value::String(name)) = object.remove("event") {
            if line.len() > MAX_EVENT_BYTES {
                return Err(DecodeError::LongEvent);
            }
            let time = event_time(&object).ok_or(DecodeError::Unknown)?;
            return Ok(Self::Event(Event { name, time, data: object.remove("data").unwrap_or_default() }));
        }
        if let Some(value) = object.remove("return") {
            return Ok(Self::Return { id, value });
        }
        if let Some(error) = object.get("error") {
            let reason = error["desc"].as_str().or(error["class"].as_str()).ok_or(DecodeError::Unknown)?;
            return Ok(Self::Error { id, reason: reason.to_owned() });
        }
        Err(DecodeError::Unknown)
    }
}

/// The version in a greeting's `version`.
fn version(value: &Value) -> Option<Version> {
    let part = |name: &str| u32::try_from(value["qemu"][name].as_u64()?).ok();
    Some(Version(part("major")?, part("minor")?, part("micro")?))
}

/// The time of an event. QEMU writes -1 for both parts where the host has no clock: then there is none.
fn event_time(object: &serde_json::Map<String, Value>) -> Option<EventTime> {
    let stamp = object.get("timestamp")?;
    let seconds = stamp["seconds"].as_u64()?;
    let microseconds = stamp["microseconds"].as_u64().filter(|&part| part < 1_000_000)?;
    Some(EventTime(seconds.checked_mul(1_000_000)?.checked_add(microseconds)?))
}

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// How many of `bytes` are known to hold no line's end: long replies come in many reads.
    searched: usize,
}

impl LineBuffer {
    /// Adds bytes that were read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line without its end, if one is there. Empty lines are skipped.
    ///
    /// # Errors
    /// [`DecodeError::TooLong`] where no end comes within [`MAX_LINE_BYTES`].
    pub fn next_line(&mut self) -> Result<Option<Vec<u8>>, DecodeError> {
        loop {
            let Some(found) = self.bytes[self.searched..].iter().position(|&byte| byte == b'\n') else {
                self.searched = self.bytes.len();
                return if self.searched > MAX_LINE_BYTES { Err(DecodeError::TooLong) } else { Ok(None) };
            };
            let rest = self.bytes.split_off(self.searched + found + 1);
            let mut line = std::mem::replace(&mut self.bytes, rest);
            self.searched = 0;
            while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
                line.pop();
            }
            if !line.is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_kind_of_message_is_recognised() {
        let greeting = br#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;
        assert_eq!(Message::decode(greeting), Ok(Message::Greeting(Version(7, 2, 22))));
        assert_eq!(
            Message::decode(br#"{"return": {}, "id": 4}"#),
            Ok(Message::Return { id: Some(4), value: Value::Object(Default::default()) })
        );
        assert_eq!(
            Message::decode(br#"{"id": 5, "error": {"class": "GenericError", "desc": "no"}}"#),
            Ok(Message::Error { id: Some(5), reason: "no".into() })
        );
        let event = br#"{"timestamp": {"seconds": 12, "microseconds": 34}, "event": "MIGRATION", "data": {"status": "active"}}"#;
        let Ok(Message::Event(event)) = Message::decode(event) else { panic!("no event") };
        assert_eq!((event.time, event.migration_status()), (EventTime(12_000_034), Some("active")));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for line in ["", "{", "[]", "7", "{}", r#"{"event": "STOP"}"#, r#"{"QMP": {}}"#, r#"{"error": {}}"#] {
            assert!(Message::decode(line.as_bytes()).is_err(), "{line}");
        }
        let clockless = br#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}"#;
        assert_eq!(Message::decode(clockless), Err(DecodeError::Unknown));
        let far = br#"{"timestamp": {"seconds": 18446744073709551615, "microseconds": 0}, "event": "STOP"}"#;
        assert_eq!(Message::decode(far), Err(DecodeError::Unknown));
        let deep = "[".repeat(100_000);
        assert!(Message::decode(deep.as_bytes()).is_err());
    }

    #[test]
    fn a_line_without_end_is_given_up_at_the_limit() {
        let mut buffer = LineBuffer::default();
        for _ in 0..17 {
            buffer.push(&vec![b'x'; 1 << 20]);
        }
        assert_eq!(buffer.next_line(), Err(DecodeError::TooLong));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = Message::decode(&bytes);
        }

        #[test]
        fn any_damage_to_a_message_gives_a_message_or_an_error(
            at in 0usize..120, byte in any::<u8>(), cut in 0usize..120,
        ) {
            let mut line = br#"{"timestamp": {"seconds": 12, "microseconds": 34}, "event": "MIGRATION", "data": {"status": "active"}}"#.to_vec();
            let length = line.len();
            line[at % length] = byte;
            let _ = Message::decode(&line);
            let _ = Message::decode(&line[..cut % length]);
        }

        #[test]
        fn lines_come_out_whole_however_the_stream_is_cut(
            lines in proptest::collection::vec("[a-z]{1,40}", 1..20), size in 1usize..50,
        ) {
            let stream: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
            let mut buffer = LineBuffer::default();
            let mut found = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                buffer.push(piece);
                while let Some(line) = buffer.next_line().unwrap() {
                    found.push(String::from_utf8(line).unwrap());
                }
            }
            prop_assert_eq!(found, lines);
        }
    }
}
