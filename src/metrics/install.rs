//! The process's recorder.

use super::route::{DECISION_SECONDS, SECONDS, STAGE_SECONDS};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

/// Why the recorder could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// Its buckets are wrong.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// There is one already.
    #[error("the process records metrics elsewhere already")]
    Taken(#[from] metrics::SetRecorderError<PrometheusRecorder>),
}

/// Makes the process record its metrics for Prometheus. To be called before any metric is registered.
///
/// # Errors
/// [`InstallError`].
pub fn install() -> Result<PrometheusHandle, InstallError> {
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full(DECISION_SECONDS.to_owned()), SECONDS)?
        .set_buckets_for_metric(Matcher::Full(STAGE_SECONDS.to_owned()), SECONDS)?
        .build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder)?;
    metrics::gauge!("kvspoa_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(handle)
}
