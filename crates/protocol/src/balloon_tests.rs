use proptest::prelude::*;

use super::*;

const RAM: u64 = 2048 * MIB;
const TICK: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_secs(5);

/// A guest with a balloon driver, in steps of a second. Reports are taken at the end of a step and arrive in the next.
struct Guest {
    ram: u64,
    /// What its programs and its kernel use.
    used: u64,
    cache: u64,
    balloon: u64,
    target: u64,
    /// What the driver moves in a step.
    speed: u64,
    major_faults: u64,
    swapped_in: u64,
    stamp: u64,
    on_its_way: Option<Report>,
    told: Option<Report>,
    /// Times its driver had to take pages out by itself.
    ran_out: u32,
    answers: bool,
}

impl Guest {
    fn new(used: u64) -> Self {
        Self {
            ram: RAM,
            used,
            cache: 0,
            balloon: 0,
            target: 0,
            speed: 512 * MIB,
            major_faults: 0,
            swapped_in: 0,
            stamp: 0,
            on_its_way: None,
            told: None,
            ran_out: 0,
            answers: true,
        }
    }

    fn free(&self) -> u64 {
        self.ram - self.used - self.cache - self.balloon
    }

    /// Sets what its programs use now. Free memory is taken first, then caches; then the driver gives pages back.
    fn uses(&mut self, bytes: u64) {
        if bytes > self.used {
            let mut missing = (bytes - self.used).saturating_sub(self.free());
            let evicted = missing.min(self.cache);
            self.cache -= evicted;
            missing -= evicted;
            if missing > 0 {
                self.balloon -= missing;
                self.ran_out += 1;
            }
        }
        self.used = bytes;
    }

    fn second(&mut self) {
        if self.target > self.balloon {
            self.balloon += (self.target - self.balloon).min(self.speed).min(self.free());
        } else {
            self.balloon -= (self.balloon - self.target).min(self.speed);
        }
        if self.answers {
            self.told = self.on_its_way.or(self.told);
            self.stamp += 1;
            self.on_its_way = Some(Report {
                stamp: self.stamp,
                free_bytes: Some(self.free()),
                available_bytes: Some(self.free() + self.cache / 2),
                swapped_in_bytes: Some(self.swapped_in),
                major_faults: Some(self.major_faults),
                oom_kills: None,
            });
        }
    }

    fn sample(&self, elapsed: Duration) -> Sample {
        Sample { elapsed, guest_bytes: self.ram - self.balloon, report: self.told }
    }

    /// A second goes by; what was decided is done.
    fn live(&mut self, policy: &mut Policy) -> Decision {
        self.second();
        let decision = policy.step(&self.sample(TICK));
        if let Decision::Resize(bytes) | Decision::Relieve(bytes, _) = decision {
            assert!(bytes >= floor_bytes(self.ram).min(self.ram - self.balloon), "{bytes} is below the floor");
            self.target = self.ram - bytes;
        }
        decision
    }

    fn live_for(&mut self, policy: &mut Policy, seconds: u32) -> Vec<Decision> {
        (0..seconds).map(|_| self.live(policy)).filter(|decision| *decision != Decision::Leave).collect()
    }
}

fn policy() -> Policy {
    Policy::new(RAM, INTERVAL)
}

#[test]
fn free_memory_is_in_the_balloon_within_two_intervals_and_then_nothing_moves() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    let decisions = guest.live_for(&mut policy, 10);
    let free_at_first = RAM - 300 * MIB;
    assert!(guest.balloon >= free_at_first * 94 / 100, "{} MiB: {decisions:?}", guest.balloon / MIB);
    assert!(guest.free() >= free_at_first * 4 / 100);
    assert_eq!(guest.live_for(&mut policy, 600), []);
    assert_eq!(guest.ran_out, 0);
}

#[test]
fn memory_that_is_freed_later_is_taken_within_two_intervals() {
    let (mut guest, mut policy) = (Guest::new(1500 * MIB), policy());
    guest.live_for(&mut policy, 60);
    guest.uses(200 * MIB);
    guest.live_for(&mut policy, 10);
    assert!(guest.balloon >= (RAM - 200 * MIB) * 94 / 100, "{} MiB", guest.balloon / MIB);
}

#[test]
fn a_slow_driver_is_not_asked_for_more_than_the_guest_has() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.speed = 64 * MIB;
    for _ in 0..120 {
        guest.live(&mut policy);
        let kept = guest.ram - guest.target;
        assert!(kept >= guest.used + reserve_bytes(RAM), "asked to live in {} MiB", kept / MIB);
    }
    assert!(guest.balloon >= (RAM - 300 * MIB) * 94 / 100);
}

#[test]
fn need_is_answered_at_once_and_the_balloon_stays_small_for_ten_intervals() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.live_for(&mut policy, 60);
    let before = guest.balloon;
    guest.uses(300 * MIB + guest.free() - MIB);
    let decisions = guest.live_for(&mut policy, 3);
    assert!(matches!(decisions[..], [Decision::Relieve(_, Pressure::LowMemory)]), "{decisions:?}");
    guest.second();
    assert!(guest.balloon <= before / 2);
    let smallest = guest.balloon;
    for second in 0..45 {
        let decision = guest.live(&mut policy);
        assert!(guest.target <= smallest, "it grows after {second} s: {decision:?}");
    }
    assert!(policy.backs_off());
    guest.uses(300 * MIB);
    guest.live_for(&mut policy, 20);
    assert!(!policy.backs_off() && guest.balloon > before * 9 / 10, "it grows again afterwards");
}

#[test]
fn a_guest_that_takes_pages_out_by_itself_gets_all_of_them() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.live_for(&mut policy, 60);
    guest.uses(300 * MIB + guest.free() + 100 * MIB);
    assert_eq!(guest.ran_out, 1);
    assert_eq!(guest.live(&mut policy), Decision::Relieve(RAM, Pressure::OutOfMemory));
}

#[test]
fn swap_file_reads_kills_and_silence_are_pressure() {
    type Happens = fn(&mut Guest);
    let cases: [(Pressure, Happens); 3] = [
        (Pressure::SwapIn, |guest| guest.swapped_in += MIB),
        (Pressure::MajorFaults, |guest| guest.major_faults += 400),
        (Pressure::Silent, |guest| guest.answers = false),
    ];
    for (expected, happens) in cases {
        let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
        guest.live_for(&mut policy, 60);
        happens(&mut guest);
        let decisions = guest.live_for(&mut policy, 12);
        assert!(
            matches!(decisions[..], [Decision::Relieve(_, what)] if what == expected),
            "{expected:?}: {decisions:?}"
        );
    }
    let mut policy = policy();
    let report = Report { stamp: 1, free_bytes: Some(MIB), oom_kills: Some(3), ..Report::default() };
    let sample = |report| Sample { elapsed: TICK, guest_bytes: RAM / 2, report: Some(report) };
    policy.step(&sample(report));
    let killed = Report { stamp: 2, oom_kills: Some(4), ..report };
    assert_eq!(policy.step(&sample(killed)), Decision::Relieve(RAM, Pressure::OutOfMemory));
}

#[test]
fn a_guest_that_always_reads_files_is_not_taken_for_one_in_need() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    for _ in 0..300 {
        guest.major_faults += 200;
        guest.live(&mut policy);
    }
    let decisions: Vec<_> = (0..300)
        .map(|_| {
            guest.major_faults += 200;
            guest.live(&mut policy)
        })
        .collect();
    assert!(!decisions.iter().any(|decision| matches!(decision, Decision::Relieve(..))));
    assert!(guest.balloon > RAM / 2);
}

#[test]
fn a_guest_that_starts_anew_gets_its_memory_back() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.major_faults = 1000;
    guest.live_for(&mut policy, 60);
    guest.major_faults = 3;
    assert_eq!(guest.live_for(&mut policy, 2), [Decision::Relieve(RAM, Pressure::Restart)]);
}

#[test]
fn caches_are_left_to_the_guest() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.cache = 1000 * MIB;
    guest.live_for(&mut policy, 60);
    assert_eq!(guest.cache, 1000 * MIB);
    assert!(guest.balloon > 600 * MIB && guest.free() >= reserve_bytes(RAM));
}

#[test]
fn a_load_that_comes_and_goes_does_not_make_the_balloon_pump() {
    // Busy for 7 s, idle for 8 s, for an hour: it would fit an interval and miss the next.
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    let (mut grown, mut relieved) = (0, 0);
    for second in 0..3600 {
        match second % 15 {
            0 => guest.uses(1400 * MIB),
            7 => guest.uses(300 * MIB),
            _ => {}
        }
        let before = guest.target;
        match guest.live(&mut policy) {
            Decision::Resize(_) => grown += u32::from(guest.target > before),
            Decision::Relieve(..) => relieved += 1,
            Decision::Leave => {}
        }
    }
    // Once in ten intervals and the time it takes to grow.
    assert!(relieved <= 3600 / 50 + 1 && guest.ran_out <= 3600 / 50 + 1, "{relieved} reliefs, {} times", guest.ran_out);
    assert!(grown <= 2 * (relieved + 1), "{grown} times larger, {relieved} reliefs");
}

#[test]
fn a_guest_without_statistics_keeps_its_memory() {
    let (mut guest, mut policy) = (Guest::new(300 * MIB), policy());
    guest.answers = false;
    assert_eq!(guest.live_for(&mut policy, 100), []);
}

#[test]
fn short_intervals_take_no_report_for_a_newer_one() {
    let mut policy = Policy::new(RAM, Duration::from_millis(10));
    let report = |stamp| Report {
        stamp,
        free_bytes: Some(RAM - 300 * MIB),
        available_bytes: Some(RAM - 300 * MIB),
        ..Report::default()
    };
    let mut step = |stamp, guest_bytes| {
        policy.step(&Sample { elapsed: Duration::from_millis(10), guest_bytes, report: Some(report(stamp)) })
    };
    assert_eq!((step(1, RAM), step(2, RAM)), (Decision::Leave, Decision::Leave));
    let Decision::Resize(kept) = step(3, RAM) else { panic!("two reports with this balloon") };
    // The guest has done it; for a second its report is still the old one, in which all that is in the balloon now was
    // free.
    for _ in 0..100 {
        assert_eq!(step(3, kept), Decision::Leave);
    }
    assert_eq!(step(4, kept), Decision::Leave, "it may have been under way while the balloon grew");
}

proptest! {
    #[test]
    fn whatever_a_guest_reports_it_is_asked_for_what_can_be(
        ram_mib in 1_u64..1 << 24,
        looks in proptest::collection::vec(any::<(u16, u64, u64, Option<u64>, Option<u64>, Option<u64>, u64)>(), 1..40),
    ) {
        let ram = ram_mib * MIB;
        let mut policy = Policy::new(ram, INTERVAL);
        for (ms, stamp, guest_bytes, free_bytes, available_bytes, swapped_in_bytes, major_faults) in looks {
            let report = Report { stamp: stamp % 4, free_bytes, available_bytes, swapped_in_bytes,
                major_faults: Some(major_faults), oom_kills: None };
            let sample = Sample { elapsed: Duration::from_millis(ms.into()), guest_bytes, report: Some(report) };
            if let Decision::Resize(bytes) | Decision::Relieve(bytes, _) = policy.step(&sample) {
                prop_assert!(bytes <= ram && bytes >= floor_bytes(ram).min(guest_bytes), "{bytes} of {ram}");
            }
        }
    }
}
