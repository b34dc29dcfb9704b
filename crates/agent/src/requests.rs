//! The requests of the daemon.

use libc::{c_int, c_void, off_t};
use sterna_agent_protocol::message::{
    Advice, AdviseRequest, HelloReply, LookAheadRequest, MAX_ITEMS, MakePrivateRequest, MapRequest, OpenReply,
    OpenRequest, Operation, PutRequest, Range, ReplyHeader, RequestHeader, Run, Sharing, Status,
};
use sterna_agent_protocol::{MAGIC, VERSION};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::blocks::BLOCKS;
use crate::data::Known;
use crate::left::Left;
use crate::raw::{self, Fd, errno};
use crate::watched::{self, Watch};
use crate::{areas, discards, make_private, private, remap, template, transfers, userfaultfd};

/// The state that is kept between requests.
#[derive(Default)]
pub struct Requests {
    /// The kept userfaultfd. While it is open, faulting threads wait for the next daemon after one has died, and do not
    /// read zeros.
    userfaultfd: Option<Fd>,
    /// What is out of the way: to be unmapped once the daemon asks for nothing more.
    left: [Option<Left>; AT_ONCE],
    /// The daemon has said that the guest runs again.
    hurry: bool,
    /// What is known of the data of files that RAM is to begin as.
    known: [Option<Known>; AT_ONCE],
}

/// How much is kept at once between requests. A further one takes the place of another, which costs time and nothing
/// else.
const AT_ONCE: usize = 4;

/// See [`Requests::patience_ms`].
const QUIET_MS: c_int = 20;

/// Puts it into an empty place, or into the first.
fn keep<T>(places: &mut [Option<T>; AT_ONCE], kept: T) {
    let free = places.iter().position(Option::is_none).unwrap_or(0);
    if let Some(place) = places.get_mut(free) {
        *place = Some(kept);
    }
}

/// A reply without its header.
struct Answer {
    length: usize,
    descriptor: Option<c_int>,
}

/// The reason why there is no [`Answer`].
struct Refusal {
    status: Status,
    errno: c_int,
    item: usize,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status, errno: 0, item: 0 }
    }
}

impl Refusal {
    fn system(errno: c_int) -> Self {
        Self { status: Status::System, errno, item: 0 }
    }
}

type Outcome = Result<Answer, Refusal>;

const EMPTY: Answer = Answer { length: 0, descriptor: None };

impl Requests {
    /// Carries out the request in `packet`. The reply's body is put into `body`, and its length is in the header.
    /// `None` where the packet is no request at all, so its sender is no daemon.
    pub fn carry_out(
        &mut self,
        packet: &[u8],
        descriptor: Option<Fd>,
        body: &mut [u8],
    ) -> Option<(ReplyHeader, Option<c_int>)> {
        let (request, rest) = RequestHeader::read_from_prefix(packet).ok()?;
        if request.magic.get() != MAGIC || request.length.get() as usize != rest.len() {
            return None;
        }
        let outcome = if request.version.get() != VERSION {
            Err(Status::Version.into())
        } else {
            match Operation::from_wire(request.operation.get()) {
                Some(operation) => self.operate(operation, rest, descriptor, body),
                None => Err(Status::Unknown.into()),
            }
        };
        let done = Refusal::from(Status::Done);
        let (answer, refusal) = match outcome {
            Ok(answer) => (answer, done),
            Err(refusal) => (EMPTY, refusal),
        };
        let header = ReplyHeader {
            magic: MAGIC.into(),
            version: VERSION.into(),
            operation: request.operation,
            sequence: request.sequence,
            length: (answer.length as u32).into(),
            status: (refusal.status as u32).into(),
            errno: refusal.errno.unsigned_abs().into(),
            item: (refusal.item as u32).into(),
            reserved: 0.into(),
        };
        Some((header, answer.descriptor))
    }

    fn operate(&mut self, operation: Operation, rest: &[u8], descriptor: Option<Fd>, body: &mut [u8]) -> Outcome {
        match operation {
            Operation::Hello => self.hello(body),
            Operation::Blocks => blocks(body),
            Operation::OpenUserfaultfd => self.open_userfaultfd(rest, descriptor, body),
            Operation::TakeUserfaultfd => {
                let kept = self.userfaultfd.as_ref().ok_or(Status::NotOpen)?;
                Ok(Answer { length: 0, descriptor: Some(kept.number()) })
            }
            Operation::CloseUserfaultfd => {
                self.let_go(Watch::Nobody);
                Ok(EMPTY)
            }
            Operation::LendUserfaultfd if self.userfaultfd.is_none() => Err(Status::NotOpen.into()),
            Operation::LendUserfaultfd => {
                self.let_go(Watch::Lent);
                Ok(EMPTY)
            }
            Operation::Advise => advise(rest),
            Operation::Map => self.map(rest, descriptor),
            Operation::PutDescriptor => put_descriptor(rest, descriptor),
            Operation::MakePrivate => self.make_private(rest, descriptor),
            Operation::LookAhead => self.look_ahead(rest, descriptor),
            Operation::Finish => {
                self.hurry = true;
                Ok(EMPTY)
            }
            Operation::Transfers => {
                let memory = transfers::memory().ok_or_else(|| Refusal::system(libc::ENODATA))?;
                Ok(Answer { length: 0, descriptor: Some(memory) })
            }
            Operation::EndTransfers => {
                transfers::end_queued();
                Ok(EMPTY)
            }
            Operation::DiscardLog => {
                let memory = discards::log_memory().ok_or_else(|| Refusal::system(libc::ENODATA))?;
                Ok(Answer { length: 0, descriptor: Some(memory) })
            }
        }
    }

    fn hello(&self, body: &mut [u8]) -> Outcome {
        let reply = HelloReply {
            pid: raw::process_id().unsigned_abs().into(),
            blocks: (BLOCKS.all().count() as u32).into(),
            blocks_lost: BLOCKS.lost().into(),
            userfaultfd: u32::from(self.userfaultfd.is_some()).into(),
            reserved: 0.into(),
        };
        put(&reply, body)
    }

    fn open_userfaultfd(&mut self, rest: &[u8], device: Option<Fd>, body: &mut [u8]) -> Outcome {
        let request = OpenRequest::read_from_bytes(rest).map_err(|_| Status::Malformed)?;
        if self.userfaultfd.is_some() {
            return Err(Status::AlreadyOpen.into());
        }
        // No hook replaces a mapping of RAM from here on.
        let watched = watched::lock();
        let opened = userfaultfd::open(device.as_ref(), request.features.get()).map_err(Refusal::system)?;
        let reply = OpenReply { features: opened.features.into(), ioctls: opened.ioctls.into() };
        let answer = put(&reply, body)?;
        let kept = self.userfaultfd.insert(opened.descriptor);
        watched.set(Watch::Kept(kept.number()));
        Ok(Answer { descriptor: Some(kept.number()), ..answer })
    }
}

impl Requests {
    fn make_private(&mut self, rest: &[u8], file: Option<Fd>) -> Outcome {
        let request = MakePrivateRequest::read_from_bytes(rest).map_err(|_| Status::Malformed)?;
        let file = file.ok_or(Status::Malformed)?;
        // What is known of it is not kept: the next time the file is another one.
        let mut known = self.known.iter_mut().filter(|place| place.as_ref().is_some_and(|known| known.is_of(&file)));
        let known = known.next().and_then(Option::take);
        match make_private::make(&request, &file, known.as_ref()) {
            Some(Ok(left)) => {
                self.leave(left);
                Ok(EMPTY)
            }
            Some(Err(libc::EBUSY)) => Err(Status::AlreadyOpen.into()),
            Some(Err(errno)) => Err(Refusal::system(errno)),
            None => Err(Status::OutsideRam.into()),
        }
    }

    fn look_ahead(&mut self, rest: &[u8], file: Option<Fd>) -> Outcome {
        let request = LookAheadRequest::read_from_bytes(rest).map_err(|_| Status::Malformed)?;
        let file = file.ok_or(Status::Malformed)?;
        let looked = Known::look(&file, request.bridged.get()).map_err(Refusal::system)?;
        for place in &mut self.known {
            place.take_if(|known| known.is_of(&file));
        }
        keep(&mut self.known, looked);
        Ok(EMPTY)
    }

    /// Leaves something to be done when the guest runs again.
    fn leave(&mut self, left: Left) {
        self.hurry = false;
        keep(&mut self.left, left);
    }

    /// How long nobody must have asked for anything until what requests have left is [done](Self::finish),
    /// milliseconds: a guest may stand still until QEMU has done one thing after another, and none of them is to wait
    /// for that. -1 where nothing is left.
    pub fn patience_ms(&self) -> c_int {
        match self.left.iter().all(Option::is_none) {
            true => -1,
            false if self.hurry => 0,
            false => QUIET_MS,
        }
    }

    /// Does what requests have left to do.
    pub fn finish(&mut self) {
        self.left = Default::default();
        self.hurry = false;
    }

    /// Drops the kept userfaultfd, if one is kept.
    fn let_go(&mut self, watch: Watch) {
        let watched = watched::lock();
        watched.set(watch);
        self.userfaultfd = None;
    }
}

fn blocks(body: &mut [u8]) -> Outcome {
    let mut length = 0;
    for block in BLOCKS.all() {
        let Some(room) = body.get_mut(length..) else { break };
        length += put(&block, room)?.length;
    }
    Ok(Answer { length, descriptor: None })
}

/// Puts `file` in the place of a descriptor that is open. Where QEMU uses the number at this moment, its call ends with
/// the one or the other file.
fn put_descriptor(rest: &[u8], file: Option<Fd>) -> Outcome {
    let request = PutRequest::read_from_bytes(rest).map_err(|_| Status::Malformed)?;
    let number = c_int::try_from(request.number.get()).map_err(|_| Status::Malformed)?;
    let file = file.ok_or(Status::Malformed)?;
    raw::replace(&file, number).map_err(Refusal::system)?;
    Ok(EMPTY)
}

/// Puts a reply's struct at the start of the body.
fn put<T: IntoBytes + Immutable>(reply: &T, body: &mut [u8]) -> Outcome {
    reply.write_to_prefix(body).map_err(|_| Refusal::system(libc::ENOBUFS))?;
    Ok(Answer { length: size_of::<T>(), descriptor: None })
}

fn advise(rest: &[u8]) -> Outcome {
    let (request, rest) = AdviseRequest::read_from_prefix(rest).map_err(|_| Status::Malformed)?;
    let advice = match Advice::from_wire(request.advice.get()).ok_or(Status::Malformed)? {
        Advice::DontNeed => libc::MADV_DONTNEED,
        Advice::Remove => libc::MADV_REMOVE,
        Advice::Mergeable => libc::MADV_MERGEABLE,
        Advice::Unmergeable => libc::MADV_UNMERGEABLE,
        Advice::Cold => libc::MADV_COLD,
        Advice::PageOut => libc::MADV_PAGEOUT,
        Advice::HugePage => libc::MADV_HUGEPAGE,
        Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
    };
    for (item, range) in items::<Range>(rest, request.count.get())?.iter().enumerate() {
        change(item, range.address.get(), range.length.get(), |address, length| {
            // SAFETY: the addresses are guest RAM for as long as the call takes; the daemon answers for what becomes of
            // its pages.
            unsafe { raw::madvise(address, length, advice) == 0 }
        })?;
    }
    Ok(EMPTY)
}

impl Requests {
    fn map(&mut self, rest: &[u8], file: Option<Fd>) -> Outcome {
        let (request, rest) = MapRequest::read_from_prefix(rest).map_err(|_| Status::Malformed)?;
        let runs = items::<Run>(rest, request.count.get())?;
        let sharing = Sharing::from_wire(request.sharing.get()).ok_or(Status::Malformed)?;
        if let Sharing::Own | Sharing::Missing = sharing {
            let watched = sharing == Sharing::Missing;
            return if file.is_none() { map_own(runs, watched) } else { Err(Status::Malformed.into()) };
        }
        let file = file.ok_or(Status::Malformed)?;
        let private = sharing != Sharing::Shared;
        if private {
            // Whoever can write the file can write what every guest has in common.
            if !template::is_read_only(&file) {
                return Err(Refusal::system(libc::EINVAL));
            }
            discards::expect_private_pages();
            areas::expect();
        }
        let left = if sharing == Sharing::Over { room_for(runs) } else { None };
        let mapped = runs.iter().enumerate().try_for_each(|(item, run)| {
            let offset = off_t::try_from(run.offset.get()).map_err(|_| Status::Malformed)?;
            change(item, run.address.get(), run.length.get(), |address, length| {
                // SAFETY: the addresses are guest RAM for as long as the call takes; the daemon answers for what is
                // mapped there, and with `left` for it that the guest does not run.
                unsafe { map_file(address, length, (&file, offset), private, left.as_ref()) }
            })
        });
        if let Some(left) = left {
            self.leave(left);
        }
        mapped.map(|()| EMPTY)
    }
}

/// Runs shorter than this are freed at once, because to move them takes as long, bytes.
const WORTH_MOVING: u64 = 16 * private::SMALL_PAGE;

/// Address space for what lies in the place of these runs, where there is any.
fn room_for(runs: &[Run]) -> Option<Left> {
    let start = runs.iter().map(|run| run.address.get()).min()?;
    let end = runs.iter().map(|run| run.address.get().saturating_add(run.length.get())).max()?;
    Left::reserve(start, end - start).ok()
}

/// Maps a part of a file over guest RAM, and says whether that succeeded; `private`: what is written there goes not to
/// the file. What was there goes into `left`, if that is given and the kernel can move it.
///
/// # Safety
/// The addresses are guest RAM. With `left` nobody uses them until this returns, and they are registered with a
/// userfaultfd.
unsafe fn map_file(
    address: *mut c_void,
    length: usize,
    (file, offset): (&Fd, off_t),
    private: bool,
    left: Option<&Left>,
) -> bool {
    let (at, bytes) = (address as u64, length as u64);
    let left = left.filter(|_| bytes >= WORTH_MOVING);
    // Where the kernel moves nothing, because it is several mappings, the pages are freed below.
    // SAFETY: the caller's promise.
    let moved = left.filter(|left| unsafe { left.take(at, bytes) }.is_ok());
    let sharing = if private { libc::MAP_PRIVATE | libc::MAP_NORESERVE } else { libc::MAP_SHARED };
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, sharing | libc::MAP_FIXED);
    // SAFETY: the caller's promise.
    unsafe {
        if raw::mmap(address, length, protection, flags, file.number(), offset) == libc::MAP_FAILED {
            let failed = errno();
            if let Some(Err(_)) = moved.map(|left| left.give_back(at, bytes)) {
                raw::complain("cannot move guest RAM back", failed);
            }
            raw::set_errno(failed);
            return false;
        }
        if private {
            private::advise_again(address, length);
        } else {
            // QEMU asks for this for all guest RAM, and the new mapping does not have it. A failure is ignored, as in
            // QEMU.
            raw::madvise(address, length, libc::MADV_DONTFORK);
        }
    }
    true
}

/// Puts anonymous memory in the place of private RAM; `watched` says whether also where somebody watches it.
fn map_own(runs: &[Run], watched: bool) -> Outcome {
    for (item, run) in runs.iter().enumerate() {
        match areas::make_own(run.address.get(), run.length.get(), watched) {
            Some(Ok(())) => {}
            Some(Err(libc::EBUSY)) => return Err(Refusal { status: Status::AlreadyOpen, errno: 0, item }),
            Some(Err(errno)) => return Err(Refusal { status: Status::System, errno, item }),
            None => return Err(Refusal { status: Status::OutsideRam, errno: 0, item }),
        }
    }
    Ok(EMPTY)
}

/// The items of a batch, which fill the rest of the packet exactly.
fn items<T: FromBytes + Immutable + KnownLayout + Unaligned>(rest: &[u8], count: u32) -> Result<&[T], Refusal> {
    let items = <[T]>::ref_from_bytes(rest).map_err(|_| Status::Malformed)?;
    if items.len() != count as usize || items.len() > MAX_ITEMS {
        return Err(Status::Malformed.into());
    }
    Ok(items)
}

/// Does one item of a batch by `call`, which says whether the system call succeeded.
fn change(
    item: usize,
    address: u64,
    length: u64,
    call: impl FnOnce(*mut c_void, usize) -> bool,
) -> Result<(), Refusal> {
    let done = remap::within_block(address, length, |_| {
        if call(address as *mut c_void, length as usize) { Ok(()) } else { Err(errno()) }
    });
    match done {
        Some(Ok(())) => Ok(()),
        Some(Err(errno)) => Err(Refusal { status: Status::System, errno, item }),
        None => Err(Refusal { status: Status::OutsideRam, errno: 0, item }),
    }
}
