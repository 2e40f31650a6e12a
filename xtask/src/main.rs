//! Tandem's developer commands.
fn main() {}
