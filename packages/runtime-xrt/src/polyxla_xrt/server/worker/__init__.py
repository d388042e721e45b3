"""The worker: a supervisor, and the process it forks, which leases this machine's cores to one job at a time.

`supervisor` holds the port, `process` serves gRPC, `service` answers the calls, `leases` queues jobs,
`leased_job` runs one of them and `session` carries out the commands of one of its processes.
"""
