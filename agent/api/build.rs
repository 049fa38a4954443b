//! Generates the messages and the ttrpc stubs of the agent's own service.

use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

fn main() {
    println!("cargo:rerun-if-changed=protos/agent.proto");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    Codegen::new()
        .out_dir(&out)
        .inputs(["protos/agent.proto"])
        .include("protos")
        .rust_protobuf()
        .customize(Customize {
            async_all: true,
            ..Default::default()
        })
        .rust_protobuf_customize(ProtobufCustomize::default().gen_mod_rs(true))
        .run()
        .expect("agent.proto must compile");
    // Written last: the generator's own list names the messages but not the stubs.
    let modules = "pub mod agent;\npub mod agent_ttrpc;\n";
    std::fs::write(format!("{out}/mod.rs"), modules).expect("OUT_DIR is writable");
}
