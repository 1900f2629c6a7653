"""Grafana dashboards of a service, made by code from the table of metrics.

`python -m weightsync.dashboards` writes them to `json/`; what is there is what Grafana imports or is provisioned
with (`provisioning/`). The thing to watch: every query filters by the variables `service` and `namespace`, and the
second must match series that have no such label, which is how things are outside Kubernetes.
"""
