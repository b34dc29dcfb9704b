//! Every technique of pre-copy with every other, on a real guest that checks each page it wrote: no combination loses a write, and
//! each does what it is there for.

use sterna_api::Report;
use sterna_api::options::{Compress, ContentHash, Delta, FakeDirty};
use sterna_system_tests::{needs, on_shared_site, skip_without};

/// So slow that the guest's writes make rounds, and so quick that the day has room for all of them.
const RATE: [&str; 2] = ["--bandwidth", "50MB"];

/// The techniques: an option and what it may be.
const TECHNIQUES: [(&str, &[&str]); 6] = [
    ("--content-hash", &["xxh3", "off", "sha1", "md5", "murmur3", "blake3"]),
    ("--fake-dirty", &["exact", "off", "dtrack-v1", "dtrack-v2", "adaptive"]),
    ("--compress", &["off", "lz4", "zstd"]),
    ("--delta", &["off", "xbzrle"]),
    ("--hot-pages", &["hold", "send"]),
    ("--streams", &["1", "3"]),
];

/// A choice for each technique, by its position.
type Choice = [usize; TECHNIQUES.len()];

/// Choices among which every value of each technique meets every value of each other: greedily, the one that brings most new pairs next.
fn pairwise() -> Vec<Choice> {
    let count = |technique: usize| TECHNIQUES[technique].1.len();
    let mut all = vec![Choice::default()];
    for technique in 0..TECHNIQUES.len() {
        all = all
            .iter()
            .flat_map(|choice| {
                (0..count(technique)).map(move |value| {
                    let mut choice = *choice;
                    choice[technique] = value;
                    choice
                })
            })
            .collect();
    }
    let pairs = |choice: &Choice| {
        let choice = *choice;
        (0..TECHNIQUES.len())
            .flat_map(move |a| (a + 1..TECHNIQUES.len()).map(move |b| (a, choice[a], b, choice[b])))
            .collect::<Vec<_>>()
    };
    let mut open: std::collections::HashSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let news = |choice: &&Choice| pairs(choice).iter().filter(|pair| open.contains(pair)).count();
        // The first of the best, so that the order is the same every day.
        let best = all.iter().rev().max_by_key(news).expect("there are choices");
        pairs(best).iter().for_each(|pair| {
            open.remove(pair);
        });
        chosen.push(*best);
    }
    chosen
}

fn words(choice: &Choice) -> Vec<&'static str> {
    TECHNIQUES.iter().zip(choice).flat_map(|((option, values), &value)| [*option, values[value]]).collect()
}

/// What the report must say of the techniques that were asked for.
fn did_what_it_says(report: &Report) {
    let (options, pages, encoding) = (&report.options, &report.pages, &report.encoding);
    if options.compress == Compress::Off {
        assert_eq!(encoding.compression.pages, 0, "{encoding:?}");
    } else {
        assert!(encoding.compression.pages > 0, "a guest's memory is not all incompressible: {encoding:?}");
        assert!(report.bytes_on_wire < report.bytes_raw, "{encoding:?}");
    }
    if options.delta == Delta::Off {
        assert_eq!(pages.delta, 0);
    } else {
        assert!(encoding.delta.cache_bytes > 0 && encoding.delta.cache_bytes <= 64 << 20, "{encoding:?}");
    }
    if options.fake_dirty == FakeDirty::Off {
        assert_eq!(pages.fake_dirty_tracked, 0);
    } else {
        assert!(report.tracking.looks > 0, "{:?}", report.tracking);
    }
    if options.content_hash == ContentHash::Off {
        assert_eq!(pages.fake_dirty_content, 0);
    } else {
        assert!(encoding.hash_bytes_per_page >= 8, "{encoding:?}");
    }
    assert_eq!(pages.sent, pages.full + pages.delta);
    let last = report.rounds.last().expect("the round in the pause");
    assert_eq!(last.hot_pages, 0, "with the guest stopped nothing is held back");
}

#[test]
fn every_pair_of_techniques_keeps_every_page() {
    if skip_without(&needs::GUEST) {
        return;
    }
    on_shared_site(|site| {
        for choice in pairwise() {
            let words = words(&choice);
            let report = site.migrate(&[&RATE[..], &words].concat());
            println!(
                "{}: {:.0} ms, {} rounds, {} MiB, {:?}",
                words.join(" "),
                report.total_ms,
                report.rounds.len(),
                report.bytes_on_wire >> 20,
                report.pages
            );
            did_what_it_says(&report);
            site.checker_is_well();
        }
    });
}

#[test]
fn the_pairs_are_all_there() {
    let choices = pairwise();
    assert!(choices.len() <= 40, "{}", choices.len());
    for hash in TECHNIQUES[0].1 {
        for compress in TECHNIQUES[2].1 {
            assert!(choices.iter().any(|choice| {
                let words = words(choice);
                words.contains(hash) && words.windows(2).any(|pair| pair == ["--compress", *compress])
            }));
        }
    }
}
