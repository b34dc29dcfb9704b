//! A guest moves there and back between daemons that trust each other by certificates made as `docs/operating.md` says.

use std::path::Path;
use std::process::Command;

use sterna_bench::lab::Host;
use sterna_system_tests::{Plan, Site, cli, needs, skip_without, turn};

/// The commands of the document, run in `directory` for one host.
fn make_certificate(directory: &Path, host: &Host) {
    let text = include_str!("../../../docs/operating.md");
    let mut blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let commands = blocks.find(|block| block.contains("openssl")).expect("the document's commands");
    // The authority is made once.
    let (authority, certificate) = commands
        .split_once("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 70")
        .expect("two of them");
    let made = directory.join("authority.pem").exists();
    let script = format!(
        "set -eu\n{}openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 70{certificate}",
        if made { "" } else { authority }
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .current_dir(directory)
        .envs([("name", format!("{}.example", host.name)), ("address", host.address.to_string())])
        .output()
        .expect("a shell");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for file in ["host.pem", "host.key"] {
        std::fs::rename(directory.join(file), host.directory.join(file)).expect("moved to its host");
    }
    let path = |file: &str| host.directory.join(file).display().to_string();
    let authority = directory.join("authority.pem");
    let section = format!(
        "[tls]\ncertificate = {:?}\nkey = {:?}\nauthority = {authority:?}\npeers = [\"a.example\", \"b.example\"]\n",
        path("host.pem"),
        path("host.key"),
    );
    std::fs::write(host.directory.join("more.toml"), section).expect("written");
}

#[test]
fn a_guest_moves_there_and_back_between_daemons_with_certificates() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    if Command::new("openssl").arg("version").output().is_err() {
        println!("skipped: there is no openssl");
        return;
    }
    let plan = Plan::small();
    let mut site = Site::without_guest(&plan);
    let directory = site.host("a").directory.clone();
    make_certificate(&directory, site.host("a"));
    // While one side is plain still, both say so, and the guest stays.
    site.kill_daemon("a");
    site.start_daemon("a");
    site.run(&plan);
    let answer = site.attempt(None, &[]);
    answer.expect(1, &["this daemon has [tls], the peer speaks plain"]);
    assert_eq!(answer.problem(), "tls-mixed");
    make_certificate(&directory, site.host("b"));
    site.kill_daemon("b");
    site.start_daemon("b");
    site.migrate(&["--streams", "4"]);
    site.checker_is_well();
    site.migrate(&[]);
    site.checker_is_well();
    let answer = cli::ask(site.host("a"), &["ps", "--json"]);
    answer.expect(0, &[]);
}
