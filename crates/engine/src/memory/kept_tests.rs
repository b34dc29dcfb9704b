//! What is kept of machines that have left. This process is the VMM.

use std::sync::Arc;

use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::{Access, PrivateMapping};

use super::*;
use crate::destination::offers::Offers;
use crate::memory::inside_here::InsideHere;
use crate::memory::shared::SharedMemory;
use crate::memory::{BlockFile, Holder, kind};

const BYTES: u64 = 2 << 20;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn spec() -> BlockSpec {
    BlockSpec { id: "ram".into(), bytes: BYTES, page_bytes: 4096, path: String::new() }
}

/// A guest in private memory whose pages are full of these bytes, page by page; 0 for one that was never touched.
fn private(pages: &[u8]) -> (Arc<Vec<PrivateMapping>>, Arc<dyn Memory>) {
    let mapping = Arc::new(vec![PrivateMapping::new(BYTES).unwrap()]);
    for (number, byte) in pages.iter().enumerate().filter(|(_, byte)| **byte != 0) {
        mapping[0].write((number * PAGE_BYTES) as u64, &[*byte; PAGE_BYTES]);
    }
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let inside = Arc::new(Mutex::new(InsideHere(Arc::clone(&mapping))));
    let process = Some(Holder { pid: std::process::id(), inside });
    let block = BlockFile { spec: spec(), file, address: mapping[0].addresses().start, process };
    (mapping, kind::open(&[block], Access::ReadWrite).unwrap())
}

/// The first bytes of the pages that are offered of these files, in order.
fn offered(files: &[File]) -> Vec<u8> {
    let offers = Offers::new(files).unwrap();
    let first = |number| {
        let (file, offset) = offers.find(number).expect("it is offered");
        let mut body = [0; PAGE_BYTES];
        file.read_exact_at(&mut body, offset).unwrap();
        assert!(body.iter().all(|byte| *byte == body[0]), "half a page");
        body[0]
    };
    (0..offers.pages()).map(first).collect()
}

#[test]
fn each_content_of_a_gang_is_kept_once_and_zeros_are_not() {
    let (dir, gang) = (dir(), [private(&[1, 2, 0, 2, 3]), private(&[3, 0, 4, 1])]);
    let kept = Kept::nothing(dir.path().into());
    gang.iter().for_each(|(_, ram)| kept.keep(ram.as_ref(), &|| true).unwrap());
    assert_eq!(kept.bytes(), 4 * PAGE_BYTES as u64);
    // What the guest does afterwards changes nothing: it is a copy.
    gang[0].0[0].write(0, &[9; PAGE_BYTES]);
    let files = kept.files().unwrap();
    assert_eq!(offered(&files), [1, 2, 3, 4]);
    assert!(files[0].write_at(&[0], 0).is_err(), "nobody gets a descriptor that can write");
    kept.keep(private(&[7]).1.as_ref(), &|| true).unwrap();
    assert_eq!(offered(&kept.files().unwrap()), [1, 2, 3, 4], "what was offered stays as it was");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "it has no name");
}

#[test]
fn nothing_is_copied_where_there_is_no_room() {
    let (dir, (_mapping, ram)) = (dir(), private(&[1, 2]));
    let kept = Kept::nothing(dir.path().into());
    kept.keep(ram.as_ref(), &|| false).unwrap();
    assert_eq!((kept.bytes(), offered(&kept.files().unwrap())), (0, vec![]));
}

/// Else a device back end that still has the guest's RAM mapped could change what is offered.
#[test]
fn a_file_that_somebody_can_write_or_that_has_a_name_is_not_used() {
    let dir = dir();
    let path = dir.path().join("ram");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(BYTES).unwrap();
    file.write_all_at(&[5; PAGE_BYTES], 0).unwrap();
    let block = BlockFile { spec: spec(), file, address: 0, process: None };
    let ram = SharedMemory::open(std::slice::from_ref(&block), Access::Read).unwrap();
    let kept = Kept::nothing(dir.path().into());
    kept.keep(&ram, &|| true).unwrap();
    drop(ram);
    assert!(kept.files().unwrap().is_empty(), "it has a name, and the machine has it");
    std::fs::remove_file(&path).unwrap();
    assert!(kept.files().unwrap().is_empty(), "the machine has it");
    drop(block);
    assert_eq!(offered(&kept.files().unwrap()), [5]);
    assert_eq!(kept.bytes(), PAGE_BYTES as u64);
}
