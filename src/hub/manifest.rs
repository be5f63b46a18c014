//! The list of a fetched model's files and their checksums, which lies beside them.

use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// What a model's folder was filled with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The model's name in the hub.
    pub model: String,
    /// The commit that it was taken from.
    pub commit: String,
    /// SHA-256 of each file.
    sha256: BTreeMap<String, String>,
}

/// Why a model's folder is not what it was filled with.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// A file is absent or cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The list itself is not one.
    #[error("{}: {source}", path.display())]
    List {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A file has changed since it was fetched.
    #[error("{}: not the file that was fetched; remove its folder and fetch the model again", .0.display())]
    Changed(PathBuf),
}

impl Manifest {
    /// The file's name in the model's folder.
    pub const FILE: &str = "kvspoa-model.json";

    pub(super) fn new(model: &str, commit: &str) -> Self {
        Self { model: model.to_owned(), commit: commit.to_owned(), sha256: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, file: &str, bytes: &[u8]) {
        self.sha256.insert(file.to_owned(), sha256(bytes));
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The list of a folder.
    ///
    /// # Errors
    /// [`ManifestError::Read`] also where the folder was not filled by us, [`ManifestError::List`].
    pub fn load(dir: &Path) -> Result<Self, ManifestError> {
        let path = dir.join(Self::FILE);
        let bytes = read(&path)?;
        serde_json::from_slice(&bytes).map_err(|source| ManifestError::List { path, source })
    }

    /// Compares every file with its checksum.
    ///
    /// # Errors
    /// [`ManifestError::Read`], [`ManifestError::Changed`].
    pub fn verify(&self, dir: &Path) -> Result<(), ManifestError> {
        for (file, expected) in &self.sha256 {
            let path = dir.join(file);
            if sha256(&read(&path)?) != *expected {
                return Err(ManifestError::Changed(path));
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ManifestError> {
    std::fs::read(path).map_err(|source| ManifestError::Read { path: path.to_owned(), source })
}

/// In lower-case hexadecimal digits.
pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
