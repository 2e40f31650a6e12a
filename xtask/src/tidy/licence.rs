//! That every crate says the project's licence and the licence texts are there.

use super::{Finding, TextFile};

/// The licence of our own code.
pub const OURS: &str = "Apache-2.0 OR GPL-2.0-or-later";

/// The licence of the built program and the image, which hold GPL-3.0 compatible code of others.
pub const LINKED: &str = "GPL-3.0-or-later";

const TEXTS: [(&str, &str); 3] = [
    ("LICENSE-APACHE", "Apache License"),
    ("LICENSE-GPL", "GNU GENERAL PUBLIC LICENSE\n                       Version 2"),
    ("LICENSE-GPL-3", "GNU GENERAL PUBLIC LICENSE\n                       Version 3"),
];

/// Checks manifests, SPDX lines and licence texts.
pub fn check(files: &[TextFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        if file.path == "Cargo.toml" && !file.text.contains(&format!("license = \"{OURS}\"")) {
            findings.push(Finding::new(&file.path, 0, format!("the workspace's licence must be \"{OURS}\"")));
        }
        if file.path.ends_with("/Cargo.toml") && !file.text.contains("license.workspace = true") {
            findings.push(Finding::new(&file.path, 0, "must say `license.workspace = true`"));
        }
        for (index, line) in file.text.lines().enumerate() {
            // Only a line that *is* the tag: text that speaks about tags is no claim.
            let tag = line.trim_start_matches(['/', '#', '*', ';', '-', '!', '<', ' ']);
            if let Some(expression) = tag.strip_prefix("SPDX-License-Identifier:") {
                let expression = expression.trim_end_matches(['-', '>', '*', '/', ' ']).trim();
                if expression != OURS {
                    let message = format!("SPDX licence `{expression}` is not the project's `{OURS}`");
                    findings.push(Finding::new(&file.path, index + 1, message));
                }
            }
        }
    }
    for (name, beginning) in TEXTS {
        match files.iter().find(|f| f.path == name) {
            None => findings.push(Finding::new(name, 0, "the licence text is missing")),
            Some(file) if !file.text.contains(beginning) => {
                findings.push(Finding::new(
                    name,
                    0,
                    format!("not the licence: it lacks `{}`", beginning.replace('\n', " ")),
                ));
            }
            Some(_) => {}
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(changed: &str, text: &str) -> Vec<String> {
        let mut files: Vec<TextFile> =
            TEXTS.map(|(path, text)| TextFile { path: path.into(), text: text.into() }).into();
        files.push(TextFile { path: "Cargo.toml".into(), text: format!("license = \"{OURS}\"") });
        files.retain(|f| f.path != changed);
        files.push(TextFile { path: changed.into(), text: text.into() });
        check(&files).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_good_tree_has_no_findings() {
        assert_eq!(tree("a/Cargo.toml", "license.workspace = true"), [""; 0]);
        assert_eq!(tree("a/src/x.rs", &format!("// SPDX-License-Identifier: {OURS}")), [""; 0]);
    }

    #[test]
    fn each_disagreement_is_found() {
        assert_eq!(tree("Cargo.toml", "license = \"MIT\"").len(), 1);
        assert_eq!(tree("a/Cargo.toml", "license = \"MIT\"").len(), 1);
        assert_eq!(tree("LICENSE-GPL", "All rights reserved").len(), 1);
        let found = tree("a/src/x.rs", "\n// SPDX-License-Identifier: MIT");
        assert_eq!(found, [format!("a/src/x.rs:2: SPDX licence `MIT` is not the project's `{OURS}`")]);
    }
}
