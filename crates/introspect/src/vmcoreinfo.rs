use std::ops::Range;

use crate::linux::Unfit;
use crate::{PAGE_BYTES, Physical, Unreadable};

/// The beginning of the text.
const BEGINNING: &[u8] = b"OSRELEASE=";

/// The ELF note around the second copy: sizes of name and text, type 0, the name, padded to four bytes.
const NOTE_NAME: &[u8; 12] = b"VMCOREINFO\0\0";
const NOTE_HEADER_BYTES: usize = 12 + NOTE_NAME.len();

/// The longest text that is read. Kernels give it a page, recent ones may give it several (`VMCOREINFO_BYTES`).
const MAX_BYTES: usize = 16 << 10;

/// The bytes that the search reads at once.
const STRIDE: usize = 1 << 20;

/// A kernel's description of itself for those who read its memory after a crash (`kernel/vmcore_info.c`, before 6.9 in
/// `kernel/crash_core.c`; x86's part in `arch/x86/kernel/`). It is complete once the kernel has its first processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Vmcoreinfo {
    /// Its guest-physical address.
    pub address: u64,
    text: String,
}

impl Vmcoreinfo {
    /// The description at this address; `None` where there is none.
    pub fn at(ram: &dyn Physical, address: u64) -> Option<Self> {
        let mut bytes = vec![0; MAX_BYTES];
        let read = read_as_far_as_possible(ram, address, &mut bytes);
        let bytes = bytes.get(..read)?;
        let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let text = bytes.get(..length)?;
        let is_text = text.iter().all(|byte| matches!(byte, b'\n' | b' '..=b'~'));
        let text = (text.starts_with(BEGINNING) && is_text).then(|| String::from_utf8_lossy(text).into_owned())?;
        Some(Self { address, text })
    }

    /// Whether both have the same text, wherever they lie.
    pub fn says_the_same(&self, other: &Self) -> bool {
        self.text == other.text
    }

    /// The kernel's release, as `uname -r` in the guest has it.
    pub fn release(&self) -> &str {
        self.value("OSRELEASE").unwrap_or_default()
    }

    /// A symbol's address, or where it is an array's its own value.
    pub fn symbol(&self, name: &str) -> Result<u64, Unfit> {
        let value = self.required("SYMBOL", name)?;
        u64::from_str_radix(value, 16).map_err(|_| self.malformed("SYMBOL", name))
    }

    /// A size, offset or length: `kind` is the word before the parenthesis. No field of anything that is read here lies
    /// beyond 4 GiB.
    pub fn measure(&self, kind: &str, name: &str) -> Result<u64, Unfit> {
        let value = self.required(kind, name)?.parse::<u32>();
        value.map(u64::from).map_err(|_| self.malformed(kind, name))
    }

    /// A number. Kernels write some positive numbers as negative ones, and the other way round.
    pub fn number(&self, name: &str) -> Result<i64, Unfit> {
        let value = self.required("NUMBER", name)?;
        let unsigned = || value.parse::<u64>().map(u64::cast_signed);
        value.parse().or_else(|_| unsigned()).map_err(|_| self.malformed("NUMBER", name))
    }

    /// A line's value; `None` where there is no such line.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }

    fn required(&self, kind: &str, name: &str) -> Result<&str, Unfit> {
        let key = format!("{kind}({name})");
        self.value(&key).ok_or(Unfit::Missing { what: key })
    }

    fn malformed(&self, kind: &str, name: &str) -> Unfit {
        Unfit::Malformed { what: format!("{kind}({name}) in VMCOREINFO") }
    }
}

/// Calls `each` for every description in RAM until it returns `Some`. Each kernel has two: a page that begins with the
/// text and one that begins with an ELF note of it. A restarted guest may also hold those of earlier kernels.
pub(crate) fn search<T>(ram: &dyn Physical, mut each: impl FnMut(Vmcoreinfo) -> Option<T>) -> Option<T> {
    let mut buffer = vec![0; STRIDE];
    for range in ram.ranges() {
        let mut address = range.start;
        while address < range.end {
            let bytes = usize::try_from(range.end - address).map_or(STRIDE, |left| left.min(STRIDE));
            let piece = &mut buffer[..bytes];
            // Memory that cannot be read holds no description that could be used.
            if ram.read(address, piece).is_ok() {
                for (index, page) in piece.chunks(PAGE_BYTES as usize).enumerate() {
                    let Some(offset) = text_offset(page) else { continue };
                    let at = address + index as u64 * PAGE_BYTES + offset;
                    if let Some(found) = Vmcoreinfo::at(ram, at).and_then(&mut each) {
                        return Some(found);
                    }
                }
            }
            address += bytes as u64;
        }
    }
    None
}

/// The offset in a page at which a text begins, if one does; the first 64 bytes of the page tell.
pub(crate) fn text_offset(page: &[u8]) -> Option<u64> {
    let in_note = page.get(12..NOTE_HEADER_BYTES).is_some_and(|name| name == NOTE_NAME)
        && page.get(NOTE_HEADER_BYTES..).is_some_and(|text| text.starts_with(BEGINNING));
    if page.starts_with(BEGINNING) { Some(0) } else { in_note.then_some(NOTE_HEADER_BYTES as u64) }
}

/// Reads page by page up to the end of RAM; returns how much that was.
fn read_as_far_as_possible(ram: &dyn Physical, address: u64, into: &mut [u8]) -> usize {
    let mut read = 0;
    while read < into.len() {
        let Some(at) = address.checked_add(read as u64) else { break };
        let Range { start, end } = read..into.len().min(read + (PAGE_BYTES - at % PAGE_BYTES) as usize);
        let Ok::<(), Unreadable>(()) = ram.read(at, &mut into[start..end]) else { break };
        read = end;
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::Ram;

    fn note(text: &str) -> Vmcoreinfo {
        let mut ram = Ram::new(1 << 20);
        ram.write(0x3000, text.as_bytes());
        Vmcoreinfo::at(&ram, 0x3000).expect("a description")
    }

    #[test]
    fn values_are_looked_up_by_kind_and_whole_name() {
        let note = note(concat!(
            "OSRELEASE=6.1.0-test\nSYMBOL(mem_section)=ff19df78beed3000\nSIZE(page)=64\nSIZE(page_x)=1\n",
            "NUMBER(phys_base)=-312475648\nNUMBER(big)=18446744073397075968\nOFFSET(zone.vm_stat)=x\nPAGESIZE=4096\n"
        ));
        assert_eq!(note.release(), "6.1.0-test");
        assert_eq!(note.symbol("mem_section").unwrap(), 0xff19_df78_beed_3000);
        assert_eq!(note.measure("SIZE", "page").unwrap(), 64);
        assert_eq!(note.number("phys_base").unwrap(), -312_475_648);
        assert_eq!(note.number("big").unwrap(), -312_475_648);
        assert_eq!(note.value("PAGESIZE"), Some("4096"));
        assert_eq!(note.measure("SIZE", "pag"), Err(Unfit::Missing { what: "SIZE(pag)".into() }));
        assert_eq!(
            note.measure("OFFSET", "zone.vm_stat"),
            Err(Unfit::Malformed { what: "OFFSET(zone.vm_stat) in VMCOREINFO".into() })
        );
    }

    #[test]
    fn both_copies_are_found_at_the_beginning_of_their_pages_and_nothing_else_is() {
        let mut ram = Ram::new(4 << 20);
        ram.write(0x5000, b"OSRELEASE=a\n");
        ram.write(0x6800, b"OSRELEASE=not at a page's beginning\n");
        ram.write(0x7000, b"OSRELEASE=\xff\n");
        ram.write(0x31_200c, NOTE_NAME);
        ram.write(0x31_2018, b"OSRELEASE=b\n");
        let mut found = Vec::new();
        let nothing: Option<()> = search(&ram, |note| {
            found.push((note.address, note.release().to_owned()));
            None
        });
        assert_eq!(nothing, None);
        assert_eq!(found, [(0x5000, "a".to_owned()), (0x31_2018, "b".to_owned())]);
    }

    #[test]
    fn a_text_at_the_very_end_of_ram_ends_there() {
        let mut ram = Ram::new(1 << 20);
        let page = [b"OSRELEASE=".to_vec(), vec![b'x'; 4086]].concat();
        ram.write((1 << 20) - 4096, &page);
        let note = Vmcoreinfo::at(&ram, (1 << 20) - 4096).expect("a description");
        assert_eq!(note.release().len(), 4086);
    }
}
