//! Machines with disks that are forked.
#![allow(dead_code, missing_docs, reason = "each test program uses a part of it")]

use std::collections::HashSet;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_engine::vmm::qmp::Qmp;

use crate::support::{Host, PATIENCE, run_request};

/// How long QEMU has for an answer.
const ANSWER: Duration = Duration::from_secs(60);
pub const MIB: usize = 1 << 20;
/// The size of the disk, MiB.
pub const DISK: usize = 64;

/// A host with a machine `a` that has a disk, and a second connection to each QEMU.
pub struct Disks {
    pub host: Host,
    pub dir: tempfile::TempDir,
}

impl Disks {
    pub fn start() -> Self {
        Self::on(Host::start(), None).expect("root's QEMU starts")
    }

    /// With QEMUs of this user's; none where that may not use what was built here.
    pub fn on(host: Host, user: Option<u32>) -> Option<Self> {
        let disks = Self { host, dir: tempfile::tempdir().expect("a directory") };
        std::fs::write(disks.image(), vec![1; DISK * MIB]).expect("a disk");
        if let Some(user) = user {
            for path in [disks.host.path(""), disks.dir.path().into()] {
                std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("a directory of ours");
            }
            [disks.image(), disks.dir.path().into()]
                .iter()
                .for_each(|path| chown(path, Some(user), None).expect("root"));
        }
        let drive = format!("if=none,id=d,format=raw,file={}", disks.image().display());
        let qmp = format!("unix:{}/{{name}}.sock,server=on,wait=off", disks.dir.path().display());
        let words = ["-machine", "pc", "-accel", "tcg", "-display", "none", "-vga", "none", "-drive", &drive];
        let words = [&words[..], &["-device", "virtio-blk-pci,drive=d", "-qmp", &qmp]].concat();
        let (status, answer) = disks.host.ask("POST", "/v1/vms", Some(&run_request("a", &words)));
        if user.is_some() && answer.to_string().contains("ermission") {
            eprintln!("skipped: another user cannot use the agent or QEMU where they were built: {answer}");
            return None;
        }
        assert_eq!(status, 201, "{answer}");
        Some(disks)
    }

    pub fn image(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    pub fn qmp(&self, name: &str) -> Qmp {
        Qmp::connect(&self.dir.path().join(format!("{name}.sock")), ANSWER).expect("its QEMU answers")
    }

    pub fn fork(&self, from: &str, clone: &str) {
        let request = json!({ "names": [clone], "overlay_disks": true, "paused": true });
        let (status, answer) = self.host.ask("POST", &format!("/v1/vms/{from}/fork"), Some(&request));
        assert_eq!(status, 200, "{answer}\n{}", self.host.log());
    }

    pub fn stop(&self, name: &str) {
        assert_eq!(self.host.ask("DELETE", &format!("/v1/vms/{name}?force=true"), None).0, 204);
    }

    /// The images that a machine's disk is made of, the one that is written first.
    pub fn images(&self, name: &str) -> Vec<PathBuf> {
        images_of(&mut self.qmp(name))
    }

    /// The overlays that there are.
    pub fn overlays(&self) -> HashSet<PathBuf> {
        let files = std::fs::read_dir(self.dir.path()).expect("it").flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|extension| extension == "qcow2")).collect()
    }

    /// Those of a machine of this name.
    pub fn overlays_of(&self, name: &str) -> Vec<PathBuf> {
        let of_it = |path: &PathBuf| path.display().to_string().contains(&format!("/{name}-"));
        self.overlays().into_iter().filter(of_it).collect()
    }

    pub fn remove_overlays_of(&self, name: &str) {
        let its = self.overlays_of(name);
        assert!(!its.is_empty(), "{name} has no overlay");
        its.iter().for_each(|path| std::fs::remove_file(path).expect("its overlay"));
    }

    /// Writes, or reads, a pattern, as the guest would.
    pub fn io(&self, name: &str, what: &str) {
        let line = format!("qemu-io d \"{what}\"");
        let said = self.qmp(name).execute("human-monitor-command", json!({ "command-line": line }), ANSWER);
        said.expect("QEMU does it");
    }

    /// What is on record of its disk.
    pub fn on_record(&self, name: &str) -> String {
        self.host.get(&format!("/v1/vms/{name}"))["arguments"].to_string()
    }

    /// Slows the work on a machine's images down as soon as it begins, so that it does not end; whether it was early
    /// enough.
    pub fn hold_work(&self, name: &str) -> bool {
        let mut qmp = self.qmp(name);
        let job = |qmp: &mut Qmp| -> Option<Value> {
            let jobs = qmp.execute("query-block-jobs", json!({}), ANSWER).expect("its jobs");
            let job = jobs.as_array().and_then(|jobs| jobs.first()).cloned();
            if let Some(job) = &job {
                let slow = json!({ "device": job["device"], "speed": 1 });
                let _ = qmp.execute("block-job-set-speed", slow, ANSWER);
            }
            job
        };
        let before = images_of(&mut qmp).len();
        let limit = std::time::Instant::now() + PATIENCE;
        while job(&mut qmp).is_none() && images_of(&mut qmp).len() == before {
            assert!(std::time::Instant::now() < limit, "nothing is done with its images\n{}", self.host.log());
        }
        // It has been told to be slow; where it had written all by then, it ends.
        std::thread::sleep(Duration::from_millis(300));
        job(&mut qmp).is_some_and(|job| job["status"] == "running")
    }

    /// Bytes of the image, each range of which must have this.
    pub fn holds(&self, ranges: &[(usize, usize, u8)]) {
        let bytes = std::fs::read(self.image()).expect("the image");
        for (from, to, value) in ranges {
            let wrong = bytes[from * MIB..to * MIB].iter().position(|byte| byte != value);
            assert_eq!(wrong, None, "byte of MiB {from} to {to} that is not {value}");
        }
    }
}

/// Longer than two looks at machines' images: what had to happen by then has happened.
pub const A_WHILE: Duration = Duration::from_secs(12);

/// The images that the disk of a QEMU is made of, the one that is written first.
pub fn images_of(qmp: &mut Qmp) -> Vec<PathBuf> {
    let disks = qmp.execute("query-block", json!({}), ANSWER).expect("its disks");
    let disk = disks.as_array().and_then(|disks| disks.iter().find(|disk| disk["device"] == "d")).expect("its disk");
    let (mut found, mut image) = (Vec::new(), &disk["inserted"]["image"]);
    while let Some(file) = image["filename"].as_str() {
        found.push(PathBuf::from(file));
        image = &image["backing-image"];
    }
    found
}
