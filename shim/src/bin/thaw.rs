//! The `thaw` command. See [`thaw_shim::command`].

use std::process::ExitCode;

fn main() -> ExitCode {
    thaw_shim::command::main(std::env::args_os().skip(1))
}
