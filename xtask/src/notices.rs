//! `cargo xtask notices`: the licences of the crates that the `tandem` program holds, and that all of them may be combined.
//!
//! The list comes from Cargo.lock by `cargo metadata`, the texts from the crates' own sources.

use crate::command::{self, cargo, workspace_root};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

/// Writes the licences of the linked crates to THIRD-PARTY-NOTICES.md.
#[derive(clap::Args)]
pub struct Options {
    /// Write nothing; fail if the file is not what would be written.
    #[arg(long)]
    check: bool,
}

const FILE: &str = "THIRD-PARTY-NOTICES.md";

/// The licences that may be part of a program under GPL-3.0-or-later, in the order in which one is chosen of several.
const ACCEPTED: [&str; 14] = [
    "MIT",
    "MIT-0",
    "ISC",
    "0BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "Zlib",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "Unicode-3.0",
    "CC0-1.0",
    "Unlicense",
    "GPL-2.0-or-later",
    "GPL-3.0-or-later",
];

/// What `tandem` links besides crates.
const SYSTEM_LIBRARIES: &str = "\
# System libraries

`tandem` is linked with two libraries of the system that it runs on, which are not part of it: libnftnl
(GPL-2.0-or-later, https://netfilter.org/projects/libnftnl) and libmnl (LGPL-2.1-or-later,
https://netfilter.org/projects/libmnl). With them and with crates under Apache-2.0 the program as a whole is
distributed under GPL-3.0-or-later (LICENSE-GPL-3).
";

/// Runs the command.
///
/// # Errors
/// If a licence is unknown or not accepted, or with `--check` if the file is out of date.
pub fn run(options: &Options) -> Result<()> {
    let root = workspace_root()?;
    if options.check {
        return check(&root);
    }
    let text = text(&root)?;
    std::fs::write(root.join(FILE), text).with_context(|| format!("cannot write {FILE}"))?;
    println!("notices: {FILE} is written");
    Ok(())
}

/// Fails if the file is not what [`run`] would write.
///
/// # Errors
/// As said, and if a licence is unknown or not accepted.
pub fn check(root: &Path) -> Result<()> {
    let wanted = text(root)?;
    if std::fs::read_to_string(root.join(FILE)).unwrap_or_default() != wanted {
        bail!("{FILE} does not agree with Cargo.lock: run `cargo xtask notices`");
    }
    println!("tidy: third-party notices: good");
    Ok(())
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    manifest_path: String,
    repository: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// None for an ordinary dependency, else `build` or `dev`.
    kind: Option<String>,
}

fn text(root: &Path) -> Result<String> {
    // One platform, so that every machine writes the same list. Dependencies do not differ between Linux architectures that Tandem supports.
    let arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let json = command::output(cargo().args(arguments).current_dir(root))?;
    let metadata: Metadata = serde_json::from_str(&json).context("cargo metadata has another form than expected")?;
    let linked = linked(&metadata, "proxy")?;
    let foreign: Vec<&Package> = metadata.packages.iter().filter(|p| p.source.is_some()).collect();
    let mut refused = Vec::new();
    for package in &foreign {
        if let Err(reason) = choose(package.license.as_deref()) {
            refused.push(format!("  {} {}: {reason}", package.name, package.version));
        }
    }
    if !refused.is_empty() {
        bail!(
            "these crates cannot be part of a program under {}:\n{}",
            crate::tidy::LINKED_LICENCE,
            refused.join("\n")
        );
    }
    let mut ours: Vec<&Package> = foreign.into_iter().filter(|p| linked.contains(&p.id)).collect();
    ours.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    render(&ours)
}

/// The ids of the packages whose code is part of `name`'s program: ordinary dependencies, followed to the end.
fn linked(metadata: &Metadata, name: &str) -> Result<BTreeSet<String>> {
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|n| (n.id.as_str(), n)).collect();
    let first = metadata.packages.iter().find(|p| p.name == name && p.source.is_none());
    let mut waiting = vec![first.with_context(|| format!("the workspace has no package {name}"))?.id.clone()];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if let Some(node) = nodes.get(id.as_str()).filter(|_| seen.insert(id.clone())) {
            let ordinary = node.deps.iter().filter(|d| d.dep_kinds.iter().any(|k| k.kind.is_none()));
            waiting.extend(ordinary.map(|d| d.pkg.clone()));
        }
    }
    Ok(seen)
}

/// The accepted licences that are enough for an expression, or why there are none.
fn choose(expression: Option<&str>) -> Result<Vec<String>, String> {
    let text = expression.ok_or("no licence is stated")?;
    let parsed =
        Expression::parse_mode(text, ParseMode::LAX).map_err(|e| format!("`{text}` is no licence: {}", e.reason))?;
    let accepted: Vec<Licensee> = ACCEPTED
        .iter()
        .map(|name| Licensee::parse(name).expect("ACCEPTED holds SPDX names; a test reads them all"))
        .collect();
    let chosen = parsed.minimized_requirements(&accepted).map_err(|_| format!("`{text}` is not accepted"))?;
    Ok(chosen.iter().map(ToString::to_string).collect())
}

fn render(packages: &[&Package]) -> Result<String> {
    let mut table = String::new();
    // Text → the crates that carry it.
    let mut texts: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
    for package in packages {
        let chosen = choose(package.license.as_deref()).map_err(anyhow::Error::msg)?;
        let name = format!("{} {}", package.name, package.version);
        let stated = package.license.as_deref().unwrap_or_default();
        let source = package.repository.as_deref().unwrap_or("crates.io");
        writeln!(table, "| {name} | {stated} | {} | {source} |", chosen.join(" AND "))?;
        let directory = Path::new(&package.manifest_path).parent().context("a manifest has a directory")?;
        for text in licence_texts(directory, &chosen)? {
            let key = text.split_whitespace().collect::<Vec<_>>().join(" ");
            texts.entry(key).or_insert_with(|| (text, Vec::new())).1.push(name.clone());
        }
    }
    let mut out = format!(
        "# Third-party notices\n\nWritten by `cargo xtask notices`; do not edit.\n\nThe `tandem` program holds code of these {} crates. \
         Where a crate offers several licences, the column “taken” names the one that is used here.\n\n\
         | crate | licence | taken | source |\n|---|---|---|---|\n{table}\n{SYSTEM_LIBRARIES}\n# Licence texts\n",
        packages.len()
    );
    let mut sorted: Vec<_> = texts.into_values().collect();
    sorted.sort_by(|a, b| a.1.cmp(&b.1).then_with(|| a.0.cmp(&b.0)));
    for (text, crates) in sorted {
        let lines: String = text.lines().fold(String::new(), |all, line| format!("{all}    {}\n", line.trim_end()));
        let lines: String = lines.lines().map(|l| format!("{}\n", l.trim_end())).collect();
        write!(out, "\n## {}\n\n{lines}", crates.join(", "))?;
    }
    Ok(out)
}

/// The texts in a crate's source for the chosen licences; the standard text where it holds none; and its NOTICE files.
fn licence_texts(directory: &Path, chosen: &[String]) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(directory)
        .with_context(|| format!("the source of a crate is missing ({}): run `cargo fetch`", directory.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_licence =
            ["LICENSE", "LICENCE", "COPYING", "UNLICENSE", "NOTICE"].iter().any(|word| name.starts_with(word));
        if is_licence && entry.path().is_file() {
            files.push((name, std::fs::read_to_string(entry.path())?));
        }
    }
    files.sort();
    let mut texts: Vec<String> =
        files.iter().filter(|(n, _)| n.starts_with("NOTICE")).map(|(_, t)| t.clone()).collect();
    files.retain(|(name, _)| !name.starts_with("NOTICE"));
    for licence in chosen {
        let word = licence.split(['-', ' ']).next().unwrap_or(licence).to_uppercase();
        let named: Vec<&(String, String)> = files.iter().filter(|(name, _)| name.contains(&word)).collect();
        if named.is_empty() && !files.is_empty() {
            texts.extend(files.iter().map(|(_, text)| text.clone()));
        } else if named.is_empty() {
            let id = licence.split(' ').next().unwrap_or(licence);
            let standard = spdx::license_id(id).with_context(|| format!("SPDX has no text for {id}"))?;
            texts.push(format!(
                "(The crate's source holds no licence text; this is the standard text of {id}.)\n\n{}",
                standard.text()
            ));
        } else {
            texts.extend(named.iter().map(|(_, text)| text.clone()));
        }
    }
    texts.dedup();
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_accepted_licence_is_chosen() {
        for name in ACCEPTED {
            assert_eq!(choose(Some(name)).unwrap(), [name]);
        }
        assert_eq!(choose(Some("Apache-2.0 OR MIT")).unwrap(), ["MIT"]);
        assert_eq!(choose(Some("MIT/Apache-2.0")).unwrap(), ["MIT"]);
        assert_eq!(choose(Some("(MIT OR Apache-2.0) AND Unicode-3.0")).unwrap(), ["MIT", "Unicode-3.0"]);
    }

    #[test]
    fn unknown_and_incompatible_licences_are_refused() {
        for (expression, word) in [
            (None, "no licence is stated"),
            (Some("SSPL-1.0"), "not accepted"),
            (Some("GPL-2.0-only"), "not accepted"),
            (Some("MIT AND CDDL-1.0"), "not accepted"),
            (Some("Proprietary"), "is no licence"),
        ] {
            let reason = choose(expression).unwrap_err();
            assert!(reason.contains(word), "{expression:?}: {reason}");
        }
    }

    fn crate_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    #[test]
    fn the_text_of_the_chosen_licence_is_taken_with_the_notice() {
        let source =
            crate_with(&[("LICENSE-MIT", "mit"), ("LICENSE-APACHE", "apache"), ("NOTICE", "notice"), ("x.rs", "code")]);
        assert_eq!(licence_texts(source.path(), &["MIT".into()]).unwrap(), ["notice", "mit"]);
    }

    #[test]
    fn a_crate_without_text_gets_the_standard_one() {
        let texts = licence_texts(crate_with(&[]).path(), &["ISC".into()]).unwrap();
        assert!(texts[0].contains("Permission to use, copy, modify"), "{texts:?}");
    }

    #[test]
    fn only_ordinary_dependencies_are_linked() {
        let json = r#"{"packages":[
            {"id":"p","name":"proxy","version":"0","license":null,"source":null,"manifest_path":"","repository":null}],
          "resolve":{"nodes":[
            {"id":"p","deps":[{"pkg":"a","dep_kinds":[{"kind":null}]},{"pkg":"b","dep_kinds":[{"kind":"dev"}]}]},
            {"id":"a","deps":[{"pkg":"c","dep_kinds":[{"kind":"build"},{"kind":null}]}]},
            {"id":"b","deps":[]},{"id":"c","deps":[]}]}}"#;
        let metadata: Metadata = serde_json::from_str(json).unwrap();
        assert_eq!(linked(&metadata, "proxy").unwrap().into_iter().collect::<Vec<_>>(), ["a", "c", "p"]);
    }
}
