//! What QEMU says over QMP, cut into lines wherever reads happened to end.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_engine::vmm::qmp::{LineBuffer, Message};

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (bytes, cuts) = input;
    let mut pieces = LineBuffer::default();
    let mut cut_up = Vec::new();
    let mut rest = bytes.as_slice();
    for cut in cuts {
        let (piece, after) = rest.split_at(usize::from(cut).min(rest.len()));
        pieces.push(piece);
        drain(&mut pieces, &mut cut_up);
        rest = after;
    }
    pieces.push(rest);
    drain(&mut pieces, &mut cut_up);

    let (mut whole, mut at_once) = (LineBuffer::default(), Vec::new());
    whole.push(&bytes);
    drain(&mut whole, &mut at_once);
    assert_eq!(cut_up, at_once, "where reads end makes no difference");
    for line in at_once {
        if let Ok(Message::Event(event)) = Message::decode(&line) {
            let _ = event.migration_status();
        }
    }
});

fn drain(buffer: &mut LineBuffer, lines: &mut Vec<Vec<u8>>) {
    while let Ok(Some(line)) = buffer.next_line() {
        assert!(!line.is_empty() && !line.contains(&b'\n'));
        lines.push(line);
    }
}
