"""What a worker's cores are: this machine's CPU, its TPU chips, or the devices of another PJRT plugin.

`choice` reads the options before the worker starts. In the serving process, `cpu` or `plugin` then starts the
engine of each job.
"""
