//! Sizes of the source files: a report, no rule. Above 600 lines, ask which second noun is in the file.

use super::source::SourceFile;
use std::fmt::Write;

/// Lines of a file that are not test code (the part before `#[cfg(test)]` at the beginning of a line).
fn lines(file: &SourceFile) -> usize {
    if file.is_test() { 0 } else { file.text.lines().take_while(|line| !line.starts_with("#[cfg(test)]")).count() }
}

fn sorted(files: &[SourceFile]) -> Vec<(usize, &str)> {
    let mut sizes: Vec<_> = files.iter().map(|f| (lines(f), f.path.as_str())).filter(|(n, _)| *n > 0).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes
}

/// One line: number of files, median, 90th percentile and the largest.
pub fn summary(files: &[SourceFile]) -> String {
    let sizes = sorted(files);
    let Some(largest) = sizes.first() else { return "no source files".into() };
    let at = |share: usize| sizes[(sizes.len() - 1) * (100 - share) / 100].0;
    format!(
        "{} source files without tests: median {} lines, 90% below {}, largest {} ({})",
        sizes.len(),
        at(50),
        at(90),
        largest.0,
        largest.1
    )
}

/// All files, largest first.
pub fn list(files: &[SourceFile]) -> String {
    sorted(files).iter().fold(String::new(), |mut text, (lines, path)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{lines:6} {path}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_code_does_not_count() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {}\n";
        let files =
            [SourceFile::parse("a/src/x.rs", text).unwrap(), SourceFile::parse("a/tests/y.rs", "fn b() {}").unwrap()];
        assert_eq!(list(&files), "     1 a/src/x.rs\n");
        assert!(summary(&files).contains("1 source files"));
    }
}
