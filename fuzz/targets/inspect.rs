//! What QEMU answers when it is asked what it is made of: each answer another JSON, through the client itself.
#![no_main]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use sterna_engine::vmm::qemu::{BalloonDevice, inspect};
use sterna_engine::vmm::qmp::Qmp;

/// An answer is refused, or returns a value: the given one, or what fits most questions.
type Answer = (u8, String);

const LIKELY: [&str; 8] = [
    r#"{"status":"running","running":true}"#,
    r#"[{"id":"ram","size":67108864,"share":true}]"#,
    r#"[{"node-name":"disk","cache":{"direct":true}}]"#,
    r#"[{"name":"dev","type":"child<vfio-pci>"}]"#,
    r#""pc-q35-7.2-machine""#,
    r#"{"base-memory":67108864,"plugged-memory":18446744073709551615}"#,
    r#"[{"qom-path":"/machine/unattached/device[0]","target":"x86_64"}]"#,
    r#"{"actual":67108864,"blocked-reasons":["one"]}"#,
];

fuzz_target!(|answers: Vec<Answer>| {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    let version = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":0},"package":""},"capabilities":[]}}"#;
    let mut text = format!("{version}\n{{\"return\":{{}},\"id\":1}}\n");
    for (number, (how, value)) in answers.iter().enumerate() {
        let value = if how % 4 == 0 { value } else { LIKELY[usize::from(how / 4) % LIKELY.len()] };
        // A line break would be another message.
        let value = value.replace('\n', " ");
        text.push_str(&match how % 8 {
            7 => format!("{{\"error\":{{\"class\":\"GenericError\",\"desc\":\"no\"}},\"id\":{}}}\n", number + 2),
            _ => format!("{{\"return\":{value},\"id\":{}}}\n", number + 2),
        });
    }
    // What does not fit into the socket is not said.
    theirs.set_nonblocking(true).expect("a setting");
    let _ = theirs.write_all(text.as_bytes());
    theirs.shutdown(Shutdown::Write).expect("an end");
    let Ok(mut qmp) = Qmp::new(ours, Duration::from_secs(5)) else { return };
    if let Ok(about) = inspect(&mut qmp) {
        let _ = about.immovable_ram();
    }
    if let Ok(Some(balloon)) = BalloonDevice::find(&mut qmp, Duration::from_secs(5)) {
        let _ = balloon.look(&mut qmp, Duration::from_secs(5));
    }
});
