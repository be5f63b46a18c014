//! The decisions of lately, kept for `kvspoa shadow-report` and `kvspoa replay`: what was asked, what was chosen, and what
//! HAProxy did. Bounded in bytes, in memory and in a file; no text, no tokens and no hashes of them.
//!
//! The request path hands over what it has by a bounded channel and goes on; a thread of its own numbers, joins and
//! writes.
//!
//! | module | what it is |
//! |---|---|
//! | `line` | one decision as it is written |
//! | `names` | numbers in place of hashes |
//! | `book` | decisions wait for their ends, then become lines |
//! | `file` | the file, turned over by size |

mod book;
mod file;
mod line;
mod names;

pub use line::{FORM, Line};

use crate::{
    config,
    metrics::RecordMetrics,
    select::{PromptBlocks, SequenceKey},
    units::RequestId,
};
use book::Book;
use file::RecordFile;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

/// Decisions and ends that may wait for the thread: some seconds of a busy site. More are dropped, and counted.
const WAITING: usize = 4096;

/// How often the file is brought up to date.
const FLUSH: Duration = Duration::from_secs(1);

/// A decision as it is handed over.
#[derive(Clone, Debug)]
pub struct Decided {
    /// HAProxy's id of the request, under which its end will be told.
    pub request: RequestId,
    /// When it was asked.
    pub at: SystemTime,
    /// The HAProxy backend.
    pub pool: String,
    /// What was done about it: `on` or `shadow`.
    pub mode: &'static str,
    /// A hash of the session, or of what stands for it.
    pub session: Option<u64>,
    /// The prompt.
    pub prompt: Arc<PromptBlocks>,
    /// Which of its sequences is written.
    pub key: SequenceKey,
    /// The server chosen.
    pub chosen: Option<Arc<str>>,
    /// What each server that holds any of it was confirmed to hold, in tokens.
    pub held: SmallVec<[(Arc<str>, u32); 4]>,
}

/// The end of a request as HAProxy told.
#[derive(Clone, Debug)]
pub struct Over {
    /// Its id.
    pub request: RequestId,
    /// The server that served it.
    pub served: Option<String>,
    /// From its departure to the headers of the answer.
    pub response: Option<Duration>,
    /// From the first byte to the last.
    pub total: Option<Duration>,
    /// Whether it ended well.
    pub is_normal: bool,
}

enum Noted {
    Decided(Box<Decided>),
    Over(Box<Over>),
    Stop,
}

/// Takes decisions; a handle that is cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder {
    sender: SyncSender<Noted>,
    book: Arc<Mutex<Book>>,
    metrics: RecordMetrics,
}

/// The thread that keeps them.
#[derive(Debug)]
pub struct Recording {
    recorder: Recorder,
    thread: JoinHandle<()>,
}

impl Recording {
    /// Starts the thread; `None` where nothing is to be kept.
    ///
    /// # Errors
    /// The file cannot be written, or there is no thread.
    pub fn start(config: &config::Record) -> io::Result<Option<Self>> {
        if config.max_bytes == 0 && config.file.is_none() {
            return Ok(None);
        }
        let file =
            config.file.as_deref().map(|path| RecordFile::open(path, config.file_max_bytes)).transpose()?;
        let (sender, receiver) = sync_channel(WAITING);
        let book = Arc::new(Mutex::new(Book::new(config.max_bytes)));
        let metrics = RecordMetrics::register();
        let recorder = Recorder { sender, book: Arc::clone(&book), metrics: metrics.clone() };
        let keeper = Keeper { receiver, book, file, metrics };
        let thread = thread::Builder::new().name("kv-record".to_owned()).spawn(move || keeper.run())?;
        Ok(Some(Self { recorder, thread }))
    }

    /// The handle.
    #[must_use]
    pub const fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Ends the thread when it has written what it has.
    pub fn stop(self) {
        let told = self.recorder.sender.send(Noted::Stop).is_ok();
        if told && self.thread.join().is_err() {
            tracing::error!("the thread of the record had panicked");
        }
    }
}

impl Recorder {
    /// Takes a decision in. Never waits.
    pub fn decided(&self, decided: Decided) {
        self.note(Noted::Decided(Box::new(decided)));
    }

    /// Takes in that a request is over. Never waits.
    pub fn over(&self, over: Over) {
        self.note(Noted::Over(Box::new(over)));
    }

    fn note(&self, noted: Noted) {
        if self.sender.try_send(noted).is_err() {
            self.metrics.dropped.increment(1);
        }
    }

    /// The lines of a pool since a moment, in milliseconds since 1970, the oldest first.
    #[must_use]
    pub fn lines(&self, pool: &str, since_ms: u64) -> String {
        let lines = self.book.lock().lines(pool, since_ms);
        // Who keeps decisions need not wait for that.
        lines.iter().flat_map(|line| [&**line, "\n"]).collect()
    }
}

struct Keeper {
    receiver: Receiver<Noted>,
    book: Arc<Mutex<Book>>,
    file: Option<RecordFile>,
    metrics: RecordMetrics,
}

impl Keeper {
    fn run(mut self) {
        loop {
            let line = match self.receiver.recv_timeout(FLUSH) {
                Ok(Noted::Decided(decided)) => self.book.lock().decided(*decided),
                Ok(Noted::Over(over)) => self.book.lock().over(&over),
                Err(RecvTimeoutError::Timeout) => None,
                Ok(Noted::Stop) | Err(RecvTimeoutError::Disconnected) => break,
            };
            let quiet = line.is_none();
            if let Some(line) = line {
                self.metrics.kept.increment(1);
                self.metrics.bytes.set(self.book.lock().bytes() as f64);
                self.write(|file| file.add(&line));
            }
            if quiet {
                self.write(RecordFile::flush);
            }
        }
        self.write(RecordFile::flush);
    }

    /// A file that cannot be written is told of once, and left alone: the record in memory goes on.
    fn write(&mut self, write: impl FnOnce(&mut RecordFile) -> io::Result<()>) {
        if let Some(Err(error)) = self.file.as_mut().map(write) {
            tracing::warn!(%error, "record.file: decisions are no longer written there");
            self.file = None;
        }
    }
}

#[cfg(test)]
mod tests;
