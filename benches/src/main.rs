//! The clocks.
fn main() {}
