// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

// odd are objects at the edges of what validation allows, and beyond. Those that
// upstream refuses are none.
const odd = `
{apiVersion: batch/v1, kind: CronJob, metadata: {name: every, namespace: default}, spec: {schedule: "@every 1ns", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}}}
---
{apiVersion: batch/v1, kind: CronJob, metadata: {name: never, namespace: default}, spec: {schedule: "0 0 31 2 *", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}}}
---
{apiVersion: batch/v1, kind: CronJob, metadata: {name: zone, namespace: default}, spec: {schedule: "* * * * *", timeZone: "Etc/../../../etc/passwd", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}}}
---
{apiVersion: batch/v1, kind: CronJob, metadata: {name: chatham, namespace: default}, spec: {schedule: "* * * * *", timeZone: "Pacific/Chatham", startingDeadlineSeconds: 9223372036854775807, jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}}, status: {lastScheduleTime: "0001-01-01T00:00:00Z"}}
---
{apiVersion: batch/v1, kind: Job, metadata: {name: many, namespace: default}, spec: {parallelism: 0, completions: 2147483647, backoffLimit: 2147483647, activeDeadlineSeconds: 9223372036854775807, ttlSecondsAfterFinished: 2147483647, template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}
---
{apiVersion: batch/v1, kind: Job, metadata: {name: indexed, namespace: default}, spec: {completionMode: Indexed, completions: 100000, parallelism: 1, backoffLimitPerIndex: 2147483647, maxFailedIndexes: 100000, template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: Deployment, metadata: {name: stuck, namespace: default}, spec: {replicas: 2147483647, paused: true, progressDeadlineSeconds: 2147483647, minReadySeconds: 2147483646, selector: {matchLabels: {a: stuck}}, strategy: {rollingUpdate: {maxSurge: "2147483647%", maxUnavailable: "100%"}}, template: {metadata: {labels: {a: stuck}}, spec: {containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: Deployment, metadata: {name: negative, namespace: default}, spec: {replicas: -1, selector: {matchLabels: {a: negative}}, template: {metadata: {labels: {a: negative}}, spec: {containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: ordinal, namespace: default}, spec: {replicas: 1, ordinals: {start: 2147483647}, serviceName: x, selector: {matchLabels: {a: ordinal}}, template: {metadata: {labels: {a: ordinal}}, spec: {containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: partition, namespace: default}, spec: {replicas: 1, serviceName: x, updateStrategy: {rollingUpdate: {partition: 2147483647, maxUnavailable: 2147483647}}, selector: {matchLabels: {a: partition}}, template: {metadata: {labels: {a: partition}}, spec: {containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: surge, namespace: default}, spec: {updateStrategy: {rollingUpdate: {maxSurge: "100%", maxUnavailable: 0}}, selector: {matchLabels: {a: surge}}, template: {metadata: {labels: {a: surge}}, spec: {affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [x]}]}]}}}, containers: [{name: a, image: b}]}}}}
---
{apiVersion: apps/v1, kind: ReplicaSet, metadata: {name: owned, namespace: default, ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: stuck, uid: 00000000-0000-0000-0000-000000000000, controller: true, blockOwnerDeletion: true}]}, spec: {replicas: 1, selector: {matchExpressions: [{key: a, operator: DoesNotExist}, {key: b, operator: In, values: [c]}]}, template: {metadata: {labels: {b: c}}, spec: {containers: [{name: a, image: b}]}}}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: cycle, namespace: default, ownerReferences: [{apiVersion: no.such/v1, kind: Nothing, name: x, uid: a}, {apiVersion: v1, kind: Node, name: gone, uid: b}, {apiVersion: v1, kind: ConfigMap, name: cycle, uid: c, blockOwnerDeletion: true}], finalizers: [hostile.test/one, foregroundDeletion]}}
---
{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: self, namespace: default}, spec: {minReplicas: 1, maxReplicas: 2147483647, scaleTargetRef: {apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, name: self}, metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 2147483647}}}]}}
---
{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: external, namespace: default}, spec: {maxReplicas: 1, scaleTargetRef: {apiVersion: "../..", kind: "../../x", name: "x"}, behavior: {scaleUp: {stabilizationWindowSeconds: 3600, policies: [{type: Percent, value: 2147483647, periodSeconds: 1800}]}}, metrics: [{type: External, external: {metric: {name: "a/b", selector: {matchExpressions: [{key: a, operator: Exists}]}}, target: {type: Value, value: "9223372036854775807E"}}}]}}
---
{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: all, namespace: default}, spec: {minAvailable: 2147483647, selector: {}}}
---
{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: max, namespace: default}, spec: {maxUnavailable: 2147483647, selector: {}}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: junk, namespace: default, labels: {kubernetes.io/service-name: kubernetes, endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io}}, addressType: IPv4, endpoints: [{addresses: [10.0.0.1], targetRef: {kind: Pod, name: "", uid: x}, nodeName: none, zone: x, hints: {forZones: [{name: yy}]}}], ports: [{}]}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: fqdn, namespace: default, labels: {kubernetes.io/service-name: fqdn, endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io}}, addressType: FQDN, endpoints: [{addresses: [lookup.example.com]}]}
---
{apiVersion: v1, kind: Endpoints, metadata: {name: mirrored, namespace: default}, subsets: [{addresses: [{ip: 10.0.0.1, targetRef: {kind: Node, name: x}}], ports: [{port: 1, protocol: SCTP, appProtocol: "a/b"}]}, {notReadyAddresses: [{ip: "2001:db8::1"}], ports: []}]}
---
{apiVersion: v1, kind: Service, metadata: {name: mirrored, namespace: default}, spec: {clusterIP: None, ports: [{port: 1, protocol: SCTP}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: balanced, namespace: default, annotations: {service.kubernetes.io/topology-mode: Auto}}, spec: {type: LoadBalancer, selector: {x: "yy"}, loadBalancerIP: 127.0.0.1, externalIPs: [10.96.0.1], loadBalancerSourceRanges: ["0.0.0.0/0"], ports: [{port: 65535, targetPort: x}]}}
---
{apiVersion: certificates.k8s.io/v1, kind: CertificateSigningRequest, metadata: {name: junk}, spec: {request: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0KQUFBQQotLS0tLUVORCBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0K, signerName: kubernetes.io/kubelet-serving, usages: [any], expirationSeconds: 600}}
---
{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: junk}, spec: {selectors: [{cel: {expression: "device.attributes['x'].all(a, device.attributes['x'].exists(b, true))"}}]}}
---
{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: any}, spec: {}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: all, namespace: default}, spec: {devices: {requests: [{name: a, exactly: {deviceClassName: any, allocationMode: All}}, {name: b, firstAvailable: [{name: c, deviceClassName: any, count: 9223372036854775807}]}], constraints: [{matchAttribute: x.test/y}]}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: none}, spec: {driver: hostile.test, nodeName: none, pool: {name: p, generation: 9223372036854775807, resourceSliceCount: 9223372036854775807}, devices: [{name: d, attributes: {a: {version: 0.0.0}}, capacity: {c: {value: "1E"}}}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: claims, namespace: default}, spec: {resourceClaims: [{name: x, resourceClaimName: all}, {name: yy, resourceClaimTemplateName: nothing}], containers: [{name: a, image: b, resources: {claims: [{name: x}]}}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: affine, namespace: default, labels: {x: "yy"}}, spec: {containers: [{name: a, image: b, resources: {requests: {cpu: "9223372036854775807", memory: 8Ei, "x.test/y": "1"}}}], affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: "x/y", labelSelector: {matchExpressions: [{key: x, operator: NotIn, values: [""]}]}, namespaceSelector: {}}]}, nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, preference: {matchExpressions: [{key: a, operator: Gt, values: ["9223372036854775807"]}]}}]}}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: spread, namespace: default}, spec: {topologySpreadConstraints: [{maxSkew: 2147483647, minDomains: 2147483647, topologyKey: a, whenUnsatisfiable: DoNotSchedule, matchLabelKeys: [x, z]}], schedulerName: default-scheduler, containers: [{name: a, image: b, ports: [{containerPort: 1, hostPort: 1, hostIP: 0.0.0.0}]}], overhead: {cpu: "1"}, tolerations: [{operator: Exists, tolerationSeconds: -9223372036854775808}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: gated, namespace: default}, spec: {schedulingGates: [{name: x.test/a}], containers: [{name: a, image: b}], volumes: [{name: e, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOncePod], resources: {requests: {storage: "1"}}}}}}, {name: g, awsElasticBlockStore: {volumeID: x}}, {name: r, rbd: {monitors: [a], image: b}}, {name: i, iscsi: {targetPortal: "127.0.0.1:3260", iqn: iqn.2001-04.com.example:a, lun: 0}}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: tolerates, namespace: default}, spec: {nodeName: odd, tolerations: [{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 9223372036854775807}], containers: [{name: a, image: b}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: odd, labels: {topology.kubernetes.io/zone: "", kubernetes.io/hostname: other}, annotations: {node.alpha.kubernetes.io/ttl: "99999999999999999999", volumes.kubernetes.io/controller-managed-attach-detach: x, csi.volume.kubernetes.io/nodeid: "{"}}, spec: {taints: [{key: a, effect: NoExecute, timeAdded: "0001-01-01T00:00:00Z"}, {key: b, effect: NoSchedule}], providerID: "aws:///../x", unschedulable: true}, status: {capacity: {cpu: 9E, memory: "9223372036854775807E", pods: "9223372036854775807"}, allocatable: {cpu: "9E"}, images: [{sizeBytes: 9223372036854775807, names: [""]}], volumesInUse: ["kubernetes.io/csi/x^y"], volumesAttached: [{name: "x", devicePath: /dev/sda}], conditions: [{type: Ready, status: Unknown, lastHeartbeatTime: "9999-12-31T23:59:59Z"}]}}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: odd, namespace: kube-node-lease}, spec: {holderIdentity: odd, leaseDurationSeconds: 2147483647, leaseTransitions: 2147483647, renewTime: "9999-12-31T23:59:59.999999Z", acquireTime: "0001-01-01T00:00:00.000000Z"}}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: kube-scheduler, namespace: kube-system}, spec: {holderIdentity: hostile, leaseDurationSeconds: 2147483647, renewTime: "9999-12-31T23:59:59.999999Z"}}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: kube-controller-manager, namespace: kube-system}, spec: {holderIdentity: hostile, leaseDurationSeconds: 2147483647, renewTime: "9999-12-31T23:59:59.999999Z"}}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: apiserver-odd, namespace: kube-system, labels: {apiserver.kubernetes.io/identity: kube-apiserver}}, spec: {holderIdentity: hostile, leaseDurationSeconds: 1}}
---
{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: all}, spec: {cidrs: ["0.0.0.0/0"]}}
---
{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: tiny}, spec: {cidrs: ["10.96.0.1/32"]}}
---
{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: six}, spec: {cidrs: ["2001:db8::/108"]}}
---
{apiVersion: networking.k8s.io/v1, kind: IPAddress, metadata: {name: 10.96.0.77, labels: {ipaddress.kubernetes.io/managed-by: ipallocator.k8s.io, ipaddress.kubernetes.io/ip-family: IPv4}}, spec: {parentRef: {group: "", resource: services, namespace: none, name: nothing}}}
---
{apiVersion: networking.k8s.io/v1, kind: IPAddress, metadata: {name: 203.0.113.1}, spec: {parentRef: {group: "../x", resource: "y/z", name: nothing}}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: wide, namespace: default}, spec: {podSelector: {}, policyTypes: [Ingress, Egress], egress: [{to: [{ipBlock: {cidr: "0.0.0.0/0", except: ["0.0.0.0/1"]}}], ports: [{port: 1, endPort: 65535}]}]}}
---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: odd, annotations: {pv.kubernetes.io/bound-by-controller: "yes", pv.kubernetes.io/provisioned-by: kubernetes.io/host-path}}, spec: {capacity: {storage: 7E}, accessModes: [ReadWriteOnce], storageClassName: none, persistentVolumeReclaimPolicy: Delete, claimRef: {namespace: default, name: none, uid: x}, csi: {driver: "hostile.test", volumeHandle: "../../x", nodeStageSecretRef: {name: a, namespace: b}}, nodeAffinity: {required: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [none]}]}]}}}}
---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: local}, spec: {capacity: {storage: "1"}, accessModes: [ReadWriteOnce], persistentVolumeReclaimPolicy: Delete, storageClassName: none, claimRef: {namespace: default, name: gone, uid: yy}, local: {path: /tmp}, nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}}
---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: nfs}, spec: {capacity: {storage: "1"}, accessModes: [ReadWriteMany], persistentVolumeReclaimPolicy: Recycle, storageClassName: none, claimRef: {namespace: default, name: gone, uid: z}, nfs: {server: 127.0.0.1, path: /}}}
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: lost, namespace: default, annotations: {pv.kubernetes.io/bind-completed: "yes", volume.kubernetes.io/selected-node: none, volume.kubernetes.io/storage-provisioner: kubernetes.io/aws-ebs}}, spec: {volumeName: odd, storageClassName: none, accessModes: [ReadWriteOnce], resources: {requests: {storage: "1n"}}}}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: none, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}, provisioner: kubernetes.io/aws-ebs, parameters: {a: b}, volumeBindingMode: WaitForFirstConsumer, allowVolumeExpansion: true, allowedTopologies: [{matchLabelExpressions: [{key: a, values: [b]}]}]}
---
{apiVersion: storage.k8s.io/v1, kind: VolumeAttachment, metadata: {name: odd}, spec: {attacher: hostile.test, nodeName: odd, source: {persistentVolumeName: odd}}}
---
{apiVersion: storage.k8s.io/v1, kind: CSINode, metadata: {name: odd}, spec: {drivers: [{name: hostile.test, nodeID: x, allocatable: {count: 2147483647}, topologyKeys: [a]}]}}
---
{apiVersion: storage.k8s.io/v1, kind: CSIStorageCapacity, metadata: {name: odd, namespace: default}, storageClassName: none, capacity: "9E", maximumVolumeSize: 9E, nodeTopology: {matchExpressions: [{key: a, operator: Exists}]}}
---
{apiVersion: v1, kind: ResourceQuota, metadata: {name: odd, namespace: default}, spec: {hard: {"count/nothings.no.such": "1", "requests.x.test/y": "1", "none.storageclass.storage.k8s.io/persistentvolumeclaims": "9E"}, scopeSelector: {matchExpressions: [{scopeName: PriorityClass, operator: NotIn, values: [""]}]}}}
---
{apiVersion: v1, kind: LimitRange, metadata: {name: odd, namespace: default}, spec: {limits: [{type: Container, max: {cpu: 9E}, min: {cpu: "1n"}, maxLimitRequestRatio: {cpu: 9E}}, {type: "x.test/Odd", max: {pods: "1"}}]}}
---
{apiVersion: v1, kind: Secret, type: kubernetes.io/service-account-token, metadata: {name: odd, namespace: default, annotations: {kubernetes.io/service-account.name: default, kubernetes.io/service-account.uid: x}}, data: {token: AA==, namespace: AA==, ca.crt: AA==}}
---
{apiVersion: v1, kind: Secret, type: bootstrap.kubernetes.io/token, metadata: {name: bootstrap-token-abcdef, namespace: kube-system}, stringData: {token-id: "../..", token-secret: x, expiration: "not a time", usage-bootstrap-signing: "true"}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: stuck, finalizers: [hostile.test/one]}, spec: {finalizers: [hostile.test/two]}}
---
{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: lowest}, value: -2147483648, globalDefault: true, preemptionPolicy: Never}
---
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: odd}, handler: x, overhead: {podFixed: {cpu: 9E}}, scheduling: {nodeSelector: {a: b}, tolerations: [{operator: Exists}]}}
---
{apiVersion: flowcontrol.apiserver.k8s.io/v1, kind: PriorityLevelConfiguration, metadata: {name: odd}, spec: {type: Limited, limited: {nominalConcurrencyShares: 2147483647, lendablePercent: 100, borrowingLimitPercent: 0, limitResponse: {type: Queue, queuing: {queues: 10000000, handSize: 1, queueLengthLimit: 2147483647}}}}}
---
{apiVersion: flowcontrol.apiserver.k8s.io/v1, kind: FlowSchema, metadata: {name: odd}, spec: {matchingPrecedence: 2, priorityLevelConfiguration: {name: odd}, distinguisherMethod: {type: ByUser}, rules: [{subjects: [{kind: Group, group: {name: "*"}}], resourceRules: [{verbs: ["*"], apiGroups: ["*"], resources: ["*"], clusterScope: true, namespaces: ["*"]}], nonResourceRules: [{verbs: ["*"], nonResourceURLs: ["*"]}]}]}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: aggregated, labels: {rbac.authorization.k8s.io/aggregate-to-admin: "true"}}, aggregationRule: {clusterRoleSelectors: [{}]}}
---
{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.metrics.k8s.io}, spec: {group: metrics.k8s.io, version: v1, groupPriorityMinimum: 20000, versionPriority: 1000, insecureSkipTLSVerify: true, service: {namespace: default, name: kubernetes}}}
---
{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1beta1.custom.metrics.k8s.io}, spec: {group: custom.metrics.k8s.io, version: v1beta1, groupPriorityMinimum: 1, versionPriority: 1, insecureSkipTLSVerify: true, service: {namespace: default, name: nothing}}}
`
