//! Follows a JSON file that lists a pool's replicas.
//!
//! It is read every second rather than watched: what replaces files (Kubernetes by symbolic links, editors by renaming)
//! does so in many ways, and each of them is seen by reading.

use super::members::Members;
use crate::config::{Replica, parse_replica_file};
use std::{
    io::{self, Read},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::time::interval;

const PERIOD: Duration = Duration::from_secs(1);

/// Some thousand replicas at most.
const MAX_BYTES: u64 = 4 << 20;

/// Reads the file again and again. While it is absent or wrong, the replicas stay those of the last good one.
pub(super) async fn follow(members: Arc<Members>, path: PathBuf) {
    let mut ticks = interval(PERIOD);
    let mut before = None;
    loop {
        ticks.tick().await;
        // A file that cannot be read is news as well, and told once.
        let text = read(path.clone()).await.map_err(|error| error.to_string());
        if before.as_ref() == Some(&text) {
            continue;
        }
        match text.as_deref().map_err(String::clone).and_then(parse_replica_file) {
            Ok(replicas) => take(&members, replicas),
            Err(reason) => {
                let path = path.display();
                tracing::warn!(pool = members.pool().backend, %path, reason, "replicas_file: not read; the replicas stay as they were");
            }
        }
        before = Some(text);
    }
}

fn take(members: &Arc<Members>, replicas: Vec<Replica>) {
    tracing::info!(pool = members.pool().backend, replicas = replicas.len(), "replicas_file: read");
    members.take_list(replicas);
}

/// On a thread where a file system that hangs holds up nothing else.
async fn read(path: PathBuf) -> io::Result<String> {
    let read = move || {
        let mut text = String::new();
        std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(io::Error::other("longer than 4 MiB"));
        }
        Ok(text)
    };
    tokio::task::spawn_blocking(read).await?
}
