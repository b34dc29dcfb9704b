//! Addresses of other daemons.

use sterna_api::Problem;

use crate::problems::invalid;

/// Checks that an address has the form of a daemon's.
///
/// # Errors
/// A [`Problem`] where it is not of the form `HOST:PORT`.
pub fn check_address(address: &str) -> Result<(), Problem> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    if port.is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(invalid(format!("'{address}' is not of the form HOST:PORT")));
    }
    Ok(())
}
