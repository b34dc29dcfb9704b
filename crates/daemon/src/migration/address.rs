//! Where other daemons are.

use sterna_api::Problem;

use crate::problems::invalid;

/// Whether a daemon can be at this address.
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
