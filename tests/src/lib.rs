//! What the end-to-end tests stand on: containerd daemons of their own, containers run through
//! `ctr`, and a look at the host before and after each test that finds whatever was left behind.
//!
//! A test gets a [`Testbed`]: one containerd of one version with the image imported. It asks for
//! [`Testbed::run`], changes the command line, and looks at what came out:
//!
//! ```no_run
//! thaw_tests::on_each_containerd! {
//!     /// What a shell prints is printed.
//!     fn prints(bed: &thaw_tests::Testbed) {
//!         let run = bed.run().shell("echo hello").output();
//!         assert_eq!((run.code, run.stdout()), (0, "hello\n".into()));
//!     }
//! }
//! ```

mod command;
mod container;
mod containerd;
mod environment;
pub mod file_guest;
mod host;
pub mod player;
pub mod task;
mod testbed;
pub mod thaw;

pub use command::{Alarm, Finished, finish, finish_when_ready, finish_within, show};
pub use container::{Container, Run};
pub use containerd::NAMESPACE;
pub use environment::{Environment, FAULTY, IMAGE, Version};
pub use testbed::{LIMIT, Testbed, on_containerd};
