//! Bodies between guest RAM and sockets, descriptors, TCP's settings.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::{allocated_bytes, id};
use sterna_sys::iovec::{Incoming, Outgoing};
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::socket::{
    Keepalive, ReceiveError, SendError, TcpInfo, VECTORS_PER_CALL, receive_exact, receive_with_descriptors, send_all,
    send_with_descriptors, set_keepalive, set_loss_timers, set_nodelay, set_notsent_lowat, set_pacing_rate,
    set_user_timeout,
};

mod support;
use support::{PATIENCE, ram_file};

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

fn page(page: u64) -> std::ops::Range<u64> {
    page * PAGE_BYTES..(page + 1) * PAGE_BYTES
}

/// Every other page, in more vectors than one call takes and more bytes than a socket's buffer holds, headers in
/// between.
#[test]
fn pages_go_from_one_guest_to_another_through_a_socket() {
    const PAGES: u64 = 2 * VECTORS_PER_CALL as u64 + 10;
    let (from, to) = (ram_file(PAGES), ram_file(PAGES));
    let source = SharedMapping::new(&from, PAGES * PAGE_BYTES, Access::ReadWrite).unwrap();
    let destination = SharedMapping::new(&to, PAGES * PAGE_BYTES, Access::ReadWrite).unwrap();
    let body = |page: u64| -> Vec<u8> { (0..PAGE_BYTES).map(|at| (page * 7 + at * 13 / 5) as u8).collect() };
    (0..PAGES).step_by(2).for_each(|at| source.copy_in(at * PAGE_BYTES, &body(at)).unwrap());

    let (ours, theirs) = connection();
    let heads: Vec<[u8; 8]> = (0..PAGES).map(u64::to_le_bytes).collect();
    let sent = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let vectors = (0..PAGES).step_by(2).flat_map(|at| {
                [Outgoing::from(&heads[at as usize][..]), Outgoing::from(&[][..]), source.outgoing(page(at))]
            });
            send_all(&ours, &mut vectors.collect::<Vec<_>>())
        });
        let mut heads: Vec<[u8; 8]> = vec![[0; 8]; PAGES as usize / 2];
        let vectors = heads
            .iter_mut()
            .zip((0..PAGES).step_by(2))
            .flat_map(|(head, at)| [Incoming::from(&mut head[..]), destination.incoming(page(at))]);
        receive_exact(&theirs, &mut vectors.collect::<Vec<_>>()).unwrap();
        assert!(heads.into_iter().map(u64::from_le_bytes).eq((0..PAGES).step_by(2)));
        sender.join().unwrap()
    });
    sent.unwrap();
    let mut scratch = Vec::new();
    for at in (0..PAGES).step_by(2) {
        destination.with_copy(page(at), &mut scratch, |copy| assert!(copy == body(at), "page {at}"));
    }
    assert_eq!(allocated_bytes(&to).unwrap(), PAGES / 2 * PAGE_BYTES, "nothing else was touched");
}

#[test]
fn a_peer_that_closes_too_early_is_told_from_one_that_breaks() {
    let (ours, mut theirs) = connection();
    theirs.write_all(&[1; 10]).unwrap();
    drop(theirs);
    let (mut a, mut b) = ([0; 8], [0; 8]);
    let error = receive_exact(&ours, &mut [Incoming::from(&mut a[..]), Incoming::from(&mut b[..])]).unwrap_err();
    assert!(matches!(error, ReceiveError::Closed { missing_bytes: 6 }), "{error:?}");
    assert_eq!((a, b), ([1; 8], [1, 1, 0, 0, 0, 0, 0, 0]));

    // The peer resets: sending is an error, and no signal ends this process.
    let (ours, theirs) = connection();
    (&ours).write_all(&[1]).unwrap();
    drop(theirs);
    let body = vec![0; 1 << 20];
    let error = (0..100).find_map(|_| send_all(&ours, &mut [Outgoing::from(&body[..])]).err()).unwrap();
    assert!(matches!(error, SendError::Connection(_)), "{error:?}");
}

#[test]
fn a_silent_peer_ends_the_wait_by_the_sockets_timeouts() {
    let (ours, mut theirs) = connection();
    let timeout = Some(Duration::from_millis(50));
    ours.set_read_timeout(timeout).unwrap();
    ours.set_write_timeout(timeout).unwrap();
    theirs.write_all(&[1; 3]).unwrap();
    let error = receive_exact(&ours, &mut [Incoming::from(&mut [0; 8][..])]).unwrap_err();
    assert!(matches!(error, ReceiveError::TimedOut), "{error:?}");
    let body = vec![0; 64 << 20];
    let error = send_all(&ours, &mut [Outgoing::from(&body[..])]).unwrap_err();
    assert!(matches!(error, SendError::TimedOut), "{error:?}");
}

#[test]
fn nothing_to_send_or_receive_takes_no_call() {
    let (ours, theirs) = connection();
    drop(theirs);
    send_all(&ours, &mut []).unwrap();
    receive_exact(&ours, &mut [Incoming::from(&mut [][..])]).unwrap();
}

#[test]
fn descriptors_travel_with_the_first_byte() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let files = [ram_file(1), ram_file(2)];
    send_with_descriptors(&ours, b"hello", &[files[0].as_fd(), files[1].as_fd()]).unwrap();
    send_with_descriptors(&ours, b"none", &[]).unwrap();
    let mut buffer = [0; 64];
    let (received, descriptors) = receive_with_descriptors(&theirs, &mut buffer).unwrap();
    assert_eq!(&buffer[..received], b"hello", "a message with descriptors is not run together with the next");
    let lengths: Vec<u64> =
        descriptors.into_iter().map(|descriptor| File::from(descriptor).metadata().unwrap().len()).collect();
    assert_eq!(lengths, [PAGE_BYTES, 2 * PAGE_BYTES]);
    let (received, descriptors) = receive_with_descriptors(&theirs, &mut buffer).unwrap();
    assert_eq!((&buffer[..received], descriptors.len()), (&b"none"[..], 0));
    drop(ours);
    assert_eq!(receive_with_descriptors(&theirs, &mut buffer).unwrap().0, 0);
    send_with_descriptors(&theirs, b"x", &[]).unwrap_err();
}

#[test]
fn impossible_messages_are_refused_before_anything_is_sent() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let file = ram_file(1);
    send_with_descriptors(&ours, b"", &[file.as_fd()]).unwrap_err();
    let many = vec![file.as_fd(); 254];
    send_with_descriptors(&ours, b"x", &many).unwrap_err();
    send_with_descriptors(&ours, b"y", &many[..253]).unwrap();
    let mut buffer = [0; 8];
    let (received, descriptors) = receive_with_descriptors(&theirs, &mut buffer).unwrap();
    assert_eq!((buffer[0], received, descriptors.len()), (b'y', 1, 253));
    assert!(descriptors.iter().all(|descriptor| id(descriptor).unwrap() == id(&file).unwrap()));
    drop(ours);
    assert_eq!(theirs.read(&mut buffer).unwrap(), 0);
}

#[test]
fn tcp_takes_every_setting_and_reports_the_connection() {
    let (mut ours, mut theirs) = connection();
    set_user_timeout(&ours, Duration::from_secs(5)).unwrap();
    set_nodelay(&ours, true).unwrap();
    set_notsent_lowat(&ours, 128 << 10).unwrap();
    let keepalive = Keepalive { idle: Duration::from_secs(2), interval: Duration::from_secs(1), probes: 3 };
    set_keepalive(&ours, keepalive).unwrap();
    use rustix::net::sockopt;
    assert_eq!(sockopt::tcp_user_timeout(&ours).unwrap(), 5000);
    assert_eq!(sockopt::tcp_keepidle(&ours).unwrap(), keepalive.idle);
    assert_eq!(sockopt::tcp_keepintvl(&ours).unwrap(), keepalive.interval);
    assert_eq!(sockopt::tcp_keepcnt(&ours).unwrap(), 3);
    assert!(sockopt::socket_keepalive(&ours).unwrap() && ours.nodelay().unwrap());

    ours.write_all(&vec![0; 100_000]).unwrap();
    theirs.read_exact(&mut vec![0; 100_000]).unwrap();
    theirs.write_all(&[0]).unwrap();
    ours.read_exact(&mut [0]).unwrap();
    let info = TcpInfo::of(&ours).unwrap();
    // The handshake's byte counts too.
    assert!((100_000..=100_001).contains(&info.acknowledged_bytes), "{info:?}");
    assert!(info.round_trip > Duration::ZERO && info.round_trip < PATIENCE, "{info:?}");
    assert!(info.congestion_window > 0 && info.delivery_rate > 0 && info.unsent_bytes == 0, "{info:?}");

    let (unix, _) = UnixStream::pair().unwrap();
    assert!(TcpInfo::of(&unix).is_err() && set_nodelay(&unix, true).is_err());
}

/// The kernel's word for it is its own timeout for this connection (`tcpi_rto`): after some exchanges, far below the
/// 200 ms that are the least without it.
#[test]
fn a_lost_message_is_sent_again_sooner_where_the_kernel_lets_us_say_so() {
    let (mut ours, mut theirs) = connection();
    if !set_loss_timers(&ours, Duration::from_millis(20), Duration::from_millis(5)).unwrap() {
        println!("skipped: this kernel (before 6.15) has no TCP_RTO_MIN_US");
        return;
    }
    for _ in 0..200 {
        ours.write_all(&[1]).unwrap();
        theirs.read_exact(&mut [0]).unwrap();
        theirs.write_all(&[2]).unwrap();
        ours.read_exact(&mut [0]).unwrap();
    }
    let after = |socket: &TcpStream| TcpInfo::of(socket).unwrap().retransmit_after;
    assert!(after(&ours) < Duration::from_millis(100), "{:?}", after(&ours));
    assert!(after(&theirs) >= Duration::from_millis(200), "{:?}", after(&theirs));
    let (unix, _) = UnixStream::pair().unwrap();
    assert!(set_loss_timers(&unix, Duration::from_millis(20), Duration::from_millis(5)).is_err());
}

#[test]
fn a_paced_connection_keeps_to_its_rate() {
    let (ours, mut theirs) = connection();
    set_pacing_rate(&ours, Some(4_000_000)).unwrap();
    let body = vec![0; 2_000_000];
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&ours, &mut [Outgoing::from(&body[..])]).unwrap());
        theirs.read_exact(&mut vec![0; body.len()]).unwrap();
    });
    // Half a second by the rate; unpaced it is a few milliseconds.
    assert!(start.elapsed() > Duration::from_millis(250), "{:?}", start.elapsed());
    set_pacing_rate(&ours, None).unwrap();
}
