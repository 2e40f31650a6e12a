//! Test harness of Tandem.
