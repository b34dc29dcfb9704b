//! Free memory is taken from guests that allocate and free it all the time.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use sterna_api::{Reclaimed, Status};
use sterna_system_tests::cli::{self, Answer, Attempt};
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs, times};
use sterna_system_tests::{PATIENCE, Plan, Site, needs, skip_without, turn};

fn reclaim(site: &Site, options: &[&str]) -> Answer {
    cli::ask(site.here(), &[&["reclaim", &site.guest.name, "--json", "-"], options].concat())
}

fn report(answer: &Answer) -> Reclaimed {
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("no report: {error}: {answer:#?}"))
}

/// What several runs came to.
#[derive(Debug, Default)]
struct Sum {
    runs: u64,
    busy: u64,
    reclaimed_pages: u64,
    put_back_pages: u64,
    waits: u64,
    gave_way: u64,
    longest_wait_ms: f64,
    ms: f64,
}

impl Sum {
    fn add(&mut self, done: &Reclaimed) {
        self.runs += 1;
        self.reclaimed_pages += done.reclaimed_pages;
        self.put_back_pages += done.put_back_pages;
        self.waits += done.waits;
        self.gave_way += done.gave_way;
        self.longest_wait_ms = self.longest_wait_ms.max(done.longest_wait_ms);
        self.ms += done.ms;
    }
}

#[test]
fn a_guest_under_churn_loses_no_page_while_its_free_memory_is_taken_all_the_time() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan::churning());
    site.churn_is_well();
    let (began, mut sum, mut checked) = (Instant::now(), Sum::default(), Instant::now());
    let enough = |sum: &Sum| sum.reclaimed_pages > 10_000 && sum.runs > 10 * sum.busy;
    // For a while; longer where it has not come to much by then.
    while began.elapsed() < Duration::from_secs(times(20, 600) as u64) || (!enough(&sum) && began.elapsed() < PATIENCE)
    {
        let answer = reclaim(&site, &[]);
        // A guest that is too busy to be counted is left alone, and says so.
        if answer.code == 1 && answer.stderr.contains("guest-unfit") {
            sum.busy += 1;
            continue;
        }
        answer.expect(0, &[]);
        let done = report(&answer);
        assert_eq!((done.status, done.error.as_ref()), (Status::Completed, None), "{done:?}");
        sum.add(&done);
        if checked.elapsed() > Duration::from_secs(10) {
            site.churn_is_well();
            site.checker_is_well();
            checked = Instant::now();
        }
    }
    println!("{sum:?}");
    site.churn_is_well();
    site.checker_is_well();
    assert!(enough(&sum), "{sum:?}");
    // What was taken are holes: they do not travel, and the guest can be moved as ever.
    let moved = site.migrate(&["--skip-free", "off"]);
    assert!(moved.pages.unallocated > 10_000, "{:?}", moved.pages);
    site.churn_is_well();
}

#[test]
fn a_guest_under_churn_is_harmed_where_memory_is_taken_without_a_second_look() {
    // Shows that the test above can fail.
    let _turn = turn();
    if left_to_the_proofs() || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::without_guest(&Plan::churning());
    site.configure("a", "test_trust_first_look = true");
    site.run(&Plan::churning());
    std::thread::sleep(Duration::from_secs(5));
    let (began, mut runs) = (Instant::now(), 0);
    while began.elapsed() < 2 * PATIENCE {
        // It may be harmed so much that nothing can be told of it any more.
        let _ = reclaim(&site, &[]);
        runs += 1;
        if let Some(harm) = site.harm() {
            println!("after {runs} runs: {harm}");
            return;
        }
    }
    panic!("no page was lost in {runs} runs");
}

#[test]
fn a_daemon_killed_while_it_takes_memory_harms_and_holds_nobody() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan::churning());
    site.churn_is_well();
    let mut cut_off = 0;
    for number in 0..times(5, 60) {
        let running = Attempt::run(site.here(), &["reclaim", &site.guest.name, "--json", "-"]);
        // Somewhere between the request's arrival and some portions.
        std::thread::sleep(Duration::from_millis(30 + 23 * number as u64 % 170));
        site.kill_daemon("a");
        let answer = running.end();
        cut_off += u32::from(answer.code == 5);
        // Nobody waits, with no daemon there.
        site.is_heard_of();
        site.start_daemon("a");
        assert_eq!(site.state_at("a"), "running");
        if number % 4 == 3 {
            site.churn_is_well();
            site.checker_is_well();
        }
    }
    println!("{cut_off} runs were cut off");
    assert!(cut_off > 0, "the daemon was never killed in the middle");
    site.churn_is_well();
    site.checker_is_well();
    let mut done = reclaim(&site, &[]);
    if done.stderr.contains("guest-unfit") {
        done = reclaim(&site, &[]);
    }
    done.expect(0, &[]);
    site.migrate(&[]);
}

/// What the guest keeps of its memory by QEMU's word, bytes; `None` where QEMU talks to somebody else.
fn kept(site: &Site) -> Option<u64> {
    let socket = site.here().directory.join("state/vms").join(&site.guest.name).join("run/qmp.sock");
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(500))).ok()?;
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-balloon\"}").ok()?;
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.find_map(|line| serde_json::from_str::<serde_json::Value>(&line).ok()?["return"]["actual"].as_u64())
}

/// A run that takes the guest's memory by its balloon, at work. One that ended before anybody looked is told of, and
/// another one begun.
fn being_taken(site: &Site) -> Attempt {
    for _ in 0..10 {
        let mut running = by_balloon(site);
        site.eventually("it is being taken", || site.told_at("a").contains("is being taken") || running.has_ended());
        if !running.has_ended() {
            return running;
        }
        println!("it ended before anybody looked: {:#?}", running.end());
    }
    panic!("nobody ever saw it at work");
}

fn by_balloon(site: &Site) -> Attempt {
    Attempt::run(site.here(), &["reclaim", &site.guest.name, "--method", "balloon", "--json", "-"])
}

#[test]
fn a_guest_with_a_balloon_gives_its_free_memory_back_either_way() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan {
        more: ["-device", "virtio-balloon-pci,deflate-on-oom=on"].map(str::to_owned).to_vec(),
        memory_bytes: 512 << 20,
        jobs: "checker:--mib,16,--rate,4;sh:-c,dd${IFS}if=/dev/zero${IFS}of=/tmp/file${IFS}bs=1M${IFS}count=160&&rm${IFS}/tmp/file&&echo${IFS}FREED&&sleep${IFS}10000".into(),
        ..Plan::small()
    });
    site.eventually("the guest has freed some", || site.guest.console_text().contains("FREED"));
    let name = site.guest.name.clone();
    let by_vmi = reclaim(&site, &[]);
    by_vmi.expect(0, &[]);
    let by_vmi = report(&by_vmi);
    assert!(by_vmi.reclaimed_bytes > 100 << 20, "{by_vmi:?}");
    assert!(by_vmi.allocated_before_bytes - by_vmi.allocated_after_bytes > 100 << 20, "{by_vmi:?}");

    // By its balloon there is little left to take, and all of it is the guest's again afterwards.
    let done = by_balloon(&site).end();
    done.expect(0, &[]);
    let done = report(&done);
    println!("{by_vmi:?}\n{done:?}");
    assert_eq!(done.status, Status::Completed);
    assert!(done.candidate_pages > 0, "{done:?}");

    // Whoever comes meanwhile is told so. Ctrl-C: the guest has its memory back all the same.
    let running = being_taken(&site);
    let there = site.there().listen();
    cli::ask(site.here(), &["migrate", &name, "--to", &there]).expect(1, &["vm-busy", "is being taken"]);
    cli::ask(site.here(), &["reclaim", &name]).expect(1, &["vm-busy"]);
    running.interrupt();
    let cancelled = running.end();
    cancelled.expect(3, &["cancelled"]);
    assert_eq!(report(&cancelled).status, Status::Cancelled);

    // A daemon that dies meanwhile, when some has been taken: the next one gives it back.
    let cut_off = (1..=20).any(|seconds| {
        let running = being_taken(&site);
        std::thread::sleep(Duration::from_secs(seconds));
        site.kill_daemon("a");
        let cut_off = running.end().code == 5;
        let mut left = None;
        site.eventually("QEMU talks to nobody else", || {
            left = kept(&site);
            left.is_some()
        });
        println!("killed after {seconds} s, {left:?} bytes left");
        site.start_daemon("a");
        site.eventually("the guest has it back", || kept(&site) == Some(512 << 20));
        cut_off && left < Some(480 << 20)
    });
    assert!(cut_off, "it was never cut off with memory taken");

    // A balloon that is looked after takes turns with a look from outside, and is not used for anything else.
    cli::ask(site.here(), &["balloon", &name, "--auto", "--interval", "200ms"]).expect(0, &[]);
    for _ in 0..10 {
        reclaim(&site, &[]).expect(0, &[]);
    }
    cli::ask(site.here(), &["reclaim", &name, "--method", "balloon"]).expect(1, &["balloon-in-use"]);
    cli::ask(site.here(), &["balloon", &name, "--off"]).expect(0, &[]);
    site.checker_is_well();
}
