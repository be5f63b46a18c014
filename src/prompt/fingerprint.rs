//! Whether a model's files are still those that it was loaded from.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

/// The files that make a model, by name, length and time of change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fingerprint(Vec<(PathBuf, u64, Option<SystemTime>)>);

impl Fingerprint {
    /// Of the files in `dir` (`None`: the embedded model) and in its `additional_chat_templates`, and of a
    /// `template` elsewhere. What cannot be read is not among them, as if it were not there.
    #[must_use]
    pub fn of(dir: Option<&Path>, template: Option<&Path>) -> Self {
        let folders = dir.map(|dir| [dir.to_owned(), dir.join("additional_chat_templates")]);
        let entries =
            folders.iter().flatten().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let paths = entries.map(|entry| entry.path()).chain(template.map(Path::to_owned));
        // Through links: the hub's caches are full of them.
        let known = paths.filter_map(|path| {
            let about = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
            Some((path, about.len(), about.modified().ok()))
        });
        let mut files: Vec<_> = known.collect();
        files.sort();
        Self(files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_length_time_or_template_is_another_fingerprint() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("tokenizer.json");
        let of = |template: Option<&Path>| Fingerprint::of(Some(dir.path()), template);
        let mut seen = vec![of(None)];
        let mut see = |template| {
            let now = of(template);
            assert_eq!(now, of(template));
            assert!(!seen.contains(&now));
            seen.push(now);
        };
        std::fs::write(&file, "{}").expect("a file");
        see(None);
        std::fs::write(&file, "{ }").expect("a file");
        see(None);
        let opened = std::fs::File::options().append(true).open(&file).expect("a file");
        opened.set_modified(SystemTime::UNIX_EPOCH).expect("a time");
        see(None);
        let folder = dir.path().join("additional_chat_templates");
        std::fs::create_dir(&folder).expect("a folder");
        std::fs::write(folder.join("tool_use.jinja"), "").expect("a file");
        see(None);
        let template = tempfile::NamedTempFile::new().expect("a file");
        see(Some(template.path()));
    }
}
