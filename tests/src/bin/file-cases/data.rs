//! What is in files: sizes, holes, appending, direct access, mappings, copies.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, copy_file_range, fallocate, linkat, openat, seek,
};

use crate::mapping::Mapping;
use crate::{Case, Failure, Outcome, done, words};

pub const CASES: &[Case] = &[
    ("write and read 3 MiB", write_and_read),
    ("sparse file", sparse),
    ("very large file", very_large),
    ("beyond what an offset can say", too_large),
    ("find data and holes", data_and_holes),
    ("punch a hole", punch_hole),
    ("allocate and keep the size", allocate_keep_size),
    ("allocate", || {
        let file = File::create("f")?;
        Ok(format!(
            "{} {}",
            done(fallocate(&file, FallocateFlags::empty(), 0, 10_000)),
            file.metadata()?.len()
        ))
    }),
    ("zero a range", || range("zero", FallocateFlags::ZERO_RANGE)),
    ("collapse a range", || {
        range("collapse", FallocateFlags::COLLAPSE_RANGE)
    }),
    ("copy a range", copy_range),
    ("copy a range onto itself", copy_range_onto_itself),
    ("append", append),
    ("append by two, one after the other", append_by_two),
    ("append and read back", append_and_read),
    ("direct access", direct),
    ("direct access that is not aligned", direct_unaligned),
    ("truncate shorter and longer", truncate),
    ("truncate at open", || {
        fs::write("f", "content")?;
        File::create("f")?;
        Ok(fs::metadata("f")?.len().to_string())
    }),
    ("truncate a directory", || {
        fs::create_dir("d")?;
        Ok(done(OpenOptions::new().write(true).open("d")))
    }),
    ("truncate through a descriptor that reads", || {
        fs::write("f", "content")?;
        Ok(done(File::open("f")?.set_len(1)))
    }),
    ("write to a descriptor that reads", || {
        fs::write("f", "content")?;
        Ok(done(File::open("f")?.write(b"x")))
    }),
    ("read of a directory", || {
        fs::create_dir("d")?;
        Ok(done(File::open("d")?.read(&mut [0; 10])))
    }),
    ("mapped, shared and written", mapped),
    ("written and seen in a mapping", mapped_later),
    ("mapped and unlinked", mapped_unlinked),
    ("mapped by two", mapped_twice),
    ("without a name", without_name),
    ("without a name, then linked", without_name_linked),
    ("without a name, exclusively", without_name_exclusive),
    ("open anew by descriptor", open_anew),
    ("synchronise", || {
        let mut file = File::create("f")?;
        file.write_all(b"x")?;
        let directory = File::open(".")?;
        Ok(format!(
            "{} {} {}",
            done(file.sync_all()),
            done(file.sync_data()),
            done(directory.sync_all())
        ))
    }),
    ("write at an offset and read around it", || {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open("f")?;
        file.write_all_at(b"end", 5000)?;
        let mut bytes = [1; 6];
        file.read_exact_at(&mut bytes, 4997)?;
        Ok(format!("{bytes:?}"))
    }),
    ("read past the end", || {
        fs::write("f", "four")?;
        Ok(words(File::open("f")?.read_at(&mut [0; 10], 100)))
    }),
];

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

fn new_file() -> Result<File, Failure> {
    Ok(OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open("f")?)
}

fn write_and_read() -> Outcome {
    let bytes = pattern(3 << 20);
    fs::write("f", &bytes)?;
    Ok(format!("{}", fs::read("f")? == bytes))
}

fn sparse() -> Outcome {
    let mut file = new_file()?;
    file.seek(SeekFrom::Start(100 << 20))?;
    file.write_all(b"end")?;
    let metadata = file.metadata()?;
    Ok(format!(
        "{} sparse {}",
        metadata.len(),
        metadata.blocks() < 1000
    ))
}

fn very_large() -> Outcome {
    let file = new_file()?;
    let length = 1 << 40;
    file.set_len(length)?;
    file.write_all_at(b"far", length - 3)?;
    let mut bytes = [0; 3];
    file.read_exact_at(&mut bytes, length - 3)?;
    Ok(format!("{} {bytes:?}", file.metadata()?.len()))
}

fn too_large() -> Outcome {
    let file = new_file()?;
    let set = done(rustix::fs::ftruncate(&file, u64::MAX));
    Ok(format!(
        "{set} {}",
        done(file.write_at(b"x", i64::MAX as u64))
    ))
}

fn with_holes() -> Result<File, Failure> {
    let file = new_file()?;
    file.set_len(3 << 20)?;
    file.write_all_at(&[1; 65536], 1 << 20)?;
    file.sync_all()?;
    Ok(file)
}

fn holes(file: &File) -> String {
    use rustix::fs::SeekFrom::{Data, Hole};
    let places = [
        Data(0),
        Hole(0),
        Hole(1 << 20),
        Data(2 << 20),
        Data(4 << 20),
    ];
    places.map(|place| words(seek(file, place))).join(" ")
}

fn data_and_holes() -> Outcome {
    Ok(holes(&with_holes()?))
}

fn punch_hole() -> Outcome {
    let file = new_file()?;
    file.write_all_at(&[1; 1 << 20], 0)?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punched = done(fallocate(&file, flags, 65536, 65536));
    let mut bytes = [9; 3];
    file.read_exact_at(&mut bytes, 65535)?;
    Ok(format!("{punched} {bytes:?} {}", file.metadata()?.len()))
}

fn allocate_keep_size() -> Outcome {
    let file = new_file()?;
    let result = done(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20));
    let metadata = file.metadata()?;
    Ok(format!(
        "{result} {} blocks {}",
        metadata.len(),
        metadata.blocks() >= 2048
    ))
}

fn range(name: &str, flags: FallocateFlags) -> Outcome {
    let file = new_file()?;
    file.write_all_at(&[1; 3 * 65536], 0)?;
    let result = done(fallocate(&file, flags, 65536, 65536));
    Ok(format!("{name} {result} {}", file.metadata()?.len()))
}

fn copy_range() -> Outcome {
    let bytes = pattern(300_000);
    fs::write("a", &bytes)?;
    let (from, to) = (File::open("a")?, File::create("b")?);
    let mut copied = 0;
    while copied < bytes.len() {
        match copy_file_range(&from, None, &to, None, bytes.len() - copied)? {
            0 => break,
            count => copied += count,
        }
    }
    Ok(format!("{copied} {}", fs::read("b")? == bytes))
}

fn copy_range_onto_itself() -> Outcome {
    let file = new_file()?;
    file.write_all_at(&[1; 8192], 0)?;
    let (mut from, mut to) = (0, 100);
    Ok(done(copy_file_range(
        &file,
        Some(&mut from),
        &file,
        Some(&mut to),
        4096,
    )))
}

fn appender() -> Result<File, Failure> {
    Ok(OpenOptions::new().append(true).create(true).open("f")?)
}

fn append() -> Outcome {
    let mut file = appender()?;
    file.write_all(b"one ")?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(b"two")?;
    Ok(fs::read_to_string("f")?)
}

fn append_by_two() -> Outcome {
    let (mut one, mut other) = (appender()?, appender()?);
    for _ in 0..3 {
        one.write_all(b"1")?;
        other.write_all(b"2")?;
    }
    Ok(fs::read_to_string("f")?)
}

fn append_and_read() -> Outcome {
    fs::write("f", "start ")?;
    let mut reader = File::open("f")?;
    let mut text = String::new();
    reader.read_to_string(&mut text)?;
    appender()?.write_all(b"end")?;
    reader.read_to_string(&mut text)?;
    Ok(text)
}

/// Bytes in the middle of `bytes` whose address is a multiple of a page.
fn aligned(bytes: &mut [u8], length: usize) -> &mut [u8] {
    let offset = bytes.as_ptr().align_offset(4096);
    &mut bytes[offset..offset + length]
}

fn direct_file() -> Result<File, Failure> {
    let direct = OFlags::DIRECT.bits() as i32;
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(direct);
    Ok(options.open("f")?)
}

fn direct() -> Outcome {
    let file = direct_file()?;
    let mut bytes = vec![7; 4 * 4096];
    file.write_all_at(aligned(&mut bytes, 8192), 0)?;
    let mut back = vec![0; 4 * 4096];
    let back = aligned(&mut back, 8192);
    file.read_exact_at(back, 0)?;
    Ok(format!(
        "{} {}",
        back.iter().all(|byte| *byte == 7),
        fs::read("f")?.len()
    ))
}

fn direct_unaligned() -> Outcome {
    let file = direct_file()?;
    Ok(done(file.write_at(&[1; 100], 3)))
}

fn truncate() -> Outcome {
    fs::write("f", "0123456789")?;
    let file = OpenOptions::new().read(true).write(true).open("f")?;
    file.set_len(3)?;
    file.set_len(6)?;
    Ok(format!("{:?}", fs::read("f")?))
}

fn mapped() -> Outcome {
    let file = new_file()?;
    file.set_len(10_000)?;
    let mapping = Mapping::new(&file, 10_000)?;
    mapping.set(9000, b'm');
    mapping.sync()?;
    let mut byte = [0];
    File::open("f")?.read_exact_at(&mut byte, 9000)?;
    Ok(format!("{byte:?} {}", fs::read("f")?[9000]))
}

fn mapped_later() -> Outcome {
    let file = new_file()?;
    file.set_len(10_000)?;
    let mapping = Mapping::new(&file, 10_000)?;
    let before = mapping.get(5000);
    file.write_all_at(b"w", 5000)?;
    Ok(format!("{before} {}", mapping.get(5000)))
}

fn mapped_unlinked() -> Outcome {
    let file = new_file()?;
    file.set_len(10_000)?;
    let mapping = Mapping::new(&file, 10_000)?;
    fs::remove_file("f")?;
    mapping.set(1, 5);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1)?;
    Ok(format!("{byte:?} {}", done(mapping.sync())))
}

fn mapped_twice() -> Outcome {
    let file = new_file()?;
    file.set_len(4096)?;
    let other = OpenOptions::new().read(true).write(true).open("f")?;
    let (one, two) = (Mapping::new(&file, 4096)?, Mapping::new(&other, 4096)?);
    one.set(10, 3);
    Ok(two.get(10).to_string())
}

fn nameless(extra: OFlags) -> Result<File, Failure> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | extra;
    Ok(File::from(openat(
        CWD,
        ".",
        flags,
        Mode::from_raw_mode(0o600),
    )?))
}

fn without_name() -> Outcome {
    let mut file = nameless(OFlags::empty())?;
    file.write_all(b"one")?;
    let metadata = file.metadata()?;
    Ok(format!(
        "{} links {} in {}",
        metadata.len(),
        metadata.nlink(),
        fs::read_dir(".")?.count()
    ))
}

fn link_nameless(file: &File) -> Result<(), Failure> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, path, CWD, "linked", AtFlags::SYMLINK_FOLLOW)?)
}

fn without_name_linked() -> Outcome {
    let mut file = nameless(OFlags::empty())?;
    file.write_all(b"one")?;
    link_nameless(&file)?;
    file.write_all(b" two")?;
    let metadata = fs::metadata("linked")?;
    Ok(format!(
        "{} links {} mode {:o}",
        fs::read_to_string("linked")?,
        metadata.nlink(),
        metadata.mode()
    ))
}

fn without_name_exclusive() -> Outcome {
    let file = nameless(OFlags::EXCL)?;
    Ok(done(link_nameless(&file)))
}

fn open_anew() -> Outcome {
    let mut file = new_file()?;
    file.write_all(b"one")?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let before = words(fs::read_to_string(&path));
    fs::remove_file("f")?;
    Ok(format!("{before} {}", words(fs::read_to_string(&path))))
}
