// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
)

// nodePrefix is what the name in a node's certificate begins with.
const nodePrefix = "system:node:"

// Identity is the node as the kubelet's kubeconfig knows it. It is safe for
// concurrent use.
type Identity struct {
	path string // of the kubeconfig

	mu          sync.Mutex // guards what follows
	seen        []stamp    // the files as they were when certificate was read
	certificate *tls.Certificate
}

// stamp tells whether a file is still the one that was read.
type stamp struct {
	path string
	size int64
	time time.Time
	file fs.FileInfo
}

// NewIdentity is the identity in the kubeconfig at path. It reads nothing yet.
func NewIdentity(path string) *Identity { return &Identity{path: path} }

// Certificate returns the node's certificate and key, as they are in the files now.
// While the node has not joined, the error is an fs.ErrNotExist.
func (i *Identity) Certificate() (*tls.Certificate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.certificate != nil && unchanged(i.seen) {
		return i.certificate, nil
	}
	i.certificate = nil
	user, err := readUser(i.path)
	if err != nil {
		return nil, fmt.Errorf("read the node's certificate: %w", err)
	}
	// Taken before the files are read: one that changes meanwhile is read again.
	files := []string{i.path}
	for _, file := range []string{user.CertificateFile, user.KeyFile} {
		if file != "" {
			files = append(files, file)
		}
	}
	seen, err := stamps(files)
	if err != nil {
		return nil, fmt.Errorf("read the node's certificate: %w", err)
	}
	pair, err := user.pair()
	if err != nil {
		return nil, fmt.Errorf("read the node's certificate (%s): %w", i.path, err)
	}
	i.certificate, i.seen = &pair, seen
	return i.certificate, nil
}

// Present is for tls.Config's GetClientCertificate where a client may as well be
// anonymous. It shows the certificate if it is valid now and of the authority in
// roots: any other would end a handshake that succeeds without. All clusters that
// kubeadm makes have one name for their authorities, so the server's list of names
// does not tell.
func (i *Identity) Present(roots *x509.CertPool) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		if certificate, err := i.Certificate(); err == nil {
			_, err := certificate.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
			if err == nil {
				return certificate, nil
			}
		}
		return &tls.Certificate{}, nil
	}
}

// Expired tells whether a node's certificate is past its time. A kubelet that was
// off for as long cannot renew it: the node has to join again.
func Expired(certificate *tls.Certificate, now time.Time) bool {
	return now.After(certificate.Leaf.NotAfter)
}

// Name returns the name of the node.
func (i *Identity) Name() (string, error) {
	certificate, err := i.Certificate()
	if err != nil {
		return "", err
	}
	name, ok := strings.CutPrefix(certificate.Leaf.Subject.CommonName, nodePrefix)
	if !ok || name == "" {
		return "", fmt.Errorf("the certificate in %s is of %q, not of a node: point kubeletKubeconfig to the kubelet's own kubeconfig", i.path, certificate.Leaf.Subject.CommonName)
	}
	return name, nil
}

func stamps(files []string) ([]stamp, error) {
	var all []stamp
	for _, path := range files {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		all = append(all, stamp{path, info.Size(), info.ModTime(), info})
	}
	return all, nil
}

func unchanged(seen []stamp) bool {
	for _, s := range seen {
		info, err := os.Stat(s.path)
		if err != nil || info.Size() != s.size || !info.ModTime().Equal(s.time) || !os.SameFile(info, s.file) {
			return false
		}
	}
	return true
}

// user is how a kubeconfig's current user shows who it is.
type user struct {
	CertificateFile string `yaml:"client-certificate"`
	KeyFile         string `yaml:"client-key"`
	CertificateData binary `yaml:"client-certificate-data"`
	KeyData         binary `yaml:"client-key-data"`
}

func (u user) pair() (tls.Certificate, error) {
	certificate, key := []byte(u.CertificateData), []byte(u.KeyData)
	var err error
	if len(certificate) == 0 {
		if certificate, err = os.ReadFile(u.CertificateFile); err != nil {
			return tls.Certificate{}, err
		}
	}
	if len(key) == 0 {
		if key, err = os.ReadFile(u.KeyFile); err != nil {
			return tls.Certificate{}, err
		}
	}
	return tls.X509KeyPair(certificate, key)
}

// readUser finds the user of a kubeconfig's current context. Its files have paths
// that do not depend on the working directory.
func readUser(path string) (user, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return user{}, err
	}
	var kubeconfig struct {
		Current  string `yaml:"current-context"`
		Contexts []struct {
			Name    string
			Context struct{ User string }
		}
		Users []struct {
			Name string
			User user
		}
	}
	if err := yaml.Unmarshal(data, &kubeconfig); err != nil {
		return user{}, fmt.Errorf("%s is no kubeconfig: %w", path, err)
	}
	for _, context := range kubeconfig.Contexts {
		if context.Name != kubeconfig.Current {
			continue
		}
		for _, u := range kubeconfig.Users {
			if u.Name != context.Context.User {
				continue
			}
			found := u.User
			if found.CertificateFile == "" && len(found.CertificateData) == 0 {
				return user{}, fmt.Errorf("user %q in %s has no client certificate", u.Name, path)
			}
			for _, file := range []*string{&found.CertificateFile, &found.KeyFile} {
				if *file != "" && !filepath.IsAbs(*file) {
					*file = filepath.Join(filepath.Dir(path), *file)
				}
			}
			return found, nil
		}
	}
	return user{}, fmt.Errorf("%s has no user for its current context %q", path, kubeconfig.Current)
}

// IsAbsent tells that an error of an [Identity] means a node that has not joined.
func IsAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
