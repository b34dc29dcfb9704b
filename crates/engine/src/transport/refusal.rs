//! Why two daemons do not trust each other, whose fault it is, and what to do.

use std::io;
use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError, InvalidMessage};
use sterna_api::{Blame, Code, Problem};

/// An encrypted connection that did not come about.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of this daemon cannot be read.
    #[error("cannot read {path}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Users other than its owner can read this daemon's key.
    #[error("others than its owner can read the key {path} (mode {mode:03o})", path = .path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file of this daemon is not what it should be.
    #[error("{path} holds no {what} in PEM", path = .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
    },
    /// This daemon's certificate or authority is unusable.
    #[error("the certificate {path} cannot be used: {why}", path = .path.display())]
    Own {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The address called is none that a certificate can have.
    #[error("'{0}' is neither a host's name nor an address: no certificate can be for it")]
    Host(String),
    /// The peer's certificate is not signed by our authority.
    #[error("the peer's certificate is not signed by {authority}", authority = .authority.display())]
    Authority {
        /// The file with the authority's certificates.
        authority: PathBuf,
    },
    /// The peer's certificate has expired, or is not valid yet.
    #[error("the peer's certificate {}", if *.expired { "has expired" } else { "is not valid yet" })]
    Date {
        /// Whether it has expired (otherwise it is not valid yet).
        expired: bool,
    },
    /// The peer's certificate is another host's.
    #[error("the peer's certificate is not for '{host}' but for {names}")]
    Name {
        /// The host that was called.
        host: String,
        /// The names in the certificate.
        names: String,
    },
    /// The caller shows no certificate.
    #[error("the caller shows no certificate")]
    Missing,
    /// The caller's certificate names nobody.
    #[error("the caller's certificate has no DNS name, which would say who calls")]
    Nameless,
    /// The caller is not on the list.
    #[error("'{name}' is not among the peers that may call here")]
    NotAllowed {
        /// The caller.
        name: String,
    },
    /// The peer's certificate is wrong in another way.
    #[error("the peer's certificate cannot be accepted: {0}")]
    Certificate(CertificateError),
    /// The peer does not accept ours.
    #[error("the peer does not accept this daemon's certificate: {}", refusal(*.0))]
    Refused(AlertDescription),
    /// We encrypt, the peer does not.
    #[error("this daemon has [tls], the peer speaks plain")]
    PeerPlain,
    /// We encrypt, the caller does not.
    #[error("this daemon has [tls], the caller speaks plain")]
    CallerPlain,
    /// The caller encrypts, we do not.
    #[error("the caller speaks TLS, this daemon has no [tls]")]
    CallerEncrypted,
    /// The connections of one session come from two daemons.
    #[error("the session is another daemon's than '{name}'")]
    Intruder {
        /// The identity of the caller.
        name: String,
    },
    /// Any other failure of the handshake.
    #[error("the peers did not agree on an encryption")]
    Other(#[source] rustls::Error),
}

/// What a peer's alert means.
fn refusal(alert: AlertDescription) -> String {
    match alert {
        // The second alert comes where the authority has the name of ours and another key.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is not signed by the authority there".into()
        }
        AlertDescription::CertificateExpired => "it has expired, or is not valid yet".into(),
        AlertDescription::CertificateRequired => "there was none".into(),
        AlertDescription::AccessDenied => "its name is not among the peers that may call there".into(),
        AlertDescription::BadCertificate => "it is not for the host that was called, or names nobody".into(),
        AlertDescription::UnsupportedCertificate => "it is not for this use".into(),
        other => format!("{other:?}"),
    }
}

impl TlsError {
    /// Why a handshake failed. `host` is known to the calling side alone.
    pub(super) fn of(error: rustls::Error, authority: &std::path::Path, host: Option<&str>) -> Self {
        let named = |names: &[String]| match names {
            [] => "nobody".into(),
            names => names.join(", "),
        };
        match error {
            rustls::Error::InvalidCertificate(certificate) => match certificate {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    Self::Authority { authority: authority.into() }
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Date { expired: true },
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    Self::Date { expired: false }
                }
                CertificateError::NotValidForNameContext { presented, .. } => {
                    Self::Name { host: host.unwrap_or_default().into(), names: named(&presented) }
                }
                other => Self::Certificate(other),
            },
            rustls::Error::NoCertificatesPresented => Self::Missing,
            rustls::Error::AlertReceived(alert) => Self::Refused(alert),
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) if host.is_some() => Self::PeerPlain,
            other => Self::Other(other),
        }
    }

    /// The problem as people and programs see it.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let (code, blame, hint) = match self {
            Self::Read { .. } | Self::Content { .. } => {
                (Code::TlsFiles, Blame::Host, "set certificate, key and authority in [tls] of sternad.toml".to_string())
            }
            Self::Exposed { path, .. } => (Code::TlsKeyExposed, Blame::Host, format!("chmod 600 {}", path.display())),
            Self::Own { .. } => {
                (Code::TlsFiles, Blame::Host, "make this host's certificate anew (docs/operating.md)".into())
            }
            Self::Host(_) => {
                (Code::BadOptions, Blame::Request, "give --to a host's name or address, and a port".into())
            }
            Self::Authority { .. } => (
                Code::TlsUntrusted,
                Blame::Peer,
                "one authority must have signed the certificates of both hosts".into(),
            ),
            Self::Date { .. } => {
                (Code::TlsDate, Blame::Peer, "renew the peer's certificate, and compare both hosts' clocks".into())
            }
            Self::Name { .. } => (
                Code::TlsName,
                Blame::Peer,
                "call it by a name or address of its certificate, or make the certificate for this one too".into(),
            ),
            Self::Missing | Self::Nameless | Self::Certificate(_) => {
                (Code::TlsCertificate, Blame::Peer, "make the peer's certificate anew (docs/operating.md)".into())
            }
            Self::NotAllowed { .. } => (Code::TlsNotAllowed, Blame::Peer, "add its name to peers in [tls]".into()),
            Self::Refused(AlertDescription::AccessDenied) => (
                Code::TlsRefused,
                Blame::Request,
                "add the first DNS name of this host's certificate to peers in [tls] there".into(),
            ),
            Self::Refused(_) => (
                Code::TlsRefused,
                Blame::Host,
                "look at this host's certificate; the log of the peer's daemon says more".into(),
            ),
            Self::PeerPlain => (
                Code::TlsMixed,
                Blame::Peer,
                "give the peer a [tls] section too; is the address that of its --listen?".into(),
            ),
            Self::CallerPlain | Self::CallerEncrypted => {
                (Code::TlsMixed, Blame::Peer, "give both daemons a [tls] section, or neither".into())
            }
            Self::Intruder { .. } => {
                (Code::TlsNotYours, Blame::Peer, "only the daemon that began a migration may go on with it".into())
            }
            Self::Other(_) => (
                Code::TlsFailed,
                Blame::Peer,
                "look at the network between the hosts, and at both daemons' logs".into(),
            ),
        };
        Problem::from_error(code, blame, self).hint(hint)
    }
}
