//! Creations that fail, hang, or are not followed by a start.

use super::*;

#[test]
fn test_a_creation_that_fails_leaves_nothing_and_tells_the_agent_s_words() {
    scene(|scene| async move {
        let text = "exec: \"nope\": executable file not found in $PATH";
        *scene.agent.refuse_create.lock().unwrap() = Some((Code::NOT_FOUND, text));
        let error = scene
            .sandbox
            .clone()
            .create(scene.create_request("web"))
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), text);
        assert!(matches!(scene.state(""), Err(TaskError::NotFound(_))));
        assert!(!scene.vmm.identity().is_alive());
        assert!(scene.events().await.is_empty());
        let again = scene
            .sandbox
            .clone()
            .create(scene.create_request("web"))
            .await
            .unwrap_err();
        assert!(again.to_string().contains("has ended"), "{again}");
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_a_missing_stream_or_volume_fails_the_creation_by_name() {
    scene(|scene| async move {
        fs::remove_dir(scene.path("volume")).unwrap();
        let error = scene
            .sandbox
            .clone()
            .create(scene.create_request("web"))
            .await
            .unwrap_err();
        assert!(error.to_string().starts_with("mounts[1] from "), "{error}");
        assert!(
            error.to_string().ends_with("no such file or directory"),
            "{error}"
        );
        scene.assert_nothing_left(u32::MAX).await;
    });
    scene(|scene| async move {
        fs::remove_file(scene.path("stderr")).unwrap();
        fs::create_dir(scene.path("stderr")).unwrap();
        let error = scene
            .sandbox
            .clone()
            .create(scene.create_request("web"))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("stderr"), "{error}");
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_a_container_that_was_never_started_is_deleted_and_taken_once() {
    scene(|scene| async move {
        scene.create().await;
        let again = scene.sandbox.clone().create(scene.create_request("web"));
        assert!(matches!(again.await, Err(TaskError::AlreadyExists(_))));
        assert_eq!(scene.state("").unwrap(), Status::CREATED);
        // Never started, it can be deleted.
        assert_eq!(scene.delete("").await.unwrap(), 137);
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_state_is_answered_while_a_creation_hangs() {
    scene(|scene| async move {
        let creating = scene.create_without_guest().await;
        assert_eq!(scene.state("").unwrap(), Status::CREATED);
        assert_eq!(scene.sandbox.pids("web").unwrap().len(), 1);
        assert!(matches!(
            scene.kill("", 15).await,
            Err(TaskError::FailedPrecondition(_))
        ));
        creating.abort();
        scene.sandbox.tear_down().await;
    });
}

#[test]
fn test_a_creation_that_hangs_is_given_up_when_it_is_deleted() {
    scene(|scene| async move {
        let creating = scene.create_without_guest().await;
        // Of two clients that delete it both are told.
        let (one, two) = tokio::join!(scene.delete(""), scene.delete(""));
        assert_eq!((one.unwrap(), two.unwrap()), (137, 137));
        let error = creating.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("was deleted while"), "{error}");
        assert!(scene.events().await.is_empty());
        scene.assert_nothing_left(u32::MAX).await;
    });
}
