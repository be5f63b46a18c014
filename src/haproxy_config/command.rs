//! `kvspoa haproxy-config`: prints the forms, or writes the site's files with them.

use std::{
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};

use crate::machine;

use super::cfg::{CfgError, HaproxyCfg, Section};
use super::files::files;
use super::findings::{Finding, Severity, Site, findings};
use super::fit::{Edit, Fit, fit};
use super::forms::{Form, Names, render};
use super::version::HaproxyVersion;

/// What to print.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Part {
    /// All four, one after another; with --out, written to a folder.
    All,
    /// Whole sections for the end of the last file, or for a further one: the backend of the agent.
    Agent,
    /// Lines to paste into the backend of the inference engines.
    Backend,
    /// Lines to paste into the frontend before it.
    Frontend,
    /// The SPOE file, which the lines of the backend name.
    Spoe,
}

impl Part {
    const fn form(self) -> Option<Form> {
        match self {
            Self::All => None,
            Self::Agent => Some(Form::Agent),
            Self::Backend => Some(Form::Backend),
            Self::Frontend => Some(Form::Frontend),
            Self::Spoe => Some(Form::Spoe),
        }
    }
}

/// The arguments of `haproxy-config`.
#[derive(Clone, Debug, Args)]
pub struct HaproxyConfigArgs {
    /// Which part to print.
    pub part: Part,
    /// What our lines name.
    #[command(flatten)]
    pub names: Names,
    /// A file or folder that HAProxy loads, in the order of its `-f`. Names are then chosen to fit it, and what would break
    /// it is refused. HAProxy's environment variables are taken from this command's.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub haproxy_cfg: Vec<PathBuf>,
    /// A backend of inference engines in it; may be given more than once. Not needed where there is only one backend.
    #[arg(long, value_name = "NAME", requires = "haproxy_cfg")]
    pub backend: Vec<String>,
    /// HAProxy's version, as in 2.8 [default: of the `haproxy` that is installed, else 2.6]
    #[arg(long, value_name = "VERSION", requires = "haproxy_cfg")]
    pub haproxy_version: Option<HaproxyVersion>,
    /// Write copies of the files of --haproxy-cfg with our lines in them, the SPOE file and a start of kvspoa.toml into this
    /// folder, which is made if need be.
    #[arg(long, value_name = "FOLDER", requires = "haproxy_cfg")]
    pub out: Option<PathBuf>,
    /// Go on although something is refused.
    #[arg(long, requires = "haproxy_cfg")]
    pub force: bool,
}

/// Why nothing was printed.
#[derive(Debug, thiserror::Error)]
pub enum HaproxyConfigError {
    /// The site's configuration cannot be read.
    #[error(transparent)]
    Cfg(#[from] CfgError),
    /// Which backend is meant is not clear.
    #[error("which backend has the inference engines? Name it with --backend: {0}")]
    Backend(String),
    /// Something would break.
    #[error("{0} refused; --force goes on all the same")]
    Refused(usize),
    /// `--out` is for all parts.
    #[error("--out goes with `all`")]
    OutOfOne,
    /// `--out` would replace what is in use.
    #[error("--out: {0} has files that HAProxy or kvspoa read: choose another folder")]
    OutInUse(String),
    /// Others could change what is written before it is put in use.
    #[error("--out: {0} is another user's, or anybody may write there: choose another folder")]
    OutOfOthers(String),
    /// Two files of the same name cannot be written into one folder.
    #[error("two files are named {0}: print the parts, and paste them")]
    SameName(String),
    /// A file cannot be written.
    #[error("{path}: {error}")]
    Write {
        /// Which.
        path: String,
        /// The system's reason.
        error: std::io::Error,
    },
}

impl HaproxyConfigError {
    /// Whether the fault is in what was asked for, not in the machine.
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        !matches!(self, Self::Write { .. })
    }
}

/// Where our own configuration lies.
const OUR_FOLDER: &str = "/etc/kvspoa";

/// Runs the command; `said` gets what was found, also where that is why it fails.
///
/// # Errors
/// See [`HaproxyConfigError`].
pub fn run(args: &HaproxyConfigArgs, said: &mut dyn FnMut(&Finding)) -> Result<String, HaproxyConfigError> {
    if args.out.is_some() && args.part != Part::All {
        return Err(HaproxyConfigError::OutOfOne);
    }
    if args.haproxy_cfg.is_empty() {
        return Ok(print(args.part, &args.names));
    }
    let cfg = HaproxyCfg::read(&args.haproxy_cfg)?;
    let pools = if args.backend.is_empty() { vec![only_backend(&cfg)?] } else { args.backend.clone() };
    let site = Site {
        version: args.haproxy_version.or_else(HaproxyVersion::installed).unwrap_or(HaproxyVersion::OLDEST),
        pools,
        agent: args.names.agent.clone(),
        log_to: args.names.log_to.clone(),
        memory_bytes: machine::memory_bytes(machine::Process::Unknown),
    };
    let found = findings(&cfg, &site);
    found.iter().for_each(&mut *said);
    let refused = found.iter().filter(|finding| finding.severity == Severity::Refusal).count();
    if refused > 0 && !args.force {
        return Err(HaproxyConfigError::Refused(refused));
    }
    let fit = fit(&cfg, &site.pools, &args.names);
    fit.notes.iter().for_each(said);
    match &args.out {
        Some(folder) => write(folder, args, &cfg, &site, &fit),
        None => Ok(print(args.part, &fit.names)),
    }
}

fn print(part: Part, names: &Names) -> String {
    if let Some(form) = part.form() {
        return render(form, names);
    }
    let heading = |form| match form {
        Form::Spoe => format!("write this to {}", names.spoe_file),
        Form::Agent => {
            "add this to the end of haproxy.cfg, or of the last file that HAProxy loads".to_owned()
        }
        Form::Backend => {
            "paste this into the backend of the inference engines, after its own rules".to_owned()
        }
        Form::Frontend => "paste this into the frontend before it".to_owned(),
    };
    let one = |form| format!("# ======== kvspoa: {}\n\n{}\n", heading(form), render(form, names));
    Form::ALL.map(one).concat()
}

/// The backend, if there is only one that can be meant.
fn only_backend(cfg: &HaproxyCfg) -> Result<String, HaproxyConfigError> {
    let serves_http = |section: &Section| {
        let http =
            cfg.deciding(section, |line| line.word(0) == "mode").first().is_some_and(|l| l.word(1) == "http");
        let servers = section.lines.iter().any(|line| matches!(line.word(0), "server" | "server-template"));
        section.is_backend() && http && servers
    };
    let names: Vec<&str> = cfg.sections(serves_http).map(|section| section.name.as_str()).collect();
    match names.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => Err(HaproxyConfigError::Backend("there is none with `mode http` and servers".to_owned())),
        _ => Err(HaproxyConfigError::Backend(names.join(", "))),
    }
}

/// Writes everything, and tells what to do with it.
fn write(
    folder: &Path,
    args: &HaproxyConfigArgs,
    cfg: &HaproxyCfg,
    site: &Site,
    fit: &Fit,
) -> Result<String, HaproxyConfigError> {
    // Whatever the umask allows.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)
        .map_err(|error| unwritten(folder, error))?;
    let sources = files(&args.haproxy_cfg)?;
    let folders = sources.iter().filter_map(|(path, _)| path.parent()).chain([Path::new(OUR_FOLDER)]);
    if folders.map(absolute).any(|used| used == absolute(folder)) {
        return Err(HaproxyConfigError::OutInUse(folder.display().to_string()));
    }
    if !is_ours(folder).map_err(|error| unwritten(folder, error))? {
        return Err(HaproxyConfigError::OutOfOthers(folder.display().to_string()));
    }
    let write = |name: &Path, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|error| unwritten(&path, error)).map(|()| path)
    };
    let spoe = Path::new(&fit.names.spoe_file);
    let spoe_copy =
        write(Path::new(spoe.file_name().unwrap_or_default()), render(Form::Spoe, &fit.names).as_bytes())?;
    let mut done = String::from("Written; look at them, then:\n\n");
    let mut step = |text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(done, "  {text}");
    };
    step(format!("cp {} {}", spoe_copy.display(), spoe.display()));
    let mut check = String::from("haproxy -c");
    let mut copies = Vec::new();
    let mut names = Vec::new();
    for (path, _) in sources {
        let edits: Vec<&Edit> = fit.edits.iter().filter(|edit| *edit.after.file == *path).collect();
        if edits.is_empty() {
            let _ = write!(check, " -f {}", path.display());
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_owned();
        if names.contains(&name) {
            return Err(HaproxyConfigError::SameName(name.to_string_lossy().into_owned()));
        }
        let bytes =
            fs::read(&path).map_err(|error| CfgError::Read { path: path.display().to_string(), error })?;
        let copy = folder.join(&name);
        write_like(&path, &copy, &fit.apply(&path, &bytes)).map_err(|error| unwritten(&copy, error))?;
        let _ = write!(check, " -f {}", copy.display());
        let places: Vec<String> = edits.iter().map(|edit| described(edit)).collect();
        copies.push(format!("cp {} {}    # with {}", copy.display(), path.display(), places.join(", ")));
        names.push(name);
    }
    step(check);
    copies.into_iter().for_each(&mut step);
    let ours = write(Path::new("kvspoa.toml"), kvspoa_toml(cfg, site, &fit.names).as_bytes())?;
    step(format!(
        "cp {} /etc/kvspoa/kvspoa.toml    # put in the model, start kvspoa, then reload HAProxy",
        ours.display()
    ));
    Ok(done)
}

fn described(edit: &Edit) -> String {
    match &edit.section {
        Some(section) => format!("lines for `{section}` after {}", edit.after.line),
        None => "the agent at its end".to_owned(),
    }
}

/// A start of our own configuration.
fn kvspoa_toml(cfg: &HaproxyCfg, site: &Site, names: &Names) -> String {
    // One that is meant for us, else the first.
    let mut sockets: Vec<_> = cfg.global().filter(|line| line.begins(&["stats", "socket"])).collect();
    sockets.sort_by_key(|line| !line.mentions("kvspoa"));
    let socket = sockets.first();
    let socket = socket.map(|line| {
        let families = ["unix@", "ipv4@", "ipv6@"];
        families.iter().find_map(|family| line.word(2).strip_prefix(family)).unwrap_or(line.word(2))
    });
    let mut text = format!(
        "# HAProxy's `stats socket`; kvspoa's user must be able to open it.\nhaproxy.socket = {}\nspop.listen = {}\nlog.listen = {}\n",
        quoted(socket.unwrap_or("/run/haproxy/admin.sock")),
        quoted(&names.agent),
        quoted(&names.log_to),
    );
    for pool in &site.pools {
        let _ = write!(
            text,
            "\n[[pool]]\nbackend = {}\n# The model's tokenizer and chat template; `kvspoa model fetch NAME` brings them and prints \
             the folder.\n# model_dir = \"/var/lib/kvspoa/models/…\"\n",
            quoted(pool)
        );
    }
    text
}

/// A TOML string.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// The folder without links and dots; as it is, where it is not there.
fn absolute(folder: &Path) -> PathBuf {
    // The parent of a bare name.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned())
}

/// Whether nobody else may change what lies there: root will copy it to where HAProxy reads it.
fn is_ours(folder: &Path) -> io::Result<bool> {
    let (folder, us) = (fs::metadata(folder)?, fs::metadata("/proc/self")?);
    Ok(folder.uid() == us.uid() && folder.mode() & 0o002 == 0)
}

/// Writes a copy that those may read who may read the original: passwords may be in it.
fn write_like(original: &Path, copy: &Path, bytes: &[u8]) -> io::Result<()> {
    let mode = fs::metadata(original)?.mode() & 0o777;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(copy)?;
    // Before anything is in it; writable for the next time.
    file.set_permissions(fs::Permissions::from_mode(mode | 0o200))?;
    file.write_all(bytes)
}

fn unwritten(path: &Path, error: std::io::Error) -> HaproxyConfigError {
    HaproxyConfigError::Write { path: path.display().to_string(), error }
}
