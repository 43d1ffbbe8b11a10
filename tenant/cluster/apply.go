// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/coredns/corefile-migration/migration"
	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	"k8s.io/kubernetes/cmd/kubeadm/app/componentconfigs"
	"k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"sigs.k8s.io/yaml"
)

// concurrency is how many writes are under way at once: enough that a first start
// is bound by the API server's processor and not by round trips.
const concurrency = 8

// markerName is the ConfigMap in kube-system that says what was written last.
const markerName = "tenantd-cluster"

// object is an API object of any of the kinds in path.
type object interface {
	runtime.Object
	metav1.Object
}

// bundle is a set of objects, each of which is written once for each content.
type bundle struct {
	name    string
	objects []object
	// absent objects are removed instead, once.
	absent bool
	// restored objects come back when they are deleted.
	restored bool
}

// removed is what the marker says of a bundle that is absent.
const removed = "removed"

// mark is what the marker says of an object that has been written: its content
// and name, as sha256sum prints them.
func (c *Cluster) mark(o object) (string, error) {
	h := sha256.New()
	if err := json.NewEncoder(h).Encode(o); err != nil {
		return "", fmt.Errorf("hash %s: %w", c.describe(o), err)
	}
	return hex.EncodeToString(h.Sum(nil)) + "  " + c.describe(o) + "\n", nil
}

// bundles are all objects that this cluster is to have, as of now.
func (c *Cluster) bundles() ([]bundle, error) {
	c.mu.Lock()
	coreDNS, kubeProxy := c.coreDNS, c.kubeProxy
	c.mu.Unlock()
	cc, err := c.cfg.clusterConfiguration(coreDNS, kubeProxy)
	if err != nil {
		return nil, err
	}
	join, err := c.cfg.joinObjects(cc)
	if err != nil {
		return nil, err
	}
	dns, err := coreDNSObjects(cc, coreDNS.Image)
	if err != nil {
		return nil, fmt.Errorf("render CoreDNS: %w", err)
	}
	proxy, err := kubeProxyObjects(cc, c.cfg.apiEndpoint(), kubeProxy.Image)
	if err != nil {
		return nil, fmt.Errorf("render kube-proxy: %w", err)
	}
	return []bundle{
		{name: "join", objects: join, restored: true},
		{name: "coredns", objects: dns, absent: !coreDNS.Enabled},
		{name: "kube-proxy", objects: proxy, absent: !kubeProxy.Enabled},
	}, nil
}

// apply writes what has not been written yet and what joining lacks.
func (c *Cluster) apply(ctx context.Context) error {
	bundles, err := c.bundles()
	if err != nil {
		return err
	}
	marker := configMap(metav1.NamespaceSystem, markerName, map[string]string{})
	// The informers may not know yet what was written a moment ago.
	written := c.written
	if m, ok := c.cached(marker).(*corev1.ConfigMap); ok && written == nil {
		written = m.Data
	}
	var work []func(context.Context) error
	for _, b := range bundles {
		if b.absent {
			marker.Data[b.name] = removed
		}
		for _, o := range b.objects {
			if b.absent {
				if written[b.name] != removed {
					work = append(work, func(ctx context.Context) error { return c.remove(ctx, o) })
				}
				continue
			}
			mark, err := c.mark(o)
			if err != nil {
				return err
			}
			marker.Data[b.name] += mark
			switch {
			case !strings.Contains(written[b.name], mark):
				work = append(work, func(ctx context.Context) error { return c.write(ctx, nil, o) })
			case b.restored && c.cached(o) == nil:
				work = append(work, func(ctx context.Context) error { return c.create(ctx, o) })
			}
		}
	}
	if err := all(ctx, work); err != nil {
		return err
	}
	if !maps.Equal(written, marker.Data) {
		if err := c.write(ctx, nil, marker); err != nil {
			return err
		}
	}
	c.written = marker.Data
	return nil
}

// all does all of the work, whether or not parts of it fail.
func all(ctx context.Context, work []func(context.Context) error) error {
	errs := make([]error, len(work))
	var g errgroup.Group
	g.SetLimit(concurrency)
	for i, f := range work {
		g.Go(func() error {
			errs[i] = f(ctx)
			return nil
		})
	}
	_ = g.Wait()
	return errors.Join(errs...)
}

// path is where the API has objects of o's kind.
func (c *Cluster) path(o object) (client rest.Interface, resource string) {
	switch o.(type) {
	case *corev1.ConfigMap:
		return c.cfg.Client.CoreV1().RESTClient(), "configmaps"
	case *corev1.Endpoints: //nolint:staticcheck // clients before EndpointSlices read them still
		return c.cfg.Client.CoreV1().RESTClient(), "endpoints"
	case *corev1.Event:
		return c.cfg.Client.CoreV1().RESTClient(), "events"
	case *corev1.Service:
		return c.cfg.Client.CoreV1().RESTClient(), "services"
	case *corev1.ServiceAccount:
		return c.cfg.Client.CoreV1().RESTClient(), "serviceaccounts"
	case *appsv1.DaemonSet:
		return c.cfg.Client.AppsV1().RESTClient(), "daemonsets"
	case *appsv1.Deployment:
		return c.cfg.Client.AppsV1().RESTClient(), "deployments"
	case *discoveryv1.EndpointSlice:
		return c.cfg.Client.DiscoveryV1().RESTClient(), "endpointslices"
	case *rbacv1.ClusterRole:
		return c.cfg.Client.RbacV1().RESTClient(), "clusterroles"
	case *rbacv1.ClusterRoleBinding:
		return c.cfg.Client.RbacV1().RESTClient(), "clusterrolebindings"
	case *rbacv1.Role:
		return c.cfg.Client.RbacV1().RESTClient(), "roles"
	case *rbacv1.RoleBinding:
		return c.cfg.Client.RbacV1().RESTClient(), "rolebindings"
	}
	// A kind that a new kubeadm brings: the tests that render everything fail here.
	panic(fmt.Sprintf("no path for %T", o))
}

// describe names o for errors and logs.
func (c *Cluster) describe(o object) string {
	_, resource := c.path(o)
	return resource + " " + key(o)
}

// key is o's key in informers.
func key(o object) string { return cache.MetaObjectToName(o).String() }

// cached is o as the informers know it; nil if they do not. It must not be changed.
func (c *Cluster) cached(o object) object {
	_, resource := c.path(o)
	store, ok := c.stores[resource]
	if !ok {
		return nil
	}
	// Stores of informers return no errors.
	found, ok, _ := store.GetByKey(key(o))
	if !ok {
		return nil
	}
	return found.(object)
}

// live is o as the API server has it.
func (c *Cluster) live(ctx context.Context, o object) (object, error) {
	client, resource := c.path(o)
	found, err := client.Get().NamespaceIfScoped(o.GetNamespace(), o.GetNamespace() != "").Resource(resource).Name(o.GetName()).Do(ctx).Get()
	if err != nil {
		return nil, err
	}
	return found.(object), nil
}

// create creates o unless it exists.
func (c *Cluster) create(ctx context.Context, o object) error {
	if err := c.post(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

func (c *Cluster) post(ctx context.Context, o object) error {
	client, resource := c.path(o)
	err := client.Post().NamespaceIfScoped(o.GetNamespace(), o.GetNamespace() != "").Resource(resource).
		VersionedParams(&metav1.CreateOptions{FieldManager: tenantd}, scheme.ParameterCodec).
		Body(o).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("create %s: %w", c.describe(o), err)
	}
	return nil
}

// write makes the cluster have want: it creates it, or changes what is there to
// match as far as that is ours to change. It writes nothing if nothing differs
// from have, which is what is there or nil for what the API server says. Only a
// task that every change marks may take have from the informers.
func (c *Cluster) write(ctx context.Context, have, want object) error {
	if have == nil {
		err := c.post(ctx, want)
		// A Service that exists is invalid before it is a duplicate: its address is taken.
		if !apierrors.IsAlreadyExists(err) && !apierrors.IsInvalid(err) {
			return err
		}
		var readErr error
		if have, readErr = c.live(ctx, want); apierrors.IsNotFound(readErr) {
			return err
		} else if readErr != nil {
			return fmt.Errorf("read %s: %w", c.describe(want), readErr)
		}
	}
	if want.GetLabels()[managedBy] == tenantd && have.GetLabels()[managedBy] != tenantd {
		c.log.Info("object of an addon is not ours and stays as it is", "object", c.describe(want))
		return nil
	}
	merged := have.DeepCopyObject().(object)
	if err := merge(merged, want); err != nil {
		return fmt.Errorf("update %s: %w", c.describe(want), err)
	}
	if apiequality.Semantic.DeepEqual(have, merged) {
		return nil
	}
	client, resource := c.path(want)
	err := client.Put().NamespaceIfScoped(want.GetNamespace(), want.GetNamespace() != "").Resource(resource).Name(want.GetName()).
		VersionedParams(&metav1.UpdateOptions{FieldManager: tenantd}, scheme.ParameterCodec).
		Body(merged).Do(ctx).Error()
	if apierrors.IsInvalid(err) {
		// A user has made it anew with something in it that cannot be changed, such as
		// another role in a binding. It is theirs, and must not hold up the rest.
		c.log.Warn("object stays as a user made it: delete it to have the default back", "object", c.describe(want), "error", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("update %s: %w", c.describe(want), err)
	}
	return nil
}

// remove deletes o if it is ours.
func (c *Cluster) remove(ctx context.Context, o object) error {
	have, err := c.live(ctx, o)
	if apierrors.IsNotFound(err) || err == nil && have.GetLabels()[managedBy] != tenantd {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", c.describe(o), err)
	}
	if err := c.delete(ctx, have); err != nil {
		return err
	}
	c.log.Info("removed an object of a disabled addon", "object", c.describe(o))
	return nil
}

// delete deletes that very object and not one of the same name that took its place.
func (c *Cluster) delete(ctx context.Context, have object) error {
	background, uid := metav1.DeletePropagationBackground, have.GetUID()
	client, resource := c.path(have)
	err := client.Delete().NamespaceIfScoped(have.GetNamespace(), have.GetNamespace() != "").Resource(resource).Name(have.GetName()).
		Body(&metav1.DeleteOptions{PropagationPolicy: &background, Preconditions: &metav1.Preconditions{UID: &uid}}).
		Do(ctx).Error()
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", c.describe(have), err)
	}
	return nil
}

// merge makes have what want says and leaves what belongs to others: users'
// configurations, and what the control plane itself adds.
func merge(have, want object) error {
	setLabels(have, want)
	switch want := want.(type) {
	case *corev1.ConfigMap:
		return mergeConfigMap(have.(*corev1.ConfigMap), want)
	case *corev1.Endpoints: //nolint:staticcheck // see path
		have.(*corev1.Endpoints).Subsets = want.Subsets //nolint:staticcheck // see path
	case *discoveryv1.EndpointSlice:
		have := have.(*discoveryv1.EndpointSlice)
		have.Endpoints, have.Ports = want.Endpoints, want.Ports
	case *corev1.Service:
		have := have.(*corev1.Service)
		have.Spec.Ports, have.Spec.Selector = want.Spec.Ports, want.Spec.Selector
	case *appsv1.DaemonSet:
		have.(*appsv1.DaemonSet).Spec = want.Spec
	case *appsv1.Deployment:
		have := have.(*appsv1.Deployment)
		replicas := have.Spec.Replicas
		have.Spec = want.Spec
		have.Spec.Replicas = replicas
	case *rbacv1.Role:
		have.(*rbacv1.Role).Rules = want.Rules
	case *rbacv1.ClusterRole:
		have.(*rbacv1.ClusterRole).Rules = want.Rules
	case *rbacv1.RoleBinding:
		have := have.(*rbacv1.RoleBinding)
		have.RoleRef, have.Subjects = want.RoleRef, want.Subjects
	case *rbacv1.ClusterRoleBinding:
		have := have.(*rbacv1.ClusterRoleBinding)
		have.RoleRef, have.Subjects = want.RoleRef, want.Subjects
	}
	return nil
}

func setLabels(have, want object) {
	if len(want.GetLabels()) == 0 {
		return
	}
	labels := maps.Clone(have.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, want.GetLabels())
	have.SetLabels(labels)
}

func mergeConfigMap(have, want *corev1.ConfigMap) error {
	data := maps.Clone(want.Data)
	switch want.Name {
	case constants.KubeletBaseConfigurationConfigMap, constants.KubeProxyConfigMap:
		// kubeadm's own sign of a configuration that nobody has edited.
		if !componentconfigs.VerifyConfigMapSignature(have) {
			return nil
		}
	case constants.CoreDNSConfigMap:
		if corefile := have.Data[corefileKey]; corefile != "" && !migration.Default("", corefile) {
			return nil
		}
	case constants.KubeadmConfigConfigMap:
		merged, err := mergeKubeadmConfig(have.Data[constants.ClusterConfigurationConfigMapKey], want.Data[constants.ClusterConfigurationConfigMapKey])
		if err != nil {
			return err
		}
		data[constants.ClusterConfigurationConfigMapKey] = merged
	}
	if have.Data == nil {
		have.Data = map[string]string{}
	}
	// The bootstrap signer keeps its signatures beside our key in cluster-info.
	maps.Copy(have.Data, data)
	if sum, ok := want.Annotations[constants.ComponentConfigHashAnnotationKey]; ok {
		have.Annotations[constants.ComponentConfigHashAnnotationKey] = sum
	}
	return nil
}

// mergeKubeadmConfig puts what the tenant's specification decides into a
// ClusterConfiguration that users may have edited.
func mergeKubeadmConfig(have, want string) (string, error) {
	var theirs, ours v1beta4.ClusterConfiguration
	if err := yaml.Unmarshal([]byte(want), &ours); err != nil {
		return "", err
	}
	if err := yaml.Unmarshal([]byte(have), &theirs); err != nil || theirs.TypeMeta != ours.TypeMeta {
		return want, nil // not what any kubeadm could read
	}
	before := *theirs.DeepCopy()
	theirs.KubernetesVersion = ours.KubernetesVersion
	theirs.ControlPlaneEndpoint = ours.ControlPlaneEndpoint
	theirs.Networking = ours.Networking
	theirs.DNS.Disabled = ours.DNS.Disabled
	theirs.Proxy.Disabled = ours.Proxy.Disabled
	if apiequality.Semantic.DeepEqual(before, theirs) {
		return have, nil
	}
	merged, err := yaml.Marshal(theirs)
	return string(merged), err
}
