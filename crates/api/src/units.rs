//! Sizes (`512M`, `4G`), rates (`1Gbit`, `100MB`) and durations (`300ms`, `5s`) as the command line takes them.
//!
//! Sizes are powers of 1024, as QEMU's are; rates are powers of 1000, as `tc`'s are.

use std::time::Duration;

/// A size, rate or duration that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a {what}: write {example}")]
pub struct UnitError {
    text: String,
    what: &'static str,
    example: &'static str,
}

/// A duration in milliseconds, as reports have it.
#[must_use]
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Splits `text` into its number and its unit; `None` where the number is absent, negative or not finite.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    number.is_finite().then_some((number, text[end..].trim()))
}

/// Scales `number`, refusing what does not fit a `u64`.
fn scale(number: f64, factor: f64) -> Option<u64> {
    let value = (number * factor).round();
    (value >= 0.0 && value < u64::MAX as f64).then_some(value as u64)
}

/// Reads a size in bytes: a number and one of `B`, `K`, `M`, `G`, `T` (powers of 1024); a bare number is bytes.
///
/// # Errors
/// [`UnitError`] where the text is not of that form or does not fit 64 bits.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let read = || {
        let (number, unit) = split(text)?;
        let power = match unit.trim_end_matches("iB").trim_end_matches('B').to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 1,
            "M" => 2,
            "G" => 3,
            "T" => 4,
            _ => return None,
        };
        scale(number, 1024f64.powi(power))
    };
    read().ok_or(UnitError { text: text.into(), what: "size", example: "512M or 4G" })
}

/// Reads a rate in bytes per second: `1Gbit`, `100Mbit` (bits) or `100MB`, `1GB` (bytes), powers of 1000, `/s` allowed.
///
/// # Errors
/// [`UnitError`] where the text is not of that form, is zero, or does not fit 64 bits.
pub fn parse_rate(text: &str) -> Result<u64, UnitError> {
    let read = || {
        let (number, unit) = split(text)?;
        let unit = unit.trim_end_matches("/s").trim_end_matches("ps");
        let (prefix, divisor) =
            if let Some(prefix) = unit.strip_suffix("bit") { (prefix, 8.0) } else { (unit.strip_suffix('B')?, 1.0) };
        let power = match prefix.to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 1,
            "M" => 2,
            "G" => 3,
            "T" => 4,
            _ => return None,
        };
        scale(number, 1000f64.powi(power) / divisor).filter(|rate| *rate > 0)
    };
    read().ok_or(UnitError { text: text.into(), what: "rate", example: "1Gbit or 100MB" })
}

/// Reads a duration: `300ms`, `5s`, `2m`, `50us`.
///
/// # Errors
/// [`UnitError`] where the text is not of that form.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let read = || {
        let (number, unit) = split(text)?;
        let micros = match unit {
            "us" => 1.0,
            "ms" => 1e3,
            "s" => 1e6,
            "m" | "min" => 60e6,
            "h" => 3600e6,
            _ => return None,
        };
        scale(number, micros).map(Duration::from_micros)
    };
    read().ok_or(UnitError { text: text.into(), what: "duration", example: "300ms or 5s" })
}

/// Writes a size the way people read it: `1.50 GiB`.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// Writes a rate the way people read it: `941.2 Mbit/s`.
#[must_use]
pub fn show_rate(bytes_per_s: u64) -> String {
    const UNITS: [&str; 5] = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
    let mut value = bytes_per_s as f64 * 8.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("4G"), Ok(4 << 30));
        assert_eq!(parse_size("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_size("4096"), Ok(4096));
    }

    #[test]
    fn rates_are_powers_of_1000_in_bytes_per_second() {
        assert_eq!(parse_rate("1Gbit"), Ok(125_000_000));
        assert_eq!(parse_rate("100MB"), Ok(100_000_000));
        assert_eq!(parse_rate("100MB/s"), Ok(100_000_000));
    }

    #[test]
    fn durations_keep_microseconds() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "M", "-1G", "1X", "1e400G", "99999999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        for text in ["", "1", "1bits", "0Gbit", "-5MB"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
        for text in ["", "5", "5 days"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
