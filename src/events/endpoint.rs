//! Addresses of ZMQ endpoints, checked before a socket sees them.

use std::fmt;

/// Where a replica publishes or replays its events: `tcp://HOST:PORT` or `ipc://PATH`. With `@` in front, an address
/// to listen at, for the engine whose publisher connects instead of binding.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Endpoint {
    address: String,
    listen: bool,
}

/// What is wrong with an address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EndpointError {
    /// Neither `tcp://` nor `ipc://`.
    #[error("endpoint {0:?} must start with tcp:// or ipc://")]
    Transport(String),
    /// No `:PORT` from 1 to 65535 at the end.
    #[error("endpoint {0:?} must end with a port from 1 to 65535")]
    Port(String),
    /// The host is missing or has characters that no host has.
    #[error("endpoint {0:?} has no valid host")]
    Host(String),
    /// The host is one to listen at, as engines write their own endpoint.
    #[error("endpoint {0:?} is where the engine listens: put the replica's address in place of the wildcard")]
    Wildcard(String),
    /// The path of `ipc://` is empty, or longer than a socket's path can be.
    #[error("endpoint {0:?} has no valid path")]
    Path(String),
}

/// What a Unix socket's path can hold.
const MAX_PATH_BYTES: usize = 107;

impl Endpoint {
    /// Reads an address.
    ///
    /// # Errors
    ///
    /// If it is no address that a socket could connect to (or listen at, with `@`).
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        let (listen, address) = match text.strip_prefix('@') {
            Some(address) => (true, address),
            None => (false, text),
        };
        let error = |kind: fn(String) -> EndpointError| kind(text.to_owned());
        if let Some(path) = address.strip_prefix("ipc://") {
            if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains(char::is_control) {
                return Err(error(EndpointError::Path));
            }
        } else {
            let rest = address.strip_prefix("tcp://").ok_or_else(|| error(EndpointError::Transport))?;
            let (host, port) = rest.rsplit_once(':').ok_or_else(|| error(EndpointError::Port))?;
            if !port.parse::<u16>().is_ok_and(|port| port != 0) || port.starts_with('+') {
                return Err(error(EndpointError::Port));
            }
            if !listen && matches!(host, "*" | "0.0.0.0" | "::" | "[::]") {
                return Err(error(EndpointError::Wildcard));
            }
            if !(is_host(host) || listen && host == "*") {
                return Err(error(EndpointError::Host));
            }
        }
        Ok(Self { address: address.to_owned(), listen })
    }

    /// The address as ZMQ takes it.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether to listen there instead of connecting.
    #[must_use]
    pub fn listens(&self) -> bool {
        self.listen
    }

    /// The endpoint at a port so much higher; `None` where there is no port or no such one.
    #[must_use]
    pub fn plus(&self, ports: u16) -> Option<Self> {
        if ports == 0 {
            return Some(self.clone());
        }
        let (host, port) = self.address.strip_prefix("tcp://")?.rsplit_once(':')?;
        let port = port.parse::<u16>().ok()?.checked_add(ports)?;
        Some(Self { address: format!("tcp://{host}:{port}"), listen: self.listen })
    }

    /// The endpoint at a host (a name, or an address without brackets) and port.
    ///
    /// # Errors
    ///
    /// If the host is none.
    pub fn at(host: &str, port: u16) -> Result<Self, EndpointError> {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        Self::parse(&format!("tcp://{bracketed}:{port}"))
    }

    /// Whether the host is a literal IPv6 address.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.address.starts_with("tcp://[")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.listen { "@" } else { "" }, self.address)
    }
}

/// A name, an IPv4 address, or an IPv6 address in brackets.
fn is_host(host: &str) -> bool {
    match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok()),
        None => {
            let valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
            !host.is_empty() && host.len() <= 253 && host.bytes().all(valid)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_replicas_are_taken() {
        for text in ["tcp://10.0.0.1:5557", "tcp://vllm-0.svc_a:1", "tcp://[::1]:65535", "ipc:///run/kv.sock"]
        {
            let endpoint = Endpoint::parse(text).expect(text);
            assert_eq!((endpoint.address(), endpoint.listens()), (text, false));
            assert_eq!(endpoint.is_ipv6(), text.contains("::1"));
        }
        let listening = Endpoint::parse("@tcp://*:5557").expect("listens");
        assert_eq!((listening.address(), listening.listens()), ("tcp://*:5557", true));
        assert_eq!(listening.to_string(), "@tcp://*:5557");
    }

    #[test]
    fn other_addresses_are_refused_by_what_is_wrong_with_them() {
        let refused = |text: &str| Endpoint::parse(text).expect_err(text);
        for text in ["", "10.0.0.1:5557", "inproc://x", "http://10.0.0.1:80", "epgm://a:1"] {
            assert_eq!(refused(text), EndpointError::Transport(text.to_owned()));
        }
        for text in
            ["tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://host:+1", "tcp://host:*"]
        {
            assert_eq!(refused(text), EndpointError::Port(text.to_owned()));
        }
        for text in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"] {
            assert_eq!(refused(text), EndpointError::Wildcard(text.to_owned()));
        }
        for text in ["tcp://:5557", "tcp://a b:1", "tcp://a\0b:1", "tcp://::1:5557", "tcp://[::g]:1"] {
            assert_eq!(refused(text), EndpointError::Host(text.to_owned()));
        }
        for text in ["ipc://", "ipc://a\0b"] {
            assert_eq!(refused(text), EndpointError::Path(text.to_owned()));
        }
    }
}
