//! `sterna balloon`: how much of its memory a guest keeps.

use std::process::ExitCode;

use sterna_api::units::show_size;
use sterna_api::{Balloon, BalloonMode, BalloonSetting, Vm};

use crate::arguments;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::machines::word;

/// Changes how a machine's balloon is handled, and shows it.
///
/// # Errors
/// The daemon's problem.
pub async fn balloon(client: &Client, wanted: &arguments::Balloon) -> Result<ExitCode, Failure> {
    let mode = match (wanted.auto, wanted.target) {
        (true, _) => BalloonMode::Auto,
        (false, Some(_)) => BalloonMode::Target,
        (false, None) => BalloonMode::Off,
    };
    let interval_ms = u64::try_from(wanted.interval.as_millis()).unwrap_or(u64::MAX);
    let setting = BalloonSetting { mode, interval_ms, memory_bytes: wanted.target };
    let vm: Vm = client.put(&format!("/v1/vms/{}/balloon", escape(&wanted.name)), &setting).await?;
    println!("{}: balloon {}", vm.name, vm.balloon.as_ref().map_or_else(|| "off".into(), line));
    Ok(ExitCode::SUCCESS)
}

/// A balloon in one line of text.
pub fn line(balloon: &Balloon) -> String {
    let setting = match (balloon.setting.mode, balloon.setting.memory_bytes) {
        (BalloonMode::Auto, _) => format!("auto, every {}", interval(balloon.setting.interval_ms)),
        (BalloonMode::Target, Some(bytes)) => format!("the guest keeps {}", show_size(bytes)),
        (mode, _) => word(&mode),
    };
    let mut words = vec![setting, format!("{} in it", show_size(balloon.size_bytes))];
    if let Some(target) = balloon.target_bytes.filter(|target| *target != balloon.size_bytes) {
        words.push(format!("asked for {}", show_size(target)));
    }
    words.extend(balloon.guest_free_bytes.map(|bytes| format!("{} free in the guest", show_size(bytes))));
    if let Some(pressure) = balloon.last_pressure {
        let backing_off = if balloon.backing_off { ", so it does not grow" } else { "" };
        words.push(format!("gave back {} times, last for {}{backing_off}", balloon.pressures, word(&pressure.what)));
    }
    words.extend(balloon.note.clone());
    words.join("; ")
}

fn interval(ms: u64) -> String {
    if ms.is_multiple_of(1000) { format!("{} s", ms / 1000) } else { format!("{ms} ms") }
}

#[cfg(test)]
mod tests {
    use sterna_api::balloon::{Pressure, PressureSeen};

    use super::*;

    #[test]
    fn a_line_says_what_is_in_it_what_was_asked_for_and_why_memory_went_back() {
        let mut balloon = Balloon {
            setting: BalloonSetting { mode: BalloonMode::Auto, ..BalloonSetting::default() },
            size_bytes: 1 << 30,
            ..Balloon::default()
        };
        assert_eq!(line(&balloon), "auto, every 5 s; 1.00 GiB in it");
        balloon.target_bytes = Some(1 << 29);
        balloon.last_pressure = Some(PressureSeen { what: Pressure::SwapIn, at_ms: 0 });
        (balloon.pressures, balloon.backing_off) = (2, true);
        let text = line(&balloon);
        assert!(
            text.contains("asked for 512.00 MiB") && text.contains("2 times, last for swap-in, so it does"),
            "{text}"
        );
    }
}
