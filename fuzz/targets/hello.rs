//! The first 64 bytes of a connection, from anybody who can reach the port.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_protocol::hello::{HELLO_BYTES, Hello, HelloError};

fuzz_target!(|bytes: [u8; HELLO_BYTES]| {
    match Hello::decode(&bytes) {
        Ok(hello) => {
            // Whatever is understood is understood in the same way again.
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            let _ = hello.agree(&hello);
        }
        Err(error) => assert!(!matches!(error, HelloError::Features { .. }), "features are a matter of both sides"),
    }
});
