//! What objects mean on this node. Rows carry the letter and number of the behaviour table they come from.

mod endpoints;
mod fields;
mod properties;
