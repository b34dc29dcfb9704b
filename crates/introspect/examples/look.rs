//! Looks at an image of a guest's RAM again and again and prints how long that takes.
//!
//! usage: `look RAM-FILE CR3 LEVELS [GUEST-PHYSICAL-START-END@OFFSET …]`, numbers in hexadecimal. RAM is the whole file
//! from address 0 on where nothing else is said. CR3 and the depth of the page tables are what `info registers` of
//! QEMU's monitor says.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use sterna_introspect::{Introspection, PageTables, Physical, Unreadable};

struct Image {
    file: File,
    ranges: Vec<Range<u64>>,
    offsets: Vec<u64>,
}

impl Physical for Image {
    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let unreadable = Unreadable { address, bytes: into.len() };
        let end = address.checked_add(into.len() as u64).ok_or(unreadable)?;
        let at = self.ranges.iter().position(|range| range.start <= address && end <= range.end).ok_or(unreadable)?;
        self.file.read_exact_at(into, self.offsets[at] + (address - self.ranges[at].start)).map_err(|_| unreadable)
    }
}

fn number(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("a hexadecimal number")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, root, levels, ranges @ ..] = &arguments[..] else {
        panic!("usage: look RAM-FILE CR3 LEVELS [RANGE …]")
    };
    let file = File::open(path).expect("the image");
    let bytes = file.metadata().expect("its size").len();
    let mut image = Image { file, ranges: Vec::new(), offsets: Vec::new() };
    for range in ranges {
        let (start, rest) = range.split_once('-').expect("START-END@OFFSET");
        let (end, offset) = rest.split_once('@').expect("START-END@OFFSET");
        image.ranges.push(number(start)..number(end));
        image.offsets.push(number(offset));
    }
    if ranges.is_empty() {
        image.ranges.push(0..bytes);
        image.offsets.push(0);
    }
    let processors = [PageTables { root: number(root), five_levels: levels == "5" }];
    let began = Instant::now();
    let found = Introspection::find(&image, &processors).expect("a kernel");
    println!("{} found in {:.1} ms", found.release(), 1e3 * began.elapsed().as_secs_f64());
    let gib = bytes as f64 / f64::from(1 << 30);
    for _ in 0..10 {
        let look = found.look(&image, &processors).expect("a look");
        let ms = 1e3 * look.took.as_secs_f64();
        println!(
            "{} pages free in {} runs, {} counted, NR_FREE_PAGES {}, {:?}, {ms:.2} ms, {:.2} ms per GiB",
            look.free_pages,
            look.free.len(),
            look.counted_pages(),
            look.zones.iter().map(|zone| zone.nr_free_pages).sum::<i64>(),
            look.agreement,
            ms / gib
        );
    }
}
