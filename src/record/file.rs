//! The file of decisions. When it is full it becomes `FILE.1`, in place of the one before, and a new one begins: the two
//! together never take more than twice the bound.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    max_bytes: u64,
    bytes: u64,
    file: BufWriter<File>,
}

impl RecordFile {
    /// Opens the file, at its end if it is there.
    pub(super) fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), max_bytes, bytes, file: BufWriter::new(file) })
    }

    pub(super) fn add(&mut self, line: &str) -> io::Result<()> {
        let length = line.len() as u64 + 1;
        if self.bytes > 0 && self.bytes + length > self.max_bytes {
            self.turn_over()?;
        }
        self.bytes += length;
        self.file.write_all(line.as_bytes())?;
        self.file.write_all(b"\n")
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn turn_over(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let mut before = self.path.clone().into_os_string();
        before.push(".1");
        std::fs::rename(&self.path, before)?;
        let (path, max_bytes) = (self.path.clone(), self.max_bytes);
        *self = Self::open(&path, max_bytes)?;
        Ok(())
    }
}
