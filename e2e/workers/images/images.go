// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package images packs container images from programs that lie on this machine,
// so that a worker can run pods where there is no registry. An image is one layer
// in an OCI layout, which `ctr images import` reads.
//
// Only the tests in e2e/workers import it.
//
//	var shell images.Files
//	shell.Program("/bin/sh", "/bin/sh") // with the shared libraries it needs
//	shell.Link("/bin/ash", "sh")
//	err := images.Write(file, images.Image{
//		Name:       "registry.test/shell:1",
//		Entrypoint: []string{"/bin/sh"},
//		Files:      shell,
//	})
package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Image is what a tar has of one image.
type Image struct {
	// Name is the full reference, as pods name it.
	Name string
	// Entrypoint is the command that a pod runs if it names none.
	Entrypoint []string
	Files      Files
}

// Files are what an image holds. The zero value is an empty image.
type Files struct {
	entries []entry
}

type entry struct {
	path   string // inside the image, absolute
	source string // on this machine
	link   string // what it is a link to, instead of a source
}

// File adds a file of this machine as path.
func (f *Files) File(path, source string) {
	f.entries = append(f.entries, entry{path: path, source: source})
}

// Link adds a symbolic link.
func (f *Files) Link(path, target string) {
	f.entries = append(f.entries, entry{path: path, link: target})
}

// Program adds a program as path and the shared libraries that it needs where it
// looks for them.
func (f *Files) Program(path, source string) error {
	f.File(path, source)
	return f.libraries(source)
}

// Library adds a shared object that programs open while they run, where it lies,
// and the shared libraries that it needs.
func (f *Files) Library(source string) error {
	f.File(source, source)
	return f.libraries(source)
}

func (f *Files) libraries(source string) error {
	out, err := exec.Command("ldd", source).CombinedOutput()
	if bytes.Contains(out, []byte("not a dynamic executable")) || bytes.Contains(out, []byte("statically linked")) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ask for the shared libraries of %s: %w: %s", source, err, bytes.TrimSpace(out))
	}
	// Lines are `name => /path (address)`, or `/path (address)` for the loader.
	for line := range strings.Lines(string(out)) {
		for field := range strings.FieldsSeq(line) {
			if filepath.IsAbs(field) {
				f.File(field, field)
			}
		}
	}
	return nil
}

// Write writes an OCI layout as a tar. The same files make the same bytes.
func Write(w io.Writer, images ...Image) error {
	out := &layout{tar: tar.NewWriter(w), written: map[string]bool{}}
	if err := out.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	var manifests []descriptor
	for _, image := range images {
		manifest, err := out.image(image)
		if err != nil {
			return fmt.Errorf("pack image %s: %w", image.Name, err)
		}
		manifests = append(manifests, manifest)
	}
	index := map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests}
	if err := out.json("index.json", index); err != nil {
		return err
	}
	return out.tar.Close()
}

// descriptor is how OCI names content.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// layout is an OCI layout that is being written.
type layout struct {
	tar     *tar.Writer
	written map[string]bool // digests
}

func (l *layout) image(image Image) (descriptor, error) {
	content, err := image.Files.layer()
	if err != nil {
		return descriptor{}, err
	}
	layer, err := l.blob("application/vnd.oci.image.layer.v1.tar", content)
	if err != nil {
		return descriptor{}, err
	}
	config, err := l.jsonBlob("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config": map[string]any{
			"Entrypoint": image.Entrypoint,
			"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.Digest}},
	})
	if err != nil {
		return descriptor{}, err
	}
	manifest, err := l.jsonBlob("application/vnd.oci.image.manifest.v1+json", map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"config":        config,
		"layers":        []descriptor{layer},
	})
	manifest.Annotations = map[string]string{"io.containerd.image.name": image.Name}
	return manifest, err
}

func (l *layout) jsonBlob(mediaType string, value any) (descriptor, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return l.blob(mediaType, raw)
}

func (l *layout) blob(mediaType string, content []byte) (descriptor, error) {
	sum := sha256.Sum256(content)
	digest := hex.EncodeToString(sum[:])
	d := descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(content)}
	if l.written[digest] {
		return d, nil
	}
	l.written[digest] = true
	return d, l.file("blobs/sha256/"+digest, content)
}

func (l *layout) json(name string, value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return l.file(name, raw)
}

func (l *layout) file(name string, content []byte) error {
	if err := l.tar.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := l.tar.Write(content)
	return err
}

// layer is the tar of an image's only layer.
func (f Files) layer() ([]byte, error) {
	// Pods write into /tmp whoever they run as.
	directories := map[string]int64{"/tmp": 0o1777}
	entries := map[string]entry{}
	for _, e := range f.entries {
		entries[e.path] = e
		for dir := filepath.Dir(e.path); dir != "/"; dir = filepath.Dir(dir) {
			directories[dir] = 0o755
		}
	}
	paths := make([]string, 0, len(entries)+len(directories))
	for path := range entries {
		paths = append(paths, path)
	}
	for path := range directories {
		paths = append(paths, path)
	}
	slices.Sort(paths) // a directory before what is in it

	var content bytes.Buffer
	w := tar.NewWriter(&content)
	for _, path := range paths {
		e, isEntry := entries[path]
		header := &tar.Header{Name: strings.TrimPrefix(path, "/")}
		var data []byte
		switch {
		case !isEntry:
			header.Typeflag, header.Mode = tar.TypeDir, directories[path]
			header.Name += "/"
		case e.link != "":
			header.Typeflag, header.Mode, header.Linkname = tar.TypeSymlink, 0o777, e.link
		default:
			var err error
			if data, err = os.ReadFile(e.source); err != nil {
				return nil, err
			}
			header.Typeflag, header.Mode, header.Size = tar.TypeReg, 0o755, int64(len(data))
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return content.Bytes(), nil
}
