//! The daemon's credentials: the certificate and key that show who it is, and the authority that it trusts. They are
//! read again when their files change.
//!
//! A daemon's identity is the first DNS name of its certificate. It outlives the certificate: a renewed one of the same
//! name is the same daemon.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::Resumption;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};

use super::refusal::TlsError;

/// The largest file of certificates, bytes: a file of a hundred authorities has a quarter of it.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The files of a daemon's credentials, all in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Its certificate, and those between it and the authority's, if any.
    pub certificate: PathBuf,
    /// The certificate's key; nobody but its owner may read it.
    pub key: PathBuf,
    /// The certificates of the authorities that sign hosts' certificates.
    pub authority: PathBuf,
    /// The identities that may call here; where empty, everybody with a certificate of the authority.
    pub peers: Vec<String>,
}

/// A daemon's credentials.
#[derive(Debug)]
pub struct Credentials {
    files: Files,
    current: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    stamps: [Stamp; 3],
    configs: Arc<Configs>,
}

/// The configurations for calling and for answering.
#[derive(Debug)]
pub(super) struct Configs {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    pub authority: PathBuf,
}

/// The stamp of a file, which changes with it: inode, size, and the time of the last change, nanoseconds.
type Stamp = Option<(u64, u64, i64, i64)>;

impl Credentials {
    /// Reads the files, and checks all that can be checked before a call.
    ///
    /// # Errors
    /// [`TlsError`] with the file at fault.
    pub fn load(files: Files) -> Result<Self, TlsError> {
        let stamps = stamps(&files);
        let configs = Arc::new(read(&files)?);
        Ok(Self { files, current: Mutex::new(Loaded { stamps, configs }) })
    }

    /// The configurations for the next call. Files that have changed are read again. Where they are unusable (for
    /// example a new certificate whose key is not there yet), the old ones stay in force until the files change once
    /// more.
    pub(super) fn current(&self) -> Arc<Configs> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // The stamps are taken before the files are read: the next call then finds what changes meanwhile.
        let stamps = stamps(&self.files);
        if stamps != current.stamps {
            current.stamps = stamps;
            match read(&self.files) {
                Ok(configs) => {
                    tracing::info!(certificate = %self.files.certificate.display(), "the certificate was read anew");
                    current.configs = Arc::new(configs);
                }
                Err(error) => {
                    tracing::warn!(%error, "the certificate's files have changed and cannot be used: the old one stays")
                }
            }
        }
        Arc::clone(&current.configs)
    }
}

fn stamps(files: &Files) -> [Stamp; 3] {
    [&files.certificate, &files.key, &files.authority].map(|path| {
        let about = std::fs::metadata(path).ok()?;
        Some((about.ino(), about.len(), about.ctime(), about.ctime_nsec()))
    })
}

fn read(files: &Files) -> Result<Configs, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let (chain, key) = (certificates(&files.certificate)?, key(&files.key)?);
    let own = |why: String| TlsError::Own { path: files.certificate.clone(), why };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.authority)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::Own { path: files.authority.clone(), why: error.to_string() })?;
    }
    let roots = Arc::new(roots);
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .map_err(|error| TlsError::Own { path: files.authority.clone(), why: error.to_string() })?;
    // Both sides would refuse it: it is better to say so here, at the start.
    identity(&chain[0])
        .ok_or_else(|| own("it has no DNS name (subjectAltName), which is a daemon's identity".into()))?;
    match verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()) {
        // The daemon starts all the same: its guests need it, and the certificate may be renewed while it runs.
        Err(rustls::Error::InvalidCertificate(
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. },
        )) => {
            tracing::warn!(certificate = %files.certificate.display(), "the certificate is not valid today: no peer will accept it")
        }
        // An authority of the same name with another key causes the second error.
        Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)) => {
            return Err(own(format!("it is not signed by {}", files.authority.display())));
        }
        Err(error) => return Err(own(error.to_string())),
        Ok(_) => {}
    }
    let versions = &[&rustls::version::TLS13];
    let known = |error: rustls::Error| own(error.to_string());
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .map_err(known)?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain.clone(), key.clone_key())
        .map_err(known)?;
    // No session is resumed: each call must prove the caller's identity anew. And nobody reads the tickets that a
    // listener would send unasked.
    client.resumption = Resumption::disabled();
    let peers = files.peers.iter().map(|name| name.to_ascii_lowercase()).collect();
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(known)?
        .with_client_cert_verifier(Arc::new(Allowed { chain: verifier, peers }))
        .with_single_cert(chain, key)
        .map_err(known)?;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    Ok(Configs { client: Arc::new(client), server: Arc::new(server), authority: files.authority.clone() })
}

/// A file's text and its metadata, both of the same open file.
fn text(path: &Path) -> Result<(Vec<u8>, Metadata), TlsError> {
    let read = || {
        let file = File::open(path)?;
        let about = file.metadata()?;
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
        Ok((text, about))
    };
    read().map_err(|source| TlsError::Read { path: path.into(), source })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let what = || TlsError::Content { path: path.into(), what: "certificate" };
    let all: Vec<_> = CertificateDer::pem_slice_iter(&text(path)?.0).collect::<Result<_, _>>().map_err(|_| what())?;
    if all.is_empty() { Err(what()) } else { Ok(all) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let (text, about) = text(path)?;
    if about.mode() & 0o077 != 0 {
        return Err(TlsError::Exposed { path: path.into(), mode: about.mode() & 0o777 });
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|_| TlsError::Content { path: path.into(), what: "private key" })
}

/// The certificate's identity: its first DNS name, in small letters.
pub(super) fn identity(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    certificate.valid_dns_names().next().map(str::to_ascii_lowercase)
}

/// Accepts callers with a certificate of the authority whose identity is on the list, if there is a list.
#[derive(Debug)]
struct Allowed {
    chain: Arc<dyn ClientCertVerifier>,
    peers: Vec<String>,
}

impl ClientCertVerifier for Allowed {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let refused = |why: TlsError| {
            tracing::warn!("{why}; {}", why.problem().hint.unwrap_or_default());
            // The alert that goes with the error tells the caller which mistake it was.
            match why {
                TlsError::Nameless => CertificateError::NotValidForName,
                _ => CertificateError::ApplicationVerificationFailure,
            }
        };
        let name = identity(end_entity).ok_or_else(|| refused(TlsError::Nameless))?;
        if !self.peers.is_empty() && !self.peers.contains(&name) {
            return Err(refused(TlsError::NotAllowed { name }).into());
        }
        Ok(verified)
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
