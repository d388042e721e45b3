"""Examples: one idea per file. Each runs on the runtime that the environment selects."""
