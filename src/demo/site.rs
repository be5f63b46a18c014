//! The demonstration's HAProxy: two backends over alike replicas, one plain and one with the lines of `haproxy/`.

use crate::haproxy_config::{Form, Names, render};
use anyhow::{Context, bail};
use std::{
    fmt::Write,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// HAProxy starts in well under a second; a machine that needs longer than this has another problem.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A server of one of the two backends.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) name: String,
    pub(super) addr: SocketAddr,
}

/// What the site's configuration names.
#[derive(Debug)]
pub(super) struct Site<'a> {
    pub(super) spop: String,
    pub(super) log_to: String,
    pub(super) plain: &'a [Server],
    pub(super) routed: &'a [Server],
}

/// A running HAProxy; killed when dropped.
#[derive(Debug)]
pub(super) struct Haproxy {
    process: Child,
    pub(super) plain: SocketAddr,
    pub(super) routed: SocketAddr,
    pub(super) version: String,
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        // Nothing can be done about a process that is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The backend with kvspoa, by which the agent knows its pool.
pub(super) const POOL: &str = "be_kvspoa";

/// HAProxy's runtime socket in the demonstration's directory.
pub(super) const RUNTIME_SOCKET: &str = "admin.sock";

/// A free loopback port. Another process could take it before it is used; the start would then fail with a clear error.
pub(super) fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// The `haproxy` to use: as given, else Debian's place, else whatever the PATH finds.
pub(super) fn binary(given: Option<PathBuf>) -> PathBuf {
    let debian = Path::new("/usr/sbin/haproxy");
    given.unwrap_or_else(|| if debian.exists() { debian.to_owned() } else { PathBuf::from("haproxy") })
}

impl Haproxy {
    /// Writes the configuration into `dir` and starts HAProxy with it.
    pub(super) async fn start(binary: &Path, dir: &Path, site: &Site<'_>) -> anyhow::Result<Self> {
        let version = version(binary)?;
        let (plain, routed) = (free_port()?, free_port()?);
        let spoe = dir.join("kvspoa.spoe.conf");
        let names = Names {
            agent: site.spop.clone(),
            log_to: site.log_to.clone(),
            spoe_file: spoe.display().to_string(),
            ..Names::default()
        };
        let form = |form| render(form, &names);
        std::fs::write(&spoe, form(Form::Spoe))?;
        let agent = dir.join("kvspoa-agent.cfg");
        std::fs::write(&agent, form(Form::Agent))?;
        let main = dir.join("haproxy.cfg");
        std::fs::write(
            &main,
            config(site, dir, plain, routed, &form(Form::Frontend), &form(Form::Backend))?,
        )?;
        let process = Command::new(binary)
            .arg("-db")
            .args([Path::new("-f"), &main, Path::new("-f"), &agent])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.join("haproxy.log"))?)
            .spawn()
            .with_context(|| format!("{} could not be started", binary.display()))?;
        let mut started = Self { process, plain, routed, version };
        started.wait_until_it_listens(dir).await?;
        Ok(started)
    }

    async fn wait_until_it_listens(&mut self, dir: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        for addr in [self.plain, self.routed] {
            while tokio::net::TcpStream::connect(addr).await.is_err() {
                let log = || std::fs::read_to_string(dir.join("haproxy.log")).unwrap_or_default();
                if let Some(status) = self.process.try_wait()? {
                    bail!("HAProxy ended with {status}:\n{}", log());
                }
                if Instant::now() > deadline {
                    bail!("HAProxy does not listen:\n{}", log());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }
}

fn version(binary: &Path) -> anyhow::Result<String> {
    let output = Command::new(binary).arg("-v").output().with_context(|| {
        format!("{} is not there: install HAProxy or name it with --haproxy", binary.display())
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().nth(2).unwrap_or("unknown").to_owned())
}

fn config(
    site: &Site<'_>,
    dir: &Path,
    plain: SocketAddr,
    routed: SocketAddr,
    frontend: &str,
    backend: &str,
) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    write!(
        out,
        "global\n    maxconn 1000\n    tune.bufsize 1048576\n    stats socket {} mode 600 level user\n\n\
         defaults\n    mode http\n    timeout client 60s\n    timeout server 60s\n    timeout connect 2s\n    \
         timeout http-request 10s\n    option http-no-delay\n\n\
         frontend plain\n    bind {plain}\n    default_backend be_plain\n\n\
         frontend routed\n    bind {routed}\n    option httplog\n{frontend}\n    default_backend {POOL}\n\n\
         backend be_plain\n    balance leastconn\n    http-response set-header x-served-by %s\n",
        dir.join(RUNTIME_SOCKET).display()
    )?;
    servers(&mut out, site.plain)?;
    write!(
        out,
        "\nbackend {POOL}\n    balance leastconn\n    http-response set-header x-served-by %s\n{backend}\n"
    )?;
    servers(&mut out, site.routed)?;
    Ok(out)
}

fn servers(out: &mut String, servers: &[Server]) -> std::fmt::Result {
    servers.iter().try_for_each(|server| writeln!(out, "    server {} {} check", server.name, server.addr))
}
