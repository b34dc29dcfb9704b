//! Starting machines: `run`.

use std::path::Path;

use sterna_api::problem::Whereabouts;
use sterna_api::units::show_size;
use sterna_api::{Blame, Code, MemoryMode, Problem, RunRequest};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::huge::transparent_bytes;

use crate::care::Care;
use crate::kept::Keeper;
use crate::machines::backing::Block;
use crate::machines::claim::Reservation;
use crate::machines::hold::Hold;
use crate::machines::record::{Memory, VmRecord};
use crate::machines::start::Launcher;
use crate::machines::template::Template;
use crate::problems::{check_name, invalid};
use crate::qemu::arguments::{self, Additions, RAM_ID};
use crate::qemu::binary::{Binary, DEFAULT_NAME};
use crate::qemu::files;
use crate::qemu::launch::qmp_socket;
use crate::qemu::vmgenid;
use crate::room;

/// The least and the most RAM of a machine, bytes.
const MEMORY_LIMITS: std::ops::RangeInclusive<u64> = 1 << 20..=16 << 40;

/// Starts a machine, with the QEMU of the configuration (`qemu`) where the request names none. `keeper` says whether
/// there is memory.
///
/// # Errors
/// A [`Problem`]; nothing is left behind but a log of what QEMU said.
pub fn run(
    care: &Care,
    launcher: &Launcher,
    keeper: &Keeper,
    qemu: Option<&Path>,
    request: &RunRequest,
) -> Result<(), Problem> {
    check_request(request)?;
    keeper.check_not_short()?;
    let mut user = request.arguments.clone();
    if request.balloon {
        arguments::add_balloon(&mut user)?;
    }
    let default = qemu.unwrap_or(Path::new(DEFAULT_NAME));
    let binary = Binary::find(request.qemu.as_ref().map_or(default, Path::new))?;
    vmgenid::settle(&mut user, binary.has_vmgenid);
    let items = arguments::parse(&user);
    arguments::check_for_run(&items, request.memory_template.is_some())?;
    if request.memory_mode == MemoryMode::Private {
        arguments::check_for_private(&items)?;
    }
    files::check_absolute(&items)?;
    let reservation = Reservation::starting(&care.machines, &request.name)?;
    let ram = launcher.new_ram_path(&request.name);
    let qmp = qmp_socket(&care.machines.dir(&request.name));
    let huge_pages = request.huge_pages.unwrap_or(launcher.huge_pages);
    let huge = huge_pages && request.memory_mode == MemoryMode::Shared && transparent_bytes().is_some();
    let additions = Additions { name: &request.name, qmp: &qmp, ram: Some((request.memory_bytes, &ram)), huge };
    let mut block = Block::new(RAM_ID, request.memory_bytes, PAGE_BYTES as u64, &ram);
    let mut template = None;
    if let Some(path) = &request.memory_template {
        let (begins, file) = Template::open(Path::new(path), request.memory_bytes, &launcher.state.ram())?;
        (block.template, template) = (Some(begins), Some(file));
        user = arguments::without_origin(&items);
    }
    let kind = launcher.ram_kind(request.memory_mode, request.trust_group.as_deref());
    let all = arguments::for_run(&items, &additions);
    let (started, _) = launcher.start(&binary.path, &all, &request.name, (kind, vec![block]), template.as_ref())?;
    let memory = Memory { bytes: request.memory_bytes, blocks: started.blocks.clone(), managed: true, owned: true };
    let record = VmRecord {
        memory_mode: request.memory_mode,
        trust_group: request.trust_group.clone(),
        huge_pages,
        small_pages: request.huge_pages == Some(false),
        ..VmRecord::new(&request.name, user, started.qemu(binary.path), memory)
    };
    reservation.keep(&record, Hold::Free)?;
    started.keep();
    care.watch(&record);
    tracing::info!(vm = %record.name, pid = record.process.pid, "started");
    Ok(())
}

fn check_request(request: &RunRequest) -> Result<(), Problem> {
    check_name(&request.name)?;
    if request.memory_template.is_some() && request.memory_mode != MemoryMode::Private {
        return Err(invalid("a memory template is for private memory: a machine in shared memory would write into it")
            .hint("with --memory-mode private"));
    }
    if !MEMORY_LIMITS.contains(&request.memory_bytes) || !request.memory_bytes.is_multiple_of(PAGE_BYTES as u64) {
        return Err(invalid(format!("{} bytes of memory are no size of a machine", request.memory_bytes))
            .hint("between 1M and 16T, a multiple of 4096 bytes"));
    }
    let total = room::total_bytes();
    if request.memory_bytes > total {
        let (asked, total) = (show_size(request.memory_bytes), show_size(total));
        return Err(Problem::new(
            Code::TooMuchMemory,
            Blame::Request,
            format!("a machine of {asked} is asked for, and this host has {total} of memory"),
        )
        .guest(Whereabouts::Gone)
        .hint("give it less, or run it on a host that has more"));
    }
    if let Some(text) = request.arguments.iter().find(|argument| argument.contains('\0')) {
        return Err(invalid(format!("the argument {text:?} contains a zero byte")));
    }
    Ok(())
}
