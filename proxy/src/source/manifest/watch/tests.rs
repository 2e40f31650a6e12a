//! Every kind of change to a real directory.

use super::super::tests::{names, service};
use super::*;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// Far beyond the time that any test waits, so that only inotify can have told.
const NEVER: Duration = Duration::from_secs(3600);
const PATIENCE: Duration = Duration::from_secs(10);

struct World {
    root: TempDir,
    dir: PathBuf,
    events: mpsc::Receiver<SourceEvent>,
}

impl World {
    fn start(prepare: impl FnOnce(&Path), poll: Duration, inotify: bool) -> Self {
        let root = TempDir::new().unwrap();
        let dir = root.path().join("manifests");
        prepare(&dir);
        let (sender, events) = mpsc::channel(16);
        let source = ManifestSource { poll, inotify, ..ManifestSource::new(&dir, "node-1", Node::default()) };
        tokio::spawn(source.run(sender));
        Self { root, dir, events }
    }

    fn told(prepare: impl FnOnce(&Path)) -> Self {
        Self::start(prepare, NEVER, true)
    }

    fn polled(prepare: impl FnOnce(&Path)) -> Self {
        Self::start(prepare, Duration::from_millis(50), false)
    }

    async fn event(&mut self) -> SourceEvent {
        tokio::time::timeout(PATIENCE, self.events.recv()).await.expect("an event in time").expect("the source runs")
    }

    async fn synced(&mut self, expected: &[&str]) {
        assert_eq!(self.deltas().await, expected);
        assert_eq!(self.event().await, SourceEvent::Synced);
    }

    async fn deltas(&mut self) -> Vec<String> {
        match self.event().await {
            SourceEvent::Deltas(deltas) => names(&deltas),
            other => panic!("expected deltas, got {other:?}"),
        }
    }

    async fn problem(&mut self) -> String {
        match self.event().await {
            SourceEvent::Problem(problem) => problem.to_string(),
            other => panic!("expected a problem, got {other:?}"),
        }
    }

    /// Nothing is told for a while.
    async fn quiet(&mut self) {
        if let Ok(event) = tokio::time::timeout(Duration::from_millis(600), self.events.recv()).await {
            panic!("expected nothing, got {event:?}");
        }
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.dir.join(name), text).unwrap();
    }
}

fn with_a(dir: &Path) {
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("a.yaml"), service("a", "10.96.0.1")).unwrap();
}

#[tokio::test]
async fn created_edited_replaced_and_removed_files_are_noticed_at_once() {
    let mut world = World::told(with_a);
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;

    world.write("b.yml", &service("b", "10.96.0.2"));
    assert_eq!(world.deltas().await, ["+default/b 10.96.0.2"]);

    world.write("a.yaml", &service("a", "10.96.0.11"));
    assert_eq!(world.deltas().await, ["+default/a 10.96.0.11"]);

    // As editors and `kubectl` write: a new file takes the name. The new file comes from outside the directory.
    let fresh = world.root.path().join("fresh");
    fs::write(&fresh, service("a", "10.96.0.12")).unwrap();
    fs::rename(&fresh, world.dir.join("a.yaml")).unwrap();
    assert_eq!(world.deltas().await, ["+default/a 10.96.0.12"]);

    fs::remove_file(world.dir.join("b.yml")).unwrap();
    assert_eq!(world.deltas().await, ["-default/b"]);

    // Renamed away and to a name that is not read.
    fs::rename(world.dir.join("a.yaml"), world.dir.join("a.yaml.bak")).unwrap();
    assert_eq!(world.deltas().await, ["-default/a"]);
}

#[tokio::test]
async fn other_and_hidden_files_and_comments_change_nothing() {
    let mut world = World::told(with_a);
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
    world.write("notes.txt", "x");
    world.write(".hidden.yaml", &service("h", "10.96.0.9"));
    world.write("a.yaml", &format!("# a comment\n{}", service("a", "10.96.0.1")));
    fs::create_dir(world.dir.join("sub.yaml")).unwrap();
    world.quiet().await;
    world.write("b.yaml", &service("b", "10.96.0.2"));
    assert_eq!(world.deltas().await, ["+default/b 10.96.0.2"]);
}

/// As kubelet mounts a ConfigMap: `a.yaml` → `..data/a.yaml`, `..data` → a directory with a time in its name; an update makes
/// a new directory and renames a new link over `..data`.
fn config_map(dir: &Path) {
    fs::create_dir_all(dir.join("..2026_1")).unwrap();
    fs::write(dir.join("..2026_1/a.yaml"), service("a", "10.96.0.1")).unwrap();
    symlink("..2026_1", dir.join("..data")).unwrap();
    symlink("..data/a.yaml", dir.join("a.yaml")).unwrap();
}

fn swap_config_map(dir: &Path) {
    fs::create_dir(dir.join("..2026_2")).unwrap();
    fs::write(dir.join("..2026_2/a.yaml"), service("a", "10.96.0.2")).unwrap();
    fs::write(dir.join("..2026_2/b.yaml"), service("b", "10.96.0.3")).unwrap();
    symlink("..2026_2", dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    symlink("..data/b.yaml", dir.join("b.yaml")).unwrap();
    fs::remove_dir_all(dir.join("..2026_1")).unwrap();
}

#[tokio::test]
async fn a_config_map_update_is_one_change() {
    for mut world in [World::told(config_map), World::polled(config_map)] {
        world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
        swap_config_map(&world.dir);
        assert_eq!(world.deltas().await, ["+default/a 10.96.0.2", "+default/b 10.96.0.3"]);
        world.quiet().await;
    }
}

#[tokio::test]
async fn a_change_behind_a_symbolic_link_is_noticed_by_the_poll() {
    let mut world = World::polled(|dir| {
        let elsewhere = dir.parent().unwrap().join("elsewhere.yaml");
        fs::write(&elsewhere, service("a", "10.96.0.1")).unwrap();
        fs::create_dir(dir).unwrap();
        symlink(elsewhere, dir.join("a.yaml")).unwrap();
    });
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
    fs::write(world.root.path().join("elsewhere.yaml"), service("a", "10.96.0.2")).unwrap();
    assert_eq!(world.deltas().await, ["+default/a 10.96.0.2"]);
}

#[tokio::test]
async fn a_broken_file_is_told_once_keeps_its_objects_and_can_be_mended() {
    let mut world = World::told(with_a);
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
    world.write("a.yaml", "kind: [\n");
    let problem = world.problem().await;
    assert!(problem.starts_with("error: a.yaml:"), "{problem}");
    // The next look finds the same problem, which is not told again, nor is the object gone.
    world.write("b.yaml", &service("b", "10.96.0.2"));
    assert_eq!(world.deltas().await, ["+default/b 10.96.0.2"]);
    world.write("a.yaml", &service("a", "10.96.0.3"));
    assert_eq!(world.deltas().await, ["+default/a 10.96.0.3"]);
    // Broken again: told again.
    world.write("a.yaml", "kind: [\n");
    assert_eq!(world.problem().await, problem);
}

#[tokio::test]
async fn a_missing_directory_is_waited_for() {
    let mut world = World::start(|_| (), Duration::from_millis(50), true);
    let problem = world.problem().await;
    assert!(problem.contains("manifests: No such file or directory") && problem.contains("waiting"), "{problem}");
    world.quiet().await;
    with_a(&world.dir);
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
}

#[tokio::test]
async fn a_removed_directory_keeps_the_last_picture_and_its_successor_is_watched() {
    let mut world = World::start(with_a, Duration::from_millis(50), true);
    world.synced(&["+default/a 10.96.0.1", "+node node-1"]).await;
    // In one step, as an unmount would be.
    fs::rename(&world.dir, world.root.path().join("away")).unwrap();
    let problem = world.problem().await;
    assert!(problem.contains("the last known objects stay in force"), "{problem}");
    fs::create_dir(&world.dir).unwrap();
    world.write("b.yaml", &service("b", "10.96.0.2"));
    // One look or two, depending on when it happens; in the end a is gone and b is there.
    let mut seen = world.deltas().await;
    while seen.len() < 2 {
        seen.extend(world.deltas().await);
    }
    assert_eq!(seen, ["+default/b 10.96.0.2", "-default/a"]);
    world.write("b.yaml", &service("b", "10.96.0.3"));
    assert_eq!(world.deltas().await, ["+default/b 10.96.0.3"]);
}

#[tokio::test]
async fn an_empty_directory_is_a_complete_picture() {
    let mut world = World::told(|dir| fs::create_dir(dir).unwrap());
    world.synced(&["+node node-1"]).await;
}

#[test]
fn check_counts_objects_and_errors() {
    let root = TempDir::new().unwrap();
    fs::write(root.path().join("a.yaml"), format!("{}---\n{}", service("a", "10.96.0.1"), service("b", "nonsense")))
        .unwrap();
    fs::write(root.path().join("binary.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    symlink("nowhere", root.path().join("dangling.yaml")).unwrap();
    let report = super::super::check(root.path()).unwrap();
    assert_eq!((report.files, report.errors()), (3, report.problems.len()));
    assert_eq!(report.counts, BTreeMap::from([(super::super::Kind::Service, 1)]));
    let locations: BTreeSet<&str> = report.problems.iter().map(|problem| problem.location.as_str()).collect();
    assert!(locations.contains("binary.yaml") && locations.contains("dangling.yaml"), "{locations:?}");
    let missing = super::super::check(&root.path().join("missing")).unwrap_err();
    assert!(missing.to_string().contains("cannot read the manifest directory"), "{missing}");
}
