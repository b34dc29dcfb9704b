use std::time::Duration;

use sterna_api::Phase;
use sterna_system_tests::needs::{left_to_the_proofs, times};
use sterna_system_tests::{Attempt, Kind, Proxy, Site};

use crate::{arrives, lost_its_daemon, with_guest};

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
    SourceKilled,
    DestinationKilled,
    BothKilled,
}

const FAULTS: [Fault; 8] = [
    Fault::SourceKilled,
    Fault::DestinationKilled,
    Fault::LinkLost,
    Fault::BothKilled,
    Fault::LinkLostIn(Kind::Urgent),
    Fault::LinkLostIn(Kind::Pages),
    Fault::LinkLostIn(Kind::Faults),
    Fault::LinkSilent,
];

/// Makes it happen. Whether the source's daemon, and with it the command line, was lost.
fn happen(fault: Fault, site: &mut Site, proxy: &Proxy, random: &mut Random) -> bool {
    let (here, there) = site.names();
    let victims = match fault {
        Fault::SourceKilled => vec![here],
        Fault::DestinationKilled => vec![there],
        Fault::BothKilled if random.below(2) == 0 => vec![here, there],
        Fault::BothKilled => vec![there, here],
        Fault::LinkLost | Fault::LinkLostIn(_) | Fault::LinkSilent => vec![],
    };
    match fault {
        Fault::LinkLost => proxy.down(),
        Fault::LinkSilent => proxy.stall(),
        // It may be over before so much has come by: then nothing happens.
        Fault::LinkLostIn(Kind::Faults) => proxy.down_after(Kind::Faults, random.below(2_000)),
        Fault::LinkLostIn(kind) => proxy.down_after(kind, random.below(4 << 20)),
        _ => {}
    }
    for victim in &victims {
        site.kill_daemon(victim);
        random.pause(300);
    }
    random.pause(1_500);
    for victim in &victims {
        site.start_daemon(victim);
        random.pause(300);
    }
    proxy.up();
    victims.contains(&here)
}

#[test]
fn whatever_happens_while_pages_follow_the_guest_waits_and_arrives_whole() {
    if left_to_the_proofs() {
        return;
    }
    with_guest(|site| {
        let seed = seed();
        println!("STERNA_SEED={seed}");
        let mut random = Random(seed);
        let (runs, mut hit) = (times(2, 30), 0);
        // Where there are fewer runs than faults it is chance which of them have their turn.
        let first = random.of(&[0, 1, 2, 3, 4, 5, 6, 7]);
        for number in first..first + runs {
            let fault = FAULTS[number % FAULTS.len()];
            // Each fault meets either mode where there are runs enough.
            let mode = ["--mode", ["postcopy", "hybrid"][(number + number / FAULTS.len()) % 2]];
            // So slow that pages are missing for longer than the fault keeps one waiting.
            let (rate, most_ms) = if mode[1] == "postcopy" { ("24MB", 3_000) } else { ("4MB", 1_000) };
            let streams = random.of(&["1", "4"]);
            let more =
                ["--streams", streams, "--compress", random.of(&["off", "lz4", "zstd"]), "--postcopy-bandwidth", rate];
            let words = [&mode[..], &more[..]].concat();
            println!("{number}: {fault:?}, {}", words.join(" "));
            let proxy = Proxy::start(site.here(), site.there());
            let attempt: Attempt = site.begin(Some(&proxy.address), &words);
            site.wait_for_phase(Phase::Postcopy, |_| true);
            random.pause(most_ms);
            let source_lost = happen(fault, site, &proxy, &mut random);
            let answer = attempt.end();
            // It may have ended before.
            if source_lost && answer.code != 0 {
                lost_its_daemon(&answer);
            } else {
                answer.expect(0, &[]);
            }
            let interrupted = answer.report().is_some_and(|report| report.postcopy.interruptions > 0);
            hit += usize::from(source_lost || interrupted);
            arrives(site);
        }
        println!("{hit} of {runs} were hit");
        // A handful can all be over before their fault.
        assert!(runs < 10 || hit * 3 >= runs, "too many were over before the fault");
    });
}
