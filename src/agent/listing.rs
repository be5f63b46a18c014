//! Follows a JSON file that lists a pool's replicas.

use super::{members::Members, watched::Watched};
use crate::config::parse_replica_file;
use std::{path::PathBuf, sync::Arc};

/// Reads the file whenever it has changed. While it is absent or wrong, the replicas stay those of the last good one.
pub(super) async fn follow(members: Arc<Members>, path: PathBuf) {
    let mut file = Watched::new(path);
    loop {
        let pool = &members.pool().backend;
        match file.changed().await.and_then(|text| parse_replica_file(&text)) {
            Ok(replicas) => {
                tracing::info!(pool, replicas = replicas.len(), "replicas_file: read");
                members.take_list(replicas);
            }
            Err(reason) => {
                let path = file.path().display();
                tracing::warn!(pool, %path, reason, "replicas_file: not read; the replicas stay as they were");
            }
        }
    }
}
