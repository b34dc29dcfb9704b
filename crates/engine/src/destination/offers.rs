//! Offers: pages of pools that machines here have, which a gang that comes may refer to without sending them.
//!
//! The files are pools that nobody fills any more, and what was kept of machines that left: nobody writes them. Whoever
//! makes an offer sees to it that nothing is given back of them from before they are looked at until the gang has come:
//! then what was found stays, and a number names one body for as long as the offer lasts.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::file::{self, FileId, allocated_runs};

use crate::name::{Key, Name, name};

/// The most pages that are offered: both sides hold their names.
pub const MAX_PAGES: u64 = 1 << 21;

/// How much is read at a time, pages.
const AT_A_TIME: u64 = 256;

/// Pages that a gang may refer to, each by its number.
#[derive(Debug, Default)]
pub struct Offers {
    /// The pools, for VMMs: they cannot be written by these descriptors.
    files: Vec<File>,
    ids: Vec<FileId>,
    /// What lies in them, in the order of the numbers.
    runs: Vec<Run>,
    pages: u64,
}

/// Neighbouring pages of a file.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// The number of the first page.
    first: u64,
    /// The file's place among the files.
    file: usize,
    /// Where the first page begins, bytes.
    offset: u64,
    pages: u64,
}

impl Offers {
    /// Offers what lies in these pools.
    ///
    /// # Errors
    /// A file cannot be looked at, or cannot be opened again for reading.
    pub fn new(pools: &[File]) -> io::Result<Self> {
        let mut offers = Self::default();
        for pool in pools {
            offers.ids.push(file::id(pool)?);
            for run in allocated_runs(pool, 0..i64::MAX as u64) {
                let run = run?;
                let pages = ((run.end - run.start) / PAGE_BYTES as u64).min(MAX_PAGES - offers.pages);
                offers.runs.push(Run { first: offers.pages, file: offers.files.len(), offset: run.start, pages });
                offers.pages += pages;
            }
            offers.files.push(File::open(format!("/proc/self/fd/{}", pool.as_raw_fd()))?);
        }
        Ok(offers)
    }

    /// Whether pages of this pool are offered.
    #[must_use]
    pub fn are_of(&self, pool: FileId) -> bool {
        self.ids.contains(&pool)
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The names of the pages from this number on, at most so many.
    ///
    /// # Errors
    /// A pool cannot be read.
    pub fn names(&self, key: &Key, first: u64, most: usize) -> io::Result<Vec<Name>> {
        let (mut names, mut buffer, mut at) = (Vec::new(), Vec::new(), first);
        while names.len() < most
            && let Some((run, ahead)) = self.run(at)
        {
            let pages = (run.pages - ahead).min(AT_A_TIME).min((most - names.len()) as u64);
            buffer.resize(pages as usize * PAGE_BYTES, 0);
            self.files[run.file].read_exact_at(&mut buffer, run.offset + ahead * PAGE_BYTES as u64)?;
            names.extend(buffer.as_chunks().0.iter().map(|body| name(key, body)));
            at += pages;
        }
        Ok(names)
    }

    /// Where the page with this number lies; `None` where it was not offered, or its file was cut short.
    #[must_use]
    pub fn find(&self, number: u64) -> Option<(&File, u64)> {
        let (run, ahead) = self.run(number)?;
        let (file, offset) = (&self.files[run.file], run.offset + ahead * PAGE_BYTES as u64);
        let is_there = file.metadata().is_ok_and(|now| now.len() >= offset + PAGE_BYTES as u64);
        is_there.then_some((file, offset))
    }

    /// The run of this number, and how many of its pages lie before it.
    fn run(&self, number: u64) -> Option<(Run, u64)> {
        let behind = self.runs.partition_point(|run| run.first <= number);
        let run = *self.runs[..behind].last()?;
        let ahead = number - run.first;
        (ahead < run.pages).then_some((run, ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pages: &[(u64, u8)]) -> File {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(1 << 22).expect("room");
        for (page, byte) in pages {
            file.write_all_at(&[*byte; PAGE_BYTES], page * PAGE_BYTES as u64).expect("room");
        }
        file
    }

    #[test]
    fn every_page_of_a_pool_has_a_number_its_name_and_its_place_and_holes_have_none() {
        let pools = [pool(&[(3, 1), (4, 2), (700, 3)]), pool(&[(0, 4)])];
        let (offers, key) = (Offers::new(&pools).expect("offers"), [7; 32]);
        assert_eq!(offers.pages(), 4);
        let expected: Vec<_> = (1..=4).map(|byte| name(&key, &[byte; PAGE_BYTES])).collect();
        assert_eq!(offers.names(&key, 0, 100).expect("names"), expected);
        assert_eq!(offers.names(&key, 1, 2).expect("names"), expected[1..3]);
        assert!(offers.names(&key, 4, 100).expect("names").is_empty());
        assert_ne!(offers.names(&[8; 32], 0, 100).expect("names"), expected);
        for (number, byte) in (0..4).zip(1..) {
            let (file, offset) = offers.find(number).expect("it is offered");
            let mut body = [0; PAGE_BYTES];
            file.read_exact_at(&mut body, offset).expect("it is there");
            assert_eq!(body, [byte; PAGE_BYTES]);
            assert!(file.write_at(&[0], offset).is_err(), "a VMM cannot write what others have in common");
        }
        assert!(offers.find(4).is_none() && offers.find(u64::MAX).is_none());
        let ids = pools.each_ref().map(|pool| file::id(pool).expect("an id"));
        assert!(offers.are_of(ids[0]) && offers.are_of(ids[1]));
    }

    #[test]
    fn nothing_is_offered_of_nothing() {
        let offers = Offers::new(&[pool(&[])]).expect("offers");
        assert!(offers.find(0).is_none() && offers.names(&[0; 32], 0, 5).expect("names").is_empty());
    }
}
