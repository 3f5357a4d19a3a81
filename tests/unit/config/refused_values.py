# SPDX-License-Identifier: Apache-2.0
"""Values that are refused, as a user writes them, and combinations that are close to them and possible."""

# The value that a user writes, the key that is blamed, and a word of the advice.
WRONG = [
    tuple(line.split(" | "))
    for line in """\
wrokers: 3 | wrokers | unknown key; did you mean workers?
worker: 3 | worker | invalid value 3 (expected a map); did you mean workers?
worker: {count: 3} | worker.count | unknown key; keys of worker: image, resources
workers: {nodeSelector: {disk: fast}} | workers | did you mean worker.nodeSelector?
training: {epoch: 3} | training.epoch | did you mean training.epochs?
elastic: {heartbeatTimeout: 3} | elastic.heartbeatTimeout | elastic.heartbeatTimeoutSeconds
local: {cpu: 3} | local.cpu | keys of local: startMethod, threads, gpusPerWorker
epochs: 3 | epochs | did you mean training.epochs or evaluation.epochs?
gpu: 1 | gpu | did you mean worker.gpus or worker.gpuMemory or local.gpusPerWorker?
worker: {gpu: 1} | worker.gpu | did you mean worker.gpus
training: {workers: 3} | training.workers | did you mean workers or data.workers?
min_workers: 3 | min_workers | did you mean minWorkers?
Training: {} | Training | did you mean training?
workers: three | workers | an integer
workers: -1 | workers | at least 0
workers: 2.5 | workers | an integer
workers: true | workers | invalid value true (expected an integer
workers: '3' | workers | invalid value "3" (expected an integer
workers: null | workers | missing value
workers: [1] | workers | an integer
minWorkers: 0 | minWorkers | at least 1
maxWorkers: 0 | maxWorkers | at least 1
model: digits | model | a map
model: {module: ''} | model.module | not empty
model: {module: 7} | model.module | a string
training: {epochs: 0} | training.epochs | at least 1
training: {batchSize: 0} | training.batchSize | at least 1
training: {batchSize: 16777216} | training.batchSize | less than 16777216
training: {seed: -1} | training.seed | at least 0
training: {seed: 2147483648} | training.seed | less than 2147483648
training: null | training | missing value
training: {epochs: null} | training.epochs | missing value
training: {onNonFinite: ignore} | training.onNonFinite | stop, skip
training: {loadBalancing: fair} | training.loadBalancing | none, speed
training: {loadBalancing: even} | training.loadBalancing | renamed; use none
elastic: {prefork: imported} | elastic.prefork | renamed; use true
training: {onInexactLoss: no} | training.onInexactLoss | warn, refuse, allow
data: {shuffle: 'yes please'} | data.shuffle | true or false
data: {shuffle: 1} | data.shuffle | true or false
data: {bufferMebibytes: 0} | data.bufferMebibytes | at least 1
data: {bufferMebibytes: 128MB} | data.bufferMebibytes | a quantity such as 128Mi, or an integer (MiB)
ps: {memoryMebibytes: 0Mi} | ps.memoryMebibytes | a quantity such as 128Mi
journal: {maxBytes: 900000} | journal.maxBytes | at least 1000000
elastic: {heartbeatTimeoutSeconds: 0.1} | elastic.heartbeatTimeoutSeconds | at least 0.5
elastic: {joinDelaySeconds: -1} | elastic.joinDelaySeconds | at least 0
elastic: {joinDelaySeconds: '1'} | elastic.joinDelaySeconds | a number
elastic: {joinDelaySeconds: true} | elastic.joinDelaySeconds | a number
elastic: {startupTimeoutSeconds: 0} | elastic.startupTimeoutSeconds | more than 0
elastic: {gracePeriodSeconds: soon} | elastic.gracePeriodSeconds | a number
elastic: {maxFailures: -1} | elastic.maxFailures | at least 0
logLevel: loud | logLevel | debug, info, warning, error
local: {startMethod: thread} | local.startMethod | fork, spawn
local: {gpusPerWorker: 2} | local.gpusPerWorker | auto, or a number from 0 to 1
local: {gpusPerWorker: -0.5} | local.gpusPerWorker | auto, or a number from 0 to 1
local: {gpusPerWorker: '1.5'} | local.gpusPerWorker | auto, or a number from 0 to 1
local: {gpusPerWorker: all} | local.gpusPerWorker | auto, or a number from 0 to 1
training: [1, 2] | training | a map
elastic: {heartbeatTimeoutSeconds: '0.4'} | elastic.heartbeatTimeoutSeconds | at least 0.5
elastic: {startupTimeoutSeconds: '0.0'} | elastic.startupTimeoutSeconds | more than 0
elastic: {joinDelaySeconds: '-0.5'} | elastic.joinDelaySeconds | at least 0
elastic: {joinDelaySeconds: '0.5s'} | elastic.joinDelaySeconds | a number
onDemandWorkers: 120% | onDemandWorkers | or a share such as 50%
onDemandWorkers: -1 | onDemandWorkers | or a share such as 50%
onDemandWorkers: half | onDemandWorkers | or a share such as 50%
ttlSecondsAfterFinished: -2 | ttlSecondsAfterFinished | at least -1
model: {source: 3} | model.source | a string
data: {mountPath: data} | data.mountPath | an absolute path
worker: {gpuMemory: 0} | worker.gpuMemory | a quantity such as 4Gi, or an integer (MiB)
worker: {gpuMemory: half} | worker.gpuMemory | a quantity such as 4Gi, or an integer (MiB)
worker: {gpuMemory: 0.5} | worker.gpuMemory | a quantity such as 4Gi, or an integer (MiB)
worker: {resource: {}} | worker.resource | did you mean worker.resources?
schedulerName: fast | schedulerName | did you mean master.schedulerName or worker.schedulerName?
worker: {nodeSelector: {disk: 1}} | worker.nodeSelector.disk | a string
worker: {env: {A: b}} | worker.env | a list
worker: {env: [A]} | worker.env.0 | a map
worker: {resources: large} | worker.resources | a map
worker: {terminationGracePeriodSeconds: -1} | worker.terminationGracePeriodSeconds | at least 0
master: {image: edl-master} | master.image | a map
master: {image: {digest: sha256:12}} | master.image.digest | 64 hex digits
master: {image: {repository: ''}} | master.image.repository | not empty
image: {tag: 1.5} | image.tag | a string
image: {pullPolicy: Sometimes} | image.pullPolicy | Always, IfNotPresent, Never
image: {pullSecrets: [mine]} | image.pullSecrets.0 | a map
priorityClass: {value: 2000000000} | priorityClass.value | at most 1000000000
priorityClass: {preemptionPolicy: Always} | priorityClass.preemptionPolicy | Never
networkPolicy: {enabled: 1} | networkPolicy.enabled | true or false
rbac: true | rbac | a map
service: {type: Headless} | service.type | ClusterIP, NodePort, LoadBalancer
serviceAccount: {name: mine} | serviceAccount.name | did you mean
metrics: {serviceMonitor: true} | metrics.serviceMonitor | a map
output: {accessModes: []} | output.accessModes | a list
output: {accessModes: [ReadWrite]} | output.accessModes.0 | ReadWriteOnce
output: {size: 5} | output.size | a string
token: secret | token | a map
extraObjects: {} | extraObjects | a list
fullnameOverride: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx | fullnameOverride | 40
commonLabels: {team: 7} | commonLabels.team | a string
worker: {resources: {requests: {cpu: lots}}} | worker.resources.requests.cpu | a quantity such as 500m
master: {resources: {limits: {memory: -1}}} | master.resources.limits.memory | a quantity
worker: {resources: {limit: {cpu: 1}}} | worker.resources.limit | keys of worker.resources: limits
output: {size: 5 Gi} | output.size | a string such as 5Gi
image: {registry: my registry} | image.registry | without spaces
image: {registry: 'https://r.example.org/team'} | image.registry | without spaces or a scheme
worker: {image: {repository: 'edl worker'}} | worker.image.repository | without spaces
image: {tag: 'a b'} | image.tag | a string of letters
data: {existingClaim: My_Claim} | data.existingClaim | a name of a-z, 0-9
token: {existingSecret: a..b} | token.existingSecret | a name of a-z, 0-9
token: {key: a/b} | token.key | a key of letters
serviceAccount: {worker: {name: Me}} | serviceAccount.worker.name | a name of a-z, 0-9
worker: {priorityClassName: -low} | worker.priorityClassName | a name of a-z, 0-9
nameOverride: Edl | nameOverride | at most 40 of a-z
fullnameOverride: 4edl | fullnameOverride | a letter first
commonLabels: {team: a team} | commonLabels.team | 63 letters
worker: {extraContainers: [{image: busybox}]} | worker.extraContainers.0.name | missing value
master: {initContainers: [{name: My_init}]} | master.initContainers.0.name | a name of a-z
worker: {env: [{value: x}]} | worker.env.0.name | missing value
worker: {volumes: [{emptyDir: {}}]} | worker.volumes.0.name | missing value
worker: {volumeMounts: [{name: a}]} | worker.volumeMounts.0.mountPath | missing value
image: {pullSecrets: [{}]} | image.pullSecrets.0.name | missing value
worker: {podTemplate: {nodeName: n1}} | worker.podTemplate.nodeName | keys of worker.podTemplate: metadata
worker: {podTemplate: []} | worker.podTemplate | a map
worker: {podTemplate: {spec: [x]}} | worker.podTemplate.spec | a map
worker: {podTemplate: {spec: {containers: {worker: {}}}}} | worker.podTemplate.spec.containers | a list
worker: {podTemplate: {spec: {volumes: [{}]}}} | worker.podTemplate.spec.volumes.0.name | missing
master: {podTemplate: {metadata: {labels: {a: 1}}}} | master.podTemplate.metadata.labels.a | a string
metrics: {podMonitor: {interval: 15}} | metrics.podMonitor.interval | a duration such as 15s
metrics: {podMonitor: {interval: soon}} | metrics.podMonitor.interval | a duration such as 15s
elastic: {startupTimeoutSeconds: 1.0e+300} | elastic.startupTimeoutSeconds | at most 100000000
elastic: {joinDelaySeconds: '100000000.5'} | elastic.joinDelaySeconds | a number
maxWorkers: 1.0e+300 | maxWorkers | at most 2147483647
worker: {terminationGracePeriodSeconds: 3000000000} | worker.terminationGracePeriodSeconds | at most
""".splitlines()
]
IMPOSSIBLE = [
    (
        "{data: {features: [a]}}",
        'and data.test is "" and data.predict is "": it tells how to read the files that these name',
    ),
    ("{minWorkers: 5, maxWorkers: 3, workers: 3}", "minWorkers is 5 and maxWorkers is 3"),
    ("{workers: 9, maxWorkers: 8}", "workers is 9 and maxWorkers is 8"),
    ("{workers: 2, minWorkers: 3}", "workers is 2 and minWorkers is 3"),
    ("{mode: ps, data: {maxBadRecords: 3}}", 'mode is "ps" and data.maxBadRecords is 3'),
    ("{mode: ps, training: {loadBalancing: speed}}", 'mode is "ps" and training.loadBalancing is "speed"'),
    (
        "{training: {deterministic: true}, mode: hybrid}",
        'training.deterministic is true and mode is "hybrid"',
    ),
    ("{training: {deterministic: true, compression: float16}}", "gradients are rounded once"),
    ("{training: {deterministic: true, accumulateSteps: 2}}", "each block of a step is computed by itself"),
    ("{training: {deterministic: true}, data: {maxBadRecords: 1}}", "a block must have all of its records"),
    ("{training: {deterministic: true}, local: {threads: 0}}", "depend on the number of threads"),
    ("{training: {deterministic: true}, workers: 9}", "more workers would have no records"),
    ("{mode: ps, training: {compression: float16}}", 'mode is "ps" and training.compression is "float16"'),
    (
        "{mode: ps, initFrom: {path: /c, state: everything}}",
        'mode is "ps" and initFrom.state is "everything"',
    ),
    (
        "{mode: predict, ps: {servers: 2}}",
        'mode is "predict" and ps.servers is 2 and initFrom.path is ""',
    ),
    ("{mode: hybrid, ps: {servers: 1, replicas: 2}}", "ps.servers is 1 and ps.replicas is 2"),
    (
        "elastic: {joinDelaySeconds: 180}",
        "elastic.joinDelaySeconds is 180 and elastic.startupTimeoutSeconds is 180",
    ),
    ("data: {existingClaim: a, hostPath: /b}", 'data.existingClaim is "a" and data.hostPath is "/b"'),
    ("model: {existingClaim: a, hostPath: /b}", 'model.existingClaim is "a" and model.hostPath is "/b"'),
    ("output: {existingClaim: a, hostPath: /b}", 'output.existingClaim is "a" and output.hostPath is "/b"'),
    (
        "checkpoint: {existingClaim: a, hostPath: /b, dir: /c}",
        'checkpoint.existingClaim is "a" and checkpoint.hostPath is "/b"',
    ),
    ("checkpoint: {existingClaim: a}", 'checkpoint.existingClaim is "a" and checkpoint.dir is ""'),
    ("checkpoint: {hostPath: /b, dir: c}", 'checkpoint.hostPath is "/b" and checkpoint.dir is "c"'),
    ("output: {size: 1Gi, existingClaim: a}", 'output.size is "1Gi" and output.existingClaim is "a"'),
    ("output: {size: 1Gi, hostPath: /b}", 'output.size is "1Gi" and output.hostPath is "/b"'),
    ("token: {existingSecret: mine, value: abc}", 'token.existingSecret is "mine" and token.value is set'),
    (
        "metrics: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}}",
        "metrics.serviceMonitor.enabled is true and metrics.podMonitor.enabled is true",
    ),
    (
        "worker: {resources: {requests: {memory: 3Gi}, limits: {memory: 2500M}}}",
        'worker.resources.requests.memory is "3Gi" and worker.resources.limits.memory is "2500M"',
    ),
    (
        "master: {resources: {requests: {cpu: 1.5}, limits: {cpu: 1499m}}}",
        'master.resources.requests.cpu is 1.5 and master.resources.limits.cpu is "1499m"',
    ),
]
# One place in a pod is taken twice.
TAKEN = [
    (
        "{data: {existingClaim: a, mountPath: /x}, model: {hostPath: /b, mountPath: /x/}}",
        'model.mountPath is "/x/", as data.mountPath is',
    ),
    (
        "{data: {existingClaim: a}, worker: {volumeMounts: [{name: m, mountPath: /data}]}}",
        'worker.volumeMounts.0.mountPath is "/data", as data.mountPath is',
    ),
    (
        "{checkpoint: {existingClaim: a, dir: /data}, data: {existingClaim: b}}",
        'data.mountPath is "/data", as checkpoint.dir is',
    ),
    (
        "master: {volumeMounts: [{name: m, mountPath: /tmp}]}",
        'master.volumeMounts.0.mountPath is "/tmp": edl mounts a volume of its own there',
    ),
]
POSSIBLE = [
    "{data: {predict: new.csv, label: price, options: {delimiter: ;}, validationFraction: 0}}",
    "{workers: 0, minWorkers: 3}",
    "{workers: 3, minWorkers: 3, maxWorkers: 3}",
    "{minWorkers: 4, maxWorkers: 4}",
    "{local: {gpusPerWorker: '0.25'}, worker: {gpuMemory: 4096}}",
    "{data: {bufferMebibytes: 64}, journal: {maxBytes: 1048576}, ps: {memoryMebibytes: 0}}",
    "{data: {bufferMebibytes: 0064Mi}, ps: {memoryMebibytes: 2Ti}, worker: {gpuMemory: 1M}}",
    "journal: {maxBytes: 1.5G}",
    "elastic: {heartbeatTimeoutSeconds: 0.5, joinDelaySeconds: 0, gracePeriodSeconds: 0}",
    "{data: {mountPath: /x}, model: {mountPath: /x}}",  # neither is mounted
    "worker: {resources: {requests: {memory: 2Gi, cpu: '.5'}, limits: {memory: 2147483648, cpu: 5e-1}}}",
    "worker: {resources: {requests: {cpu: 3}, limits: {cpu: null}}}",
    "worker: {podTemplate: {metadata: null, spec: {containers: null}}}",
]
