//! Files in the place of others that QEMU has open.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;

use sterna_agent_protocol::message::Status;
use sterna_engine::agent::AgentError;

use crate::fixture::with_each_qemu;

#[test]
fn a_file_is_put_in_the_place_of_another_under_its_number_and_only_there() {
    with_each_qemu(|start| {
        let former = start.file("former");
        let qemu = start.ram(16).with(&format!("-chardev file,id=c,path={former}")).go();
        let descriptors = PathBuf::from(format!("/proc/{}/fd", qemu.pid));
        let points_to = |number: u32| std::fs::read_link(descriptors.join(number.to_string())).ok();
        let numbers = std::fs::read_dir(&descriptors).expect("its descriptors").flatten();
        let numbers: Vec<u32> = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        let number =
            *numbers.iter().find(|number| points_to(**number) == Some(former.clone().into())).expect("its file");
        let latter = qemu.dir.path().join("latter");
        let file = File::create(&latter).expect("a file");
        let mut agent = qemu.agent();
        agent.put_descriptor(number, file.as_fd()).expect("put");
        assert_eq!(points_to(number), Some(latter));
        // What is not open is not made.
        let free = numbers.iter().max().expect("one") + 100;
        let refused = agent.put_descriptor(free, file.as_fd());
        assert!(matches!(refused, Err(AgentError::Refused { status: Status::System, .. })), "{refused:?}");
        assert_eq!(points_to(free), None);
        agent.hello().expect("it goes on");
    });
}
