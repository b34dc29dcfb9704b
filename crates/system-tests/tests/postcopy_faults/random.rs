use std::time::Duration;

use sterna_api::Phase;
use sterna_system_tests::needs::times;
use sterna_system_tests::{Attempt, Kind, Proxy, Site};

use crate::{arrives, with_guest};

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn pause(&mut self, most_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.below(most_ms)));
    }
}

/// The seed that `STERNA_SEED` names, or another each time.
fn seed() -> u64 {
    let named = std::env::var("STERNA_SEED").ok().and_then(|text| text.parse().ok());
    named.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64 >> 10))
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    LinkLost,
    LinkLostIn(Kind),
    LinkSilent,
    DestinationKilled,
}

const FAULTS: [Fault; 6] = [
    Fault::DestinationKilled,
    Fault::LinkLost,
    Fault::LinkLostIn(Kind::Urgent),
    Fault::LinkLostIn(Kind::Pages),
    Fault::LinkLostIn(Kind::Faults),
    Fault::LinkSilent,
];

/// Makes it happen.
fn happen(fault: Fault, site: &mut Site, proxy: &Proxy, random: &mut Random) {
    let (_, there) = site.names();
    match fault {
        Fault::LinkLost => proxy.down(),
        Fault::LinkSilent => proxy.stall(),
        // It may be over before so much has come by: then nothing happens.
        Fault::LinkLostIn(Kind::Faults) => proxy.down_after(Kind::Faults, random.below(2_000)),
        Fault::LinkLostIn(kind) => proxy.down_after(kind, random.below(4 << 20)),
        Fault::DestinationKilled => site.kill_daemon(there),
    }
    random.pause(1_500);
    if matches!(fault, Fault::DestinationKilled) {
        site.start_daemon(there);
    }
    random.pause(300);
    proxy.up();
}

#[test]
fn whatever_happens_while_pages_follow_the_guest_waits_and_arrives_whole() {
    with_guest(|site| {
        let seed = seed();
        println!("STERNA_SEED={seed}");
        let mut random = Random(seed);
        for number in 0..times(6, 30) {
            let fault = FAULTS[number % FAULTS.len()];
            // Each fault meets either mode where there are runs enough.
            let mode = ["--mode", ["postcopy", "hybrid"][(number + number / FAULTS.len()) % 2]];
            let streams = random.of(&["1", "4"]);
            let more = [
                "--streams",
                streams,
                "--compress",
                random.of(&["off", "lz4", "zstd"]),
                "--postcopy-bandwidth",
                "24MB",
            ];
            let words = [&mode[..], &more[..]].concat();
            println!("{number}: {fault:?}, {}", words.join(" "));
            let proxy = Proxy::start(site.here(), site.there());
            let attempt: Attempt = site.begin(Some(&proxy.address), &words);
            site.wait_for_phase(Phase::Postcopy, |_| true);
            random.pause(if mode[1] == "postcopy" { 3_000 } else { 1_000 });
            happen(fault, site, &proxy, &mut random);
            attempt.end().expect(0, &[]);
            arrives(site);
        }
    });
}
