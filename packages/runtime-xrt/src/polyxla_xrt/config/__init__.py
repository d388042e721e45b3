"""The XRT environment: variables, addresses, workers and cores."""
