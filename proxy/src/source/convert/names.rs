//! Equal names, shared.

use std::collections::HashSet;
use std::sync::Arc;

/// Below this it is not worth while to look for names that nobody uses any more.
const SWEEP_MIN: usize = 1024;

/// Holds each name once: many endpoints are on few nodes, in few zones and namespaces, and most ports have one of a few names.
#[derive(Debug, Default)]
pub struct Names {
    known: HashSet<Arc<str>>,
    /// At how many names those that nobody uses are thrown out.
    sweep_at: usize,
}

impl Names {
    /// The name, shared with all earlier users of it.
    pub fn share(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.known.get(name) {
            return Arc::clone(known);
        }
        if self.known.len() >= self.sweep_at.max(SWEEP_MIN) {
            self.known.retain(|name| Arc::strong_count(name) > 1);
            self.sweep_at = self.known.len() * 2;
        }
        let name: Arc<str> = name.into();
        self.known.insert(Arc::clone(&name));
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shared_while_they_are_used_and_then_forgotten() {
        let mut names = Names::default();
        let kept = names.share("kept");
        for index in 0..10_000 {
            names.share(&index.to_string());
        }
        assert!(names.known.len() <= SWEEP_MIN, "{}", names.known.len());
        assert!(Arc::ptr_eq(&kept, &names.share("kept")));
    }
}
