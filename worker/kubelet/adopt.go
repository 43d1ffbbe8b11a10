// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"go.yaml.in/yaml/v3"
)

// backupSuffix is the name of a kubeconfig as it was before Adopt.
const backupSuffix = ".before-tenant-proxy"

// serverName is the field that kubeadm never writes and Adopt always does: Go
// sends no SNI when it dials an address.
const serverName = "tls-server-name"

// binary is base64 in YAML.
type binary []byte

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *binary) UnmarshalText(text []byte) error {
	decoded, err := base64.StdEncoding.DecodeString(string(text))
	*b = decoded
	return err
}

// Adopt makes the kubelet whose kubeconfig is at path find the API server at
// server, a URL, under the name hostname. The kubeconfig as it was is kept beside
// it for [Revert]. It is false when nothing had to change. The kubelet reads its
// kubeconfig when it starts.
func Adopt(path, server, hostname string) (changed bool, err error) {
	data, document, cluster, err := load(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("this node has not joined: there is no %s; run kubeadm join first: %w", path, err)
	case err != nil:
		return false, fmt.Errorf("adopt the kubelet: %w", err)
	}
	if value(cluster, "server") == server && value(cluster, serverName) == hostname {
		return false, nil
	}
	fresh := value(cluster, serverName) == ""
	set(cluster, "server", server)
	set(cluster, serverName, hostname)
	var adopted bytes.Buffer
	encoder := yaml.NewEncoder(&adopted)
	encoder.SetIndent(2)
	if err := errors.Join(encoder.Encode(document), encoder.Close()); err != nil {
		return false, fmt.Errorf("adopt the kubelet: write %s: %w", path, err)
	}
	// The backup is whole before the kubeconfig changes: a run that is cut short
	// either changed nothing or can be reverted. One of an earlier run is what
	// kubeadm wrote, unless the node has joined anew since.
	if fresh {
		if err := replace(path+backupSuffix, data, path); err != nil {
			return false, fmt.Errorf("adopt the kubelet: keep %s: %w", path, err)
		}
	}
	if err := replace(path, adopted.Bytes(), path); err != nil {
		return false, fmt.Errorf("adopt the kubelet: change %s: %w", path, err)
	}
	return true, nil
}

// Revert puts the kubeconfig back that [Adopt] changed, byte for byte. It is false
// when there is none to put back, as after the node joined anew.
func Revert(path string) (changed bool, err error) {
	backup := path + backupSuffix
	data, err := os.ReadFile(backup)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !Adopted(path):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("revert the kubelet: %w", err)
	}
	if changed = Adopted(path); changed {
		if err := replace(path, data, backup); err != nil {
			return false, fmt.Errorf("revert the kubelet: %w", err)
		}
	}
	if err := os.Remove(backup); err != nil {
		return changed, fmt.Errorf("revert the kubelet: %w", err)
	}
	return changed, nil
}

// Adopted tells whether the kubeconfig at path is one that [Adopt] wrote.
func Adopted(path string) bool {
	_, _, cluster, err := load(path)
	return err == nil && value(cluster, serverName) != ""
}

// load reads a kubeconfig and finds the cluster of its current context.
func load(path string) (data []byte, document, cluster *yaml.Node, err error) {
	if data, err = os.ReadFile(path); err != nil {
		return nil, nil, nil, err
	}
	document = &yaml.Node{}
	if err := yaml.Unmarshal(data, document); err != nil {
		return nil, nil, nil, fmt.Errorf("%s is no kubeconfig: %w", path, err)
	}
	if cluster, err = currentCluster(document); err != nil {
		return nil, nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, document, cluster, nil
}

// replace writes a file whole or not at all, with mode and owner of another.
func replace(path string, data []byte, like string) error {
	info, err := os.Stat(like)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if owner, ok := info.Sys().(*syscall.Stat_t); ok {
		if err := file.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
			return err
		}
	}
	if err := file.Chmod(info.Mode().Perm()); err != nil {
		return err
	}
	if _, err := file.Write(data); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// currentCluster finds the cluster of the current context.
func currentCluster(document *yaml.Node) (*yaml.Node, error) {
	if len(document.Content) == 0 {
		return nil, errors.New("is empty")
	}
	root := document.Content[0]
	context, err := named(root, "contexts", value(root, "current-context"), "context")
	if err != nil {
		return nil, err
	}
	return named(root, "clusters", value(context, "cluster"), "cluster")
}

// named finds the part called part of the element of a list that has a name.
func named(root *yaml.Node, list, name, part string) (*yaml.Node, error) {
	if all := child(root, list); all != nil {
		for _, element := range all.Content {
			if found := child(element, part); found != nil && value(element, "name") == name {
				return found, nil
			}
		}
	}
	return nil, fmt.Errorf("has no %q in %s", name, list)
}

func child(node *yaml.Node, key string) *yaml.Node {
	if node.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == key {
				return node.Content[i+1]
			}
		}
	}
	return nil
}

func value(node *yaml.Node, key string) string {
	if found := child(node, key); found != nil {
		return found.Value
	}
	return ""
}

func set(node *yaml.Node, key, value string) {
	text := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: value}
	if found := child(node, key); found != nil {
		*found = *text
		return
	}
	node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, text)
}
