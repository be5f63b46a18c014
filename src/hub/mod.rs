//! `kvspoa model fetch`: brings a model's tokenizer and chat template from a model hub, at a pinned revision.
//!
//! The hub is Hugging Face's or one that speaks its API. A model lies in the cache folder under its name and the commit
//! that it was taken from, with a list of its files' checksums beside them.

mod download;
mod manifest;
mod repository;

pub use download::HubError;
pub use manifest::{Manifest, ManifestError};

use clap::{Args, builder::FalseyValueParser};
use download::Hub;
use repository::{Commit, Listing, Name, Revision};
use std::path::{Path, PathBuf};

/// Bring a model's tokenizer and chat template from a model hub.
#[derive(Args, Clone, Debug)]
pub struct FetchArgs {
    /// The model's name in the hub, as in Qwen/Qwen3-8B
    name: Name,
    /// A branch, a tag, or a commit by its 40 hexadecimal digits
    #[arg(long, default_value = "main")]
    revision: Revision,
    /// The hub's address
    #[arg(long, env = "HF_ENDPOINT", default_value = "https://huggingface.co", value_name = "URL")]
    hub: download::Url,
    /// A file with the hub's access token [default: the variable HF_TOKEN, if it is set]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// PEM file of the authorities that are trusted [default: the system's]
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// The folder in which models are kept
    #[arg(long, env = "KVSPOA_MODELS", default_value = "/var/lib/kvspoa/models", value_name = "DIR")]
    cache: PathBuf,
    /// Use what is in the cache folder, and check it, without asking the hub
    #[arg(long, env = "HF_HUB_OFFLINE", value_parser = FalseyValueParser::new())]
    offline: bool,
}

/// Fetches what is not in the cache folder yet, and checks what is. Returns the model's folder. `progress` is told each
/// file as it comes.
///
/// # Errors
/// [`HubError`]; the cache folder has whole models only.
pub async fn fetch(args: &FetchArgs, progress: impl Fn(&str)) -> Result<PathBuf, HubError> {
    let of_model = args.cache.join(args.name.folder());
    let known = match args.revision.commit() {
        Some(commit) => Some(commit),
        None if args.offline => Some(repository::read_reference(&of_model, &args.revision)?),
        None => None,
    };
    if let Some(commit) = &known {
        let dir = of_model.join(commit.as_str());
        if args.offline || dir.exists() {
            Manifest::load(&dir)?.verify(&dir)?;
            return Ok(dir);
        }
    }
    let hub = Hub::new(&args.hub, args.token_file.as_deref(), args.ca_file.as_deref())?;
    let listing = hub.listing(&args.name, &args.revision).await?;
    let dir = of_model.join(listing.commit.as_str());
    if !dir.exists() {
        download(&hub, args, &listing, &dir, progress).await?;
    }
    Manifest::load(&dir)?.verify(&dir)?;
    repository::write_reference(&of_model, &args.revision, &listing.commit)?;
    Ok(dir)
}

/// Into a folder of its own first, so that a fetch which breaks off leaves nothing that looks whole.
async fn download(
    hub: &Hub,
    args: &FetchArgs,
    listing: &Listing,
    dir: &Path,
    progress: impl Fn(&str),
) -> Result<(), HubError> {
    let partial = dir.with_extension(format!("partial-{}", std::process::id()));
    let write = |path: &Path, bytes: &[u8]| {
        let parent = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(path, bytes))
            .map_err(|source| HubError::Folder { path: path.to_owned(), source })
    };
    let mut manifest = Manifest::new(args.name.as_str(), listing.commit.as_str());
    let fetched = async {
        for file in listing.wanted()? {
            progress(&file.name);
            let bytes = hub.file(&args.name, &listing.commit, file).await?;
            write(&partial.join(&file.name), &bytes)?;
            manifest.add(&file.name, &bytes);
        }
        write(&partial.join(Manifest::FILE), manifest.to_json().as_bytes())?;
        std::fs::rename(&partial, dir).map_err(|source| HubError::Folder { path: dir.to_owned(), source })
    }
    .await;
    // Of a whole one nothing is left here.
    let _ = std::fs::remove_dir_all(&partial);
    fetched
}

impl Commit {
    fn as_str(&self) -> &str {
        &self.0
    }
}
