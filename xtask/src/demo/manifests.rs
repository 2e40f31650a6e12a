//! The example manifests: copied for the demo, read, and changed.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Copies the manifests of one directory into another, which is made.
///
/// # Errors
/// If a file cannot be copied.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for file in files(from)? {
        let name = file.file_name().context("a manifest has a name")?;
        std::fs::copy(&file, to.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    Ok(())
}

/// All objects of a directory with the file that each is in, by name of the file.
///
/// # Errors
/// If a file cannot be read or is not YAML.
pub fn read(directory: &Path) -> Result<Vec<(PathBuf, Value)>> {
    let mut objects = Vec::new();
    for file in files(directory)? {
        objects.extend(documents(&file)?.into_iter().map(|object| (file.clone(), object)));
    }
    Ok(objects)
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn documents(file: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_saphyr::from_multiple(&text).with_context(|| format!("{} is not YAML", file.display()))
}

/// Takes the endpoints of a pod (given by its addresses' end, say `.1.12`) out of a Service's slices. Returns the changed slices.
pub fn without_endpoint(objects: &[Value], service: &str, addresses: &[&str]) -> Vec<Value> {
    let mut changed = Vec::new();
    for object in objects {
        let mut slice = object.clone();
        if slice["kind"] != "EndpointSlice" || slice["metadata"]["labels"]["kubernetes.io/service-name"] != service {
            continue;
        }
        let Some(endpoints) = slice["endpoints"].as_array_mut() else { continue };
        let before = endpoints.len();
        endpoints.retain(|e| {
            !e["addresses"].as_array().is_some_and(|list| list.iter().any(|a| addresses.iter().any(|x| a == x)))
        });
        if endpoints.len() != before {
            changed.push(slice);
        }
    }
    changed
}

/// Removes a pod's endpoints from a Service in the manifests, as an editor does: the new file replaces the old one at once.
///
/// # Errors
/// If the file cannot be read or written, or the pod is not there.
pub fn remove_endpoint(file: &Path, service: &str, addresses: &[&str]) -> Result<()> {
    let objects = documents(file)?;
    let changed = without_endpoint(&objects, service, addresses);
    if changed.is_empty() {
        bail!("{} has no endpoint {}", file.display(), addresses.join(" "));
    }
    let same = |a: &Value, b: &Value| a["kind"] == b["kind"] && a["metadata"]["name"] == b["metadata"]["name"];
    let mut text = String::new();
    for object in &objects {
        let object = changed.iter().find(|c| same(c, object)).unwrap_or(object);
        // JSON is YAML too.
        text += &format!("---\n{}\n", serde_json::to_string_pretty(object)?);
    }
    let new = file.with_extension("new");
    std::fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    std::fs::rename(&new, file).with_context(|| format!("cannot replace {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_endpoint_goes_and_all_else_stays() {
        let examples = crate::command::workspace_root().unwrap().join("deploy/examples");
        let directory = tempfile::tempdir().unwrap();
        copy(&examples, directory.path()).unwrap();
        let before = read(directory.path()).unwrap();
        let gone = ["10.244.1.12", "fd00:10:244:1::12"];
        remove_endpoint(&directory.path().join("web.yaml"), "web", &gone).unwrap();
        let after = read(directory.path()).unwrap();
        assert_eq!(before.len(), after.len());
        let differing: Vec<_> = before.iter().zip(&after).filter(|(a, b)| a.1 != b.1).collect();
        assert_eq!(differing.len(), 2, "the slice of each family");
        for (old, new) in differing {
            assert_eq!(old.1["endpoints"].as_array().unwrap().len(), 3);
            assert_eq!(new.1["endpoints"].as_array().unwrap().len(), 2);
            assert!(!new.1.to_string().contains("1::12") && !new.1.to_string().contains("10.244.1.12"));
        }
        assert!(remove_endpoint(&directory.path().join("web.yaml"), "web", &gone).is_err(), "it is gone already");
    }
}
