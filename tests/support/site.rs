//! An existing site (`tests/fixtures/haproxy/site.cfg`), with kvspoa beside it or without.

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Parser;
use kvspoa::haproxy_config::{Form, Names, render};
use kvspoa::lifecycle::log_line::RequestEnd;
use tempfile::TempDir;

use super::agent::StubAgent;
use super::haproxy::{Binary, HaproxyProcess};
use super::http;
use super::log_sink::LogSink;
use super::nobody;
use super::origin::Origin;

const SITE: &str = include_str!("../fixtures/haproxy/site.cfg");
const GUARD: &str = include_str!("../fixtures/haproxy/guard.spoe.conf");

/// Everything that stands around HAProxy.
pub(crate) struct World {
    pub(crate) r1: Origin,
    pub(crate) r2: Origin,
    pub(crate) api: Origin,
    pub(crate) static_files: Origin,
    /// The agent of the site's own SPOE filter.
    pub(crate) guard: StubAgent,
    pub(crate) site_log: LogSink,
    pub(crate) agent_log: LogSink,
    /// Lines for the `global` section.
    pub(crate) global: &'static str,
    /// What the backend of the replicas balances by.
    pub(crate) balance: &'static str,
    /// Options of `kvspoa haproxy-config`.
    pub(crate) options: Vec<String>,
    /// Whether `kvspoa haproxy-config --haproxy-cfg` puts our lines in place; else they are pasted.
    pub(crate) fitted: bool,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_replicas(Origin::named("r1"), Origin::named("r2"))
    }

    pub(crate) fn with_replicas(r1: Origin, r2: Origin) -> Self {
        Self {
            r1,
            r2,
            api: Origin::named("api"),
            static_files: Origin::named("static"),
            guard: StubAgent::answering(&[("verdict", "good")]),
            site_log: LogSink::start(),
            agent_log: LogSink::start(),
            global: "",
            balance: "roundrobin",
            options: Vec::new(),
            fitted: false,
        }
    }

    /// The site with kvspoa beside it, whose agent is at this address.
    pub(crate) fn start(&self, binary: &Binary, agent: SocketAddr) -> Site {
        Site::start(binary, self, Some(agent))
    }

    /// The site as it was.
    pub(crate) fn start_without_kvspoa(&self, binary: &Binary) -> Site {
        Site::start(binary, self, None)
    }
}

/// A running site.
pub(crate) struct Site {
    pub(crate) http: SocketAddr,
    pub(crate) https: SocketAddr,
    pub(crate) haproxy: HaproxyProcess,
    _directory: TempDir,
}

impl Site {
    fn start(binary: &Binary, world: &World, agent: Option<SocketAddr>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let [http, https] = [nobody(), nobody()];
        let certificate = write_certificate(directory.path());
        let guard_conf = write(directory.path(), "guard.spoe.conf", GUARD);
        let mut site = SITE.to_owned();
        let mut files = Vec::new();
        if let Some(agent) = agent.filter(|_| !world.fitted) {
            let forms = Forms::new(directory.path(), agent, world.agent_log.address, &world.options);
            site = site
                .replace("    # kvspoa: frontend\n", &forms.text(Form::Frontend))
                .replace("    # kvspoa: backend\n", &forms.text(Form::Backend));
            files.push(write(directory.path(), "kvspoa-agent.cfg", &forms.text(Form::Agent)));
        }
        for (word, value) in [
            ("{global}", world.global.to_owned()),
            ("{balance}", world.balance.to_owned()),
            ("{http}", http.to_string()),
            ("{https}", https.to_string()),
            ("{certificate}", certificate.display().to_string()),
            ("{guard_conf}", guard_conf.display().to_string()),
            ("{guard}", world.guard.address.to_string()),
            ("{site_log}", world.site_log.address.to_string()),
            ("{api}", world.api.address.to_string()),
            ("{static}", world.static_files.address.to_string()),
            ("{r1}", world.r1.address.to_string()),
            ("{r2}", world.r2.address.to_string()),
        ] {
            site = site.replace(word, &value);
        }
        files.insert(0, write(directory.path(), "haproxy.cfg", &site));
        if let Some(agent) = agent.filter(|_| world.fitted) {
            files = vec![fitted(&files[0], binary, agent, world)];
        }
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        assert_clean(binary, &files);
        let haproxy = HaproxyProcess::start(binary, directory.path(), &files);
        Self { http, https, haproxy, _directory: directory }
    }

    /// Waits until HAProxy's check of the agent has this result (`UP`, `DOWN`).
    pub(crate) fn wait_for_agent(&self, status: &str) {
        self.haproxy.wait_for_server("kvspoa_agent", "agent", status);
    }

    /// Asks under a path that no other request has: the answer's body, and how HAProxy says that it ended.
    pub(crate) fn ask(&self, world: &World, path: &str) -> (String, RequestEnd) {
        let answer = http::post(self.http, path, &[]);
        assert_eq!(answer.status(), 200, "{path}: {answer:?}");
        (answer.text(), world.agent_log.end(&format!(" {path} ")))
    }

    /// Sends these bytes over TLS, and gives what comes back until the server closes.
    pub(crate) fn send_tls(&self, request: &[u8]) -> String {
        let mut client = Command::new("openssl")
            .args(["s_client", "-quiet", "-connect", &self.https.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl runs");
        client.stdin.as_mut().expect("piped").write_all(request).expect("sent");
        let mut answer = String::new();
        client.stdout.as_mut().expect("piped").read_to_string(&mut answer).expect("text");
        client.wait().expect("it ends");
        answer
    }
}

/// A copy of the file with our lines in it, as `kvspoa haproxy-config` makes it; the SPOE file is put in place.
fn fitted(file: &Path, binary: &Binary, agent: SocketAddr, world: &World) -> PathBuf {
    let directory = file.parent().expect("a directory");
    let (out, spoe) = (directory.join("out"), directory.join("kvspoa.spoe.conf"));
    let output = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args(["haproxy-config", "all", "--backend", "llm", "--haproxy-version", &binary.version])
        .args(["--agent", &agent.to_string(), "--log-to", &world.agent_log.address.to_string()])
        .arg("--spoe-file")
        .arg(&spoe)
        .arg("--out")
        .arg(&out)
        .arg("--haproxy-cfg")
        .arg(file)
        .args(&world.options)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "HAProxy {}: {said}", binary.version);
    fs::copy(out.join("kvspoa.spoe.conf"), spoe).expect("it was written");
    out.join("haproxy.cfg")
}

/// The forms for one test.
pub(crate) struct Forms {
    options: Vec<String>,
}

impl Forms {
    /// For these addresses; the SPOE file is put into `directory`.
    pub(crate) fn new(directory: &Path, agent: SocketAddr, log_to: SocketAddr, more: &[String]) -> Self {
        let spoe = directory.join("kvspoa.spoe.conf");
        let mut options: Vec<String> = [("--agent", agent.to_string()), ("--log-to", log_to.to_string())]
            .into_iter()
            .chain([("--spoe-file", spoe.display().to_string())])
            .flat_map(|(option, value)| [option.to_owned(), value])
            .collect();
        options.extend_from_slice(more);
        let forms = Self { options };
        fs::write(&spoe, forms.text(Form::Spoe)).expect("written");
        forms
    }

    /// What `kvspoa haproxy-config` prints for this form.
    pub(crate) fn text(&self, form: Form) -> String {
        #[derive(Parser)]
        struct Command {
            #[command(flatten)]
            names: Names,
        }
        let line = ["haproxy-config"].into_iter().chain(self.options.iter().map(String::as_str));
        render(form, &Command::try_parse_from(line).expect("valid options").names)
    }
}

/// `haproxy -c` accepts the files without a warning.
pub(crate) fn assert_clean(binary: &Binary, files: &[&Path]) {
    let output = binary.check(files);
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "HAProxy {}: {said}", binary.version);
    assert!(!said.contains("WARNING") && !said.contains("ALERT"), "HAProxy {}: {said}", binary.version);
}

pub(crate) fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).expect("written");
    path
}

/// A self-signed certificate and its key in one file, as HAProxy wants them.
fn write_certificate(directory: &Path) -> PathBuf {
    let (key, certificate) = (directory.join("key.pem"), directory.join("cert.pem"));
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .expect("openssl runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let both =
        [fs::read_to_string(certificate), fs::read_to_string(key)].map(|text| text.expect("PEM")).concat();
    write(directory, "site.pem", &both)
}
