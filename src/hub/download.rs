//! Asking a model hub over HTTP.

use super::{
    ManifestError,
    repository::{Commit, File, Listing, Name, Revision},
};
use crate::client::{self, Answer, ClientError, Request, Tls, TlsError};
use hyper::header::{AUTHORIZATION, HeaderValue, LOCATION};
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use tokio::time::timeout;

/// The list of a repository with thousands of files.
const MAX_LIST_BYTES: usize = 32 << 20;

/// The largest vocabularies are some 40 MB.
const MAX_FILE_BYTES: usize = 512 << 20;

/// To the store of large files, and once more to its edge.
const MAX_REDIRECTS: usize = 5;

/// For a whole file.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Why a model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The hub could not be asked.
    #[error("{url}")]
    Client {
        /// What was asked for.
        url: String,
        /// Why.
        source: ClientError,
    },
    /// It took too long.
    #[error("{0}: no whole answer in 10 minutes")]
    TimedOut(String),
    /// The hub refused.
    #[error("{url}: the hub answers {status}{}", hint(*status))]
    Status {
        /// What was asked for.
        url: String,
        /// How it answered.
        status: u16,
    },
    /// It leads elsewhere too often, or nowhere.
    #[error("{0}: redirected too often, or to no address")]
    Redirect(String),
    /// The answer is not a hub's.
    #[error("{url}: not the answer of a model hub: {reason}")]
    Answer {
        /// What was asked for.
        url: String,
        /// Why not.
        reason: String,
    },
    /// The repository has no fast tokenizer.
    #[error("the repository has no tokenizer.json")]
    NoTokenizer,
    /// What came is not what the hub lists.
    #[error("{0}: the checksum is not the hub's")]
    Checksum(String),
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The access token.
    #[error("{}: not an access token", .0.display())]
    Token(PathBuf),
    /// The cache folder.
    #[error("{}", path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What the cache folder says of a branch is no commit.
    #[error("{}: no commit in it", .0.display())]
    Reference(PathBuf),
    /// The model in the cache folder.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

const fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => " (a gated or private model needs an access token: HF_TOKEN or --token-file)",
        404 => " (no such model or revision, or a private one)",
        _ => "",
    }
}

/// `http://HOST[:PORT][/PATH]`, or with https.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Url {
    tls: bool,
    host: String,
    port: Option<u16>,
    /// Without a slash at its end.
    path: String,
}

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no address: as in https://huggingface.co");
        let (tls, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(wrong()),
        };
        let at = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(at);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port.parse().map_err(|_| wrong())?)),
            _ => (authority, None),
        };
        if host.is_empty() || host.contains(['@', ' ']) {
            return Err(wrong());
        }
        Ok(Self { tls, host: host.to_owned(), port, path: path.trim_end_matches('/').to_owned() })
    }
}

impl Url {
    fn authority(&self) -> String {
        self.port.map_or_else(|| self.host.clone(), |port| format!("{}:{port}", self.host))
    }

    fn addr(&self) -> String {
        format!("{}:{}", self.host, self.port.unwrap_or(if self.tls { 443 } else { 80 }))
    }

    /// The address of what this one is redirected to.
    fn redirected(&self, location: &str) -> Option<Self> {
        match location.strip_prefix('/') {
            Some(rest) if !rest.starts_with('/') => Some(Self { path: location.to_owned(), ..self.clone() }),
            _ => location.parse().ok(),
        }
    }

    /// Whether a secret for `self` may go to `other`.
    fn is_same_place(&self, other: &Self) -> bool {
        (self.tls, self.addr()) == (other.tls, other.addr())
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What follows a `?` may be a signature.
        let path = self.path.split('?').next().unwrap_or_default();
        write!(f, "http{}://{}{path}", if self.tls { "s" } else { "" }, self.authority())
    }
}

/// A model hub.
#[derive(Debug)]
pub(super) struct Hub {
    url: Url,
    tls: Result<Tls, String>,
    authorization: Option<HeaderValue>,
}

impl Hub {
    pub(super) fn new(
        url: &Url,
        token_file: Option<&Path>,
        ca_file: Option<&Path>,
    ) -> Result<Self, HubError> {
        let tls = match Tls::load(ca_file, None) {
            Err(error) if url.tls => return Err(error.into()),
            tls => tls.map_err(|error| error.to_string()),
        };
        let token = match token_file {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .map_err(|source| HubError::Folder { path: path.to_owned(), source })?,
            ),
            None => std::env::var("HF_TOKEN").ok(),
        };
        let header = |token: String| {
            let named = || token_file.map_or_else(|| PathBuf::from("HF_TOKEN"), Path::to_owned);
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.trim()))
                .map_err(|_| HubError::Token(named()))?;
            value.set_sensitive(true);
            Ok::<_, HubError>(value)
        };
        let token = token.filter(|token| !token.trim().is_empty());
        Ok(Self { url: url.clone(), tls, authorization: token.map(header).transpose()? })
    }

    /// The files of a repository.
    pub(super) async fn listing(&self, name: &Name, revision: &Revision) -> Result<Listing, HubError> {
        let path = format!("/api/models/{}/revision/{}?blobs=true", name.as_str(), revision.escaped());
        let answer = self.get(&path, MAX_LIST_BYTES).await?;
        Listing::parse(&answer.body)
            .map_err(|reason| HubError::Answer { url: format!("{}{path}", self.url), reason })
    }

    /// One file, which is what the hub lists.
    pub(super) async fn file(&self, name: &Name, commit: &Commit, file: &File) -> Result<Vec<u8>, HubError> {
        let path = format!("/{}/resolve/{}/{}", name.as_str(), commit.as_str(), file.name);
        let answer = self.get(&path, MAX_FILE_BYTES).await?;
        if !file.matches(&answer.body) {
            return Err(HubError::Checksum(file.name.clone()));
        }
        Ok(answer.body.into())
    }

    async fn get(&self, path: &str, max_bytes: usize) -> Result<Answer, HubError> {
        let mut url = Url { path: format!("{}{path}", self.url.path), ..self.url.clone() };
        for _ in 0..=MAX_REDIRECTS {
            let shown = url.to_string();
            let failed = |source| HubError::Client { url: shown.clone(), source };
            let asked = async {
                let answering = self.ask(&url).await?;
                let location = answering.0.headers().get(LOCATION).and_then(|value| value.to_str().ok());
                let location = location.map(str::to_owned);
                Ok::<_, ClientError>((answering.read(max_bytes).await?, location))
            };
            let (answer, location) = timeout(TIMEOUT, asked)
                .await
                .map_err(|_| HubError::TimedOut(shown.clone()))?
                .map_err(failed)?;
            match (answer.status, location) {
                (200, _) => return Ok(answer),
                (301 | 302 | 303 | 307 | 308, Some(location)) => {
                    url = url.redirected(&location).ok_or_else(|| HubError::Redirect(shown.clone()))?;
                }
                (status, _) => return Err(HubError::Status { url: shown, status }),
            }
        }
        Err(HubError::Redirect(format!("{}{path}", self.url)))
    }

    async fn ask(&self, url: &Url) -> Result<client::Answering, ClientError> {
        let tls = match &self.tls {
            _ if !url.tls => None,
            Ok(tls) => Some((tls, url.host.as_str())),
            Err(reason) => return Err(ClientError::NoTls(reason.clone())),
        };
        let (target, host) = (if url.path.is_empty() { "/" } else { &url.path }, url.authority());
        let mut request = Request { host: Some(&host), ..Request::get(target) };
        // The token is the hub's, not that of the store where its large files are.
        if let Some(token) = self.authorization.as_ref().filter(|_| url.is_same_place(&self.url)) {
            request.headers.push((AUTHORIZATION, token.clone()));
        }
        client::exchange(&url.addr(), tls, request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_redirected() {
        let url: Url = "https://hub.example/mirror/".parse().expect("an address");
        assert_eq!(
            (url.to_string().as_str(), url.addr().as_str()),
            ("https://hub.example/mirror", "hub.example:443")
        );
        let local: Url = "http://127.0.0.1:8080".parse().expect("an address");
        assert_eq!((local.addr().as_str(), local.authority().as_str()), ("127.0.0.1:8080", "127.0.0.1:8080"));
        assert_eq!("http://[::1]".parse::<Url>().expect("an address").addr(), "[::1]:80");
        let elsewhere = url.redirected("https://store.example/x?sig=secret").expect("an address");
        assert!(!elsewhere.is_same_place(&url));
        assert_eq!(elsewhere.to_string(), "https://store.example/x", "a signature is not shown");
        let same = url.redirected("/api/resolve-cache/x").expect("an address");
        assert!(same.is_same_place(&url));
        assert_eq!(same.path, "/api/resolve-cache/x");
        let plain = url.redirected("http://hub.example/x").expect("an address");
        assert!(!plain.is_same_place(&url), "no secret without TLS");
        for wrong in ["huggingface.co", "ftp://x", "https://", "https://user@host", "https://h:port"] {
            assert!(wrong.parse::<Url>().is_err(), "{wrong}");
        }
        assert!(url.redirected("//elsewhere").is_none());
    }
}
