//! Topology hints (parity 3.7): which ready endpoints this node should use.
