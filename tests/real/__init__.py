"""Tests against Kubernetes' own API server, scheduler and controllers, on this machine.

They are skipped unless LEASEHOLD_KUBE_BIN names the folder of `kube-apiserver`, `kube-scheduler`
and `kube-controller-manager`; `etcd` is there, too, or on PATH. `test_first_process.py` and
`test_outages.py` also need what `container_node.missing_here` names. Nothing is downloaded.
"""
