//! Taking over machines that were started by other means, with the agent loaded.
//!
//! A machine that cannot be moved is refused here, not in the middle of a migration: its RAM has no file of its own, is
//! private, or lies on a file system whose pages the kernel cannot watch.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use sterna_api::units::show_size;
use sterna_api::{AdoptRequest, Blame, Code, Problem};
use sterna_engine::vmm::qemu::{Inspection, MemoryDevice};
use sterna_sys::file::{Kind, backing};
use sterna_sys::path::Root;

use crate::care::Care;
use crate::machines::backing::Block;
use crate::machines::claim::Reservation;
use crate::machines::control::{self, Control};
use crate::machines::files::{directory_problem, remove_files};
use crate::machines::hold::Hold;
use crate::machines::record::{Memory, Running, VmRecord, version};
use crate::machines::table::shares_ram;
use crate::problems::{check_name, host, invalid};
use crate::process::{self, Identity};
use crate::qemu::binary::{OLDEST, show};
use crate::qemu::launch::AGENT_SOCKET_VARIABLE;
use crate::state::StateDir;

/// The part of the daemon that takes machines over.
#[derive(Debug)]
pub struct Adoptions {
    care: Care,
    state: Arc<StateDir>,
    /// Held while a machine is taken over.
    alone: Mutex<()>,
}

impl Adoptions {
    /// Takes machines over into the machines of this host, below the state directory.
    #[must_use]
    pub fn new(care: Care, state: Arc<StateDir>) -> Self {
        Self { care, state, alone: Mutex::new(()) }
    }

    /// Takes a running QEMU over.
    ///
    /// # Errors
    /// A [`Problem`] with the reason; QEMU is as it was.
    pub fn adopt(&self, request: &AdoptRequest) -> Result<(), Problem> {
        check_name(&request.name)?;
        let identity = Identity::of(request.pid).map_err(|_| {
            let mut problem = invalid(format!("there is no process {}", request.pid));
            problem.code = Code::NoSuchProcess;
            problem
        })?;
        self.check_not_ours(identity)?;
        let reservation = Reservation::starting(&self.care.machines, &request.name)?;
        let agent = agent_of(request.pid)?;
        let qmp = PathBuf::from(&request.qmp);
        let about = Control::connect(&qmp)?.inspect()?;
        if version(&about) < OLDEST {
            return Err(refuse(Code::QemuTooOld, format!("it is QEMU {}", show(version(&about))))
                .hint(format!("Sterna needs QEMU {} or later", show(OLDEST))));
        }
        let blocks = blocks(&about, request.pid)?;
        control::agent_and_addresses(&agent, request.pid, &blocks)?;
        let read = |error| host("cannot look at QEMU's process", &error);
        let arguments = process::command_line(request.pid).map_err(read)?.into_iter().skip(1).collect();
        let path = process::executable(request.pid).map_err(read)?;
        let qemu = Running { process: identity, path, about: &about, qmp, agent };
        let memory = Memory { bytes: about.ram_bytes, blocks, managed: false, owned: false };
        let record = VmRecord::new(&request.name, arguments, qemu, memory);
        // Machines are taken over one after the other: of two with the same RAM the second is refused.
        let _alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_ram_is_nobodys(&record)?;
        let dir = self.state.vm(&record.name);
        self.state.make_vm(&record.name).map_err(|error| directory_problem(&dir, &error))?;
        if let Err(problem) = reservation.keep(&record, Hold::Free) {
            remove_files(&dir, &[], &self.state.logs());
            return Err(problem);
        }
        self.care.watch(&record);
        tracing::info!(vm = %record.name, pid = request.pid, "adopted");
        Ok(())
    }

    /// Refuses a machine with a RAM file that is another machine's, whatever its QEMU says: a migration of this one
    /// would read and write the other's RAM.
    fn check_ram_is_nobodys(&self, record: &VmRecord) -> Result<(), Problem> {
        let Some(owner) = shares_ram(&self.care.machines.table(), record) else { return Ok(()) };
        Err(refuse(Code::RamOfAnother, format!("its RAM is the RAM of '{owner}'")))
    }

    fn check_not_ours(&self, identity: Identity) -> Result<(), Problem> {
        let table = self.care.machines.table();
        let known = table.values().filter_map(|entry| entry.record.as_ref()).find(|record| record.process == identity);
        match known {
            None => Ok(()),
            Some(record) => {
                let mut problem = invalid(format!("process {} is '{}' already", identity.pid, record.name));
                problem.code = Code::AlreadyKnown;
                Err(problem)
            }
        }
    }
}

/// The blocks that make up all of its RAM, by name.
fn blocks(about: &Inspection, pid: u32) -> Result<Vec<Block>, Problem> {
    let devices = about.memory_devices.iter();
    let mut blocks = devices.map(|device| block(device, pid)).collect::<Result<Vec<_>, _>>()?;
    blocks.sort_unstable_by(|a, b| a.id.cmp(&b.id));
    if blocks.iter().fold(0u64, |sum, block| sum.saturating_add(block.bytes)) < about.ram_bytes {
        return Err(refuse(Code::AnonymousRam, "part of its RAM has no back end of its own".into()).hint(BACKEND_HINT));
    }
    Ok(blocks)
}

const BACKEND_HINT: &str = "start it with -object memory-backend-file,id=ram,size=…,mem-path=/a/tmpfs/file,share=on \
    -machine memory-backend=ram";

fn refuse(code: Code, why: String) -> Problem {
    Problem::new(code, Blame::Request, format!("this QEMU cannot be adopted: {why}"))
}

/// The path of the agent's socket, which QEMU's environment names.
fn agent_of(pid: u32) -> Result<PathBuf, Problem> {
    let environment = process::environment(pid).map_err(|error| host("cannot look at QEMU's environment", &error))?;
    environment.get(AGENT_SOCKET_VARIABLE).map(PathBuf::from).ok_or_else(|| {
        refuse(Code::AgentMissing, "the agent is not loaded".into())
            .hint("start QEMU with LD_PRELOAD=…/libsterna_agent.so and STERNA_AGENT_SOCKET=PATH in its environment")
    })
}

/// The block of a back end that can be moved, or why it cannot.
fn block(backend: &MemoryDevice, pid: u32) -> Result<Block, Problem> {
    let id = &backend.id;
    match backend.kind.as_str() {
        "memory-backend-file" => {}
        "memory-backend-memfd" => {
            let why = format!("RAM block '{id}' is a memfd: QEMU itself would send it from version 8.1 on");
            return Err(refuse(Code::MemfdRam, why).hint(BACKEND_HINT));
        }
        _ => {
            let why = format!("RAM block '{id}' is anonymous memory, which no other process can read");
            return Err(refuse(Code::AnonymousRam, why).hint(BACKEND_HINT));
        }
    }
    if !backend.share {
        return Err(refuse(Code::PrivateRam, format!("RAM block '{id}' is mapped privately"))
            .hint("add share=on to its back end"));
    }
    let path = PathBuf::from(backend.path.clone().unwrap_or_default());
    let mut block = Block::new(id, backend.size_bytes, 0, &path);
    let unnamed = || {
        let why = format!("the file of RAM block '{id}' ({}) has no name that can be opened", path.display());
        refuse(Code::UnnamedRam, why).hint("mem-path must name a file, not a directory")
    };
    if !path.is_absolute() {
        return Err(unnamed());
    }
    let look = |root: Root| root.find(&path)?.open(false);
    let file = Root::of(pid).and_then(look).map_err(|_| unnamed())?;
    let backing = backing(&file).map_err(|error| host(format!("cannot look at {}", path.display()), &error))?;
    match backing.kind {
        Kind::Tmpfs(_) => {}
        Kind::Hugetlbfs => {
            let why = format!(
                "RAM block '{id}' is in huge pages of {} (hugetlbfs), and a guest's RAM can be moved in pages of 4 KiB \
                 only, in whatever mode",
                show_size(backing.page_bytes)
            );
            return Err(refuse(Code::HugePages, why)
                .hint("start it with its RAM in a file on a tmpfs, which may be mounted with huge=advise"));
        }
        Kind::Memfd => return Err(unnamed()),
        Kind::Other(_) => {
            let why = format!(
                "the file of RAM block '{id}' ({}) is not on a tmpfs: its pages cannot be watched in full",
                path.display()
            );
            return Err(refuse(Code::DiskRam, why).hint("put it on a tmpfs"));
        }
    }
    block.page_bytes = backing.page_bytes;
    block.recall_mapped(pid, false).map_err(|error| {
        let mut problem = refuse(Code::RamNotMapped, format!("the file of RAM block '{id}' is not what it has mapped"));
        problem.cause = vec![error.to_string()];
        problem
    })?;
    Ok(block)
}
