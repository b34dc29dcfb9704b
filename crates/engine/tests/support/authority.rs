//! Authorities, and hosts' credentials that they signed, as files.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use sterna_engine::transport::credentials::{Credentials, Files};
use tempfile::TempDir;

/// Signs hosts' certificates; its files go with it.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: TempDir,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "an authority of tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("authority.pem"), issuer.pem()).unwrap();
        Self { issuer, directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Files of a host with these names and addresses, valid in these years.
    pub fn files(&self, names: &[&str], years: (i32, i32)) -> Files {
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_string()).collect::<Vec<_>>()).unwrap();
        params.not_before = date_time_ymd(years.0, 1, 1);
        params.not_after = date_time_ymd(years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let base = names.first().copied().unwrap_or("nobody");
        let files = Files {
            certificate: self.path(&format!("{base}.pem")),
            key: self.path(&format!("{base}.key")),
            authority: self.path("authority.pem"),
            peers: vec![],
        };
        std::fs::write(&files.certificate, certificate.pem()).unwrap();
        write_key(&files.key, &key.serialize_pem());
        files
    }

    /// A host with these names and addresses, as it should be.
    pub fn host(&self, names: &[&str]) -> Arc<Credentials> {
        Arc::new(Credentials::load(self.files(names, (2020, 2120))).expect("credentials"))
    }
}

pub fn write_key(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}
