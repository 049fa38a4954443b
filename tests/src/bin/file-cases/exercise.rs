//! Random operations on one file, each compared with what memory says it should come to.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};

use crate::mapping::Mapping;

/// The file is never longer, so that operations meet each other.
const MOST: usize = 300_000;

/// Small numbers from one seed, the same each time (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

struct Exercise {
    path: String,
    file: File,
    expected: Vec<u8>,
    numbers: Numbers,
}

/// Does `steps` operations on a new file at `path`.
pub fn exercise(path: &str, seed: u64, steps: usize) -> io::Result<()> {
    let mut exercise = Exercise {
        path: path.to_owned(),
        file: open(path)?,
        expected: Vec::new(),
        numbers: Numbers(seed.max(1)),
    };
    for step in 0..steps {
        let doing = exercise.step()?;
        let length = exercise.file.metadata()?.len();
        if length != exercise.expected.len() as u64 {
            let expected = exercise.expected.len();
            return Err(wrong(
                step,
                &doing,
                &format!("{length} bytes long, not {expected}"),
            ));
        }
        if step % 16 == 15 && exercise.numbers.below(2) == 0 {
            exercise.compare(step, &doing)?;
        }
    }
    exercise.compare(steps, "the end")?;
    fs::remove_file(path)
}

fn open(path: &str) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

fn wrong(step: usize, doing: &str, what: &str) -> io::Error {
    io::Error::other(format!("step {step}, {doing}: {what}"))
}

impl Exercise {
    fn range(&mut self, limit: usize) -> (usize, usize) {
        let start = self.numbers.below(limit);
        (start, self.numbers.below((limit - start).min(70_000)))
    }

    fn step(&mut self) -> io::Result<String> {
        match self.numbers.below(8) {
            0 | 1 => self.write(),
            2 => self.truncate(),
            3 => self.map(),
            4 => self.punch(),
            5 => self.append(),
            6 => {
                self.file = open(&self.path)?;
                Ok("open anew".into())
            }
            _ => self.read(),
        }
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let start = self.numbers.below(256);
        (0..length).map(|at| (start + at * 7) as u8).collect()
    }

    fn write(&mut self) -> io::Result<String> {
        let (start, length) = self.range(MOST);
        let bytes = self.bytes(length);
        self.file.write_all_at(&bytes, start as u64)?;
        self.put(start, &bytes);
        Ok(format!("write {length} at {start}"))
    }

    fn append(&mut self) -> io::Result<String> {
        let length = self.numbers.below(5000).min(MOST - self.expected.len());
        let bytes = self.bytes(length);
        let mut file = OpenOptions::new().append(true).open(&self.path)?;
        io::Write::write_all(&mut file, &bytes)?;
        self.put(self.expected.len(), &bytes);
        Ok(format!("append {length}"))
    }

    fn put(&mut self, start: usize, bytes: &[u8]) {
        let end = start + bytes.len();
        if end > self.expected.len() && !bytes.is_empty() {
            self.expected.resize(end, 0);
        }
        if !bytes.is_empty() {
            self.expected[start..end].copy_from_slice(bytes);
        }
    }

    fn truncate(&mut self) -> io::Result<String> {
        let length = self.numbers.below(MOST);
        self.file.set_len(length as u64)?;
        self.expected.resize(length, 0);
        Ok(format!("truncate to {length}"))
    }

    fn map(&mut self) -> io::Result<String> {
        if self.expected.is_empty() {
            return Ok("nothing".into());
        }
        let length = self.expected.len();
        let mapping = Mapping::new(&self.file, length)?;
        let at = self.numbers.below(length);
        let seen = mapping.get(at);
        if seen != self.expected[at] {
            return Err(io::Error::other(format!(
                "mapped byte {at} is {seen}, not {}",
                self.expected[at]
            )));
        }
        let other = self.numbers.below(length);
        mapping.set(other, 77);
        mapping.sync()?;
        self.expected[other] = 77;
        Ok(format!("map, read {at} and write {other}"))
    }

    fn punch(&mut self) -> io::Result<String> {
        let (start, length) = self.range(MOST);
        if length == 0 {
            return Ok("nothing".into());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, start as u64, length as u64)?;
        let end = (start + length).min(self.expected.len());
        if start < end {
            self.expected[start..end].fill(0);
        }
        Ok(format!("punch {length} at {start}"))
    }

    fn read(&mut self) -> io::Result<String> {
        let (start, length) = self.range(MOST);
        let mut bytes = vec![0; length];
        let read = self.file.read_at(&mut bytes, start as u64)?;
        let end = (start + length).min(self.expected.len());
        let expected = self.expected.get(start..end).unwrap_or_default();
        if read > 0 && bytes[..read] != expected[..read.min(expected.len())] {
            return Err(io::Error::other(format!(
                "{length} read at {start} are not as written"
            )));
        }
        Ok(format!("read {length} at {start}"))
    }

    fn compare(&self, step: usize, doing: &str) -> io::Result<()> {
        let bytes = fs::read(&self.path)?;
        let place = bytes
            .iter()
            .zip(&self.expected)
            .position(|(one, other)| one != other);
        match place {
            Some(place) => Err(wrong(
                step,
                doing,
                &format!("byte {place} is not as written"),
            )),
            None => Ok(()),
        }
    }
}
