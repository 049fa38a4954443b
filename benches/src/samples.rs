//! Times and what is said of them.

use std::time::Duration;

use serde::Serialize;

/// Times of the same thing done again and again.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(into = "Summary")]
pub struct Samples(Vec<Duration>);

/// What is said of [`Samples`]; all times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// How many samples there are.
    pub count: usize,
    /// Half of them are at most this.
    pub p50: f64,
    /// 95 of 100 are at most this.
    pub p95: f64,
    /// 99 of 100 are at most this: the largest one, when there are fewer.
    pub p99: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Samples {
    /// Adds one.
    pub fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    /// The time that `percent` of the samples do not exceed (the nearest rank); zero without samples.
    fn percentile(sorted: &[Duration], percent: usize) -> Duration {
        let rank = (sorted.len() * percent).div_ceil(100);
        sorted
            .get(rank.saturating_sub(1))
            .copied()
            .unwrap_or_default()
    }

    /// What is said of them.
    pub fn summary(&self) -> Summary {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = |percent| milliseconds(Self::percentile(&sorted, percent));
        Summary {
            count: sorted.len(),
            p50: at(50),
            p95: at(95),
            p99: at(99),
            min: at(0),
            max: at(100),
        }
    }
}

impl From<Samples> for Summary {
    fn from(samples: Samples) -> Self {
        samples.summary()
    }
}

/// A duration in milliseconds.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(milliseconds: impl IntoIterator<Item = u64>) -> Samples {
        Samples(
            milliseconds
                .into_iter()
                .map(Duration::from_millis)
                .collect(),
        )
    }

    #[test]
    fn test_percentiles_are_samples_by_nearest_rank() {
        let summary = samples((1..=100).rev()).summary();
        assert_eq!((summary.p50, summary.p95, summary.p99), (50.0, 95.0, 99.0));
        assert_eq!((summary.min, summary.max, summary.count), (1.0, 100.0, 100));
    }

    #[test]
    fn test_few_samples_have_their_largest_as_p99() {
        let summary = samples([3, 1, 2]).summary();
        assert_eq!((summary.p50, summary.p95, summary.p99), (2.0, 3.0, 3.0));
        assert_eq!(samples([]).summary().p99, 0.0);
    }
}
