//! Sends a numbered datagram to the meter every millisecond, by the clock, for ever.

use std::net::UdpSocket;

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::beat::Beat;
use sterna_guest_programs::report::connect;

const USAGE: &str = "heartbeat [--to IP:PORT, default $STERNA_METER] [--period-us N]";

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let to = arguments.get("to", std::env::var("STERNA_METER").unwrap_or_default());
    let period_ns = arguments.get("period-us", 1000_u64).max(1) * 1000;
    let socket = match connect(&to, 0) {
        Ok(socket) => socket,
        Err(problem) => arguments.reject("to", &format!("`{to}`: {problem}")),
    };
    // The beat measures the guest's stops, not the wait for a processor behind the guest's other work.
    if !run_before_all_others() {
        println!("HEARTBEAT warning: no real-time priority, gaps may be the guest's own scheduling");
    }
    println!("HEARTBEAT ready to={to} period_us={}", period_ns / 1000);
    beat_for_ever(&socket, period_ns);
}

fn beat_for_ever(socket: &UdpSocket, period_ns: u64) -> ! {
    let mut sequence = 0;
    let mut due = now_ns();
    loop {
        let beat = Beat { sequence, guest_ns: now_ns() };
        sequence += 1;
        // A link that is down for a moment loses beats, which is what the meter is to see.
        let _ = socket.send(&beat.to_bytes());
        due += period_ns;
        let now = now_ns();
        if now > due {
            // Late by more than a period: go on from here, beats that were missed are not made up for.
            due = now - now % period_ns + period_ns;
        }
        sleep_until(due);
    }
}

/// The monotonic clock, in nanoseconds.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec that lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Sleeps to a point in time, not for a time: what a beat takes does not add up.
fn sleep_until(ns: u64) {
    let until =
        libc::timespec { tv_sec: (ns / 1_000_000_000).cast_signed(), tv_nsec: (ns % 1_000_000_000).cast_signed() };
    // SAFETY: `until` is a valid time that lives through the call; the remaining time is not asked for.
    unsafe {
        libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &raw const until, std::ptr::null_mut());
    }
}

fn run_before_all_others() -> bool {
    let priority = libc::sched_param { sched_priority: 50 };
    // SAFETY: `priority` lives through the call, which changes this process's scheduling and nothing else.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) == 0 }
}
