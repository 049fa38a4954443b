//! Execs that do not run: not yet started, in a frozen container, deleted; and what is told of a
//! container that has ended.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use containerd_shim_protos::api::{StatsRequest, StatsResponse};
use rustix::fs::OFlags;

use super::*;

impl Scene {
    async fn counters(&self) -> Result<StatsResponse, TaskError> {
        let request = StatsRequest {
            id: "web".into(),
            ..StatsRequest::default()
        };
        self.sandbox.stats(request).await
    }

    fn called(&self, name: &str) -> usize {
        let calls = self.agent.calls.lock().unwrap();
        calls.iter().filter(|call| *call == name).count()
    }
}

#[test]
fn test_an_exec_that_is_deleted_before_its_start_is_gone_at_once() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        for round in 1..=2 {
            scene.exec("one").await.unwrap();
            let waiting = scene.wait("one");
            let (waited, deleted) = tokio::join!(waiting, scene.delete("one"));
            assert_eq!((waited, deleted.unwrap()), (0, 0));
            assert!(matches!(scene.state("one"), Err(TaskError::NotFound(_))));
            // In the guest too, once it is there.
            while scene.called("Delete") < round {
                tokio::task::yield_now().await;
            }
            assert_eq!(scene.called("Exec"), round);
        }
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        scene.agent.end("", "", 0).await;
        scene.wait("").await;
        // None of the exits of what never ran.
        let events = scene.events().await;
        assert_eq!(
            events,
            ["create", "start", "exec-added", "exec-added", "exit web 0"]
        );
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(pid).await;
    });
}

/// A client whose containerd dies before the start has come here waits for the ends of its FIFOs, and
/// lets go of them only while nobody has opened them.
#[test]
fn test_the_fifos_of_an_exec_are_its_client_s_until_it_is_started() {
    scene(|scene| async move {
        scene.create().await;
        scene.start("").await.unwrap();
        let path = scene.path("exec-stdout");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let request = ExecProcessRequest {
            id: "web".into(),
            exec_id: "one".into(),
            stdout: scene.stream("exec-stdout"),
            spec: Some(Any {
                value: b"{}".to_vec(),
                ..Any::default()
            })
            .into(),
            ..ExecProcessRequest::default()
        };
        scene.sandbox.clone().exec(request).await.unwrap();
        let exec = scene.sandbox.container("web").unwrap().exec("one").unwrap();
        exec.wait_prepared().await.unwrap();
        let mut options = fs::OpenOptions::new();
        let mut client = options
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&path)
            .unwrap();
        let mut text = String::new();
        assert_eq!(client.read_to_string(&mut text).unwrap(), 0);
        scene.start("one").await.unwrap();
        scene.agent.end("exec-1", "done", 0).await;
        assert_eq!(scene.wait("one").await, 0);
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "done");
    });
}

#[test]
fn test_whoever_waits_for_an_exec_that_never_started_is_told_of_the_deletion() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.exec("one").await.unwrap();
        let (waited, deleted) = tokio::join!(scene.wait("one"), scene.delete(""));
        assert_eq!((waited, deleted.unwrap()), (137, 137));
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_a_frozen_container_takes_no_exec_and_starts_none() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        for exec in ["runs", "waits"] {
            scene.exec(exec).await.unwrap();
        }
        scene.start("runs").await.unwrap();
        scene.sandbox.pause("web").await.unwrap();
        assert_eq!(scene.state("runs").unwrap(), Status::PAUSED);
        for refused in [
            scene.exec("new").await.err(),
            scene.start("waits").await.err(),
        ] {
            let error = refused.unwrap();
            assert!(matches!(error, TaskError::FailedPrecondition(_)), "{error}");
            assert!(error.to_string().contains("is paused"), "{error}");
        }
        assert_eq!(scene.state("waits").unwrap(), Status::CREATED);
        scene.sandbox.resume("web").await.unwrap();
        assert_eq!(scene.state("runs").unwrap(), Status::RUNNING);
        scene.start("waits").await.unwrap();
        scene.vmm.kill();
        scene.wait("").await;
        for exec in ["runs", "waits", ""] {
            scene.delete(exec).await.unwrap();
        }
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_the_last_counters_of_a_container_are_told_until_it_is_deleted() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        assert_eq!(
            scene.counters().await.unwrap().stats.type_url,
            fake::COUNTERS
        );
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        scene.agent.end("", "", 0).await;
        scene.wait("").await;
        scene.vmm.wait_for_end().await;
        assert_eq!(
            scene.counters().await.unwrap().stats.type_url,
            fake::COUNTERS
        );
        assert_eq!(scene.called("Stats"), 2);
        for late in [
            scene.sandbox.pause("web").await,
            scene.sandbox.resume("web").await,
        ] {
            assert!(
                matches!(late, Err(TaskError::FailedPrecondition(_))),
                "{late:?}"
            );
        }
        scene.delete("").await.unwrap();
        assert!(matches!(
            scene.counters().await,
            Err(TaskError::NotFound(_))
        ));
        scene.assert_nothing_left(pid).await;
    });
}
