use std::collections::HashSet;

use serde_json::json;
use sterna_bench::tools;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::{Plan, Site, cli, needs, skip_without, turn};

use super::{fork, forked, plan};

/// What the guest's kernel says when it has got another generation ID.
const RESEEDED: &str = "crng reseeded due to virtual machine fork";

/// A guest whose kernel looks at its generation ID, and says so.
struct Watched<'a> {
    member: Member<'a>,
    host: &'static str,
}

impl Watched<'_> {
    fn new<'a>(site: &'a Site, name: &str) -> Watched<'a> {
        Watched { member: Member::new(site, name), host: "a" }
    }

    /// Its generation ID, as its QEMU has it, after checking that the arguments on record name the same.
    fn number(&self) -> String {
        let host = self.member.site.host(self.host);
        let answer = self.member.monitor(host).execute("query-vm-generation-id", json!({})).expect("it has one");
        let number = answer["guid"].as_str().expect("a number").to_owned();
        let arguments = self.member.shown(self.host).arguments;
        assert!(arguments.contains(&format!("vmgenid,guid={number}")), "{arguments:?}");
        number
    }

    /// How often its kernel has found another generation ID.
    fn reseeded(&self) -> usize {
        // Its checker says something each second: what the kernel had to say by now, it has said.
        self.member.is_well();
        self.member.guest.console_text().matches(RESEEDED).count()
    }

    fn migrate(&mut self, options: &[&str]) {
        let (from, to) = (self.member.site.host(self.host), if self.host == "a" { "b" } else { "a" });
        let address = self.member.site.host(to).listen();
        let words = ["migrate", &self.member.guest.name, "--to", &address, "--json", "-", "--verify"];
        cli::ask(from, &[&words[..], options].concat()).expect(0, &[]);
        self.host = to;
    }
}

#[test]
fn a_clone_has_another_generation_id_and_a_guest_that_is_moved_or_given_another_qemu_keeps_its_own() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&[&needs::GUEST[..], &[tools::new_kernel]].concat()) {
        return;
    }
    let kernel = tools::new_kernel().expect("looked for before").display().to_string();
    // The last of the kernel's words: it is to say more on its console.
    let jobs = format!("{} loglevel=6", plan().jobs);
    // QEMU 7.2 translates an instruction of this kernel's allocator in a way that makes it fault now and then.
    let plan = Plan { jobs, cpu: Some("max,-cx16".into()), ..plan() };
    let site = Site::without_guest(&plan);
    let mut origin = Watched::new(&site, "origin");
    origin.member.run(&plan, &["--memory-mode", "shared"], &["-kernel", &kernel]);
    assert_eq!(origin.reseeded(), 0);
    let number = origin.number();

    cli::ask(site.host("a"), &["replace", "origin"]).expect(0, &[]);
    assert_eq!((origin.number(), origin.reseeded()), (number.clone(), 0), "after another QEMU has taken it over");
    for mode in ["hybrid", "postcopy", "precopy", "precopy"].into_iter().take(times(2, 4)) {
        origin.migrate(&["--mode", mode]);
        assert_eq!((origin.number(), origin.reseeded()), (number.clone(), 0), "after {mode}");
    }

    forked(&fork(&site, "origin", &["one", "two"]));
    let (mut one, two) = (Watched::new(&site, "one"), Watched::new(&site, "two"));
    let numbers: HashSet<String> = [&origin, &one, &two].map(Watched::number).into();
    assert!(numbers.len() == 3 && numbers.contains(&number), "{numbers:?}");
    assert_eq!([&origin, &one, &two].map(Watched::reseeded), [0, 1, 1], "after it was forked");
    let number = one.number();
    one.migrate(&[]);
    assert_eq!((one.number(), one.reseeded()), (number, 1), "a clone that was moved");
}
