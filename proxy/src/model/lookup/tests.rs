//! Packets and what kube-proxy v1.37 does with them. Rows carry the letter and number of the scenario they belong to.

mod cases;
mod policies;
mod properties;
