//! Follows the configuration file: at SIGHUP, and when it has changed.

use super::{
    AgentError,
    fleet::{Applied, Fleet},
    service,
    watched::Watched,
};
use crate::{
    config::{ConfigError, ConfigFile},
    metrics::ReloadMetrics,
    route::{ConfigState, Router},
};
use std::{error::Error, sync::Arc, time::SystemTime};
use tokio::signal::unix::Signal;

/// What follows the file.
#[derive(Debug)]
pub(super) struct Reloads {
    file: ConfigFile,
    watched: Watched,
    hangup: Signal,
    fleet: Fleet,
    router: Arc<Router>,
    metrics: ReloadMetrics,
}

/// Why another configuration is not used.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("{0}")]
    Unreadable(String),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Agent(#[from] AgentError),
}

/// What a reload has done.
struct Reloaded {
    /// `None`: the file says what is in force already.
    applied: Option<Applied>,
    /// Keys of which the file says something that only a restart brings.
    fixed: Vec<&'static str>,
}

impl Reloads {
    /// `text` is what the configuration in force was read from.
    pub(super) fn new(
        file: ConfigFile,
        text: String,
        hangup: Signal,
        fleet: Fleet,
        router: Arc<Router>,
    ) -> Self {
        let watched = Watched::of_text(file.path.clone(), text);
        let metrics = ReloadMetrics::register();
        metrics.in_force(SystemTime::now());
        Self { file, watched, hangup, fleet, router, metrics }
    }

    pub(super) async fn run(mut self) {
        loop {
            let text = tokio::select! {
                Some(()) = self.hangup.recv() => self.watched.read().await,
                text = self.watched.changed() => text,
            };
            service::reloading();
            let reloaded = self.reload(text).await;
            service::ready(&self.report(reloaded));
        }
    }

    async fn reload(&mut self, text: Result<String, String>) -> Result<Reloaded, Refused> {
        let path = self.file.path.display();
        let text = text.map_err(|why| Refused::Unreadable(format!("{path}: cannot be read: {why}")))?;
        let mut config = super::taken(self.file.parse(&text)?);
        let fixed = config.keep_fixed(self.fleet.config());
        // Prepared even if it says the same: files that it names, such as models and keys, may be others now.
        let plan = self.fleet.prepare(config).await?;
        let is_same = plan.config().says_the_same_as(self.fleet.config());
        let applied = self.fleet.apply(plan).await;
        let has_changed = !is_same || !applied.rendered.is_empty();
        Ok(Reloaded { applied: has_changed.then_some(applied), fixed })
    }

    /// Tells of it in the log, in metrics and in `/readyz`; returns the line for the service manager.
    fn report(&self, reloaded: Result<Reloaded, Refused>) -> String {
        let path = self.file.path.display().to_string();
        match reloaded {
            Ok(Reloaded { applied, fixed }) => {
                let counter = if applied.is_some() { &self.metrics.applied } else { &self.metrics.unchanged };
                counter.increment(1);
                self.metrics.in_force(SystemTime::now());
                if let Some(Applied { added, removed, changed, rendered, could_not_join }) = applied {
                    tracing::info!(
                        path,
                        ?added,
                        ?removed,
                        ?changed,
                        ?rendered,
                        could_not_join,
                        "configuration reloaded"
                    );
                } else {
                    tracing::info!(path, "configuration read again: it says the same");
                }
                if !fixed.is_empty() {
                    tracing::warn!(path, keys = ?fixed, "these changes take a restart; until then the old values hold");
                }
                self.router.set_config_state(ConfigState { refused: None, takes_restart: fixed });
                status(self.fleet.config().pools.len())
            }
            Err(refused) => {
                self.metrics.refused.increment(1);
                self.metrics.last_successful.set(0.0);
                let reason = with_causes(&refused);
                tracing::error!(reason, "the configuration is not used; the one before stays in force");
                let status = format!("serving by the configuration before: {reason}");
                let before = self.router.config_state();
                self.router.set_config_state(ConfigState { refused: Some(reason), ..before });
                status
            }
        }
    }
}

/// The line that the service manager shows.
pub(super) fn status(pools: usize) -> String {
    format!("serving {pools} pool(s)")
}

/// An error and its causes in one line, none of them twice.
fn with_causes(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line.replace('\n', " ")
}
