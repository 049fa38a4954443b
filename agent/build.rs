//! Links the agent at a fixed address. A static program that may lie anywhere relocates itself
//! whenever it is executed, which for this one touches half a megabyte, once for each helper.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // After rustc's own -static-pie, of which the last one counts.
    println!("cargo:rustc-link-arg-bin=thaw-agent=-no-pie");
    println!("cargo:rustc-link-arg-bin=thaw-agent=-static");
}
