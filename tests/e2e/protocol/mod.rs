//! The shim's side of the protocol with containerd, without containerd: `thaw_tests::player` plays it.
//! Everything here needs nothing but the shim, its VMM and a guest, so that each step can be made in
//! the wrong order, twice, or not at all.

mod disks;
mod errors;
mod events;
mod hooks;
mod large;
mod life;
mod roots;
mod start;
mod streams;
mod waiting;

use containerd_shim_protos::api::Mount;
use thaw_tests::player::{Fifos, Player, Program};

/// Writes one test with a player.
macro_rules! on_shim {
    ($($(#[doc = $doc:expr])* fn $name:ident($player:ident: &Player) $body:block)+) => {
        $(
            $(#[doc = $doc])*
            #[test]
            fn $name() {
                thaw_tests::player::on_shim(stringify!($name), |$player: &Player| $body);
            }
        )+
    };
}
pub(crate) use on_shim;

/// Runs `program` on `rootfs`, else on the player's root; what it has printed.
#[track_caller]
fn run(player: &Player, program: Program, rootfs: Option<Mount>) -> String {
    let fifos = Fifos::output(player);
    let shim = player.bundle(program).start();
    let mut request = shim.create_request(&fifos);
    if let Some(root) = rootfs {
        request.rootfs = vec![root];
    }
    let output = fifos.read();
    let id = shim.bundle.id.clone();
    if let Err(error) = shim.task.create(&request) {
        panic!("creating {id}: {error}");
    }
    shim.task
        .start(&id, "")
        .unwrap_or_else(|error| panic!("starting {id}: {error}"));
    let text = output.text();
    shim.task.wait(&id, "").unwrap();
    shim.task.delete(&id, "").unwrap();
    shim.shut_down();
    shim.bundle.delete();
    text
}
