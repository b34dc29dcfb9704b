//! Drives one virtual machine's migration: tracking, selection, transfer, faults.
//!
//! Knows no QEMU beyond [`vmm`]: another VMM is another implementation of its two traits.
//!
//! A page's way: [`source::track`] → [`source::select`] → [`source::outbound`] → [`source::stream`] → [`transport`] →
//! [`destination::receive`] → [`destination::arrival`] → [`destination::place`]. [`source`] and [`destination`] each
//! list their phases, in order.

/// What the engine needs of a VMM: pause, resume, device state.
pub mod vmm;

/// The numbers of migrations and daemons.
pub mod id;

/// The names of bodies that machines share.
pub mod name;

/// What the engine needs of the daemon it runs in.
pub mod host;

/// The client of the library inside QEMU.
pub mod agent;

/// What only the VMM's own process can do.
pub mod inside;

/// A machine's RAM on this host, by chunk and page, and as the guest addresses it.
pub mod memory;

/// The faults of a guest's RAM: its one userfaultfd, and fenced pages.
pub mod faults;

/// The pager: pages that come after the guest's start.
pub mod paging;

/// Connections between two daemons.
pub mod transport;

/// The source's side of a migration.
pub mod source;

/// The destination's side of a migration.
pub mod destination;

/// Pages of guests that run on other hosts.
pub mod store;

/// Split guests: a part of a guest's pages is at memory hosts.
pub mod split;

/// Reclaim: the free memory of a guest that runs is given back to its host.
pub mod reclaim;

/// Another VMM takes a guest over on the same host.
pub mod replace;

/// Haste: the threads of a pause go before all others of their host.
pub mod haste;

/// A running guest is forked.
pub mod fork;

/// What others see of a running migration, and their way to cancel it.
pub mod monitor;

/// What can go wrong, and whose fault it is.
pub mod error;
