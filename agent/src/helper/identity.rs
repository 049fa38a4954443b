//! Who a process becomes: ids, groups, capabilities, limits and how it is scheduled.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Gid, Pid, Uid, setgroups, setresgid, setresuid};
use ttrpc::Code;

use super::description::{
    Affinity, Capabilities, IoPriority, Personality, Rlimit, Scheduler, User,
};
use super::mounts::said;
use crate::status::Refusal;
use crate::sys::{self, SchedulerAttributes};

/// The mask of modes that a process has whose spec says nothing.
const UMASK: u32 = 0o022;

/// Limits by their names.
const LIMITS: [(&str, u32); 16] = [
    ("RLIMIT_AS", libc::RLIMIT_AS),
    ("RLIMIT_CORE", libc::RLIMIT_CORE),
    ("RLIMIT_CPU", libc::RLIMIT_CPU),
    ("RLIMIT_DATA", libc::RLIMIT_DATA),
    ("RLIMIT_FSIZE", libc::RLIMIT_FSIZE),
    ("RLIMIT_LOCKS", libc::RLIMIT_LOCKS),
    ("RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK),
    ("RLIMIT_MSGQUEUE", libc::RLIMIT_MSGQUEUE),
    ("RLIMIT_NICE", libc::RLIMIT_NICE),
    ("RLIMIT_NOFILE", libc::RLIMIT_NOFILE),
    ("RLIMIT_NPROC", libc::RLIMIT_NPROC),
    ("RLIMIT_RSS", libc::RLIMIT_RSS),
    ("RLIMIT_RTPRIO", libc::RLIMIT_RTPRIO),
    ("RLIMIT_RTTIME", libc::RLIMIT_RTTIME),
    ("RLIMIT_SIGPENDING", libc::RLIMIT_SIGPENDING),
    ("RLIMIT_STACK", libc::RLIMIT_STACK),
];

/// Policies by their names (`linux/sched.h`).
const POLICIES: [(&str, u32); 7] = [
    ("SCHED_OTHER", 0),
    ("SCHED_FIFO", 1),
    ("SCHED_RR", 2),
    ("SCHED_BATCH", 3),
    ("SCHED_ISO", 4),
    ("SCHED_IDLE", 5),
    ("SCHED_DEADLINE", 6),
];

/// Their flags (`linux/sched.h`).
const POLICY_FLAGS: [(&str, u64); 7] = [
    ("SCHED_FLAG_RESET_ON_FORK", 0x01),
    ("SCHED_FLAG_RECLAIM", 0x02),
    ("SCHED_FLAG_DL_OVERRUN", 0x04),
    ("SCHED_FLAG_KEEP_POLICY", 0x08),
    ("SCHED_FLAG_KEEP_PARAMS", 0x10),
    ("SCHED_FLAG_UTIL_CLAMP_MIN", 0x20),
    ("SCHED_FLAG_UTIL_CLAMP_MAX", 0x40),
];

/// Classes of I/O by their names (`linux/ioprio.h`).
const CLASSES: [(&str, u32); 3] = [
    ("IOPRIO_CLASS_RT", 1),
    ("IOPRIO_CLASS_BE", 2),
    ("IOPRIO_CLASS_IDLE", 3),
];

fn find<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, value)| *value)
}

fn refused(field: &str, error: &io::Error) -> Refusal {
    Refusal::failed(format!("{field}: {}", said(error)))
}

/// Sets the limits of a process that waits for them, which may take rights that it has no longer; so the
/// right to it is not asked for here, but by the process itself, which sets them again.
pub fn raise_limits(pid: i32, limits: &[Rlimit]) -> Result<(), Refusal> {
    match set_limits(pid, limits) {
        Err(refusal) if refusal.code == Code::PERMISSION_DENIED => Ok(()),
        result => result,
    }
}

/// Sets the limits of a process, 0 for this one, which has done all that they could hinder.
pub fn set_limits(pid: i32, limits: &[Rlimit]) -> Result<(), Refusal> {
    for Rlimit { kind, soft, hard } in limits {
        let field = format!("process.rlimits: {kind}");
        let resource =
            find(&LIMITS, kind).ok_or_else(|| Refusal::invalid(format!("{field} is no limit")))?;
        sys::set_limit(pid, resource, *soft, *hard).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                Refusal::new(Code::PERMISSION_DENIED, refused(&field, &error).message)
            }
            _ => refused(&field, &error),
        })?;
    }
    Ok(())
}

/// Sets another process's readiness to be killed for memory.
pub fn set_memory_score(pid: i32, score: Option<i32>) -> Result<(), Refusal> {
    let Some(score) = score else {
        return Ok(());
    };
    let written = fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string());
    written.map_err(|error| refused(&format!("process.oomScoreAdj: {score}"), &error))
}

/// Has this process scheduled as its description says.
pub fn set_scheduling(
    scheduler: Option<&Scheduler>,
    io_priority: Option<&IoPriority>,
) -> Result<(), Refusal> {
    if let Some(priority) = io_priority {
        let field = "process.ioPriority";
        let class = find(&CLASSES, &priority.class).ok_or_else(|| {
            Refusal::invalid(format!("{field}.class: {:?} is no class", priority.class))
        })?;
        let level = u32::try_from(priority.priority)
            .ok()
            .filter(|level| *level <= 7);
        let level = level.ok_or_else(|| {
            Refusal::invalid(format!(
                "{field}.priority: {} is not 0 to 7",
                priority.priority
            ))
        })?;
        sys::set_io_priority(class, level).map_err(|error| refused(field, &error))?;
    }
    let Some(scheduler) = scheduler else {
        return Ok(());
    };
    let field = "process.scheduler";
    let policy = find(&POLICIES, &scheduler.policy).ok_or_else(|| {
        Refusal::invalid(format!(
            "{field}.policy: {:?} is no policy",
            scheduler.policy
        ))
    })?;
    let flags = scheduler.flags.iter().try_fold(0, |all, name| {
        find(&POLICY_FLAGS, name)
            .map(|flag| all | flag)
            .ok_or_else(|| Refusal::invalid(format!("{field}.flags: {name:?} is no flag")))
    })?;
    let attributes = SchedulerAttributes {
        policy,
        flags,
        nice: scheduler.nice,
        priority: scheduler.priority.unsigned_abs(),
        runtime: scheduler.runtime,
        deadline: scheduler.deadline,
        period: scheduler.period,
        ..SchedulerAttributes::default()
    };
    sys::set_scheduler(attributes).map_err(|error| refused(field, &error))
}

/// Sets the execution domain of this process.
pub fn set_personality(personality: Option<&Personality>) -> Result<(), Refusal> {
    let domain = match personality.map(|personality| personality.domain.as_str()) {
        None => return Ok(()),
        Some("LINUX") => 0x0000,
        Some("LINUX32") => 0x0008,
        Some(other) => {
            return Err(Refusal::invalid(format!(
                "linux.personality.domain: {other:?} is not LINUX or LINUX32"
            )));
        }
    };
    let domain = nix::sys::personality::Persona::from_bits_retain(domain);
    let set = nix::sys::personality::set(domain);
    set.map(drop)
        .map_err(|error| refused("linux.personality", &error.into()))
}

/// Sets the mask of modes of new files.
pub fn set_umask(mask: Option<u32>) {
    umask(Mode::from_bits_truncate(mask.unwrap_or(UMASK)));
}

/// The processors that a process may run on, before or after it is in the container's cgroup.
pub fn set_affinity(
    pid: i32,
    affinity: Option<&Affinity>,
    pick: fn(&Affinity) -> &String,
) -> Result<(), Refusal> {
    let Some(list) = affinity.map(pick).filter(|list| !list.is_empty()) else {
        return Ok(());
    };
    let field = format!("process.execCPUAffinity: {list:?}");
    let mut set = CpuSet::new();
    for number in processors(list).ok_or_else(|| Refusal::invalid(format!("{field} is no list")))? {
        set.set(number)
            .map_err(|error| refused(&field, &error.into()))?;
    }
    sched_setaffinity(Pid::from_raw(pid), &set).map_err(|error| refused(&field, &error.into()))
}

/// The numbers of a list like `0-2,7`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CpuSet::count() {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Capability sets, of which the names that this kernel does not know are left out.
#[derive(Debug)]
pub struct Privileges {
    sets: BTreeMap<u8, CapsHashSet>,
}

const BOUNDING: u8 = 0;
const EFFECTIVE: u8 = 1;
const INHERITABLE: u8 = 2;
const PERMITTED: u8 = 3;
const AMBIENT: u8 = 4;

impl Privileges {
    /// Those of a description.
    pub fn of(capabilities: &Capabilities) -> Self {
        let known = caps::runtime::thread_all_supported();
        let set = |names: &[String]| {
            let parsed = names
                .iter()
                .filter_map(|name| name.parse::<Capability>().ok());
            parsed
                .filter(|capability| known.contains(capability))
                .collect::<CapsHashSet>()
        };
        let Capabilities {
            bounding,
            effective,
            inheritable,
            permitted,
            ambient,
        } = capabilities;
        let sets = [
            (BOUNDING, set(bounding)),
            (EFFECTIVE, set(effective)),
            (INHERITABLE, set(inheritable)),
            (PERMITTED, set(permitted)),
            (AMBIENT, set(ambient)),
        ];
        Self { sets: sets.into() }
    }

    fn set(&self, name: u8, kind: CapSet) -> Result<(), Refusal> {
        caps::set(None, kind, &self.sets[&name]).map_err(failed)
    }

    /// Becomes the user, with these as the capabilities in force, but with all of them to be had again.
    pub fn take_on(&self, user: &User) -> Result<(), Refusal> {
        let have = caps::read(None, CapSet::Bounding).map_err(failed)?;
        for lost in have.difference(&self.sets[&BOUNDING]) {
            caps::drop(None, CapSet::Bounding, *lost).map_err(failed)?;
        }
        caps::securebits::set_keepcaps(true).map_err(failed)?;
        become_user(user)?;
        caps::securebits::set_keepcaps(false).map_err(failed)?;
        self.set(INHERITABLE, CapSet::Inheritable)?;
        self.set(EFFECTIVE, CapSet::Effective)
    }

    /// Puts the capabilities in force that a filter without `no_new_privs` takes, and its end.
    pub fn regain(&self) -> Result<(), Refusal> {
        let mut set = self.sets[&EFFECTIVE].clone();
        set.extend([Capability::CAP_SYS_ADMIN, Capability::CAP_SETPCAP]);
        caps::set(None, CapSet::Effective, &set).map_err(failed)
    }

    /// Keeps these and no others.
    pub fn settle(&self) -> Result<(), Refusal> {
        self.set(EFFECTIVE, CapSet::Effective)?;
        self.set(PERMITTED, CapSet::Permitted)?;
        caps::clear(None, CapSet::Ambient).map_err(failed)?;
        for ambient in &self.sets[&AMBIENT] {
            // One that is not permitted and inheritable too cannot be, and is missed by nobody.
            let _ = caps::raise(None, CapSet::Ambient, *ambient);
        }
        Ok(())
    }
}

fn failed(error: caps::errors::CapsError) -> Refusal {
    Refusal::failed(format!("process.capabilities: {error}"))
}

fn become_user(user: &User) -> Result<(), Refusal> {
    let groups: Vec<Gid> = user
        .additional_gids
        .iter()
        .copied()
        .map(Gid::from_raw)
        .collect();
    let of_groups = |error: nix::Error| refused("process.user.additionalGids", &error.into());
    // A user namespace that was made by others may forbid it, and has then no groups to lose.
    let allowed =
        fs::read_to_string("/proc/self/setgroups").map_or(true, |text| text.trim() != "deny");
    if allowed || !groups.is_empty() {
        setgroups(&groups).map_err(of_groups)?;
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    setresgid(gid, gid, gid).map_err(|error| refused("process.user.gid", &error.into()))?;
    setresuid(uid, uid, uid).map_err(|error| refused("process.user.uid", &error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lists_of_processors() {
        assert_eq!(processors("0"), Some(vec![0]));
        assert_eq!(processors("0-2,7"), Some(vec![0, 1, 2, 7]));
        for bad in ["", "a", "2-1", "1-", "99999999"] {
            assert_eq!(processors(bad), None, "{bad}");
        }
    }

    #[test]
    fn test_unknown_limits_are_named() {
        let limit = Rlimit {
            kind: "RLIMIT_NONE".into(),
            soft: 1,
            hard: 1,
        };
        let refusal = set_limits(std::process::id() as i32, &[limit]).unwrap_err();
        assert_eq!(refusal.message, "process.rlimits: RLIMIT_NONE is no limit");
    }

    #[test]
    fn test_unknown_policies_and_classes_are_named() {
        let scheduler = Scheduler {
            policy: "SCHED_NONE".into(),
            ..Scheduler::default()
        };
        assert!(
            set_scheduling(Some(&scheduler), None)
                .unwrap_err()
                .message
                .contains("SCHED_NONE")
        );
        let priority = IoPriority {
            class: "IOPRIO_CLASS_BE".into(),
            priority: 8,
        };
        assert!(
            set_scheduling(None, Some(&priority))
                .unwrap_err()
                .message
                .contains("8 is not 0 to 7")
        );
    }
}
