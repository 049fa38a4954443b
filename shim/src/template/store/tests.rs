//! The store with a builder that needs no KVM.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use thaw_vmm_control::{TouchedPages, WorkingSet};

use super::super::BuildError;
use super::super::digest::descriptor_path;
use super::super::key::tests::inputs;
use super::*;

mod no_room;
mod processes;

/// Writes files that are told apart by the number of the build.
#[derive(Default)]
struct FakeBuilder {
    builds: AtomicUsize,
    delay: Duration,
}

impl FakeBuilder {
    fn count(&self) -> usize {
        self.builds.load(Ordering::SeqCst)
    }
}

const MEMORY_SIZE: u64 = 256 << 20;
const DATA: usize = 1 << 20;

/// What a start from any of them touches.
fn working_set() -> WorkingSet {
    let pages = TouchedPages {
        first: 2048,
        count: 3,
        written: true,
    };
    WorkingSet::new(vec![pages]).unwrap()
}

impl Builder for FakeBuilder {
    fn build(&self, _: &KeyInputs, state: &File, memory: &File) -> Result<WorkingSet, BuildError> {
        let number = self.builds.fetch_add(1, Ordering::SeqCst) + 1;
        std::thread::sleep(self.delay);
        let write = || {
            state.write_all_at(&[number as u8; 3000], 0)?;
            memory.set_len(MEMORY_SIZE)?;
            memory.write_all_at(&[0xaa; DATA], 8 << 20)?;
            memory.write_all_at(&[number as u8; 5000], 64 << 20)
        };
        write().map_err(|error: io::Error| BuildError::Snapshot(error.to_string()))?;
        Ok(working_set())
    }
}

struct Failing;

impl Builder for Failing {
    fn build(&self, _: &KeyInputs, _: &File, _: &File) -> Result<WorkingSet, BuildError> {
        let (reason, console) = ("no".to_owned(), "Kernel panic\n".to_owned());
        Err(BuildError::Guest {
            doing: "booting the guest",
            reason,
            console,
        })
    }
}

/// A store with directories of its own.
struct Fixture {
    root: tempfile::TempDir,
    store: TemplateStore,
}

impl Fixture {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let store = TemplateStore {
            directory: root.path().join("lib/templates"),
            markers: Markers::new(root.path().join("run/markers")),
            budget: budget::DISK_BUDGET,
        };
        Self { root, store }
    }

    fn obtain(&self, builder: &FakeBuilder) -> Template {
        self.store.obtain_with(&inputs(), builder).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.store
            .directory
            .join(inputs().key().to_string())
            .join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.store.directory).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Number of the build that made a template, from both of its files.
fn build_number(template: &Template) -> u8 {
    let mut bytes = [0; 2];
    template.state.read_exact_at(&mut bytes[..1], 2999).unwrap();
    template
        .memory
        .read_exact_at(&mut bytes[1..], 64 << 20)
        .unwrap();
    assert_eq!(bytes[0], bytes[1]);
    bytes[0]
}

/// What a VMM has been given stays as it is, whatever becomes of the VMM.
#[test]
fn test_template_in_use_cannot_be_written() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let template = fixture.obtain(&builder);
    for file in [&template.state, &template.memory] {
        let again = OpenOptions::new()
            .write(true)
            .open(descriptor_path(file))
            .unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::ReadOnlyFilesystem);
    }
}

#[test]
fn test_first_call_builds_and_second_finds() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    let first = fixture.obtain(&builder);
    assert_eq!((first.origin, build_number(&first)), (Origin::Built, 1));
    assert_eq!(first.memory.metadata().unwrap().len(), MEMORY_SIZE);
    let second = fixture.obtain(&builder);
    assert_eq!((second.origin, build_number(&second)), (Origin::Stored, 1));
    assert_eq!(second.shape, inputs().shape);
    assert_eq!(second.key, inputs().key());
    assert_eq!(
        (first.working_set, second.working_set),
        (working_set(), working_set())
    );
    let key = inputs().key().to_string();
    assert_eq!(fixture.names(), [key.clone(), format!("{key}.lock")]);
}

#[test]
fn test_published_files_are_for_their_owner_only_and_open_for_reading() {
    let fixture = Fixture::new();
    let template = fixture.obtain(&FakeBuilder::default());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&fixture.store.directory), 0o700);
    assert_eq!(mode(&fixture.path("")), 0o700);
    for name in ["manifest.json", "state", "memory"] {
        assert_eq!(mode(&fixture.path(name)), 0o600, "{name}");
    }
    for file in [&template.state, &template.memory] {
        assert!(file.write_at(b"x", 0).is_err());
    }
}

#[test]
fn test_memory_file_stays_sparse() {
    use std::os::unix::fs::MetadataExt;
    let template = Fixture::new().obtain(&FakeBuilder::default());
    assert!(template.memory.metadata().unwrap().blocks() * 512 < 4 << 20);
}

#[test]
fn test_other_inputs_get_another_template() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let mut other = inputs();
    other.host.kernel.push('x');
    let template = fixture.store.obtain_with(&other, &builder).unwrap();
    assert_eq!(
        (template.origin, build_number(&template)),
        (Origin::Built, 2)
    );
    assert_eq!(fixture.store.keys().unwrap().len(), 2);
}

/// Change a byte in place, as a failing disk does, and put the times back where that can be done.
fn flip_byte(path: &Path, offset: u64) {
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    file.set_modified(modified).unwrap();
}

#[test]
fn test_every_kind_of_damage_is_found_and_the_template_built_again() {
    type Damage = (&'static str, fn(&Fixture));
    let damages: [Damage; 17] = [
        ("state truncated", |f| {
            fs::OpenOptions::new()
                .write(true)
                .open(f.path("state"))
                .unwrap()
                .set_len(10)
                .unwrap();
        }),
        ("memory truncated", |f| {
            let file = fs::OpenOptions::new()
                .write(true)
                .open(f.path("memory"))
                .unwrap();
            file.set_len(MEMORY_SIZE - 4096).unwrap();
        }),
        ("memory extended", |f| {
            let file = fs::OpenOptions::new()
                .write(true)
                .open(f.path("memory"))
                .unwrap();
            file.set_len(MEMORY_SIZE + 4096).unwrap();
        }),
        ("state byte", |f| flip_byte(&f.path("state"), 1234)),
        ("memory byte", |f| {
            flip_byte(&f.path("memory"), (8 << 20) + 77)
        }),
        ("memory byte in a hole", |f| {
            flip_byte(&f.path("memory"), 200 << 20)
        }),
        ("state missing", |f| {
            fs::remove_file(f.path("state")).unwrap()
        }),
        ("memory missing", |f| {
            fs::remove_file(f.path("memory")).unwrap()
        }),
        ("manifest missing", |f| {
            fs::remove_file(f.path("manifest.json")).unwrap()
        }),
        ("manifest empty", |f| {
            fs::write(f.path("manifest.json"), "").unwrap()
        }),
        ("manifest byte", |f| {
            let text = fs::read_to_string(f.path("manifest.json")).unwrap();
            let kernel = inputs().kernel.to_string();
            let other = format!("0{}", &kernel[1..]);
            fs::write(f.path("manifest.json"), text.replace(&kernel, &other)).unwrap();
        }),
        ("manifest of another template", |f| {
            let mut other = inputs();
            other.host.tsc_khz = None;
            f.store
                .obtain_with(&other, &FakeBuilder::default())
                .unwrap();
            let other = f
                .store
                .directory
                .join(other.key().to_string())
                .join("manifest.json");
            fs::copy(other, f.path("manifest.json")).unwrap();
        }),
        ("whole template of another key", |f| {
            let mut other = inputs();
            other.host.tsc_khz = None;
            f.store
                .obtain_with(&other, &FakeBuilder::default())
                .unwrap();
            fs::remove_dir_all(f.path("")).unwrap();
            let other = f.store.directory.join(other.key().to_string());
            fs::rename(other, f.path("")).unwrap();
        }),
        ("symbolic link", |f| {
            let elsewhere = f.root.path().join("elsewhere");
            fs::rename(f.path("memory"), &elsewhere).unwrap();
            symlink(&elsewhere, f.path("memory")).unwrap();
        }),
        ("FIFO", |f| {
            fs::remove_file(f.path("state")).unwrap();
            let mode = nix::sys::stat::Mode::S_IRUSR;
            nix::unistd::mkfifo(&f.path("state"), mode).unwrap();
        }),
        ("directory", |f| {
            fs::remove_file(f.path("state")).unwrap();
            fs::create_dir(f.path("state")).unwrap();
        }),
        ("file in the directory's place", |f| {
            fs::remove_dir_all(f.path("")).unwrap();
            fs::write(f.store.directory.join(inputs().key().to_string()), "x").unwrap();
        }),
    ];
    for (name, damage) in damages {
        let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
        fixture.obtain(&builder);
        damage(&fixture);
        let template = fixture.obtain(&builder);
        assert_eq!(
            (template.origin, build_number(&template)),
            (Origin::Built, 2),
            "{name}"
        );
        let template = fixture.obtain(&builder);
        assert_eq!(
            (template.origin, build_number(&template)),
            (Origin::Stored, 2),
            "{name}"
        );
    }
}

#[test]
fn test_touched_but_equal_files_are_digested_and_kept() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let state = fs::OpenOptions::new()
        .write(true)
        .open(fixture.path("state"))
        .unwrap();
    state.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    assert!(matches!(
        fixture.store.find(inputs().key()),
        Found::Unverified(_)
    ));
    assert_eq!(fixture.obtain(&builder).origin, Origin::Stored);
    assert!(matches!(
        fixture.store.find(inputs().key()),
        Found::Verified(_)
    ));
}

#[test]
fn test_first_use_after_a_boot_digests_and_finds_damage_that_times_do_not_show() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let key = inputs().key();
    flip_byte(&fixture.path("memory"), 8 << 20);
    // A marker with the damaged file's times, but of another boot.
    let Found::Unverified(entry) = fixture.store.find(key) else {
        panic!("damage not seen")
    };
    let marker = Marker {
        boot_id: "another".to_owned(),
        ..entry.marker().unwrap()
    };
    fixture.store.markers.write(key, &marker);
    assert_eq!(fixture.obtain(&builder).origin, Origin::Built);
    assert_eq!(builder.count(), 2);
}

#[test]
fn test_unusable_marker_only_costs_a_digest() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let marker = fixture
        .root
        .path()
        .join(format!("run/markers/{}.json", inputs().key()));
    for text in ["", "{}", "null", "{\"boot_id\":1}"] {
        fs::write(&marker, text).unwrap();
        assert_eq!(fixture.obtain(&builder).origin, Origin::Stored);
    }
    assert_eq!(builder.count(), 1);
}

#[test]
fn test_many_first_calls_at_once_build_one_template() {
    let fixture = Fixture::new();
    let builder = FakeBuilder {
        delay: Duration::from_millis(100),
        ..FakeBuilder::default()
    };
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                assert_eq!(build_number(&fixture.obtain(&builder)), 1);
            });
        }
    });
    assert_eq!(builder.count(), 1);
}

#[test]
fn test_failed_build_leaves_nothing_and_says_why() {
    let fixture = Fixture::new();
    let error = fixture
        .store
        .obtain_with(&inputs(), &Failing)
        .unwrap_err()
        .to_string();
    assert!(error.contains("booting the guest: no"), "{error}");
    assert!(error.contains("Kernel panic"), "{error}");
    assert!(error.contains("2x256M"), "{error}");
    assert_eq!(fixture.names(), [format!("{}.lock", inputs().key())]);
}

#[test]
fn test_what_a_killed_build_left_is_removed() {
    let fixture = Fixture::new();
    let stale = fixture.store.directory.join(".building-7-0");
    fs::create_dir_all(&stale).unwrap();
    fs::write(stale.join("memory"), b"x").unwrap();
    fixture.obtain(&FakeBuilder::default());
    assert!(!stale.exists());
}

/// Inputs that differ by `number`.
fn numbered(number: u64) -> KeyInputs {
    let mut inputs = inputs();
    inputs.host.tsc_khz = Some(number);
    inputs
}

#[test]
fn test_least_recently_used_templates_go_when_the_budget_is_reached() {
    let (mut fixture, builder) = (Fixture::new(), FakeBuilder::default());
    for number in 0..3 {
        fixture
            .store
            .obtain_with(&numbered(number), &builder)
            .unwrap();
    }
    let one = budget::allocated_bytes(&fixture.store.directory, numbered(0).key());
    assert!(one >= DATA as u64);
    // In order of use: 1, 2, 0.
    for (number, age) in [(0, 10), (1, 30), (2, 20)] {
        let path = KeyLock::path(&fixture.store.directory, numbered(number).key());
        let used = SystemTime::now() - Duration::from_secs(age);
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_modified(used)
            .unwrap();
    }
    fixture.store.budget = 2 * one + one / 2;
    let held = fixture.store.obtain_with(&numbered(2), &builder).unwrap();
    // Use of 2 makes it the most recent; with a fourth, two must go.
    fixture.store.obtain_with(&numbered(3), &builder).unwrap();
    let mut expected = [numbered(2).key(), numbered(3).key()];
    expected.sort();
    assert_eq!(fixture.store.keys().unwrap(), expected);
    assert_eq!(
        fixture.names().len(),
        4,
        "locks of removed templates go too"
    );

    // A removed template lives on for those who have it.
    fixture.store.remove(numbered(2).key()).unwrap();
    assert_eq!(build_number(&held), 3);
}

#[test]
fn test_template_that_somebody_locks_is_not_removed() {
    let (mut fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.store.obtain_with(&numbered(0), &builder).unwrap();
    let lock = KeyLock::acquire(&fixture.store.directory, numbered(0).key()).unwrap();
    fixture.store.budget = 1;
    fixture.store.obtain_with(&numbered(1), &builder).unwrap();
    assert_eq!(fixture.store.keys().unwrap().len(), 2);
    drop(lock);
    fixture.store.obtain_with(&numbered(2), &builder).unwrap();
    assert_eq!(fixture.store.keys().unwrap(), [numbered(2).key()]);
}

#[test]
fn test_verify_finds_what_the_marker_would_not_and_it_is_built_again() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fixture.obtain(&builder);
    let key = inputs().key();
    assert_eq!(fixture.store.verify(key).unwrap(), Ok(()));
    flip_byte(&fixture.path("state"), 5);
    // As if the damage had come without a trace in the metadata.
    let Found::Unverified(entry) = fixture.store.find(key) else {
        panic!("damage not seen")
    };
    fixture.store.mark(key, entry.marker());
    assert_eq!(fixture.store.list().unwrap()[0].trust, Trust::Verified);
    let reason = fixture.store.verify(key).unwrap().unwrap_err();
    assert!(reason.contains("state"), "{reason}");
    assert_eq!(fixture.store.list().unwrap()[0].trust, Trust::Unverified);
    assert_eq!(build_number(&fixture.obtain(&builder)), 2);
}

#[test]
fn test_list_resolve_and_remove() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    assert!(fixture.store.list().unwrap().is_empty());
    fixture.obtain(&builder);
    let key = inputs().key();
    let listed = fixture.store.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].key, key);
    assert_eq!(listed[0].trust, Trust::Verified);
    assert_eq!(listed[0].manifest.as_ref().unwrap().shape(), inputs().shape);
    assert!(listed[0].last_use_ns.is_some());

    assert_eq!(fixture.store.resolve(&key.short()).unwrap(), key);
    assert!(matches!(
        fixture.store.resolve(""),
        Err(TemplateError::Ambiguous(_))
    ));
    assert!(matches!(
        fixture.store.resolve("xyz"),
        Err(TemplateError::Unknown { .. })
    ));

    fs::write(fixture.path("manifest.json"), "{}").unwrap();
    let listed = fixture.store.list().unwrap();
    assert_eq!(listed[0].trust, Trust::Damaged);
    assert!(listed[0].manifest.is_err());

    fixture.store.remove(key).unwrap();
    assert!(fixture.names().is_empty());
    assert!(matches!(
        fixture.store.remove(key),
        Err(TemplateError::Unknown { .. })
    ));
    assert!(matches!(
        fixture.store.verify(key),
        Err(TemplateError::Unknown { .. })
    ));
}
