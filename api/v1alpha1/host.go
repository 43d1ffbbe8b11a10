// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Host is one machine that runs tenantd as a part of the installation. The object comes
// with the host's joining; deleting it has the host's tenants moved away and takes the
// host out of the installation.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:annotations="tenantd.io/generation=1"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,path=hosts,singular=host,shortName=hst
// +kubebuilder:printcolumn:name=Role,type=string,JSONPath=`.status.role`,description="What the host is to etcd: voter or learner."
// +kubebuilder:printcolumn:name=State,type=string,JSONPath=`.status.state`,description="Where the host is in its life."
// +kubebuilder:printcolumn:name=Version,type=string,JSONPath=`.status.version`,description="Version of tenantd that the host runs."
// +kubebuilder:printcolumn:name=Tenants,type=integer,JSONPath=`.status.tenants`,description="Tenants that are placed on the host."
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`,description="Time since the host joined."
// +kubebuilder:printcolumn:name=Address,type=string,priority=1,JSONPath=`.status.address`,description="Where the host's one port is reached."
// +kubebuilder:printcolumn:name=Memory,type=string,priority=1,JSONPath=`.status.memory.used`,description="Memory in use on the machine."
// +kubebuilder:printcolumn:name=Leader,type=boolean,priority=1,JSONPath=`.status.etcd.leader`,description="Whether the host's etcd member leads."
// +kubebuilder:printcolumn:name=Lag,type=integer,priority=1,JSONPath=`.status.etcd.lag`,description="Entries of the log that the host's etcd member is behind the leader."
// +kubebuilder:printcolumn:name=Load,type=string,priority=1,JSONPath=`.status.load`,description="Processors that are busy."
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$') && !self.metadata.name.matches('(^|[.])[0-9]+$')",message="metadata.name: must be a host name in lower case with labels of at most 63 characters, such as host-a, and not an IP address"
type Host struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what is wanted of the host.
	// +optional
	Spec HostSpec `json:"spec,omitzero"`

	// status is what the host says of itself and, once it has fallen silent, what
	// the others say of it.
	// +optional
	Status HostStatus `json:"status,omitzero"`
}

// HostList is a list of hosts.
//
// +kubebuilder:object:root=true
type HostList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Host `json:"items"`
}

// HostSpec is what is wanted of a host.
type HostSpec struct {
	// draining has the host's tenants moved to other hosts and no tenant placed on
	// it, whatever the tenant wishes. The host stays a part of the installation and
	// forwards connections as before.
	// +optional
	Draining bool `json:"draining,omitempty"`
}

// HostState is a one-word summary of a host's conditions, for people. Programs
// decide by the conditions.
//
// +kubebuilder:validation:Enum=Joining;Ready;NotReady;Draining;Left
type HostState string

const (
	// HostJoining means that the host is being made a part of the installation.
	HostJoining HostState = "Joining"
	// HostReady means that the host serves tenants and takes more.
	HostReady HostState = "Ready"
	// HostNotReady means that the host does not answer or cannot serve; the Ready
	// condition says why. Its tenants are taken over by others.
	HostNotReady HostState = "NotReady"
	// HostDraining means that spec.draining is set, or that the host is being
	// removed: its tenants move away or have done so, and it takes no more.
	HostDraining HostState = "Draining"
	// HostLeft means that the host is no part of the installation any more. The
	// object goes soon.
	HostLeft HostState = "Left"
)

// HostRole is what a host is to the installation's etcd.
//
// +kubebuilder:validation:Enum=voter;learner
type HostRole string

const (
	// HostVoter means that the host's etcd member counts for the majority.
	HostVoter HostRole = "voter"
	// HostLearner means that the host's etcd member has a copy and no vote.
	HostLearner HostRole = "learner"
)

// HostStatus is what is known of a host.
type HostStatus struct {
	// state is a summary of the conditions for people.
	// +optional
	State HostState `json:"state,omitempty"`

	// observedGeneration is the metadata.generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// address is where clients and other hosts reach the host's one port, as
	// IP:port.
	// +optional
	// +kubebuilder:validation:MaxLength=259
	Address string `json:"address,omitempty"`

	// peerAddress is where other hosts reach the host's etcd member, as IP:port;
	// empty if it has none.
	// +optional
	// +kubebuilder:validation:MaxLength=259
	PeerAddress string `json:"peerAddress,omitempty"`

	// gossipAddress is where other hosts reach the host's gossip, as IP:port.
	// +optional
	// +kubebuilder:validation:MaxLength=259
	GossipAddress string `json:"gossipAddress,omitempty"`

	// role is what the host is to etcd.
	// +optional
	Role HostRole `json:"role,omitempty"`

	// version is the version of tenantd that the host runs, such as v0.3.0.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Version string `json:"version,omitempty"`

	// tenants is the number of tenants whose status.placement names the host.
	// +optional
	Tenants *int32 `json:"tenants,omitempty"`

	// memory is the machine's memory.
	// +optional
	Memory HostMemory `json:"memory,omitzero"`

	// cores is the number of processors that tenantd may use.
	// +optional
	Cores int32 `json:"cores,omitempty"`

	// load is how many processors are busy, averaged over a minute, such as 350m.
	// +optional
	Load *resource.Quantity `json:"load,omitempty"`

	// etcd is about the host's etcd member; absent if it has none.
	// +optional
	Etcd *HostEtcd `json:"etcd,omitempty"`

	// heartbeatTime is when the host last wrote this status.
	// +optional
	HeartbeatTime metav1.Time `json:"heartbeatTime,omitzero"`

	// conditions say, one by one, how the host is.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// HostMemory is a machine's memory, in bytes.
type HostMemory struct {
	// used is what is in use and cannot be reclaimed at once.
	// +optional
	Used *resource.Quantity `json:"used,omitempty"`

	// total is what there is.
	// +optional
	Total *resource.Quantity `json:"total,omitempty"`
}

// HostEtcd is how a host's etcd member is.
type HostEtcd struct {
	// leader says whether the member leads.
	// +optional
	Leader bool `json:"leader"`

	// lag is how many entries of the log the member is behind the leader.
	// +optional
	Lag int64 `json:"lag"`
}

// Types of a host's conditions, beside [ConditionReady], which says that the host
// serves its tenants and can take others.
const (
	// ConditionDraining is True while the host takes no tenants; its message says how
	// many are still there, and why.
	ConditionDraining = "Draining"
	// ConditionLeaving is True while the host is being removed; its message says
	// what that waits for.
	ConditionLeaving = "Leaving"
)

// Reasons of a host's conditions, beside [ReasonAsExpected].
const (
	// ReasonJoining means that the host is being made a part of the installation.
	ReasonJoining = "Joining"
	// ReasonNoHeartbeat means that nothing has been heard of the host for a while.
	ReasonNoHeartbeat = "NoHeartbeat"
	// ReasonDraining means that tenants are moving away.
	ReasonDraining = "Draining"
	// ReasonDrained means that no tenant is left on the host.
	ReasonDrained = "Drained"
	// ReasonNoRoom means that no other host can take the tenants that are left.
	ReasonNoRoom = "NoRoom"
	// ReasonLeaving means that the host is being taken out of etcd and the gossip.
	ReasonLeaving = "Leaving"
	// ReasonUnsafe means that etcd would lose its majority if the host left now.
	ReasonUnsafe = "Unsafe"
)

// HostFinalizer keeps a deleted Host until its tenants are on other hosts and it is
// a part of neither etcd nor the gossip.
const HostFinalizer = "tenantd.io/leave"

// HostLostAnnotation on a Host that is being deleted says, with the value "true",
// that the machine will never come back, so that nothing waits for it to leave by
// itself. It changes nothing for a host that is Ready.
const HostLostAnnotation = "tenantd.io/lost"
