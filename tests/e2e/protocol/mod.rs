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
