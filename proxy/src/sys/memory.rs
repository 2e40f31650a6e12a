//! Memory that the process holds but does not use.

/// Gives what the allocator keeps for later back to the system. glibc keeps nearly everything that was ever in use at the same
/// time: after a first sync of 10,000 Services that is as much again as what is needed from then on. Takes some milliseconds,
/// so it is for the time after something large. Other C libraries keep little, and there this does nothing.
#[allow(unsafe_code)]
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called by any thread at any time (it is MT-Safe: it takes each arena's lock), has no
    // precondition on its argument, and touches only memory that no allocation is in; no one has to uphold anything.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn what_is_free_is_given_back() {
        if !cfg!(target_env = "gnu") {
            println!("SKIP only glibc keeps free memory");
            return;
        }
        // Small enough that none is mapped by itself, and the last one keeps the heap from shrinking by itself.
        let mut blocks: Vec<Vec<u8>> = (0..40_000).map(|_| vec![1; 1000]).collect();
        let last = blocks.pop();
        drop(blocks);
        let before = resident_kib();
        give_back();
        let after = resident_kib();
        assert!(after + 20_000 < before, "{before} KiB, then {after} KiB");
        drop(last);
    }
}
