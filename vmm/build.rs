//! Links the program at a fixed address. A static program that may lie anywhere relocates itself
//! whenever it is executed: that touches 70 KiB, which each VMM then has as memory of its own, before
//! anything is done. Its heap, stacks and mappings, guest memory among them, lie at random addresses
//! all the same.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // After rustc's own -static-pie, of which the last one counts.
    println!("cargo:rustc-link-arg-bin=thaw-vmm=-no-pie");
    println!("cargo:rustc-link-arg-bin=thaw-vmm=-static");
}
