//! Follows a file.
//!
//! It is looked at every second rather than watched by the kernel: what replaces files (Kubernetes by symbolic links,
//! editors by renaming, network file systems without a notice) does so in many ways, and each of them is seen by looking.

use crate::config::read_bounded;
use std::{
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::sleep;

/// How often it is looked at. A file that has changed is read once it has stayed as it is for as long, so that one that is
/// being written is not read in half.
const PERIOD: Duration = Duration::from_secs(1);

/// A file and what was last read of it.
#[derive(Debug)]
pub(super) struct Watched {
    path: PathBuf,
    period: Duration,
    looks: Looks,
    /// What was read, or why it could not be.
    told: Option<Result<String, String>>,
}

/// When the file is to be read.
#[derive(Debug, Default)]
struct Looks {
    /// As it was when it was read.
    read: Option<Stamp>,
    /// As it is since then, if it is another; seen once.
    other: Option<Stamp>,
}

/// By which a file is another, or another version: an error is one too.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Stamp {
    Is { device: u64, inode: u64, bytes: u64, modified: (i64, i64), changed: (i64, i64) },
    Fails(io::ErrorKind),
}

impl Watched {
    /// A file of which nothing was read yet.
    pub(super) const fn new(path: PathBuf) -> Self {
        Self { path, period: PERIOD, looks: Looks { read: None, other: None }, told: None }
    }

    /// A file of which this text is known already.
    pub(super) fn of_text(path: PathBuf, text: String) -> Self {
        Self { told: Some(Ok(text)), ..Self::new(path) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads it now.
    pub(super) async fn read(&mut self) -> Result<String, String> {
        let path = self.path.clone();
        // On a thread where a file system that hangs holds up nothing else.
        let read = move || (stamp(&path), read_bounded(&path).map_err(|error| error.to_string()));
        let (stamp, text) = match tokio::task::spawn_blocking(read).await {
            Ok((stamp, text)) => (Some(stamp), text),
            Err(error) => (None, Err(error.to_string())),
        };
        self.looks = Looks { read: stamp, other: None };
        self.told = Some(text.clone());
        text
    }

    /// Waits until it says something else than was last read of it. The first time, of a file of which nothing was read,
    /// it is read at once. A file that can't be read is news as well.
    pub(super) async fn changed(&mut self) -> Result<String, String> {
        if self.told.is_none() {
            return self.read().await;
        }
        loop {
            sleep(self.period).await;
            let path = self.path.clone();
            let Ok(now) = tokio::task::spawn_blocking(move || stamp(&path)).await else { continue };
            if !self.looks.see(now) {
                continue;
            }
            let told = self.told.clone();
            let text = self.read().await;
            if told.as_ref() != Some(&text) {
                return text;
            }
        }
    }
}

impl Looks {
    /// Whether the file is another than the one that was read, and rests.
    fn see(&mut self, now: Stamp) -> bool {
        if self.read.as_ref() == Some(&now) {
            self.other = None;
            return false;
        }
        self.other.replace(now.clone()) == Some(now)
    }
}

fn stamp(path: &Path) -> Stamp {
    let of = |file: &Metadata| Stamp::Is {
        device: file.dev(),
        inode: file.ino(),
        bytes: file.len(),
        modified: (file.mtime(), file.mtime_nsec()),
        changed: (file.ctime(), file.ctime_nsec()),
    };
    // Of the file that a symbolic link leads to.
    std::fs::metadata(path).as_ref().map_or_else(|error| Stamp::Fails(error.kind()), of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    const PERIOD: Duration = Duration::from_millis(5);

    /// Ends the test where nothing is told.
    async fn next(watched: &mut Watched) -> Result<String, String> {
        tokio::time::timeout(Duration::from_secs(60), watched.changed()).await.expect("news")
    }

    async fn is_quiet(watched: &mut Watched) -> bool {
        tokio::time::timeout(20 * PERIOD, watched.changed()).await.is_err()
    }

    #[tokio::test]
    async fn each_way_to_replace_a_file_is_seen_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let path = at("link");
        fs::write(at("one"), "1").expect("written");
        symlink(at("one"), &path).expect("linked");
        let mut watched = Watched { period: PERIOD, ..Watched::new(path.clone()) };
        assert_eq!(next(&mut watched).await.as_deref(), Ok("1"), "at once");
        assert!(is_quiet(&mut watched).await);

        fs::write(at("one"), "2").expect("written in place, as long as before");
        assert_eq!(next(&mut watched).await.as_deref(), Ok("2"));
        fs::write(at("two"), "3").expect("written");
        fs::rename(at("two"), at("one")).expect("replaced by renaming");
        assert_eq!(next(&mut watched).await.as_deref(), Ok("3"));
        fs::write(at("three"), "4").expect("written");
        symlink(at("three"), at("new")).expect("linked");
        fs::rename(at("new"), &path).expect("the link leads elsewhere");
        assert_eq!(next(&mut watched).await.as_deref(), Ok("4"));
        fs::remove_file(&path).expect("removed");
        assert!(next(&mut watched).await.is_err());
        assert!(is_quiet(&mut watched).await, "told once");
        symlink(at("three"), &path).expect("back");
        assert_eq!(next(&mut watched).await.as_deref(), Ok("4"));
        fs::write(at("three"), "4").expect("written again, the same");
        assert!(is_quiet(&mut watched).await);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_read_until_it_rests() {
        let version = |bytes| Stamp::Is { device: 1, inode: 1, bytes, modified: (0, 0), changed: (0, 0) };
        let mut looks = Looks { read: Some(version(1)), other: None };
        let seen = [1, 2, 3, 3].map(|bytes| looks.see(version(bytes)));
        assert_eq!(seen, [false, false, false, true]);
        let seen = [2, 1, 2, 1].map(|bytes| looks.see(version(bytes)));
        assert_eq!(seen, [false; 4], "it is as it was read again and again");
    }
}
