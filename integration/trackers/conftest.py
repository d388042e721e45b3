"""Settings of the libraries that log to services."""

from __future__ import annotations

import os

# MLflow would send reports of its use, and set a variable for them in this process.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
