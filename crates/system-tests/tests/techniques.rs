//! Every technique of pre-copy with every other, on a real guest that checks each page it wrote: no combination loses a
//! write, and each does what it is there for.

use sterna_api::Report;
use sterna_api::options::{Compress, ContentHash, Delta, FakeDirty, SkipFree};
use sterna_system_tests::needs::times;
use sterna_system_tests::pairs::{Technique, pairwise};
use sterna_system_tests::{needs, on_shared_site, skip_without};

/// So slow that the guest's writes make rounds, and so quick that the day has room for all of them.
const RATE: [&str; 4] = ["--mode", "precopy", "--bandwidth", "50MB"];

/// The techniques.
const TECHNIQUES: [Technique; 7] = [
    ("--content-hash", &["xxh3", "off", "sha1", "md5", "murmur3", "blake3"]),
    ("--fake-dirty", &["exact", "off", "dtrack-v1", "dtrack-v2", "adaptive"]),
    ("--compress", &["off", "lz4", "zstd"]),
    ("--delta", &["off", "xbzrle"]),
    ("--hot-pages", &["hold", "send"]),
    ("--streams", &["1", "3"]),
    ("--skip-free", &["vmi", "off"]),
];

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
    if options.skip_free == SkipFree::Off {
        assert_eq!((pages.free, report.introspection.looks), (0, 0));
    } else {
        assert_eq!(report.introspection.reason, None);
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
        // Every third one on every day: that pages come out as they went in, whatever their encoding, is the engine's
        // tests' business.
        for (number, words) in pairwise(&TECHNIQUES).into_iter().step_by(times(3, 1)).enumerate() {
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
            // It counts from the guest's start: a page lost in any of them is not forgotten.
            if number % 4 == 3 {
                site.checker_is_well();
            }
        }
        site.checker_is_well();
    });
}
