"""Configuration: the XRT environment, the waits that a user may set, and credential files."""
