//! Words and calls that must not be in the tree.

use super::source::{Kind, SourceFile};
use super::{Finding, TextFile};

/// Directories of one machine; `/` is added here so that this file does not find itself.
const MACHINE_DIRECTORIES: [&str; 3] = ["root", "work", "home"];

/// Programs that the agent must not run: it talks netlink.
const TOOLS: [&str; 10] =
    ["nft", "ip", "tc", "iptables", "ip6tables", "iptables-save", "iptables-restore", "ipset", "ipvsadm", "conntrack"];

/// Checks all text files and all source files.
pub fn check(files: &[TextFile], sources: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|f| !is_foreign(&f.path)) {
        check_lines(file, &mut findings);
    }
    for source in sources {
        check_macros(source, &mut findings);
        if source.path.starts_with("proxy/src/") {
            check_calls(source, &mut findings);
        }
    }
    findings
}

/// Text that is not ours: licences, lists that tools write.
fn is_foreign(path: &str) -> bool {
    path.starts_with("LICENSE")
        || path == "THIRD-PARTY-NOTICES.md"
        || path.ends_with(".lock")
        || path.ends_with("go.sum")
}

fn check_lines(file: &TextFile, findings: &mut Vec<Finding>) {
    let todo = ["TO", "DO"].concat();
    for (index, line) in file.text.lines().enumerate() {
        for directory in MACHINE_DIRECTORIES {
            let path = format!("/{directory}/");
            // After a word it is part of another path or address; else it begins one.
            let begins = line
                .match_indices(&path)
                .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "-_.~}*".contains(c)));
            if begins {
                findings.push(Finding::new(&file.path, index + 1, format!("a path of one machine: {path}")));
            }
        }
        if let Some((_, after)) = line.split_once(&todo) {
            let numbered = after.trim_start_matches(['(', ' ']).strip_prefix('#');
            let is_word = !after.starts_with(|c: char| c.is_alphanumeric() || c == '_');
            if is_word && !numbered.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
                findings.push(Finding::new(
                    &file.path,
                    index + 1,
                    format!("{todo} without an issue number: write {todo}(#N)"),
                ));
            }
        }
    }
}

fn check_macros(source: &SourceFile, findings: &mut Vec<Finding>) {
    for (index, token) in source.tokens.iter().enumerate() {
        if let Some(word @ ("todo" | "unimplemented" | "dbg")) = source.word(index)
            && source.tokens.get(index + 1).is_some_and(|t| t.kind == Kind::Punct('!'))
        {
            findings.push(Finding::new(&source.path, token.line, format!("`{word}!` must not be committed")));
        }
    }
}

fn check_calls(source: &SourceFile, findings: &mut Vec<Finding>) {
    for (index, token) in source.tokens.iter().enumerate() {
        if token.test || source.is_test() {
            continue;
        }
        if source.word(index) == Some("Command")
            && source.is_separator(index + 1)
            && source.word(index + 3) == Some("new")
            && let Some(Kind::Literal(literal)) = source.tokens.get(index + 5).map(|t| &t.kind)
        {
            let name = literal.trim_matches('"').rsplit('/').next().unwrap_or_default();
            if TOOLS.contains(&name) {
                findings.push(Finding::new(
                    &source.path,
                    token.line,
                    format!("the agent must not run `{name}`: use netlink"),
                ));
            }
        }
        if source.word(index) == Some("unwrap") && index > 0 && source.tokens[index - 1].kind == Kind::Punct('.') {
            let message = "`unwrap` outside tests: say the invariant with `expect`, or return the error";
            findings.push(Finding::new(&source.path, token.line, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_text(text: &str) -> Vec<String> {
        let file = TextFile { path: "README.md".into(), text: text.into() };
        check(&[file], &[]).iter().map(ToString::to_string).collect()
    }

    fn in_code(path: &str, text: &str) -> Vec<String> {
        check(&[], &[SourceFile::parse(path, text).unwrap()]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for directory in MACHINE_DIRECTORIES {
            assert_eq!(in_text(&format!("see\n`/{directory}/x`")).len(), 1);
            assert_eq!(in_text(&format!("see example.org/{directory}/x")), [""; 0]);
        }
    }

    #[test]
    fn an_open_task_needs_its_number() {
        let word = ["TO", "DO"].concat();
        assert_eq!(in_text(&format!("// {word}: later")).len(), 1);
        assert_eq!(in_text(&format!("// {word}(#12): later")), [""; 0]);
        assert_eq!(in_text(&format!("// {word}(x): later")).len(), 1);
    }

    #[test]
    fn unfinished_macros_are_found_but_not_their_names() {
        let bang = "!";
        for name in ["todo", "unimplemented", "dbg"] {
            assert_eq!(in_code("tests/src/x.rs", &format!("fn f() {{ {name}{bang}() }}")).len(), 1);
            assert_eq!(in_code("tests/src/x.rs", &format!("fn f() {{ let {name} = 1; }}")), [""; 0]);
        }
    }

    #[test]
    fn the_agent_runs_no_tools_but_tests_may() {
        let call = "fn f() { std::process::Command::new(\"/usr/sbin/nft\"); }";
        assert_eq!(in_code("proxy/src/nft/apply.rs", call).len(), 1);
        assert_eq!(in_code("tests/src/netns.rs", call), [""; 0]);
        assert_eq!(in_code("proxy/src/nft/apply.rs", &format!("#[cfg(test)] mod tests {{ {call} }}")), [""; 0]);
    }

    #[test]
    fn unwrap_is_for_tests() {
        assert_eq!(in_code("proxy/src/sys/x.rs", "fn f() { g().unwrap(); }").len(), 1);
        assert_eq!(
            in_code("proxy/src/sys/x.rs", "#[test] fn f() {}\n#[cfg(test)] mod t { fn f() { g().unwrap(); } }"),
            [""; 0]
        );
    }
}
