//! HAProxy, by its runtime socket.

use crate::{
    config::SocketAddr,
    doctor::facts::{CfgFacts, HaproxyFacts, Info},
    haproxy_config::{HaproxyCfg, HaproxyVersion},
    machine,
    replica::{RuntimeSocket, Server, commands, parse_servers},
};
use std::path::PathBuf;

pub(super) async fn facts(addr: &SocketAddr) -> HaproxyFacts {
    HaproxyFacts { socket: addr.to_string(), info: info(&RuntimeSocket::new(addr.clone())).await }
}

/// HAProxy's files, as its `-f` names them.
pub(super) fn cfg(paths: &[PathBuf]) -> CfgFacts {
    CfgFacts {
        read: HaproxyCfg::read(paths).map_err(|error| error.to_string()),
        installed: HaproxyVersion::installed(),
        memory_bytes: machine::memory_bytes(machine::Process::Unknown),
    }
}

async fn info(socket: &RuntimeSocket) -> Result<Info, String> {
    let answer = socket.ask("show info\n").await.map_err(|error| error.to_string())?;
    let version = answer.lines().find_map(|line| line.strip_prefix("Version: "));
    let version = version.ok_or_else(|| "what answers there is no runtime socket of HAProxy".to_owned())?;
    let level = socket.ask("show cli level\n").await.ok();
    let level = level.map(|level| level.trim().to_owned());
    let level = level.filter(|level| matches!(level.as_str(), "user" | "operator" | "admin"));
    Ok(Info { version: version.trim().to_owned(), level })
}

pub(super) async fn servers(addr: &SocketAddr, backend: &str) -> Result<Vec<Server>, String> {
    let answer = RuntimeSocket::new(addr.clone()).ask(&commands(backend)).await;
    let answer = answer.map_err(|error| error.to_string())?;
    parse_servers(&answer, backend).map_err(|error| error.to_string())
}
