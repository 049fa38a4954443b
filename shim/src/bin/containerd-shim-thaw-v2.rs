//! containerd's shim for `io.containerd.thaw.v2`. See [`thaw_shim::bootstrap`].

use std::process::ExitCode;

fn main() -> ExitCode {
    thaw_shim::bootstrap::main(std::env::args().skip(1))
}
