//! A QEMU without a daemon, and one whose socket is abused.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType};
use serde_json::json;
use sterna_agent_protocol::message::{Operation, ReplyHeader, RequestHeader, Status};
use sterna_agent_protocol::{MAGIC, MAX_MESSAGE_BYTES, VERSION};
use sterna_engine::agent::{Agent, AgentError};
use zerocopy::{FromBytes, IntoBytes};

use crate::fixture::{PATIENCE, Qemu, Start, cannot_run, library};

fn lives(qemu: &mut Qemu) {
    let status = qemu.qmp("query-status", json!({}));
    assert_eq!(status["status"], "prelaunch");
}

fn has_its_thread(qemu: &Qemu) -> bool {
    qemu.threads().iter().any(|name| name == "sterna-agent")
}

/// A bare connection.
fn socket(qemu: &Qemu) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    let address = rustix::net::SocketAddrUnix::new(qemu.dir.path().join("agent")).expect("a short path");
    rustix::net::connect(&socket, &address).expect("the agent accepts");
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE)).expect("a timeout");
    socket
}

fn request(operation: u16, version: u16, body: &[u8], length: u32) -> Vec<u8> {
    let header = RequestHeader {
        magic: MAGIC.into(),
        version: version.into(),
        operation: operation.into(),
        sequence: 7.into(),
        length: length.into(),
    };
    [header.as_bytes(), body].concat()
}

/// The status of the reply to one packet; `None` where the connection ends instead.
fn status_of(qemu: &Qemu, packet: &[u8]) -> Option<Status> {
    let socket = socket(qemu);
    rustix::net::send(&socket, packet, SendFlags::NOSIGNAL).expect("it takes a packet");
    let mut reply = vec![0; MAX_MESSAGE_BYTES];
    let (length, _) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty()).unwrap_or((0, 0));
    let (header, _) = ReplyHeader::read_from_prefix(reply.get(..length)?).ok()?;
    assert_eq!(header.sequence.get(), 7);
    Status::from_wire(header.status.get())
}

#[test]
fn a_qemu_with_the_library_but_without_a_socket_path_is_left_alone() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).socket(None).go();
    lives(&mut qemu);
    assert!(!has_its_thread(&qemu));
    assert_eq!(qemu.log(), "");
}

#[test]
fn a_qemu_that_nobody_talks_to_works_and_says_nothing() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.qmp("cont", json!({}));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(qemu.qmp("query-status", json!({}))["status"], "running");
    assert!(has_its_thread(&qemu));
    assert_eq!(qemu.log(), "");
}

#[test]
fn a_socket_that_cannot_be_made_leaves_a_line_in_the_log_and_qemu_working() {
    if cannot_run() {
        return;
    }
    for path in [PathBuf::from("/nonexistent/agent"), PathBuf::from(format!("/dev/shm/{}", "x".repeat(120)))] {
        let mut qemu = Start::new().ram(64).socket(Some(path)).go();
        lives(&mut qemu);
        crate::fixture::eventually("a line in the log", || {
            qemu.log().contains("QEMU goes on without it").then_some(())
        });
        lives(&mut qemu);
    }
}

#[test]
fn a_stale_socket_is_replaced_and_another_file_is_not() {
    if cannot_run() {
        return;
    }
    let start = Start::new().ram(64);
    drop(std::os::unix::net::UnixListener::bind(start.file("agent")).expect("a stale socket"));
    start.go().agent().hello().expect("hello");

    let start = Start::new().ram(64);
    let file = start.file("agent");
    std::fs::write(&file, "precious").expect("a file");
    let mut qemu = start.go();
    crate::fixture::eventually("a line in the log", || qemu.log().contains("QEMU goes on without it").then_some(()));
    assert_eq!(std::fs::read_to_string(&file).expect("still there"), "precious");
    lives(&mut qemu);
}

#[test]
fn garbage_ends_a_connection_and_nothing_else() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.agent();
    let mut not_ours = request(1, VERSION, &[], 0);
    not_ours[0] ^= 1;
    let long = vec![0xff; MAX_MESSAGE_BYTES + 1];
    let lying = request(Operation::Advise as u16, VERSION, &[0; 8], u32::MAX);
    for packet in [&b"x"[..], b"GET / HTTP/1.1\r\n\r\n", &not_ours, &long, &lying, &[0; 32]] {
        assert_eq!(status_of(&qemu, packet), None, "{} bytes", packet.len());
    }
    let hello = Operation::Hello as u16;
    assert_eq!(status_of(&qemu, &request(hello, VERSION + 1, &[], 0)), Some(Status::Version));
    assert_eq!(status_of(&qemu, &request(0, VERSION, &[], 0)), Some(Status::Unknown));
    assert_eq!(status_of(&qemu, &request(999, VERSION, b"anything", 8)), Some(Status::Unknown));
    for operation in [Operation::OpenUserfaultfd, Operation::Advise, Operation::Map] {
        // Too short, a count that the items do not fill, half an item, numbers out of range.
        for body in
            [&[][..], &[1, 0, 0, 0], &[1, 0, 0, 0, 255, 255, 255, 255], &[1, 0, 0, 0, 1, 0, 0, 0, 9], &[255; 48]]
        {
            let status = status_of(&qemu, &request(operation as u16, VERSION, body, body.len() as u32));
            // Eight bytes are a whole request for a userfaultfd, of features that no kernel has.
            let expected = match (operation, body.len()) {
                (Operation::OpenUserfaultfd, 8) => Status::System,
                _ => Status::Malformed,
            };
            assert_eq!(status, Some(expected), "{operation:?} with {} bytes", body.len());
        }
    }
    qemu.agent().hello().expect("hello");
    lives(&mut qemu);
}

#[test]
fn random_packets_do_no_harm() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.agent();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..2000 {
        let body: Vec<u8> = (0..random() % 200).map(|_| random() as u8).collect();
        // 9 and more do not exist; Close, Take and Open make and drop descriptors.
        let packet = request((random() % 10) as u16, VERSION, &body, body.len() as u32);
        status_of(&qemu, &packet);
    }
    let mut agent = qemu.agent();
    assert_eq!(agent.blocks().expect("blocks").len(), 1);
    lives(&mut qemu);
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", qemu.pid)).expect("QEMU runs").count();
    assert!(descriptors < 40, "{descriptors} descriptors are open in QEMU");
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.agent().hello().expect("hello");
    let count = || std::fs::read_dir(format!("/proc/{}/fd", qemu.pid)).expect("QEMU runs").count();
    let before = count();
    for _ in 0..100 {
        let socket = socket(&qemu);
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        let files = [std::os::fd::AsFd::as_fd(&file); 3];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let packet = request(Operation::Hello as u16, VERSION, &[], 0);
        let parts = [std::io::IoSlice::new(&packet)];
        rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL).expect("it takes a packet");
    }
    qemu.agent().hello().expect("hello");
    crate::fixture::eventually("the descriptors' end", || (count() <= before + 4).then_some(()));
    lives(&mut qemu);
}

#[test]
fn a_hung_client_keeps_nobody_out() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.agent();
    let hung: Vec<_> = (0..20).map(|_| socket(&qemu)).collect();
    // One that asks and asks and never reads.
    let packet = request(Operation::Blocks as u16, VERSION, &[], 0);
    let mut sent = 0;
    while sent < 100_000 && rustix::net::send(&hung[19], &packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok() {
        sent += 1;
    }
    qemu.agent().hello().expect("hello");
    lives(&mut qemu);
    drop(hung);
    qemu.agent().hello().expect("hello");
}

#[test]
fn a_strangers_connection_is_refused() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).go();
    let path = qemu.dir.path().join("agent");
    qemu.agent();
    // Even if somebody opens the file to all.
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("chmod");
    let connected = std::thread::spawn(move || {
        // SAFETY: the system call itself, past libc, changes this thread's user only, and the thread ends with it.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
        let mut agent = Agent::connect(&path, PATIENCE).expect("the kernel lets it in");
        agent.hello()
    });
    match connected.join().expect("no panic") {
        Err(AgentError::Connection { operation: Operation::Hello, .. }) => {}
        other => panic!("a stranger was answered: {other:?}"),
    }
    qemu.agent().hello().expect("root is answered");
}

#[test]
fn nobody_there_is_said_plainly() {
    let error = Agent::connect(Path::new("/nonexistent/agent"), PATIENCE).expect_err("nobody is there");
    assert!(matches!(error, AgentError::NotThere { .. }));
    assert!(error.to_string().contains("LD_PRELOAD"));
}

#[test]
fn no_code_in_the_library_can_panic() {
    let bytes = std::fs::read(library()).expect("the library");
    assert!(!bytes.windows(9).any(|window| window == b"panicking"), "a panic is linked in: nm tells where");
}
