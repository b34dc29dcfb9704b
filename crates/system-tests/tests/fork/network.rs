use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sterna_api::NetworkCard;
use sterna_bench::baseline::qmp::Qmp;
use sterna_bench::command::wait_for;

use sterna_bench::load::now_us;
use sterna_bench::tools;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::{Attempt, PATIENCE, Plan, Site, cli, needs, skip_without, turn};

use super::{are_well, fork, forked, plan, with_origin};

/// Says again and again which hardware address the guest's card has, and whether there is a link.
const SCRIPT: &str = "while :; do\n    ip link set eth0 up 2>/dev/null\n    cd /sys/class/net/eth0 2>/dev/null &&\n    \
    echo \"CARD $(cat address) link $(cat carrier)\"\n    cd /\n    sleep 1\ndone\n";

/// The address of the guest that is cloned.
const FIRST: &str = "52:54:00:00:00:01";

/// A guest's words, after this moment, on its card.
fn says(member: &Member<'_>, mac: &str, link: bool) {
    let from = member.guest.console_text().len();
    let line = format!("CARD {mac} link {}", u8::from(link));
    let said = || {
        let text = member.guest.console_text();
        // The first whole line may be of a time before.
        Ok((text.get(from..).unwrap_or_default().matches(&line).count() > 1).then_some(()))
    };
    wait_for(&format!("'{line}'"), PATIENCE, said).unwrap_or_else(|error| panic!("{}: {error}", member.guest.name));
}

fn cards(site: &Site, host: &str, words: &[&str]) -> Vec<NetworkCard> {
    let answer = cli::ask(site.host(host), &[&["link", "--json"], words].concat());
    answer.expect(0, &[]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

/// Runs a test with a guest `origin` that tells its card, in this QEMU on both hosts; `words` make the card's slot.
fn with_card(qemu: PathBuf, machine: &str, words: &[&str], test: impl FnOnce(&mut Site)) {
    let jobs = format!("{};sh:/dev/vda", plan().jobs);
    let plan = Plan { jobs, qemu: [qemu.clone(), qemu], machine: machine.into(), ..plan() };
    let mut site = Site::without_guest(&plan);
    {
        let origin = Member::new(&site, "origin");
        let script = site.guest.console.with_file_name("card-script");
        std::fs::write(&script, format!("{SCRIPT}{}", "\n".repeat(512 - SCRIPT.len() % 512))).expect("a script");
        let drive = format!("file={},format=raw,if=virtio,readonly=on", script.display());
        origin.run(&plan, &["--memory-mode", "shared"], &[&["-drive", &drive], words].concat());
        origin.is_well();
        says(&origin, FIRST, true);
    }
    test(&mut site);
}

/// A clone has no link until its user says so; one with another address has its guest find a new card, is moved with
/// it, and forked.
fn addresses(site: &mut Site) {
    forked(&fork(site, "origin", &["one"]));
    let one = Member::new(site, "one");
    says(&one, FIRST, false);
    cards(site, "a", &["one", "up"]);
    says(&one, FIRST, true);
    cards(site, "a", &["one", "down"]);
    says(&one, FIRST, false);

    let report = forked(&fork(site, "origin", &["two", "three", "--new-mac"]));
    assert!(report.clones.iter().all(|clone| clone.lacks.is_none()), "{report:#?}");
    let mac = |name: &str, host: &str| cards(site, host, &[name])[0].mac.clone();
    let (two, three) = (mac("two", "a"), mac("three", "a"));
    assert!(two != three && two != FIRST && three != FIRST, "{two}, {three}");
    says(&Member::new(site, "two"), &two, true);
    says(&Member::new(site, "three"), &three, true);
    says(&Member::new(site, "origin"), FIRST, true);
    are_well(site, &["origin", "one", "two", "three"]);
    // What is on record is what it has: it is moved with it, and forked.
    let member = Member::new(site, "two");
    assert!(member.shown("a").arguments.iter().any(|word| word.contains(&two)));
    member.migrate(&["--verify"]).expect(0, &[]);
    assert_eq!(mac("two", "b"), two);
    says(&member, &two, true);
    member.is_well();
    forked(&fork(site, "three", &["four"]));
    says(&Member::new(site, "four"), &three, false);
    are_well(site, &["origin", "one", "three", "four"]);
}

/// The daemon dies between the two cards: the next one goes on.
fn goes_on(site: &mut Site) {
    let record = site.host("a").directory.join("state/vms/one/vm.json");
    let attempt = Attempt::run(site.host("a"), &["link", "one", "up", "--new-mac"]);
    site.eventually("the new card is on record", || pending(&record) || cards_of_record(&record) != FIRST);
    site.kill_daemon("a");
    drop(attempt.end());
    site.start_daemon("a");
    site.eventually("the card is replaced", || !pending(&record));
    let mac = cards_of_record(&record);
    assert_ne!(mac, FIRST);
    says(&Member::new(site, "one"), &mac, true);
    assert_eq!(cards(site, "a", &["one"])[0].mac, mac);
    are_well(site, &["one"]);
}

/// Its guest is asked for the card again and again before it lets go of it, and so lets go of what is there then, too.
fn asked_again(site: &mut Site, second: &Path) {
    let member = Member::new(site, "origin");
    let record = site.host("a").directory.join("state/vms/origin/vm.json");
    let mut qmp = Qmp::connect(second).expect("its QEMU answers");
    let mut before = FIRST.to_owned();
    for _ in 0..4 {
        let attempt = Attempt::run(site.host("a"), &["link", "origin", "up", "--new-mac"]);
        site.eventually("the new card is on record", || pending(&record) || cards_of_record(&record) != before);
        // So that none of the requests is for the new card.
        let daemon = Pid::from_raw(site.daemon_at("a").cast_signed());
        kill(daemon, Signal::SIGSTOP).expect("it is stopped");
        let asked = ask_for_its_card(&mut qmp);
        kill(daemon, Signal::SIGCONT).expect("it goes on");
        attempt.end().expect(0, &[]);
        let mac = cards_of_record(&record);
        println!("asked {asked} times: {before} became {mac}");
        says(&member, &mac, true);
        assert_eq!(cards(site, "a", &["origin"])[0].mac, mac);
        before = mac;
    }
    are_well(site, &["origin"]);
}

/// Asks the guest for its card until it is gone; how often.
fn ask_for_its_card(qmp: &mut Qmp) -> usize {
    let ask = || qmp.execute("device_del", json!({ "id": "card" })).is_ok().then_some(());
    std::iter::from_fn(ask).take(500).count()
}

/// Whether cards on record are to take the place of others.
fn pending(record: &Path) -> bool {
    let text = std::fs::read_to_string(record).unwrap_or_default();
    serde_json::from_str::<Value>(&text)
        .is_ok_and(|record| record["new_cards"].as_array().is_some_and(|all| !all.is_empty()))
}

/// The address that the arguments on record name.
fn cards_of_record(record: &std::path::Path) -> String {
    let text = std::fs::read_to_string(record).unwrap_or_default();
    let record: Value = serde_json::from_str(&text).unwrap_or_default();
    let words = record["arguments"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mac = words.flat_map(|word| word.split(',')).find_map(|part| part.strip_prefix("mac="));
    mac.unwrap_or(FIRST).to_owned()
}

#[test]
fn a_clone_s_link_is_brought_up_and_its_card_gets_another_address_when_its_user_says_so() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let device = |more: &str| format!("virtio-net-pci,netdev=n,mac={FIRST}{more}");
    let slot = ["-device", "pcie-root-port,id=rp1,chassis=1", "-netdev", "user,id=n,restrict=on", "-device"];
    let behind = device(",bus=rp1");
    let qemu = tools::qemu_7_2().expect("looked for before");
    with_card(qemu, "pc-q35-7.2", &[&slot[..], &[&behind]].concat(), |site| {
        addresses(site);
        goes_on(site);
    });
    let Ok(qemu) = tools::qemu_10_0() else { return println!("the newer QEMU is not here: left out") };
    let plain = device("");
    with_card(qemu, "pc-i440fx-7.2", &["-netdev", "user,id=n,restrict=on", "-device", &plain], addresses);
}

/// Packets, from guest to meter: the source's as long as it has a link, and its clone's once that has one.
#[test]
fn a_clone_that_is_put_into_a_bridge_is_heard_in_the_place_of_its_source() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let site = Site::start(&Plan { run: Vec::new(), ..Plan::small() });
    let name = site.guest.name.clone();
    site.is_heard_of();
    fork(&site, &name, &["clone"]).expect(0, &[]);
    site.is_heard_of();
    cards(&site, "a", &[&name, "down"]);
    let quiet_ms = || {
        let arrivals = site.meter.arrivals(site.guest.address());
        arrivals.last().map_or(0, |last| (now_us() - last.at_us) / 1000)
    };
    site.eventually("nobody is heard", || quiet_ms() > 1000);
    cards(&site, "a", &["clone", "up", "--bridge", "br0"]);
    site.is_heard_of();
    // Its source is not heard any more, whatever the clone does.
    cards(&site, "a", &["clone", "down"]);
    site.eventually("nobody is heard again", || quiet_ms() > 1000);
    cards(&site, "a", &[&name, "up"]);
    site.is_heard_of();
}

/// A clone is in its source's trust group; a source without one founds one that nobody else is in.
#[test]
fn a_clone_is_in_its_source_s_trust_group_and_in_no_other() {
    with_origin("shared", |site| {
        let run = ["run", "grouped", "--memory", "32M", "--trust-group", "blue", "--detach", "--"];
        let bare = ["-nodefaults", "-display", "none", "-accel", "tcg"];
        cli::ask(site.host("a"), &[&run[..], &bare].concat()).expect(0, &[]);
        forked(&fork(site, "grouped", &["its"]));
        forked(&fork(site, "its", &["its-own"]));
        forked(&fork(site, "origin", &["free"]));
        let group = |name: &str| Member::new(site, name).shown("a").trust_group;
        for name in ["grouped", "its", "its-own"] {
            assert_eq!(group(name).as_deref(), Some("blue"), "{name}");
        }
        let family = Member::new(site, "origin").shown("a").family;
        assert!(family.is_some());
        assert_eq!([group("origin"), group("free")], [family.clone(), family]);
        // Nobody can ask for another one.
        fork(site, "grouped", &["x", "--trust-group", "red"]).expect(2, &["--trust-group"]);
    });
}

#[test]
fn a_guest_that_is_asked_for_its_card_more_than_once_keeps_the_one_that_takes_its_place() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let second = directory.path().join("qmp");
    let device = format!("virtio-net-pci,netdev=n,id=card,mac={FIRST},bus=rp1");
    let slot = ["-device", "pcie-root-port,id=rp1,chassis=1", "-netdev", "user,id=n,restrict=on", "-device"];
    let more = format!("unix:{},server=on,wait=off", second.display());
    let words = [&slot[..], &[&device, "-qmp", &more]].concat();
    let qemu = tools::qemu_7_2().expect("looked for before");
    with_card(qemu, "pc-q35-7.2", &words, |site| asked_again(site, &second));
}
