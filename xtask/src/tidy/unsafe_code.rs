//! Where `unsafe` may be, and that each place says why it is sound.

use super::Finding;
use super::source::{Kind, SourceFile};

/// Files, or directories (with a final `/`), that may hold `unsafe`.
const ALLOWED: &[&str] = &[
    "proxy/src/nft/netlink.rs",
    "proxy/src/nft/netlink/",
    "proxy/src/sys/",
    "proxy/src/sys.rs",
    "tests/src/netns.rs",
    "tests/src/packet.rs",
    "tests/src/probe.rs",
    "tests/src/socket.rs",
];

/// Modules that must say `#![forbid(unsafe_code)]` themselves. A directory's `mod.rs` speaks for all of it.
const PURE: &[&str] = &[
    "proxy-common/src/lib.rs",
    "proxy/src/model/mod.rs",
    "proxy/src/source/mod.rs",
    "proxy/src/compile/mod.rs",
    "proxy/src/conntrack/mod.rs",
    "proxy/src/conntrack/stale.rs",
    "proxy/src/takeover/mod.rs",
    "proxy/src/nft/object.rs",
    "proxy/src/nft/expr.rs",
    "proxy/src/nft/text.rs",
    "proxy/src/nft/diff.rs",
    "proxy/src/nft/transaction.rs",
    "xtask/src/main.rs",
];

/// Checks all source files.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        check_places(file, &mut findings);
        if PURE.contains(&file.path.as_str()) && !file.text.lines().any(|l| l.trim() == "#![forbid(unsafe_code)]") {
            findings.push(Finding::new(&file.path, 0, "a pure module must say #![forbid(unsafe_code)]"));
        }
    }
    findings
}

fn check_places(file: &SourceFile, findings: &mut Vec<Finding>) {
    let allowed = ALLOWED
        .iter()
        .any(|place| if place.ends_with('/') { file.path.starts_with(place) } else { file.path == *place });
    let lines: Vec<&str> = file.text.lines().collect();
    for (index, token) in file.tokens.iter().enumerate() {
        if token.kind != Kind::Ident("unsafe".into()) {
            continue;
        }
        // `#[unsafe(no_mangle)]` and `unsafe extern` declare; they are judged like blocks.
        if !allowed {
            let message = format!("`unsafe` is allowed only in {}", ALLOWED.join(", "));
            findings.push(Finding::new(&file.path, token.line, message));
            continue;
        }
        // A function's contract stands where it is public, or in its trait; a function type (`unsafe extern "C" fn`) does nothing.
        let fn_type = file.word(index + 1) == Some("extern") && file.word(index + 3) == Some("fn");
        let function = file.word(index + 1) == Some("fn");
        let public = index > 0 && file.word(index - 1) == Some("pub");
        if fn_type || (function && !public) {
            continue;
        }
        let wanted = if function { "# Safety" } else { "SAFETY:" };
        if !comment_above(&lines, token.line, wanted) {
            findings.push(Finding::new(
                &file.path,
                token.line,
                format!("`unsafe` without a `{wanted}` comment above it"),
            ));
        }
    }
}

/// Whether the statement that reaches `line` (from 1) has `wanted` in a comment on it or directly above.
fn comment_above(lines: &[&str], line: usize, wanted: &str) -> bool {
    let is_comment = |text: &str| text.starts_with("//");
    let is_attribute = |text: &str| text.starts_with("#[");
    let mut number = line;
    loop {
        let Some(text) = number.checked_sub(1).and_then(|i| lines.get(i)).map(|t| t.trim()) else { return false };
        if text.contains(wanted) && text.contains("//") {
            return true;
        }
        // Above the first line, only comments, attributes and the beginning of the same statement count.
        let ended = text.is_empty() || text.ends_with([';', '}']) || (text.ends_with('{') && !text.contains("unsafe"));
        if number < line && ended && !is_comment(text) && !is_attribute(text) {
            return false;
        }
        number -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&[SourceFile::parse(path, text).unwrap()]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unsafe_elsewhere_is_a_finding_and_in_a_comment_is_not() {
        let found = findings("proxy/src/agent.rs", "// unsafe\nfn f() {\n    unsafe { g() }\n}");
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("proxy/src/agent.rs:3: `unsafe` is allowed only in"), "{found:?}");
    }

    #[test]
    fn an_allowed_place_needs_its_reason() {
        let without = "fn f() {\n    let x =\n        unsafe { g() };\n}";
        assert_eq!(findings("proxy/src/sys/x.rs", without).len(), 1);
        let with = "fn f() {\n    // SAFETY: g needs nothing; checked by\n    // the caller.\n    let x =\n        unsafe { g() };\n}";
        assert_eq!(findings("proxy/src/sys/x.rs", with), [""; 0]);
        let of_another = "fn f() {\n    // SAFETY: g needs nothing.\n    unsafe { g() };\n    unsafe { h() };\n}";
        assert_eq!(findings("proxy/src/sys/x.rs", of_another).len(), 1);
    }

    #[test]
    fn an_unsafe_function_documents_its_contract() {
        assert_eq!(findings("proxy/src/sys/x.rs", "pub unsafe fn f() {}").len(), 1);
        assert_eq!(findings("proxy/src/sys/x.rs", "fn f(g: unsafe extern \"C\" fn()) {}"), [""; 0]);
        assert_eq!(findings("proxy/src/sys/x.rs", "/// # Safety\n/// Call once.\npub unsafe fn f() {}"), [""; 0]);
    }

    #[test]
    fn a_pure_module_forbids_it() {
        assert_eq!(findings("proxy/src/model/mod.rs", "//! Model.").len(), 1);
        assert_eq!(findings("proxy/src/model/mod.rs", "//! Model.\n#![forbid(unsafe_code)]"), [""; 0]);
    }
}
