//! Metrics: what the daemon counts, as Prometheus text.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;
use sterna_api::balloon::Pressure;
use sterna_api::vm::{HostKept, HostLent};
use sterna_api::{Phase, Report, Status, Vm};
use sterna_sys::PAGE_BYTES;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabel {
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PressureLabel {
    what: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

/// Migrations under way now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traffic {
    /// Machines that wait for their turn to leave.
    pub queued: usize,
    /// Machines on their way to other hosts.
    pub outgoing: usize,
    /// Machines on their way here.
    pub incoming: usize,
}

/// The daemon's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    vms: Family<StateLabel, Gauge>,
    memory: Gauge<u64, AtomicU64>,
    allocated: Gauge<u64, AtomicU64>,
    huge: Gauge<u64, AtomicU64>,
    shared: Gauge<u64, AtomicU64>,
    kept: Gauge<u64, AtomicU64>,
    kept_machines: Gauge,
    lent_budget: Gauge<u64, AtomicU64>,
    lent_granted: Gauge<u64, AtomicU64>,
    lent_used: Gauge<u64, AtomicU64>,
    lent_guests: Gauge,
    ballooned: Gauge<u64, AtomicU64>,
    pressure: Family<PressureLabel, Counter>,
    reclaimed: Counter,
    migrations: Family<StatusLabel, Counter>,
    sent: Counter,
    queued: Gauge,
    running: Family<DirectionLabel, Gauge>,
    downtime: Histogram,
    total: Histogram,
    missing: Gauge<u64, AtomicU64>,
    waiting: Gauge<f64, AtomicU64>,
    faults: Counter,
    split: Gauge,
    away: Gauge<u64, AtomicU64>,
    host_wait: Gauge<f64, AtomicU64>,
    silent: Gauge,
    alone: Gauge<u64, AtomicU64>,
    out: Gauge<u64, AtomicU64>,
    back: Gauge<u64, AtomicU64>,
    paced: Gauge<u64, AtomicU64>,
    paced_longest: Gauge<f64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics that are all zero.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("sterna");
        let metrics = Self {
            registry: Registry::default(),
            vms: Family::default(),
            memory: Gauge::default(),
            allocated: Gauge::default(),
            huge: Gauge::default(),
            shared: Gauge::default(),
            kept: Gauge::default(),
            kept_machines: Gauge::default(),
            lent_budget: Gauge::default(),
            lent_granted: Gauge::default(),
            lent_used: Gauge::default(),
            lent_guests: Gauge::default(),
            ballooned: Gauge::default(),
            pressure: Family::default(),
            reclaimed: Counter::default(),
            migrations: Family::default(),
            sent: Counter::default(),
            queued: Gauge::default(),
            running: Family::default(),
            downtime: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            total: Histogram::new(exponential_buckets(0.25, 2.0, 14)),
            missing: Gauge::default(),
            waiting: Gauge::default(),
            faults: Counter::default(),
            split: Gauge::default(),
            away: Gauge::default(),
            host_wait: Gauge::default(),
            silent: Gauge::default(),
            alone: Gauge::default(),
            out: Gauge::default(),
            back: Gauge::default(),
            paced: Gauge::default(),
            paced_longest: Gauge::default(),
        };
        registry.register("vms", "Virtual machines of this host by state", metrics.vms.clone());
        registry.register_with_unit("vm_memory", "RAM of all machines", Unit::Bytes, metrics.memory.clone());
        registry.register_with_unit(
            "vm_allocated",
            "RAM the host has given memory for",
            Unit::Bytes,
            metrics.allocated.clone(),
        );
        registry.register_with_unit("vm_huge", "RAM that is mapped by huge pages", Unit::Bytes, metrics.huge.clone());
        registry.register_with_unit(
            "vm_shared",
            "RAM that machines may have in common, and take in addition where they write it",
            Unit::Bytes,
            metrics.shared.clone(),
        );
        registry.register_with_unit(
            "kept",
            "Memory that is kept of machines that have left, and goes when it is needed",
            Unit::Bytes,
            metrics.kept.clone(),
        );
        registry.register("kept_machines", "Machines that have left and are kept", metrics.kept_machines.clone());
        for (name, help, gauge) in [
            ("lent_budget", "Memory that guests of other hosts may have here", &metrics.lent_budget),
            ("lent_granted", "Memory that is granted to guests of other hosts", &metrics.lent_granted),
            ("lent_used", "Memory that guests of other hosts have here", &metrics.lent_used),
        ] {
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        registry.register("lent_guests", "Guests of other hosts that have memory here", metrics.lent_guests.clone());
        registry.register_with_unit(
            "vm_ballooned",
            "RAM that guests have put into balloons Sterna looks after",
            Unit::Bytes,
            metrics.ballooned.clone(),
        );
        registry.register(
            "balloon_pressure",
            "Balloons made smaller because their guests needed memory",
            metrics.pressure.clone(),
        );
        registry.register_with_unit(
            "reclaimed",
            "Memory that guests held free and was taken from them",
            Unit::Bytes,
            metrics.reclaimed.clone(),
        );
        registry.register("migrations", "Migrations away from here that have ended", metrics.migrations.clone());
        registry.register(
            "migrations_queued",
            "Migrations away from here that wait for their turn",
            metrics.queued.clone(),
        );
        registry.register("migrations_running", "Migrations under way", metrics.running.clone());
        registry.register_with_unit(
            "migration_sent",
            "Sent by migrations away from here",
            Unit::Bytes,
            metrics.sent.clone(),
        );
        registry.register_with_unit(
            "migration_downtime",
            "Pauses of moved guests",
            Unit::Seconds,
            metrics.downtime.clone(),
        );
        registry.register_with_unit(
            "migration_duration",
            "How long completed migrations took",
            Unit::Seconds,
            metrics.total.clone(),
        );
        registry.register(
            "postcopy_missing_pages",
            "Pages of guests that run here which are still at other hosts",
            metrics.missing.clone(),
        );
        registry.register_with_unit(
            "postcopy_waiting",
            "How long the guest that has waited longest for another host has waited, at either end",
            Unit::Seconds,
            metrics.waiting.clone(),
        );
        registry.register(
            "postcopy_faults",
            "Faults of guests moved away from here on pages that were not there yet",
            metrics.faults.clone(),
        );
        registry.register(
            "split_vms",
            "Machines that run here while a part of their memory is at memory hosts",
            metrics.split.clone(),
        );
        registry.register_with_unit(
            "split_away",
            "Memory of machines that run here which is at memory hosts",
            Unit::Bytes,
            metrics.away.clone(),
        );
        registry.register_with_unit(
            "split_waiting",
            "How long the guest that has waited longest for a memory host has waited",
            Unit::Seconds,
            metrics.host_wait.clone(),
        );
        registry.register(
            "split_silent_hosts",
            "Memory hosts that did not answer when they were last asked, where another one has the same pages",
            metrics.silent.clone(),
        );
        registry.register_with_unit(
            "split_alone",
            "Memory of split machines that is at one memory host alone where it is to be at two",
            Unit::Bytes,
            metrics.alone.clone(),
        );
        registry.register("split_out", "Pages that left for memory hosts, of split machines", metrics.out.clone());
        registry.register("split_in", "Pages that came back from there", metrics.back.clone());
        registry.register("split_paced", "Pages of split machines that waited for room here", metrics.paced.clone());
        registry.register_with_unit(
            "split_paced_longest",
            "How long the one of them that waited longest did",
            Unit::Seconds,
            metrics.paced_longest.clone(),
        );
        Self { registry, ..metrics }
    }

    /// Counts a migration that ended.
    pub fn migration_ended(&self, report: &Report) {
        let status = match report.status {
            Status::Completed => "completed",
            Status::Cancelled => "cancelled",
            Status::Failed => "failed",
        };
        self.migrations.get_or_create(&StatusLabel { status }).inc();
        self.sent.inc_by(report.bytes_on_wire);
        self.faults.inc_by(report.faults.count);
        // A partial report knows neither.
        if report.status == Status::Completed && !report.partial {
            self.downtime.observe(report.downtime_ms / 1e3);
            self.total.observe(report.total_ms / 1e3);
        }
    }

    /// Counts a balloon that was made smaller because its guest needed memory.
    pub fn balloon_pressure(&self, what: Pressure) {
        self.pressure.get_or_create(&PressureLabel { what: word(what) }).inc();
    }

    /// Counts free memory that was taken from a guest.
    pub fn reclaimed(&self, bytes: u64) {
        self.reclaimed.inc_by(bytes);
    }

    /// The metrics as text, with these machines and migrations, what is kept of others, and what is lent to others, as
    /// they are now.
    #[must_use]
    pub fn text(&self, vms: &[Vm], traffic: Traffic, kept: &HostKept, lent: &HostLent) -> String {
        self.lent_budget.set(lent.budget_bytes);
        self.lent_granted.set(lent.granted_bytes);
        self.lent_used.set(lent.used_bytes);
        self.lent_guests.set(lent.guests.len() as i64);
        self.kept.set(kept.bytes);
        self.kept_machines.set(kept.machines.len() as i64);
        self.queued.set(traffic.queued as i64);
        for (direction, count) in [("out", traffic.outgoing), ("in", traffic.incoming)] {
            self.running.get_or_create(&DirectionLabel { direction }).set(count as i64);
        }
        self.vms.clear();
        for vm in vms {
            self.vms.get_or_create(&StateLabel { state: word(vm.state) }).inc();
        }
        self.memory.set(vms.iter().map(|vm| vm.memory_bytes).sum());
        self.allocated.set(vms.iter().map(|vm| vm.allocated_bytes).sum());
        self.huge.set(vms.iter().map(|vm| vm.huge_bytes).sum());
        self.shared.set(vms.iter().map(|vm| vm.shared_bytes).sum());
        self.ballooned.set(vms.iter().filter_map(|vm| vm.balloon.as_ref()).map(|balloon| balloon.size_bytes).sum());
        self.missing.set(vms.iter().filter_map(|vm| vm.arriving.as_ref()).map(|arriving| arriving.missing_pages).sum());
        self.waiting.set(vms.iter().filter_map(waiting_ms).fold(0.0, f64::max) / 1e3);
        let split = || vms.iter().filter_map(|vm| vm.split.as_ref());
        self.split.set(split().count() as i64);
        self.away.set(split().map(|split| split.away_pages * PAGE_BYTES).sum());
        self.host_wait
            .set(split().flat_map(|split| &split.waiting).map(|waiting| waiting.ms).fold(0.0, f64::max) / 1e3);
        self.silent.set(split().map(|split| split.silent.len() as i64).sum());
        self.alone.set(split().map(|split| split.alone_pages * PAGE_BYTES).sum());
        self.out.set(split().map(|split| split.out_pages).sum());
        self.back.set(split().map(|split| split.in_pages).sum());
        self.paced.set(split().map(|split| split.paced_pages).sum());
        self.paced_longest.set(split().map(|split| split.paced_longest_ms).fold(0.0, f64::max) / 1e3);
        let mut out = String::new();
        if let Err(error) = text::encode(&mut out, &self.registry) {
            tracing::error!(%error, "cannot write the metrics");
        }
        out
    }
}

/// The API's word for a value, as in its JSON.
fn word(value: impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(String::from)).unwrap_or_default()
}

/// How long a guest that runs while pages are missing, here or elsewhere, has waited for the other host; `None` where
/// it does not wait.
fn waiting_ms(vm: &Vm) -> Option<f64> {
    let leaving = vm.migration.as_ref().filter(|progress| progress.phase == Phase::Postcopy);
    vm.arriving.as_ref().and_then(|arriving| arriving.waiting_ms).or_else(|| leaving?.waiting_ms)
}

#[cfg(test)]
mod tests {
    use sterna_api::vm::Arriving;
    use sterna_api::{MemoryMode, Progress, VmState};

    use super::*;

    #[test]
    fn ended_migrations_are_counted_by_their_end() {
        let metrics = Metrics::new();
        metrics.migration_ended(&Report {
            status: Status::Completed,
            downtime_ms: 8.0,
            bytes_on_wire: 5,
            ..Report::default()
        });
        metrics.migration_ended(&Report { status: Status::Cancelled, bytes_on_wire: 2, ..Report::default() });
        metrics.migration_ended(&Report {
            status: Status::Completed,
            partial: true,
            bytes_on_wire: 3,
            ..Report::default()
        });
        metrics.balloon_pressure(Pressure::LowMemory);
        let kept = HostKept { bytes: 7, machines: vec!["m".into()] };
        let lent = HostLent { granted_bytes: 9, ..HostLent::default() };
        let text = metrics.text(&[], Traffic { queued: 3, outgoing: 2, incoming: 1 }, &kept, &lent);
        assert!(text.contains("sterna_lent_granted_bytes 9") && text.contains("sterna_lent_guests 0"), "{text}");
        assert!(text.contains("sterna_kept_bytes 7") && text.contains("sterna_kept_machines 1"), "{text}");
        assert!(text.contains("sterna_balloon_pressure_total{what=\"low-memory\"} 1"), "{text}");
        assert!(text.contains("sterna_migrations_queued 3"), "{text}");
        assert!(text.contains("sterna_migrations_running{direction=\"in\"} 1"), "{text}");
        assert!(text.contains("sterna_migrations_total{status=\"completed\"} 2"), "{text}");
        assert!(text.contains("sterna_migrations_total{status=\"cancelled\"} 1"), "{text}");
        assert!(text.contains("sterna_migration_sent_bytes_total 10"), "{text}");
        assert!(text.contains("sterna_migration_downtime_seconds_count 1"), "{text}");
    }

    #[test]
    fn pages_that_guests_wait_for_are_counted_at_both_ends() {
        let vm = |arriving, migration| Vm {
            name: "m".into(),
            state: VmState::Running,
            memory_bytes: 0,
            allocated_bytes: 0,
            huge_bytes: 2,
            shared_bytes: 3,
            memory_mode: MemoryMode::Shared,
            memory_template: None,
            trust_group: None,
            pid: 1,
            qemu: String::new(),
            qemu_path: String::new(),
            arguments: Vec::new(),
            forked_from: None,
            family: None,
            held_for: None,
            migration,
            balloon: None,
            note: None,
            arriving,
            split: None,
        };
        let here = |missing_pages, waiting_ms| vm(Some(Arriving { missing_pages, from: "a".into(), waiting_ms }), None);
        let there = |phase| vm(None, Some(Progress { phase, waiting_ms: Some(9000.0), ..Progress::default() }));
        let text =
            |vms: &[Vm]| Metrics::new().text(vms, Traffic::default(), &HostKept::default(), &HostLent::default());
        let both = text(&[here(7, None), here(5, Some(2500.0))]);
        assert!(both.contains("sterna_postcopy_missing_pages 12"), "{both}");
        assert!(both.contains("sterna_vm_shared_bytes 6"), "{both}");
        assert!(both.contains("sterna_vm_huge_bytes 4"), "{both}");
        assert!(both.contains("sterna_postcopy_waiting_seconds 2.5"), "{both}");
        assert!(text(&[there(Phase::Postcopy)]).contains("sterna_postcopy_waiting_seconds 9.0"));
        assert!(text(&[there(Phase::Queued)]).contains("sterna_postcopy_waiting_seconds 0.0"), "its guest runs");
    }
}
