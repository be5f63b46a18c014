//! A configuration that changes under a running agent: where it is read from, and what can't change.

use super::{Config, ConfigError, Loaded, Overrides, Place};
use std::path::{Path, PathBuf};

/// The longest file that is read, in bytes, a list of replicas likewise: thousands of them are some hundred KiB.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Where the configuration comes from, each time that it is read.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    /// The file.
    pub path: PathBuf,
    /// What environment and flags lay over it, as they were when the process began.
    pub overrides: Overrides,
}

impl ConfigFile {
    /// Reads the file's text.
    ///
    /// # Errors
    /// [`ConfigError::Read`].
    pub fn read(&self) -> Result<String, ConfigError> {
        read_bounded(&self.path).map_err(|source| ConfigError::Read { path: self.path.clone(), source })
    }

    /// The configuration of such a text.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn parse(&self, text: &str) -> Result<Loaded, ConfigError> {
        Loaded::parse(text, &self.path, &self.overrides)
    }

    /// Reads the file and takes its configuration.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load(&self) -> Result<Loaded, ConfigError> {
        self.parse(&self.read()?)
    }
}

/// Reads a text file of at most 4 MiB.
///
/// # Errors
/// The operating system's, or that it is too long or no text.
pub fn read_bounded(path: &Path) -> std::io::Result<String> {
    use std::io::{Error, Read};
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::other("longer than 4 MiB"));
    }
    Ok(text)
}

/// Keeps one value of the running configuration; whether the new one was another.
type Keep = fn(&mut Config, &Config) -> bool;

fn keep<T: Clone + PartialEq>(new: &mut T, running: &T) -> bool {
    let differs = new != running;
    new.clone_from(running);
    differs
}

/// What is bound or begun once, by key: the rows of the table of knobs which take a restart.
const FIXED: &[(&str, Keep)] = &[
    ("spop.listen", |new, running| keep(&mut new.spop.listen, &running.spop.listen)),
    ("admin.listen", |new, running| keep(&mut new.admin_listen, &running.admin_listen)),
    ("log.listen", |new, running| keep(&mut new.log_listen, &running.log_listen)),
    ("haproxy.session_header", |new, running| {
        keep(&mut new.haproxy.session_header, &running.haproxy.session_header)
    }),
    ("prompt.threads", |new, running| keep(&mut new.prompt.threads, &running.prompt.threads)),
    ("peers.listen", |new, running| keep(&mut new.peers.listen, &running.peers.listen)),
    ("peers.connect", |new, running| keep(&mut new.peers.connect, &running.peers.connect)),
    ("peers.secret_file", |new, running| keep(&mut new.peers.secret_file, &running.peers.secret_file)),
    ("record.max_bytes", |new, running| keep(&mut new.record.max_bytes, &running.record.max_bytes)),
    ("record.file", |new, running| keep(&mut new.record.file, &running.record.file)),
    ("record.file_max_bytes", |new, running| {
        keep(&mut new.record.file_max_bytes, &running.record.file_max_bytes)
    }),
    ("select.seed", |new, running| keep(&mut new.select.seed, &running.select.seed)),
];

impl Config {
    /// Keeps of the `running` configuration what a running agent can't change. Returns the keys of which this one says
    /// something else, which a restart would bring.
    pub fn keep_fixed(&mut self, running: &Self) -> Vec<&'static str> {
        let mut differs = |(key, keep): &(&'static str, Keep)| keep(self, running).then_some(*key);
        FIXED.iter().filter_map(|fixed| differs(fixed)).collect()
    }

    /// Whether both say the same, wherever it stands in their files.
    #[must_use]
    pub fn says_the_same_as(&self, other: &Self) -> bool {
        let without_places = |config: &Self| {
            let mut config = config.clone();
            config.pools.iter_mut().for_each(|pool| pool.place = Place::default());
            config
        };
        without_places(self) == without_places(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::knobs;

    fn parse(text: &str) -> Config {
        let pool = "\n[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\n";
        Config::parse(&format!("{text}{pool}"), Path::new("k.toml"), &Overrides::default()).expect("valid")
    }

    #[test]
    fn what_is_bound_or_begun_once_stays_and_is_named() {
        let running = parse("");
        for (line, key) in [
            ("spop.listen = \"127.0.0.1:1\"", Some("spop.listen")),
            ("admin.listen = \"127.0.0.1:1\"", Some("admin.listen")),
            ("log.listen = \"127.0.0.1:1\"", Some("log.listen")),
            ("haproxy.session_header = \"x-chat\"", Some("haproxy.session_header")),
            ("prompt.threads = 1000", Some("prompt.threads")),
            ("select.seed = 7", Some("select.seed")),
            ("peers.secret_file = \"k\"", Some("peers.secret_file")),
            ("record.max_bytes = 0", Some("record.max_bytes")),
            ("record.file = \"decisions.jsonl\"", Some("record.file")),
            ("record.file_max_bytes = \"1MiB\"", Some("record.file_max_bytes")),
            ("spop.deadline = \"100ms\"", None),
            ("prompt.queue = 3", None),
            ("index.max_bytes = \"2MiB\"", None),
            ("select.policy = \"round_robin\"", None),
            ("haproxy.poll = \"2s\"", None),
        ] {
            let mut new = parse(line);
            assert!(!new.says_the_same_as(&running), "{line}");
            assert_eq!(new.keep_fixed(&running), key.into_iter().collect::<Vec<_>>(), "{line}");
            assert_eq!(new.says_the_same_as(&running), key.is_some(), "{line}");
        }
    }

    #[test]
    fn the_table_of_knobs_says_which_they_are() {
        let of_table = knobs::keys().filter(|knob| knob.takes_restart).map(|knob| knob.key);
        let fixed: Vec<&str> = FIXED.iter().map(|(key, _)| *key).collect();
        assert_eq!(fixed, of_table.collect::<Vec<_>>());
    }

    #[test]
    fn where_something_stands_in_the_file_is_no_difference() {
        assert!(parse("# a remark\n\n").says_the_same_as(&parse("")));
    }
}
