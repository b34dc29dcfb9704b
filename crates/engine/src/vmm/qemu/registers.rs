use sterna_introspect::PageTables;

use super::commands::ask_monitor;
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// No command for programs tells a processor's registers.
const COMMAND: &str = "info registers -a";

/// Bits of control registers (Intel's manual, volume 3, "Control registers"): paging is on; it has five levels.
const CR0_PAGING: u64 = 1 << 31;
const CR4_FIVE_LEVELS: u64 = 1 << 12;
/// The guest is, or was made ready to be, a hypervisor itself: Intel's VMX is on; AMD's SVM is (`EFER`, its manual,
/// volume 2).
const CR4_VMX: u64 = 1 << 13;
const EFER_SVM: u64 = 1 << 12;

/// Asks QEMU which page tables the processors use now.
pub(super) fn page_tables(qmp: &mut Qmp) -> Result<Vec<PageTables>, VmmError> {
    ask_monitor(qmp, COMMAND).map(|text| parse(&text))
}

/// Asks QEMU whether any processor has virtualization switched on, as it is while guests of the guest run, and so while
/// KVM keeps pages mapped for them.
pub(super) fn nests(qmp: &mut Qmp) -> Result<bool, VmmError> {
    ask_monitor(qmp, COMMAND).map(|text| parse_nests(&text))
}

/// Reads the same text, and one more line for each processor: `EFER=0000000000000d01`. Where a processor's registers
/// are not told, it may be so.
fn parse_nests(text: &str) -> bool {
    let bits = |name: &str, bit: u64| -> Vec<Option<bool>> {
        let words = text.split_whitespace().filter_map(|word| word.strip_prefix(name));
        words.map(|word| u64::from_str_radix(word, 16).ok().map(|value| value & bit != 0)).collect()
    };
    let headings = text.lines().filter(|line| line.trim().starts_with("CPU#")).count();
    let (vmx, svm) = (bits("CR4=", CR4_VMX), bits("EFER=", EFER_SVM));
    let told = headings > 0 && vmx.len() == headings && svm.len() == headings;
    !told || vmx.iter().chain(&svm).any(|bit| *bit != Some(false))
}

/// Reads a text with two lines as these for each processor, among others:
/// ```text
/// CPU#0
/// CR0=80050033 CR2=000000001dfe5c88 CR3=0000000001844000 CR4=00751eb0
/// ```
/// A processor that was reset and never had page tables since is left out: it waits for the others to start it. One
/// that had some and does without now runs something that nobody knows (firmware in system management mode, a kernel
/// that is just being replaced), and then none of them is told.
fn parse(text: &str) -> Vec<PageTables> {
    let mut processors = Vec::new();
    let mut headings = 0;
    let mut told = 0;
    for line in text.lines().map(str::trim) {
        headings += usize::from(line.starts_with("CPU#"));
        let Some(registers) = line.strip_prefix("CR0=").map(|rest| rest.split_whitespace()) else { continue };
        let words: Vec<&str> = registers.collect();
        let named = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        let number = |text: Option<&str>| text.and_then(|text| u64::from_str_radix(text, 16).ok());
        let (Some(cr0), Some(root), Some(cr4)) =
            (number(words.first().copied()), number(named("CR3=")), number(named("CR4=")))
        else {
            return Vec::new();
        };
        told += 1;
        match (cr0 & CR0_PAGING != 0, root) {
            (true, root) => processors.push(PageTables { root, five_levels: cr4 & CR4_FIVE_LEVELS != 0 }),
            (false, 0) => {}
            (false, _) => return Vec::new(),
        }
    }
    if told == headings { processors } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn four(root: u64) -> PageTables {
        PageTables { root, five_levels: false }
    }

    #[test]
    fn what_qemu_7_2_and_10_0_print_is_read() {
        let five = |root| PageTables { root, five_levels: true };
        assert_eq!(parse(include_str!("recorded/registers-7.2.txt")), [five(0x184_4000), five(0x184_2000)]);
        assert_eq!(parse(include_str!("recorded/registers-10.0.txt")), [four(0x1_0140_2000), four(0x1_009f_8000)]);
    }

    #[test]
    fn a_processor_that_has_virtualization_on_is_found_and_one_that_is_not_told_may_have() {
        let plain = include_str!("recorded/registers-7.2.txt");
        assert!(!parse_nests(plain) && !parse_nests(include_str!("recorded/registers-10.0.txt")));
        // The second processor's: what Linux's KVM sets on Intel, and on AMD.
        let last = plain.rfind("CR4=00751eb0").unwrap();
        assert!(parse_nests(&format!("{}CR4=00753eb0{}", &plain[..last], &plain[last + 12..])));
        let last = plain.rfind("EFER=0000000000000d01").unwrap();
        assert!(parse_nests(&format!("{}EFER=0000000000001d01{}", &plain[..last], &plain[last + 21..])));
        for text in ["", "CPU#0\r\n", "CPU#0\r\nCR0=1 CR4=20\r\n", "CPU#0\r\nCR0=1 CR4=x\r\nEFER=0\r\n"] {
            assert!(parse_nests(text), "{text}");
        }
    }

    #[test]
    fn processors_that_wait_are_left_out_and_one_that_runs_without_page_tables_puts_all_in_doubt() {
        let on = "CPU#0\r\nCR0=80050033 CR2=0 CR3=1000 CR4=20\r\n";
        let reset = "\r\nCPU#1\r\nCR0=60000010 CR2=00000000 CR3=00000000 CR4=00000000\r\n";
        let off = "\r\nCPU#1\r\nCR0=00000033 CR2=0 CR3=00002000 CR4=0\r\n";
        assert_eq!(parse(on), [four(0x1000)]);
        assert_eq!(parse(&format!("{on}{reset}")), [four(0x1000)]);
        for text in [
            reset.to_owned(),
            format!("{on}{off}"),
            format!("{on}CPU#1\r\n"),
            format!("{on}CPU#1\r\nCR0=x CR2=0 CR3=0 CR4=0"),
            format!("{on}CPU#1\r\nCR0=80050033 CR2=0 CR4=0"),
            String::new(),
        ] {
            assert_eq!(parse(&text), [], "{text}");
        }
    }
}
