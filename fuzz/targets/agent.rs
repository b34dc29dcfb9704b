//! Replies of the library inside QEMU, which may be in its guest's hands: through the client itself, over a socket.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sterna_engine::agent::{AddressRange, Advice};
use sterna_fuzz::{Answer, Library, sealed_memory};

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::start);

/// One answer: how, and its body.
type Given = (u8, Vec<u8>);

fuzz_target!(|given: Vec<Given>| {
    // Before the first request that breaks the connection, all are answered: those that are alike once each.
    let ask: [fn(&mut sterna_engine::agent::Agent); 7] = [
        |agent| drop(agent.hello()),
        |agent| {
            for block in agent.blocks().unwrap_or_default() {
                assert!(block.length > 0 && block.address.checked_add(block.length).is_some());
                assert!(block.offset.checked_add(block.length).is_some() && block.page_size.is_power_of_two());
            }
        },
        |agent| drop(agent.open_userfaultfd(None, 0)),
        |agent| drop(agent.take_userfaultfd()),
        |agent| drop(agent.advise(Advice::Cold, &[AddressRange { address: 0, length: 4096 }])),
        |agent| drop(agent.close_userfaultfd()),
        |agent| drop(agent.discard_log().map(|mut log| log.drain())),
    ];
    for (request, answer) in ask.iter().zip(given) {
        request(&mut LIBRARY.client(vec![parse(answer)]));
    }
});

fn parse((how, body): Given) -> Answer {
    Answer {
        bare: how & 1 != 0,
        status: if how & 2 != 0 { u32::from(how >> 4) } else { 0 },
        errno: u32::from(how >> 3),
        descriptor: (how & 4 != 0).then(|| sealed_memory(&body, 0)),
        body,
    }
}
