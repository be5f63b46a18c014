//! HAProxy's files, as its `-f` names them.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    cfg::{CfgError, HaproxyCfg},
    spoe,
};

impl HaproxyCfg {
    /// Reads files and folders in the order of HAProxy's `-f` options, and the SPOE files that they name, with this
    /// process's environment for HAProxy's.
    ///
    /// # Errors
    /// What cannot be read, or the first line that HAProxy would refuse for its form.
    pub fn read(paths: &[PathBuf]) -> Result<Self, CfgError> {
        let env = |name: &str| std::env::var(name).ok();
        let files = files(paths)?;
        let mut cfg = Self::parse(files.iter().map(|(path, text)| (path.as_path(), text.as_str())), &env)?;
        for (from, name) in cfg.spoe_files() {
            // HAProxy looks from where it was started, which is not known here.
            let beside = from.parent().map(|folder| folder.join(&name)).filter(|path| path.exists());
            let path = beside.unwrap_or_else(|| PathBuf::from(&name));
            if let Ok(text) = text(&path) {
                let agents = spoe::agents(&path, &text, &env)?;
                cfg.spoe.insert(name, agents);
            }
        }
        Ok(cfg)
    }

    /// The SPOE files that filters name, and where.
    fn spoe_files(&self) -> Vec<(Arc<Path>, String)> {
        let lines = self.sections.iter().flat_map(|section| &section.lines);
        let filters = lines.filter(|line| line.begins(&["filter", "spoe"]));
        filters.filter_map(|line| Some((line.place.file.clone(), line.after("config")?.to_owned()))).collect()
    }
}

/// Reads them. Of a folder HAProxy loads the files that end in `.cfg` and are not hidden, in the order of their names.
///
/// # Errors
/// The first that cannot be read.
pub fn files(paths: &[PathBuf]) -> Result<Vec<(PathBuf, String)>, CfgError> {
    let mut all = Vec::new();
    for path in paths {
        if !path.is_dir() {
            all.push(path.clone());
            continue;
        }
        let mut entries = Vec::new();
        for entry in fs::read_dir(path).map_err(|error| unreadable(path, error))? {
            let entry = entry.map_err(|error| unreadable(path, error))?.path();
            let hidden = entry.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if !hidden && entry.extension().is_some_and(|ext| ext == "cfg") && entry.is_file() {
                entries.push(entry);
            }
        }
        entries.sort_unstable();
        all.extend(entries);
    }
    all.into_iter().map(|path| text(&path).map(|text| (path, text))).collect()
}

/// The longest file that is read, in bytes: some ten thousand backends have a tenth of it.
const MAX_BYTES: u64 = 64 << 20;

/// A file's text. Bytes that are not UTF-8, as old comments have, are replaced.
pub(super) fn text(path: &Path) -> Result<String, CfgError> {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    match read.map_err(|error| unreadable(path, error))? {
        length if length as u64 > MAX_BYTES => {
            Err(unreadable(path, io::Error::other(format!("longer than {MAX_BYTES} bytes"))))
        }
        _ => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

fn unreadable(path: &Path, error: std::io::Error) -> CfgError {
    CfgError::Read { path: path.display().to_string(), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_refused() {
        let refused = text(Path::new("/dev/zero")).expect_err("refused").to_string();
        assert_eq!(refused, "/dev/zero: longer than 67108864 bytes");
    }

    #[test]
    fn of_a_folder_the_cfg_files_count_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, text) in
            [("b.cfg", "backend b\n"), ("a.cfg", "backend a\n"), (".c.cfg", "x\n"), ("d.conf", "x\n")]
        {
            fs::write(dir.path().join(name), text).expect("written");
        }
        let first = dir.path().join("d.txt");
        fs::write(&first, b"backend first # caf\xe9\n").expect("written");
        let cfg = HaproxyCfg::read(&[first, dir.path().to_owned()]).expect("read");
        let names: Vec<&str> = cfg.sections.iter().map(|section| section.name.as_str()).collect();
        assert_eq!(names, ["first", "a", "b"]);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let error = HaproxyCfg::read(&["/nonexistent/haproxy.cfg".into()]).expect_err("nothing there");
        assert!(error.to_string().starts_with("/nonexistent/haproxy.cfg: "), "{error}");
    }
}
