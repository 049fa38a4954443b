//! Whoever waits for an end is told of it, and the shim ends when it should.

use super::*;

/// Poll `future` once.
async fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    let mut future = Some(future);
    std::future::poll_fn(|context| {
        let polled = future
            .take()
            .map(|future| future.poll(context).is_pending());
        std::task::Poll::Ready(polled.unwrap_or(false))
    })
    .await
}

#[test]
fn test_whoever_waits_for_a_container_whose_creation_fails_is_told() {
    scene(|scene| async move {
        let creating = scene.create_without_guest().await;
        let waiting = scene.wait("");
        tokio::pin!(waiting);
        assert!(is_pending(waiting.as_mut()).await);
        scene.kill("", 9).await.unwrap();
        assert!(creating.await.unwrap().is_err());
        assert_eq!(waiting.await, 137);
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_the_shim_ends_when_that_was_asked_for_during_a_deletion() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        let finished = scene.sandbox.wait_until_finished();
        tokio::pin!(finished);
        // Nobody is deleting anything: it stays.
        scene.sandbox.shut_down();
        assert!(is_pending(finished.as_mut()).await);

        scene.vmm.kill();
        assert_eq!(scene.wait("").await, 137);
        let deleting = scene.delete("");
        tokio::pin!(deleting);
        assert!(is_pending(deleting.as_mut()).await);
        scene.sandbox.shut_down();
        assert!(is_pending(finished.as_mut()).await);
        assert_eq!(deleting.await.unwrap(), 137);
        finished.await;
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_a_deletion_that_fails_ends_no_shim() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        let finished = scene.sandbox.wait_until_finished();
        tokio::pin!(finished);
        scene.delete("").await.unwrap_err();
        scene.sandbox.shut_down();
        assert!(is_pending(finished.as_mut()).await);
        scene.vmm.kill();
        scene.wait("").await;
        scene.delete("").await.unwrap();
        scene.sandbox.shut_down();
        finished.await;
        scene.assert_nothing_left(pid).await;
    });
}
