//! The post-copy paper's figures 12 to 15: a compile, a web server, a download from many peers and a sender in guests
//! of 512 MiB. The number of pages that the guest has to wait for is judged against its working set, which is measured
//! just before it is moved.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use super::case::give_up;
use super::judge::{derive_quotient, is_row, metric, middle, ratio, worst};
use super::{Case, Options, Plan, Watch, movers, qemus, try_each};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::{CLIENT, Lab, guest_address};
use crate::load::iperf::IperfServer;
use crate::load::peers::Peers;
use crate::load::web::WebClients;
use crate::plot::BarPlot;
use crate::result::{Row, Run, Target, rows};
use crate::trial::{Mover, NETWORK_FAULTS, Qemu, WORKING_SET};

/// The guest's RAM, as the paper's.
const MEMORY_MIB: u64 = 512;
/// Files of the web server, a MiB each.
const FILES: u32 = 160;
/// The download: its size in MiB, the number of peers, and the rate from each, bytes per second.
const DOWNLOAD_MIB: u64 = 192;
const PEERS: u16 = 8;
const PEER_BYTES_PER_S: f64 = 3e6;
/// How long a guest's working set is measured: about as long as the sending of its pages takes.
const LOOK: Duration = Duration::from_secs(3);
/// The number of every guest of an experiment's trials.
const GUEST: u8 = 10;

const POSTCOPY: &str = "--mode postcopy";
const QEMU: [Method; 3] = [Method::Vanilla, Method::PurePostcopy, Method::PurePostcopyPreempt];
/// Faults that had to wait for the network, as a share of the pages in use.
const FAULT_SHARE: &str = "network_faults_to_working_set";

/// What the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum App {
    /// tcc compiles stb's libraries.
    Compile,
    /// nginx serves files to wrk.
    Web,
    /// A file comes in pieces from many peers.
    Download,
    /// iperf3 sends as fast as it can.
    Send,
}

const APPS: [App; 4] = [App::Compile, App::Web, App::Download, App::Send];

/// The other side of the guest's work, which runs on `client`.
enum OtherSide {
    Nothing,
    Web { _clients: WebClients },
    Download { _peers: Peers },
    Send { _server: IperfServer },
}

impl App {
    fn name(self) -> &'static str {
        match self {
            Self::Compile => "compile",
            Self::Web => "nginx under wrk",
            Self::Download => "download from 8 peers",
            Self::Send => "iperf3",
        }
    }

    /// Whether it is among the paper's larger ones.
    fn is_large(self) -> bool {
        matches!(self, Self::Web | Self::Download)
    }

    /// What the guest runs, and the line by which it says that it is ready; where its other side is at `client`.
    fn jobs(self, client: Ipv4Addr, peers: &str) -> (String, Option<&'static str>) {
        match self {
            Self::Compile => ("builder".into(), Some("BUILDER ready")),
            Self::Web => (format!("nginx:{FILES}"), None),
            Self::Download => {
                (format!("downloader:--peers,{peers},--count,{PEERS},--mib,{DOWNLOAD_MIB}"), Some("DOWNLOADER ready"))
            }
            Self::Send => (format!("iperf3:-c,{client},-t,86400"), None),
        }
    }

    fn start(self, lab: &Lab) -> Result<OtherSide> {
        let client = lab.host(CLIENT)?;
        Ok(match self {
            Self::Compile => OtherSide::Nothing,
            Self::Web => OtherSide::Web { _clients: WebClients::start(client, guest_address(GUEST), FILES)? },
            Self::Download => OtherSide::Download { _peers: Peers::start(client, PEERS, PEER_BYTES_PER_S)? },
            Self::Send => OtherSide::Send { _server: IperfServer::start(client)? },
        })
    }
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let judged = newest.label.clone();
    let quick = options.quick;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        let client = lab.host(CLIENT)?.address;
        for app in APPS {
            let cases = cases(app, client, quick, &newest, &qemus)?;
            let other_side = match app.start(&lab) {
                Ok(other_side) => other_side,
                Err(error) => {
                    eprintln!("no rows of {}: {error}", app.name());
                    give_up(&cases, &error.to_string(), record);
                    continue;
                }
            };
            let watch = Watch { working_set: LOOK, ..Watch::default() };
            try_each(&lab, &cases, repeats, watch, record, |_, trial| {
                derive_quotient(&mut trial.metrics, FAULT_SHARE, NETWORK_FAULTS, WORKING_SET);
                serde_json::Value::Null
            });
            drop(other_side);
        }
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &judged)).drawn(plot))
}

fn cases(app: App, client: Ipv4Addr, quick: bool, newest: &Qemu, older: &[Qemu]) -> Result<Vec<Case>> {
    let sterna: &[&str] = if quick {
        &["--mode precopy", POSTCOPY]
    } else {
        &["--mode precopy", POSTCOPY, "--mode hybrid", "--mode postcopy --prepaging off"]
    };
    let mut movers: Vec<(Mover, &Qemu)> = Vec::new();
    for row in sterna {
        movers.push((movers::sterna(row)?, newest));
    }
    let methods: &[Method] = if quick { &[Method::Vanilla, Method::PurePostcopyPreempt] } else { &QEMU };
    movers.extend(movers::known(newest, methods)?.into_iter().map(|mover| (mover, newest)));
    for qemu in older.iter().filter(|_| !quick) {
        movers.extend(movers::known(qemu, &[Method::PurePostcopy])?.into_iter().map(|mover| (mover, qemu)));
    }
    let (jobs, ready) = app.jobs(client, &Peers::address_on(client).to_string());
    let case = |(mover, qemu): (Mover, &Qemu)| Case {
        workload: app.name().into(),
        memory_bytes: MEMORY_MIB << 20,
        jobs: jobs.clone(),
        ready,
        load: None,
        mover,
        qemu: qemu.clone(),
        // The download has its first file by then.
        settle: Duration::from_secs(if app == App::Download { 9 } else { 4 }),
        limit: Duration::from_secs(if quick { 20 } else { 60 }),
    };
    Ok(movers.into_iter().map(case).collect())
}

fn targets(runs: &[Run], qemu: &str) -> Result<Vec<Target>> {
    let own = movers::sterna(POSTCOPY)?;
    let preempt = Mover::Qemu(Method::PurePostcopyPreempt, Ram::Plain);
    let share = |large: bool| {
        let apps = APPS.into_iter().filter(|app| app.is_large() == large);
        worst(apps.map(|app| middle(runs, app.name(), &own, qemu, metric(FAULT_SHARE))))
    };
    let to_qemu = worst(APPS.into_iter().map(|app| {
        let own = |run: &Run| is_row(run, app.name(), &own, qemu);
        ratio(runs, metric(NETWORK_FAULTS), own, |run| is_row(run, app.name(), &preempt, "10.0"))
    }));
    Ok(vec![
        Target::at_most("large (nginx, download): network faults ÷ pages in use, worst", 0.10, share(true)),
        Target::at_most("small (compile, iperf3): network faults ÷ pages in use, worst", 0.30, share(false)),
        Target::at_most("network faults ÷ under QEMU 10.0's post-copy with preempt, worst", 0.5, to_qemu),
    ])
}

/// Plots as the paper's figures 12 to 15: pages, faults, total time and downtime, a bar for each application and mover.
fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    const METRICS: [(&str, &str, &str); 4] = [
        ("pages_sent", "pages sent", "pages"),
        (FAULT_SHARE, "network faults ÷ pages in use", "faults"),
        ("total_ms", "total time, ms", "total_time"),
        ("downtime_ms", "downtime, ms", "downtime"),
    ];
    let rows = rows(runs);
    for (metric, label, name) in METRICS {
        let bar = |row: &Row| {
            let label = format!("{}: {}", row.word("workload"), row.mover_and_qemu());
            Some((label, row.metrics.get(metric)?.median))
        };
        let bars = rows.iter().filter_map(bar).collect();
        BarPlot { title: format!("guests of {MEMORY_MIB} MiB"), label: label.into(), bars }.write(directory, name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn an_application_that_could_not_be_had_leaves_its_targets_unmeasured() {
        let own = movers::sterna(POSTCOPY).unwrap();
        let qemu = Mover::Qemu(Method::PurePostcopyPreempt, Ram::Plain);
        let mut runs = Vec::new();
        for (app, faults) in APPS.into_iter().zip([10.0, 20.0, 30.0, 40.0]) {
            runs.push(sample(app.name(), &own, "10.0", &[(NETWORK_FAULTS, faults), (FAULT_SHARE, faults / 100.0)]));
            runs.push(sample(app.name(), &qemu, "10.0", &[(NETWORK_FAULTS, 50.0)]));
        }
        let measured = |runs: &[Run]| -> Vec<_> { targets(runs, "10.0").unwrap().iter().map(|t| t.measured).collect() };
        assert_eq!(measured(&runs), [Some(0.3), Some(0.4), Some(0.8)]);
        runs.truncate(6);
        assert_eq!(measured(&runs), [Some(0.3), None, None]);
    }
}
