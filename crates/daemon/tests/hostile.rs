//! Callers of the API, and QEMUs to be adopted, that mean no good: the daemon goes on, and answers everybody else.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use support::{Host, Stranger, agent, cannot_run, eventually, qemu, signal};

/// Longer than anything here takes, on any machine.
const FOR_EVER: Duration = Duration::from_secs(180);

fn connect(host: &Host) -> UnixStream {
    let stream = UnixStream::connect(host.socket()).expect("the daemon listens");
    stream.set_read_timeout(Some(FOR_EVER)).unwrap();
    stream
}

fn descriptors(host: &Host) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", host.daemon_pid())).unwrap().count()
}

/// Seen to fail: the daemon had taken all of them in, and none was ever given up.
#[test]
fn callers_that_never_finish_a_request_are_given_up_and_others_are_answered() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let before = descriptors(&host);
    let beginnings: [&[u8]; 4] = [
        b"",
        b"GET /v1/vms HTTP/1.1\r\nhost: x\r\nx-slow: ",
        b"POST /v1/vms HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/migrations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
    ];
    let socket = host.socket();
    // Whoever finds the queue full waits: so on a thread.
    let half_open = std::thread::spawn(move || {
        let open = |index: usize| {
            let mut stream = UnixStream::connect(&socket).expect("the daemon listens");
            let _ = stream.write_all(beginnings[index % beginnings.len()]);
            stream
        };
        (0..1000).map(open).collect::<Vec<_>>()
    });
    // Beside them, and behind them.
    assert_eq!(host.get("/v1/vms"), json!([]));
    let mut half_open = half_open.join().unwrap();
    assert_eq!(host.get("/v1/vms"), json!([]));
    assert!(descriptors(&host) < before + 300, "{} connections are open", descriptors(&host));
    for stream in &mut half_open {
        stream.set_read_timeout(Some(FOR_EVER)).unwrap();
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
    }
    assert_eq!(host.get("/v1/vms"), json!([]));
}

#[test]
fn heads_and_bodies_without_end_are_refused_and_hundreds_of_requests_at_once_are_answered() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    for head in [
        "GET /v1/vms HTTP/1.1\r\nhost: x\r\nx: ",
        "GET /",
        "POST /v1/vms HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n",
    ] {
        let mut stream = connect(&host);
        stream.set_write_timeout(Some(FOR_EVER)).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let mut written = 0u64;
        while stream.write_all(&[b'a'; 65536]).is_ok() {
            written += 65536;
            assert!(written < 64 << 20, "it goes on reading '{head}'");
        }
    }
    std::thread::scope(|scope| {
        for _ in 0..400 {
            scope.spawn(|| assert_eq!(host.get("/v1/vms"), json!([])));
        }
    });
}

/// A process that has another's agent socket in its environment, as if it were its own.
struct Impostor(Child);

impl Impostor {
    fn sleeps(agent_socket: &std::path::Path) -> Self {
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        Self::start(agent_socket, sleep)
    }

    fn start(agent_socket: &std::path::Path, mut program: Command) -> Self {
        let child = program.env("STERNA_AGENT_SOCKET", agent_socket).stdin(Stdio::null()).spawn().unwrap();
        // Its parent may go on before it has become another program: until then it has its parent's environment, and
        // for a moment none.
        let environment = || sterna_daemon::process::environment(child.id()).unwrap_or_default();
        eventually("it is a program of its own", || environment().contains_key("STERNA_AGENT_SOCKET"));
        Self(child)
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What plays QEMU at a QMP socket does, once it has greeted and taken one command.
type Misdeed = fn(&mut UnixStream);

const MISDEEDS: [(&str, Misdeed); 7] = [
    ("says nothing", |stream| drop(std::io::copy(stream, &mut std::io::sink()))),
    ("closes", |_| {}),
    ("speaks nonsense", |stream| drop(stream.write_all(b"{\"return\": nonsense}\n"))),
    ("stops in the middle", |stream| {
        let _ = stream.write_all(b"{\"return\": {\"sta");
        let _ = std::io::copy(stream, &mut std::io::sink());
    }),
    ("writes a line without end", |stream| while stream.write_all(&[b'x'; 65536]).is_ok() {}),
    ("sends events without end", |stream| {
        let event = "{\"event\": \"X\", \"timestamp\": {\"seconds\": 1, \"microseconds\": 2}, \"data\": [1,2,3]}\n";
        while stream.write_all(event.repeat(500).as_bytes()).is_ok() {}
    }),
    ("answers everything with a list", |stream| {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        while let Some(Ok(line)) = lines.next() {
            let command: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if writeln!(stream, "{}", json!({ "return": [1, "a", {}], "id": command["id"] })).is_err() {
                break;
            }
        }
    }),
];

#[test]
fn a_qemu_that_misbehaves_at_its_qmp_socket_is_not_adopted_and_keeps_nobody_out() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let impostor = Impostor::sleeps(&host.path("nobody.sock"));
    for (name, misdeed) in MISDEEDS {
        let qmp = host.path("misdeed.sock");
        let _ = std::fs::remove_file(&qmp);
        let listener = UnixListener::bind(&qmp).unwrap();
        let playing = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let greeting = json!({ "QMP": { "version": { "qemu": { "micro": 0, "minor": 2, "major": 7 }, "package": "" }, "capabilities": [] } });
            writeln!(stream, "{greeting}").unwrap();
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            let command: serde_json::Value = serde_json::from_str(&line).unwrap();
            writeln!(stream, "{}", json!({ "return": {}, "id": command["id"] })).unwrap();
            misdeed(&mut stream);
        });
        let request = json!({ "name": "a", "pid": impostor.0.id(), "qmp": qmp });
        let (status, problem) = host.ask("POST", "/v1/vms/adopt", Some(&request));
        assert!(status >= 400, "{name}: {problem}");
        assert!(["qemu", "request"].contains(&problem["blame"].as_str().unwrap()), "{name}: {problem}");
        assert!(host.names().is_empty(), "{name}");
        playing.join().unwrap();
    }
}

/// A number that is no QEMU's, with another QEMU's QMP and agent sockets. Seen to fail: it was adopted, and would have
/// been stopped and forgotten with that process.
#[test]
fn a_process_that_is_not_the_one_behind_the_agents_socket_is_not_adopted() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let ram = tempfile::Builder::new().prefix("sterna-adopt-").tempdir_in("/dev/shm").unwrap();
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", ram.path().join("ram").display());
    let machine =
        ["-accel", "tcg", "-display", "none", "-vga", "none", "-m", "64M", "-machine", "q35,memory-backend=ram"];
    let arguments: Vec<&str> = machine.iter().copied().chain(["-object", &backend]).collect();
    let stranger = Stranger::start(&host.path(""), &arguments, agent().exists());
    let agent_socket = host.path("stranger-agent.sock");
    eventually("the agent listens", || agent_socket.exists());
    let request = |impostor: &Impostor| json!({ "name": "a", "pid": impostor.0.id(), "qmp": stranger.qmp });
    let idle = Impostor::sleeps(&agent_socket);
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &request(&idle)), "ram-not-mapped");
    // Not even where it has the same RAM.
    let mut other = Command::new(qemu());
    other.args(&arguments).arg("-S");
    let other = Impostor::start(&agent_socket, other);
    let file = ram.path().join("ram");
    let maps = || sterna_sys::process::maps(other.0.id()).unwrap_or_default();
    eventually("it has mapped the RAM", || maps().iter().any(|mapping| mapping.path.as_ref() == Some(&file)));
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &request(&other)), "agent-foreign");
    let (status, vm) = host.ask("POST", "/v1/vms/adopt", Some(&stranger.request("a")));
    assert_eq!(status, 201, "{vm}");
}

/// Each has 5 s to answer. Seen to fail: the list took 30 s and more, and so did the metrics of the whole host.
#[test]
fn qemus_that_stand_still_are_waited_for_side_by_side() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    for name in names {
        host.run(name);
    }
    for name in &names[1..] {
        signal(host.pid_of(name), Signal::STOP);
    }
    let began = std::time::Instant::now();
    let states: Vec<_> = host.get("/v1/vms").as_array().unwrap().iter().map(|vm| vm["state"].clone()).collect();
    assert_eq!(states, ["running", "lost", "lost", "lost", "lost", "lost", "lost"]);
    assert!(began.elapsed() < Duration::from_secs(25), "one after the other: {:?}", began.elapsed());
}
