package client

import (
	"context"
	"fmt"
	"os"

	. "github.com/containerd/containerd"
	"github.com/containerd/containerd/errdefs"
	"github.com/containerd/containerd/images"
)

// localImage is what Client.Pull is, from the archive $THAW_IMAGE: its first image, under the name
// that the tests know.
func localImage(ctx context.Context, client *Client, name string, _ ...RemoteOpt) (Image, error) {
	archive, err := os.Open(os.Getenv("THAW_IMAGE"))
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	imported, err := client.Import(ctx, archive)
	if err != nil {
		return nil, err
	}
	if len(imported) == 0 {
		return nil, fmt.Errorf("%s holds no image", archive.Name())
	}
	record := images.Image{Name: name, Target: imported[0].Target}
	if _, err := client.ImageService().Create(ctx, record); err != nil && !errdefs.IsAlreadyExists(err) {
		return nil, err
	}
	image, err := client.GetImage(ctx, name)
	if err != nil {
		return nil, err
	}
	return image, image.Unpack(ctx, testSnapshotter)
}
