use proptest::prelude::*;

use super::*;

fn items(line: &str) -> Vec<Item> {
    parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
}

fn additions(ram: Option<(u64, &Path)>) -> Additions<'_> {
    Additions { name: "db1", qmp: Path::new("/s/q,1.sock"), ram, huge: false }
}

#[test]
fn what_was_parsed_is_written_back() {
    let line = "-machine q35 --accel kvm -nographic -append -m disk.img -drive file=a,,b.img,if=virtio -S";
    let parsed = items(line);
    assert_eq!(unparse(&parsed).join(" "), line.replace("--", "-"));
    assert_eq!(parsed[3], Item::new("append", "-m"), "a value may look like an option");
    assert_eq!(parsed[4], Item::new("", "disk.img"));
    assert_eq!(parsed[5].get("file").as_deref(), Some("a,b.img"));
}

#[test]
fn three_dashes_do_not_become_an_option_on_the_way() {
    let parsed = items("---incoming defer");
    assert_eq!(parsed[0], Item::new("", "---incoming"));
    assert_eq!(unparse(&parsed), ["---incoming", "defer"], "QEMU refuses it as it stands");
}

#[test]
fn arguments_that_bring_their_own_ram_are_refused_with_the_reason() {
    for line in [
        "-m 512",
        "-m size=1G",
        "-mem-path /dev/hugepages",
        "-object memory-backend-ram,id=a,size=1G",
        "-M q35,memory-backend=a",
        "-incoming defer",
        "-readconfig f",
        "-version",
    ] {
        let problem = check_for_run(&items(line), false).expect_err(line);
        assert_eq!(problem.code, "argument-conflict", "{line}");
    }
    for line in ["-M q35 -accel kvm", "-m slots=4,maxmem=8G", "-daemonize -S", "-object rng-random,id=r"] {
        assert!(check_for_run(&items(line), false).is_ok(), "{line}");
    }
}

#[test]
fn where_a_machine_found_its_state_is_of_one_start_with_a_template_and_not_of_the_machine() {
    let with = items("-M q35 -incoming exec:cat -S");
    assert!(check_for_run(&with, true).is_ok() && check_for_run(&with, false).is_err());
    assert!(check_for_run(&items("-m 1G -incoming defer"), true).is_err());
    assert_eq!(without_origin(&with), ["-machine", "q35", "-S"]);
}

#[test]
fn run_adds_ram_qmp_and_name() {
    let line = for_run(&items("-M microvm -daemonize"), &additions(Some((1 << 29, Path::new("/ram/db,1"))))).join(" ");
    assert_eq!(
        line,
        "-machine microvm -m size=536870912B \
         -object memory-backend-file,id=sterna-ram,size=536870912,mem-path=/ram/db,,1,share=on \
         -machine memory-backend=sterna-ram -qmp unix:/s/q,,1.sock,server=on,wait=off -name db1"
    );
    let named = for_run(&items("-name mine"), &additions(None)).join(" ");
    assert!(!named.contains("db1"), "{named}");
}

#[test]
fn a_destination_gets_the_exact_machine_type_and_waits() {
    let line = for_incoming(
        &items("-M q35,accel=tcg -pidfile /run/x -qmp unix:/user"),
        &additions(Some((4096, Path::new("/r")))),
        "pc-q35-7.2",
        &[],
    )
    .join(" ");
    assert!(line.starts_with("-machine pc-q35-7.2,accel=tcg -qmp unix:/user -m "), "{line}");
    assert!(line.ends_with("-incoming defer -S"), "{line}");
    let line = for_incoming(&items("-nodefaults"), &additions(None), "pc-i440fx-7.2", &[]).join(" ");
    assert!(line.contains("-machine pc-i440fx-7.2"), "{line}");
}

#[test]
fn an_adopted_machines_ram_moves_to_a_file_of_this_host() {
    let user = items(
        "-object memory-backend-file,id=ram0,size=1G,mem-path=/there/ram0,share=on \
         -object {\"qom-type\":\"memory-backend-file\",\"id\":\"ram1\",\"mem-path\":\"/there/ram1\"} \
         -chardev socket,id=mon0,path=/there/mon,server=on -mon chardev=mon0,mode=control \
         -chardev socket,id=serial,path=/ser,server=on -incoming defer -S -daemonize",
    );
    assert!(names_ram_file(&user, "ram0") && names_ram_file(&user, "ram1") && !names_ram_file(&user, "ram2"));
    let files = [("ram0".to_string(), PathBuf::from("/here/0")), ("ram1".to_string(), PathBuf::from("/here/1"))];
    let line = for_incoming(&user, &additions(None), "pc-q35-7.2", &files).join(" ");
    assert!(line.contains("mem-path=/here/0") && line.contains("\"mem-path\":\"/here/1\""), "{line}");
    assert!(!line.contains("/there/") && line.contains("id=serial"), "{line}");
    assert_eq!(line.matches("-incoming").count(), 1, "{line}");
}

proptest! {
    #[test]
    fn whatever_arguments_a_peer_proposes_the_machine_waits_here(arguments: Vec<String>, machine: String) {
        let items = parse(&arguments);
        prop_assert_eq!(&parse(&unparse(&items)), &items);
        let line = for_incoming(&items, &additions(Some((1 << 30, Path::new("/ram")))), &machine, &[]);
        prop_assert_eq!(&line[line.len() - 3..], ["-incoming", "defer", "-S"]);
    }
}

#[test]
fn a_balloon_fits_the_machines_bus_and_is_added_once() {
    let added = |line: &str| {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        add_balloon(&mut words).map(|()| words.join(" "))
    };
    let options = "id=sterna-balloon,deflate-on-oom=on,free-page-reporting=on";
    assert_eq!(added("-M q35").unwrap(), format!("-M q35 -device virtio-balloon-pci,{options}"));
    assert!(added("-machine type=microvm,acpi=on").unwrap().ends_with(&format!("virtio-balloon-device,{options}")));
    for line in ["-device virtio-balloon-pci", "-device {\"driver\":\"virtio-balloon-pci\"}"] {
        assert_eq!(added(line).unwrap_err().code, "argument-conflict", "{line}");
    }
}

#[test]
fn what_writes_ram_where_it_was_does_not_fit_private_memory() {
    let unfit = |words: &[&str]| unfit_for_private(&items(&words.join(" "))).map(|(item, _)| item.option.clone());
    for device in
        ["vfio-pci,host=01:00.0", r#"{"driver":"vhost-scsi-pci","wwpn":"naa.5"}"#, "vhost-user-fs-pci,chardev=c"]
    {
        assert_eq!(unfit(&["-device", device]).as_deref(), Some("device"), "{device}");
    }
    assert_eq!(unfit(&["-netdev", "vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0"]).as_deref(), Some("netdev"));
    assert_eq!(unfit(&["-drive", "file=nvme://0000:01:00.0/1,if=none"]).as_deref(), Some("drive"));
    assert_eq!(
        unfit(&["-blockdev", "driver=nvme,device=0000:01:00.0,namespace=1,node-name=n"]).as_deref(),
        Some("blockdev")
    );
    for fit in [["-device", "virtio-blk-pci,drive=vfio-disk"], ["-drive", "file=/disks/nvme.qcow2,if=virtio"]] {
        assert_eq!(unfit(&fit), None, "{fit:?}");
    }
}

#[test]
fn a_device_that_empties_its_memory_when_it_is_made_is_found() {
    let found = |device: &str| empties_memory(&items(&format!("-device {device}"))).is_some();
    assert!(found("virtio-mem-pci,memdev=m,id=v") && found(r#"{"driver":"virtio-mem-pci","memdev":"m"}"#));
    assert!(!found("virtio-balloon-pci,id=virtio-mem") && !found("nvdimm,memdev=m"));
}
