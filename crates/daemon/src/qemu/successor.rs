//! The arguments of a QEMU that takes a guest over on this host, beside the one that has it.
//!
//! They are those of a machine that comes from another host, with three differences, because the other QEMU is here:
//!
//! * **taps**: a tap device is one QEMU's alone. The successor begins with taps that only look like them, and gets the
//!   real ones, as descriptors, when the guest has stopped
//! * **files that QEMU would cut off**: what a character device writes to a file goes on at its end
//! * **`prealloc`**: the pages are there, and touching them all is what a successor must not do

use serde_json::json;

use super::arguments::{Item, join_pairs};

/// What says of a network back end which tap it has, and nothing of what the guest sees.
const TAP_KEYS: &[&str] =
    &["ifname", "script", "downscript", "helper", "br", "fd", "fds", "vhostfd", "vhostfds", "queues", "vnet_hdr"];

/// A tap that arguments name.
#[derive(Debug, PartialEq, Eq)]
pub struct NamedTap {
    /// Where in the list of options.
    pub(super) index: usize,
    /// The device's name, where they say it.
    pub device: Option<String>,
}

/// The taps that the arguments name, in their order.
#[must_use]
pub fn taps(items: &[Item]) -> Vec<NamedTap> {
    let named = |(index, item): (usize, &Item)| {
        if !matches!(item.option.as_str(), "netdev" | "nic" | "net") {
            return None;
        }
        if let Some(json) = item.json() {
            let tap = matches!(json["type"].as_str(), Some("tap" | "bridge"));
            return tap.then(|| NamedTap { index, device: json["ifname"].as_str().map(String::from) });
        }
        let kind = item.get("").or_else(|| item.get("type"))?;
        matches!(kind.as_str(), "tap" | "bridge")
            .then(|| NamedTap { index, device: item.get("ifname").filter(|name| !name.contains('%')) })
    };
    items.iter().enumerate().filter_map(named).collect()
}

/// Has the tap of each name be these descriptors, by the numbers that QEMU inherits.
pub fn give_taps(items: &mut [Item], given: &[(NamedTap, Vec<u32>)]) {
    for (tap, numbers) in given {
        let list = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(":");
        let key = if numbers.len() == 1 { "fd" } else { "fds" };
        let item = &mut items[tap.index];
        if let Some(mut json) = item.json() {
            if let Some(object) = json.as_object_mut() {
                object.retain(|key, _| !TAP_KEYS.contains(&key.as_str()));
                object.insert("type".into(), json!("tap"));
                object.insert(key.into(), json!(list));
            }
            item.value = Some(json.to_string());
            continue;
        }
        let mut pairs = item.pairs();
        pairs.retain(|(key, _)| !TAP_KEYS.contains(&key.as_str()));
        for (key, value) in &mut pairs {
            if (key.is_empty() || key == "type") && value == "bridge" {
                *value = "tap".into();
            }
        }
        pairs.push((key.into(), list));
        item.value = Some(join_pairs(&pairs));
    }
}

/// Has what the former QEMU writes to files go on where it ends, and leaves RAM's pages alone.
#[must_use]
pub fn beside(items: &[Item]) -> Vec<Item> {
    let mut beside = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        match item.option.as_str() {
            "mem-prealloc" => {}
            "chardev" | "object" => beside.push(Item { value: Some(kept(item)), ..item.clone() }),
            "serial" | "parallel" | "debugcon" => beside.extend(appending(item, index)),
            _ => beside.push(item.clone()),
        }
    }
    beside
}

/// A device that writes to a file named in short, in the long way that can say to go on at its end.
fn appending(item: &Item, index: usize) -> Vec<Item> {
    let Some(path) = item.value.as_deref().and_then(|value| value.strip_prefix("file:")) else {
        return vec![item.clone()];
    };
    let id = format!("sterna-{}-{index}", item.option);
    let pairs = [("", "file"), ("id", &id), ("path", path), ("append", "on")].map(|(k, v)| (k.into(), v.into()));
    let chardev = Item { option: "chardev".into(), value: Some(join_pairs(&pairs)) };
    vec![chardev, Item { option: item.option.clone(), value: Some(format!("chardev:{id}")) }]
}

/// A character device or an object with what it must not do left out.
fn kept(item: &Item) -> String {
    let value = item.value.clone().unwrap_or_default();
    if item.option == "object" {
        if let Some(mut json) = item.json() {
            if let Some(object) = json.as_object_mut() {
                object.remove("prealloc");
            }
            return json.to_string();
        }
        if item.get("prealloc").is_none() {
            return value;
        }
        let pairs: Vec<_> = item.pairs().into_iter().filter(|(key, _)| key != "prealloc").collect();
        return join_pairs(&pairs);
    }
    if item.json().is_some() {
        return value;
    }
    let mut pairs = item.pairs();
    let is_file = item.get("").or_else(|| item.get("backend")).as_deref() == Some("file");
    for (cut, key) in [(is_file, "append"), (item.get("logfile").is_some(), "logappend")] {
        if cut {
            pairs.retain(|(name, _)| name != key);
            pairs.push((key.into(), "on".into()));
        }
    }
    join_pairs(&pairs)
}

/// How one machine's arguments differ from another's: an option that is only in the former with a minus before it, one
/// that is only in the latter with a plus.
#[must_use]
pub fn differences(former: &[Item], latter: &[Item]) -> Vec<String> {
    let show = |sign: &str, item: &Item| {
        let value = item.value.as_ref().map_or(String::new(), |value| format!(" {value}"));
        format!("{sign} -{}{value}", item.option)
    };
    let mut left = latter.to_vec();
    let mut differences = Vec::new();
    for item in former {
        match left.iter().position(|other| other == item) {
            Some(same) => drop(left.remove(same)),
            None => differences.push(show("-", item)),
        }
    }
    differences.extend(left.iter().map(|item| show("+", item)));
    differences
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::arguments::{parse, unparse};
    use super::*;

    fn items(line: &str) -> Vec<Item> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_tap_becomes_descriptors_and_keeps_what_the_guest_sees() {
        let mut items = items(
            "-netdev tap,id=a,ifname=tap1,script=no,downscript=no,vhost=on -device virtio-net-pci,netdev=a \
             -netdev bridge,id=b,br=br0 -nic tap,model=e1000,mac=52:54:00:00:00:01,queues=2 \
             -netdev {\"type\":\"tap\",\"id\":\"c\",\"fd\":\"33\",\"vhost\":true} -netdev user,id=d",
        );
        let found = taps(&items);
        let devices: Vec<_> = found.iter().map(|tap| tap.device.as_deref()).collect();
        assert_eq!(devices, [Some("tap1"), None, None, None]);
        let numbers = [vec![7], vec![8], vec![9, 10], vec![11]];
        give_taps(&mut items, &found.into_iter().zip(numbers).collect::<Vec<_>>());
        let json: Value = serde_json::from_str(items[4].value.as_deref().unwrap()).unwrap();
        assert_eq!(json, json!({ "type": "tap", "id": "c", "fd": "11", "vhost": true }));
        assert_eq!(
            unparse(&[&items[..4], &items[5..]].concat()).join(" "),
            "-netdev tap,id=a,vhost=on,fd=7 -device virtio-net-pci,netdev=a -netdev tap,id=b,fd=8 \
             -nic tap,model=e1000,mac=52:54:00:00:00:01,fds=9:10 -netdev user,id=d"
        );
    }

    #[test]
    fn what_the_former_qemu_wrote_is_not_cut_off_and_no_page_is_touched() {
        let beside = beside(&items(
            "-serial file:/log,x -chardev file,id=c,path=/c -chardev file,id=d,path=/d,append=off \
             -chardev socket,id=e,path=/e,server=on,logfile=/l -serial mon:stdio -mem-prealloc \
             -object memory-backend-file,id=ram,prealloc=on,size=1G,mem-path=/r,share=on",
        ));
        assert_eq!(
            unparse(&beside).join(" "),
            "-chardev file,id=sterna-serial-0,path=/log,,x,append=on -serial chardev:sterna-serial-0 \
             -chardev file,id=c,path=/c,append=on -chardev file,id=d,path=/d,append=on \
             -chardev socket,id=e,path=/e,server=on,logfile=/l,logappend=on -serial mon:stdio \
             -object memory-backend-file,id=ram,size=1G,mem-path=/r,share=on"
        );
    }

    #[test]
    fn differences_name_what_goes_and_what_comes() {
        let (former, latter) = (items("-smp 2 -device a -S"), items("-smp 2 -device b -S -usb"));
        assert_eq!(differences(&former, &latter), ["- -device a", "+ -device b", "+ -usb"]);
        assert!(differences(&former, &former).is_empty());
    }
}
