//! The `kvspoa` command: see `kvspoa --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvspoa::cli::main()
}
