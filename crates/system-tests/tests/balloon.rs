//! Self-ballooning with a guest that has a driver: what it frees goes, what it needs comes back, and it can be moved
//! meanwhile.

use serde_json::json;
use sterna_api::{Balloon, Phase, Vm};
use sterna_bench::baseline::qmp::Qmp;
use sterna_bench::command::wait_for;
use sterna_bench::tools;
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs, times};
use sterna_system_tests::plan::JOBS;
use sterna_system_tests::{PATIENCE, Plan, Site, cli, needs, skip_without, turn};

/// What the guest fills and frees, MiB.
const FILLED: u64 = 160;
/// The port on which it waits to be told to free it, and the one for filling it again.
const FREE: u16 = 9001;
const FILL: u16 = 9002;

/// Fills a file in memory; removes it once somebody knocks; fills it once more. A job has no blanks, commas or
/// semicolons.
fn script() -> String {
    let fill = format!("dd if=/dev/urandom of=/tmp/file bs=1M count={FILLED}");
    let wait = |port: u16| format!("nc -l -p {port}");
    let steps = [
        fill.clone(),
        "echo FILLED once".into(),
        wait(FREE),
        "rm /tmp/file".into(),
        "echo FREED".into(),
        wait(FILL),
        fill,
        "echo FILLED twice".into(),
        "sleep 10000".into(),
    ];
    format!("sh:-c,{}", steps.join(" && ").replace(' ', "${IFS}"))
}

fn knock(site: &Site, port: u16) {
    let open = format!("echo > /dev/tcp/{}/{port}", site.guest.address());
    let opened = || Ok(site.here().output("timeout", &["2", "bash", "-c", &open]).is_ok().then_some(()));
    wait_for("the guest's ear", PATIENCE, opened).expect("the guest listens");
}

fn says(site: &Site, words: &str) {
    site.eventually(&format!("the guest says '{words}'"), || site.guest.console_text().contains(words));
}

fn vm(site: &Site) -> Vm {
    let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

fn balloon(site: &Site) -> Balloon {
    vm(site).balloon.expect("it is looked after")
}

fn goes_and_comes(plan: &Plan) {
    let mut site = Site::start(&Plan {
        memory_bytes: 512 << 20,
        jobs: format!("{JOBS};{}", script()),
        more: ["-device", "virtio-balloon-pci,deflate-on-oom=on"].map(str::to_owned).to_vec(),
        ..plan.clone()
    });
    says(&site, "FILLED once");
    let full = vm(&site).allocated_bytes;
    assert!(full > FILLED << 20, "{full} bytes allocated");
    cli::ask(site.here(), &["balloon", &site.guest.name, "--auto", "--interval", "1s"]).expect(0, &[]);
    site.eventually("free memory is in the balloon", || balloon(&site).size_bytes > 0 && settled(&balloon(&site)));
    let at_first = balloon(&site);
    assert!(at_first.deflate_on_oom && !at_first.free_page_reporting && at_first.note.is_none(), "{at_first:?}");

    // Freed while the machine is on its way: the balloon grows during the rounds, under tracking.
    // For as long as that takes it is held back.
    cli::limit_bandwidth(site.here(), Some(4 << 20));
    let attempt = site.begin(None, &["--mode", "precopy", "--verify"]);
    site.wait_for_phase(Phase::Precopy, |progress| progress.bytes_on_wire > 1 << 20);
    knock(&site, FREE);
    site.eventually("the balloon grows", || balloon(&site).size_bytes > at_first.size_bytes + (FILLED << 18));
    cli::limit_bandwidth(site.here(), None);
    let answer = attempt.end();
    answer.expect(0, &[]);
    let report = answer.report().expect("a report");
    println!("{:?}, {:?}", report.tracking, report.downtime);
    assert!(report.tracking.discarded_pages > 0, "the balloon did not grow on the way: {:?}", report.tracking);
    assert!(report.verify.checked && report.verify.mismatches == 0, "{:?}", report.verify);
    site.moved();
    site.nothing_is_left_there();
    site.checker_is_well();

    site.eventually("the destination goes on with it", || {
        let balloon = balloon(&site);
        balloon.size_bytes > at_first.size_bytes + (FILLED << 19) && settled(&balloon)
    });
    let (large, lean) = (balloon(&site), vm(&site).allocated_bytes);
    println!("{full} bytes allocated with the file, {lean} without; {large:?}");
    assert!(lean + (FILLED << 19) < full, "{lean} bytes are still allocated, of {full}");
    assert_eq!(large.setting.interval_ms, 1000);

    knock(&site, FILL);
    says(&site, "FILLED twice");
    site.eventually("the balloon shrank for it", || balloon(&site).size_bytes + (FILLED << 19) < large.size_bytes);
    let small = balloon(&site);
    println!("{small:?}");
    assert!(small.pressures > 0 && small.last_pressure.is_some(), "{small:?}");
    site.checker_is_well();

    cli::ask(site.here(), &["balloon", &site.guest.name, "--off"]).expect(0, &[]);
    assert_eq!(vm(&site).balloon, None);
    site.migrate(&[]);
    site.checker_is_well();
}

/// Whether the guest has done what it was asked. A daemon to which it came with the right balloon asks for nothing.
fn settled(balloon: &Balloon) -> bool {
    balloon.target_bytes.is_none_or(|target| target == balloon.size_bytes)
}

#[test]
fn a_guests_free_memory_goes_while_it_is_moved_and_comes_back_when_it_needs_it() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    goes_and_comes(&Plan::small());
}

#[test]
fn a_guest_in_qemu_10_0_gives_and_takes_back_its_memory_the_same_way() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&[&needs::GUEST[..], &[tools::qemu_10_0]].concat()) {
        return;
    }
    if left_to_the_proofs() {
        return;
    }
    let qemu = tools::qemu_10_0().expect("looked for before");
    goes_and_comes(&Plan { qemu: [qemu.clone(), qemu], ..Plan::small() });
}

/// Fills a file in memory, removes it once somebody knocks, and then fills and removes a smaller one again and again.
fn busy() -> String {
    let small = "f()(dd if=/dev/urandom of=/tmp/small bs=1M count=16&&rm /tmp/small&&f)";
    let large =
        format!("dd if=/dev/urandom of=/tmp/large bs=1M count={FILLED}&&echo FILLED&&nc -l -p {FREE}&&rm /tmp/large");
    format!("sh:-c,{small}&&{large}&&echo FREED&&f").replace(' ', "${IFS}")
}

/// So slow that pages follow until a test lets them go, bytes a second.
const RATE: u64 = 16 << 20;

/// Asks the guest for another size, as anybody may who reaches its QEMU, and waits until it has gone most of the way.
fn ask(site: &Site, host: &str, bytes: u64) {
    let socket = site.host(host).directory.join("state/vms").join(&site.guest.name).join("run/qmp.sock");
    let mut qmp = Qmp::connect(&socket).expect("its QEMU");
    let away = |qmp: &mut Qmp| {
        qmp.execute("query-balloon", json!({})).map(|now| now["actual"].as_u64().expect("bytes").abs_diff(bytes))
    };
    let at_first = away(&mut qmp).expect("its size");
    qmp.execute("balloon", json!({ "value": bytes })).expect("the balloon is asked");
    wait_for("the guest to go most of the way", PATIENCE, || Ok((away(&mut qmp)? <= at_first / 8).then_some(())))
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_guest_that_gives_memory_back_and_takes_it_again_before_it_has_come_is_whole() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    const RAM: u64 = 512 << 20;
    let mut site = Site::start(&Plan {
        memory_bytes: RAM,
        jobs: format!("{JOBS};dirtier:--mib,48,--rate,16;{}", busy()),
        more: ["-device", "virtio-balloon-pci,deflate-on-oom=on,free-page-reporting=on"].map(str::to_owned).to_vec(),
        ..Plan::small()
    });
    says(&site, "FILLED");
    for mode in ["postcopy", "hybrid"].into_iter().take(times(1, 2)) {
        let (_, there) = site.names();
        cli::limit_bandwidth(site.here(), Some(RATE));
        let attempt = site.begin(None, &["--mode", mode, "--verify"]);
        site.wait_for_phase(Phase::Postcopy, |_| true);
        if mode == "postcopy" {
            // A balloon's driver may clear what it takes, and so wait for it first (`init_on_alloc`). What is reported
            // free is not touched.
            knock(&site, FREE);
            says(&site, "FREED");
        }
        ask(&site, there, RAM / 2);
        ask(&site, there, RAM);
        cli::limit_bandwidth(site.here(), None);
        let answer = attempt.end();
        answer.expect(0, &[]);
        let report = answer.report().expect("a report");
        println!("{mode}: {:.0} ms of pages, {:?}", report.postcopy.ms, report.verify);
        assert_eq!(report.mode, mode);
        assert!(report.verify.checked && report.verify.mismatches == 0, "{:?}", report.verify);
        if mode == "postcopy" {
            assert!(report.verify.excluded_free_pages > 0, "nothing was given back before it had come");
        }
        site.moved();
        site.nothing_is_left_there();
        site.checker_is_well();
    }
}
