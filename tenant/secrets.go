// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"sync"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/tenantd/tenantd/pki"
)

// secretsPrefix begins every encrypted value, followed by the key's id and a colon.
// Upstream's plain reader refuses all that begins with k8s:enc:, so ciphertext is
// never taken for an object.
const secretsPrefix = "k8s:enc:tenantd:v1:"

// encrypted says which resources are encrypted at rest. Service accounts' tokens and
// kubeadm's bootstrap tokens are Secrets too; no other built-in resource holds
// credentials.
func encrypted(resource schema.GroupResource) bool {
	return resource == schema.GroupResource{Resource: "secrets"}
}

// secretsOptions makes the getter's stores encrypt what is to be encrypted.
type secretsOptions struct {
	generic.RESTOptionsGetter
	transformer value.Transformer
}

// GetRESTOptions implements generic.RESTOptionsGetter.
func (o secretsOptions) GetRESTOptions(resource schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	opts, err := o.RESTOptionsGetter.GetRESTOptions(resource, example)
	if err == nil && encrypted(resource) {
		opts.StorageConfig.Transformer = o.transformer
	}
	return opts, err
}

// newSecretsTransformer encrypts values on their way to etcd: AES-256-GCM under a key
// that is derived for each write from the tenant's and 32 random bytes, so that no
// number of writes wears it out. The etcd key is authenticated with the value: a
// value that was copied elsewhere does not open. What was stored before there was
// encryption is read as it is, and encrypted when it is next written.
func newSecretsTransformer(key []byte) (value.Transformer, error) {
	if len(key) != pki.KeySize {
		return nil, fmt.Errorf("use key for Secrets: it has %d bytes, need %d", len(key), pki.KeySize)
	}
	t := &forgetfulTransformer{key: key, uses: forgetAfter}
	sum := sha256.Sum256(append([]byte("tenantd secrets key id\x00"), key...))
	id := hex.EncodeToString(sum[:4])
	unknown := fmt.Errorf("it is not encrypted with this tenant's key, which is %s", id)
	return etcd3.WithCorruptObjErrorHandlingTransformer(secretsTransformer{value.NewPrefixTransformers(unknown,
		value.PrefixTransformer{Prefix: []byte(secretsPrefix + id + ":"), Transformer: t},
		value.PrefixTransformer{Transformer: identity.NewEncryptCheckTransformer()},
	)}), nil
}

// forgetAfter is how many uses a transformer lives: what it remembers stays below 2 MiB.
const forgetAfter = 1024

// forgetfulTransformer is upstream's with a bound on its memory. That one keeps the
// cipher of each name it has met for ten minutes, so whoever makes Secrets under ever
// new names could have it hold a hundred megabytes.
type forgetfulTransformer struct {
	key []byte

	mu      sync.Mutex // guards what follows
	uses    int
	current value.Transformer
}

func (t *forgetfulTransformer) transformer() (value.Transformer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.uses++; t.uses > forgetAfter {
		fresh, err := aes.NewHKDFExtendedNonceGCMTransformer(t.key)
		if err != nil {
			return nil, fmt.Errorf("use key for Secrets: %w", err)
		}
		t.current, t.uses = fresh, 1
	}
	return t.current, nil
}

// TransformFromStorage implements value.Transformer.
func (t *forgetfulTransformer) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	current, err := t.transformer()
	if err != nil {
		return nil, false, err
	}
	return current.TransformFromStorage(ctx, data, dataCtx)
}

// TransformToStorage implements value.Transformer.
func (t *forgetfulTransformer) TransformToStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, error) {
	current, err := t.transformer()
	if err != nil {
		return nil, err
	}
	return current.TransformToStorage(ctx, data, dataCtx)
}

// secretsTransformer keeps one value that cannot be read from hiding all others.
// A watch cache that meets one never fills, and with it every reader of Secrets and
// the start of the control plane would wait for ever. So the cache is given a Secret
// of that name without data that says so. Whoever asks for the Secret itself, or is
// about to change it, gets the error.
type secretsTransformer struct{ value.Transformer }

// TransformFromStorage implements value.Transformer.
func (t secretsTransformer) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	plain, stale, err := t.Transformer.TransformFromStorage(ctx, data, dataCtx)
	if err == nil {
		return plain, stale, nil
	}
	if _, request := genericapirequest.RequestInfoFrom(ctx); !request {
		if stub, stubErr := unreadableSecret(string(dataCtx.AuthenticatedData())); stubErr == nil {
			return stub, false, nil
		}
	}
	return nil, false, fmt.Errorf("this Secret cannot be decrypted, for it was altered or belongs elsewhere (%w); restore it from a backup or delete it", err)
}

// typeUnreadable is the type of what stands in lists for a Secret that cannot be read.
const typeUnreadable corev1.SecretType = "tenantd.io/unreadable"

// unreadableSecret is what the watch cache has in place of the value at an etcd key.
func unreadableSecret(key string) ([]byte, error) {
	dir, name := path.Split(key)
	return json.Marshal(&corev1.Secret{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: path.Base(dir),
			// The garbage collector knows objects by their UID.
			UID: types.UID(uuid.NewSHA1(uuid.NameSpaceURL, []byte(key)).String()),
		},
		Type: typeUnreadable,
	})
}
