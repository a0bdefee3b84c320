"""The guardian: the process that runs an agent's workers, and the agent's handle for it.

The guardian process runs without `regrow`. So its own modules (`process`, `reaper`, `records`,
`spawn`, `protocol`, `procfs`) import only the standard library, and each other by relative imports.
The first worker waits for its start, so they import as little as possible.
`client` and `events` are the agent's side.
"""
