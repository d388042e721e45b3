"""The two services of a TPU node: `worker` owns cores for jobs, `mesh` is where a job's replicas meet."""
