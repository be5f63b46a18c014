//! How the replicas of one pool are reached: certificates and API key.

use super::{Answer, Answering, ClientError, Request, Tls, TlsError, exchange};
use crate::config::{HttpAccess, HttpAddr};
use bytes::Bytes;
use hyper::{Method, header, header::HeaderValue};
use std::path::{Path, PathBuf};

/// A client of the replicas of one pool.
#[derive(Clone, Debug)]
pub struct Access {
    /// Absent where it cannot be had and nobody asked for it: replicas with TLS are then not reached.
    tls: Result<Tls, String>,
    force_tls: Option<bool>,
    server_name: Option<String>,
    authorization: Option<HeaderValue>,
}

/// Why replicas cannot be reached as configured.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The file of the API key cannot be read.
    #[error("{}: {source}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It holds no key.
    #[error("{}: not an API key: one line of visible ASCII characters", .0.display())]
    NoKey(PathBuf),
}

impl Access {
    /// Reads the files that the configuration names.
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn load(config: &HttpAccess) -> Result<Self, AccessError> {
        let identity = config.cert_file.as_deref().zip(config.key_file.as_deref());
        let tls = Tls::load(config.ca_file.as_deref(), identity);
        let is_asked_for = config.tls == Some(true) || config.ca_file.is_some() || identity.is_some();
        let tls = match tls {
            Err(error) if is_asked_for => return Err(error.into()),
            tls => tls.map_err(|error| error.to_string()),
        };
        Ok(Self {
            tls,
            force_tls: config.tls,
            server_name: config.server_name.clone(),
            authorization: config.api_key_file.as_deref().map(bearer).transpose()?,
        })
    }

    /// Sends a GET and reads no more than `max_bytes` of answer.
    ///
    /// # Errors
    /// [`ClientError`]; an answer of any status is none.
    pub async fn get(&self, addr: &HttpAddr, target: &str, max_bytes: usize) -> Result<Answer, ClientError> {
        self.send(addr, Request::get(target), max_bytes).await
    }

    /// Sends a POST with a JSON body and reads no more than `max_bytes` of answer.
    ///
    /// # Errors
    /// As [`Access::get`].
    pub async fn post(
        &self,
        addr: &HttpAddr,
        target: &str,
        body: Bytes,
        max_bytes: usize,
    ) -> Result<Answer, ClientError> {
        self.send(addr, Request { method: Method::POST, body, ..Request::get(target) }, max_bytes).await
    }

    /// Sends any request and reads no more than `max_bytes` of answer.
    ///
    /// # Errors
    /// As [`Access::get`].
    pub async fn send(
        &self,
        addr: &HttpAddr,
        request: Request<'_>,
        max_bytes: usize,
    ) -> Result<Answer, ClientError> {
        self.exchange(addr, request).await?.read(max_bytes).await
    }

    /// Sends any request and returns the answer as soon as its headers are there.
    ///
    /// # Errors
    /// As [`Access::get`].
    pub async fn exchange(
        &self,
        addr: &HttpAddr,
        mut request: Request<'_>,
    ) -> Result<Answering, ClientError> {
        let tls = match &self.tls {
            _ if !self.force_tls.unwrap_or(addr.tls) => None,
            Ok(tls) => Some((tls, self.server_name.as_deref().unwrap_or_else(|| addr.host()))),
            Err(reason) => return Err(ClientError::NoTls(reason.clone())),
        };
        if let Some(authorization) = &self.authorization {
            request.headers.push((header::AUTHORIZATION, authorization.clone()));
        }
        exchange(addr.at.as_str(), tls, request).await
    }
}

/// The header of a key, which no log shows.
fn bearer(path: &Path) -> Result<HeaderValue, AccessError> {
    let key =
        std::fs::read_to_string(path).map_err(|source| AccessError::Key { path: path.to_owned(), source })?;
    let value = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
    let is_key = !key.trim().is_empty() && !key.trim().contains(char::is_whitespace);
    let mut value = value.ok().filter(|_| is_key).ok_or_else(|| AccessError::NoKey(path.to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_lacks_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let said = |config: HttpAccess| Access::load(&config).expect_err("refused").to_string();
        let key = |text| HttpAccess { api_key_file: Some(write("key", text)), ..HttpAccess::default() };
        for text in ["", "\n", "two words", "tab\tkey"] {
            assert!(said(key(text)).contains("not an API key"), "{text:?}");
        }
        assert!(
            Access::load(&key("sk-1234\n"))
                .expect("a key")
                .authorization
                .is_some_and(|key| key.is_sensitive())
        );
        let ca = |path| HttpAccess { ca_file: Some(path), ..HttpAccess::default() };
        assert!(said(ca(write("empty.pem", "nothing"))).contains("empty.pem: no certificate"));
        assert!(said(ca(dir.path().join("absent.pem"))).contains("absent.pem"));
    }
}
