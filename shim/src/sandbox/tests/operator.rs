//! Runtime options that come with a creation, and what is counted.

use super::*;
use crate::counters::{self, Counters};

/// Options with a TOML text, as generic ones.
fn options(type_url: &str, text: &str) -> Any {
    let mut value = vec![3 << 3 | 2, text.len() as u8];
    value.extend_from_slice(text.as_bytes());
    Any {
        type_url: type_url.into(),
        value,
        ..Any::default()
    }
}

/// The counters, when they are as `wanted`.
async fn counted(scene: &Scene, wanted: impl Fn(&Counters) -> bool) -> Counters {
    loop {
        let counters = counters::read(&scene.path("counters")).unwrap();
        if wanted(&counters) {
            return counters;
        }
        // Counted on another thread; the scene has a time limit.
        tokio::task::yield_now().await;
    }
}

#[test]
fn test_options_that_the_sandbox_was_not_started_with_are_refused_by_name() {
    scene(|scene| async move {
        let refused = async |options: Any| {
            let mut request = scene.create_request("web");
            request.options = Some(options).into();
            let error = scene.sandbox.clone().create(request).await.unwrap_err();
            (error.reason(), error.to_string())
        };
        let (reason, text) = refused(options("kata.Options", "")).await;
        assert!(text.contains("\"kata.Options\""), "{text}");
        assert_eq!(reason, "invalid_argument");
        let generic = "types.containerd.io/runtimeoptions.v1.Options";
        let (reason, text) = refused(options(generic, "max_vcpus = 1")).await;
        assert!(text.contains("others than those"), "{text}");
        assert_eq!(reason, "failed_precondition");
        // Nothing was consumed: options that say nothing, and none, are as good as those of the start.
        let mut request = scene.create_request("web");
        request.options = Some(options(generic, "")).into();
        scene.sandbox.clone().create(request).await.unwrap();
    });
}

#[test]
fn test_a_start_is_counted_once_it_is_done() {
    scene(|scene| async move {
        scene.create().await;
        scene.start("").await.unwrap();
        let counters = counted(&scene, |counters| counters.starts == 1).await;
        assert_eq!(counters.phases["start"].cumulative().last(), Some(&1));
        assert!(counters.failures.is_empty());
    });
}
