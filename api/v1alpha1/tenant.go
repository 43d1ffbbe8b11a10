// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReservedTenantName is the one name no tenant can have: the system plane is
// served under it, as system.<domain>.
const ReservedTenantName = "system"

// MaxTenantNameLength bounds a tenant's name, in bytes. It leaves room for a
// prefix within the 64 characters of a certificate's common name.
const MaxTenantNameLength = 40

// Tenant is one Kubernetes cluster whose control plane is run by tenantd.
// Creating the object starts the control plane; deleting it stops the control
// plane and wipes everything the cluster stored, its keys included.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:annotations="tenantd.io/generation=1"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,path=tenants,singular=tenant,shortName=tn
// +kubebuilder:selectablefield:JSONPath=`.spec.hostname`
// +kubebuilder:selectablefield:JSONPath=`.spec.konnectivityHostname`
// +kubebuilder:printcolumn:name=Hostname,type=string,JSONPath=`.spec.hostname`,description="Name under which the API server is reached."
// +kubebuilder:printcolumn:name=Phase,type=string,JSONPath=`.status.phase`,description="Where the tenant is in its life."
// +kubebuilder:printcolumn:name=Host,type=string,JSONPath=`.status.placement[0]`,description="First host that runs the control plane; status.placement has all."
// +kubebuilder:printcolumn:name=Version,type=string,JSONPath=`.status.version`,description="Kubernetes version of the control plane."
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`,description="Time since the tenant was created."
// +kubebuilder:printcolumn:name=Replicas,type=integer,priority=1,JSONPath=`.spec.replicas`,description="Hosts that run the control plane at the same time."
// +kubebuilder:printcolumn:name=Nodes,type=integer,priority=1,JSONPath=`.status.nodes`,description="Nodes registered in the tenant."
// +kubebuilder:printcolumn:name=Storage,type=string,priority=1,JSONPath=`.status.storage`,description="Storage in use."
// +kubebuilder:printcolumn:name=Memory,type=string,priority=1,JSONPath=`.status.memory`,description="Memory the control plane uses, estimated."
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="metadata.name: must be a DNS label of at most 40 characters: lower-case letters, digits and '-', with a letter or digit at both ends"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'system'",message="metadata.name: 'system' is reserved for the system plane; choose another name"
type Tenant struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is the cluster that is wanted. Every field has a default, so a name
	// alone makes a working cluster.
	// +optional
	// +kubebuilder:default={}
	Spec TenantSpec `json:"spec,omitzero"`

	// status is what the host last observed.
	// +optional
	Status TenantStatus `json:"status,omitzero"`
}

// TenantList is a list of tenants.
//
// +kubebuilder:object:root=true
type TenantList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Tenant `json:"items"`
}

// TenantSpec is the cluster that is wanted. The zero value of a field means its
// default.
//
// +kubebuilder:validation:XValidation:rule="!has(self.hostname) || !has(self.konnectivityHostname) || self.hostname.size() == 0 || self.hostname != self.konnectivityHostname",fieldPath=".konnectivityHostname",message="must differ from spec.hostname; leave it empty to serve the tunnel under the hostname"
type TenantSpec struct {
	// hostname is the DNS name under which the cluster's API server is reached,
	// on the host's one port. The default is the tenant's name followed by the
	// host's domain, such as acme.k8s.example.com. A new name takes effect at
	// once; kubeconfigs and workers that use the old one must be given the new.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == '' || (self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.matches('(^|[.])[0-9]+$'))",message="must be a DNS name in lower case with labels of at most 63 characters, such as acme.k8s.example.com, and not an IP address"
	Hostname string `json:"hostname,omitempty"`

	// konnectivityHostname is a second DNS name for the tunnel from the workers,
	// for networks that must tell the two apart. When empty, the tunnel is served
	// under the hostname.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == '' || (self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.matches('(^|[.])[0-9]+$'))",message="must be a DNS name in lower case with labels of at most 63 characters, such as tunnel.acme.k8s.example.com, and not an IP address"
	KonnectivityHostname string `json:"konnectivityHostname,omitempty"`

	// replicas is the number of hosts that run the control plane at the same time.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=5
	Replicas int32 `json:"replicas,omitempty"`

	// placement is on which hosts the control plane should run. When empty, the
	// hosts are chosen by load, and a tenant stays where it is while that is well.
	// The Placed condition says why the tenant is where it is.
	// +optional
	Placement TenantPlacement `json:"placement,omitzero"`

	// network is the cluster's addresses. None of them can change later: nodes,
	// pods and Services keep the addresses they were given.
	// +optional
	// +kubebuilder:default={}
	Network TenantNetwork `json:"network,omitzero"`

	// certSANs are further names and IP addresses that the API server's
	// certificate is valid for, for clients that reach it by another way. The
	// hostname and the names and addresses used inside the cluster are always
	// included.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) || (self.matches('^([*][.])?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.matches('(^|[.])[0-9]+$'))",message="must be an IP address or a DNS name in lower case with labels of at most 63 characters; the first label may be '*'"
	CertSANs []string `json:"certSANs,omitempty"`

	// addons are the components that tenantd installs into the cluster.
	// +optional
	// +kubebuilder:default={}
	Addons TenantAddons `json:"addons,omitzero"`

	// limits bound what the tenant takes from the host it shares with others.
	// +optional
	// +kubebuilder:default={}
	Limits TenantLimits `json:"limits,omitzero"`

	// sleep says when the control plane is stopped for want of use.
	// +optional
	Sleep TenantSleep `json:"sleep,omitzero"`
}

// TenantSleep says when a control plane is stopped for want of use. Its data stays, and
// the next connection starts it again. A tenant with nodes, with several replicas, or
// with work that is due by itself, such as CronJobs, does not fall asleep.
type TenantSleep struct {
	// enabled says whether the tenant falls asleep. When not set, the configuration of
	// its host decides, which is yes if that says nothing.
	// +optional
	Enabled *bool `json:"enabled,omitempty"`

	// after is for how long nobody must have used the tenant, such as 30m or 8h. The
	// default is the host's sleep.after, which is 30m if not configured.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]+([.][0-9]+)?(ms|s|m|h))+$') && duration(self) >= duration('10s')",message="must be a duration of at least 10s, such as 30m or 8h"
	After *metav1.Duration `json:"after,omitempty"`
}

// TenantPlacement is a wish: a host that is draining, full or not there is passed over,
// and another one takes its place until it can be granted.
type TenantPlacement struct {
	// hosts are the names of the hosts that should run the control plane, the first
	// of them before the others when spec.replicas is less than their number.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=5
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.matches('(^|[.])[0-9]+$')",message="must be the name of a host in lower case, such as host-a"
	Hosts []string `json:"hosts,omitempty"`
}

// TenantNetwork is a cluster's addresses, all of one IP family.
//
// +kubebuilder:validation:XValidation:rule="!has(self.podCIDR) || !isCIDR(self.podCIDR) || !has(self.serviceCIDR) || !isCIDR(self.serviceCIDR) || cidr(self.podCIDR).ip().family() == cidr(self.serviceCIDR).ip().family()",fieldPath=".serviceCIDR",message="must be of the same IP family as spec.network.podCIDR"
// +kubebuilder:validation:XValidation:rule="!has(self.podCIDR) || !isCIDR(self.podCIDR) || !has(self.serviceCIDR) || !isCIDR(self.serviceCIDR) || (!cidr(self.podCIDR).containsCIDR(self.serviceCIDR) && !cidr(self.serviceCIDR).containsCIDR(self.podCIDR))",fieldPath=".serviceCIDR",message="must not overlap spec.network.podCIDR"
// +kubebuilder:validation:XValidation:rule="!has(self.workerVIP) || !isIP(self.workerVIP) || !has(self.serviceCIDR) || !isCIDR(self.serviceCIDR) || ip(self.workerVIP).family() == cidr(self.serviceCIDR).ip().family()",fieldPath=".workerVIP",message="must be of the same IP family as spec.network.serviceCIDR"
// +kubebuilder:validation:XValidation:rule="!has(self.workerVIP) || !isIP(self.workerVIP) || !has(self.podCIDR) || !isCIDR(self.podCIDR) || !cidr(self.podCIDR).containsIP(self.workerVIP)",fieldPath=".workerVIP",message="must lie outside spec.network.podCIDR"
// +kubebuilder:validation:XValidation:rule="!has(self.workerVIP) || !isIP(self.workerVIP) || !has(self.serviceCIDR) || !isCIDR(self.serviceCIDR) || !cidr(self.serviceCIDR).containsIP(self.workerVIP)",fieldPath=".workerVIP",message="must lie outside spec.network.serviceCIDR"
type TenantNetwork struct {
	// podCIDR is the range that pods get their addresses from. Each node takes a
	// /24 of it (IPv6: a /64), so its prefix is /8 to /24 (IPv6: /48 to /64).
	// +optional
	// +kubebuilder:default="10.244.0.0/16"
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked()",message="must be a network in CIDR notation with no host bits set, such as 10.244.0.0/16"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 8 && cidr(self).prefixLength() <= 24 : cidr(self).prefixLength() >= 48 && cidr(self).prefixLength() <= 64)",message="must have a prefix of /8 to /24, or /48 to /64 for IPv6: each node takes a /24 or a /64 of it"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().isGlobalUnicast()",message="must not be a loopback, link-local, multicast or unspecified network"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable; create another tenant to change it"
	PodCIDR string `json:"podCIDR,omitempty"`

	// serviceCIDR is the range that Services get their cluster IPs from. Its
	// prefix is /12 to /28 (IPv6: /108 to /124).
	// +optional
	// +kubebuilder:default="10.96.0.0/16"
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked()",message="must be a network in CIDR notation with no host bits set, such as 10.96.0.0/16"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 12 && cidr(self).prefixLength() <= 28 : cidr(self).prefixLength() >= 108 && cidr(self).prefixLength() <= 124)",message="must have a prefix of /12 to /28, or /108 to /124 for IPv6"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().isGlobalUnicast()",message="must not be a loopback, link-local, multicast or unspecified network"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable; create another tenant to change it"
	ServiceCIDR string `json:"serviceCIDR,omitempty"`

	// dnsDomain is the domain of the names inside the cluster. It is short enough
	// for the longest name of a Service in it to be a DNS name.
	// +optional
	// +kubebuilder:default="cluster.local"
	// +kubebuilder:validation:MaxLength=121
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.matches('(^|[.])[0-9]+$')",message="must be a DNS name in lower case with labels of at most 63 characters, such as cluster.local"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable; create another tenant to change it"
	DNSDomain string `json:"dnsDomain,omitempty"`

	// workerVIP is the address, on every worker, where pods find the API server.
	// It exists on workers only and must be in no network that they reach.
	// +optional
	// +kubebuilder:default="172.20.0.1"
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).isGlobalUnicast()",message="must be an IP address, and not a loopback, link-local, multicast or unspecified one"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable; create another tenant to change it"
	WorkerVIP string `json:"workerVIP,omitempty"`
}

// TenantAddons are the components that tenantd installs into a cluster.
type TenantAddons struct {
	// coreDNS answers the names inside the cluster.
	// +optional
	// +kubebuilder:default={}
	CoreDNS Addon `json:"coreDNS,omitzero"`

	// kubeProxy makes the cluster IPs of Services work on the nodes. Disable it
	// when the pod network does that itself.
	// +optional
	// +kubebuilder:default={}
	KubeProxy Addon `json:"kubeProxy,omitzero"`
}

// Addon is one component that tenantd installs into a cluster.
type Addon struct {
	// enabled says whether tenantd installs the component and keeps it as it
	// installed it.
	// +optional
	// +kubebuilder:default=true
	Enabled *bool `json:"enabled,omitempty"`

	// image replaces the component's image, for private registries. When empty,
	// the image that belongs to the Kubernetes version is used.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self == '' || self.matches('^[A-Za-z0-9][A-Za-z0-9._:/@-]*$')",message="must be an image reference such as registry.example.com/coredns:v1.14.2"
	Image string `json:"image,omitempty"`
}

// TenantLimits bound what one tenant takes from the host it shares with others.
type TenantLimits struct {
	// storage is the most the cluster's objects may take in the host's storage.
	// Beyond it, writes that add to it are refused; deletions always work. The
	// default is the host's limits.tenantStorage, which is 256Mi if not configured.
	// +optional
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",message="must be a positive amount of bytes, such as 256Mi"
	Storage resource.Quantity `json:"storage,omitzero"`

	// connections is the number of connections to the API server that may be open
	// at the same time.
	// +optional
	// +kubebuilder:default=10000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Connections int32 `json:"connections,omitempty"`

	// objects is the number of objects that the cluster may store.
	// +optional
	// +kubebuilder:default=50000
	// +kubebuilder:validation:Minimum=1000
	// +kubebuilder:validation:Maximum=10000000
	Objects int32 `json:"objects,omitempty"`

	// objectSize is the most that one object may take in the host's storage. No
	// object can be larger than 1536Ki, whatever is given here.
	// +optional
	// +kubebuilder:default="1536Ki"
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('16Ki')) >= 0",message="must be at least 16Ki, such as 1Mi"
	ObjectSize resource.Quantity `json:"objectSize,omitzero"`

	// customResourceDefinitions is the number of CustomResourceDefinitions that the
	// cluster may have. Each costs the host memory and processor time for as long
	// as it exists.
	// +optional
	// +kubebuilder:default=250
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	CustomResourceDefinitions *int32 `json:"customResourceDefinitions,omitempty"`

	// customResourceDefinitionStorage is the most that all CustomResourceDefinitions
	// together may take in the host's storage. In the host's memory a schema takes
	// many times its size.
	// +optional
	// +kubebuilder:default="16Mi"
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0",message="must be an amount of bytes, such as 16Mi"
	CustomResourceDefinitionStorage *resource.Quantity `json:"customResourceDefinitionStorage,omitempty"`

	// requestsInFlight is the number of requests that the API server works on at
	// the same time. Watches and other long-running requests do not count.
	// +optional
	// +kubebuilder:default=200
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=100000
	RequestsInFlight int32 `json:"requestsInFlight,omitempty"`

	// requestsPerSecond is the number of requests that the API server accepts each
	// second; twice as many may come at once.
	// +optional
	// +kubebuilder:default=500
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=1000000
	RequestsPerSecond int32 `json:"requestsPerSecond,omitempty"`

	// watches is the number of watches and other long-running requests, such as
	// exec, logs that are followed and port-forward, at the same time.
	// +optional
	// +kubebuilder:default=5000
	// +kubebuilder:validation:Minimum=100
	// +kubebuilder:validation:Maximum=1000000
	Watches int32 `json:"watches,omitempty"`
}

// TenantPhase is a one-word summary of a tenant's conditions, for people.
// Programs decide by the conditions.
//
// +kubebuilder:validation:Enum=Pending;Starting;Ready;Moving;Asleep;Failed;Deleting
type TenantPhase string

const (
	// TenantPending means that no host has taken the tenant yet.
	TenantPending TenantPhase = "Pending"
	// TenantStarting means that a host is bringing the control plane up.
	TenantStarting TenantPhase = "Starting"
	// TenantReady means that the API server answers under the hostname.
	TenantReady TenantPhase = "Ready"
	// TenantMoving means that the control plane goes from one host to another.
	TenantMoving TenantPhase = "Moving"
	// TenantAsleep means that the control plane is stopped for want of use and
	// starts again at the next connection.
	TenantAsleep TenantPhase = "Asleep"
	// TenantFailed means that the control plane cannot run as specified; the Ready
	// condition says why. The host tries again, less and less often.
	TenantFailed TenantPhase = "Failed"
	// TenantDeleting means that the control plane is being stopped and its data wiped.
	TenantDeleting TenantPhase = "Deleting"
)

// TenantStatus is what the host last observed of a tenant.
type TenantStatus struct {
	// phase is a summary of the conditions for people.
	// +optional
	Phase TenantPhase `json:"phase,omitempty"`

	// observedGeneration is the metadata.generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// endpoint is the host name and port under which the API server is reached.
	// +optional
	// +kubebuilder:validation:MaxLength=259
	Endpoint string `json:"endpoint,omitempty"`

	// placement is the names of the hosts that run the control plane. It is the
	// authority: a host that is not named here does not run the tenant.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=253
	Placement []string `json:"placement,omitempty"`

	// version is the Kubernetes version of the control plane, such as v1.37.1.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Version string `json:"version,omitempty"`

	// nodes is the number of nodes registered in the cluster.
	// +optional
	Nodes *int32 `json:"nodes,omitempty"`

	// storage is what the cluster's objects take in the host's storage.
	// +optional
	Storage *resource.Quantity `json:"storage,omitempty"`

	// memory is an estimate of what the control plane uses of the host's memory.
	// +optional
	Memory *resource.Quantity `json:"memory,omitempty"`

	// asleepSince is when the tenant fell asleep. A tenant that has it is not started
	// before somebody asks for it, and has no phase but Asleep.
	// +optional
	AsleepSince *metav1.Time `json:"asleepSince,omitempty"`

	// conditions say, one by one, what is in order and what is not.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Types of a tenant's conditions. Each is True when all is well.
const (
	// ConditionReady is the summary: the API server answers under the hostname and
	// the cluster can be used.
	ConditionReady = "Ready"
	// ConditionPlaced says that status.placement names enough hosts; its message says
	// why these.
	ConditionPlaced = "Placed"
	// ConditionCertificatesIssued says that the tenant has its authorities and every
	// certificate it needs, none of them expired.
	ConditionCertificatesIssued = "CertificatesIssued"
	// ConditionControlPlaneAvailable says that the API server, the controllers and
	// the scheduler are running.
	ConditionControlPlaneAvailable = "ControlPlaneAvailable"
	// ConditionAddonsInstalled says that the objects a cluster starts with, and the
	// enabled add-ons, are in the cluster.
	ConditionAddonsInstalled = "AddonsInstalled"
	// ConditionStorageWithinQuota says that the tenant's objects take less than
	// spec.limits.storage.
	ConditionStorageWithinQuota = "StorageWithinQuota"
	// ConditionAwake says whether the tenant is asleep, and if not, what keeps it awake
	// or when it falls asleep.
	ConditionAwake = "Awake"
)

// Reasons of a tenant's conditions.
const (
	// ReasonAsExpected is the reason of a condition that is True.
	ReasonAsExpected = "AsExpected"
	// ReasonWaitingForHost means that no host has room or has noticed the tenant.
	ReasonWaitingForHost = "WaitingForHost"
	// ReasonTooFewHosts means that spec.replicas is more than the hosts there are.
	ReasonTooFewHosts = "TooFewHosts"
	// ReasonHostNotAvailable means that a host of spec.placement is draining, full or
	// not there, and that another one runs the tenant.
	ReasonHostNotAvailable = "HostNotAvailable"
	// ReasonHostnameTaken means that another tenant, or the system plane, is served
	// under one of the tenant's names.
	ReasonHostnameTaken = "HostnameTaken"
	// ReasonIssuing means that certificates are being made.
	ReasonIssuing = "Issuing"
	// ReasonIssueFailed means that a certificate could not be made.
	ReasonIssueFailed = "IssueFailed"
	// ReasonStarting means that the component is coming up.
	ReasonStarting = "Starting"
	// ReasonStartFailed means that the component could not be started.
	ReasonStartFailed = "StartFailed"
	// ReasonStopped means that the component ended by itself; the message has its error.
	ReasonStopped = "Stopped"
	// ReasonNotAnswering means that the API server runs but does not report ready.
	ReasonNotAnswering = "NotAnswering"
	// ReasonInstallFailed means that an add-on could not be written to the cluster.
	ReasonInstallFailed = "InstallFailed"
	// ReasonQuotaExceeded means that spec.limits.storage is used up.
	ReasonQuotaExceeded = "QuotaExceeded"
	// ReasonAsleep means that the tenant is stopped for want of use.
	ReasonAsleep = "Asleep"
	// ReasonKeptAwake means that nobody uses the tenant and that it does not fall asleep
	// all the same, because of what the message says.
	ReasonKeptAwake = "KeptAwake"
	// ReasonMoving means that the tenant goes to another host.
	ReasonMoving = "Moving"
	// ReasonDeleting means that the tenant is being removed.
	ReasonDeleting = "Deleting"
)

// TenantFinalizer keeps a deleted Tenant until the host has stopped its control
// plane and wiped its data and keys.
const TenantFinalizer = "tenantd.io/wipe"

// RequestAnnotation asks the host of a tenant for something that is done once, one of
// the requests below. The host takes it off when that is done or refused; the Awake
// condition says which.
const RequestAnnotation = "tenantd.io/request"

// Values of RequestAnnotation.
const (
	// RequestSleep asks to stop the control plane at once, as if nobody had used it for
	// long. A tenant that is created with it is not started before somebody asks for it.
	RequestSleep = "sleep"
	// RequestWake asks to start it again.
	RequestWake = "wake"
)
