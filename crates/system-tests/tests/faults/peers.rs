use sterna_protocol::hello::{Features, Hello, Role, Version};
use sterna_system_tests::proxy::{Babble, Stranger};

use crate::with_guest;

/// Tries to move the guest to somebody who is no daemon.
fn refused(babble: Babble, words: &'static [&'static str], problem: &'static str) {
    with_guest(|site| {
        let stranger = Stranger::start(site.here(), babble);
        let answer = site.attempt(Some(&stranger.address), &[]);
        answer.expect(1, words);
        assert_eq!(answer.problem(), problem, "{answer:#?}");
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_peer_that_cannot_be_reached_is_named() {
    with_guest(|site| {
        let answer = site.attempt(Some("127.0.0.1:9"), &[]);
        answer.expect(1, &["127.0.0.1:9", "the peer", "refused", "--listen"]);
        assert_eq!(answer.problem(), "peer-unreachable");
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_peer_that_never_answers_is_given_up() {
    refused(Babble::Nothing, &["the peer", "version"], "link-failed");
}

#[test]
fn a_peer_that_speaks_garbage_is_told_from_a_daemon() {
    refused(Babble::Bytes(vec![b'x'; 4096]), &["the peer", "--listen"], "not-sterna");
}

#[test]
fn a_peer_of_another_version_is_told_with_both_versions() {
    let hello = Hello {
        version: Version { major: 999, minor: 3 },
        role: Role::Control,
        features: Features(0),
        needed: Features(0),
        session: 0,
        key: 0,
    };
    refused(Babble::Bytes(hello.encode().to_vec()), &["the peer", "999.3", "same version"], "peer-version");
}

#[test]
fn a_peer_that_greets_and_then_speaks_garbage_is_told() {
    with_guest(|site| {
        // Its hello is right, what follows is none of the protocol's messages.
        let hello = Hello {
            version: sterna_protocol::hello::VERSION,
            role: Role::Control,
            features: Features::KNOWN,
            needed: Features(0),
            session: 0,
            key: 0,
        };
        let bytes = [hello.encode().to_vec(), vec![b'x'; 4096]].concat();
        let stranger = Stranger::start(site.here(), Babble::Bytes(bytes));
        let answer = site.attempt(Some(&stranger.address), &[]);
        answer.expect(1, &["the peer"]);
        site.a_second_attempt_succeeds();
    });
}
