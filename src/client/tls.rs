//! TLS to replicas and model hubs: rustls with ring, and certificates from files.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        self, ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem, pem::PemObject},
    },
};

/// Where systems keep the certificates of the authorities that they trust: Debian, Fedora, Alpine and SUSE.
const SYSTEM_CA_FILES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// The client's side of TLS.
#[derive(Clone)]
pub struct Tls(TlsConnector);

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is absent or holds something else.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// A file holds no certificate.
    #[error("{}: no certificate in it", .0.display())]
    Empty(PathBuf),
    /// No file is named, and the system has none at the usual places.
    #[error("no certificates of authorities: install ca-certificates, or name a ca_file")]
    NoAuthorities,
    /// A certificate or key is not one that can be used.
    #[error("{0}")]
    Unusable(#[from] rustls::Error),
}

impl Tls {
    /// Trusts the authorities of `ca_file`, else of `SSL_CERT_FILE`, else of the system. `identity` is a certificate
    /// chain and its key, for servers that ask who we are. All files are PEM.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(ca_file: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<Self, TlsError> {
        let of_environment = || std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        let of_system = || SYSTEM_CA_FILES.iter().map(PathBuf::from).find(|path| path.exists());
        let ca_file = ca_file.map(Path::to_owned).or_else(of_environment).or_else(of_system);
        let ca_file = ca_file.ok_or(TlsError::NoAuthorities)?;
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(certificates(&ca_file)?);
        if added == 0 {
            return Err(TlsError::Empty(ca_file));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let private = PrivateKeyDer::from_pem_file(key)
                    .map_err(|source| TlsError::File { path: key.to_owned(), source })?;
                config.with_client_auth_cert(certificates(chain)?, private)?
            }
        };
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// The handshake. `name` is the host, by name or address, for which the server's certificate must be.
    ///
    /// # Errors
    /// The system's, or one that says what is wrong with the certificate.
    pub async fn connect(&self, name: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = |source| TlsError::File { path: path.to_owned(), source };
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(file)?.collect::<Result<_, _>>().map_err(file)?;
    if certificates.is_empty() {
        return Err(TlsError::Empty(path.to_owned()));
    }
    Ok(certificates)
}
