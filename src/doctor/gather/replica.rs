//! One replica's HTTP interface.

use super::{Means, pool::sources_of};
use crate::{
    agent::parity::{self, Verdict},
    config::{HttpAddr, Replica},
    doctor::{
        facts::{Page, Pages, Silence},
        samples::Samples,
    },
    replica::{Sources, parse_models, parse_sources},
};
use std::time::Duration;
use tokio::time::timeout;

/// The front end may be busy; one that needs longer is as good as down.
const PATIENCE: Duration = Duration::from_secs(5);

/// vLLM's page of metrics is some ten KiB a model and rank.
const MAX_PAGE_BYTES: usize = 4 << 20;

pub(super) async fn pages(means: &Means, http: &HttpAddr) -> (Pages, Sources) {
    let (models, sources, metrics) = tokio::join!(
        page(means, http, "/v1/models"),
        page(means, http, "/kv_event_sources"),
        page(means, http, "/metrics")
    );
    let text = metrics.map(|page| String::from_utf8_lossy(&page).into_owned());
    let pages = Pages {
        models: models.map(|page| parse_models(&page)),
        sources: sources.map(|page| parse_sources(&page)),
        metrics: text.clone().map(|page| Samples::parse(&page)),
    };
    let sources = sources_of(&pages, text.ok().as_deref());
    (pages, sources)
}

async fn page(means: &Means, http: &HttpAddr, target: &str) -> Page<bytes::Bytes> {
    match timeout(PATIENCE, means.access.get(http, target, MAX_PAGE_BYTES)).await {
        Err(_) => Err(Silence::NoAnswer("no answer in time".to_owned())),
        Ok(Err(error)) => Err(Silence::NoAnswer(error.to_string())),
        Ok(Ok(answer)) => match answer.status {
            200 => Ok(answer.body),
            status @ (401 | 403) => Err(Silence::Refused(status)),
            status => Err(Silence::Status(status)),
        },
    }
}

/// Every probe's verdict; ends with the first to which there is no answer.
pub(super) async fn parity(means: &Means, replica: &Replica) -> Vec<(&'static str, Verdict)> {
    let model = means.model(replica.revision.as_ref());
    let (Some(http), Some(model)) = (&replica.http, model) else { return Vec::new() };
    let mut verdicts = Vec::new();
    for probe in parity::probes() {
        let verdict = parity::ask(&means.access, http, model, &probe).await;
        let is_silent = matches!(verdict, Verdict::NoAnswer(_));
        verdicts.push((probe.name, verdict));
        if is_silent {
            break;
        }
    }
    verdicts
}
