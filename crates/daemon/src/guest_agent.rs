//! The guest's clock after a long pause: a program inside the guest that listens at a channel of QEMU's
//! (`qemu-guest-agent`) is asked to set it.
//!
//! Nobody waits for that. A guest without such a program, or one that is busy or hostile, says nothing, or anything:
//! the question has a time limit, and the answer a size. And the time is told only to who has just answered: what is
//! written to a channel that somebody else has open, or to a program that has not started yet, is read at any later
//! time.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use sterna_sys::host::random_u128;
use sterna_sys::path::connect;

use crate::machines::record::VmRecord;
use crate::qemu::arguments::{Item, named, parse};

/// The channel's name, the same for every guest.
const CHANNEL: &str = "org.qemu.guest_agent.0";
/// How long the program may take for all of it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The most that is read of an answer, bytes.
const MOST: usize = 4096;
/// What stands before a question, and is answered before its answer: whatever came before is no part of it.
const DELIMITER: u8 = 0xFF;

/// Has the clock of a guest that runs again be set, beside everything else, where its arguments name a channel.
pub fn set_clock_later(record: &VmRecord) {
    let Some(path) = channel(&named(&parse(&record.arguments), &record.name)) else { return };
    let vm = record.name.clone();
    let work = move || match set_clock(&path) {
        Ok(()) => tracing::info!(vm, "its clock is set"),
        Err(error) => tracing::info!(vm, %error, "its guest agent has not set its clock"),
    };
    if let Err(error) = std::thread::Builder::new().name("clock".into()).spawn(work) {
        tracing::warn!(vm = %record.name, %error, "its clock is not set");
    }
}

/// The socket of the channel, where arguments name one at which QEMU listens.
fn channel(items: &[Item]) -> Option<PathBuf> {
    let of = |option: &str, key: &str, value: &str| {
        items.iter().find(|item| item.option == option && item.word(key).as_deref() == Some(value))
    };
    let id = of("device", "name", CHANNEL)?.word("chardev")?;
    let back_end = of("chardev", "id", &id)?;
    back_end.get("path").filter(|path| path.starts_with('/')).map(PathBuf::from)
}

/// Sets the clock of the guest behind this channel to that of the host.
///
/// # Errors
/// Nobody listens, nobody answers in time, or the answer is none.
fn set_clock(path: &Path) -> Result<()> {
    let mut channel = Channel { stream: connect(path)?, deadline: Instant::now() + TIMEOUT };
    channel.stream.set_nonblocking(false)?;
    let number = (random_u128() as u64) >> 12;
    let answer = channel.ask("guest-sync-delimited", &json!({ "id": number }), true).map_err(unanswered)?;
    if answer["return"].as_u64() != Some(number) {
        return Err(Error::new(ErrorKind::InvalidData, "it answers what it was not asked"));
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(Error::other)?;
    let answer = channel.ask("guest-set-time", &json!({ "time": u64::try_from(now.as_nanos()).unwrap_or(0) }), false);
    match answer.map_err(unanswered)?.get("return") {
        Some(_) => Ok(()),
        None => Err(Error::other("it refuses to")),
    }
}

/// What it means that a socket has nothing to read in time.
fn unanswered(error: Error) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::new(
            ErrorKind::TimedOut,
            format!("it has not answered within {TIMEOUT:?}, or another program is connected to its socket"),
        ),
        _ => error,
    }
}

struct Channel {
    stream: UnixStream,
    deadline: Instant,
}

impl Channel {
    /// The answer to a question, in one line.
    fn ask(&mut self, command: &str, arguments: &Value, delimited: bool) -> Result<Value> {
        let question = json!({ "execute": command, "arguments": arguments }).to_string();
        let mut line = Vec::from_iter(delimited.then_some(DELIMITER));
        line.extend(question.bytes().chain(*b"\n"));
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write_all(&line)?;
        let mut answer: Vec<u8> = Vec::new();
        let mut begun = !delimited;
        for _ in 0..MOST {
            let mut byte = [0];
            self.stream.set_read_timeout(Some(self.left()?))?;
            self.stream.read_exact(&mut byte)?;
            match byte[0] {
                DELIMITER => {
                    begun = true;
                    answer.clear();
                }
                b'\n' if begun && !answer.is_empty() => {
                    return serde_json::from_slice(&answer).map_err(Error::other);
                }
                other if begun => answer.push(other),
                _ => {}
            }
        }
        Err(Error::new(ErrorKind::InvalidData, "its answer has no end"))
    }

    fn left(&self) -> Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_channel_is_found_in_words_and_in_json_and_nothing_else_is_one() {
        let of = |line: &str| {
            let words: Vec<String> = line.split_whitespace().map(String::from).collect();
            channel(&named(&parse(&words), "web1"))
        };
        let chardev = "-chardev socket,id=q,path=/run/{name}.qga,server=on,wait=off -device virtio-serial";
        for device in [
            "virtserialport,chardev=q,name=org.qemu.guest_agent.0",
            "{\"driver\":\"virtserialport\",\"chardev\":\"q\",\"name\":\"org.qemu.guest_agent.0\"}",
        ] {
            assert_eq!(of(&format!("{chardev} -device {device}")), Some("/run/web1.qga".into()), "{device}");
        }
        assert_eq!(of(&format!("{chardev} -device virtserialport,chardev=q,name=org.other.0")), None);
        assert_eq!(of("-chardev pty,id=q -device virtserialport,chardev=q,name=org.qemu.guest_agent.0"), None);
    }

    /// Has `agent` answer at a channel; what setting the clock comes to.
    fn with(agent: impl FnOnce(UnixStream) + Send + 'static) -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("channel");
        let listener = UnixListener::bind(&path)?;
        let agent = std::thread::spawn(move || agent(listener.accept().expect("a caller").0));
        let set = set_clock(&path);
        agent.join().expect("the agent ends");
        set
    }

    fn question(reader: &mut impl BufRead) -> Value {
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line).expect("a question");
        let from = line.iter().position(|byte| *byte == b'{').unwrap_or(0);
        serde_json::from_slice(&line[from..]).unwrap_or_default()
    }

    #[test]
    fn an_agent_that_answers_is_told_the_time_whatever_it_had_to_say_before() {
        let (told, heard) = std::sync::mpsc::channel();
        let set = with(move |mut stream| {
            let mut reader = BufReader::new(stream.try_clone().expect("a descriptor"));
            let sync = question(&mut reader);
            assert_eq!(sync["execute"], "guest-sync-delimited");
            let answer = json!({ "return": sync["arguments"]["id"] });
            stream.write_all(b"{\"return\": 7}\nhalf a line").expect("room");
            stream.write_all(&[DELIMITER]).expect("room");
            writeln!(stream, "{answer}").expect("room");
            told.send(question(&mut reader)).expect("the test listens");
            writeln!(stream, "{}", json!({ "return": {} })).expect("room");
        });
        set.unwrap();
        let question = heard.recv().unwrap();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let time = question["arguments"]["time"].as_u64().unwrap();
        assert!(question["execute"] == "guest-set-time" && now.abs_diff(time) < 600_000_000_000, "{question}");
    }

    #[test]
    fn who_says_nothing_something_else_or_too_much_is_told_no_time_and_waited_for_no_longer() {
        let began = Instant::now();
        let silent = with(|stream| {
            let mut all = Vec::new();
            let _ = (&stream).read_to_end(&mut all);
            assert!(!String::from_utf8_lossy(&all).contains("guest-set-time"));
        });
        let silent = silent.unwrap_err().to_string();
        assert!(silent.contains("not answered within 2s") && began.elapsed() >= TIMEOUT, "{silent}");
        let other = with(|mut stream| {
            let _ = question(&mut BufReader::new(stream.try_clone().expect("a descriptor")));
            let _ = stream.write_all(b"\xff{\"return\": 1}\n");
        });
        assert!(other.unwrap_err().to_string().contains("not asked"));
        let endless = with(|mut stream| {
            // One that had gone before it was asked would be told nothing at all.
            let _ = question(&mut BufReader::new(stream.try_clone().expect("a descriptor")));
            let _ = stream.write_all(&[b'x'; 2 * MOST]);
        });
        assert!(endless.unwrap_err().to_string().contains("no end"));
    }
}
