//! The guest's generation ID (`vmgenid`): a number that says which life of a machine this is. A guest that sees another
//! one knows that it was cloned, and draws new random numbers.
//!
//! QEMU writes the number of its arguments into the guest's RAM whenever it has loaded the state of devices, and
//! signals that. So who brings a machine elsewhere gives its QEMU the same number, and the guest finds nothing new; who
//! makes a clone gives that another one. For that the number stands in the arguments on record: `auto` would be another
//! one in each QEMU.

use sterna_sys::host::random_u128;

use super::arguments::{Item, machine_type, parse, unparse};

/// QEMU's name of the device.
pub const DEVICE: &str = "vmgenid";

/// The oldest PC whose firmware can tell QEMU where the number is.
const OLDEST_PC: (u32, u32) = (2, 5);

/// Has these arguments name a generation ID, and which: `offered` says whether QEMU has the device. Nothing is added
/// for a machine that has no place for it.
pub fn settle(arguments: &mut Vec<String>, offered: bool) {
    let mut items = parse(arguments);
    match items.iter().position(is_vmgenid) {
        Some(at) if number(&items[at]).is_none_or(|number| number == "auto") => {
            set_number(&mut items[at], &new_number())
        }
        Some(_) => return,
        // In front: behind the last word it could be taken for the value of an option that is not known here.
        None if offered && takes_one(&items) => items.insert(0, device(&new_number())),
        None => return,
    }
    *arguments = unparse(&items);
}

/// Arguments that another QEMU of the machine with these `own` ones is to have, with its generation ID.
#[must_use]
pub fn kept(mut arguments: Vec<String>, own: &[Item]) -> Vec<String> {
    let items = parse(&arguments);
    if let Some(item) = own.iter().find(|item| is_vmgenid(item)).filter(|_| !items.iter().any(is_vmgenid)) {
        arguments.splice(..0, unparse(std::slice::from_ref(item)));
    }
    arguments
}

/// The arguments of a clone, with a generation ID that nobody else has where the machine with these `own` ones has one.
#[must_use]
pub fn renewed(items: &[Item], own: &[Item]) -> Vec<Item> {
    let mut renewed = items.to_vec();
    match renewed.iter_mut().find(|item| is_vmgenid(item)) {
        Some(item) => set_number(item, &new_number()),
        None if own.iter().any(is_vmgenid) => renewed.insert(0, device(&new_number())),
        None => {}
    }
    renewed
}

/// Whether a machine of this type has a place for it: a PC that is not too old. A microvm describes no such device to
/// its guest.
fn takes_one(items: &[Item]) -> bool {
    let machine = machine_type(items).unwrap_or_else(|| "pc".into());
    if !["pc", "q35"].iter().any(|pc| machine == *pc || machine.starts_with(&format!("{pc}-"))) {
        return false;
    }
    let mut version = machine.rsplit('-').next().unwrap_or_default().split('.').map(str::parse);
    match (version.next(), version.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= OLDEST_PC,
        // The newest of its QEMU, or that of a distribution.
        _ => true,
    }
}

fn is_vmgenid(item: &Item) -> bool {
    let named = || item.word("driver").or_else(|| item.get(""));
    item.option == "device" && named().as_deref() == Some(DEVICE)
}

fn number(item: &Item) -> Option<String> {
    item.word("guid")
}

fn set_number(item: &mut Item, number: &str) {
    item.put("guid", number);
}

fn device(number: &str) -> Item {
    Item { option: "device".into(), value: Some(format!("{DEVICE},guid={number}")) }
}

/// A random UUID.
fn new_number() -> String {
    // Version 4, variant 1.
    let random = random_u128() & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let digits = format!("{random:032x}");
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    /// What `run` makes of these arguments, and the number in it.
    fn settled(line: &str) -> (String, Option<String>) {
        let mut arguments = words(line);
        settle(&mut arguments, true);
        (arguments.join(" "), parse(&arguments).iter().find(|item| is_vmgenid(item)).and_then(number))
    }

    #[test]
    fn a_pc_has_a_number_of_its_own_and_another_machine_has_none() {
        for line in ["", "-M pc", "-machine q35,usb=off", "-machine type=pc-q35-7.2", "-M pc-i440fx-rhel7.6.0"] {
            let (all, number) = settled(line);
            let number = number.unwrap_or_else(|| panic!("{line}: {all}"));
            assert_eq!((number.len(), &number[14..15]), (36, "4"), "{number}");
            assert_ne!(settled(line).1, Some(number));
        }
        for line in ["-M microvm", "-M none", "-M isapc", "-M pc-q35-2.4", "-M pc-1.0", "-M virt"] {
            assert_eq!(settled(line), (line.to_owned(), None));
        }
        let mut arguments = words("-M q35");
        settle(&mut arguments, false);
        assert_eq!(arguments, words("-M q35"), "a QEMU that does not have the device");
    }

    /// Seen to fail where the device stood behind them: the option was given `-device` as its value.
    #[test]
    fn an_option_that_is_not_known_here_stays_the_last_word() {
        assert!(settled("-M q35 -no-such-option").0.ends_with(" q35 -no-such-option"));
    }

    #[test]
    fn a_user_s_number_stays_and_auto_becomes_one() {
        let given = "-device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
        assert_eq!(settled(given).0, given);
        for auto in ["-M microvm -device vmgenid", "-device driver=vmgenid,guid=auto,id=g"] {
            assert_eq!(settled(auto).1.map(|number| number.len()), Some(36), "{auto}");
        }
        let (all, number) = settled("-device {\"driver\":\"vmgenid\",\"guid\":\"auto\"}");
        assert!(number.is_some_and(|number| number.len() == 36) && all.matches("vmgenid").count() == 1, "{all}");
    }

    #[test]
    fn another_qemu_has_the_same_number_and_a_clone_another_whatever_arguments_are_given() {
        let mut own = words("-M q35");
        settle(&mut own, true);
        let items = parse(&own);
        assert_eq!(kept(words("-M q35 -smp 2"), &items)[..2], own[..2]);
        assert_eq!(kept(own.clone(), &items), own);
        assert_eq!(kept(words("-smp 2"), &parse(&words("-M q35"))), words("-smp 2"));
        let clone = |line: &[String]| unparse(&renewed(&parse(line), &items));
        for given in [own.clone(), words("-M q35")] {
            let (one, other) = (clone(&given), clone(&given));
            assert_eq!((one.len(), one.contains(&own[1])), (own.len(), false), "{one:?}");
            assert_ne!(one, other);
        }
        assert_eq!(unparse(&renewed(&parse(&words("-smp 2")), &[])), words("-smp 2"));
    }
}
