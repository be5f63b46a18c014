//! The command line.

mod check;
mod explain;
mod operate;
mod out;
mod report;

use crate::{
    agent,
    config::{ConfigError, ConfigFile, Loaded, Overrides},
    demo, doctor, haproxy_config, hub, replay, sim,
};
use anyhow::Context;
use clap::{Args, Parser, Subcommand, error::ErrorKind};
use std::{io::IsTerminal, path::PathBuf, process::ExitCode};
use tracing_subscriber::{EnvFilter, filter::filter_fn, layer::SubscriberExt};

/// Wrong usage or configuration (`sysexits.h` EX_USAGE).
const EXIT_USAGE: u8 = 64;
/// A fault that is ours or the machine's (`sysexits.h` EX_SOFTWARE).
const EXIT_SOFTWARE: u8 = 70;

/// A KV-cache-aware routing agent for HAProxy.
#[derive(Parser, Debug)]
#[command(version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What is logged to standard error: error, warn, info, debug, or per module as in `kvspoa::events=debug`
    /// [default: info; of `demo`: warn; of `doctor` and `bundle`: error]
    #[arg(long, global = true, env = "KVSPOA_LOG", value_name = "FILTER", display_order = 900)]
    log: Option<String>,
    /// Log as JSON, a line an event
    #[arg(long, global = true, env = "KVSPOA_LOG_JSON", display_order = 901)]
    log_json: bool,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the agent
    ///
    /// SIGHUP reads the configuration file again; it is also read when it has changed. What is wrong changes nothing.
    /// SIGTERM and SIGINT finish the decisions in flight and end; a second one ends at once. Under systemd, readiness,
    /// reloads and a watchdog are told by NOTIFY_SOCKET.
    Run(ConfigArgs),
    /// Check a configuration file and print what holds: each key, its value, and where that came from.
    /// Prints one line and exits with 64 on a mistake
    Check(check::CheckArgs),
    /// Prove the chain on the live system, one line each with what to do
    ///
    /// Exit status: 0 if nothing is broken, else by the first broken link: 64 the configuration, 10 the agent, 11 HAProxy,
    /// 12 the replicas, 13 their KV events, 14 the tokens, 15 the requests and their ends.
    Doctor(DoctorCommand),
    /// Collect what a report of a fault needs into one file: configuration, the agent's and HAProxy's state, and what the
    /// doctor finds. It has no prompts and no secrets; addresses and names are in it
    Bundle(BundleCommand),
    /// Ask a running agent where a request would go, and why
    Explain(explain::ExplainArgs),
    /// Print what to add to HAProxy's configuration, or put it into a copy of yours
    HaproxyConfig(haproxy_config::HaproxyConfigArgs),
    /// List a running agent's pools, or switch one: on, shadow, off, share=0.25
    Pool(operate::PoolArgs),
    /// List a running agent's replicas, or tell it what to do about one: resync, ignore, use
    Replica(operate::ReplicaArgs),
    /// Compare what HAProxy did of late with what kvspoa and plain hashing would have done: is it worth switching on?
    ShadowReport(report::ReportArgs),
    /// Run a simulated replica: OpenAI API, prefix cache and KV events, without a GPU
    Simulate(sim::ReplicaArgs),
    /// Show it all on this machine: HAProxy, three simulated replicas, one chat load with and without kvspoa
    Demo(demo::DemoArgs),
    /// Bring a model's tokenizer and chat template from a model hub
    #[command(subcommand)]
    Model(ModelCommand),
    /// Play a workload through modelled replicas in virtual time, and compare policies
    Replay(replay::ReplayArgs),
}

#[derive(Subcommand, Debug)]
enum ModelCommand {
    /// Fetch one into the cache folder, or check what is there; prints its folder
    Fetch(hub::FetchArgs),
}

#[derive(Args, Debug)]
struct ConfigArgs {
    /// The configuration file
    #[arg(
        long,
        short,
        env = "KVSPOA_CONFIG",
        default_value = "/etc/kvspoa/kvspoa.toml",
        value_name = "FILE"
    )]
    config: PathBuf,
    #[command(flatten)]
    overrides: Overrides,
}

#[derive(Args, Debug)]
struct DoctorCommand {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    doctor: doctor::DoctorArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct BundleCommand {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    doctor: doctor::DoctorArgs,
    /// Where to write it; - is standard output
    #[arg(long, value_name = "FILE", default_value = "kvspoa-bundle.json")]
    out: PathBuf,
}

impl ConfigArgs {
    fn file(&self) -> Result<ConfigFile, ConfigError> {
        let overrides = self.overrides.clone().with_environment(std::env::vars_os())?;
        Ok(ConfigFile { path: self.config.clone(), overrides })
    }

    fn load(&self) -> Result<Loaded, ConfigError> {
        self.file()?.load()
    }
}

/// Runs the command that the process was started with.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe must not turn `--help` into a failure.
            let _ = error.print();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
                _ => ExitCode::from(EXIT_USAGE),
            };
        }
    };
    let log = cli.log.as_deref().unwrap_or(match cli.command {
        Command::Demo(_) => "warn",
        Command::Doctor(_) | Command::Bundle(_) => "error",
        _ => "info",
    });
    if let Err(error) = init_log(log, cli.log_json) {
        eprintln!("kvspoa: --log: {error}");
        return ExitCode::from(EXIT_USAGE);
    }
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kvspoa: {}", one_line(&error));
            let usage = error.chain().any(|e| {
                e.is::<ConfigError>()
                    || e.is::<crate::client::AccessError>()
                    || e.is::<crate::prompt::ModelError>()
                    || e.is::<replay::ReplayError>()
                    || e.downcast_ref::<operate::AskError>().is_some_and(|e| e.is_usage())
                    || e.downcast_ref::<haproxy_config::HaproxyConfigError>().is_some_and(|e| e.is_usage())
            });
            ExitCode::from(if usage { EXIT_USAGE } else { EXIT_SOFTWARE })
        }
    }
}

/// An error and its causes in one line. A cause whose text is in the error's own already is not said twice.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string().replace('\n', " ");
        if !line.contains(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    line
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = match command {
        Command::Doctor(args) => return examine(&args),
        Command::Bundle(args) => bundle(&args),
        Command::Run(args) => agent::run(args.file()?).map_err(anyhow::Error::from),
        Command::Check(args) => check::run(&args),
        Command::Explain(args) => block_on(explain::run(args))?,
        Command::Model(ModelCommand::Fetch(args)) => {
            let dir = block_on(hub::fetch(&args, |file| eprintln!("fetching {file}")))??;
            out::print_line(dir.display())
        }
        Command::HaproxyConfig(args) => {
            out::print(haproxy_config::run(&args, &mut |finding| eprintln!("{finding}"))?)
        }
        Command::Pool(args) => block_on(operate::pool(args))?,
        Command::Replica(args) => block_on(operate::replica(args))?,
        Command::ShadowReport(args) => block_on(report::run(args))?,
        Command::Simulate(args) => block_on(sim::run_until_signal(args))?.map_err(anyhow::Error::from),
        Command::Demo(args) => block_on(demo::run(args))?,
        Command::Replay(args) => out::print(replay::run(&args)?),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn bundle(args: &BundleCommand) -> anyhow::Result<()> {
    let bundle = block_on(doctor::bundle(args.config.load(), &args.doctor))?;
    let text = format!("{bundle:#}\n");
    if args.out.as_os_str() == "-" {
        return out::print(text);
    }
    write_private(&args.out, &text).with_context(|| args.out.display().to_string())?;
    out::print_line(args.out.display())
}

/// For nobody else on this machine: names and addresses are in it.
fn write_private(path: &std::path::Path, text: &str) -> std::io::Result<()> {
    use std::{
        fs::Permissions,
        io::Write,
        os::unix::fs::{OpenOptionsExt, PermissionsExt},
    };
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // One that was there may have been for all; a device stays as it is.
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    file.write_all(text.as_bytes())
}

fn examine(args: &DoctorCommand) -> anyhow::Result<ExitCode> {
    let config = args.config.load().map(|loaded| loaded.config);
    let report = block_on(doctor::examine(config, &args.doctor))?;
    if args.json {
        out::print_line(format_args!("{:#}", report.json()))?;
    } else {
        out::print(&report)?;
    }
    Ok(ExitCode::from(report.exit_code()))
}

fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(agent::network_threads())
        .build()
        .context("the runtime could not be started")?;
    Ok(runtime.block_on(future))
}

/// Logs what our own modules say and nothing else: at level trace the tokenizer's library names every character of a
/// prompt. It says so by the `log` crate, which is left without a logger.
fn init_log(filter: &str, json: bool) -> anyhow::Result<()> {
    let ours = filter_fn(|metadata| metadata.target().starts_with(env!("CARGO_PKG_NAME")));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let log = tracing_subscriber::registry().with(EnvFilter::try_new(filter)?).with(ours);
    if json {
        tracing::subscriber::set_global_default(log.with(lines.json()))?;
    } else {
        tracing::subscriber::set_global_default(log.with(lines))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::knobs;

    /// Each variable that a command reads is in the table of knobs, but for those of Hugging Face.
    #[test]
    fn every_variable_of_the_command_line_is_in_the_table() {
        fn variables(command: &clap::Command, found: &mut Vec<String>) {
            let of_args = command.get_arguments().filter_map(clap::Arg::get_env);
            found.extend(of_args.map(|name| name.to_string_lossy().into_owned()));
            command.get_subcommands().for_each(|command| variables(command, found));
        }
        let mut found = Vec::new();
        variables(&<Cli as clap::CommandFactory>::command(), &mut found);
        assert!(found.len() > 5, "{found:?}");
        for name in found {
            let is_ours =
                knobs::keys().chain(knobs::process()).any(|knob| knob.variable() == Some(name.clone()));
            let is_foreign = knobs::FOREIGN.iter().any(|foreign| foreign.name == name);
            assert!(
                is_ours || is_foreign || name.starts_with("HF_"),
                "{name} has no row in src/config/knobs"
            );
        }
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let cause = std::io::Error::other("refused");
        let error = anyhow::Error::new(cause).context("cannot connect: refused").context("explain\nfailed");
        assert_eq!(one_line(&error), "explain failed: cannot connect: refused");
    }
}
