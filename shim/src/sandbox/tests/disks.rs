//! Disks of a container, from its Create to its end.

use containerd_shim_protos::api::Mount as ApiMount;
use serde_json::Value;
use thaw_vmm_control::Request;

use super::*;

impl Scene {
    /// A request for a container whose root is an image of a file system.
    fn create_from_image(&self, id: &str) -> CreateTaskRequest {
        let image = self.path("image");
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let mut request = self.create_request(id);
        request.rootfs = vec![ApiMount {
            type_: "ext4".into(),
            source: image.to_str().unwrap().into(),
            options: vec!["loop".into(), "rw".into()],
            ..ApiMount::default()
        }];
        request
    }

    fn change_spec(&self, change: impl FnOnce(&mut Value)) {
        let mut prepared = self.sandbox.lock_prepared();
        let ingredients = prepared.as_mut().unwrap().ingredients.as_mut().unwrap();
        let mut json = ingredients.spec.json.clone();
        change(&mut json);
        ingredients.spec = BundleSpec::parse(json.to_string().as_bytes()).unwrap();
    }
}

#[test]
fn test_an_image_as_root_is_a_disk_before_the_guest_runs() {
    scene(|scene| async move {
        scene.change_spec(|json| {
            json["linux"]["devices"] = json!([
                { "path": "/dev/snd/timer", "type": "c", "major": 116, "minor": 33 },
                { "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229 },
            ]);
            let all = json!([{ "allow": true, "access": "rwm" }]);
            json["linux"]["resources"] = json!({ "devices": all });
        });
        let pid = scene
            .sandbox
            .clone()
            .create(scene.create_from_image("web"))
            .await
            .unwrap();
        let attached = Request::AttachBlock {
            slot: 0,
            read_only: false,
        };
        let requests = scene.requests.lock().unwrap().clone();
        let at = |wanted: &Request| requests.iter().position(|request| request == wanted);
        assert!(
            at(&attached).unwrap() < at(&Request::Run).unwrap(),
            "{requests:?}"
        );
        let configured = scene.agent.configured.lock().unwrap().take().unwrap();
        let [disk] = &configured.disks[..] else {
            panic!("{configured:?}")
        };
        assert_eq!((disk.slot, disk.sectors, disk.read_only), (0, 2048, false));
        let root = &configured.mounts[1];
        assert_eq!(
            (root.source.as_str(), root.type_.as_str()),
            ("/dev/vda", "ext4")
        );
        assert_eq!(
            (root.target.as_str(), &root.options[..]),
            ("/run/thaw/root", &["rw".to_owned()][..])
        );
        {
            let spec = scene.agent.spec.lock().unwrap();
            assert_eq!(spec["root"]["path"], "/run/thaw/root");
            // The container is privileged: it has the guest's devices.
            assert_eq!(spec["linux"]["devices"].as_array().unwrap().len(), 1);
        }
        scene.start("").await.unwrap();
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        scene.agent.end("", "", 0).await;
        assert_eq!(scene.wait("").await, 0);
        scene.delete("").await.unwrap();
        // The guest has written its disks before the VM was ended.
        assert!(
            scene
                .agent
                .calls
                .lock()
                .unwrap()
                .contains(&"Delete web".to_owned())
        );
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_a_container_that_is_added_gets_no_disk() {
    play(true, |scene| async move {
        scene.create().await;
        let bundle = scene.path("bundle");
        let spec = json!({
            "root": { "path": "rootfs" },
            "linux": { "namespaces": [{ "type": "network" }, { "type": "pid" }, { "type": "mount" }] },
        });
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let mut request = scene.create_from_image("second");
        request.bundle = bundle.to_str().unwrap().into();
        let error = scene.sandbox.clone().create(request).await.unwrap_err();
        assert!(error.to_string().contains("rootfs[0]"), "{error}");
        assert!(
            error
                .to_string()
                .contains("can only be given to the container"),
            "{error}"
        );
        assert!(matches!(error, TaskError::InvalidArgument(_)));
    });
}
