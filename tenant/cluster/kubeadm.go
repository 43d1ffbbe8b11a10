// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	kubeadmscheme "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/scheme"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	"k8s.io/kubernetes/cmd/kubeadm/app/componentconfigs"
	"k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/addons/dns"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/addons/proxy"
	kubeadmutil "k8s.io/kubernetes/cmd/kubeadm/app/util"
)

// What is in this file is kubeadm's: its configuration types, its rendering of
// the kubelets' configuration and of the addons are called, and a test compares
// the rest with what kubeadm's own functions write. Those are not called, because
// they print to the process's standard output and go on for a minute whatever
// becomes of the caller. Neither is kubeadm's util/config linked: it
// brings kustomize and the package plugin, which keeps the linker from leaving
// out unused methods of the whole program.

// Names of kubeadm's that are not in its package constants.
const (
	clusterInfoRole   = "kubeadm:bootstrap-signer-clusterinfo"
	kubeadmConfigRole = "kubeadm:nodes-kubeadm-config"
	corefileKey       = "Corefile"
)

// Names of ours that workers know.
const (
	hostsName       = "tenantd-hosts"
	hostsKey        = "hosts"
	konnectivityKey = "konnectivityHostname"
)

// managedBy marks objects of the addons as ours.
const (
	managedBy = "app.kubernetes.io/managed-by"
	tenantd   = "tenantd"
)

// server is where everybody outside of the cluster reaches the API server.
func (c *Config) server() string { return net.JoinHostPort(c.Hostname, strconv.Itoa(c.Port)) }

// clusterConfiguration is what kubeadm would have been configured with to make
// this cluster.
func (c *Config) clusterConfiguration(coreDNS, kubeProxy Addon) (*kubeadm.ClusterConfiguration, error) {
	versioned := &v1beta4.ClusterConfiguration{
		KubernetesVersion:    c.Version,
		ControlPlaneEndpoint: c.server(),
		Networking:           v1beta4.Networking{ServiceSubnet: c.ServiceCIDR, PodSubnet: c.PodCIDR, DNSDomain: c.DNSDomain},
		DNS:                  v1beta4.DNS{Disabled: !coreDNS.Enabled},
		Proxy:                v1beta4.Proxy{Disabled: !kubeProxy.Enabled},
	}
	kubeadmscheme.Scheme.Default(versioned)
	cc := &kubeadm.ClusterConfiguration{}
	if err := kubeadmscheme.Scheme.Convert(versioned, cc, nil); err != nil {
		return nil, fmt.Errorf("convert kubeadm's configuration: %w", err)
	}
	componentconfigs.Default(cc, c.apiEndpoint(), &kubeadm.NodeRegistrationOptions{})
	kubelet, ok := cc.ComponentConfigs[componentconfigs.KubeletGroup].Get().(*kubeletconfig.KubeletConfiguration)
	if !ok {
		return nil, errors.New("kubeadm has no configuration for kubelets")
	}
	// Signed by the cluster, not by themselves, so that the API server can verify
	// whom it sends an exec to.
	kubelet.ServerTLSBootstrap = true
	return cc, nil
}

// apiEndpoint is the API server's own address, of which kubeadm takes the address
// family here, and complains if its port is not that of server.
func (c *Config) apiEndpoint() *kubeadm.APIEndpoint {
	return &kubeadm.APIEndpoint{AdvertiseAddress: c.WorkerVIP.String(), BindPort: int32(c.Port)}
}

// joinObjects are what kubeadm join, its other commands, and tenantd's own part on
// workers need.
func (c *Config) joinObjects(cc *kubeadm.ClusterConfiguration) ([]object, error) {
	clusterInfo, err := c.clusterInfo()
	if err != nil {
		return nil, err
	}
	kubeadmConfig, err := kubeadmConfig(cc)
	if err != nil {
		return nil, err
	}
	kubeletConfig, err := cc.ComponentConfigs[componentconfigs.KubeletGroup].Marshal()
	if err != nil {
		return nil, fmt.Errorf("render kubelets' configuration: %w", err)
	}
	kubelet := configMap(metav1.NamespaceSystem, constants.KubeletBaseConfigurationConfigMap, map[string]string{
		constants.KubeletBaseConfigurationConfigMapKey: string(kubeletConfig),
	})
	componentconfigs.SignConfigMap(kubelet)

	joining := group(constants.NodeBootstrapTokenAuthGroup)
	nodes := group(constants.NodesGroup)
	return []object{
		clusterInfo,
		reader(metav1.NamespacePublic, clusterInfoRole, bootstrapapi.ConfigMapClusterInfo),
		readers(metav1.NamespacePublic, clusterInfoRole, user("system:anonymous")),
		kubeadmConfig,
		reader(metav1.NamespaceSystem, kubeadmConfigRole, constants.KubeadmConfigConfigMap),
		readers(metav1.NamespaceSystem, kubeadmConfigRole, joining, nodes),
		kubelet,
		reader(metav1.NamespaceSystem, constants.KubeletBaseConfigMapRole, constants.KubeletBaseConfigurationConfigMap),
		readers(metav1.NamespaceSystem, constants.KubeletBaseConfigMapRole, nodes, joining),
		reader(metav1.NamespacePublic, hostsName, hostsName),
		readers(metav1.NamespacePublic, hostsName, nodes),

		// A join asks whether a Node of its name exists already.
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: constants.GetNodesClusterRoleName},
			Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"nodes"}}},
		},
		grant(constants.GetNodesClusterRoleName, constants.GetNodesClusterRoleName, joining),
		grant(constants.NodeKubeletBootstrap, constants.NodeBootstrapperClusterRoleName, joining),
		grant(constants.NodeAutoApproveBootstrapClusterRoleBinding, constants.CSRAutoApprovalClusterRoleName, joining),
		grant(constants.NodeAutoApproveCertificateRotationClusterRoleBinding, constants.NodeSelfCSRAutoApprovalClusterRoleName, nodes),
		grant(constants.KubeletAPIAdminClusterRoleBindingName, constants.KubeletAPIAdminClusterRoleName, user(constants.APIServerKubeletClientCertCommonName)),
		grant(constants.ClusterAdminsGroupAndClusterRoleBinding, "cluster-admin", group(constants.ClusterAdminsGroupAndClusterRoleBinding)),
	}, nil
}

// clusterInfo is what a joining machine reads before it knows anything but a
// token; the control plane's bootstrap signer signs it with every token.
func (c *Config) clusterInfo() (*corev1.ConfigMap, error) {
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{Clusters: map[string]*clientcmdapi.Cluster{
		"": {Server: "https://" + c.server(), CertificateAuthorityData: c.CA},
	}})
	if err != nil {
		return nil, fmt.Errorf("render cluster-info: %w", err)
	}
	return configMap(metav1.NamespacePublic, bootstrapapi.ConfigMapClusterInfo, map[string]string{
		bootstrapapi.KubeConfigKey: string(kubeconfig),
	}), nil
}

func kubeadmConfig(cc *kubeadm.ClusterConfiguration) (*corev1.ConfigMap, error) {
	bare := cc.DeepCopy()
	bare.ComponentConfigs = kubeadm.ComponentConfigMap{} // they have ConfigMaps of their own
	data, err := kubeadmutil.MarshalToYamlForCodecs(bare, v1beta4.SchemeGroupVersion, kubeadmscheme.Codecs)
	if err != nil {
		return nil, fmt.Errorf("render kubeadm's configuration: %w", err)
	}
	return configMap(metav1.NamespaceSystem, constants.KubeadmConfigConfigMap, map[string]string{
		constants.ClusterConfigurationConfigMapKey: string(data),
	}), nil
}

// coreDNSObjects are kubeadm's CoreDNS.
func coreDNSObjects(cc *kubeadm.ClusterConfiguration, image string) ([]object, error) {
	return addonObjects(image, func(w io.Writer) error { return dns.EnsureDNSAddon(cc, nil, "", w, true) })
}

// kubeProxyObjects are kubeadm's kube-proxy.
func kubeProxyObjects(cc *kubeadm.ClusterConfiguration, local *kubeadm.APIEndpoint, image string) ([]object, error) {
	return addonObjects(image, func(w io.Writer) error { return proxy.EnsureProxyAddon(cc, local, nil, "", w, true) })
}

// addonObjects reads what kubeadm prints for those who want to apply an addon
// themselves.
func addonObjects(image string, print func(io.Writer) error) ([]object, error) {
	var printed bytes.Buffer
	if err := print(&printed); err != nil {
		return nil, err
	}
	var objects []object
	for docs := yaml.NewYAMLReader(bufio.NewReader(&printed)); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		decoded, _, err := scheme.Codecs.UniversalDeserializer().Decode(doc, nil, nil)
		if err != nil {
			return nil, err
		}
		o, ok := decoded.(object)
		if !ok {
			return nil, fmt.Errorf("%T is not an object that can be applied", decoded)
		}
		switch o := o.(type) {
		case *appsv1.Deployment:
			setImage(&o.Spec.Template.Spec, image)
		case *appsv1.DaemonSet:
			setImage(&o.Spec.Template.Spec, image)
		case *corev1.ConfigMap:
			if o.Name == constants.KubeProxyConfigMap {
				componentconfigs.SignConfigMap(o)
			}
		}
		labels := o.GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		labels[managedBy] = tenantd
		o.SetLabels(labels)
		o.SetResourceVersion("") // kubeadm's own way to update a Service
		objects = append(objects, o)
	}
}

func setImage(pod *corev1.PodSpec, image string) {
	if image != "" {
		pod.Containers[0].Image = image
	}
}

func configMap(namespace, name string, data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: data}
}

// reader is a role that may read one ConfigMap.
func reader(namespace, name, configMap string) *rbacv1.Role {
	return &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{configMap}}},
	}
}

// readers have the role of the same name.
func readers(namespace, name string, subjects ...rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   subjects,
	}
}

// grant gives a role to somebody in the whole cluster.
func grant(name, role string, to rbacv1.Subject) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{to},
	}
}

// Subjects carry their API group, which kubeadm leaves to the server's defaults, so
// that they compare equal with what is stored.

func group(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: name}
}

func user(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}
