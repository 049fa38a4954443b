//! The guest really is a restored one.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;
use thaw_tests::{on_each_containerd, thaw};

/// How often each virtio queue has interrupted any CPU, by the queue's name, and the number of CPUs.
fn interrupts(text: &str) -> (usize, Vec<(&str, u64)>) {
    let mut lines = text.lines();
    let cpus = lines.next().unwrap_or_default().split_whitespace().count();
    let queues = lines.filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let name = words.last().filter(|name| name.starts_with("virtio"))?;
        let counts = words.iter().skip(1).take(cpus);
        Some((
            *name,
            counts.filter_map(|count| count.parse::<u64>().ok()).sum(),
        ))
    });
    (cpus, queues.collect())
}

/// The recorded start of a container.
fn trace(id: &str) -> Value {
    let text = thaw::thaw(&["trace", "--json", id]).succeeded().stdout();
    let mut traces: Value = serde_json::from_str(&text).expect("it is JSON");
    traces[0].take()
}

/// The names of the steps of the shim or of the VMM.
fn steps<'a>(trace: &'a Value, who: &str) -> Vec<&'a str> {
    let steps = trace[who].as_array().map(Vec::as_slice).unwrap_or_default();
    steps
        .iter()
        .filter_map(|step| step["name"].as_str())
        .collect()
}

/// Whether the host's kernel can record which pages a start touches, and map them ahead of it.
fn has_working_sets() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs is there");
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(11))
}

on_each_containerd! {
    /// The container has a kernel of its own.
    fn own_kernel(bed: &Testbed) {
        let host = fs::read_to_string("/proc/sys/kernel/version").expect("procfs is there");
        let guest = bed.run().command(["cat", "/proc/sys/kernel/version"]).output().succeeded();
        assert_ne!(guest.stdout(), host);
    }

    /// The second container's guest did not boot: its VMM restored, the template is the same, and its
    /// uptime is the template's and the time of a start, not of a boot.
    fn second_container_does_not_boot(bed: &Testbed) {
        let template = thaw::template();
        let memory = fs::metadata(template.join("memory")).expect("a template has it").ino();
        let starts: Vec<(f64, f64)> = (0..2)
            .map(|_| {
                let run = bed.run().shell("cut -d' ' -f1 /proc/uptime");
                let output = run.output().succeeded();
                let trace = trace(run.id());
                let steps = steps(&trace, "vmm");
                assert!(steps.contains(&"state") && steps.contains(&"vcpus"), "{trace:#}");
                (output.stdout().trim().parse().expect("it is a number"), output.took.as_secs_f64())
            })
            .collect();
        // Each is the template's and at most the time of the whole command.
        let [(first, first_took), (second, second_took)] = starts[..] else { unreachable!() };
        assert!((first - second).abs() < f64::max(first_took, second_took), "{starts:?}");
        assert_eq!(fs::metadata(template.join("memory")).map(|memory| memory.ino()).ok(), Some(memory));
    }

    /// A restored guest takes its interrupts, with one vCPU and with two where the host has them: its
    /// file system and its connections would not work without.
    fn interrupts_arrive(bed: &Testbed) {
        let host = std::thread::available_parallelism().map_or(1, usize::from);
        let _shapes = thaw::OtherShapes::allow();
        for wanted in 1..=host.min(2) {
            let run = bed.run().options(["--cpus", &wanted.to_string()]).command(["cat", "/proc/interrupts"]);
            let output = run.output().succeeded().stdout();
            let (cpus, queues) = interrupts(&output);
            assert_eq!(cpus, wanted, "{output}");
            for queue in ["requests.0", "rx"] {
                let taken = queues.iter().find(|(name, _)| name.ends_with(&format!("-{queue}")));
                assert!(taken.is_some_and(|(_, count)| *count > 0), "{queue}: {output}");
            }
        }
    }

    /// The template's memory is mapped, and not read.
    fn memory_is_mapped(bed: &Testbed) {
        let container = bed.sleeper();
        let vmm = thaw::processes(&container.id).vmm;
        let template = thaw::template();
        // By its inode: the VMM has it from a mount of its own.
        let inode = fs::metadata(template.join("memory")).expect("a template has it").ino();
        let maps = fs::read_to_string(format!("/proc/{vmm}/maps")).expect("the VMM runs");
        let of_it = |line: &str| line.ends_with("/memory") && line.contains(&format!(" {inode} "));
        assert!(maps.lines().any(of_it), "{inode}: {maps}");
        let io = fs::read_to_string(format!("/proc/{vmm}/io")).expect("the VMM runs");
        let read = io.lines().find_map(|line| line.strip_prefix("rchar: ")).and_then(|bytes| bytes.parse::<u64>().ok());
        let allocated = fs::metadata(template.join("memory")).expect("a template has it").blocks() * 512;
        assert!(allocated > 16 << 20, "a kernel's memory is larger than {allocated} bytes");
        // What its file server has read of the container's files counts too: a megabyte or two.
        assert!(read.is_some_and(|read| read < allocated / 4), "{allocated} are allocated, {io}");
    }

    /// The template knows what a start touches, and a start has that ready before its guest runs.
    fn working_set_is_ready(bed: &Testbed) {
        let run = bed.run().command(["true"]);
        run.output().succeeded();
        let trace = trace(run.id());
        let (ours, vmms) = (steps(&trace, "phases"), steps(&trace, "vmm"));
        assert!(ours.contains(&"working set ready"), "{trace:#}");
        let position = |name: &str| vmms.iter().position(|step| *step == name);
        assert!(position("populated").is_some() && position("populated") < position("run"), "{trace:#}");
        if !has_working_sets() {
            return;
        }
        let text = fs::read_to_string(thaw::template().join("manifest.json")).expect("a template has it");
        let manifest: Value = serde_json::from_str(&text).expect("it is JSON");
        let ranges = manifest["working_set"].as_array().expect("it is a list");
        let pages = |written: bool| -> u64 {
            let of_kind = ranges.iter().filter(|range| range["written"] == written);
            of_kind.filter_map(|range| range["count"].as_u64()).sum()
        };
        // A guest's kernel and its agent wake up, and no more.
        assert!((50..2000).contains(&pages(false)), "{} pages are read", pages(false));
        assert!((20..700).contains(&pages(true)), "{} pages are written", pages(true));
    }
}
