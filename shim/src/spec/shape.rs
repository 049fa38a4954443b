//! From a container's limits to the shape of its VM.

use thaw_vmm_control::{InvalidShape, Shape};
use thiserror::Error;

use super::Spec;
use crate::settings::Settings;

/// The smallest memory class, in MiB.
const SMALLEST_MIB: u64 = 128;

/// The kernel's default for `cpu.period`, in microseconds.
const DEFAULT_PERIOD: u64 = 100_000;

/// Limits for which there is no shape.
#[derive(Debug, Error)]
#[error("config.json: linux.resources: {0}")]
pub struct UnfitShape(#[from] InvalidShape);

/// The shape for a container with this spec and these settings on a host of `host_cpus` CPUs and
/// `host_memory` bytes: the smallest power of two of memory that holds limit and overhead, and a vCPU
/// for each begun CPU of the quota, neither for more than the host has. A kernel of 64 GiB takes 1 GiB
/// to boot, and no limit above the host's memory is ever met.
pub fn shape(
    spec: &Spec,
    settings: &Settings,
    host_cpus: usize,
    host_memory: u64,
) -> Result<Shape, UnfitShape> {
    let resources = &spec.linux.resources;
    let bytes = match resources.memory.limit.map(u64::try_from) {
        Some(Ok(limit)) if limit > 0 => limit
            .min(host_memory)
            .saturating_add(u64::from(settings.memory_overhead_mib) << 20),
        _ => (u64::from(settings.default_memory_mib) << 20).min(host_memory),
    };
    let memory_mib = bytes
        .div_ceil(1 << 20)
        .max(SMALLEST_MIB)
        .checked_next_power_of_two()
        .and_then(|mib| u32::try_from(mib).ok());
    let most = u8::try_from(host_cpus)
        .unwrap_or(u8::MAX)
        .min(settings.max_vcpus)
        .clamp(1, Shape::MAX_VCPUS);
    let vcpus = match resources.cpu.quota.map(u64::try_from) {
        Some(Ok(quota)) if quota > 0 => {
            let period = resources.cpu.period.filter(|period| *period > 0);
            let cpus = quota.div_ceil(period.unwrap_or(DEFAULT_PERIOD));
            u8::try_from(cpus).unwrap_or(u8::MAX).min(most)
        }
        _ => settings.default_vcpus.min(most),
    };
    // Out of range only where the limit is: the largest class is far above any host's memory.
    Ok(Shape::new(vcpus, memory_mib.unwrap_or(u32::MAX))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(memory: Option<i64>, quota: Option<i64>, period: Option<u64>) -> Spec {
        let mut spec = Spec::default();
        spec.linux.resources.memory.limit = memory;
        spec.linux.resources.cpu.quota = quota;
        spec.linux.resources.cpu.period = period;
        spec
    }

    fn text(spec: &Spec, cpus: usize) -> String {
        shape(spec, &Settings::default(), cpus, 1 << 34)
            .unwrap()
            .to_string()
    }

    #[test]
    fn test_no_limit_is_two_vcpus_or_the_host_s_and_2_gib() {
        assert_eq!(text(&limits(None, None, None), 8), "2x2048M");
        assert_eq!(text(&limits(None, None, None), 1), "1x2048M");
        assert_eq!(
            text(&limits(Some(-1), Some(-1), Some(100_000)), 8),
            "2x2048M"
        );
        assert_eq!(text(&limits(Some(0), Some(0), None), 8), "2x2048M");
    }

    #[test]
    fn test_memory_class_holds_limit_and_overhead() {
        let memory = |mib: i64| text(&limits(Some(mib << 20), None, None), 8);
        assert_eq!(memory(6), "2x128M");
        assert_eq!(memory(64), "2x128M");
        assert_eq!(memory(65), "2x256M");
        assert_eq!(memory(192), "2x256M");
        assert_eq!(memory(256), "2x512M");
        assert_eq!(memory(960), "2x1024M");
        assert_eq!(memory(961), "2x2048M");
    }

    #[test]
    fn test_no_more_memory_than_the_host_has() {
        let on_host = |host_memory| {
            let spec = limits(Some(64 << 30), None, None);
            shape(&spec, &Settings::default(), 2, host_memory)
                .unwrap()
                .to_string()
        };
        assert_eq!(on_host(6 << 30), "2x8192M");
        assert_eq!(on_host(63 << 30), "2x65536M");
        assert_eq!(on_host(1 << 40), "2x131072M");
    }

    #[test]
    fn test_a_vcpu_for_each_begun_cpu_up_to_the_host_s() {
        let cpu = |quota, period| text(&limits(None, Some(quota), period), 8);
        assert_eq!(cpu(100_000, Some(100_000)), "1x2048M");
        assert_eq!(cpu(150_000, None), "2x2048M");
        assert_eq!(cpu(25_000, Some(10_000)), "3x2048M");
        assert_eq!(cpu(1, Some(0)), "1x2048M");
        assert_eq!(cpu(i64::MAX, Some(1)), "8x2048M");
        assert_eq!(
            text(&limits(None, Some(i64::MAX), Some(1)), 500),
            "16x2048M"
        );
    }

    #[test]
    fn test_a_limit_above_every_class_is_refused_with_the_field() {
        let error = shape(
            &limits(Some(i64::MAX), None, None),
            &Settings::default(),
            2,
            u64::MAX,
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("linux.resources"), "{error}");
    }

    #[test]
    fn test_settings_take_the_place_of_what_is_built_in() {
        let with = |change: fn(&mut Settings), spec: &Spec| {
            let mut settings = Settings::default();
            change(&mut settings);
            shape(spec, &settings, 8, 1 << 34).unwrap().to_string()
        };
        let unlimited = limits(None, None, None);
        let limited = limits(Some(65 << 20), Some(800_000), None);
        assert_eq!(with(|set| set.default_vcpus = 5, &unlimited), "5x2048M");
        assert_eq!(with(|set| set.default_vcpus = 9, &unlimited), "8x2048M");
        assert_eq!(with(|set| set.default_vcpus = 5, &limited), "8x256M");
        assert_eq!(with(|set| set.max_vcpus = 1, &unlimited), "1x2048M");
        assert_eq!(with(|set| set.max_vcpus = 3, &limited), "3x256M");
        assert_eq!(
            with(|set| set.default_memory_mib = 300, &unlimited),
            "2x512M"
        );
        assert_eq!(with(|set| set.default_memory_mib = 300, &limited), "8x256M");
        assert_eq!(
            with(|set| set.default_memory_mib = 1 << 20, &unlimited),
            "2x16384M"
        );
        assert_eq!(with(|set| set.memory_overhead_mib = 32, &limited), "8x128M");
    }
}
