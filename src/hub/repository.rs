//! A model's repository in a hub: its names, its commits, and which of its files are wanted.

use super::{
    HubError,
    manifest::{hex, sha256},
};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};
use serde::Deserialize;
use std::{path::Path, str::FromStr};

/// A model's name, `NAME` or `OWNER/NAME`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Name(String);

/// A branch, tag or commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Revision(String);

/// A commit by its 40 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Commit(pub(super) String);

fn is_plain(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !part.is_empty() && part.chars().all(plain) && part.chars().any(|c| c != '.')
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        if parts.len() <= 2 && parts.iter().all(|part| is_plain(part)) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!("`{text}` is no model of a hub: as in Qwen/Qwen3-8B"))
    }
}

impl Name {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The folder of the cache, which no other name has: `--` is in no owner's name.
    pub(super) fn folder(&self) -> String {
        self.0.replace('/', "--")
    }
}

impl FromStr for Revision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.split('/').all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!("`{text}` is no branch, tag or commit"))
    }
}

impl Revision {
    /// As one segment of a path.
    pub(super) fn escaped(&self) -> String {
        self.0.replace('/', "%2F")
    }

    /// The commit, if it names one.
    pub(super) fn commit(&self) -> Option<Commit> {
        Commit::parse(&self.0)
    }
}

impl Commit {
    fn parse(text: &str) -> Option<Self> {
        let is_commit = text.len() == 40 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
        is_commit.then(|| Self(text.to_owned()))
    }
}

/// A repository at one commit (`GET /api/models/NAME/revision/REVISION?blobs=true`).
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: Commit,
    files: Vec<File>,
}

/// A file of it.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub(super) name: String,
    checksum: Checksum,
}

#[derive(Clone, Debug)]
enum Checksum {
    /// Of a large file.
    Sha256(String),
    /// Of git's object.
    GitBlob(String),
}

/// What prompts are made by. The first must be there.
const WANTED: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
    // Of which kind the model is.
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
];

impl Listing {
    pub(super) fn parse(answer: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Answer {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Sibling {
            rfilename: String,
            blob_id: Option<String>,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            sha256: String,
        }
        let answer: Answer = serde_json::from_slice(answer).map_err(|error| error.to_string())?;
        let commit = Commit::parse(&answer.sha).ok_or("its commit is none")?;
        let file = |file: Sibling| {
            let checksum = match (file.lfs, file.blob_id) {
                (Some(lfs), _) => Checksum::Sha256(lfs.sha256),
                (None, Some(blob)) => Checksum::GitBlob(blob),
                (None, None) => return None,
            };
            Some(File { name: file.rfilename, checksum })
        };
        Ok(Self { commit, files: answer.siblings.into_iter().filter_map(file).collect() })
    }

    /// The files that are wanted, of those that are there.
    pub(super) fn wanted(&self) -> Result<Vec<&File>, HubError> {
        let [required, ..] = WANTED;
        if !self.files.iter().any(|file| file.name == required) {
            return Err(HubError::NoTokenizer);
        }
        let is_wanted = |file: &&File| {
            // What Mistral's models are known by.
            WANTED.contains(&file.name.as_str())
                || file.name.starts_with("tokenizer.model.v") && is_plain(&file.name)
        };
        Ok(self.files.iter().filter(is_wanted).collect())
    }
}

impl File {
    pub(super) fn matches(&self, bytes: &[u8]) -> bool {
        match &self.checksum {
            Checksum::Sha256(expected) => sha256(bytes) == *expected,
            Checksum::GitBlob(expected) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", bytes.len()).as_bytes());
                context.update(bytes);
                hex(context.finish().as_ref()) == *expected
            }
        }
    }
}

/// The commit of a branch or tag when it was fetched last.
pub(super) fn read_reference(of_model: &Path, revision: &Revision) -> Result<Commit, HubError> {
    let path = of_model.join("refs").join(revision.escaped());
    let text =
        std::fs::read_to_string(&path).map_err(|source| HubError::Folder { path: path.clone(), source })?;
    Commit::parse(text.trim()).ok_or(HubError::Reference(path))
}

pub(super) fn write_reference(of_model: &Path, revision: &Revision, commit: &Commit) -> Result<(), HubError> {
    let dir = of_model.join("refs");
    let path = dir.join(revision.escaped());
    std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::write(&path, &commit.0))
        .map_err(|source| HubError::Folder { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_lead_out_of_the_cache() {
        for name in ["Qwen/Qwen3-8B", "gpt2", "a.b/c_d-1.5"] {
            assert!(name.parse::<Name>().is_ok(), "{name}");
        }
        for name in ["", "/", "a/", "../a", "a/..", "a/b/c", "a b", "a\\b", "a%2F"] {
            assert!(name.parse::<Name>().is_err(), "{name}");
        }
        for revision in ["", "..", "../x", "a//b", "a b", "refs/../x"] {
            assert!(revision.parse::<Revision>().is_err(), "{revision}");
        }
        let request: Revision = "refs/pr/1".parse().expect("a revision");
        assert_eq!((request.escaped().as_str(), request.commit()), ("refs%2Fpr%2F1", None));
    }

    #[test]
    fn only_what_prompts_are_made_by_is_wanted() {
        let siblings =
            ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model.v3"];
        let sibling = |name: &&str| format!(r#"{{"rfilename":"{name}","blobId":"{}"}}"#, "0".repeat(40));
        let page = |names: &[&str]| {
            let siblings: Vec<String> = names.iter().map(sibling).collect();
            format!(r#"{{"sha":"{}","siblings":[{}]}}"#, "a".repeat(40), siblings.join(","))
        };
        let listing = Listing::parse(page(&siblings).as_bytes()).expect("a listing");
        let wanted: Vec<&str> =
            listing.wanted().expect("whole").iter().map(|file| file.name.as_str()).collect();
        assert_eq!(wanted, ["config.json", "tokenizer.json", "tokenizer.model.v3"]);
        let without = Listing::parse(page(&siblings[..3]).as_bytes()).expect("a listing");
        assert!(matches!(without.wanted(), Err(HubError::NoTokenizer)));
        assert!(Listing::parse(br#"{"sha":"../x","siblings":[]}"#).is_err());
    }

    #[test]
    fn a_file_is_known_by_gits_checksum_or_that_of_a_large_file() {
        // `printf 'hello\n' | git hash-object --stdin`, `… | sha256sum`
        for checksum in [
            Checksum::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned()),
            Checksum::Sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".to_owned()),
        ] {
            let file = File { name: "f".to_owned(), checksum };
            assert!(file.matches(b"hello\n"), "{file:?}");
            assert!(!file.matches(b"hello"), "{file:?}");
        }
    }
}
