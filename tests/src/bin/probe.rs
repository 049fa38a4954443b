//! What a shell cannot show of the process it is: run in the containers of tests.
//!
//! `probe WHAT [NUMBER...]` prints one line and ends with 0; `probe call NUMBER ARGUMENT...` makes a
//! system call, and prints its result or the number of its error.

use std::process::ExitCode;

use nix::unistd::{getegid, geteuid, getgid, getgroups, getuid};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<i64> = words
        .iter()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    match words.first().map(String::as_str) {
        Some("ids") => println!("{} {} {} {}", getuid(), geteuid(), getgid(), getegid()),
        Some("groups") => {
            let mut groups: Vec<u32> = getgroups()
                .unwrap_or_default()
                .iter()
                .map(|group| group.as_raw())
                .collect();
            groups.sort_unstable();
            println!("{groups:?}");
        }
        Some("arguments") => println!(
            "{} {}",
            words.len(),
            words.iter().map(String::len).sum::<usize>()
        ),
        Some("call") => println!("{}", call(&numbers)),
        // The domain that programs see, of which a shell sees only the machine's name.
        Some("personality") => println!("{:#x}", call(&[libc_personality(), 0xffff_ffff])),
        Some("priority") => println!("{}", call(&[252, 1, 0])),
        Some("descriptors") => {
            let open = (0..256).filter(|fd| call(&[72, *fd, 1, 0]) >= 0);
            println!("{:?}", open.collect::<Vec<_>>());
        }
        _ => return ExitCode::from(2),
    }
    ExitCode::SUCCESS
}

fn libc_personality() -> i64 {
    135
}

/// The result of a system call, or its error's number, negative.
fn call(numbers: &[i64]) -> i64 {
    let at = |index: usize| numbers.get(index).copied().unwrap_or(0);
    // SAFETY: the callers pass calls that take numbers only, or no valid pointer, which the kernel refuses.
    let result = unsafe { nix::libc::syscall(at(0), at(1), at(2), at(3), at(4), at(5), at(6)) };
    if result < 0 {
        -i64::from(nix::errno::Errno::last_raw())
    } else {
        result
    }
}
